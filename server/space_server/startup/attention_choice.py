"""Selects the attention backend: the one asked for, or the one measured to be fastest on the model's shapes.

Each usable backend is timed on one layer's attention of synthetic steps: plain decoding and the checkpoint's whole
draft layout, at short and long contexts, for one sequence and a batch, and a prompt chunk. In each case a backend's
time is divided by the best one's, so that long cases do not outweigh short ones; the smallest weighted mean is
selected:

    whole layout    1/2    most steps of a server whose drafts are worth it
    plain           1/4    the fallback in large batches
    prompt chunk    1/4    determines the time to first token

Cases of one kind weigh the same. Where one backend is faster with mask rows and another without, each has its steps,
unless exact results are asked for. On a GPU the steps that a server replays as a CUDA graph are measured so; prompts,
which it launches kernel by kernel, in wall time. A backend that raises, or whose result is not near the reference's, is
left out and named in the log.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from space_kernels.attention.attention import QKV, Attention, AttentionSpec, KVPages
from space_kernels.attention.torch_backend import space_attention as reference
from space_kernels.attention_backends import (
    BACKENDS,
    AttentionNeed,
    Backend,
    UnusableAttention,
    available_backends,
    backend_named,
    installed_version,
    joint,
)
from space_kernels.dispatch import Ops, ops_for
from space_kernels.fp8 import nearest
from space_kernels.paging.step_rows import StepRows
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.model_facts import ModelFacts
from torch import Tensor

SECONDS = 0.4
"""Time for measuring one backend, without compilation."""

GRAPH_CALLS = 16
"""Layers of one graph: its launch, some 10 µs, is shared by them."""

NEAR = 0.03
"""Relative score difference below which the backend named first is kept."""

MOST_BYTES = 512 * 1024**2
"""Bound on the pages of one case; fewer sequences are used where all of them need more."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A synthetic step."""

    kind: str  # plain, whole, prompt
    num_sequences: int
    context: int  # slots written before
    num_chain: int  # rows of each sequence's chain
    num_masks: int  # masks of each group, one group per chain row; 0: none

    def __str__(self) -> str:
        return f"{self.kind} {self.num_sequences}×{self.context}"


WEIGHTS = {"whole": 0.5, "plain": 0.25, "prompt": 0.25}


def cases(num_masks: int, window: int) -> list[AttentionCase]:
    """Return what is measured for a model with `num_masks` masks per group, within its context window."""
    found = []
    for num_sequences, context in ((1, 1024), (1, 8192), (16, 1024)):
        found.append(AttentionCase("plain", num_sequences, context, 1, 0))
        if num_masks:
            found.append(AttentionCase("whole", num_sequences, context, num_masks + 1, num_masks))
    found.append(AttentionCase("prompt", 1, 1024, 512, 0))
    fits = [case for case in found if case.context + case.num_chain + 2 * case.num_masks <= window]
    return fits or [AttentionCase("plain", 1, max(0, window - 1), 1, 0)]


@dataclass(frozen=True)
class AttentionChoice:
    """The selected attention backend, and the reasons."""

    backend: Backend
    attention: Attention
    seconds: Mapping[str, Mapping[AttentionCase, float]] = field(default_factory=dict)  # measured, by backend name
    absent: Mapping[str, str] = field(default_factory=dict)  # why not usable, and the cure, by backend name

    @property
    def name(self) -> str:
        """The backend's name, as in /info."""
        return self.backend.name

    def __str__(self) -> str:
        """One line for the log."""
        parts = [f"attention: {self.name}"]
        if self.seconds:
            measured = [
                f"{name} " + ", ".join(f"{case} {1e6 * seconds:.0f}" for case, seconds in of.items())
                for name, of in self.seconds.items()
            ]
            parts.append(f"µs per layer: {'; '.join(measured)}")
        if self.absent:
            parts.append("not used: " + "; ".join(f"{name} ({why})" for name, why in self.absent.items()))
        return " | ".join(parts)


