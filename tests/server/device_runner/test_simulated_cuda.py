"""The simulated CUDA device keeps its own rules, and the device runner on it gives the texts of plain decoding."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_cuda import CUDAGraph, SimulatedCuda
from space_common.worker.client import SequenceRequest, WorkerClient
from space_kernels.sampling.device_sampling import Stages
from space_model.geometry.draft_layout import DraftLayout
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.device_runner.device_forward import StepGraphs, StepKind
from space_server.speculation.controller import Controller, DraftLimits, FixedLayout, StepLoad
from space_server.step_cost import StepCost, StepShape
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint
from torch import Tensor

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    with SimulatedCuda() as found:
        yield found


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device="cuda")


# ---------------------------------------------------------------------------------------------- its rules


def test_tensors_say_that_they_are_on_the_device_and_compute_there(device: SimulatedCuda) -> None:
    found = values(1, 2, 3)[1:] * 2
    assert (found.is_cuda, found.device) == (True, torch.device("cuda", 0))
    assert torch.zeros_like(found).is_cuda
    assert found.tolist() == [4, 6]
    assert not found.cpu().is_cuda


def test_a_tensor_of_the_host_beside_one_of_the_device_raises(device: SimulatedCuda) -> None:
    assert (values(1, 2) + torch.tensor(1.0)).tolist() == [2, 3]  # a number is none
    with pytest.raises(RuntimeError, match="same device"):
        values(1, 2) + torch.ones(2)


def test_a_kernel_given_a_tensor_of_the_host_raises(device: SimulatedCuda) -> None:
    from space_kernels.layers import layers_triton

    assert layers_triton.swiglu(torch.ones(2, 8, device="cuda")).is_cuda
    assert any("swiglu" in name for name in device.num_launches)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        layers_triton.swiglu(torch.ones(2, 8))


def test_fresh_memory_holds_garbage(device: SimulatedCuda) -> None:
    assert all(math.isnan(one) for one in torch.empty(3, device="cuda").tolist())
    assert torch.empty(2, dtype=torch.int32, device="cuda").tolist() != [0, 0]


@pytest.mark.parametrize("wait", ["item", "tolist", "nonzero", "mask", "cpu", "synchronize", "pageable"])
def test_waits_are_counted_warned_of_and_refused_in_a_capture(device: SimulatedCuda, wait: str) -> None:
    given, host = values(1, 0), torch.ones(2)
    if wait == "mask":
        given = given > 0

    def waits() -> None:
        {
            "item": lambda: given[0].item(),
            "tolist": given.tolist,
            "nonzero": given.nonzero,
            "mask": lambda: given[given],
            "cpu": given.cpu,
            "synchronize": torch.cuda.synchronize,
            "pageable": lambda: given.copy_(host),
        }[wait]()

    before = device.num_waits.total()
    waits()
    assert device.num_waits.total() > before
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="synchronizing CUDA operation"):
        waits()
    torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(RuntimeError, match="previous error during capture") as found, torch.cuda.graph(CUDAGraph()):
        waits()
    assert "not permitted when stream is capturing" in str(found.value.__context__)


def test_a_copy_to_pinned_memory_arrives_when_it_is_waited_for(device: SimulatedCuda) -> None:
    host, other = torch.zeros(2, pin_memory=True), torch.zeros(2, pin_memory=True)
    early, late = values(1, 2), values(3, 4)
    assert host.is_pinned()
    host.copy_(early, non_blocking=True)
    first = torch.cuda.Event()
    first.record()
    other.copy_(late, non_blocking=True)
    assert math.isnan(float(host[0]))
    assert not first.query()
    first.synchronize()
    assert host.tolist() == [1, 2]
    assert math.isnan(float(other[0]))
    torch.cuda.synchronize()
    assert other.tolist() == [3, 4]


def test_a_copy_on_another_stream_arrives_where_that_is_waited_for(device: SimulatedCuda) -> None:
    host, side, given = torch.zeros(1, pin_memory=True), torch.cuda.Stream(), values(1)
    with torch.cuda.stream(side):
        host.copy_(given, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert math.isnan(float(host[0]))
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [1]


def test_pinned_memory_written_under_a_copy_from_it_raises(device: SimulatedCuda) -> None:
    host = torch.ones(2).pin_memory()
    host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    found = host.to("cuda", non_blocking=True)
    host[0] = 5
    with pytest.raises(RuntimeError, match="written while a copy"):
        torch.cuda.synchronize()
    assert found.is_cuda


def test_a_capture_computes_nothing_and_a_replay_reads_what_is_there_then(device: SimulatedCuda) -> None:
    given, out, graph = values(1, 2), torch.zeros(2, device="cuda"), CUDAGraph()
    with torch.cuda.graph(graph):
        made = given * 2
        out.copy_(made + 1)
    assert out.tolist() == [0, 0]
    assert all(math.isnan(one) for one in made.tolist())
    graph.replay()
    assert out.tolist() == [3, 5]
    given.copy_(values(10, 20))
    graph.replay()
    assert out.tolist() == [21, 41]
    given = values(0, 0)  # at another address
    with pytest.raises(RuntimeError, match="freed since its capture"):
        graph.replay()


def test_a_kernel_is_captured(device: SimulatedCuda) -> None:
    from space_kernels.layers import layers_triton

    given, graph = torch.ones(1, 4, device="cuda"), CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers_triton.swiglu(given)
    graph.replay()
    assert torch.equal(found.cpu(), layers_triton.swiglu(given).cpu())


def test_the_results_of_a_graph_hold_garbage_once_an_earlier_one_of_its_pool_ran(device: SimulatedCuda) -> None:
    given, pool = values(1), torch.cuda.graph_pool_handle()
    graphs, found = [CUDAGraph(), CUDAGraph()], []
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool):
            found.append(given + 1)
    graphs[0].replay()
    graphs[1].replay()
    assert [one.tolist() for one in found] == [[2], [2]]
    graphs[0].replay()
    assert found[0].tolist() == [2]
    assert math.isnan(found[1].item())


def test_what_a_capture_freed_holds_garbage_at_each_replay(device: SimulatedCuda) -> None:
    """A graph that counts on what its last replay left."""
    out, graph = values(0), CUDAGraph()
    with torch.cuda.graph(graph):
        left = torch.empty(1, device="cuda")
        out.copy_(left)
        left.fill_(1.0)
    graph.replay()
    graph.replay()
    assert out.tolist() == [1]
    del left
    graph.replay()
    assert math.isnan(out.item())


def test_more_than_its_memory_is_refused_until_some_is_freed() -> None:
    with SimulatedCuda(memory=1000) as device:
        held = torch.zeros(200, device="cuda")
        assert torch.cuda.mem_get_info()[0] == 200
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(100, device="cuda")
        del held
        assert torch.zeros(200, device="cuda").is_cuda
        assert device.num_bytes == 0


def test_a_failed_capture_leaves_its_stream_and_the_graph_cache_restores_it(device: SimulatedCuda) -> None:
    stream = torch.cuda.current_stream()
    result = torch.zeros(1, dtype=torch.int32, device="cuda")

    def take(kind: StepKind) -> Tensor:
        found = torch.ones(1, dtype=torch.int32, device="cuda")
        return found[: int(found.item())]

    graphs = StepGraphs(take, result)
    graphs._captures = {str: True}  # as if the waits had not been seen
    for _ in range(3):
        assert graphs("kind").tolist() == [1]  # type: ignore[arg-type]
    assert (len(graphs), graphs.num_replays) == (0, 0)
    assert torch.cuda.current_stream() is stream
    torch.cuda.empty_cache()


def test_a_tensor_freed_inside_a_capture_is_caught_when_the_graph_is_replayed(device: SimulatedCuda) -> None:
    given, out, graph = [values(1, 2)], values(0, 0), CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(given.pop() * 2)
    with pytest.raises(RuntimeError, match="freed since its capture"):
        graph.replay()


def kind_of(batch_size: int) -> StepKind:
    return StepKind(batch_size, DraftLayout.plain(), Stages(), 16)


def test_graphs_that_the_cache_dropped_are_captured_again_in_the_same_memory(device: SimulatedCuda) -> None:
    """Replays of three kinds in turns, of which two are kept, give what each kind computes then."""
    state, result = torch.zeros(8, dtype=torch.int32, device="cuda"), torch.zeros(8, dtype=torch.int32, device="cuda")

    def take(kind: StepKind) -> Tensor:
        state.add_(kind.batch_size)
        return (state * 2)[: kind.batch_size]

    graphs, expected, used = StepGraphs(take, result, most=2), 0, set()
    for turn in range(8):
        for size in (1, 2, 3):
            expected += size
            assert graphs(kind_of(size)).tolist() == [2 * expected] * size
            assert len(graphs) <= 2
        if turn >= 4:
            used.add(device.num_bytes)
    assert len(used) == 1
    assert graphs.num_replays == device.num_launches["graph"] > 12


def test_a_tensor_that_a_kept_graph_reads_and_the_step_drops_is_caught(device: SimulatedCuda) -> None:
    """As a cache of index tensors would that forgets some."""

    @lru_cache(maxsize=1)
    def index_of(batch_size: int) -> Tensor:
        return torch.arange(batch_size, dtype=torch.int32, device="cuda")

    def take(kind: StepKind) -> Tensor:
        return index_of(kind.batch_size) + 1

    graphs = StepGraphs(take, torch.zeros(4, dtype=torch.int32, device="cuda"))
    for _ in range(4):
        assert graphs(kind_of(2)).tolist() == [1, 2]
    assert graphs.num_replays == 2
    graphs(kind_of(3))
    with pytest.raises(RuntimeError, match="freed since its capture"):
        graphs(kind_of(2))


def test_nothing_is_left_when_it_is_switched_off() -> None:
    before = torch.cuda.Event, torch.cuda.is_available()
    with SimulatedCuda():
        assert torch.cuda.is_available()
    assert (torch.cuda.Event, torch.cuda.is_available()) == before
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


# ---------------------------------------------------------------------------------------------- the device runner


def tiny_path(folder: Path, **settings: object) -> Path:
    """A checkpoint of one layer."""
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "kv_heads": 1, "window": 128, "num_masks": 2}
    return tiny_checkpoint(folder / "tiny", **(sizes | settings))  # type: ignore[arg-type]


def tiny(folder: Path, **settings: object) -> SpaceModel:
    """One layer that is computed row-invariantly on the simulated device."""
    return load_model(tiny_path(folder, **settings), device="cuda", dtype="float32", exact=True)


GREEDY, SAMPLED = pb.Sampling(), pb.Sampling(seed=3, temperature=0.9)


SECONDS_OF_REPLAY, SECONDS_OF_COMPILATION = 0.002, 9.0


@dataclass
class StepClock:
    """The device's clock, which only steps move: a little by a replay, and far by a step that compiles or captures."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def never_waiting(taken: StepGraphs[StepKind], clock: StepClock | None = None) -> Callable[[StepKind], Tensor]:
    """Take steps so that a wait of the host in one that is captured or replayed raises."""

    def take(kind: StepKind) -> Tensor:
        is_replay = kind in taken._graphs
        torch.cuda.set_sync_debug_mode("error" if is_replay else "default")
        try:
            return taken(kind)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            if clock is not None:
                clock.now += SECONDS_OF_REPLAY if is_replay else SECONDS_OF_COMPILATION

    return take


