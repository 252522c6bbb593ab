"""The sampling distribution of SPACE §3, written again: numpy, float64, one row at a time; and its exact enumeration.

An oracle: it shares no code with the ops that it checks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt
from space_proto import worker_pb2 as pb

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
    """The stages before the temperature."""
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
    """Of the last dimension."""
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