def choose_attention(
    asked: str,
    facts: ModelFacts,
    *,
    block_size: int,
    exact: bool = False,
    backends: Mapping[str, Backend] = BACKENDS,
    installed: Callable[[str], str | None] = installed_version,
    clock: Callable[[], float] = time.perf_counter,
    need: AttentionNeed | None = None,
) -> AttentionChoice:
    """Return the backend that `--attention` asks for; `auto` measures where there is a choice. Raises
    UnusableAttention. `need`: None derives it from the device."""
    if need is None:
        need = AttentionNeed.on(
            facts.device,
            num_heads=facts.num_heads,
            kv_heads=facts.kv_heads,
            head_dim=facts.head_dim,
            dtype=facts.dtype,
            block_size=block_size,
            exact=exact,
            fp8_kv=facts.fp8_kv,
            odd_values=facts.has_odd_values,
            is_chunked=facts.is_chunked,
        )
    if asked != "auto":
        backend = backend_named(asked, need, installed=installed, backends=backends)
        try:
            return AttentionChoice(backend, backend.load(need))
        except Exception as error:  # a package that is installed and broken may raise anything
            raise UnusableAttention(f"--attention {asked}: {_first_line(error)}. Or use --attention auto.") from error
    if need.capability is None:
        return AttentionChoice(backends["torch"], backends["torch"].load(need))
    found, absent = available_backends(need, installed=installed, backends=backends)
    candidates = [backend for backend in found if backend.name != "torch"]
    return _fastest(candidates, absent, need, cases(facts.most_masks, facts.window), backends["torch"], clock)


def choose_ops(facts: ModelFacts, *, asked: str, block_size: int, exact: bool = False) -> Ops:
    """Return the model's operations with the attention that `asked` selects, and log the choice.
    Raises ValueError that names the cure. With several ranks `auto` is not measured, because all must use the same."""
    ops = ops_for(facts.device, exact=exact, dtype=facts.dtype, fp8_kv=facts.fp8_kv)
    if asked == "auto" and facts.num_ranks > 1:
        _log.info(
            "attention: %s, not measured: %d ranks share the model and must agree", ops.attention, facts.num_ranks
        )
        return ops
    if asked == "auto" and facts.device.type == "cpu":
        _log.info("attention: %s", ops.attention)
        return ops
    choice = choose_attention(asked, facts, block_size=block_size, exact=exact)
    _log.info("%s", choice)
    if choice.name == ops.attention:
        return ops
    attend = choice.backend.attend(choice.attention)
    return replace(ops, attention=choice.name, space_attention=choice.attention, attend=attend)


def _fastest(
    candidates: Sequence[Backend],
    absent: dict[str, str],
    need: AttentionNeed,
    wanted: Sequence[AttentionCase],
    fallback: Backend,
    clock: Callable[[], float],
) -> AttentionChoice:
    """Return the candidate with the best score, or the fallback if none works. Raises UnusableAttention."""
    loaded: dict[str, Attention] = {}
    try:
        steps = [MadeUpAttentionStep.of(case, need) for case in wanted]
        expected = [step.run(reference) for step in steps]
    except torch.OutOfMemoryError:
        usual = next((one for one in candidates if one.name == "triton"), fallback)
        absent |= {one.name: "no memory to try it in" for one in candidates if one is not usual}
        _refuse_unfit(usual, need, absent)
        return AttentionChoice(usual, usual.load(need), {}, absent)
    for backend in candidates:
        try:
            attention = backend.load(need)
            for case, step, result in zip(wanted, steps, expected, strict=True):
                _check(case, step.run(attention), result)
            loaded[backend.name] = attention
        except Exception as error:  # libraries compile and load at the first call, and may raise anything
            absent[backend.name] = f"failed: {type(error).__name__}: {_first_line(error)}"
    captured = {one.name for one in candidates if one.captures and need.device.type == "cuda"}
    seconds = _measure(loaded, captured, absent, wanted, steps, need.device, clock)
    if not loaded:
        _refuse_unfit(fallback, need, absent)
        return AttentionChoice(fallback, fallback.load(need), {}, absent)
    scored = scores(seconds, may_join=not need.exact)
    least = min(scored.values())
    chains, masks = (
        next(one for one in candidates if one.name == name)
        for name in next(pair for pair in scored if scored[pair] <= (1.0 + NEAR) * least)
    )
    if chains is masks:
        return AttentionChoice(chains, loaded[chains.name], seconds, absent)
    return AttentionChoice(*joint(chains, masks, need), seconds, absent)


def _refuse_unfit(last: Backend, need: AttentionNeed, absent: Mapping[str, str]) -> None:
    """Raise UnusableAttention if the remaining backend does not fulfil what was asked for."""
    if need.exact and (why := last.refusal(need, installed_version)) is not None:
        others = "; ".join(f"{name}: {what}" for name, what in absent.items() if name != last.name)
        raise UnusableAttention(f"No attention is left. {last.name} {why}. The others: {others or 'none'}.")


def scores(seconds: Mapping[str, Mapping[AttentionCase, float]], *, may_join: bool) -> dict[tuple[str, str], float]:
    """Return the weighted mean of times relative to the best; 1 is best in every case.

    By the names of the backend of steps without masks and of that of steps with some: each alone first, then, with
    `may_join`, each two.
    """
    measured = list(next(iter(seconds.values())))
    best = {case: min(of[case] for of in seconds.values()) for case in measured}
    kinds = {kind: [case for case in measured if case.kind == kind] for kind in {case.kind for case in measured}}
    total = sum(WEIGHTS[kind] for kind in kinds)
    alone = [(name, name) for name in seconds]
    joined = [pair for pair in itertools.permutations(seconds, 2) if may_join and "whole" in kinds]
    return {
        (chains, masks): sum(
            WEIGHTS[kind]
            / total
            * statistics.fmean(seconds[masks if kind == "whole" else chains][case] / best[case] for case in members)
            for kind, members in kinds.items()
        )
        for chains, masks in (*alone, *joined)
    }


