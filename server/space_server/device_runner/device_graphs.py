"""CUDA graphs of device steps: the launches of a step, captured once and replayed by one call.

The first step of a kind runs eagerly, which compiles its kernels; the second is captured and replayed. All graphs
share one memory pool, because they run one after the other and their results are copied out of it.

A step in which the host waits for the device cannot be captured (experts that are counted on the host, for example),
and a failed capture costs more than the step. So the first kind runs eagerly once more, watched for such waits.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from space_server.device_runner.device_forward import StepKind
from space_server.machine.memory import give_back_unused, is_out_of_memory

_WAITED = "called a synchronizing CUDA operation"
"""Text of torch's warning about a host wait. Its once-per-process notice of the mode reads differently."""

MOST_GRAPHS = 64
"""Graphs kept; the least recently used is dropped. A graph of a large model holds some megabytes on the device."""

_log = logging.getLogger(__name__)


class StepGraphs:
    """Runs device steps, by replaying graphs where possible."""

    def __init__(self, take: Callable[[StepKind], Tensor], result: Tensor, *, most: int = MOST_GRAPHS) -> None:
        """`result` [cells]: buffer at a fixed address that `take`'s results, shorter ones, are copied to."""
        self._take, self._result, self._most = take, result, most
        self._graphs: OrderedDict[StepKind, torch.cuda.CUDAGraph] = OrderedDict()
        self._num_cells: dict[StepKind, int] = {}  # size of the result of each kind that has run
        self._pool = _new_pool()
        self._captures: bool | None = None  # whether steps can be captured; None: not known yet
        self._eager: set[StepKind] = set()  # kinds whose graph did not fit in memory
        self.num_replays = 0
        self.was_usual = False  # whether the last step compiled and captured nothing

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, kind: StepKind) -> Tensor:
        """Run one step; the result is valid until the next call."""
        graph, is_new = self._graphs.get(kind), kind not in self._num_cells
        may_capture = not is_new and self._captures is not False and kind not in self._eager
        self.was_usual = graph is not None or not (is_new or may_capture)
        if graph is None and may_capture and self._captures is None:
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

    def _into_result(self, kind: StepKind) -> None:
        found = self._take(kind)
        self._num_cells[kind] = len(found)
        self._result[: len(found)].copy_(found)

    def _watch(self, kind: StepKind) -> None:
        """Run this kind and detect whether the host waits for the device in it."""
        with warnings.catch_warnings(record=True) as message:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._into_result(kind)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [str(one.message) for one in message if _WAITED in str(one.message)]
        self._captures = not waits
        if waits:
            _log.warning(
                "device steps run without CUDA graphs: the host waits for the device %d times in a step", len(waits)
            )

    def _capture(self, kind: StepKind) -> torch.cuda.CUDAGraph | None:
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
                self._captures = False
                _log.warning("device steps run without CUDA graphs, because they cannot be captured: %s", message)
            return None
        self._graphs[kind] = graph
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)
        _log.info(
            "captured a step of batch size %d, %d drafts and masks %s, with %d pages in %.3f s; %d graphs",
            kind.batch_size,
            kind.layout.num_drafts,
            kind.layout.masks,
            kind.num_pages,
            time.perf_counter() - begun,
            len(self._graphs),
        )
        return graph

    def _end_failed_capture(self, stream: torch.cuda.Stream) -> None:
        """Restore the stream, and end the allocator's capture: torch does neither where the end of a capture fails."""
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # it ended already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)

    def _is_held(self) -> bool:
        """Whether the pool holds an empty segment that no graph uses. A failed capture keeps its pool for good, in
        torch without pytorch/pytorch#190348.
        """
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return any(segment["segment_pool_id"] == self._pool and not segment["active_size"] for segment in segments)

    def _free_graphs(self, kind: StepKind) -> None:
        """Run this kind eagerly from now on and drop all graphs; kinds still in use are captured again."""
        self._eager.add(kind)
        torch.cuda.synchronize()  # some may run
        self._graphs.clear()
        give_back_unused()
        if self._is_held():
            torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)
            give_back_unused()
        self._pool = _new_pool()
        _log.warning("no memory to capture a step of batch size %d; it runs without a CUDA graph", kind.batch_size)


def _new_pool() -> Any:
    """Return a memory pool for graphs; None without a GPU."""
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
