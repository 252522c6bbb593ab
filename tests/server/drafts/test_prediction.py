"""A predicted text is followed while the output agrees, left where it strays, and found again."""

import random

import pytest
from space_server.drafts.lookup import Prediction

TEXT = list(range(100, 160))


def followed(prediction: list[int], output: list[int]) -> Prediction:
    follower = Prediction(prediction)
    follower.extend(output)
    return follower


def test_the_prediction_is_proposed_from_the_start() -> None:
    assert Prediction(TEXT).propose(3) == [100, 101, 102]


def test_a_right_prediction_appears_whole_and_then_proposes_nothing() -> None:
    follower = followed(TEXT, TEXT)
    assert follower.num_appeared == len(TEXT)
    assert follower.propose(8) == []


def test_a_wrong_prediction_proposes_nothing_after_the_first_ids_and_does_not_appear() -> None:
    follower = Prediction(TEXT)
    proposed = 0
    for id_ in range(500, 540):
        proposed += bool(follower.propose(4))
        follower.extend([id_])
    assert proposed <= 2  # at the start, and behind one replaced id
    assert follower.num_appeared == 0


@pytest.mark.parametrize(
    ("name", "output", "appeared"),
    [
        ("replaced", [*TEXT[:20], 7, *TEXT[21:]], 59),
        ("inserted", [*TEXT[:20], 7, 8, 9, *TEXT[20:]], 60),
        ("deleted", [*TEXT[:20], *TEXT[24:]], 56),
        ("a long piece deleted", [*TEXT[:5], *TEXT[40:]], 25),
    ],
)
def test_behind_an_edit_the_prediction_is_found_again(name: str, output: list[int], appeared: int) -> None:
    follower = followed(TEXT, output[:-10])
    assert follower.propose(4) == output[-10:-6]
    follower.extend(output[-10:])
    assert follower.num_appeared == appeared


def test_behind_one_replaced_id_the_next_are_proposed_at_once() -> None:
    follower = followed(TEXT, [*TEXT[:20], 7])
    assert follower.propose(2) == TEXT[21:23]
    assert follower.match_length == 0


def test_of_repeated_passages_the_nearest_is_taken() -> None:
    passage = [1, 2, 3, 4]
    text = [*passage, 50, *passage, 60, *passage, 70]
    assert followed(text, [*passage, 51, *passage]).propose(1) == [60]


def test_an_id_of_the_prediction_is_counted_once() -> None:
    assert followed(TEXT[:10], TEXT[:10] * 3).num_appeared == 10


def test_one_id_that_agrees_by_chance_does_not_count() -> None:
    assert followed(TEXT, [7, 103, 8, 9, 10]).num_appeared == 0


def test_the_count_does_not_depend_on_how_many_ids_come_at_once() -> None:
    rng = random.Random(4)
    output = [
        id_ if rng.random() < 0.8 else rng.randrange(100) for id_ in TEXT for _ in range(rng.choice((0, 1, 1, 2)))
    ]
    one_by_one = Prediction(TEXT)
    for id_ in output:
        one_by_one.propose(3)
        one_by_one.extend([id_])
    assert 0 < one_by_one.num_appeared < len(TEXT)
    assert followed(TEXT, output).num_appeared == one_by_one.num_appeared
