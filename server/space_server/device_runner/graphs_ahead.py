"""Which CUDA graphs are captured before a request needs them, and in which order.

A graph is captured in the second or third step of its kind, which takes 20 to 60 ms more than a replay on an H200. What
usual requests need is captured while no sequence is here: no step waits for it, and no result depends on it. Each step
of this work runs one kind once, without sequences or prompts, so a request waits for one compilation or capture at
most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from space_kernels.sampling.device_sampling import Stages
from space_model.free_memory import is_out_of_memory
from space_model.geometry.draft_layout import DraftLayout

from space_server.device_runner.device_batch import round_up_stages
from space_server.device_runner.device_forward import MOST_GRAPHS, StepGraphs, StepKind, page_sizes
from space_server.device_runner.prompt_graphs import PROMPT_BUCKETS, PromptForward, PromptKind
from space_server.machine.memory import give_back_unused

MOST_AHEAD = MOST_GRAPHS * 3 // 4
"""Graphs that are kept when no more are captured ahead. The others are left for what requests bring, so that a graph
captured ahead never replaces one that was used."""

LEAST_FREE = 256 * 1024**2
"""Bytes of the device that stay free: a graph takes some megabytes beside the pool that all share, and one that does
not fit costs all the others."""

AHEAD_STAGES = (Stages(), Stages(samples=True), round_up_stages(Stages(samples=True, cuts=True)))
"""Greedy decoding; sampling; sampling with top-k or top-p."""

_log = logging.getLogger(__name__)


def sizes_ahead(batch_sizes: Iterable[int], max_pages: int) -> list[tuple[int, int]]:
    """Return batch sizes with page-table sizes, those that are needed first in front: few sequences, short ones."""
    sizes = [(size, pages) for size in batch_sizes for pages in page_sizes(max_pages)]
    return sorted(sizes, key=lambda one: (one[0] * one[1], one[0]))


def kinds_ahead(
    sizes: Iterable[tuple[int, int]],
    layouts_of: Callable[[int], Sequence[DraftLayout]],
    prompts: PromptForward,
    adapter: int | None,
) -> Iterator[StepKind | PromptKind]:
    """Yield kinds in the order in which they are captured: at each size, every layout that steps of so many sequences
    are likely to have, and so many small prompts. `adapter`: of the masks or the recurrent head."""
    for size, num_pages in sizes:
        layouts = layouts_of(size)
        for stages in AHEAD_STAGES:
            for layout in layouts:
                yield StepKind(size, layout, stages, num_pages, adapter=adapter if layout.makes_drafts else None)
        masks = dict.fromkeys(layout.num_masks > 0 for layout in layouts)
        for has_masks in masks:
            for bucket in PROMPT_BUCKETS:
                if bucket[0] == size:
                    yield prompts.kind(bucket, num_pages, {adapter} if has_masks else set())


class GraphsAhead:
    """Captures graphs one at a time, while no sequence is on the device and no step in flight."""

    def __init__(
        self,
        graphs: StepGraphs[StepKind | PromptKind],
        prompts: PromptForward,
        kinds: Iterator[StepKind | PromptKind],
        free_bytes: Callable[[], int],
    ) -> None:
        """`free_bytes`: returns the bytes of the device that are free."""
        self._graphs, self._prompts, self._free_bytes = graphs, prompts, free_bytes
        self._kinds = kinds
        self._kind = next(kinds, None)  # the next to run

    @property
    def is_done(self) -> bool:
        """Whether all are captured that will be."""
        return self._kind is None

    def step(self) -> None:
        """Run the next kind once, unless it is captured: it is compiled, watched for waits, or captured. If that fails,
        no more are captured ahead."""
        graphs, kind = self._graphs, self._kind
        if kind is None:
            return
        if len(graphs) >= MOST_AHEAD or graphs.lacks_memory or self._free_bytes() < LEAST_FREE:
            self._stop()
            return
        if kind not in graphs and graphs.can_capture(kind):
            self._run(kind)
        if self._kind is not None and (kind in graphs or not graphs.can_capture(kind)):
            self._kind = next(self._kinds, None)
        if self._kind is None:
            self._stop()

    def _run(self, kind: StepKind | PromptKind) -> None:
        if isinstance(kind, PromptKind):
            self._prompts.clear()
        try:
            self._graphs(kind)
            return
        except Exception as error:
            _log.warning("%s cannot be captured ahead: %s", kind, error)
            self._kind, wants_memory = None, is_out_of_memory(error)
        if wants_memory:
            give_back_unused()

    def _stop(self) -> None:
        self._kind = None
        _log.info("%d graphs are captured before requests need them", len(self._graphs))
