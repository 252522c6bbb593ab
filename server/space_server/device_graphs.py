"""Device steps as CUDA graphs: the launches of a step, recorded once and replayed by one call.

A kind of step is taken eagerly the first time: that compiles what is to be compiled, and nobody waits for a step that
brings nothing. The second time it is captured and replayed. All graphs share one memory pool: they run one after the
other, and what each leaves behind lies outside of it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from space_server.device_step import StepKind

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
        self._pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self._captures = True
        self.num_replays = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, kind: StepKind) -> Tensor:
        """One step; its result, until the next one."""
        if kind not in self._graphs and kind in self._num_cells and self._captures:
            self._capture(kind)
        graph = self._graphs.get(kind)
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

    def _capture(self, kind: StepKind) -> None:
        """Record this kind of step; where that cannot be done, no step is recorded any more."""
        begun = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._into_result(kind)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self._captures = False
            _log.warning("steps are launched one kernel at a time, for they cannot be captured: %s", error)
            return
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
