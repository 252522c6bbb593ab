"""Which steps are captured, replayed and forgotten; on a GPU, that a replay says what the host's steps say."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from space_common.worker.client import WorkerClient
from space_kernels.sampling.device_sampling import Stages
from space_model.geometry.draft_layout import DraftLayout
from space_model.loading.load import load_model
from space_proto import worker_pb2 as pb
from space_server.device_runner import device_forward as device_graphs
from space_server.device_runner.device_forward import StepGraphs, StepKind
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from torch import Tensor


def kind(batch_size: int) -> StepKind:
    return StepKind(batch_size, DraftLayout.plain(), Stages(), 16)


POOL = (0, 7)


class Failed(RuntimeError):
    """What the end of a capture says that something has broken; torch has cleaned up nothing then."""


@dataclass
class Recorder:
    """Stands for torch's graphs: what is taken while one is captured is taken again when it is replayed."""

    taken: list[str] = field(default_factory=list)
    recording: list[int] | None = None
    stream: str = "own"
    underway: bool = False  # as the allocator believes
    waits: bool = False  # the host does, for the device, in each step
    error: Exception | None = None  # of steps that are captured
    debug: str = "default"
    has_noticed: bool = False
    ends_well: bool = False  # so does a capture in which there was an error
    ends_itself: bool = False  # a capture whose end fails tells the allocator that it is over
    releases_itself: bool = False  # a graph whose capture has failed gives its pool up
    num_holding: int = 0  # captures and graphs that hold their pool
    recorded: weakref.ref[Tensor] | None = None  # what the last step that was captured had made when it failed
    was_left: list[bool] = field(default_factory=list)  # each time that unused memory was given back: it was there yet

    def set_debug(self, mode: str) -> None:
        """As torch does: with a notice about itself the first time in a process."""
        self.debug = mode
        if not self.has_noticed:
            self.has_noticed = True
            warnings.warn(
                "Synchronization debug mode is a prototype feature and does not yet detect all "
                "synchronizing operations",
                stacklevel=1,
            )

    def take(self, of: StepKind | OtherKind) -> Tensor:
        how = "record" if self.recording is not None else "watch" if self.debug == "warn" else "launch"
        self.taken.append(f"{how} {of.batch_size}")
        if self.waits and self.debug == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        if self.recording is not None:
            if self.error is not None:
                made = torch.zeros(8)
                self.recorded = weakref.ref(made)
                raise type(self.error)(*self.error.args)
            self.recording.append(of.batch_size)
        return torch.full((of.batch_size, 1), of.batch_size, dtype=torch.int32)

    def graph(self) -> Graph:
        return Graph(self)

    @contextmanager
    def capture(self, graph: Graph, **settings: object) -> Iterator[None]:
        """As torch does it."""
        assert "pool" in settings
        assert not self.underway
        before, self.stream, self.recording, self.underway = self.stream, "capturing", graph.holds, True
        self.num_holding += 1
        graph.has_ended = self.releases_itself
        try:
            yield
        finally:
            self.recording = None
            if self.error is not None and not self.ends_well:
                self.underway = not self.ends_itself
                raise Failed("operation failed due to a previous error during capture")
            graph.has_ended = True
            self.stream, self.underway = before, False

    def end_allocating(self, device: int, pool: object) -> None:
        if not self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway = False

    def release_pool(self, device: int, pool: object) -> None:
        self.num_holding -= 1
        if self.num_holding < 0:
            raise RuntimeError("INTERNAL ASSERT FAILED: uc >= 0")

    def give_back(self) -> None:
        self.was_left.append(self.recorded is not None and self.recorded() is not None)

    def snapshot(self) -> list[dict[str, object]]:
        """Memory that was not given back: of another pool, and of the graphs' a part in which something lies."""
        kept = [((0, 0), 0), (POOL, 64), *([(POOL, 0)] if self.num_holding else [])]
        return [{"segment_pool_id": pool, "active_size": size} for pool, size in kept]


