"""Small prompts that are replayed as CUDA graphs have the bits of those that run kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from few_kernels import few_kernels
from simulated_cuda import SimulatedCuda
from space_common.worker.client import WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.networks.network import PagedKV
from space_model.space_model import SpaceModel
from space_server.device_runner import prompt_graphs
from space_server.device_runner.device_runner import DeviceRunner
from space_server.device_runner.prompt_graphs import PROMPT_BUCKETS, PromptForward, PromptKind
from space_server.speculation.controller import FixedLayout
from space_server.startup.calibration import Recorder
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint
from torch import Tensor

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")

PLAIN, MASKS = DraftLayout.plain(), DraftLayout.full(0, 2)
IDS = [40 + number * 7 % 50 for number in range(200)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, two masks, a window of 128."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    return tiny_checkpoint(folder, hidden_size=32, num_layers=1, num_heads=2, kv_heads=1, window=128, num_masks=2)


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    with SimulatedCuda() as found:
        yield found


def loaded(path: Path) -> SpaceModel:
    return load_model(path, device="cuda", dtype="float32", choose_ops=few_kernels)


def prompt(num_ids: int, page: int, layout: DraftLayout = PLAIN, *, start: int = 0) -> Segment:
    """A chunk of a prompt with two pages."""
    return Segment(IDS[start : start + num_ids], start, [page, page + 1], layout)


def batch_of(model: SpaceModel, segments: Sequence[Segment]) -> ForwardBatch:
    return ForwardBatch.build(segments, block_size=16, mask_ids=model.facts.mask_ids, device=model.facts.device)


def pages_of(kv: PagedKV) -> list[Tensor]:
    return [part.cpu() for part in kv.layer(0)]


@pytest.mark.usefixtures("dots_round_once", "device")
def test_replayed_prompts_have_the_bits_of_the_model_s_own_pass_and_write_the_same_pages(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At both edges of a bucket, behind cached ids, two at once, and a kind again after another."""
    monkeypatch.setattr(prompt_graphs, "PROMPT_BUCKETS", ((1, 4), (4, 5)))
    model = loaded(path)
    kv, plain_kv = model.allocate_kv(8, 16), model.allocate_kv(8, 16)
    runner = DeviceRunner(model, kv, max_sequences=2)
    steps = [
        [prompt(5, 0, MASKS)],
        [prompt(4, 0, MASKS, start=5)],
        [prompt(3, 0, MASKS, start=14), prompt(6, 2, start=2)],
        [prompt(2, 4, MASKS)],
    ]
    kinds = []
    graphs, prompts = runner._graphs, runner._prompts
    assert graphs is not None
    assert prompts is not None
    graphs._captures[PromptKind] = True  # as if a step had been watched
    for number, step in enumerate(steps):
        batch = batch_of(model, step)
        kind = prompts.kind_of(batch)
        assert kind is not None
        if kind not in kinds:
            runner.forward_prompts(batch)  # compiles it
        kinds.append(kind)
        found = runner.forward_prompts(batch)
        assert found is not None
        expected = model.forward(batch_of(model, step), plain_kv)
        assert torch.equal(found[0][: batch.num_rows].cpu(), expected[: batch.num_rows].cpu()), number
        assert all(map(torch.equal, pages_of(kv), pages_of(plain_kv))), number
    assert [(kind.num_prompts, kind.num_rows, kind.num_masks) for kind in kinds] == [
        (1, 4, 2), (1, 4, 2), (4, 5, 2), (1, 4, 2)
    ]  # fmt: skip
    assert (len(graphs), graphs.num_replays) == (2, 4)


@pytest.mark.usefixtures("device")
def test_without_prompts_a_kind_writes_nothing(path: Path) -> None:
    """Pages of the prompts sent last may belong to another sequence by now: nothing is written to them."""
    model = loaded(path)
    kv = model.allocate_kv(4, 16)
    prompts = PromptForward(model, kv, max_pages=8)
    kind = prompts.kind_of(batch_of(model, [prompt(3, 0)]))
    assert kind is not None
    prompts.send(batch_of(model, [prompt(3, 0)]), kind)
    prompts.clear()
    prompts.take(kind)
    assert not any(part.any() for part in pages_of(kv))


