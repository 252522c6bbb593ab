"""One step of a batch whose state is on the device: tensors in, tensors out, no host synchronization.

    rows -> forward -> head over chain rows -> sample -> verify -> masks -> head over the accepted groups' rows
         -> sample, or draft head -> synthetic acceptance, if enabled -> advance -> result, log-probabilities

The step's kind fixes every shape, so a kind can be captured as a CUDA graph and replayed without Python. Batch
indices without a sequence are computed as dead rows.

result of a step    [batch size · width]    [sequences with logprobs · rows · (1 + 2T)]
                     of every sequence       of each row: the sampled id's, the T most probable ids, and theirs
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from space_kernels.dispatch import StepOps
from space_kernels.paging.step_rows import PatternTables, StepTables
from space_kernels.sampling.device_sampling import Stages, log_probabilities
from space_kernels.sampling.sampler import IdLogprobs
from space_kernels.step.draft_head import candidates, propose, sampling_columns
from space_kernels.step.state import (
    DeviceMaskRows,
    DeviceRows,
    StepIndex,
    StepState,
    bonus_rows,
    chain_choices,
    mask_choices,
)
from space_kernels.step.synthetic_acceptance import SyntheticAcceptanceTensors
from space_kernels.step.verification import StepVerification
from space_model.free_memory import is_out_of_memory
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import BatchPattern, ForwardBatch, Segment, batch_pattern
from space_model.model_facts import ModelFacts
from space_model.networks.network import PagedKV
from torch import Tensor

from space_server.machine.memory import give_back_unused
from space_server.model_runner import StepModel

MOST_TOP = 20  # most alternatives per id in a device step; sequences that want more are stepped on the host
_TOPS = (0, 5, MOST_TOP)
_LEAST_PAGES = 16
_ASKING = 4
_ROWS_AT_ONCE = 64  # rows whose whole vocabulary is sorted at once


def num_cells(num_with_logprobs: int, num_rows: int, num_top: int) -> int:
    """Return the number of int32 values in a report."""
    return num_with_logprobs * num_rows * (1 + 2 * num_top)


def round_up_top(num_top: int) -> int:
    """Round the number of alternatives up to one of three sizes: few sizes, few graphs."""
    return min(top for top in _TOPS if top >= num_top)


def round_up_count(count: int, batch_size: int) -> int:
    """Round the number of sequences that want log-probabilities up to a power of 4, at most `batch_size`."""
    size = min(count, 1)
    while size < count:
        size *= _ASKING
    return min(size, batch_size)


def page_sizes(most: int) -> list[int]:
    """Return the numbers of page-table entries that steps have, ascending: 16 times a power of 4, and `most`."""
    sizes, size = list[int](), _LEAST_PAGES
    while size < most:
        sizes.append(size)
        size *= 4
    return [*sizes, most]


def round_up_pages(count: int, most: int) -> int:
    """Round page-table entries up to one of `page_sizes`. Attention skips unused entries."""
    return next((size for size in page_sizes(most) if size >= count), most)


def report(raw: Tensor, ids: Tensor, num_top: int) -> Tensor:
    """Return log-probabilities of sampled ids as a flat int32 tensor that holds floats as their bits.
    raw [A, J, V] logits, ids [A, J] (any value where nothing was sampled) -> [num_cells(A, J, T)]"""
    V = raw.shape[2]
    rows, chosen = raw.flatten(0, 1), ids.flatten().clamp(0, V - 1)
    parts = []
    for some, of_some in zip(torch.split(rows, _ROWS_AT_ONCE), torch.split(chosen, _ROWS_AT_ONCE), strict=True):
        logprobs, top_ids, top = log_probabilities(some, of_some, num_top)
        bits = logprobs[:, None].view(torch.int32)
        parts.append(torch.cat([bits, top_ids.to(torch.int32), top.contiguous().view(torch.int32)], dim=1))
    return torch.cat(parts).flatten()


class LogprobReport:
    """A report, decoded on the host."""

    def __init__(self, cells: Tensor, num_with_logprobs: int, num_rows: int) -> None:
        """cells [num_cells(num_asking, num_rows, T)] int32"""
        shape = num_with_logprobs, num_rows, -1
        self._ids, self._floats = cells.view(shape).tolist(), cells.view(torch.float32).view(shape).tolist()

    def of(self, number: int, ids: Sequence[int], num_top: int) -> list[IdLogprobs]:
        """Return those of the ids that the `number`-th sequence with log-probabilities emitted."""
        width = len(self._ids[number][0]) // 2  # T
        count = min(num_top, width)
        found = []
        for id_, row, floats in zip(ids, self._ids[number], self._floats[number], strict=False):
            top = tuple(floats[1 + width : 1 + width + count])
            found.append(IdLogprobs(id_, floats[0], tuple(row[1 : 1 + count]), top))
        return found


@dataclass(frozen=True, slots=True)
class StepKind:
    """Everything that determines the shapes of a step: the key of a CUDA graph."""

    batch_size: int  # padded; batch indices 0 .. batch_size-1 run
    layout: DraftLayout  # of each
    stages: Stages
    num_pages: int  # page-table entries per sequence that attention reads
    num_with_logprobs: int = 0  # sequences whose log-probabilities are reported
    num_top: int = 0  # alternatives of each of their ids
    adapter: int | None = None  # adapter of the masks or the recurrent head; None: the checkpoint's own

    def __str__(self) -> str:
        layout = self.layout
        return (
            f"a step of batch size {self.batch_size}, {layout.num_drafts} drafts, masks {layout.masks} and "
            f"{layout.head_drafts} drafts of the head, with {self.num_pages} pages"
        )


Forward = Callable[[StepState, StepIndex, DeviceRows, StepKind], Tensor]
"""[R, hidden]: runs the batch's rows through the network. Dead rows may hold any values."""


