"""Masks, lookup and predictions compose: the best of them drafts, and the text stays what it is."""

from __future__ import annotations

import math
import random

import pytest
from doubles.worker import ScriptedModel
from space_common.worker.client import ClientSequence, WorkerClient
from space_proto import worker_pb2 as pb
from space_server.drafts import (
    JUDGED_EVERY,
    LENGTHS,
    Acceptance,
    AcceptanceShape,
    DraftOrigin,
    DraftSources,
    Proposal,
    SourceAcceptance,
    SuffixIndex,
    chances_of,
)
from space_server.speculation.controller import FixedLayout
from space_server.worker import SOURCE_DRAFTS, Worker


def chance(shape: AcceptanceShape, depth: int, shift: float = 0.0) -> float:
    """Of a draft of this depth, in a sequence whose log-odds are shifted so far."""
    return 1.0 / (1.0 + math.exp(-shape.log_odds(depth) - shift))


def run(acceptance: Acceptance, chances: list[float], steps: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        accepted = 0
        while accepted < len(chances) and rng.random() < chances[accepted]:
            accepted += 1
        acceptance.step(1, len(chances), accepted)


def test_at_first_all_is_as_the_prior_says() -> None:
    shape = AcceptanceShape((0.8, 0.6), 3)
    acceptance = Acceptance(shape)
    assert [chance(shape, depth, acceptance.shift) for depth in (1, 2, 3, 9)] == pytest.approx([0.8, 0.6, 0.6, 0.6])
    assert acceptance.level == 0


def test_the_shape_follows_what_is_verified_by_depth() -> None:
    shape = AcceptanceShape((0.5, 0.5), 2)
    for seed in range(20):
        run(Acceptance(shape), [0.8, 0.3], 100, seed)
    assert [shape.mean(1), shape.mean(2)] == pytest.approx([0.8, 0.3], abs=0.06)


def test_sequences_come_apart() -> None:
    shape = AcceptanceShape((0.6, 0.6, 0.6), 3)
    good, bad = Acceptance(shape), Acceptance(shape)
    for seed in range(40):
        run(good, [0.95] * 3, 4, seed)
        run(bad, [0.1] * 3, 4, seed)
    assert good.level > bad.level + 2
    assert chance(shape, 1, good.shift) > 0.8
    assert chance(shape, 1, bad.shift) < 0.35


def test_drafts_from_deeper_masks_count_where_they_come_from() -> None:
    shape = AcceptanceShape((0.5, 0.5, 0.5), 3)
    acceptance = Acceptance(shape)
    for _ in range(50):
        acceptance.step(3, 1, 0)
    assert chance(shape, 1) == pytest.approx(0.5)
    assert chance(shape, 3) < 0.35


def test_a_draft_behind_a_rejected_one_says_nothing() -> None:
    shape = AcceptanceShape((0.5, 0.5), 2)
    for _ in range(50):
        Acceptance(shape).step(1, 2, 0)
    assert chance(shape, 2) == pytest.approx(0.5)


def test_who_is_not_drafted_for_becomes_average_again() -> None:
    acceptance = Acceptance(AcceptanceShape())
    run(acceptance, [0.0] * 5, 120)
    low = acceptance.shift
    for _ in range(500):
        acceptance.step(1, 0, 0)
    assert low < -1
    assert abs(acceptance.shift) < 0.3 * abs(low)


PROMPT = [50, 51, 52, 53, 54]
PERIOD = 12


def repeating(position: int) -> int:
    """A text that repeats itself every PERIOD ids."""
    return 10 + position % PERIOD


def router_of(model: ScriptedModel, *, k: int = 8, lookup: bool = True, masks: bool = True) -> WorkerClient:
    worker = Worker(
        model, num_blocks=256, block_size=4, controller=FixedLayout.full(k),
        sources=DraftSources(lookup=lookup, masks=masks),
    )  # fmt: skip
    return WorkerClient(worker)


def said(model: ScriptedModel, count: int) -> list[int]:
    return [model.text(position) for position in range(len(PROMPT), len(PROMPT) + count)]


def sources_of(run: ClientSequence) -> set[pb.DraftSource.ValueType]:
    return {report.draft_source for report in run.reports if report.num_drafted}


def test_a_plain_checkpoint_drafts_from_its_own_past() -> None:
    model = ScriptedModel(num_masks=0, text=repeating)
    router = router_of(model)
    assert router.worker.hello("x").max_draft_length == SOURCE_DRAFTS
    run = router.generate(PROMPT, max_tokens=96)
    assert run.tokens == said(model, 96)
    assert sources_of(run) == {pb.DRAFT_SOURCE_LOOKUP}
    assert {0, SOURCE_DRAFTS} <= {report.num_accepted for report in run.reports}
    assert len(run.reports) < 96 / 3


def test_without_lookup_and_masks_every_step_gives_one_token() -> None:
    model = ScriptedModel(num_masks=0, text=repeating)
    assert len(router_of(model, lookup=False).generate(PROMPT, max_tokens=96).reports) == 96


def test_where_nothing_repeats_the_masks_draft() -> None:
    model = ScriptedModel(vocab_size=512)
    run = router_of(model, k=3).generate(PROMPT, max_tokens=96)
    assert run.tokens == said(model, 96)
    assert sources_of(run) == {pb.DRAFT_SOURCE_MASKS}


def test_nobody_reads_the_text_of_who_never_speculates() -> None:
    router = router_of(ScriptedModel(num_masks=0, text=repeating))
    router.admit(PROMPT, max_tokens=4, max_draft_length=0)
    router.admit(PROMPT, max_tokens=4, max_draft_length=0, prediction=[5, 6, 7])
    router.admit(PROMPT, max_tokens=4)
    assert [sequence.drafter is not None for sequence in router.worker.batch] == [False, True, True]


def test_what_cannot_pay_its_row_is_not_proposed_but_judged_now_and_then() -> None:
    sources = DraftSources(lookup=True)
    drafter = sources.drafter(0, ())
    assert drafter is not None
    known: list[int] = []

    def proposals(count: int) -> int:
        found = 0
        for _ in range(count):
            token = repeating(len(known))
            drafter.extend(known, [token])
            known.append(token)
            found += drafter.propose(8) is not None
        return found

    proposals(3 * PERIOD)
    assert proposals(64) == 64
    sources.price = 1.0
    assert proposals(64) == 64 // JUDGED_EVERY


def test_a_text_is_not_read_where_no_draft_can_pay_and_read_again_where_one_can() -> None:
    sources = DraftSources(lookup=True)
    always, sometimes = (DraftSources(lookup=True).drafter(0, ()), sources.drafter(0, ()))
    assert always is not None
    assert sometimes is not None
    known: list[int] = []
    proposed: list[tuple[bool, bool]] = []
    for length in range(6 * PERIOD):
        sources.price = {2: 1.1, 3: 0.9}.get(length // PERIOD, 0.1)
        token = repeating(length)
        for drafter in (always, sometimes):
            drafter.extend(known, [token])
        known.append(token)
        one, other = always.propose(8), sometimes.propose(8)
        if one is not None and other is not None:
            assert one.ids == other.ids
        proposed.append((one is not None, other is not None))
    asleep = slice(2 * PERIOD, 4 * PERIOD)
    assert all(one for one, _ in proposed[2 * PERIOD :])
    assert not any(other for _, other in proposed[asleep])
    assert all(other for _, other in proposed[4 * PERIOD :])


def test_naps_let_no_id_be_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[int] = []

    class Counting(SuffixIndex):
        def push(self, id_: int) -> None:
            pushed.append(id_)
            super().push(id_)

    monkeypatch.setattr("space_server.drafts.SuffixIndex", Counting)
    sources = DraftSources(lookup=True)
    drafter, known = sources.drafter(500, ()), [repeating(length) for length in range(500)]
    assert drafter is not None
    for length in range(500, 900):
        sources.is_paused = length // 5 % 2 == 1
        drafter.extend(known, [repeating(length)])
        known.append(repeating(length))
        assert (drafter.propose(8) is None) == sources.is_paused
    sources.is_paused = False
    drafter.extend(known, [7])
    assert pushed[-401:] == [*known[500:], 7]
    assert len(pushed) <= len(known) + 1


def test_right_masks_and_a_longer_lookup_make_one_chain() -> None:
    # Masks that never failed are worth more than a short match: they draft, and it goes on behind them.
    model = ScriptedModel(num_masks=5, text=lambda position: 10 + position if position < 300 else repeating(position),
                          vocab_size=512)  # fmt: skip
    run = router_of(model).generate(PROMPT, max_tokens=420)
    joined = [report for report in run.reports if 0 < report.num_mask_drafts < report.num_drafted]
    assert run.tokens == said(model, 420)
    assert {report.num_mask_drafts for report in joined} == {5}
    *others, first = sorted((report.num_accepted for report in joined), reverse=True)
    assert set(others) == {SOURCE_DRAFTS}
    assert 5 <= first < SOURCE_DRAFTS  # at the end of the first period, behind which the text once went on differently


def test_behind_the_masks_drafts_goes_on_what_followed_them_before() -> None:
    # Five ids recur between ids that never do: masks draft the first two, behind which alone the past has an answer.
    def text(position: int) -> int:
        return 30 + position % 8 if position % 8 < 5 else 100 + position

    model = ScriptedModel(num_masks=2, text=text, vocab_size=512)
    run = router_of(model).generate(PROMPT, max_tokens=240)
    assert run.tokens == said(model, 240)
    joined = [report for report in run.reports if 0 < report.num_mask_drafts < report.num_drafted]
    assert {report.num_mask_drafts for report in joined} <= {1, 2}
    assert {report.draft_source for report in joined} == {pb.DRAFT_SOURCE_LOOKUP}
    assert any(report.num_accepted > report.num_mask_drafts for report in joined)
    assert any(report.num_accepted < report.num_drafted for report in joined)


def test_what_goes_on_behind_masks_is_believed_by_what_came_there() -> None:
    drafter = DraftSources(lookup=True).drafter(2, ())
    assert drafter is not None
    known, expected = [1, 2], []
    drafter.extend([1], [2])
    for other in range(100, 140):  # masks draft 1, 2 behind another id each time; then never comes what came before
        drafter.propose(4)
        behind = drafter.propose_behind([other, 1, 2], 4)
        tokens = [other, 1, 2, other + 100]
        drafter.extend(known, tokens)
        known += tokens
        if behind is not None:
            expected.append(behind.expected)
    assert len(expected) > 30
    assert expected[-1] < expected[0] / 2


def test_wrong_masks_give_way_to_a_lookup_that_comes_true() -> None:
    model = ScriptedModel(num_masks=3, text=repeating, wrong=range(200))
    run = router_of(model).generate(PROMPT, max_tokens=96)
    assert run.tokens == said(model, 96)
    late = [report for report in run.reports[PERIOD + 2 :] if report.num_drafted]
    assert {report.draft_source for report in late} == {pb.DRAFT_SOURCE_LOOKUP}
    assert all(report.num_mask_drafts == 0 for report in late)


def test_a_right_prediction_is_accepted_whole_and_counted() -> None:
    model = ScriptedModel(num_masks=0)
    run = router_of(model, lookup=False).generate(PROMPT, max_tokens=96, prediction=said(model, 96))
    assert run.tokens == said(model, 96)
    assert sources_of(run) == {pb.DRAFT_SOURCE_PREDICTION}
    assert sum(sum(report.num_predicted) for report in run.reports) == 96
    assert {SOURCE_DRAFTS} <= {report.num_accepted for report in run.reports}


def test_a_wrong_prediction_costs_two_rejections_and_is_not_counted() -> None:
    model = ScriptedModel(num_masks=0, text=lambda position: 70 + position, vocab_size=512)
    run = router_of(model, lookup=False).generate(PROMPT, max_tokens=96, prediction=[5, 6, 7, 8] * 12)
    assert run.tokens == said(model, 96)
    assert sum(sum(report.num_predicted) for report in run.reports) == 0
    drafted = [report for report in run.reports if report.num_drafted]
    assert len(drafted) <= 2
    assert all(report.num_accepted == 0 for report in drafted)


def test_a_prediction_counts_without_speculation_too() -> None:
    model = ScriptedModel(num_masks=0)
    run = router_of(model, lookup=False).generate(PROMPT, max_tokens=96, prediction=said(model, 96), max_draft_length=0)
    assert sum(sum(report.num_predicted) for report in run.reports) == 96
    assert all(report.num_drafted == 0 for report in run.reports)


def test_which_tokens_had_been_predicted_does_not_depend_on_the_steps() -> None:
    model = ScriptedModel(num_masks=0)
    text = said(model, 96)
    strayed = [9 if place % 11 in (4, 5) else id_ for place, id_ in enumerate(text)]
    reported = []
    for drafts in (0, 1, 3, SOURCE_DRAFTS):
        run = router_of(model, lookup=False).generate(
            PROMPT, max_tokens=96, prediction=strayed, max_draft_length=drafts
        )
        assert any(run.accepted) == (drafts > 0)
        reported.append([count for report in run.reports for count in report.num_predicted or [0] * len(report.tokens)])
    assert reported == reported[:1] * 4
    assert len(reported[0]) == 96 > sum(reported[0]) > 60


def test_a_sequence_admitted_again_counts_what_comes_then() -> None:
    model = ScriptedModel(num_masks=0)
    router = router_of(model)
    text = said(model, 40)
    sequence = router.generate(PROMPT + text[:17], num_prompt=5, max_tokens=40, prediction=text)
    again = sequence
    assert again.tokens == text
    assert sum(sum(report.num_predicted) for report in again.reports) == 40 - 17


def test_only_lookup_lays_out_no_masks() -> None:
    router = router_of(ScriptedModel(text=repeating), masks=False)
    run = router.generate(PROMPT, max_tokens=96)
    assert all(report.stats.mask_rows == 0 for report in router.reports)
    assert sources_of(run) == {pb.DRAFT_SOURCE_LOOKUP}


def test_a_prediction_outside_the_vocabulary_fails_alone() -> None:
    run = router_of(ScriptedModel()).generate(PROMPT, max_tokens=96, prediction=[64])
    assert run.finish == pb.FINISH_ERROR
    assert run.error == "Id 64 of the prediction is outside the vocabulary of 64."


def test_what_a_source_is_worth_follows_its_verdicts_whether_it_was_taken_or_not() -> None:
    drafter = DraftSources(lookup=True).drafter(2, ())
    assert drafter is not None
    text, layout_yields = [1, 2], []
    drafter.extend([1], [2])
    for other in range(100, 130):  # behind 1, 2 never comes what came before
        tokens = [other, 1, 2]
        drafter.extend(text, tokens)
        text += tokens
        proposal = drafter.propose(4)
        assert proposal is not None
        assert (proposal.acceptance.source, proposal.ids[0]) == (DraftOrigin.LOOKUP, other)
        layout_yields.append(proposal.expected)
    assert layout_yields[-1] < layout_yields[0] / 2


def test_a_source_that_was_wrong_for_long_is_believed_again_when_it_is_right() -> None:
    shapes = DraftSources().shapes[DraftOrigin.LOOKUP]
    trust, others = SourceAcceptance(DraftOrigin.LOOKUP, shapes), SourceAcceptance(DraftOrigin.LOOKUP, shapes)

    def verify_sequences(whose: SourceAcceptance, token: int) -> None:
        whose.observe(Proposal(whose, [7], LENGTHS[-1], whose.chances(LENGTHS[-1])), [token])

    for _ in range(5000):
        verify_sequences(trust, 8)
        verify_sequences(others, 7)  # the shape that they share stays what it was
    assert trust.chances(LENGTHS[-1])[0] < 0.2
    for _ in range(100):
        verify_sequences(trust, 7)
    assert trust.chances(LENGTHS[-1])[0] > 0.4


def test_the_masks_are_asked_what_they_are_worth() -> None:
    drafter = DraftSources(lookup=True).drafter(2, ())
    assert drafter is not None
    drafter.extend([1, 2, 3, 1], [2])
    proposal = drafter.propose(4)
    assert proposal is not None
    good, bad = Acceptance(AcceptanceShape((0.98,))), Acceptance(AcceptanceShape((0.02,)))
    assert not proposal.beats(chances_of(good, 1, 5))
    assert proposal.beats(chances_of(bad, 1, 5))
    assert proposal.beats(chances_of(good, 1, 0))
