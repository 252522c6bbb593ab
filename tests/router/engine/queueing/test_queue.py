"""Who waits is served in order, and not too many wait."""

from __future__ import annotations

import pytest
from doubles.router.house import request_of
from space_router.engine.queueing.queue import RequestQueue
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
    assert queue.refusal() is None
    queue.push(long)
    assert not queue.overfull
    assert "50 prompt tokens are waiting" in str(queue.refusal())
    queue.push(short)
    assert queue.overfull
    queue.remove(long)
    assert (queue.num_tokens, queue.overfull, queue.refusal()) == (1, False, None)
    queue.remove(short)
    queue.remove(short)
    assert queue.num_tokens == 0


def test_who_need_not_wait_is_not_refused_for_a_queue_of_no_places() -> None:
    queue = RequestQueue(0)
    assert queue.refusal() is None
    queue.push(RequestState(request_of(), 1, 0, 0.0))
    assert "1 requests are waiting" in str(queue.refusal())