class TensorForward:
    """Runs the network on rows whose positions only the device knows. Its attention must read StepTables."""

    def __init__(self, model: StepModel, kv: PagedKV) -> None:
        self._model, self._kv = model, kv
        self._pattern = lru_cache(maxsize=None)(self._new_pattern)  # CUDA graphs read its tensors, so none is evicted

    def __call__(self, state: StepState, index: StepIndex, laid_out: DeviceRows, kind: StepKind) -> Tensor:
        pattern = self._pattern(kind.batch_size, kind.layout, kind.adapter)
        tables = StepTables(
            PatternTables.of(pattern.rows, laid_out.starts.device),
            laid_out.starts,
            state.page_table[:, : kind.num_pages],
            state.block_size,
            laid_out.num_written,
        )
        batch = ForwardBatch.of_tensors(laid_out.ids, laid_out.positions, pattern, tables)
        return self._model.forward(batch, self._kv)

    def _new_pattern(self, batch_size: int, layout: DraftLayout, adapter: int | None) -> BatchPattern:
        facts = self._model.facts
        runs = (((layout.num_drafts + 1, layout, adapter, None), batch_size),)
        return batch_pattern(runs, facts.mask_ids, _adapter_masks(facts), facts.device)


class HostForward:
    """Reads the rows on the host and runs only the live ones: for a CPU, where reading is free."""

    def __init__(self, model: StepModel, kv: PagedKV) -> None:
        self._model, self._kv = model, kv

    def __call__(self, state: StepState, index: StepIndex, laid_out: DeviceRows, kind: StepKind) -> Tensor:
        facts, layout = self._model.facts, kind.layout
        k, per_sequence = layout.num_drafts, layout.num_masks
        ids, starts, running = laid_out.ids.numpy(), laid_out.starts.numpy(), laid_out.running.numpy()
        num_live, num_pages, table = laid_out.num_live.numpy(), state.num_pages.numpy(), state.page_table.numpy()
        segments, batch_indices = [], []
        for batch_index in running.nonzero()[0]:
            start, count = int(starts[batch_index]), int(num_live[batch_index])
            own = layout.with_drafts(count).within(start, facts.window)
            first = batch_index * (k + 1)
            chain = ids[first : first + count + 1].tolist()
            segments.append(
                Segment(chain, start, table[batch_index, : num_pages[batch_index]].astype("int64"), own, kind.adapter)
            )
            batch_indices.append(batch_index)
        if not segments:
            return torch.zeros(index.num_padded, facts.hidden_size, dtype=facts.dtype)
        batch = ForwardBatch.build(
            segments, block_size=state.block_size, mask_ids=facts.mask_ids, adapter_masks=_adapter_masks(facts)
        )
        found = self._model.forward(batch, self._kv)
        source: list[int] = []
        target: list[int] = []
        for number, batch_index in enumerate(batch_indices):
            source += batch.chain_rows[number]
            target += range(batch_index * (k + 1), batch_index * (k + 1) + len(batch.chain_rows[number]))
            begin = index.num_chain_rows + batch_index * per_sequence
            for group, rows in enumerate(batch.mask_rows[number]):
                source += rows
                target += range(begin, begin + len(rows))
                begin += layout.masks[group]
        hidden = found.new_zeros(index.num_padded, found.shape[1])
        hidden[torch.tensor(target)] = found[torch.tensor(source)]
        return hidden


