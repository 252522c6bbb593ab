"""Synthetic acceptance: drafts are accepted at the given rates, and the text stays plain decoding's."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate
from operator import mul
from pathlib import Path

import pytest
from doubles.worker import ScriptedModel
from space_common.worker.client import WorkerClient
from space_common.worker.settings import parse_chances
from space_model.geometry.draft_layout import DraftLayout
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.__main__ import build_worker
from space_server.config import parse
from space_server.speculation.controller import Controller, FixedLayout
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance, label
from space_server.worker import Worker

CHANCES = parse_chances(".57")
PRUNED = FixedLayout(lambda room: DraftLayout(room.num_drafts, ((4, 0, 2, 0, 0, 0)[: room.num_drafts + 1])))
SAMPLINGS = {
    "greedy": pb.Sampling(),
    "sampled": pb.Sampling(seed=3, temperature=0.9),
    "penalised": pb.Sampling(seed=8, choice=2, temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3),
}


def synthetic_of(
    model: SpaceModel | ScriptedModel, chances: tuple[float, ...] = CHANCES, **more: int
) -> SyntheticAcceptance:
    return SyntheticAcceptance(chances, vocab_size=model.facts.vocab_size, mask_ids=model.facts.mask_ids, **more)


def router_of(
    model: SpaceModel | ScriptedModel,
    synthetic: SyntheticAcceptance | None,
    controller: Controller,
    num_blocks: int = 512,
) -> WorkerClient:
    return WorkerClient(Worker(model, num_blocks=num_blocks, block_size=16, controller=controller, synthetic=synthetic))


@pytest.fixture(scope="module")
def judged() -> list[pb.SequenceReport]:
    """The decode steps of 40 requests of 250 tokens each, five drafts in whole groups, at .57."""
    model = ScriptedModel(num_masks=5, window=100_000)
    router = router_of(model, synthetic_of(model), FixedLayout.full(5), num_blocks=800)
    prompts = [[10 + n, 11, 12] for n in range(40)]
    for bound in (0, 99):
        numbers = [router.admit(prompt, max_tokens=250, max_draft_length=bound) for prompt in prompts]
        router.run()
    return [report for n in numbers for report in router.sequences[n].reports if report.num_drafted == 5]


def test_each_depth_is_accepted_as_often_as_it_is_told_to(judged: list[pb.SequenceReport]) -> None:
    accepted = Counter(depth for report in judged for depth in range(1, report.num_accepted + 1))
    reached = Counter(depth for report in judged for depth in range(1, min(report.num_accepted + 1, 5) + 1))
    for depth, chance in enumerate(CHANCES, start=1):
        error = math.sqrt(chance * (1 - chance) / reached[depth])
        assert abs(accepted[depth] / reached[depth] - chance) < 3 * error < 0.1


def test_tokens_per_step_of_whole_groups_are_the_closed_formula(judged: list[pb.SequenceReport]) -> None:
    reach = list(accumulate(CHANCES, mul))  # A_1 .. A_5
    formula = 1 + sum(reach)
    variance = sum((2 * j - 1) * a for j, a in enumerate(reach, start=1)) - sum(reach) ** 2
    mean = sum(report.num_accepted + 1 for report in judged) / len(judged)
    assert abs(mean - formula) < 3 * math.sqrt(variance / len(judged)) < 0.15


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("controller", [FixedLayout.full(5), PRUNED], ids=["full", "pruned"])
def test_a_real_model_says_what_plain_decoding_says(
    tiny: SpaceModel, controller: Controller, sampling: pb.Sampling
) -> None:
    prompts = [[70, 71, 72, 73, 74], [20] * 17 + [33, 90], [100, 101]]
    router = router_of(tiny, synthetic_of(tiny), controller)
    plain = [router.generate(p, max_tokens=40, sampling=sampling, max_draft_length=0).tokens for p in prompts]
    numbers = [router.admit(p, max_tokens=40, sampling=sampling) for p in prompts]
    router.run()
    assert [router.sequences[n].tokens for n in numbers] == plain
    lengths = {length for n in numbers for length in router.sequences[n].accepted}
    assert 0 in lengths
    assert max(lengths) > 1


def test_all_rows_are_computed_whatever_comes_true(tiny: SpaceModel) -> None:
    def rows(synthetic: SyntheticAcceptance) -> list[tuple[int, int, int]]:
        router = router_of(tiny, synthetic, FixedLayout.full(3))
        router.generate([70, 71], max_tokens=40, max_draft_length=0)
        begin = len(router.reports)
        router.generate([70, 71], max_tokens=40)
        stats = [report.stats for report in router.reports[begin + 1 :]]  # behind the prompt's step
        return [(step.chain_rows, step.mask_rows, step.prefill_rows) for step in stats[:5]]

    assert rows(synthetic_of(tiny, (0.0,) * 5)) == rows(synthetic_of(tiny, (1.0,) * 5)) == [(4, 12, 0)] * 5


@pytest.mark.parametrize(("chance", "accepted"), [(0.0, {0}), (1.0, {3, 2})])
def test_never_and_always(tiny: SpaceModel, chance: float, accepted: set[int]) -> None:
    router = router_of(tiny, synthetic_of(tiny, (chance,) * 5), FixedLayout.full(3))
    router.generate([70, 71], max_tokens=20, max_draft_length=0)
    ran = router.generate([70, 71], max_tokens=20)
    assert set(ran.accepted[:-2]) <= accepted


def test_a_stale_group_pays_its_greater_depth() -> None:
    # Only group 0 has masks: behind two accepted drafts its masks 3 and 4 draft, which are never accepted here.
    model = ScriptedModel(num_masks=4)
    only_first = FixedLayout(
        lambda room: DraftLayout(min(2, room.num_drafts), (4, 0, 0)[: min(2, room.num_drafts) + 1])
    )
    router = router_of(model, synthetic_of(model, (1.0, 1.0, 0.0, 0.0, 0.0)), only_first)
    router.generate([10, 11], max_tokens=60, max_draft_length=0)
    ran = router.generate([10, 11], max_tokens=60)
    assert ran.accepted[:8] == [2, 0, 2, 0, 2, 0, 2, 0]


def test_the_first_run_keeps_its_own_drafts_and_a_longer_one_beyond_what_is_known() -> None:
    model = ScriptedModel()
    synthetic = synthetic_of(model, (0.0,) * 5)
    router = router_of(model, synthetic, FixedLayout.full(3))
    assert set(router.generate([10, 11], max_tokens=13).accepted) == {3}  # the scripted masks' own
    assert synthetic.num_replaced == 0 < synthetic.num_unknown
    longer = router.generate([10, 11], max_tokens=25).accepted
    assert (set(longer[:10]), set(longer[-2:])) == ({0}, {3})


def test_runs_repeat_and_another_seed_is_wrong_elsewhere(tiny: SpaceModel) -> None:
    def accepted(seed: int) -> list[int]:
        router = router_of(tiny, synthetic_of(tiny, seed=seed), FixedLayout.full(3))
        router.generate([70, 71], max_tokens=60, max_draft_length=0)
        return router.generate([70, 71], max_tokens=60).accepted

    assert accepted(1) == accepted(1) != accepted(2)


def test_requests_at_equal_positions_are_wrong_at_different_ones(tiny: SpaceModel) -> None:
    router = router_of(tiny, synthetic_of(tiny), FixedLayout.full(3))
    for prompt in ([70, 71], [80, 81]):
        router.generate(prompt, max_tokens=60, max_draft_length=0)
    assert router.generate([70, 71], max_tokens=60).accepted != router.generate([80, 81], max_tokens=60).accepted


def test_greedy_requests_are_one_whatever_their_seed_and_sampled_ones_are_not() -> None:
    model = ScriptedModel()
    synthetic = synthetic_of(model, (0.0,) * 5)
    router = router_of(model, synthetic, FixedLayout.full(3))
    for temperature, same in ((0.0, True), (0.7, False)):
        router.generate(
            [10, 11], max_tokens=20, sampling=pb.Sampling(seed=1, temperature=temperature), max_draft_length=0
        )
        before = synthetic.num_replaced
        router.generate([10, 11], max_tokens=20, sampling=pb.Sampling(seed=2, temperature=temperature))
        assert (synthetic.num_replaced > before) is same


def test_memory_is_bounded_and_the_oldest_request_goes_first() -> None:
    model = ScriptedModel()
    synthetic = synthetic_of(model, (0.0,) * 5, max_tokens=50)
    router = router_of(model, synthetic, FixedLayout.full(3))
    for first in (10, 20, 30):
        router.generate([first, 11], max_tokens=20, max_draft_length=0)
    assert set(router.generate([20, 11], max_tokens=20).accepted) == {0}
    assert set(router.generate([10, 11], max_tokens=20).accepted) == {3, 2}


def test_a_wrong_draft_is_a_valid_id_that_was_not_chosen() -> None:
    model = ScriptedModel(num_masks=5, vocab_size=12)  # ids 1 to 5 are masks
    router = router_of(model, synthetic_of(model, (0.0,) * 5), FixedLayout.full(5))
    router.generate([10, 11], max_tokens=200, max_draft_length=0)
    number = router.admit([10, 11], max_tokens=200)
    seen: set[int] = set()

    def look() -> None:
        for sequence in router.worker.batch:
            at = len(sequence.ids)
            for place, draft in enumerate(sequence.drafts):
                assert draft != model.text(at + place)
                seen.add(draft)

    router.run(after_step=look)
    assert set(router.sequences[number].accepted) == {0}
    assert seen <= {0, 6, 7, 8, 9, 10, 11}
    assert len(seen) > 3


@pytest.mark.parametrize(
    ("text", "chances"),
    [
        (".78", (0.84, 0.81, 0.78, 0.75, 0.72)),
        ("0.57", (0.63, 0.60, 0.57, 0.54, 0.51)),
        ("1,.5,0.25,0,0", (1.0, 0.5, 0.25, 0.0, 0.0)),
    ],
)
def test_chances_are_named_or_five(text: str, chances: tuple[float, ...]) -> None:
    assert parse_chances(text) == chances


@pytest.mark.parametrize("text", ["", ".6", "high", ".5,.5", "1,1,1,1,1.5", "nan,0,0,0,0"])
def test_chances_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be \.78, \.57, or five chances"):
        parse_chances(text)


def test_the_label_shouts() -> None:
    assert label(CHANCES) == "SYNTHETIC ACCEPTANCE .63 .60 .57 .54 .51"


def test_the_worker_says_so_in_its_log_and_to_the_router(tiny_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ["--listen", "h:1", "--model", str(tiny_path), "--num-blocks", "4", "--num-threads", "1"]
    for flag, chances, said in ((["--synthetic-acceptance", ".57"], CHANCES, 1), ([], (), 0)):
        caplog.clear()
        worker = build_worker(parse([*words, *flag]))
        assert tuple(worker.hello("x").synthetic_acceptance) == chances
        assert caplog.text.count(label(CHANCES)) == said


def test_a_flag_that_makes_no_sense_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(["--listen", "h:1", "--synthetic-acceptance", "high"])
    assert left.value.code == 2
    assert "must be .78, .57, or five chances p_1,…,p_5 from 0 to 1; got 'high'" in capsys.readouterr().err
