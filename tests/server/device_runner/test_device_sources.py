"""Drafts from a text's past and from predictions, in steps on the device: those of steps on the host, step by step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from doubles.worker import ScriptedModel
from space_common.worker.client import WorkerClient
from space_kernels.sampling.sampling_params import SamplingParams
from space_model.geometry.draft_layout import DraftLayout
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.batch import RunningSequence, SequenceLimits
from space_server.device_runner.device_batch import layout_of_drafts
from space_server.drafts import Acceptance, AcceptanceShape, DraftSources
from space_server.speculation.controller import Controller, DraftLimits, FixedLayout, StepLoad
from space_server.worker import Worker

pytestmark = pytest.mark.usefixtures("no_device_step_fails_unseen")

BLOCK = 4


def verse(position: int) -> int:
    """Repeats itself, but for an id in eleven."""
    return 10 + position % 9 if position % 11 else 30 + position // 11 % 20


def router_of(
    model: Any, *, device: bool, controller: Controller | None = None, lookup: bool = True, masks: bool = True,
    **settings: Any,
) -> WorkerClient:  # fmt: skip
    fixed = {"num_blocks": 400, "block_size": BLOCK, "controller": controller or FixedLayout.full(3)}
    sources = DraftSources(lookup=lookup, masks=masks)
    return WorkerClient(Worker(model, device_steps=device, sources=sources, **(fixed | settings)))


def steps_of(router: WorkerClient) -> list[list[tuple[Any, ...]]]:
    """All that is said of each step of each sequence."""
    return [
        [
            (
                list(report.tokens),
                report.num_drafted,
                report.num_accepted,
                report.draft_source,
                report.num_mask_drafts,
                list(report.num_predicted),
                report.finish,
            )
            for report in ran.reports
            if not report.paused
        ]
        for ran in router.sequences.values()
    ]


@pytest.mark.parametrize("masks", [True, False], ids=["beside masks", "instead"])
def test_every_step_says_what_it_says_on_the_host(masks: bool) -> None:
    found = []
    for device in (False, True):
        model = ScriptedModel(text=verse, wrong=range(0, 400, 3))
        router = router_of(model, device=device, masks=masks)
        for number, start in enumerate((6, 40, 90, 150)):
            prompt = [verse(position) for position in range(start)]
            likely = [verse(position) for position in range(start, start + 30)] if number > 1 else []
            most = 0 if number == 3 else 99  # what it foretold is counted all the same
            router.admit(prompt, max_tokens=30 + 3 * number, prediction=likely, max_draft_length=most)
        router.run()
        found.append(steps_of(router))
        assert not device or router.worker.engine.device.num_forwards > 8
    assert found[0] == found[1]
    said = [step for of_one in found[1] for step in of_one]
    assert {pb.DRAFT_SOURCE_LOOKUP, pb.DRAFT_SOURCE_PREDICTION} <= {step[3] for step in said}
    assert {0, 3} <= {step[2] for step in said}
    assert all(sum(sum(step[5]) for step in of_one) > 10 for of_one in found[1][2:])


def test_more_drafts_than_there_are_masks_are_verified() -> None:
    found = []
    for device in (False, True):
        model = ScriptedModel(text=verse, num_masks=2)
        router = router_of(model, device=device, controller=FixedLayout.full(8), lookup=False)
        prompt = [verse(position) for position in range(20)]
        router.admit(prompt, max_tokens=40, prediction=[verse(position) for position in range(20, 60)])
        router.run()
        found.append(steps_of(router))
    assert found[0] == found[1]
    assert max(step[2] for step in found[1][0]) == 8


def test_a_step_waits_for_the_last_only_while_somebodys_text_is_read(
    calls_of: Callable[[WorkerClient], list[str]],
) -> None:
    router = router_of(ScriptedModel(text=verse), device=True, controller=FixedLayout.full(1), lookup=False)
    prompt = [verse(position) for position in range(20)]
    router.admit(prompt, max_tokens=10, prediction=[verse(position) for position in range(20, 30)])
    router.admit(prompt[:9], max_tokens=60)
    said = calls_of(router)
    router.run()
    assert said[:6] == ["launch", "read", "launch", "read", "launch", "read"]
    alone = next(n for n in range(len(said)) if said[n : n + 2] == ["launch", "launch"])
    assert said[:alone] == ["launch", "read"] * (alone // 2)
    assert said[alone + 2 : alone + 12] == ["read", "launch"] * 5


def test_a_report_is_given_while_the_next_step_is_under_way() -> None:
    router = router_of(ScriptedModel(text=verse), device=True)
    router.admit([verse(position) for position in range(20)], max_tokens=40)
    router.step()  # the prompt
    for _ in range(4):
        report = router.step()
        assert report is not None
        assert report.stepped
        device = router.worker.engine.device
        assert device is not None
        assert device.num_in_flight == 1


def test_texts_that_are_not_read_hold_nobody_up(calls_of: Callable[[WorkerClient], list[str]]) -> None:
    router = router_of(ScriptedModel(text=verse), device=True, controller=Napping())
    router.admit([verse(position) for position in range(20)], max_tokens=30)
    said = calls_of(router)
    router.run()
    assert said[:2] == ["launch", "launch"]
    assert {step[3] for step in steps_of(router)[0]} == {pb.DRAFT_SOURCE_MASKS}


class Napping(FixedLayout):
    """Reading does not pay."""

    is_paused = True

    def __init__(self) -> None:
        super().__init__(lambda room: DraftLayout.full(min(room.num_drafts, 3), 3))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_traffic_gets_the_texts_of_host_steps(seed: int) -> None:
    """With pages one by one, and cancelled now and then."""
    found = []
    for device in (False, True):
        draw = random.Random(seed)
        router = router_of(ScriptedModel(text=verse, wrong=range(0, 400, 4)), device=device, max_sequences=6)
        wanted = []
        for _ in range(14):
            start = draw.randrange(1, 60)
            prompt = [verse(position) for position in range(start)]
            likely = [verse(start + n) + (draw.random() < 0.1) for n in range(20)] if draw.random() < 0.3 else []
            wanted.append(
                {
                    "ids": prompt,
                    "max_tokens": draw.randrange(1, 40),
                    "prediction": likely,
                    "num_pages": draw.choice([None, start // BLOCK + 1]),
                    "max_draft_length": draw.choice([0, 2, 9]),
                    "want_logprobs": draw.random() < 0.2,
                    "sampling": pb.Sampling(seed=draw.getrandbits(60), temperature=draw.choice([0.0, 0.7])),
                }
            )
        while wanted or router.worker.has_work:
            while wanted and len(router.worker.batch) < 6 and draw.random() < 0.7:
                router.admit(**wanted.pop(0))
            report = router.step()
            for sequence in report.sequences if report is not None else ():
                if sequence.finish != pb.FINISH_NONE:
                    router.release(sequence.seq_id)
                elif sequence.paused:
                    router.extend(sequence.seq_id)
        assert sorted(router.free) == list(range(400))
        assert not device or router.worker.engine.device.num_forwards > 20
        found.append([(ran.tokens, ran.finish) for ran in router.sequences.values()])
    assert found[0] == found[1]


def test_the_embedded_model_repeats_itself_on_the_device_too(demo: SpaceModel) -> None:
    found = []
    for device in (False, True):
        router = router_of(demo, device=device, controller=FixedLayout.full(5), block_size=16)
        for seed, temperature in enumerate((0.0, 0.7)):
            prompt = [300 + 7 * n % 90 for n in range(40)] * 2
            router.admit(prompt, max_tokens=40, sampling=pb.Sampling(seed=seed, temperature=temperature))
        router.run()
        found.append(steps_of(router))
    assert found[0] == found[1]
    assert pb.DRAFT_SOURCE_LOOKUP in {step[3] for of_one in found[1] for step in of_one}


@pytest.fixture(scope="module")
def demo() -> SpaceModel:
    return load_model("demo", dtype="float32", num_threads=1)


# ---------------------------------------------------------------------------------------------- one layout for all


class Priced(FixedLayout):
    """Everybody's whole drafts, at a price."""

    def __init__(self, row_price: float) -> None:
        super().__init__(lambda room: DraftLayout.full(room.num_drafts, room.max_masks))
        self.row_price = row_price


