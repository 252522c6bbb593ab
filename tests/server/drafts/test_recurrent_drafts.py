"""Drafts of the recurrent head: their definition, the sampling that they share with verification, and what is counted
of them. On the host and in device steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from space_common.worker.client import WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import InvalidSpaceSection
from space_model.model_facts import HeadFacts
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_router.engine.request.worker_messages import WorkerModelFacts
from space_server.drafts import Acceptance, AcceptanceShape, DraftSources
from space_server.speculation.controller import (
    Controller,
    DraftLimits,
    FixedLayout,
    SpeculationController,
    StepLoad,
)
from space_server.step_cost import StepCost, StepShape
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint
from torch.nn import functional as F

SAMPLINGS = [
    pb.Sampling(),
    pb.Sampling(seed=3, temperature=0.9),
    pb.Sampling(seed=5, temperature=1.0, top_p=0.8),
    pb.Sampling(seed=8, temperature=0.6, repetition_penalty=1.3, frequency_penalty=0.2),
]
PROMPTS = [[20, 30, 40, 50], [60, 31, 41, 51, 61], [70] * 7, [45, 55]]


@pytest.fixture(scope="module", params=[None, 60], ids=["whole vocabulary", "draft vocabulary"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    """No masks, only a recurrent head."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("head"), num_masks=0, head_drafts=5, draft_vocab=request.param)
    return load_model(path, dtype="float32", num_threads=1)


def run(
    model: SpaceModel, controller: Controller | None, *, device: bool = False, **of_worker: object
) -> tuple[list[list[int]], WorkerClient]:
    """All prompts in one batch: their texts."""
    worker = Worker(model, num_blocks=100, block_size=4, controller=controller, device_steps=device, **of_worker)  # type: ignore[arg-type]
    client = WorkerClient(worker)
    numbers = [
        client.admit(prompt, max_tokens=32, sampling=sampling)
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    client.run()
    return [client.sequences[number].tokens for number in numbers], client


def test_greedy_drafts_are_the_definition_s(model: SpaceModel) -> None:
    worker = Worker(model, num_blocks=100, block_size=4, controller=FixedLayout.by_head(5))
    client = WorkerClient(worker)
    client.admit(PROMPTS[0], max_tokens=32)
    client.step()
    (sequence,) = worker.batch
    weights = model.drafting.recurrent_head
    assert weights is not None
    known = sequence.ids
    batch = ForwardBatch.build([Segment(known[:-1], 0, range(20), DraftLayout.plain())], block_size=4, mask_ids=())
    state = model.forward(batch, model.allocate_kv(20, 4))[len(known) - 2]
    previous, wanted = known[-1], []
    vocabulary = torch.arange(128) if weights.ids is None else weights.ids
    for _ in range(5):
        token = weights.embedding_scale * model.embed(torch.tensor([previous]))[0]
        state = state + weights.w2 @ F.silu(weights.w1 @ torch.cat([state, token]))
        logits = model.logits(state[None])[0]
        previous = int(vocabulary[logits[vocabulary].argmax()])
        wanted.append(previous)
    assert sequence.drafts == wanted


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_the_text_is_plain_decoding_s_and_some_drafts_are_accepted(
    model: SpaceModel, num_drafts: int, device: bool
) -> None:
    plain, _ = run(model, FixedLayout.full(0))
    texts, client = run(model, FixedLayout.by_head(num_drafts), device=device)
    assert texts == plain
    reports = [report for sequence in client.sequences.values() for report in sequence.reports if report.num_drafted]
    assert max(report.num_drafted for report in reports) == num_drafts
    assert {report.draft_source for report in reports} == {pb.DRAFT_SOURCE_HEAD}
    assert not any(report.num_mask_drafts for report in reports)
    assert {min(report.num_accepted, 1) for report in reports} == {0, 1}


def test_device_steps_draft_what_host_steps_do(model: SpaceModel) -> None:
    def accepted(device: bool) -> list[list[int]]:
        _, client = run(model, FixedLayout.by_head(4), device=device)
        return [sequence.accepted for sequence in client.sequences.values()]

    assert accepted(True) == accepted(False)


def test_a_request_may_command_its_drafts_up_to_the_head_s(model: SpaceModel) -> None:
    worker = Worker(model, num_blocks=100, block_size=4, controller=FixedLayout.full(0))
    assert worker.hello("life").num_head_drafts == 5
    client = WorkerClient(worker)
    some, many = (client.admit(PROMPTS[0], max_tokens=30, num_forced_drafts=count) for count in (2, 6))
    client.run()
    assert max(report.num_drafted for report in client.sequences[some].reports) == 2
    assert client.sequences[many].error == (
        "6 drafts per step are asked for; this worker drafts at most 5 by its recurrent head."
    )


def test_a_worker_that_is_to_draft_by_masks_alone_leaves_the_head_out(model: SpaceModel) -> None:
    sources = DraftSources(head=False)
    _, client = run(model, None, sources=sources)
    assert not any(report.num_drafted for sequence in client.sequences.values() for report in sequence.reports)
    assert Worker(model, num_blocks=100, block_size=4, sources=sources).hello("life").num_head_drafts == 0


def cost(*, per_row: float, per_head_step: float) -> StepCost:
    """A machine on which a row and a draft of the head cost so many thousandths of a plain step."""
    shapes = [
        StepShape(n, n * (1 + k), n * m, n * (m > 0)) for n in (1, 8) for k in (0, 1, 3, 5) for m in (0, k, 3 * k)
    ]
    shapes += [StepShape(n, n * (1 + k), num_head_steps=k) for n in (1, 8) for k in (1, 3, 5)]
    return StepCost.from_points(
        [(shape, 1.0 + 1e-3 * (per_row * shape.num_rows + per_head_step * shape.num_head_steps)) for shape in shapes]
    )


@pytest.mark.parametrize(
    ("per_row", "per_head_step", "drafter"), [(20.0, 5.0, "head"), (0.1, 300.0, "masks"), (2000.0, 2000.0, "none")]
)
def test_the_controller_takes_what_the_costs_favour(per_row: float, per_head_step: float, drafter: str) -> None:
    controller = SpeculationController(cost(per_row=per_row, per_head_step=per_head_step))
    shape = AcceptanceShape((0.8,) * 5, 5)
    limits = [
        DraftLimits(n, 5, 5, 100, acceptance=Acceptance(shape), max_head_drafts=5, head_acceptance=Acceptance(shape))
        for n in range(8)
    ]
    layouts = controller.layouts(limits, StepLoad())
    assert len(set(layouts)) == 1
    found = "head" if layouts[0].head_drafts else "masks" if layouts[0].num_masks else "none"
    assert found == drafter


def test_bad_sections_and_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, num_masks=0, head_drafts=5, draft_vocab=60)
    assert load_model(path).facts.head == HeadFacts(5)
    config = json.loads((path / "config.json").read_text())
    head = config["space"]["recurrent_head"]
    for wrong, error in (
        (head | {"num_drafts": 17}, "makes 1 to 16 drafts; config.json says 17"),
        (head | {"hidden": 31}, "w1.weight in .* has shape .*config.json makes it .31, 128"),
        (head | {"file": "elsewhere.safetensors"}, "elsewhere.safetensors is not in"),
        ({"file": head["file"]}, "needs file, hidden, embedding_scale and num_drafts"),
        ([], "must be an object"),
    ):
        config["space"]["recurrent_head"] = wrong
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InvalidSpaceSection, match=error):
            load_model(path)


