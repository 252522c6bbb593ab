"""What is known of the time that things take, and what is called impossible on the strength of it."""

from __future__ import annotations

import pytest
from doubles.router.house import request_of
from space_proto import worker_pb2
from space_router.engine.queueing.admission import QueueAdmission
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.queueing.throughput_estimator import HALF_LIFE, MIN_STEPS, RECENT, ThroughputEstimator
from space_router.engine.request.request import ValidRequest
from space_router.engine.request.request_state import RequestState


def prompt_step(num_rows: int, seconds: float) -> worker_pb2.StepReport:
    """With one sequence that decodes beside the prompt."""
    stats = worker_pb2.StepStats(prefill_rows=num_rows, chain_rows=1, forward_seconds=seconds)
    return worker_pb2.StepReport(stepped=True, stats=stats)


def decode_step(num_tokens: int, seconds: float) -> worker_pb2.StepReport:
    stats = worker_pb2.StepStats(chain_rows=num_tokens, forward_seconds=seconds)
    return worker_pb2.StepReport(stepped=True, stats=stats)


def is_hopeless(pace: ThroughputEstimator, request: ValidRequest, now: float) -> bool:
    """As the first in the queue hears it."""
    live = RequestState(request, request.max_tokens or 1, 0, now)
    return QueueAdmission(RequestQueue(9), pace).unmeetable_deadline(live, live.num_prompt, now) is not None


def test_what_small_prompts_take_says_little_of_a_long_one() -> None:
    pace = ThroughputEstimator(512)
    for _ in range(50):
        pace.learn(prompt_step(9, 0.015), [1], 0.0)
    assert not is_hopeless(pace, request_of(32_000, 9, deadline=20.0), 0.0)
    for _ in range(RECENT):
        pace.learn(prompt_step(511, 0.9), [1], 0.0)
    assert is_hopeless(pace, request_of(32_000, 9, deadline=20.0), 0.0)


def test_a_step_counts_by_the_ids_that_it_computed() -> None:
    pace = ThroughputEstimator(512)
    for _ in range(50):
        pace.learn(prompt_step(9, 0.015), [1], 0.0)
        pace.learn(prompt_step(499, 0.095), [1], 0.0)
    assert 0.0001 < pace.seconds(1, 0) < 0.0003


def test_a_decode_step_that_gives_nobody_a_token_teaches_nothing() -> None:
    pace = ThroughputEstimator(512)
    pace.learn(decode_step(1, 0.01), [0], 0.0)  # the one that ran failed
    assert pace.seconds(0, 1) == 0
    pace.learn(decode_step(2, 0.01), [0, 2], 0.0)
    assert pace.seconds(0, 2) == pytest.approx(0.01)


def test_a_step_that_took_a_thousand_times_too_long_refuses_nobody() -> None:
    pace = ThroughputEstimator(512)
    pace.learn(decode_step(1, 10.0), [1], 0.0)
    assert not is_hopeless(pace, request_of(9, 200, deadline=20.0), 0.0)
    for _ in range(MIN_STEPS):
        pace.learn(decode_step(1, 0.01), [1], 0.0)
    pace.learn(decode_step(1, 10.0), [1], 0.0)
    assert not is_hopeless(pace, request_of(9, 200, deadline=20.0), 0.0)
    assert is_hopeless(pace, request_of(9, 200, deadline=0.9), 0.0)


def test_without_a_step_of_its_kind_what_was_slow_is_not_so_for_ever() -> None:
    pace, asked = ThroughputEstimator(512), request_of(9, 200, deadline=20.0)
    for _ in range(MIN_STEPS):
        pace.learn(decode_step(1, 10.0), [1], 0.0)
    assert is_hopeless(pace, asked, 1.0)
    for second in range(1, 300):
        pace.learn(prompt_step(9, 0.015), [1], float(second))
    assert not is_hopeless(pace, asked, 10 * HALF_LIFE)