@dataclass(eq=False)
class Graph:
    recorder: Recorder
    holds: list[int] = field(default_factory=list)
    has_ended: bool = False

    def reset(self) -> None:
        if self.has_ended:
            self.has_ended = False
            self.recorder.release_pool(0, POOL)

    def __del__(self) -> None:
        self.reset()

    def replay(self) -> None:
        self.recorder.taken.append(f"replay {self.holds[0]}")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", found.graph)
    monkeypatch.setattr(torch.cuda, "graph", found.capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(found, "stream", stream))
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.set_debug)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", found.snapshot)
    monkeypatch.setattr(device_graphs, "_new_pool", lambda: POOL)
    monkeypatch.setattr(device_graphs, "give_back_unused", found.give_back)
    monkeypatch.setitem(torch._C.__dict__, "_cuda_endAllocateToPool", found.end_allocating)
    monkeypatch.setitem(torch._C.__dict__, "_cuda_releasePool", found.release_pool)
    return found


def graphs_of(recorder: Recorder, most: int = 8) -> StepGraphs[StepKind]:
    return StepGraphs(recorder.take, torch.zeros(8, 1, dtype=torch.int32), most=most)


def test_a_kind_is_launched_first_captured_the_second_time_and_then_replayed(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of all kinds is watched once before anything is captured."""
    caplog.set_level("INFO")
    graphs = graphs_of(recorder)
    usual = []
    for number in (2, 2, 2, 4, 2, 4, 4):
        assert len(graphs(kind(number))) == number
        usual.append(graphs.was_usual)
    assert recorder.taken == [
        "launch 2", "watch 2", "record 2", "replay 2", "launch 4", "replay 2", "record 4", "replay 4", "replay 4"
    ]  # fmt: skip
    assert usual == [False, False, False, False, True, False, True]
    assert len(graphs) == 2
    assert sum("captured a step of" in message for message in caplog.messages) == 2


def test_the_least_recently_used_graph_goes(recorder: Recorder) -> None:
    graphs = graphs_of(recorder, most=2)
    for number in (1, 1, 1, 2, 2, 1, 3, 3):
        graphs(kind(number))
    assert len(graphs) == 2
    recorder.taken.clear()
    for number in (1, 3, 2):
        graphs(kind(number))
    assert recorder.taken == ["replay 1", "replay 3", "record 2", "replay 2"]


def test_steps_in_which_the_host_waits_are_launched_and_no_capture_is_tried(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.waits = True
    graphs = graphs_of(recorder)
    usual = []
    for number in (2, 2, 2, 4, 4):
        graphs(kind(number))
        usual.append(graphs.was_usual)
    assert recorder.taken == ["launch 2", "watch 2", "launch 2", "launch 4", "launch 4"]
    assert usual == [False, False, True, False, True]
    assert recorder.debug == "default"
    assert sum("the host waits" in message for message in caplog.messages) == 1


def test_steps_that_cannot_be_captured_are_launched_where_the_others_are(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch leaves its own stream, and the allocator's list of captures, where the end of one fails."""
    graphs = graphs_of(recorder)
    recorder.error = RuntimeError("operation not permitted when stream is capturing")
    for _ in range(4):
        graphs(kind(2))
    assert recorder.taken == ["launch 2", "watch 2", "record 2", "launch 2", "launch 2"]
    assert (recorder.stream, recorder.underway) == ("own", False)
    assert any("cannot be captured" in message for message in caplog.messages)


@dataclass(frozen=True)
class OtherKind:
    batch_size: int


def test_steps_of_one_type_are_captured_though_those_of_another_cannot_be(recorder: Recorder) -> None:
    graphs: StepGraphs[StepKind | OtherKind] = StepGraphs(recorder.take, torch.zeros(8, 1, dtype=torch.int32))
    recorder.waits = True
    for _ in range(3):
        graphs(OtherKind(3))
    recorder.waits = False
    for _ in range(4):
        graphs(kind(2))
    assert recorder.taken[-5:] == ["launch 2", "watch 2", "record 2", "replay 2", "replay 2"]
    assert [graphs.can_capture(one) for one in (OtherKind(4), kind(4))] == [False, True]


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param({"ends_well": True}, id="ends"),
        pytest.param({}, id="torch-2.11"),
        pytest.param({"ends_itself": True}, id="with-180395"),
        pytest.param({"ends_itself": True, "releases_itself": True}, id="with-190348"),
    ],
)
def test_a_step_there_is_no_memory_to_capture_is_launched_and_others_are_captured_again(
    recorder: Recorder, caplog: pytest.LogCaptureFixture, behaviour: dict[str, bool]
) -> None:
    """And nobody holds the pool in which there was none: its memory can be had again."""
    for name, value in behaviour.items():
        setattr(recorder, name, value)
    graphs = graphs_of(recorder)
    for number in (1, 1, 1, 2):
        graphs(kind(number))
    recorder.error = torch.OutOfMemoryError("CUDA out of memory.")
    recorder.taken.clear()
    graphs(kind(2))
    assert len(graphs) == recorder.num_holding == 0
    assert recorder.was_left
    assert not any(recorder.was_left)
    recorder.error = None
    for number in (2, 1, 1, 2):
        graphs(kind(number))
    assert recorder.taken == ["record 2", "launch 2", "launch 2", "record 1", "replay 1", "replay 1", "launch 2"]
    assert (recorder.stream, recorder.underway, graphs.was_usual) == ("own", False, True)
    assert sum("no memory to capture" in message for message in caplog.messages) == 1


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampling", [pb.Sampling(), pb.Sampling(seed=3, temperature=0.9, top_p=0.9)])
def test_replayed_steps_give_the_texts_of_host_steps_and_never_wait(tiny_path: Path, sampling: pb.Sampling) -> None:
    model = load_model(tiny_path, dtype="float32", device="cuda", exact=True)
    found, taken = [], []
    for device in (False, True):
        worker = Worker(
            model, num_blocks=256, block_size=16, controller=FixedLayout.full(3), max_sequences=8, device_steps=device
        )
        router = WorkerClient(worker)
        for number in range(5):
            router.admit([70 + number, 71, 72, 90][: 1 + number], max_tokens=60, sampling=sampling, num_pages=1)
        if worker.engine.device is not None:
            runner = worker.engine.device
            graphs = runner._take
            assert isinstance(graphs, StepGraphs)
            taken.append(graphs)

            def never_waiting(of: StepKind, graphs: StepGraphs[StepKind] = graphs) -> Tensor:
                with warnings.catch_warnings():  # torch's notice of what it does not detect
                    warnings.simplefilter("ignore")
                    torch.cuda.set_sync_debug_mode("error" if of in graphs._graphs else "default")
                try:
                    return graphs(of)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            runner._take = never_waiting
        router.run()
        found.append([ran.tokens for ran in router.sequences.values()])
    assert found[0] == found[1]
    assert [graphs.num_replays > 10 for graphs in taken] == [True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("watched", [True, False])
def test_a_capture_in_which_the_host_waits_leaves_a_device_that_works(watched: bool) -> None:
    result = torch.zeros(8, dtype=torch.int32, device="cuda")

    def take(of: StepKind) -> Tensor:
        found = torch.arange(of.batch_size, dtype=torch.int32, device="cuda")
        return found[: int(found.sum() >= 0) * of.batch_size]  # the host has to know

    stream = torch.cuda.current_stream()
    graphs = StepGraphs(take, result)
    if not watched:
        graphs._captures = {StepKind: True}
    for _ in range(4):
        assert graphs(kind(3)).tolist() == [0, 1, 2]
    assert len(graphs) == 0
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()  # which fails while a capture is believed to go on
    graphs = StepGraphs(lambda of: torch.arange(of.batch_size, dtype=torch.int32, device="cuda"), result)
    for _ in range(4):
        assert graphs(kind(3)).tolist() == [0, 1, 2]
    assert graphs.num_replays == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_capture_took_that_found_no_more_memory_is_given_back() -> None:
    def take(of: StepKind) -> Tensor:
        found = torch.arange(of.batch_size, dtype=torch.int32, device="cuda")
        if torch.cuda.is_current_stream_capturing():
            held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            return torch.cat([held, torch.empty(1 << 46, dtype=torch.uint8, device="cuda")])
        return found

    graphs = StepGraphs(take, torch.zeros(8, dtype=torch.int32, device="cuda"))
    graphs._captures, pool = {StepKind: True}, graphs._pool
    for _ in range(3):
        assert graphs(kind(3)).tolist() == [0, 1, 2]
    assert graphs._captures[StepKind]  # it was for memory
    assert pool not in [segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()]  # type: ignore[no-untyped-call]
