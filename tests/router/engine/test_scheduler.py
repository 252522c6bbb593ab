"""The schedule against a worker that checks every page, without sockets; prefixes are computed once."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from doubles.router import Accepts, HashLanguage, Script, always, half, never, sometimes
from doubles.router.tabletop import Lockstep, answer, in_house, request_of
from hypothesis import given, settings
from hypothesis import strategies as st
from space_proto import worker_pb2
from space_router.engine.errors import DeadlineExceeded, ProtocolViolation
from space_router.engine.request.request import Grammar, SamplingOptions
from space_router.engine.request.request_state import (
    MAX_BLOCKS_AHEAD,
    STEPS_AHEAD,
    Phase,
    RequestState,
    SequenceStep,
    WorkerSequence,
)

EVERY_ACCEPTS = pytest.mark.parametrize("accepts", [never, always, half, sometimes])


@EVERY_ACCEPTS
def test_the_text_does_not_depend_on_accepted_lengths(accepts: Accepts) -> None:
    house = Lockstep(Script(accepts=accepts))
    long, short = house.submit(request_of(11, 30)), house.submit(request_of(3, 5))
    house.run()
    assert house.text(long) == answer(long.request, house.script)
    assert house.text(short) == answer(short.request, house.script)


@EVERY_ACCEPTS
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_nobody_pauses_where_pages_are_plenty(accepts: Accepts, delay: int) -> None:
    house = Lockstep(Script(accepts=accepts, num_blocks=200), delay=delay)
    lives = [house.submit(request_of(7 + i, 60)) for i in range(3)]
    while any(live.phase is not Phase.ENDED for live in lives):
        house.step()
        assert not any(sequence.paused for sequence in house.batch.sequences.values())


def test_at_most_four_blocks_are_granted_ahead() -> None:
    house = Lockstep(Script(accepts=always, draft_length=8, block_size=2, num_blocks=200))
    live = house.submit(request_of(6, 60))
    while live.phase is not Phase.ENDED:
        house.step()
        for sequence in house.scheduler.sequences.values():
            assert len(sequence.pages) <= -(-len(live.ids) // 2) + 4


def test_no_page_is_granted_beyond_the_last_token() -> None:
    house = Lockstep(Script(accepts=always, block_size=4))
    live = house.submit(request_of(6, 3))  # 6 + 3 + 1 slots
    house.step()
    assert len(house.scheduler.sequences[1].pages) == 3
    house.run()
    assert live.num_generated == 3


def test_a_second_request_shares_what_a_running_one_has_computed() -> None:
    house = Lockstep(Script(block_size=4))
    first = house.submit(request_of(9, 40))
    for _ in range(4):
        house.step()
    assert first.phase is Phase.RUNNING
    house.submit(request_of(9, 4))
    house.step()
    shared = house.scheduler.sequences[2].pages[:2]
    assert shared == house.scheduler.sequences[1].pages[:2]
    assert house.batch.figures.num_cached_ids == 8
    house.run()


def test_no_prefix_is_shared_with_a_worker_whose_layers_are_recurrent() -> None:
    house = Lockstep(Script(block_size=4, state_bytes_per_sequence=64))
    first = house.submit(request_of(9, 40))
    for _ in range(4):
        house.step()
    second = house.submit(request_of(9, 4))
    house.step()
    assert not set(house.scheduler.sequences[1].pages).intersection(house.scheduler.sequences[2].pages)
    house.run()
    assert [house.text(live) for live in (first, second)] == [answer(x.request, house.script) for x in (first, second)]
    house.submit(request_of(9, 4))
    house.run()
    assert house.batch.figures.num_cached_ids == 0
    assert house.scheduler.pool.num_cached == 0


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_at_least_one_id_is_always_computed(num_prompt: int, num_cached: int) -> None:
    house = Lockstep(Script(block_size=4))
    house.submit(request_of(num_prompt, 8))
    house.run()
    house.submit(request_of(num_prompt, 8))
    house.run()
    assert house.batch.figures.num_cached_ids == num_cached


@pytest.mark.parametrize("fields", [{"cache_salt": "other"}, {"share_prefix": False}, {"num_prompt_logprobs": 0}])
def test_nothing_is_shared_across_salts_or_where_it_is_not_wanted(fields: dict[str, Any]) -> None:
    house = Lockstep(Script(block_size=4))
    house.submit(request_of(9, 8))
    house.run()
    house.submit(request_of(9, 8, **fields))
    house.run()
    assert house.batch.figures.num_cached_ids == 0


def test_a_request_that_shares_nothing_leaves_nothing() -> None:
    house = Lockstep(Script())
    house.submit(request_of(9, 8, share_prefix=False))
    house.run()
    assert house.scheduler.pool.num_free == house.script.num_blocks


@EVERY_ACCEPTS
def test_preemption_loses_nothing_and_never_meets_the_oldest(accepts: Accepts) -> None:
    house = Lockstep(Script(accepts=accepts, num_blocks=16, block_size=4), delay=1)  # 64 slots for 4 x 41
    lives = [house.submit(request_of(tuple(range(10 * i + 10, 10 * i + 20)), 30)) for i in range(4)]
    while any(live.phase is not Phase.ENDED for live in lives):
        running = [live for live in lives if live.phase is Phase.RUNNING]
        house.step()
        if running:
            assert min(running, key=lambda live: live.age).phase in (Phase.RUNNING, Phase.ENDED)
    house.run()
    assert house.scheduler.num_preemptions > 0
    assert lives[0].statistics.num_preemptions == 0
    for live in lives:
        assert house.text(live) == answer(live.request, house.script)


def test_a_preempted_request_is_admitted_again_only_after_its_release_is_acknowledged() -> None:
    house = Lockstep(Script(num_blocks=12, block_size=4, release_steps=3), delay=2)
    for i in range(3):
        house.submit(request_of(tuple(range(10 * i + 10, 10 * i + 18)), 24))
    saw = 0
    for _ in range(400):
        house.step()
        for live in house.lives:
            if live.phase is Phase.LEAVING:
                saw += 1
                assert live not in house.queue
                assert house.scheduler._by_request[live].step is SequenceStep.RELEASED
    house.run()
    assert saw


def test_two_requests_that_each_fill_the_cache_both_finish() -> None:
    house = Lockstep(Script(num_blocks=10, block_size=4))
    lives = [house.submit(request_of((10 + i, 11, 12), 36)) for i in range(2)]  # 3 + 36 + 1 slots: all of them
    house.run()
    for live in lives:
        assert house.text(live) == answer(live.request, house.script)


def test_the_worker_is_never_given_more_sequences_than_it_takes() -> None:
    house = Lockstep(Script(max_sequences=2, num_blocks=200, release_steps=4))
    for i in range(7):
        house.submit(request_of(5, 6 + i))
    house.run()


def test_prompts_are_admitted_no_faster_than_they_are_computed() -> None:
    house = Lockstep(Script(num_blocks=200), max_prefill_rows=8)
    for i in range(6):
        house.submit(request_of(tuple(range(20 * i, 20 * i + 12)), 4))
    house.step()
    assert house.scheduler.num_running == 1  # 12 of 16 rows in advance; another 12 would be too many
    house.run()


def test_prompts_that_wait_for_a_grammar_keep_nobody_out() -> None:
    """They compute nothing until it is compiled, which takes seconds for some; from then on they count."""
    house = Lockstep(Script(num_blocks=200), max_prefill_rows=8, delay=1)
    prompts = [tuple(range(20 * i, 20 * i + 12)) for i in range(6)]
    bound = SamplingOptions(seed=1, grammar=Grammar("regex", "a+"))
    for prompt in prompts[:2]:
        house.submit(request_of(prompt, 4, sampling=bound))
    house.submit(request_of((*prompts[0][:8], 99), 4))  # shares a prefix that nobody computes yet, and waits for no one
    house.step()
    assert house.scheduler.num_running == 3
    house.run()
    for prompt in prompts[3:]:
        house.submit(request_of(prompt, 4, sampling=bound))
    house.step()
    assert house.scheduler.num_running == 1  # known by now: as without a grammar
    house.run()
    house.scheduler.check()


def test_a_prompt_above_the_prefill_budget_is_still_admitted() -> None:
    house = Lockstep(Script(num_blocks=200), max_prefill_rows=4)
    house.submit(request_of(100, 4))
    house.run()


def test_one_failing_sequence_fails_alone() -> None:
    house = Lockstep(Script(failing_id=99))
    bad, good = house.submit(request_of((98, 99), 9)), house.submit(request_of((97, 98), 9))
    house.run()
    assert house.text(bad) == ()
    assert house.text(good) == answer(good.request, house.script)


def test_commands_of_one_moment_go_together() -> None:
    house = Lockstep(Script(num_blocks=200))
    for i in range(5):
        house.submit(request_of(5 + i, 4))
    house.step()
    kinds = [command.WhichOneof("command") for command in house.messages[0]]
    assert kinds.count("admit") == 5
    house.run()
    assert max(len(moment) for moment in house.messages[1:]) > 1


PHASES = ["queued", "prefill", "decode", "paused", "leaving"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_cancelled_request_gives_its_pages_back_in_any_phase(phase: str) -> None:
    house = Lockstep(Script(num_blocks=12, block_size=4, release_steps=3), max_prefill_rows=4, delay=1)
    # The youngest is preempted as soon as pages run out; the oldest pauses until those have come back.
    requests = [request_of((10, 11, 12, 13, 14 + i), 30) for i in range(2)]
    requests.insert({"paused": 0, "leaving": 1}.get(phase, 2), request_of((20, 21, 22, 23, 24, 25, 26, 27, 28), 20))
    lives = [house.submit(request) for request in requests]
    live = next(live for live in lives if live.num_prompt == 9)

    def now_in(phase: str) -> bool:
        sequence = house.scheduler._by_request.get(live)
        return {
            "queued": live.phase is Phase.QUEUED,
            "prefill": sequence is not None and sequence.step is SequenceStep.PREFILL,
            "decode": sequence is not None and sequence.step is SequenceStep.DECODE,
            "paused": sequence is not None and sequence.out_of_slots,
            "leaving": live.phase is Phase.LEAVING,
        }[phase]

    for _ in range(500):
        if now_in(phase):
            break
        house.step()
    assert now_in(phase)
    house.cancel(live)
    house.run()
    for other in lives:
        assert other is live or house.text(other) == answer(other.request, house.script)


def test_a_cancelled_sequence_is_acknowledged_within_two_steps() -> None:
    house = Lockstep(Script(release_steps=1))
    live = house.submit(request_of(6, 60))
    for _ in range(5):
        house.step()
    house.cancel(live)
    house.step()
    house.step()
    assert house.scheduler.pool.num_held == 0


A_REQUEST = st.tuples(st.integers(1, 24), st.integers(1, 30), st.integers(0, 2), st.booleans(), st.booleans())


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(A_REQUEST, min_size=1, max_size=12),
    num_blocks=st.integers(14, 40),
    accepts=st.sampled_from([never, always, half, sometimes]),
    draft_length=st.integers(0, 5),
    delay=st.integers(0, 2),
    release_steps=st.integers(0, 2),
    prefill_rows=st.integers(1, 32),
    rope_switch=st.sampled_from([0, 0, 13, 16]),
)
def test_any_traffic_ends_with_the_right_text_and_every_page_back(
    requests: list[tuple[int, int, int, bool, bool]],
    num_blocks: int,
    accepts: Accepts,
    draft_length: int,
    delay: int,
    release_steps: int,
    prefill_rows: int,
    rope_switch: int,
) -> None:
    script = Script(
        language=HashLanguage(range(4, 250), eos_id=2, eos_period=20),
        accepts=accepts,
        draft_length=draft_length,
        num_blocks=num_blocks,
        block_size=4,
        max_sequences=5,
        release_steps=release_steps,
        rope_switch=rope_switch,
    )
    house = Lockstep(script, max_prefill_rows=prefill_rows, delay=delay)
    given = []
    for num_prompt, max_tokens, family, leaves, shares in requests:
        prompt = tuple(range(50 * family + 4, 50 * family + 4 + num_prompt))
        request = request_of(prompt, max_tokens, eos_ids=(2,), share_prefix=shares)
        live = house.submit(request)
        given.append((live, leaves))
        house.step()
    for live, leaves in given:
        if leaves:
            house.cancel(live)
        house.step()
    house.run()
    for live, _ in given:
        text = answer(live.request, script)
        assert house.text(live) == text[: live.num_generated]
    for live, leaves in given:
        if not leaves:
            assert house.text(live) == answer(live.request, script)


def test_the_cost_of_a_report_does_not_grow_with_what_waits() -> None:
    def lookups(num_waiting: int) -> int:
        house = Lockstep(Script(num_blocks=40, max_sequences=4))
        for i in range(4 + num_waiting):
            house.submit(request_of((10 + i % 200, 11, 12), 60))
        house.step()
        count, placement = 0, house.scheduler._placement

        def counted(live: Any) -> Any:
            nonlocal count
            count += 1
            return placement(live)

        house.scheduler._placement = counted
        for _ in range(20):
            house.step()
        return count

    assert lookups(200) == lookups(2)


def test_a_report_that_contradicts_the_contract_is_refused() -> None:
    from space_router.engine.errors import ProtocolViolation

    for spoil in (
        lambda report: setattr(report, "report_no", 9),
        lambda report: report.sequences.append(worker_pb2.SequenceReport(seq_id=77)),
        lambda report: report.sequences[0].tokens.extend([4] * 1000),
        lambda report: report.sequences[0].tokens.__setitem__(0, 9999),
        lambda report: setattr(report.sequences[0], "num_computed", 9999),
        lambda report: setattr(report.sequences[0], "num_accepted", 99),
        lambda report: report.released.append(1),
        lambda report: report.released.append(2),
    ):
        house = Lockstep(Script())
        house.submit(request_of(6, 20))
        house.step()
        report = house.batch.step()
        spoil(report)
        with pytest.raises(ProtocolViolation):
            house.scheduler.report(report)


@pytest.mark.parametrize(("scarce", "num_wanted"), [(False, 4), (True, 1)])
def test_where_pages_are_scarce_fewer_are_granted_ahead(scarce: bool, num_wanted: int) -> None:
    live = RequestState(request_of(4, 60), 60, 0, 0.0)
    sequence = WorkerSequence(1, live, [0], 0, block_size=4, num_drafted=3, most_slots=65)
    assert sequence.num_wanted(scarce=scarce) == num_wanted


@pytest.mark.parametrize("wrong", ["part", "twice", "release", "alternatives"])
def test_nothing_of_a_report_that_violates_the_contract_is_taken_in(wrong: str) -> None:
    house = Lockstep(Script(accepts=always))
    good, other = house.submit(request_of(5, 20)), house.submit(request_of(6, 20))
    for _ in range(3):
        house.step()
    assert good.phase is Phase.RUNNING
    before = list(good.ids), list(other.ids)
    report = house.batch.step()
    assert report.sequences[0].tokens
    match wrong:
        case "part":
            report.sequences[1].tokens[0] = house.script.vocab_size
        case "twice":
            report.sequences.append(report.sequences[0])
        case "release":
            report.released.append(1)
        case "alternatives":
            report.sequences[1].logprobs.add(id=1, top_ids=[1])
    with pytest.raises(ProtocolViolation):
        house.scheduler.report(report)
    assert (good.ids, other.ids) == before


def most_ahead(house: Lockstep, live: RequestState, *, from_token: int) -> int:
    """Most slots that were granted beyond the ids, once so many tokens are there."""
    most = 0
    while live.phase is not Phase.ENDED:
        house.step()
        if live.num_generated >= from_token:
            granted = [s.num_slots for s in house.scheduler.sequences.values() if s.live is live]
            most = max([most, *(slots - len(live.ids) for slots in granted)])
    return most


@pytest.mark.parametrize(("num_drafts", "bound"), [(0, STEPS_AHEAD + 3), (5, MAX_BLOCKS_AHEAD * 4 + 3)])
def test_a_sequence_holds_what_it_drafts(num_drafts: int, bound: int) -> None:
    house = Lockstep(Script(accepts=always, draft_length=5, num_blocks=200, block_size=4))
    house.script.draft_length = num_drafts  # what the controller chooses; the worker has said that five are possible
    live = house.submit(request_of(6, 150))
    ahead = most_ahead(house, live, from_token=30)
    assert bound - 4 <= ahead <= bound


def test_those_that_come_later_start_with_what_is_drafted_here() -> None:
    house = Lockstep(Script(draft_length=5, num_blocks=200, block_size=4))
    house.script.draft_length = 0
    house.submit(request_of(6, 260))
    house.run()
    live = house.submit(request_of((99, 11, 12), 40))
    assert most_ahead(house, live, from_token=0) <= STEPS_AHEAD + 3


@pytest.mark.parametrize(
    ("worker", "forced"), [({}, 3), ({"draft_length": 2}, 2), ({"num_masks": 1}, 1), ({"lays_out_masks": False}, 0)]
)
def test_a_worker_with_fewer_masks_than_the_request_was_checked_against_takes_it(
    worker: dict[str, Any], forced: int
) -> None:
    house = Lockstep(Script(accepts=half, **worker))
    live = house.submit(request_of(6, 20, max_draft_length=3, num_forced_drafts=3))
    house.run()
    assert house.batch.figures.num_admits_by_forced == {forced: 1}
    assert house.text(live) == answer(live.request, house.script)


def test_a_text_is_of_the_instruction_set_that_computed_its_first_token() -> None:
    live = Lockstep(Script()).submit(request_of(6, 20))

    def admitted_by(instruction_set: str) -> str:
        scheduler = Lockstep(Script(instruction_set=instruction_set)).scheduler
        placement = scheduler.placement(live)
        assert placement is not None
        scheduler.admit(live, placement)
        return live.instruction_set

    assert admitted_by("first") == "first"
    assert admitted_by("second") == "second"  # the first was lost before it gave a token
    live.ids.append(7)
    assert admitted_by("") == "second"  # an earlier release does not say


def test_a_sequence_that_drafted_nothing_drafts_as_soon_as_it_likes() -> None:
    house = Lockstep(Script(accepts=always, draft_length=7, num_blocks=300, block_size=4, window=600), delay=1)
    house.script.draft_length = 0
    live = house.submit(request_of(6, 300))
    while live.num_generated < 100:
        house.step()
    [sequence] = house.batch.sequences.values()
    sequence._max_draft_length = house.script.draft_length = 7
    drafted = []
    while live.phase is not Phase.ENDED:
        house.step()
        drafted.append(live.num_generated)
        assert not sequence.paused
    steps = [after - before for before, after in itertools.pairwise(drafted)]
    assert 8 in steps[:6]  # at full length after a few steps


def test_plain_sequences_never_wait_for_a_router_that_is_six_steps_late() -> None:
    house = Lockstep(Script(draft_length=5, num_blocks=200, block_size=4), delay=6)
    house.script.draft_length = 0
    lives = [house.submit(request_of(7 + i, 60)) for i in range(3)]
    while any(live.phase is not Phase.ENDED for live in lives):
        house.step()
        assert not any(sequence.paused for sequence in house.batch.sequences.values())


def test_commanded_drafts_are_not_fewer_when_the_router_is_twelve_steps_late() -> None:
    house = Lockstep(Script(accepts=always, draft_length=1, num_blocks=200, block_size=8, window=200), delay=12)
    live = house.submit(request_of(7, 100, max_draft_length=1, num_forced_drafts=1))
    while live.phase is not Phase.ENDED:
        house.step()
        assert not any(sequence.paused for sequence in house.batch.sequences.values())
    assert house.num_drafted[live] == 50 - 1  # two tokens a step; the last step has one left


def test_a_long_prompt_holds_no_pages_for_its_answer_before_its_last_step() -> None:
    house = Lockstep(Script(draft_length=5, num_blocks=200, block_size=4), max_prefill_rows=16)
    live = house.submit(request_of(101, 20))
    house.step()
    house.step()
    [sequence] = house.scheduler.sequences.values()
    assert len(sequence.pages) == 26  # 101 ids and the first slot of the answer
    house.run()
    assert live.num_generated == 20


def test_more_are_expected_at_once_and_fewer_one_by_one() -> None:
    live = RequestState(request_of(4, 60), 60, 0, 0.0)
    sequence = WorkerSequence(1, live, [0], 0, block_size=16, num_drafted=0, most_slots=65)
    ahead = []
    for num_drafted in (0, 3, 0, 1, 0):
        sequence.drafted(num_drafted)
        ahead.append(sequence.slots_ahead // STEPS_AHEAD)
    assert ahead == [1, 4, 3, 2, 1]


SYSTEM = tuple(range(10, 50))  # ten whole blocks of four


def prompts(num: int) -> list[tuple[int, ...]]:
    return [(*SYSTEM, 60 + i, 61, 62) for i in range(num)]


def test_the_next_turn_of_a_chat_does_not_prefill_the_last_answer() -> None:
    house = Lockstep(Script(block_size=4))
    first = house.submit(request_of(6, 21))
    house.run()
    computed = house.batch.figures.num_computed_prompt_ids
    turn = (*first.ids, 70, 71, 72)  # 30 ids, 26 of them with keys and values: the last of the answer has none
    house.submit(request_of(turn, 4))
    house.run()
    assert house.batch.figures.num_cached_ids == 24
    assert house.batch.figures.num_computed_prompt_ids - computed == 30 - 24


async def test_a_prefix_that_is_being_computed_is_computed_once() -> None:
    async with in_house(max_prefill_rows=8) as house:
        requests = [request_of(prompt, 8, name=str(i)) for i, prompt in enumerate(prompts(6))]
        texts = await asyncio.gather(*(house.text(request) for request in requests))
        assert texts == [answer(request, house.worker.script) for request in requests]
        figures = house.worker.figures
        assert figures.num_cached_ids == 5 * len(SYSTEM)
        assert figures.num_computed_prompt_ids == len(SYSTEM) + 6 * 3


async def test_followers_wait_for_what_they_share_and_not_for_the_rest() -> None:
    async with in_house(Script(num_blocks=200), max_prefill_rows=8) as house:
        long, short = request_of((*SYSTEM, *range(100, 240)), 4), request_of((*SYSTEM, 7), 4)
        async with house.engine.submit(long) as leader, house.engine.submit(short):
            assert house.engine.load().num_queued == 1
            await house.until(lambda: house.worker.figures.num_admits == 2)
            assert leader.statistics.num_generated == 0  # its own prompt goes on
            assert house.worker.figures.num_cached_ids == len(SYSTEM)


@pytest.mark.parametrize("fields", [{"cache_salt": "mine"}, {"share_prefix": False}, {"num_prompt_logprobs": 0}])
async def test_nobody_waits_for_what_it_must_not_share(fields: dict[str, Any]) -> None:
    async with in_house(max_prefill_rows=128) as house:
        requests = [request_of(SYSTEM, 8), request_of(SYSTEM, 8, **fields)]
        texts = await asyncio.gather(*(house.text(request) for request in requests))
        assert texts == [answer(request, house.worker.script) for request in requests]
        assert house.worker.figures.num_cached_ids == 0


async def test_salts_share_within_themselves_and_never_with_others() -> None:
    async with in_house(Script(num_blocks=200)) as house:
        for salt, cached in (("a", 0), ("b", 0), ("", 0), ("a", 36), ("b", 72), ("", 108)):
            await house.text(request_of(SYSTEM, 2, cache_salt=salt))
            assert house.worker.figures.num_cached_ids == cached


async def test_choices_share_their_prompt_without_being_told_of_each_other() -> None:
    async with in_house() as house:
        requests = [request_of(SYSTEM, 8, sampling=SamplingOptions(seed=5, choice=i), name=str(i)) for i in range(4)]
        texts = await asyncio.gather(*(house.text(request) for request in requests))
        assert texts == [answer(request, house.worker.script) for request in requests]
        assert house.worker.figures.num_cached_ids == 3 * 36


async def test_who_waits_for_a_prefix_goes_on_when_the_one_that_computes_it_leaves() -> None:
    async with in_house(max_prefill_rows=4) as house:
        leader = house.engine.submit(request_of((*SYSTEM, 1), 8, name="leader"))
        followers = [asyncio.create_task(house.text(request_of(prompt, 8))) for prompt in prompts(3)]
        await asyncio.sleep(0)
        assert house.engine.load().num_queued == 3
        async with leader:
            pass
        expected = [answer(request_of(prompt, 8), house.worker.script) for prompt in prompts(3)]
        assert await asyncio.gather(*followers) == expected


@pytest.mark.parametrize("num_steps", [1, 3, 6])
async def test_who_waits_for_a_prefix_outlives_the_worker_that_computes_it(num_steps: int) -> None:
    async with in_house(Script(die_after_steps=num_steps), max_prefill_rows=8) as house:
        requests = [request_of(prompt, 8, name=str(i)) for i, prompt in enumerate(prompts(4))]
        texts = await asyncio.gather(*(house.text(request) for request in requests))
        assert texts == [answer(request, house.worker.script) for request in requests]
        assert house.worker.num_lives == 2


def test_a_short_prompt_is_admitted_beside_a_long_one_and_a_second_long_one_is_not() -> None:
    house = Lockstep(Script(num_blocks=300, window=2000), max_prefill_rows=16)
    house.submit(request_of(tuple(range(4, 204)), 4))
    for i in range(3):
        house.submit(request_of((210 + i, 5, 6, 7), 4))
    house.step()
    assert house.scheduler.num_running == 4  # 16 of the 32 rows in advance for the long one, 12 for the short ones
    house.submit(request_of(tuple(range(5, 205)), 4))
    house.step()
    assert house.scheduler.num_running == 4
    house.run()


def test_many_short_prompts_are_admitted_at_once() -> None:
    house = Lockstep(Script(num_blocks=300), max_prefill_rows=64)
    for i in range(32):
        house.submit(request_of((20 + i, 5, 6, 7), 8))
    house.step()
    assert house.scheduler.num_running == 32


async def test_what_cannot_be_finished_any_more_is_refused_before_it_runs() -> None:
    async with in_house(Script(num_blocks=300)) as house:
        await house.text(request_of(6, 40))  # 1.4 ms per step of up to four tokens, as the script has it
        with pytest.raises(DeadlineExceeded, match="takes at least"):
            house.engine.submit(request_of(6, 400, deadline=0.02))
        assert len(await house.text(request_of(6, 400, deadline=10.0))) == 400
        async with house.engine.submit(request_of(6, 400, deadline=0.02, eos_ids=(2,))) as stream:
            assert house.engine.load().num_running == 1  # it may end by itself at any token
            assert stream.statistics.num_generated == 0
        async with house.engine.submit(request_of(6, 400, deadline=0.02, stops_on_text=True)):
            assert house.engine.load().num_running == 1


def test_a_text_that_outgrows_its_rotary_angles_is_computed_anew_and_shares_no_keys_with_shorter_ones() -> None:
    house = Lockstep(Script(block_size=4, rope_switch=16), delay=1)
    first = house.submit(request_of(9, 40))
    house.run()
    assert house.text(first) == answer(first.request, house.script)
    figures = house.batch.figures
    assert (figures.num_admits, figures.num_cached_ids) == (2, 0)
    assert figures.num_computed_prompt_ids == 9 + 17
    assert first.statistics.num_preemptions == 0
    house.submit(request_of((*first.ids[:16],), 1))  # what was computed before the switch
    house.run()
    assert figures.num_cached_ids == 12
    house.submit(request_of((*first.ids[:33],), 1))  # what was computed behind it
    house.run()
    assert figures.num_cached_ids == 12 + 32


def test_a_text_that_ends_at_the_switch_is_not_admitted_again() -> None:
    house = Lockstep(Script(block_size=4, rope_switch=16))
    live = house.submit(request_of(9, 8))
    house.run()
    assert live.num_generated == 8
    assert house.batch.figures.num_admits == 1