def texts(
    model: SpaceModel,
    controller: Controller,
    samplings: Sequence[pb.Sampling] = (GREEDY, SAMPLED),
    *,
    max_tokens: int = 7,
    steps: str = "device",
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Return the texts of some requests, and the accepted and proposed drafts of each step."""
    worker = Worker(
        model,
        num_blocks=64,
        block_size=16,
        controller=controller,
        max_sequences=len(samplings),
        device_steps=steps == "device",
    )
    client = WorkerClient(worker)
    for number, sampling in enumerate(samplings):
        client.admit([70 + number, 71, 72][: 1 + number % 3], max_tokens=max_tokens, sampling=sampling, num_pages=2)
    if worker.engine.device is not None:
        taken = worker.engine.device._take
        assert isinstance(taken, StepGraphs)
        worker.engine.device._take = never_waiting(taken)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        client.run()
    if worker.engine.device is not None:
        assert worker.engine.device.num_replays >= 2
    sequences = client.sequences.values()
    reports = [report for one in sequences for report in one.reports if report.num_drafted]
    return [one.tokens for one in sequences], [(one.num_accepted, one.num_drafted) for one in reports]


def accepts_and_rejects(drafts: Sequence[tuple[int, int]]) -> bool:
    return any(accepted for accepted, _ in drafts) and any(accepted < drafted for accepted, drafted in drafts)


@pytest.mark.slow
@pytest.mark.usefixtures("no_device_step_fails_unseen")
def test_drafts_of_the_head_leave_the_texts_of_the_simulated_device_as_they_are(
    device: SimulatedCuda, tmp_path: Path
) -> None:
    """Captured and replayed steps, with accepted and rejected drafts."""
    model = tiny(tmp_path, head_drafts=2)
    plain, none = texts(model, FixedLayout.full(0))
    drafted, drafts = texts(model, FixedLayout.by_head(2))
    assert drafted == plain
    assert not none
    assert accepts_and_rejects(drafts)


@pytest.mark.slow
@pytest.mark.usefixtures("no_device_step_fails_unseen")
@pytest.mark.parametrize(
    "settings", [{}, {"shared_mask": True}, {"adapter_rank": 4}], ids=["masks", "a shared mask", "gated LoRA"]
)
def test_drafts_of_masks_leave_the_texts_of_the_simulated_device_as_they_are(
    device: SimulatedCuda, tmp_path: Path, settings: dict[str, object]
) -> None:
    model = tiny(tmp_path, **settings)
    cut = pb.Sampling(seed=5, temperature=0.8, top_p=0.8)
    requests = (GREEDY, SAMPLED, cut)
    plain, _ = texts(model, FixedLayout.full(0), requests, max_tokens=24)
    drafted, drafts = texts(model, FixedLayout.full(2), requests, max_tokens=24)
    on_host, _ = texts(model, FixedLayout.full(2), requests, max_tokens=24, steps="host")
    assert plain == drafted == on_host
    assert accepts_and_rejects(drafts)


def turns(rules: Sequence[Callable[[DraftLimits], DraftLayout]]) -> FixedLayout:
    """Take these rules in turns, one a step; each sequence of a step has the same layout."""
    calls = count()

    class Turns(FixedLayout):
        def layouts(self, limits: Sequence[DraftLimits], load: StepLoad) -> list[DraftLayout]:
            rule = rules[next(calls) % len(rules)]
            return [rule(limit) for limit in limits]

    return Turns(rules[0])


PLAIN = [lambda limit: DraftLayout.plain()]
BY_HEAD = [lambda limit: DraftLayout.by_head(min(limit.num_drafts, 2), 2)]
MIXED = [
    *BY_HEAD,
    lambda limit: DraftLayout.full(2, 2).with_drafts(limit.num_drafts),
    lambda limit: DraftLayout.of(1, (2, 1)).with_drafts(limit.num_drafts),
    *PLAIN,
]
PROMPT = [70 + number % 20 for number in range(17)]


def interrupted(
    model: SpaceModel,
    rules: Sequence[Callable[[DraftLimits], DraftLayout]],
    samplings: Sequence[pb.Sampling],
    *,
    max_tokens: int,
    most_graphs: int = 64,
    device_steps: bool = True,
    cost: StepCost | None = None,
    clock: StepClock | None = None,
) -> tuple[list[list[int]], list[tuple[int, int]], int]:
    """Run one request for each of `samplings`, all with the same prompt and its cached page. The first is preempted
    after two steps: released, and admitted again on that page with what it had emitted. Return the texts, accepted and
    proposed drafts, and the number of captures."""
    worker = Worker(
        model,
        num_blocks=32,
        block_size=16,
        controller=turns(rules),
        max_sequences=len(samplings),
        device_steps=device_steps,
        cost=cost,
        clock=clock or time.perf_counter,
    )
    client, num_captures = WorkerClient(worker), 0
    if worker.engine.device is not None:
        taken = worker.engine.device._take
        assert isinstance(taken, StepGraphs)
        taken._most, capture = most_graphs, taken._capture

        def counted(kind: StepKind) -> Any:
            nonlocal num_captures
            num_captures += 1
            return capture(kind)

        taken._capture = counted  # type: ignore[method-assign]
        worker.engine.device._take = never_waiting(taken, clock)
    limits = pb.Limits(max_tokens=max_tokens)
    requests = [SequenceRequest(tuple(PROMPT), one, limits, max_draft_length=8) for one in samplings]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        first = client.submit(requests[0], num_pages=6)
        client.run(lambda: bool(first.tokens))
        page = first.pages[0]
        client.keep([page])
        others = [client.submit(one, num_pages=6, shared=[page]) for one in requests[1:]]
        client.run(lambda: len(first.tokens) >= 3)
        client.release_and_wait(first.seq_id)
        assert first.finish == pb.FINISH_NONE
        client.submit(first, num_pages=6, shared=[page])
        client.run()
        client.drop([page])
    client.check_all_free()
    sequences = [first, *others]
    drafts = [(part.num_accepted, part.num_drafted) for one in sequences for part in one.reports if part.num_drafted]
    return [one.tokens for one in sequences], drafts, num_captures


class LearntSteps(StepCost):
    """Costs that also keep what they learn of decode steps."""

    def __init__(self) -> None:
        super().__init__(StepCost.typical("cuda").as_json())
        self.seconds_of: list[float] = []

    def learn(self, shape: StepShape, seconds: float) -> None:
        super().learn(shape, seconds)
        if not shape.num_prefill_rows:
            self.seconds_of.append(seconds)


@pytest.mark.usefixtures("no_device_step_fails_unseen")
def test_drafts_of_the_head_survive_preemption_and_cached_prefixes_on_the_simulated_device(tmp_path: Path) -> None:
    """Against plain decoding on the host's kernels, in float32. What steps cost is learnt from replays alone: the other
    steps compile their kernels, or are captured."""
    clock, cost = StepClock(), LearntSteps()
    path = tiny_path(tmp_path, head_drafts=2)
    plain, _, _ = interrupted(
        load_model(path, device="cpu", dtype="float32"), PLAIN, (GREEDY, SAMPLED), max_tokens=9, device_steps=False
    )
    with SimulatedCuda(clock=clock):
        drafted, drafts, num_captures = interrupted(
            load_model(path, device="cuda", dtype="float32", exact=True),
            BY_HEAD,
            (GREEDY, SAMPLED),
            max_tokens=9,
            cost=cost,
            clock=clock,
        )
    assert drafted == plain
    assert accepts_and_rejects(drafts)
    assert num_captures
    assert cost.seconds_of
    assert max(cost.seconds_of) <= 2 * SECONDS_OF_REPLAY


@pytest.mark.slow
@pytest.mark.usefixtures("no_device_step_fails_unseen")
def test_layouts_in_turns_survive_preemption_cached_prefixes_and_an_eviction_of_their_graphs(
    device: SimulatedCuda, tmp_path: Path
) -> None:
    """Head-only steps, whole and partial mask groups and plain steps; one graph is kept."""
    model = tiny(tmp_path, head_drafts=2)
    requests = GREEDY, pb.Sampling(seed=5, temperature=0.8, top_p=0.8)
    plain, _, _ = interrupted(model, PLAIN, requests, max_tokens=64)
    mixed, drafts, num_captures = interrupted(model, MIXED, requests, max_tokens=64, most_graphs=1)
    assert mixed == plain
    assert accepts_and_rejects(drafts)
    assert num_captures > 4
