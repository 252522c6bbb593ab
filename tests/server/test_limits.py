"""A run of emitted ids is cut at the first end inside it."""

import pytest
from space_server.batch.limits import End, Limits

LIMITS = Limits(max_tokens=5, window=20, eos_ids=frozenset({9}), stop_ids=frozenset({7, 9}))


@pytest.mark.parametrize(
    ("emitted", "num_left", "expected"),
    [
        ([1, 2, 3], 5, (3, None)),
        ([1, 2, 3], 3, (3, End.LENGTH)),
        ([1, 2, 3], 2, (2, End.LENGTH)),
        ([1, 9, 3], 5, (2, End.EOS)),
        ([7, 9, 3], 5, (1, End.STOP_ID)),
        ([1, 2, 9], 3, (3, End.EOS)),
        ([1, 2, 9], 2, (2, End.LENGTH)),
    ],
)
def test_cut(emitted: list[int], num_left: int, expected: tuple[int, End | None]) -> None:
    assert LIMITS.cut(emitted, num_left) == expected


def test_what_is_left_is_bounded_by_max_tokens_and_by_the_window() -> None:
    assert LIMITS.num_left(num_known=6, num_prompt=4) == 3
    assert LIMITS.num_left(num_known=18, num_prompt=18) == 2
