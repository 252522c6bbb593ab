"""Graphs that requests are likely to need are captured before, one at a time, within bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.worker import ScriptedModel
from few_kernels import few_kernels
from simulated_cuda import SimulatedCuda
from space_common.worker.client import WorkerClient
from space_kernels.sampling.device_sampling import Stages
from space_model.geometry.draft_layout import DraftLayout
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_server.device_runner import graphs_ahead
from space_server.device_runner.device_forward import MOST_GRAPHS, StepKind
from space_server.device_runner.graphs_ahead import AHEAD_STAGES, LEAST_FREE, GraphsAhead, kinds_ahead, sizes_ahead
from space_server.device_runner.prompt_graphs import PROMPT_BUCKETS, PromptKind
from space_server.speculation.controller import FixedLayout
from space_server.step_cost import StepCost, StepShape
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint
from torch import Tensor

pytest.importorskip("triton")

PLAIN, MASKS = DraftLayout.plain(), DraftLayout.full(2, 2)


class FakePrompts:
    """Stands for PromptForward: names kinds, and counts calls of `clear`."""

    num_cleared = 0

    def kind(self, bucket: tuple[int, int], num_pages: int, adapters: set[int | None]) -> PromptKind:
        return PromptKind(*bucket, num_pages, 2 * len(adapters), next(iter(adapters), None))

    def clear(self) -> None:
        self.num_cleared += 1


class FakeGraphs:
    """A cache that runs a kind once before it captures it."""

    def __init__(self, *, odd: Callable[[object], bool] = lambda kind: False, error: Exception | None = None) -> None:
        self.ran, self.captured, self.lacks_memory = list[object](), set[object](), False
        self._odd, self._error = odd, error

    def __len__(self) -> int:
        return len(self.captured)

    def __contains__(self, kind: object) -> bool:
        return kind in self.captured

    def can_capture(self, kind: object) -> bool:
        return not self._odd(kind)

    def __call__(self, kind: object) -> None:
        if kind in self.ran:
            self.captured.add(kind)
        self.ran.append(kind)
        if self._error is not None:
            raise self._error


def kind(size: int) -> StepKind:
    return StepKind(size, PLAIN, Stages(), 16)


def ahead(graphs: FakeGraphs, kinds: list[Any], free: Callable[[], int] = lambda: LEAST_FREE) -> GraphsAhead:
    return GraphsAhead(graphs, FakePrompts(), iter(kinds), free)  # type: ignore[arg-type]


def done(work: GraphsAhead) -> int:
    """Do all of it, and return the number of steps."""
    count = 0
    while not work.is_done:
        work.step()
        count += 1
    return count


def test_few_short_sequences_come_first_with_the_likeliest_layout_and_then_small_prompts() -> None:
    sizes = sizes_ahead((1, 2, 4), 40)
    assert sizes == [(1, 16), (2, 16), (1, 40), (4, 16), (2, 40), (4, 40)]
    kinds = [*kinds_ahead(sizes, lambda size: [MASKS, PLAIN], FakePrompts(), 3)]  # type: ignore[arg-type]
    num_steps, alone = 2 * len(AHEAD_STAGES), [rows for prompts, rows in PROMPT_BUCKETS if prompts == 1]
    assert kinds[0] == StepKind(1, MASKS, Stages(), 16, adapter=3)
    assert kinds[1] == StepKind(1, PLAIN, Stages(), 16)
    prompts = kinds[num_steps : num_steps + 2 * len(alone)]
    assert prompts == [PromptKind(1, rows, 16, 2, 3) for rows in alone] + [PromptKind(1, rows, 16) for rows in alone]
    assert isinstance(kinds[num_steps + 2 * len(alone)], StepKind)
    assert {one.num_prompts for one in kinds if isinstance(one, PromptKind)} == {1, 4}


def test_each_step_runs_one_kind_and_those_captured_meanwhile_are_left_out() -> None:
    graphs = FakeGraphs(odd=lambda one: one == kind(3))
    graphs.captured.add(kind(2))
    work = ahead(graphs, [kind(1), kind(2), kind(3), kind(4)])
    seen = []
    while not work.is_done:
        before = len(graphs.ran)
        work.step()
        seen.append(len(graphs.ran) - before)
    assert seen == [1, 1, 0, 0, 1, 1]
    assert graphs.ran == [kind(1), kind(1), kind(4), kind(4)]


def test_a_quarter_of_the_cache_is_left_for_what_requests_bring() -> None:
    graphs = FakeGraphs()
    done(ahead(graphs, [kind(size) for size in range(1, 100)]))
    assert len(graphs) == MOST_GRAPHS * 3 // 4


def test_no_graph_is_captured_ahead_where_memory_is_short() -> None:
    graphs, free = FakeGraphs(), iter([LEAST_FREE] * 4 + [LEAST_FREE - 1])
    assert done(ahead(graphs, [kind(size) for size in range(1, 100)], lambda: next(free))) == 5
    assert len(graphs) == 2
    short = FakeGraphs()
    short.lacks_memory = True  # some graph did not fit
    assert done(ahead(short, [kind(1)])) == 1
    assert not short.ran


def test_a_failure_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    graphs = FakeGraphs(error=torch.OutOfMemoryError("CUDA out of memory."))
    assert done(ahead(graphs, [kind(1), kind(2)])) == 1
    assert graphs.ran == [kind(1)]
    assert any("cannot be captured ahead" in message for message in caplog.messages)


@pytest.mark.parametrize("seconds_of_mask", [0.0, 4.0])
def test_the_layout_of_a_request_s_steps_is_among_those_that_are_captured_ahead(seconds_of_mask: float) -> None:
    """Whether `auto` drafts, where masks cost nothing, or not."""
    points = [
        (StepShape(size, size * (1 + k), size * k, size * (k > 0)), 1.0 + size * k * seconds_of_mask)
        for size in (1, 2, 4)
        for k in (0, 1, 3)
    ]
    cost = StepCost.from_points(points)
    worker = Worker(ScriptedModel(num_masks=3), num_blocks=64, cost=cost, max_sequences=4, device_steps=True)
    device, taken = worker.engine.device, list[StepKind]()
    assert device is not None
    layouts, take = device._layouts_of(worker._usual_sequence(), 1), device._take

    def noted(kind: StepKind) -> Tensor:
        taken.append(kind)
        return take(kind)

    device._take = noted
    client = WorkerClient(worker)
    client.admit([5, 6, 7], max_tokens=9, num_pages=2)
    client.run()
    assert {one.layout for one in taken} <= {*layouts}
    assert layouts[0].makes_drafts == (seconds_of_mask == 0.0)
    assert layouts[-1] == PLAIN


# ---------------------------------------------------------------------------------------------- on a simulated device


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    return tiny_checkpoint(folder, hidden_size=32, num_layers=1, num_heads=2, kv_heads=1, window=64, num_masks=2)


def served(worker: Worker) -> list[int]:
    """Return the text of a request."""
    client = WorkerClient(worker)
    seq_id = client.admit([40, 41, 42], max_tokens=3, num_pages=1)
    assert not worker.may_prepare
    client.run()
    return client.sequences[seq_id].tokens


def worker_of(model: SpaceModel) -> Worker:
    return Worker(model, num_blocks=8, controller=FixedLayout.full(0), max_sequences=1, device_steps=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
@pytest.mark.usefixtures("no_device_step_fails_unseen")
def test_a_request_of_the_usual_kind_captures_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is that of the CPU's kernels, and nothing was written before it came."""
    monkeypatch.setattr(graphs_ahead, "AHEAD_STAGES", (Stages(),))
    monkeypatch.setattr(graphs_ahead, "PROMPT_BUCKETS", ((1, 16),))
    expected = served(worker_of(load_model(path, device="cpu", dtype="float32")))
    with SimulatedCuda():
        worker = worker_of(load_model(path, device="cuda", dtype="float32", choose_ops=few_kernels))
        device = worker.engine.device
        assert device is not None
        graphs = device._graphs
        assert graphs is not None
        assert not worker.may_prepare  # nothing is planned
        worker.plan_ahead()
        worker.prepare()
        assert len(graphs) == 0  # one kind ran once
        assert worker.may_prepare
        worker.prepare(1e9)
        assert not worker.may_prepare
        assert {*graphs._graphs} == {StepKind(1, PLAIN, Stages(), 4), PromptKind(1, 16, 4)}
        assert not any(part.cpu().any() for part in worker.kv.layer(0))
        graphs._capture = None  # type: ignore[method-assign, assignment]
        num_replays = graphs.num_replays
        assert served(worker) == expected
        assert graphs.num_replays - num_replays == worker.num_forwards
