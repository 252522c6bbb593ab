"""What one API key may do, by a clock that the test holds."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from space_router.api_keys import ApiKey, KeyLimits, RateLimit
from space_router.api_keys import rate_limits as limits_of
from space_router.engine.request.request import SamplingOptions, ValidRequest
from space_router.errors import RateLimited
from space_router.metrics import Metrics


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rate_limits(clock: Clock, *keys: ApiKey, metrics: Metrics | None = None, **limits: int) -> dict[str, RateLimit]:
    return limits_of(keys, KeyLimits(**limits), metrics or Metrics(), clock)


def asks(of: dict[str, RateLimit], name: str) -> float | None:
    """One short request: None, or the seconds after which to come again."""
    try:
        with of[name].request():
            return None
    except RateLimited as error:
        return float(error.headers["Retry-After"])


def test_a_minutes_requests_may_come_at_once_and_the_next_when_it_is_told() -> None:
    clock = Clock()
    key = rate_limits(clock, ApiKey.of("s", "team", KeyLimits(requests_per_minute=6)))
    assert [asks(key, "team") for _ in range(6)] == [None] * 6
    wait = asks(key, "team")
    assert wait == 10
    clock.now += wait
    assert [asks(key, "team"), asks(key, "team")] == [None, 10]


def test_an_hour_of_silence_saves_up_no_more_than_a_minutes_worth() -> None:
    clock = Clock()
    key = rate_limits(clock, requests_per_minute=3)
    clock.now = 3600.0
    assert [asks(key, "") for _ in range(4)] == [None, None, None, 20]


def test_tokens_are_charged_as_they_come_and_a_debt_is_paid_off_first() -> None:
    clock = Clock()
    key = rate_limits(clock, tokens_per_minute=60)
    assert asks(key, "") is None
    key[""].charge(50, 100)
    assert asks(key, "") == 91, "90 tokens of debt and one to begin with, at one a second"
    clock.now = 91.0
    assert asks(key, "") is None


def test_forced_drafts_take_of_the_tokens_and_are_counted_as_none() -> None:
    metrics, clock = Metrics(), Clock()
    key = rate_limits(clock, metrics=metrics, tokens_per_minute=60)
    request = ValidRequest("r", (1,), SamplingOptions(seed=1), num_forced_drafts=2)
    key[""].charge(0, 20, request.charge(20, 10) - 20)
    assert request.charge(20, 10) == 90
    assert ValidRequest("r", (1,), SamplingOptions(seed=1)).charge(20, 10) == 20
    assert asks(key, "") == 31, "90 - 60 tokens of debt and one to begin with"
    assert metrics.value("spaceserve_key_tokens_total", key="none", kind="generated") == 20


def test_only_so_many_requests_at_once_and_a_place_is_free_again_when_one_ends() -> None:
    key = rate_limits(Clock(), concurrency=2)
    with ExitStack() as open_requests:
        for _ in range(2):
            open_requests.enter_context(key[""].request())
        assert asks(key, "") == 1
    assert asks(key, "") is None


def test_a_keys_own_limits_win_over_those_of_all_and_one_keys_use_is_not_anothers() -> None:
    few = ApiKey.of("a", "few", KeyLimits(requests_per_minute=1))
    usual = ApiKey.of("b", "usual")
    keys = rate_limits(Clock(), few, usual, requests_per_minute=3)
    assert [asks(keys, "few"), asks(keys, "few")] == [None, 60]
    assert [asks(keys, "usual") for _ in range(3)] == [None] * 3
    assert asks(keys, "usual") == 20


def test_every_series_of_a_key_is_there_before_its_first_request_and_counts_by_its_name() -> None:
    metrics = Metrics()
    keys = rate_limits(Clock(), ApiKey.of("secret", "team"), metrics=metrics, requests_per_minute=1)
    assert metrics.value("spaceserve_key_requests_total", key="team") == 0
    assert metrics.value("spaceserve_key_rejected_total", key="team", limit="requests") == 0
    assert asks(keys, "team") is None
    assert asks(keys, "team") is not None
    keys["team"].charge(3, 4)
    assert metrics.value("spaceserve_key_requests_total", key="team") == 1
    assert metrics.value("spaceserve_key_rejected_total", key="team", limit="requests") == 1
    assert metrics.value("spaceserve_key_tokens_total", key="team", kind="prompt") == 3
    assert metrics.value("spaceserve_key_tokens_total", key="team", kind="generated") == 4
    assert b"secret" not in metrics.render()


@pytest.mark.parametrize("bound", [{"requests_per_minute": 1}, {"concurrency": 1}, {"tokens_per_minute": 1}])
def test_a_refusal_names_the_bound_and_takes_nothing(bound: dict[str, int]) -> None:
    clock = Clock()
    key = rate_limits(clock, **bound)
    with key[""].request():
        key[""].charge(1, 0)
        with pytest.raises(RateLimited, match=r"are allowed 1 .*Try again in"), key[""].request():
            pytest.fail("it was let in")
    clock.now = 61.0
    assert asks(key, "") is None
