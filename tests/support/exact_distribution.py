"""The exact next-token distribution after all processors, a model of eight ids, and tests of fit."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from space_common.worker.client import ClientSequence, SequenceRequest, WorkerClient
from space_kernels.sampling.sampler import SampledTokens, process
from space_kernels.sampling.sampling_params import SamplingRows
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.drafts import DraftSource
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

Floats = npt.NDArray[np.float64]
NextLogits = Callable[[Sequence[Sequence[int]]], Floats]
"""Prefixes of ids [N][...] -> raw logits [N, V] of the token behind each."""


def choice_probabilities(
    logits: Floats,
    prefix: Sequence[int],
    num_prompt: int,
    sampling: pb.Sampling,
    *,
    end_ids: Collection[int] = (),
    banned_ids: Collection[int] = (),
) -> Floats:
    """Probability of each id as the token behind `prefix`. logits [V] raw -> [V], sum 1."""
    z = _edited(logits, prefix, num_prompt, sampling, end_ids, banned_ids)
    if sampling.temperature == 0.0:
        greedy: Floats = (np.arange(len(z)) == int(np.argmax(z))).astype(np.float64)
        return greedy
    z = z / sampling.temperature
    first = np.argsort(-z, kind="stable")  # equal values: the lower id first
    if sampling.top_k:
        z[first[sampling.top_k :]] = -np.inf
    if sampling.top_p:
        reached = np.cumsum(softmax(z)[first])
        z[first[1:][reached[:-1] >= sampling.top_p]] = -np.inf
    if sampling.min_p:
        p = softmax(z)
        z[p < sampling.min_p * p.max()] = -np.inf
    if sampling.typical_p:
        p = softmax(z)
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(p)
            entropy = np.nansum(p * surprise)
            distance = np.where(p > 0, np.abs(surprise - entropy), np.inf)
        nearest = np.argsort(distance, kind="stable")
        reached = np.cumsum(p[nearest])
        z[nearest[1:][reached[:-1] >= sampling.typical_p]] = -np.inf
    return softmax(z)


def _edited(
    logits: Floats,
    prefix: Sequence[int],
    num_prompt: int,
    sampling: pb.Sampling,
    end_ids: Collection[int],
    banned_ids: Collection[int],
) -> Floats:
    z = np.array(logits, dtype=np.float64)
    output = Counter(prefix[num_prompt:])
    for id_ in range(len(z)):
        z[id_] += sampling.logit_bias.get(id_, 0.0)
        outside = bool(sampling.allowed_ids) and id_ not in sampling.allowed_ids
        early = len(prefix) - num_prompt < sampling.min_tokens and id_ in end_ids
        if outside or early or id_ in banned_ids or _closes_bad_word(id_, prefix, sampling):
            z[id_] = -np.inf
        if sampling.repetition_penalty and id_ in prefix:
            z[id_] *= 1 / sampling.repetition_penalty if z[id_] > 0 else sampling.repetition_penalty
        z[id_] -= sampling.presence_penalty * (output[id_] > 0) + sampling.frequency_penalty * output[id_]
    return z


def _closes_bad_word(id_: int, prefix: Sequence[int], sampling: pb.Sampling) -> bool:
    for run in sampling.bad_words:
        *head, last = run.ids
        if last == id_ and list(prefix[len(prefix) - len(head) :]) == head:
            return True
    return False


def softmax(z: Floats) -> Floats:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    p: Floats = e / e.sum(axis=-1, keepdims=True)
    return p


def joint_distribution(
    next_logits: NextLogits,
    prompt: Sequence[int],
    depth: int,
    sampling: pb.Sampling,
    *,
    vocab_size: int,
    end_ids: Collection[int] = (),
    banned_ids: Collection[int] = (),
) -> Floats:
    """Probability of every run of `depth` ids behind the prompt, by enumeration: [V, V, ...] (depth of them).

    A run that ends early (at an end id) keeps its whole probability in the cell filled up with the end id.
    """
    distribution = np.zeros((vocab_size,) * depth)
    alive: dict[tuple[int, ...], float] = {(): 1.0}
    for level in range(depth):
        prefixes = [[*prompt, *run] for run in alive]
        rows = next_logits(prefixes)
        grown: dict[tuple[int, ...], float] = {}
        for (run, mass), prefix, logits in zip(alive.items(), prefixes, rows, strict=True):
            p = choice_probabilities(logits, prefix, len(prompt), sampling, end_ids=end_ids, banned_ids=banned_ids)
            for id_ in np.flatnonzero(p):
                longer = (*run, int(id_))
                if int(id_) in end_ids:
                    distribution[longer + (int(id_),) * (depth - level - 1)] += mass * p[id_]
                else:
                    grown[longer] = mass * float(p[id_])
        alive = grown
    for run, mass in alive.items():
        distribution[run] += mass
    return distribution


def chi_square_p(observed: npt.NDArray[np.int64], distribution: Floats, *, least_expected: float = 5.0) -> float:
    """Probability that counts drawn from `distribution` lie at least as far from it as `observed`. Both of one shape.

    Cells with fewer than `least_expected` expected counts are pooled; a count in an impossible cell gives 0.
    """
    counts, p = observed.reshape(-1).astype(np.float64), distribution.reshape(-1)
    if counts[p == 0].any():
        return 0.0
    expected = p * counts.sum()
    rare = expected < least_expected
    groups = [(counts[~rare], expected[~rare])]
    if expected[rare].sum() >= least_expected:
        groups.append((counts[rare].sum(keepdims=True), expected[rare].sum(keepdims=True)))
    statistic = sum(float(((got - want) ** 2 / want).sum()) for got, want in groups)
    freedom = sum(len(want) for _, want in groups) - 1
    return chi_square_tail(statistic, freedom)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic) for chi-square with that many degrees of freedom."""
    import torch  # its incomplete gamma function; numpy has none

    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def counts_of(runs: Sequence[Sequence[int]], *, vocab_size: int, depth: int) -> npt.NDArray[np.int64]:
    """How often each run of `depth` ids occurred: [V, V, ...]. Shorter runs are filled up with their last id."""
    counts = np.zeros((vocab_size,) * depth, dtype=np.int64)
    for run in runs:
        counts[tuple(itertools.islice(itertools.chain(run, itertools.repeat(run[-1])), depth))] += 1
    return counts


