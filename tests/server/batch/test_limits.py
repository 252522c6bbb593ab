"""A run of emitted ids is cut at the first end inside it."""

import pytest
from space_server.batch.sequence import SequenceEnd, SequenceLimits

LIMITS = SequenceLimits(max_tokens=5, window=20, eos_ids=frozenset({9}), stop_ids=frozenset({7, 9}))


@pytest.mark.parametrize(
    ("emitted", "num_left", "expected"),
    [
        ([1, 2, 3], 5, (3, None)),
        ([1, 2, 3], 3, (3, SequenceEnd.LENGTH)),
        ([1, 2, 3], 2, (2, SequenceEnd.LENGTH)),
        ([1, 9, 3], 5, (2, SequenceEnd.EOS)),
        ([7, 9, 3], 5, (1, SequenceEnd.STOP_ID)),
        ([1, 2, 9], 3, (3, SequenceEnd.EOS)),
        ([1, 2, 9], 2, (2, SequenceEnd.LENGTH)),
    ],
)
def test_cut(emitted: list[int], num_left: int, expected: tuple[int, SequenceEnd | None]) -> None:
    assert LIMITS.cut(emitted, num_left) == expected


def test_what_is_left_is_bounded_by_max_tokens_and_by_the_window() -> None:
    assert LIMITS.num_left(num_known=6, num_prompt=4) == 3
    assert LIMITS.num_left(num_known=18, num_prompt=18) == 2