def drafted(num_drafts: int, chances: tuple[float, ...] = (), num_masks: int = 2) -> RunningSequence:
    """A sequence in the middle of its text; drafts without chances are its masks'."""
    sequence = RunningSequence(
        seq_id=num_drafts, ids=[5] * 9, num_prompt=4, num_computed=8, pages=list(range(20)),
        sampling_params=SamplingParams(temperature=0.0), limits=SequenceLimits(90, 200, frozenset(), frozenset()),
        max_drafts=8, num_masks=num_masks, drafts=[6] * num_drafts, draft_chances=chances,
    )  # fmt: skip
    sequence.acceptance = Acceptance(AcceptanceShape((0.8, 0.7), 2))
    return sequence


@pytest.mark.parametrize(
    ("row_price", "num_sequences", "num_drafts"),
    [(0.0, 1, 4), (0.5, 1, 2), (0.5, 2, 0), (0.1, 1, 4), (0.2, 4, 1), (0.1, 4, 3)],
)
def test_as_many_drafts_as_bring_what_rows_on_all_lines_cost(
    row_price: float, num_sequences: int, num_drafts: int
) -> None:
    reading = drafted(4, chances=(0.9, 0.8, 0.6, 0.5))  # all are accepted with .9, .72, .43, .22
    others = [drafted(0) for _ in range(num_sequences - 1)]
    layout = layout_of_drafts([reading, *others], Priced(row_price), StepLoad(), BLOCK)
    assert layout.num_drafts == num_drafts
    assert layout.masks == (2,) * (num_drafts + 1)