def test_the_smallest_bucket_that_holds_a_step_is_taken_and_other_steps_run_as_ever(path: Path) -> None:
    model = load_model(path, device="cpu", dtype="float32")
    prompts = PromptForward(model, model.allocate_kv(64, 16), max_pages=8)

    def bucket(*segments: Segment) -> tuple[int, int] | None:
        kind = prompts.kind_of(batch_of(model, segments))
        return None if kind is None else (kind.num_prompts, kind.num_rows)

    def long(num_ids: int, page: int = 0) -> Segment:
        return Segment(IDS[:num_ids], 0, range(page, page + 8))

    lengths = (1, 2, 17, 18, 33, 34, 65, 66, 128)
    assert [bucket(long(number)) for number in lengths] == [
        None, (1, 16), (1, 16), (1, 32), (1, 32), (1, 64), (1, 64), (1, 128), (1, 128)
    ]  # fmt: skip
    assert [bucket(long(17), *[long(2, 8)] * (number - 1)) for number in (2, 4, 5)] == [(4, 16), (4, 16), None]
    assert bucket(long(33), long(18)) == (4, 32)
    assert bucket(long(34), long(18)) is None
    drafts, short = DraftLayout.full(1, 1), long(9)
    for odd in (replace(short, layout=drafts), replace(short, lora=0), replace(short, is_long=True)):
        assert bucket(odd) is None
    assert [(kind.num_prompts, kind.num_rows, kind.num_masks, kind.num_pages) for kind in prompts.largest] == [
        (4, 32, 2, 8), (1, 128, 2, 8)
    ]  # fmt: skip


@pytest.mark.usefixtures("no_device_step_fails_unseen")
def test_prompts_beside_a_decoding_sequence_are_replayed_and_cost_what_replays_take(path: Path) -> None:
    """The texts are those of the CPU's kernels. Of the prompts alone the first compiles, and the second is captured."""

    def run(model: SpaceModel) -> tuple[list[list[int]], int, int]:
        cost = Recorder()
        worker = Worker(
            model, num_blocks=32, controller=FixedLayout.full(0), cost=cost, max_sequences=2, device_steps=True
        )
        if worker.engine.device is not None and worker.engine.device._graphs is not None:
            worker.engine.device._graphs._captures[PromptKind] = True  # as if a step had been watched
        client = WorkerClient(worker)
        client.admit(IDS[:4], max_tokens=4, num_pages=2)
        for number in range(4):
            client.admit(IDS[number : number + 3], max_tokens=1, num_pages=2)
            client.run(lambda: all(one.tokens for one in client.sequences.values()))
        client.run()
        num_prefills = sum(shape.num_prefill_rows > 0 for shape, _ in cost.points)
        return [one.tokens for one in client.sequences.values()], num_prefills, worker.num_replays

    expected, num_prefills, _ = run(load_model(path, device="cpu", dtype="float32"))
    assert num_prefills == 4
    with SimulatedCuda():
        found, num_prefills, num_replays = run(loaded(path))
    assert found == expected
    assert num_prefills == 1
    assert num_replays >= 2


@pytest.mark.usefixtures("device")
def test_room_for_the_largest_prompts_graph_is_kept_before_pages_are_allocated(path: Path) -> None:
    model = loaded(path)
    runner = DeviceRunner(model, model.allocate_kv(1, 16), max_sequences=1)
    graphs = runner._graphs
    assert graphs is not None
    graphs._take = lambda kind: torch.zeros(0, dtype=torch.int32, device="cuda")
    runner.take_largest()
    found = [kind for kind in graphs._graphs if isinstance(kind, PromptKind)]
    assert [(kind.num_prompts, kind.num_rows, kind.num_pages) for kind in found] == [(4, 32, 8), (1, 128, 8)]
    assert max(prompts * (rows + 1) for prompts, rows in PROMPT_BUCKETS) == 4 * 33
