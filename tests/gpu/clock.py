"""What a device takes for something: by its own clock; the bandwidth of a copy; how much of a span it works."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.networks.network import PagedKV
from space_model.space_model import SpaceModel

_log = logging.getLogger(__name__)

FLUSH_BYTES = 512 * 1024**2
"""Written before each timed call: more than any L2 cache holds, and long enough that the host gets ahead."""

_WARM_UP = 3
_AHEAD_CYCLES = 400_000
"""That the device sleeps (a fifth of a millisecond) while the host gives it the call to time."""


class DeviceClock:
    """Times calls on one device, with its caches cold."""

    def __init__(self, device: torch.device, *, flush_bytes: int = FLUSH_BYTES) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._flush = torch.empty(flush_bytes if self._on_gpu else 1 << 16, dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], object], *, repeats: int = 20) -> float:
        """The median of `repeats` calls, without what the host takes to launch them; on a CPU of one."""
        for _ in range(_WARM_UP if self._on_gpu else 1):
            call()
        self.wait()
        return statistics.median(self._timed(call, repeats if self._on_gpu else 1))

    def _timed(self, call: Callable[[], object], repeats: int) -> list[float]:
        if not self._on_gpu:
            times = []
            for _ in range(repeats):
                begun = time.perf_counter()
                call()
                times.append(time.perf_counter() - begun)
            return times
        marks = []
        for _ in range(repeats):
            self._flush.zero_()
            torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
            begin = _mark()
            call()
            marks.append((begin, _mark()))
        self.wait()
        return [begin.elapsed_time(end) / 1000.0 for begin, end in marks]

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)

    def copy_bandwidth(self, num_bytes: int) -> float:
        """Bytes per second of a copy on the device, read and written."""
        source = torch.ones(num_bytes, dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        seconds = self.seconds(lambda: target.copy_(source), repeats=10)
        return 2 * num_bytes / seconds

    def empty_launch(self) -> float:
        """Seconds of a kernel that does next to nothing."""
        tiny = torch.zeros(1, device=self.device)
        return self.seconds(lambda: tiny.add_(1))


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def device_busy(run: Callable[[], object]) -> float:
    """Seconds within `run` in which the device had something under way. Raises RuntimeError without a profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    if not spans:
        raise RuntimeError("the profiler saw no kernel: this machine does not let it")
    return covered(spans) * 1e-6


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much the spans (begin, end) cover together."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """(bytes of tensors now, most bytes that torch has taken); nothing is known of a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_reserved(device)


def graphed(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`call` as a CUDA graph that is replayed; as it is on a CPU, or where it cannot be captured."""
    if device.type != "cuda":
        return call
    for _ in range(3):
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        _log.warning("it is timed kernel by kernel, for it cannot be captured: %s", error)
        return call
    return graph.replay


def forward_seconds(
    model: SpaceModel, kv: PagedKV, layout: DraftLayout, context: int, clock: DeviceClock
) -> tuple[int, float]:
    """Rows of a step of one sequence behind `context` ids, and the seconds of network and head on the device alone."""
    chain, device = layout.num_drafts + 1, model.facts.device
    segment = Segment([9] * chain, context, range(-(-(context + 2 * chain) // kv.block_size)), layout)
    batch = ForwardBatch.build([segment], block_size=kv.block_size, mask_ids=model.facts.mask_ids, device=device)

    def call() -> None:
        model.logits(model.forward(batch, kv)[:chain])

    return batch.num_rows, clock.seconds(graphed(call, device))