def _adapter_masks(facts: ModelFacts) -> tuple[int, ...]:
    return tuple(adapter.num_masks for adapter in facts.adapters)


class DeviceForward:
    """Runs steps on one state, in place."""

    def __init__(
        self,
        model: StepModel,
        state: StepState,
        ops: StepOps,
        forward: Forward,
        logprob_indices: Tensor,
        synthetic_tensors: SyntheticAcceptanceTensors | None = None,
    ) -> None:
        """logprob_indices [S] int64: batch indices whose log-probabilities are reported; a step's kind says how many of
        them. `synthetic_tensors`: known continuations that replace drafts; None: drafts are the masks' own."""
        self._logprob_indices = logprob_indices
        self._model, self._ops, self._forward = model, ops, forward
        facts = model.facts
        device = state.root.device
        self._banned = torch.tensor(sorted(set(facts.mask_ids)), dtype=torch.int64, device=device)
        self._mask_ids = torch.tensor(facts.mask_ids, dtype=torch.int64, device=device) if facts.mask_ids else None
        self._first = lru_cache(maxsize=None)(state.first)
        self._synthetic_tensors = (
            None if synthetic_tensors is None else lru_cache(maxsize=None)(synthetic_tensors.first)
        )
        # CUDA graphs read its tensors, so none is evicted
        self._index = lru_cache(maxsize=None)(lambda batch_size, layout: StepIndex.of(batch_size, layout, device))

    @torch.inference_mode()
    def take(self, kind: StepKind) -> Tensor:
        """Run one step; return its result on the device as one flat int32 tensor. It holds `step_state.advance`'s
        [batch_size, result_width(K)], then `device_logprobs.report`'s for those that want it."""
        ops, model, stages = self._ops, self._model, kind.stages
        state, index = self._first(kind.batch_size), self._index(kind.batch_size, kind.layout)
        laid_out = ops.rows(state, index, self._mask_ids if kind.adapter is None else None)
        hidden = self._forward(state, index, laid_out, kind)  # [R, hidden]
        num_choices = index.num_drafts + 1
        logits = model.logits(hidden[: index.num_chain_rows]).contiguous().view(kind.batch_size, num_choices, -1)
        logprob_indices = self._logprob_indices[: kind.num_with_logprobs]
        raw = logits.index_select(0, logprob_indices) if kind.num_with_logprobs else None
        before = chain_choices(state, index, stages)
        choice = ops.sample(logits, state.batch_params, stages, before, self._banned, state.counts)
        verification = ops.verify_step(state, index, laid_out, choice)
        drafts, num_drafts = self._drafts(state, index, kind, verification, hidden)
        result = ops.advance(state, laid_out, verification, drafts, num_drafts, self._banned).flatten()
        if raw is None:
            return result
        return torch.cat([result, report(raw, choice.ids.index_select(0, logprob_indices), kind.num_top)])

    def _drafts(
        self, state: StepState, index: StepIndex, kind: StepKind, verification: StepVerification, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the next step's drafts [S, K'] and how many there are, [S]."""
        if not index.most_drafts:
            return verification.emitted[:, :0], torch.zeros_like(verification.lengths)
        if index.head_drafts:
            group = bonus_rows(state, index, verification)
            drafts = self._of_head(state, index, kind, verification, hidden[group.rows[:, 0]])
        else:
            group = self._ops.masks(state, index, verification)
            drafts = self._of_masks(state, index, kind, verification, hidden, group)
        if self._synthetic_tensors is not None:
            synthetic_tensors = self._synthetic_tensors(index.num_sequences)
            drafts = self._ops.synthetic_accept(
                synthetic_tensors, state.num_known, state.num_prompt, verification, group.first, drafts
            )
        return drafts, group.count

    def _of_masks(
        self,
        state: StepState,
        index: StepIndex,
        kind: StepKind,
        verification: StepVerification,
        hidden: Tensor,
        group: DeviceMaskRows,
    ) -> Tensor:
        """Return the drafts [S, K'] that the masks of `group` make."""
        ops, model, batch_params, stages = self._ops, self._model, state.batch_params, kind.stages
        S, most = index.num_sequences, index.most_drafts
        masks = hidden[group.rows]  # [S, K', hidden]
        logits = model.logits(masks.flatten(0, 1)).contiguous().view(S, most, -1)
        before = mask_choices(state, verification, most, stages)
        head = model.draft_head_of(kind.adapter)
        if head is None:
            return ops.sample(logits, batch_params, stages, before, self._banned, state.counts).ids

        def edit(raw: Tensor) -> Tensor:
            return ops.edit(raw, batch_params, stages, before, self._banned, state.counts)

        ids, offsets = candidates(logits, stages, edit)
        last = (verification.lengths - 1).clamp(min=0)[:, None]
        return propose(
            masks,
            ids,
            offsets,
            verification.emitted.gather(1, last)[:, 0],
            before.positions,
            batch_params.key,
            sampling_columns(batch_params, stages),
            w1=head.w1,
            w2=head.w2,
            embedding_scale=head.embedding_scale,
            form=head.form,
            embed=model.embed,
            logits_of=model.logits_of,
            sample=ops.sample_candidates,
        )

    def _of_head(
        self, state: StepState, index: StepIndex, kind: StepKind, verification: StepVerification, hidden: Tensor
    ) -> Tensor:
        """Return the drafts [S, K'] that the recurrent head makes from hidden [S, hidden], the rows that sampled the
        bonus tokens."""
        ops, model, stages = self._ops, self._model, kind.stages
        head = model.recurrent_head_of(kind.adapter)
        assert head is not None, "a layout with drafts of the head is chosen only where there is one"
        last = (verification.lengths - 1).clamp(min=0)[:, None]
        previous, current = verification.emitted.gather(1, last)[:, 0], hidden
        before = mask_choices(state, verification, index.head_drafts, stages)
        drafts = []
        for number in range(index.head_drafts):
            current = head.advance(current, model.embed(previous))
            logits = head.logits(current)  # [S, D]
            if stages == _GREEDY:
                previous = head.best(logits)
            else:
                whole, prefixes = head.widened(logits, model.facts.vocab_size)[:, None], before.at(number)
                found = ops.sample(whole, state.batch_params, stages, prefixes, self._banned, state.counts)
                previous = found.ids[:, 0]
            drafts.append(previous)
        return torch.stack(drafts, dim=1)


_GREEDY = Stages()
"""No logits processor and no sampling."""

_WAITED = "called a synchronizing CUDA operation"
"""Text of torch's warning about a host wait. Its once-per-process notice of the mode reads differently."""

MOST_GRAPHS = 64
"""Graphs kept; the least recently used is dropped. A graph of a large model holds some megabytes on the device."""

_log = logging.getLogger(__name__)


GraphKey = TypeVar("GraphKey", bound=Hashable)
"""What determines the shapes of a step; `str` names it in the log."""


class StepGraphs(Generic[GraphKey]):
    """Runs device steps, by replaying CUDA graphs where possible: a step's launches, captured once and replayed by one
    call.

    The first step of a kind runs eagerly, which compiles its kernels; the second is captured and replayed. All graphs
    share one memory pool, because they run one after the other and their results are copied out of it. A step in which
    the host waits for the device cannot be captured (experts that are counted on the host, for example), and a failed
    capture costs more than the step. So the first kind of each type runs eagerly once more, watched for such waits.
    """

    def __init__(self, take: Callable[[GraphKey], Tensor], result: Tensor, *, most: int = MOST_GRAPHS) -> None:
        """`result` [cells]: buffer at a fixed address that `take`'s results, shorter ones, are copied to."""
        self._take, self._result, self._most = take, result, most
        self._graphs: OrderedDict[GraphKey, torch.cuda.CUDAGraph] = OrderedDict()
        self._num_cells: dict[GraphKey, int] = {}  # size of the result of each kind that has run
        self._pool = _new_pool()
        self._captures: dict[type, bool] = {}  # whether kinds of a type can be captured, once that is known
        self._eager: set[GraphKey] = set()  # kinds whose graph did not fit in memory
        self.num_replays = 0
        self.was_usual = False  # whether the last step compiled and captured nothing

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, kind: GraphKey) -> bool:
        return kind in self._graphs

    @property
    def lacks_memory(self) -> bool:
        """Whether some graph did not fit in memory."""
        return bool(self._eager)

    def can_capture(self, kind: GraphKey) -> bool:
        """Whether a graph of this kind exists, or may be captured as far as is known."""
        return self._captures.get(type(kind), True) and kind not in self._eager

    def __call__(self, kind: GraphKey) -> Tensor:
        """Run one step; the result is valid until the next call."""
        graph, is_new = self._graphs.get(kind), kind not in self._num_cells
        may_capture = not is_new and self.can_capture(kind)
        self.was_usual = graph is not None or not (is_new or may_capture)
        if graph is None and may_capture and type(kind) not in self._captures:
            self._watch(kind)
            return self._result[: self._num_cells[kind]]
        if graph is None and may_capture:
            graph = self._capture(kind)
        if graph is None:
            self._into_result(kind)
        else:
            self._graphs.move_to_end(kind)
            graph.replay()
            self.num_replays += 1
        return self._result[: self._num_cells[kind]]

    def _into_result(self, kind: GraphKey) -> None:
        found = self._take(kind)
        self._num_cells[kind] = len(found)
        self._result[: len(found)].copy_(found)

    def _watch(self, kind: GraphKey) -> None:
        """Run this kind and detect whether the host waits for the device in it."""
        with warnings.catch_warnings(record=True) as message:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._into_result(kind)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [str(one.message) for one in message if _WAITED in str(one.message)]
        self._captures[type(kind)] = not waits
        if waits:
            _log.warning(
                "%s and its like run without CUDA graphs: the host waits for the device %d times", kind, len(waits)
            )

    def _capture(self, kind: GraphKey) -> torch.cuda.CUDAGraph | None:
        """Capture this kind. If it cannot be captured, stop capturing; if memory is short, skip this kind only."""
        begun, stream = time.perf_counter(), torch.cuda.current_stream()
        graph, message, wants_memory = torch.cuda.CUDAGraph(), None, False
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._into_result(kind)
        except RuntimeError as error:
            self._end_failed_capture(stream)
            message = str(error)
            wants_memory = any(is_out_of_memory(one) for one in (error, error.__context__) if one is not None)
        if message is not None:  # the recording is unreferenced only after the except block
            graph.reset()
            if wants_memory:
                self._free_graphs(kind)
            else:
                self._captures[type(kind)] = False
                _log.warning("%s and its like run without CUDA graphs: they cannot be captured: %s", kind, message)
            return None
        self._graphs[kind] = graph
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)
        _log.info("captured %s in %.3f s; %d graphs", kind, time.perf_counter() - begun, len(self._graphs))
        return graph

    def _end_failed_capture(self, stream: torch.cuda.Stream) -> None:
        """Restore the stream, and end the allocator's capture: torch does neither where the end of a capture fails."""
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # it ended already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)

    def _is_held(self) -> bool:
        """Whether the pool holds an empty segment that no graph uses. A failed capture keeps its pool for good, in
        torch without pytorch/pytorch#190348."""
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return any(segment["segment_pool_id"] == self._pool and not segment["active_size"] for segment in segments)

    def _free_graphs(self, kind: GraphKey) -> None:
        """Run this kind eagerly from now on and drop all graphs; kinds still in use are captured again."""
        self._eager.add(kind)
        torch.cuda.synchronize()  # some may run
        self._graphs.clear()
        give_back_unused()
        if self._is_held():
            torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)
            give_back_unused()
        self._pool = _new_pool()
        _log.warning("no memory to capture %s; it runs without a CUDA graph", kind)


def _new_pool() -> Any:
    """Return a memory pool for graphs; None without a GPU."""
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
