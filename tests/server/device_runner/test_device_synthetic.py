"""Drafts decreed on the device are those decreed on the host, step by step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from doubles.worker import PROMPTS, ScriptedModel
from space_common.worker.client import WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.__main__ import build_worker
from space_server.config import parse
from space_server.device_runner import device_batch
from space_server.speculation.controller import Controller, FixedLayout
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("no_device_step_fails_unseen")

CHANCES = (0.63, 0.60, 0.57, 0.54, 0.51)
SAMPLINGS = [
    pb.Sampling(),
    pb.Sampling(seed=3, temperature=0.9),
    pb.Sampling(seed=8, choice=2, temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3),
    pb.Sampling(seed=5, temperature=1.0, top_p=0.9),
]
LENGTHS = [40, 23, 31, 40]
STALE = FixedLayout(lambda room: DraftLayout(min(2, room.num_drafts), (4, 0, 0)[: min(2, room.num_drafts) + 1]))


def router_of(
    model: SpaceModel | ScriptedModel, controller: Controller, *, device: bool, chances: tuple[float, ...] = CHANCES,
    max_sequences: int = 64,
) -> tuple[WorkerClient, SyntheticAcceptance]:  # fmt: skip
    facts = model.facts
    synthetic = SyntheticAcceptance(chances, vocab_size=facts.vocab_size, mask_ids=facts.mask_ids)
    worker = Worker(
        model, num_blocks=512, block_size=16, controller=controller, synthetic=synthetic, device_steps=device,
        max_sequences=max_sequences,
    )  # fmt: skip
    return WorkerClient(worker), synthetic


Steps = list[tuple[int, int, list[int]]]


def steps(router: WorkerClient, numbers: list[int]) -> list[Steps]:
    """Drafted, accepted and emitted in each step of each of them."""
    return [[(r.num_drafted, r.num_accepted, list(r.tokens)) for r in router.sequences[n].reports] for n in numbers]


@pytest.mark.parametrize("controller", [FixedLayout.full(5), FixedLayout.full(2), STALE], ids=["full", "two", "stale"])
def test_every_step_drafts_and_accepts_what_it_does_on_the_host(tiny: SpaceModel, controller: Controller) -> None:
    found, counted = [], []
    for device in (False, True):
        router, synthetic = router_of(tiny, controller, device=device)
        for turn in range(2):  # the first gives the texts
            numbers = [
                router.admit(prompt, max_tokens=length, sampling=sampling_params, max_draft_length=99 * turn)
                for prompt, length, sampling_params in zip(PROMPTS, LENGTHS, SAMPLINGS, strict=True)
            ]
            router.run()
        found.append(steps(router, numbers))
        counted.append(synthetic.num_replaced)
        assert not device or router.worker.engine.device.num_forwards > 30
    assert found[1] == found[0]
    assert counted[1] == counted[0] > 50
    accepted = {accepted for of_one in found[1] for drafted, accepted, _ in of_one if drafted}
    assert {0, 1, 2} <= accepted


@pytest.mark.parametrize(("chance", "accepted"), [(0.0, {0}), (1.0, {3, 2})])
def test_never_and_always(tiny: SpaceModel, chance: float, accepted: set[int]) -> None:
    router, _ = router_of(tiny, FixedLayout.full(3), device=True, chances=(chance,) * 5)
    for bound in (0, 99):
        sequence = router.generate([70, 71], max_tokens=21, max_draft_length=bound)
    assert set(sequence.accepted[:-2]) <= accepted
    assert sequence.tokens == router.sequences[1].tokens


def test_a_text_that_parts_from_what_was_told_and_one_that_goes_beyond_keep_their_own_drafts() -> None:
    router, synthetic = router_of(ScriptedModel(), FixedLayout.full(3), device=True, chances=(0.0,) * 5)
    first, short = router.admit([10, 11], max_tokens=13), router.admit([10, 11], max_tokens=1)
    router.run()
    assert set(router.sequences[first].accepted) == {3}  # the scripted masks' own
    assert len(router.sequences[short].tokens) == 1
    sequence = router.generate([10, 11], max_tokens=25)
    accepted = sequence.accepted
    assert (set(accepted[:10]), set(accepted[-2:])) == ({0}, {3})
    assert synthetic.num_replaced > 0


def test_a_line_is_told_of_its_own_sequence_alone_also_where_lines_move(tiny: SpaceModel) -> None:
    """One after the other ends, the gaps close, and others take the lines."""
    prompts = [[70 + n, 71] for n in range(8)]
    lengths = [4, 30, 5, 28, 6, 7, 9, 33]
    found = []
    for device in (False, True):
        router, _ = router_of(tiny, FixedLayout.full(3), device=device, max_sequences=8)
        for prompt in prompts:
            router.admit(prompt, max_tokens=33, max_draft_length=0)
        router.run()
        numbers = [router.admit(prompt, max_tokens=length) for prompt, length in zip(prompts, lengths, strict=True)]
        others = [prompts[n] for n in (6, 1, 3, 0)]

        def admit_another(
            router: WorkerClient = router, numbers: list[int] = numbers, others: list[list[int]] = others
        ) -> None:
            if others and len(router.worker.batch) < 5:
                numbers.append(router.admit(others.pop(), max_tokens=20))

        router.run(after_step=admit_another)
        found.append(dict(zip(numbers, steps(router, numbers), strict=True)))
        assert len(numbers) == 12
    assert found[1] == found[0]


def test_a_request_whose_text_is_longer_than_a_line_is_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_batch, "MOST_CONTINUATION_BYTES", 12 * 16 * 64)
    router, _ = router_of(ScriptedModel(), FixedLayout.full(3), device=True, chances=(1.0,) * 5)
    for length, is_on_host in ((16, False), (17, True)):
        router.admit([length, 11], max_tokens=length, max_draft_length=0)
        router.run()
        before = router.worker.engine.device.num_forwards
        sequence = router.generate([length, 11], max_tokens=length)
        assert (router.worker.engine.device.num_forwards == before) is is_on_host
        assert max(sequence.accepted) == 3


def test_a_worker_with_decreed_acceptance_steps_on_the_device(tiny_path: Path) -> None:
    words = ["--listen", "h:1", "--model", str(tiny_path), "--num-blocks", "4", "--num-threads", "1"]
    worker = build_worker(parse([*words, "--synthetic-acceptance", ".57", "--steps", "eager"]))
    assert worker.engine.device is not None


def test_drafts_of_the_head_bring_the_decreed_tokens_a_step_in_six_rows_a_sequence(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, hidden_size=32, num_layers=1, num_heads=2, kv_heads=1, num_masks=5, head_drafts=5)
    chances = (0.84, 0.81, 0.78, 0.75, 0.72)
    model = load_model(path, device="cpu", dtype="float32")
    router, _ = router_of(model, FixedLayout.by_head(5), device=True, chances=chances)
    texts: list[list[list[int]]] = []
    for bound in (0, 99):  # the first gives the texts
        numbers = [router.admit(prompt, max_tokens=100, max_draft_length=bound) for prompt in PROMPTS]
        stats: list[pb.StepStats] = []
        while (report := router.step()) is not None:
            stats.append(report.stats)
        texts.append([router.sequences[number].tokens for number in numbers])
    assert texts[1] == texts[0]
    whole = [report for number in numbers for report in router.sequences[number].reports if report.num_drafted == 5]
    decoding = [one for one in stats if one.num_sequences == len(PROMPTS) and not one.prefill_rows]
    assert {(one.chain_rows, one.mask_rows) for one in decoding[:15]} == {(6 * len(PROMPTS), 0)}  # texts end behind
    expected = 1.0 + sum(math.prod(chances[: depth + 1]) for depth in range(5))
    assert len(whole) > 90
    assert sum(report.num_accepted + 1 for report in whole) / len(whole) == pytest.approx(expected, rel=0.08)
