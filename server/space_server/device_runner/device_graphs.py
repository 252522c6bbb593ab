"""Device steps as CUDA graphs: the launches of a step, recorded once and replayed by one call.

A kind of step is taken eagerly the first time: that compiles what is to be compiled, and nobody waits for a step that
brings nothing. The second time it is captured and replayed. All graphs share one memory pool: they run one after the
other, and what each leaves behind lies outside of it.

A step in which the host waits for the device cannot be captured (experts that are counted on the host are such), and to
try it costs more than the step: the first kind is taken eagerly once more, watched, before anything is captured.
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
"""How torch names a wait. That it looks for them it says, too, once in a process, and speaks of synchronizing then."""

MOST_GRAPHS = 64
"""Kept; the least recently used go. A graph of a large model holds some megabytes on the device."""

_log = logging.getLogger(__name__)


class StepGraphs:
    """Takes device steps, by replaying them where it can."""

    def __init__(self, take: Callable[[StepKind], Tensor], result: Tensor, *, most: int = MOST_GRAPHS) -> None:
        """`result` [cells]: where `take`'s results, shorter ones, are copied to; its address never changes."""
        self._take, self._result, self._most = take, result, most
        self._graphs: OrderedDict[StepKind, torch.cuda.CUDAGraph] = OrderedDict()
        self._num_cells: dict[StepKind, int] = {}  # of the results of each kind that was taken
        self._pool = _new_pool()
        self._captures: bool | None = None  # None: not known yet
        self._eager: set[StepKind] = set()  # those whose graphs there is no memory for
        self.num_replays = 0
        self.was_usual = False  # the last step took the time that its kind takes: nothing was compiled or captured

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, kind: StepKind) -> Tensor:
        """One step; its result, until the next one."""
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
        """Take this kind of step, and see whether the host waits for the device in it."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._into_result(kind)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [str(one.message) for one in said if _WAITED in str(one.message)]
        self._captures = not waits
        if waits:
            _log.warning("steps are launched one kernel at a time: %d times in one the host waits", len(waits))

    def _capture(self, kind: StepKind) -> torch.cuda.CUDAGraph | None:
        """Record this kind of step. Where that cannot be done, none is recorded any more; where there is no memory for
        it, this one is not.
        """
        begun, stream = time.perf_counter(), torch.cuda.current_stream()
        graph, said, wants_memory = torch.cuda.CUDAGraph(), None, False
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._into_result(kind)
        except RuntimeError as error:
            self._let_go(stream)
            said = str(error)
            wants_memory = any(is_out_of_memory(one) for one in (error, error.__context__) if one is not None)
        if said is not None:  # only here the error has let go of what was recorded
            graph.reset()
            if wants_memory:
                self._make_room(kind)
            else:
                self._captures = False
                _log.warning("steps are launched one kernel at a time, for they cannot be captured: %s", said)
            return None
        self._graphs[kind] = graph
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)
        _log.info(
            "captured a step of %d lines, %d drafts and masks %s, with %d pages in %.3f s; %d graphs",
            kind.num_lines,
            kind.layout.num_drafts,
            kind.layout.masks,
            kind.num_pages,
            time.perf_counter() - begun,
            len(self._graphs),
        )
        return graph

    def _let_go(self, stream: torch.cuda.Stream) -> None:
        """Be where a capture that failed began: torch leaves its stream, and the allocator in the belief that it goes
        on, where the end of a capture fails, too.
        """
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # it is over already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)

    def _is_held(self) -> bool:
        """Whether a part of the pool in which nothing lies could not be given back, though no graph has it: a capture
        that fails holds its pool for good, in torch without pytorch/pytorch#190348.
        """
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return any(segment["segment_pool_id"] == self._pool and not segment["active_size"] for segment in segments)

    def _make_room(self, kind: StepKind) -> None:
        """Take this kind eagerly from now on, and let go of all graphs: those that are needed are captured again."""
        self._eager.add(kind)
        torch.cuda.synchronize()  # some may run
        self._graphs.clear()
        give_back_unused()
        if self._is_held():
            torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)
            give_back_unused()
        self._pool = _new_pool()
        _log.warning(
            "there is no memory to capture a step of %d lines: it is launched kernel by kernel", kind.num_lines
        )


def _new_pool() -> Any:
    """Where graphs have their memory; None where there is no GPU."""
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