def _check(case: AttentionCase, result: Tensor, expected: Tensor) -> None:
    """Raise ArithmeticError if a backend's result is wrong: a broken build must not be selected."""
    off = (result.float() - expected.float()).abs().max().item()
    bound = 16 * torch.finfo(result.dtype).eps
    if not off <= bound:
        raise ArithmeticError(f"off by {off:.3g} from the reference in {case}; the bound is {bound:.3g}")


def _measure(
    loaded: dict[str, Attention],
    captured: Collection[str],
    absent: dict[str, str],
    wanted: Sequence[AttentionCase],
    steps: Sequence[MadeUpAttentionStep],
    device: torch.device,
    clock: Callable[[], float],
) -> dict[str, dict[AttentionCase, float]]:
    """Return the least seconds of a call, by name and case. Backends take turns; each gets its share of the time, and
    at least three turns. One that raises moves from `loaded` to `absent`. `captured`: names of those whose decoding
    steps are CUDA graphs."""
    found: dict[str, dict[AttentionCase, float]] = {name: {} for name in loaded}
    for case, step in zip(wanted, steps, strict=True):
        turns: dict[str, tuple[Callable[[], object], int]] = {}
        until, num_rounds = clock() + len(loaded) * SECONDS / len(wanted), 0
        while num_rounds < 3 or (num_rounds < 50 and clock() < until):
            num_rounds += 1
            for name, attention in list(loaded.items()):
                try:
                    if name not in turns:
                        as_graph = name in captured and case.kind != "prompt"
                        turns[name] = step.graph(attention) if as_graph else (partial(step.run, attention), 1)
                    call, num_calls = turns[name]
                    begun = clock()
                    call()
                    _wait(device)
                except Exception as error:  # as above
                    absent[name] = f"failed: {type(error).__name__}: {_first_line(error)}"
                    del loaded[name], found[name]
                    continue
                taken = (clock() - begun) / num_calls
                found[name][case] = min(found[name].get(case, taken), taken)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class MadeUpAttentionStep:
    """One layer's attention of a case, on random values."""

    rows: StepRows
    qkv: QKV
    pages: KVPages
    num_rows: int

    @classmethod
    def of(cls, case: AttentionCase, need: AttentionNeed) -> MadeUpAttentionStep:
        """Build as many of the case's sequences as fit in `MOST_BYTES` of pages, each with its own pages."""
        size, device = need.block_size, need.device
        each = -(-(case.context + case.num_chain) // size)
        page_bytes = 2 * need.kv_heads * size * need.head_dim * (1 if need.fp8_kv else need.dtype.itemsize)
        num_sequences = max(1, min(case.num_sequences, MOST_BYTES // (each * page_bytes)))
        num_blocks = each * num_sequences
        layout = DraftLayout.full(case.num_masks, case.num_masks) if case.num_masks else DraftLayout.plain()
        firsts = range(0, num_blocks, each)
        batch = ForwardBatch.build(
            [Segment([0] * case.num_chain, case.context, range(first, first + each), layout) for first in firsts],
            block_size=size,
            mask_ids=[0] * case.num_masks,
            device=device,
        )
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, need.head_dim, generator=generator, device=device, dtype=need.dtype)

        def pages() -> Tensor:
            made = drawn(num_blocks, need.kv_heads, size)
            return nearest(made) if need.fp8_kv else made

        num_rows = len(batch.ids)
        return cls(
            batch.rows,
            QKV(*(drawn(num_rows, count) for count in (need.num_heads, need.kv_heads, need.kv_heads))),
            KVPages(pages(), pages()),
            batch.num_rows,
        )

    def graph(self, attention: Attention) -> tuple[Callable[[], None], int]:
        """Capture some calls, which another has prepared for. Return what replays them, and their number."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                self.run(attention)
        return graph.replay, GRAPH_CALLS

    def run(self, attention: Attention) -> Tensor:
        """Return [rows, H, D] without padding."""
        spec = AttentionSpec(self.qkv.query.shape[-1] ** -0.5)
        return attention(self.qkv, self.pages, self.rows, spec)[: self.num_rows]


def _first_line(error: Exception) -> str:
    return (str(error).strip().partition("\n")[0] or "no reason given")[:160]
