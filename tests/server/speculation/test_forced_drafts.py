"""Each decode step of a request with forced drafts verifies so many from masks, whatever the controller prefers."""

from collections.abc import Iterable

import pytest
from doubles.worker import ScriptedModel
from space_common.worker.client import ClientSequence, WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_proto import worker_pb2 as pb
from space_server.drafts import DraftSources
from space_server.scheduled_batch import PrefillBudget, plan_step
from space_server.speculation.controller import (
    FixedLayout,
    RealizedSpeedup,
    SpeculationController,
    StepLoad,
    choose_layouts,
)
from space_server.step_cost import StepCost, StepShape
from space_server.worker import Worker

BLOCK = 4


def text(position: int) -> int:
    """Repeats itself, so that lookup would draft."""
    return 10 + position % 9


class DearRows(StepCost):
    """A step costs what its rows do, so no draft can ever pay."""

    def __init__(self) -> None:
        super().__init__([])

    def seconds(self, shape: StepShape) -> float:
        return 1e-3 * shape.num_rows


class FreeRows(StepCost):
    """Every step costs the same, so all drafts pay."""

    def __init__(self) -> None:
        super().__init__([])

    def seconds(self, shape: StepShape) -> float:
        return 1e-3


def client_of(
    *,
    device: bool,
    wrong: Iterable[int] = (),
    sources: DraftSources | None = None,
    controller: SpeculationController | None = None,
) -> WorkerClient:
    worker = Worker(
        ScriptedModel(num_masks=3, text=text, wrong=wrong), num_blocks=400, block_size=BLOCK, device_steps=device,
        controller=controller or SpeculationController(DearRows()), sources=sources or DraftSources(lookup=True),
    )  # fmt: skip
    return WorkerClient(worker)


def require_drafts(sequence: ClientSequence, forced: int) -> None:
    """Every decode step verifies so many mask drafts, but for those that max_tokens leaves no place for."""
    num_left = sequence.request.limits.max_tokens
    for report in sequence.reports:
        if report.decoded:
            assert report.num_drafted == min(forced, num_left - 1)
            assert report.draft_source == pb.DRAFT_SOURCE_MASKS
        num_left -= len(report.tokens)


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_every_step_has_so_many_drafts_and_all_of_them_from_masks(device: bool) -> None:
    client = client_of(device=device, wrong=range(0, 200, 3))
    prompt = [text(position) for position in range(20)]
    seq_ids = {k: client.admit(prompt, max_tokens=40, num_forced_drafts=k) for k in (1, 2, 3)}
    free = client.admit(prompt, max_tokens=40)
    client.run()
    for k, seq_id in seq_ids.items():
        sequence = client.sequences[seq_id]
        require_drafts(sequence, k)
        assert {report.num_accepted for report in sequence.reports} >= {0, 1}, "some drafts were wrong, some right"
        assert sequence.tokens == [text(position) for position in range(20, 60)]
    assert client.sequences[free].tokens == [text(position) for position in range(20, 60)]


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_steps_with_forced_drafts_do_not_count_as_the_controllers(
    device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(RealizedSpeedup, "stepped", lambda realized, num_tokens, seconds: counted.append(num_tokens))
    client = client_of(device=device, controller=SpeculationController(FreeRows()))
    if (device_runner := client.worker.engine.device) is not None:  # as in a server, prompts have another controller
        device_runner.controller = device_runner.scheduler.controller = SpeculationController(FreeRows())
    prompt = [text(position) for position in range(20)]
    client.generate(prompt, max_tokens=40)
    assert counted, "alone, a sequence follows the controller's rule"
    counted.clear()
    client.generate(prompt, max_tokens=40, num_forced_drafts=2)
    client.admit(prompt, max_tokens=80, num_forced_drafts=2)
    beside = client.sequences[client.admit(prompt, max_tokens=30)]
    client.run(lambda: beside.finish != pb.FINISH_NONE)
    assert counted == []


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_a_prediction_is_counted_and_drafts_nothing(device: bool) -> None:
    client = client_of(device=device)
    ids = [text(position) for position in range(50)]
    sequence = client.generate(ids[:20], max_tokens=30, num_forced_drafts=2, prediction=ids[20:])
    require_drafts(sequence, 2)
    assert sum(sum(report.num_predicted) for report in sequence.reports) == 30


def test_a_prompt_beside_it_does_not_take_its_drafts() -> None:
    client = client_of(device=False)
    seq_id = client.admit([text(position) for position in range(20)], max_tokens=12, num_forced_drafts=2)
    client.step()
    client.admit([text(position) for position in range(200)], max_tokens=2)
    never = PrefillBudget(64, seconds=1e-9, cost=DearRows())
    batch = plan_step(client.worker.batch, FixedLayout.full(0), block_size=BLOCK, budget=never)
    assert [plan.layout for plan in batch.plans if plan.sequence.seq_id == seq_id] == [DraftLayout.full(2, 2)]


def test_other_sequences_are_laid_out_by_the_controller() -> None:
    client = client_of(device=False)
    for k in (0, 2, 0):
        client.admit([11, 12, 13], num_forced_drafts=k)
    client.step()
    batch = plan_step(client.worker.batch, FixedLayout.full(1), block_size=BLOCK, budget=PrefillBudget(64))
    assert [plan.layout.num_masks for plan in batch.plans] == [1, 6, 1]
    assert choose_layouts(FixedLayout.full(1), [], StepLoad()) == []


@pytest.mark.parametrize(
    ("sources", "forced", "message"),
    [(DraftSources(), 4, "at most 3"), (DraftSources(lookup=True, masks=False), 1, "at most 0")],
    ids=["more than there are masks", "without masks"],
)
def test_more_than_the_masks_are_refused(sources: DraftSources, forced: int, message: str) -> None:
    client = client_of(device=False, sources=sources)
    sequence = client.generate([11, 12, 13], num_forced_drafts=forced)
    assert sequence.finish == pb.FINISH_ERROR
    assert message in sequence.reports[-1].error
