"""Waiting requests: their order, levels that age, keys that share, deadlines that come near, and how many may wait."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from doubles.router import Script
from doubles.router.scripted_worker import ScriptedBatch
from doubles.router.tabletop import Tabletop, request_of
from space_router.config import ServeConfig
from space_router.engine.errors import QueueTimeout
from space_router.engine.queueing.queue import MIN_WAITING, SHARED_SECONDS, RequestQueue
from space_router.engine.request.request import Stream, ValidRequest
from space_router.engine.request.request_state import RequestState


def drained(queue: RequestQueue) -> list[int]:
    ages = []
    while (live := queue.head()) is not None:
        queue.admitted(live, 0.0)
        ages.append(live.age)
    return ages


def test_the_lower_priority_number_goes_first_and_within_one_the_older() -> None:
    queue = RequestQueue(9)
    for age, priority in enumerate([1, 0, 1, 0]):
        queue.push(RequestState(request_of(priority=priority), 1, age, 0.0))
    assert drained(queue) == [1, 3, 0, 2]


def test_a_request_that_comes_back_stands_in_front_of_later_ones() -> None:
    queue = RequestQueue(9)
    lives = [RequestState(request_of(), 1, age, 0.0) for age in range(3)]
    for live in lives:
        queue.push(live)
    queue.admitted(lives[0], 0.0)
    queue.push(lives[0])
    assert drained(queue) == [0, 1, 2]


def test_a_request_that_left_is_passed_over_and_counts_no_more() -> None:
    queue = RequestQueue(9)
    lives = [RequestState(request_of(), 1, age, 0.0) for age in range(2)]
    for live in lives:
        queue.push(live)
    queue.remove(lives[0])
    assert len(queue) == 1
    assert drained(queue) == [1]


def test_a_parked_request_counts_but_is_overtaken_until_it_is_unparked() -> None:
    queue = RequestQueue(9)
    parked, other = (RequestState(request_of(), 1, age, 0.0) for age in range(2))
    queue.push(parked, parked=True)
    queue.push(other)
    assert len(queue) == 2
    assert queue.head() is other
    queue.unpark(parked)
    assert queue.head() is parked


def test_retry_after_follows_how_fast_the_queue_moves() -> None:
    queue = RequestQueue(20)
    for age in range(40):
        queue.push(RequestState(request_of(), 1, age, 0.0))
    for second in range(20):
        if (live := queue.head()) is not None:
            queue.admitted(live, 0.1 * second)
    slow = queue.full().retry_after
    for second in range(10):
        if (live := queue.head()) is not None:
            queue.admitted(live, 2.0 + 9.0 * second)
    assert 1.0 <= slow < queue.full().retry_after <= 60.0


def test_the_wait_is_not_learnt_from_idle_hours() -> None:
    queue = RequestQueue(9)
    for age in range(4):
        queue.push(RequestState(request_of(), 1, age, 0.0))
        queue.admitted(queue.head() or pytest.fail("nobody waits"), 3600.0 * age)
    assert queue.full().retry_after == 1.0


def crowded(queue: RequestQueue, gap: float, seconds: float, begun: float = 0.0) -> list[float]:
    """Keep as many waiting as may, while one is admitted every `gap` seconds; return how long each has waited."""
    waits = []
    for turn in range(round(seconds / gap)):
        now = begun + turn * gap
        for age in range(turn * 1000, (turn + 1) * 1000):
            if not asked(queue, "", now, age):
                break
        live = queue.head(now)
        assert live is not None
        queue.admitted(live, now)
        waits.append(now - live.submitted)
    return waits


def test_no_more_wait_than_leave_the_queue_within_the_longest_wait() -> None:
    queue = RequestQueue(100, max_seconds=8.0)
    waits = crowded(queue, 0.5, 200.0)
    assert max(waits) > 40.0, "as long as the speed is not known, only the number of requests bounds the queue"
    assert 5.0 <= max(waits[-200:]) <= 6.5
    assert asked(queue, "", 200.0, 10**6)
    assert "the queue takes what begins within 8 s" in str(queue.refusal("", 200.0))
    waits = crowded(queue, 0.1, 100.0, 200.0)
    assert 5.0 <= max(waits[-200:]) <= 6.5, "the bound follows the speed"
    assert max(crowded(queue, 0.02, 100.0, 300.0)[-200:]) <= 2.1, "and the number bounds what is faster"


def test_a_key_that_asks_much_waits_no_longer_than_the_bound_and_leaves_others_theirs() -> None:
    """Four keys take turns, one of them asks eight times as often: its requests do not wait four times as long."""
    queue, source, waits = RequestQueue(100, max_seconds=8.0), random.Random(1), dict[str, list[float]]()
    for turn in range(4000):
        now = turn * 0.05
        asked(queue, source.choices("abcd", [1, 2, 4, 8])[0], now, turn)
        if turn % 10 == 0 and (live := queue.head(now)) is not None:
            queue.admitted(live, now, live.num_prompt)
            waits.setdefault(live.request.key, []).append(now - live.submitted)
    counts = [len(found) for found in waits.values()]
    assert max(counts) <= 1.1 * min(counts)
    for found in waits.values():
        assert max(found[len(found) // 2 :]) <= 8.0


def test_requests_behind_long_ones_of_their_key_are_expected_to_wait_longer() -> None:
    """Two keys, of which one asks for ten times as many tokens: of it fewer may wait, and none too long."""
    queue, waits, now = RequestQueue(100, max_seconds=8.0), dict[str, list[float]](), 0.0
    for turn in range(800):
        for key, prompt in (("long", 270), ("short", 18)):
            asked(queue, key, now, 10 * turn + prompt, prompt)
        live = queue.head(now)
        assert live is not None
        queue.admitted(live, now, live.num_prompt)
        if live.submitted > 60.0:
            waits.setdefault(live.request.key, []).append(now - live.submitted)
        now += (live.num_prompt + 12) / 200
    assert all(4.0 <= max(found) <= 8.0 for found in waits.values()), waits


def queued_behind_another(**config: float) -> tuple[Tabletop, Callable[..., Stream]]:
    """A worker of one place, which is taken, and what submits further requests."""
    table = Tabletop(lambda: ScriptedBatch(Script(num_blocks=400, max_sequences=1)), config=ServeConfig(**config))  # type: ignore[arg-type]
    table.engine.submit(request_of((8, 8), 400))
    for _ in range(3):
        table.tick()
    return table, table.engine.submit


def test_a_request_whose_turn_does_not_come_in_time_is_refused_and_another_takes_its_place() -> None:
    table, submit = queued_behind_another(max_queue_seconds=2.0)
    late = submit(request_of((8, 9), 5))
    table.engine.bound_wait([late])
    table.tick(1.9)
    assert (late.error, late.begun.is_set(), table.engine.load().num_queued) == (None, False, 1)
    table.tick(0.2)
    assert isinstance(late.error, QueueTimeout)
    assert "waited 2 s" in str(late.error)
    assert 1.0 <= late.error.retry_after <= 60.0
    assert late.begun.is_set()
    assert table.engine.load().num_queued == 0
    table.engine.check()


def test_a_request_that_has_begun_is_never_refused_for_its_wait_nor_any_part_of_it() -> None:
    table, submit = queued_behind_another(max_queue_seconds=2.0)
    running = next(iter(table.engine._open))
    parts = [submit(request_of((9, number), 5)) for number in (1, 2)]
    assert table.engine.bound_wait([running, *parts]) is None, "a part of it runs"
    timer = table.engine.bound_wait(parts)
    table.tick(1.0)
    running.leave()  # now the first part has its turn
    table.tick(0.1)
    table.tick(0.1)
    assert [part.begun.is_set() for part in parts] == [True, False]
    assert timer is not None
    timer.ring()  # type: ignore[attr-defined]  # as if its time had come
    assert [part.error for part in parts] == [None, None]
    while (load := table.engine.load()).num_running or load.num_queued:
        table.tick()
    assert [part.statistics.num_generated for part in parts] == [5, 5]


def test_without_a_longest_wait_nothing_bounds_it() -> None:
    table, submit = queued_behind_another()
    assert table.engine.bound_wait([submit(request_of((8, 9), 5))]) is None


def test_a_very_slow_phase_is_forgotten_once_requests_leave_the_queue_faster() -> None:
    queue = RequestQueue(100, max_seconds=5.0)
    crowded(queue, 60.0, 12000.0)
    assert len(queue) <= MIN_WAITING
    assert max(crowded(queue, 0.1, 60.0, 12000.0)[-100:]) >= 3.5


def test_those_that_left_are_not_kept_behind_those_that_wait() -> None:
    queue = RequestQueue(9)
    waiting = RequestState(request_of(), 1, 0, 0.0)
    queue.push(waiting)
    for age in range(1, 1000):
        refused = RequestState(request_of(), 1, age, 0.0)
        queue.push(refused)
        queue.remove(refused)
    assert len(queue._tenants[""]._by_due) < 100
    assert drained(queue) == [0]


def test_prompt_tokens_that_wait_are_bounded_but_not_those_of_one_request_alone() -> None:
    queue = RequestQueue(9, max_tokens=10)
    long, short = (RequestState(request_of(prompt), 1, prompt, 0.0) for prompt in (50, 1))
    assert queue.refusal("", 0.0) is None
    queue.push(long)
    assert queue.overfull(long, 0.0) is None
    assert "50 prompt tokens are waiting" in str(queue.refusal("", 0.0))
    queue.push(short)
    assert queue.overfull(short, 0.0) is not None
    queue.remove(long)
    assert (queue.num_tokens, queue.overfull(short, 0.0), queue.refusal("", 0.0)) == (1, None, None)
    queue.remove(short)
    queue.remove(short)
    assert queue.num_tokens == 0


def test_who_need_not_wait_is_not_refused_for_a_queue_of_no_places() -> None:
    queue = RequestQueue(0)
    assert queue.refusal("", 0.0) is None
    queue.push(RequestState(request_of(), 1, 0, 0.0))
    assert "1 prompts and choices of requests are waiting already, and the queue takes 0." in str(
        queue.refusal("", 0.0)
    )


def asked(queue: RequestQueue, key: str, now: float, age: int, prompt: int = 1, priority: int = 0) -> bool:
    """Whether a request of this key is let in, as the engine asks for it."""
    if queue.refusal(key, now) is not None:
        return False
    live = RequestState(replace(request_of(prompt, priority=priority), key=key), 1, age, now)
    queue.push(live)
    if queue.overfull(live, now) is None:
        return True
    queue.remove(live)
    return False


def test_a_key_that_is_refused_gets_its_share_of_the_places() -> None:
    queue = RequestQueue(8)
    assert [asked(queue, "much", 0.0, age) for age in range(9)] == [True] * 8 + [False]
    assert not asked(queue, "little", 1.0, 9)
    for second in range(2, 10):  # a place at a time becomes free, and the one that asks often is there first
        queue.admitted(queue.head() or pytest.fail("nobody waits"), float(second))
        has_share = queue._num_of["much"] >= 4
        assert asked(queue, "much", float(second), 10 * second) == (not has_share)
        asked(queue, "little", float(second), 10 * second + 1)
    assert queue._num_of == {"much": 4, "little": 4}
    queue.remove(next(live for live in queue._waiting if live.request.key == "little"))
    words = "4 prompts and choices of this API key, with 4 prompt tokens, are waiting already, and the queue takes 4 of"
    assert words in str(queue.refusal("much", 9.0))
    later = 10.0 + SHARED_SECONDS
    assert [asked(queue, "much", later, 300 + age) for age in range(2)] == [True, False], "places are not kept for ever"


def test_ten_times_the_load_is_shared_between_keys_that_ask_at_one_to_eight() -> None:
    queue, source, served = RequestQueue(16), random.Random(3), Counter[str]()
    for age in range(4000):
        now = age / 10
        asked(queue, source.choices("abcd", (1, 2, 4, 8))[0], now, age)
        if age % 10 == 0 and (live := queue.head(now)) is not None:
            queue.admitted(live, now)
            queue.ended(live)
            served[live.request.key] += age > 400
    assert max(served.values()) - min(served.values()) <= 0.05 * max(served.values()), served


def test_long_prompts_of_one_key_leave_tokens_to_another() -> None:
    queue = RequestQueue(99, max_tokens=100)
    assert [asked(queue, "long", 0.0, age, 30) for age in range(5)] == [True, True, True, False, False]
    assert not asked(queue, "short", 0.0, 6, 20)
    queue.admitted(queue.head() or pytest.fail("nobody waits"), 1.0)
    assert not asked(queue, "long", 1.0, 7, 30)
    assert asked(queue, "short", 1.0, 8, 20)


def waiting(queue: RequestQueue, request: ValidRequest, age: int, submitted: float = 0.0) -> RequestState:
    live = RequestState(request, request.max_tokens or 1, age, submitted)
    queue.push(live)
    return live


def served(queue: RequestQueue, now: float = 0.0, num_tokens: int = 12) -> RequestState:
    """The next one, admitted and done in a moment."""
    live = queue.head(now)
    assert live is not None
    queue.admitted(live, now, live.num_prompt)
    live.ids += [5] * num_tokens
    queue.ended(live)
    return live


def test_a_single_request_waits_for_one_of_a_key_with_a_thousand() -> None:
    queue = RequestQueue(2000)
    for age in range(1000):
        waiting(queue, request_of(key="many"), age, submitted=0.001 * age)
    for _ in range(10):
        served(queue, now=100.0)
    single = waiting(queue, request_of(key="one"), 1000, submitted=100.0)
    assert single in [served(queue, now=100.0) for _ in range(2)]


def test_a_key_does_not_save_up_what_it_did_not_use() -> None:
    queue = RequestQueue(2000)
    for age in range(200):
        waiting(queue, request_of(key="busy"), age)
    for _ in range(100):
        served(queue)
    for age in range(200, 300):
        waiting(queue, request_of(key="late"), age)
    assert Counter(served(queue).request.key for _ in range(40)) == {"busy": 20, "late": 20}


@pytest.mark.parametrize(("factor", "share"), [(1, 0.5), (3, 0.25)])
def test_keys_share_tokens_and_not_requests(factor: int, share: float) -> None:
    queue = RequestQueue(4000)
    for age in range(2000):
        waiting(queue, request_of(4, 100, key="long" if age % 2 else "short"), age)
    taken: Counter[str] = Counter()
    for _ in range(400):
        key = (queue.head() or pytest.fail("nobody waits")).request.key
        served(queue, num_tokens=96 if key == "long" else 100 // factor - 4)
        taken[key] += 1
    assert taken["long"] / 400 == pytest.approx(share, abs=0.03)


def test_requests_without_a_key_share_one() -> None:
    queue = RequestQueue(99)
    for age in range(10):
        waiting(queue, request_of(), age)
    waiting(queue, request_of(key="a"), 10)
    assert [served(queue).request.key for _ in range(3)] in (["", "a", ""], ["a", "", ""])


def test_a_level_is_gained_per_time_of_waiting() -> None:
    queue = RequestQueue(99, ageing=30.0)
    old = waiting(queue, request_of(priority=2, key="old"), 0, submitted=0.0)
    young = waiting(queue, request_of(priority=0, key="young"), 1, submitted=59.0)
    assert queue.head(59.9) is young
    waiting(queue, request_of(priority=0, key="young"), 2, submitted=59.9)
    served(queue, now=59.9)
    assert queue.head(60.0) is old  # on the first level now, and its key has had nothing


def test_ageing_goes_up_to_the_most_urgent_level_and_so_leaves_keys_equal() -> None:
    queue = RequestQueue(99, ageing=1.0)
    for age in range(50):
        waiting(queue, request_of(key="flood"), age, submitted=0.0)
    served(queue, now=1000.0)
    late = waiting(queue, request_of(key="late"), 50, submitted=1000.0)
    assert late in [served(queue, now=1000.0) for _ in range(2)]


def test_nobody_starves_under_a_stream_of_urgent_requests() -> None:
    queue = RequestQueue(99999, ageing=30.0)
    patient = waiting(queue, request_of(priority=3), 0, submitted=0.0)
    for second in range(1, 200):
        waiting(queue, request_of(priority=0), second, submitted=float(second))
        waiting(queue, request_of(priority=0), 1000 + second, submitted=float(second))
        if served(queue, now=float(second)) is patient:
            break
    assert (
        90 <= second <= 181
    )  # three levels, then those that came before it was there: every other second one is served


def test_within_a_level_a_near_deadline_goes_first_and_a_far_one_does_not() -> None:
    queue = RequestQueue(99)
    first = waiting(queue, request_of(), 0)
    far, near = (RequestState(request_of(deadline=50.0 - age), 12, age, 0.0) for age in (1, 2))
    far.near_at, near.near_at = 40.0, 5.0
    urgent = RequestState(request_of(priority=-1), 12, 3, 0.0)
    for live in (far, near, urgent):
        queue.push(live)
    assert queue.head(6.0) is urgent  # a deadline buys no level
    queue.remove(urgent)
    assert [served(queue, now=6.0) for _ in range(3)] == [near, first, far]


def test_nobody_starves_under_a_stream_of_near_deadlines() -> None:
    queue = RequestQueue(99999, ageing=30.0)
    patient = waiting(queue, request_of(), 0)
    for second in range(1, 200):
        for age in (second, 1000 + second):
            hasty = RequestState(request_of(deadline=60.0), 12, age, float(second))
            hasty.near_at = float(second)
            queue.push(hasty)
        if served(queue, now=float(second)) is patient:
            break
    assert 30 <= second <= 61  # once those that come are one level younger, and are at the head


def test_of_two_near_deadlines_the_earlier_goes_first() -> None:
    queue = RequestQueue(99)
    lives = [RequestState(request_of(deadline=deadline), 12, age, 0.0) for age, deadline in enumerate((9.0, 7.0, 8.0))]
    for live in lives:
        live.near_at = 1.0
        queue.push(live)
    assert [served(queue, now=2.0).age for _ in range(3)] == [1, 2, 0]


def test_a_near_deadline_takes_nothing_from_other_keys() -> None:
    queue = RequestQueue(99)
    for age in range(10):
        hasty = RequestState(request_of(deadline=9.0, key="hasty"), 12, age, 0.0)
        hasty.near_at = 0.0
        queue.push(hasty)
        waiting(queue, request_of(key="calm"), 10 + age)
    assert Counter(served(queue, now=1.0).request.key for _ in range(10)) == {"hasty": 5, "calm": 5}


def test_who_was_admitted_before_is_not_charged_again_and_goes_first() -> None:
    queue = RequestQueue(99)
    preempted = waiting(queue, request_of(key="a"), 0)
    for age in range(1, 4):
        waiting(queue, request_of(key="b"), age)
    queue.admitted(preempted, 0.0, 6)
    charged = queue._tenants["a"].finish
    served(queue)
    queue.push(preempted)
    assert queue.head() is preempted
    queue.admitted(preempted, 0.0, 6)
    assert queue._tenants["a"].finish == charged


def test_any_order_of_moves_serves_everybody_once() -> None:
    for seed in range(30):
        dice = random.Random(seed)
        queue, now, left, out = RequestQueue(9999, ageing=dice.choice([0.5, 30.0])), 0.0, set(), []
        for age in range(200):
            now += dice.random()
            live = RequestState(
                request_of(priority=dice.randrange(-2, 3), key=dice.choice("abc"), deadline=50.0), 12, age, now
            )
            live.near_at = dice.choice([math.inf, now + 5.0])
            queue.push(live, parked=dice.random() < 0.2)
            left.add(live)
            if dice.random() < 0.3 and (gone := dice.choice(sorted(left, key=lambda one: one.age))):
                dice.choice([queue.remove, queue.park, queue.unpark])(gone)
                left = {one for one in left if one in queue}
            if dice.random() < 0.4 and queue.head(now) is not None:
                out.append(served(queue, now))
                left.discard(out[-1])
        for live in left:
            queue.unpark(live)
        while queue.head(now) is not None:
            out.append(served(queue, now))
            left.remove(out[-1])
        assert not left, f"seed {seed}"
        assert len(set(out)) == len(out), f"seed {seed}"
        assert not queue._priorities, f"seed {seed}"


def test_a_single_request_of_another_key_gets_the_next_place_in_the_batch() -> None:
    script = Script(num_blocks=400, max_sequences=4)
    table = Tabletop(lambda: ScriptedBatch(script), config=ServeConfig(max_queue=1000))
    flood = [table.engine.submit(request_of((10 + i % 200, 11 + i // 200), 20, key="many")) for i in range(600)]
    for _ in range(50):
        table.tick()
    begun = sum(stream.statistics.queue_seconds is not None for stream in flood)
    single = table.engine.submit(request_of((9, 9), 20, key="one"))
    while single.statistics.queue_seconds is None:
        table.tick()
    assert sum(stream.statistics.queue_seconds is not None for stream in flood) - begun <= 2


def test_urgent_ones_go_first_through_the_whole_engine_until_others_have_aged() -> None:
    script = Script(num_blocks=400, max_sequences=1)
    table = Tabletop(lambda: ScriptedBatch(script), config=ServeConfig(max_queue=1000, priority_ageing=1.0))
    patient = table.engine.submit(request_of((8, 8), 5, priority=2))  # runs at once
    patient = table.engine.submit(request_of((8, 9), 5, priority=2))
    served_at = None
    for tick in range(400):
        if tick % 4 == 0:
            table.engine.submit(request_of((10 + tick // 4, 11), 5))
        table.tick(0.01)
        if served_at is None and patient.statistics.queue_seconds is not None:
            served_at = table.now
    assert served_at is not None
    assert 2.0 <= served_at < 3.0  # two levels up, and then behind those that were there before


def test_a_deadline_is_not_near_because_the_answer_might_fill_the_window() -> None:
    script = Script(num_blocks=4000, window=30_000, max_sequences=1, eos_ids=(2,))
    table = Tabletop(lambda: ScriptedBatch(script), config=ServeConfig(max_queue=1000))
    table.engine.submit(request_of((9, 9), 20))
    for _ in range(40):
        table.tick()
    running = table.engine.submit(request_of((8, 8), 20))
    patient = table.engine.submit(request_of((8, 9), 20))
    others = [table.engine.submit(request_of((10 + i, 11), None, deadline=10.0, eos_ids=(2,))) for i in range(5)]
    while patient.statistics.queue_seconds is None:
        table.tick()
    assert running.statistics.num_generated == 20
    assert not any(stream.statistics.num_generated for stream in others)


def test_an_urgent_request_is_expected_to_wait_behind_what_goes_before_it_alone() -> None:
    queue = RequestQueue(100, max_seconds=8.0)
    crowded(queue, 0.5, 200.0)
    while asked(queue, "", 202.0, 10**6):
        pass
    assert queue.refusal("", 202.5) is not None, "before its priority is known, the usual one is assumed"
    assert queue.refusal("", 203.5) is None, "now and then one is read"
    assert asked(queue, "", 205.0, 10**6 + 1, priority=-1)
    assert queue.refusal("", 205.1) is None, "such requests come, so none is refused before its priority is known"
    assert not asked(queue, "", 205.2, 10**6 + 2, priority=1)
    assert queue.expected_wait("", -1) < 1.0 < 6.0 <= queue.expected_wait("", 0)
    assert queue.expected_wait("other", 1) >= queue.expected_wait("", 0) - 1.0, "what is more urgent goes first"


def test_what_ages_into_a_level_within_the_longest_wait_counts_there() -> None:
    queue = RequestQueue(100, ageing=4.0, max_seconds=8.0)
    crowded(queue, 0.5, 200.0)
    while asked(queue, "", 202.0, 10**6):
        pass
    assert not asked(queue, "", 204.0, 10**6 + 1, priority=-2)
    assert asked(queue, "", 206.0, 10**6 + 2, priority=-3)