VOCABULARY = 8
MASK_IDS = (6, 7)
LIVE_IDS = tuple(range(6))
BLOCK_SIZE = 16


def octal_checkpoint(path: Path, *, seed: int = 0) -> Path:
    """A random Llama of 8 ids, two of them masks, whose next-token distribution is neither flat nor certain."""
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            gain = 1.2 if "lm_head" in name else 1.0
            weight.data = torch.randn(weight.shape, generator=generator) * (gain * weight.shape[-1] ** -0.5)
    model.save_pretrained(path)
    file = path / "config.json"
    section = {"num_masks": len(MASK_IDS), "mask_token_ids": list(MASK_IDS), "adapter": None, "draft_head": None}
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"space": section}), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Draws:
    """Many runs of tokens behind one prompt, one per seed."""

    runs: list[list[int]]
    num_drafted: int
    num_accepted: int


def draw(
    model: SpaceModel,
    prompt: Sequence[int],
    sampling: pb.Sampling,
    *,
    depth: int,
    num_runs: int,
    batch_size: int = 500,
    draft_source: DraftSource | None = None,
    first_seed: int = 0,
) -> Draws:
    """`num_runs` runs of `depth` tokens with seeds first_seed, first_seed+1, …, `batch_size` at once, drafts on.

    Its limit is one token further, so that whole chains are laid out; it is released as soon as it has `depth`.
    """
    num_pages = -(-(len(prompt) + depth + 4) // BLOCK_SIZE)
    worker = Worker(
        model, num_blocks=batch_size * num_pages, block_size=BLOCK_SIZE, max_sequences=batch_size,
        max_draft_length=len(MASK_IDS), max_prefill_rows=batch_size * len(prompt),
        controller=FixedLayout.full(len(MASK_IDS)), draft_source=draft_source,
    )  # fmt: skip
    client = WorkerClient(worker, max_prefill_rows=batch_size * len(prompt), automatic=True)
    records = []
    for begin in range(0, num_runs, batch_size):
        for seed in range(begin, min(begin + batch_size, num_runs)):
            seeded = pb.Sampling()
            seeded.CopyFrom(sampling)
            seeded.seed = first_seed + seed
            limits = pb.Limits(max_tokens=depth + 1)
            record = ClientSequence(
                SequenceRequest(tuple(prompt), seeded, limits, max_draft_length=len(MASK_IDS), slots_ahead=4)
            )
            records.append(record)
            client.submit(record)
        while client.running:
            client.step()
            for seq_id, record in client.running.items():
                if len(record.tokens) >= depth and not record.finish:
                    client.release(seq_id)
    verifications = [verification for record in records for verification in record.verifications]
    return Draws(
        [record.tokens[:depth] for record in records],
        num_drafted=sum(drafted for drafted, _ in verifications),
        num_accepted=sum(accepted for _, accepted in verifications),
    )


class DenseLogits:
    """Raw next-token logits from stock transformers, the oracle of the enumeration."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float64, local_files_only=True)
        self._model.eval()

    @torch.inference_mode()
    def __call__(self, prefixes: Sequence[Sequence[int]]) -> Floats:
        """Prefixes of one length [N][n] -> [N, V]."""
        logits = self._model(torch.tensor([list(ids) for ids in prefixes]), use_cache=False).logits[:, -1]
        rows: Floats = logits.double().numpy()
        return rows


class UniformDrafts:
    """A draft source whose distribution is known: every id that can be sampled is as likely as the others."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def propose(self, seq_id: int, ids: Sequence[int], max_drafts: int) -> Sequence[int]:
        return [int(id_) for id_ in self._rng.choice(LIVE_IDS, min(max_drafts, len(MASK_IDS)))]


class RejectionRule:
    """A test double of the choice at the chain rows: accept a draft with probability p/q, else draw anew.

    `residual` True draws from the residual max(p - q, 0), which is lossless; False from p itself, as the published
    SPACE code does, which is not (SPACE §3). It takes the place of `sample_rows`: where it accepts, the choice is the
    draft. Drafts must come from UniformDrafts.
    """

    def __init__(self, seed: int, *, residual: bool) -> None:
        self._rng, self._residual = np.random.default_rng(seed), residual
        self._q = np.isin(np.arange(VOCABULARY), LIVE_IDS) / len(LIVE_IDS)

    def __call__(self, logits: Tensor, step_rows: SamplingRows, banned_ids: Tensor) -> SampledTokens:
        p = softmax(process(logits, step_rows, banned_ids).double().numpy())
        rows = [row for _, row in step_rows.rows(lambda params: True)]
        # The next row's tail ends with the draft that this row judges; a sequence's last row judges none.
        judged = [n + 1 < len(rows) and len(rows[n + 1].tail) == len(row.tail) + 1 for n, row in enumerate(rows)]
        chosen = []
        for n, row in enumerate(rows):
            weights = p[n]
            if judged[n]:
                draft = rows[n + 1].tail[len(row.tail)]
                if self._rng.random() < weights[draft] / self._q[draft]:
                    chosen.append(draft)
                    continue
                if self._residual:
                    weights = np.maximum(weights - self._q, 0)
                    weights = weights / weights.sum()
            chosen.append(int(self._rng.choice(VOCABULARY, p=weights)))
        return SampledTokens(torch.tensor(chosen), torch.ones(len(rows), dtype=torch.bool))