def test_layouts_of_the_head_have_no_masks() -> None:
    layout = DraftLayout.by_head(5, 3)
    assert (layout.num_rows, layout.num_masks, layout.head_drafts, layout.makes_drafts) == (6, 0, 3, True)
    assert layout.with_drafts(2) == DraftLayout.by_head(2, 3)
    assert layout.next_drafts(1) is None
    with pytest.raises(ValueError, match="do not draft in one step"):
        replace(layout, masks=(1,) * 6)


def test_the_head_of_the_checkpoint_s_own_adapter_can_be_asked_for(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, adapter_rank=4, num_masks=2, head_drafts=5)
    model = load_model(path, dtype="float32", num_threads=1)
    plain, _ = run(model, FixedLayout.full(0))
    worker = Worker(model, num_blocks=100, block_size=4, sources=DraftSources(masks=False))
    hello = worker.hello("life")
    assert (hello.num_masks, hello.num_head_drafts, hello.lays_out_masks) == (2, 5, False)
    facts = WorkerModelFacts.from_hello(hello)
    assert facts.max_forced_drafts("") == 5
    client = WorkerClient(worker)
    number = client.admit(PROMPTS[0], max_tokens=32, num_forced_drafts=5)
    client.run()
    reports = [report for report in client.sequences[number].reports if report.num_drafted]
    assert client.sequences[number].tokens == plain[0]
    assert {report.draft_source for report in reports} == {pb.DRAFT_SOURCE_HEAD}
    assert max(report.num_drafted for report in reports) == 5