def test_drafts_of_masks_are_laid_out_as_the_controller_wants_them() -> None:
    layout = layout_of_drafts([drafted(2), drafted(4, chances=(0.1,) * 4)], Priced(0.3), StepLoad(), BLOCK)
    assert layout == DraftLayout.full(2, 2)


def test_the_average_of_those_who_draft_decides() -> None:
    seen: list[DraftLimits] = []

    class Seeing(Priced):
        def layouts(self, rooms: Any, load: StepLoad) -> list[DraftLayout]:
            seen.extend(rooms)
            return super().layouts(rooms, load)

    sequences = [drafted(1), drafted(2)]
    for shift, sequence in zip((0.5, 1.5), sequences, strict=True):
        assert sequence.acceptance is not None
        sequence.acceptance.shift = shift
    layout_of_drafts(sequences, Seeing(0.0), StepLoad(), BLOCK)
    assert [room.acceptance.shift for room in seen if room.acceptance is not None] == [1.0, 1.0]


def test_a_sequence_that_is_released_under_way_is_said_of_no_more() -> None:
    """Its last step is read before it leaves its line, and may be the one that ends it."""
    router = router_of(ScriptedModel(text=verse), device=True, controller=FixedLayout(lambda room: DraftLayout.plain()))
    device = router.worker.engine.device
    assert device is not None
    stays, goes = (router.admit([verse(p) for p in range(20)], max_tokens=most) for most in (12, 4))
    while len(router.sequences[goes].tokens) < 3 or not device.num_in_flight:
        router.step()
    assert device.reads_first
    assert device.refers_to(goes)
    router.release(goes)
    report = router.step()
    assert report is not None
    assert list(report.released) == [goes]
    assert [part.seq_id for part in report.sequences] == [stays]
    assert goes not in router.worker.batch
    router.run()
    assert len(router.sequences[stays].tokens) == 12
