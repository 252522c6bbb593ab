"""Drafts from a sequence's own past: the longest match, followed, and nothing where there is none."""

from __future__ import annotations

import random

import pytest
from space_server.drafts import LONGEST, RUNS, SHORTEST_MATCH, Lookup, Prediction, SuffixIndex


def longest_by_search(ids: list[int]) -> int:
    """The longest end of `ids` that stands somewhere before, by trying every place."""
    best = 0
    for place in range(1, len(ids)):
        length = 0
        while length < min(place, LONGEST) and ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        best = max(best, length)
    return best


def remembered(length: int) -> int:
    """The longest run within a match of this length that an index knows."""
    return max((run for run in RUNS if run <= length), default=0)


def test_what_followed_the_last_ids_is_proposed() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 9, 9, 2, 3])
    assert lookup.propose(3) == [4, 5, 9]
    assert lookup.match_length == 2


def test_the_longest_match_wins_over_a_later_one() -> None:
    ids = [1, 2, 3, 4, 70, 8, 3, 4, 80, 1, 2, 3, 4]
    assert Lookup(ids).propose(1) == [70]


def test_the_latest_of_equal_matches_wins() -> None:
    assert Lookup([3, 4, 70, 3, 4, 80, 3, 4]).propose(1) == [80]


@pytest.mark.parametrize("ids", [[], [5], [1, 2, 3, 4], [1, 2, 3, 2], [7, 8, 9, 8]])
def test_without_a_match_of_two_ids_nothing_is_proposed(ids: list[int]) -> None:
    assert SHORTEST_MATCH == 2
    assert Lookup(ids).propose(8) == []


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    lookup = Lookup([6, 7, 8, 6, 7])
    assert lookup.propose(8) == [8, 6, 7, 8, 6, 7, 8, 6]
    assert Lookup([4, 4, 4]).propose(5) == [4] * 5


def test_a_match_is_followed_and_grows_until_the_text_strays() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 6, 50, 1, 2])
    assert lookup.propose(2) == [3, 4]
    lookup.extend([3, 4])
    assert lookup.propose(2) == [5, 6]
    assert lookup.match_length == 4
    lookup.extend([99])
    assert lookup.propose(2) == []


def behind(ids: list[int], drafts: list[int], max_drafts: int) -> tuple[list[int], int]:
    lookup = Lookup(ids)
    lookup.propose(max_drafts)
    return lookup.propose_behind(drafts, max_drafts)


def test_what_followed_the_text_with_drafts_behind_it_is_proposed() -> None:
    assert behind([1, 2, 3, 4, 5, 6, 90], [2, 3], 2) == ([4, 5], 2)
    assert behind([1, 2, 3, 4, 5, 6, 90], [2, 3, 4], 2) == ([5, 6], 3)
    assert behind([1, 2, 3, 4, 5, 6, 90], [91, 2], 2) == ([], 0)


def test_drafts_that_agree_with_the_match_make_it_longer() -> None:
    assert behind([1, 2, 3, 4, 5, 6, 90, 1, 2], [3, 4], 2) == ([5, 6], 4)


def test_drafts_that_disagree_with_the_match_start_another() -> None:
    assert behind([1, 2, 3, 7, 8, 9, 90, 1, 2], [7, 8], 1) == ([9], 2)


def test_behind_drafts_a_periodic_text_goes_on_repeating() -> None:
    assert behind([6, 7, 8, 6, 7], [8, 6, 7, 8], 4)[0] == [6, 7, 8, 6]


@pytest.mark.parametrize("num_ids", [0, 1, 2, 3, 7, 8, 9, 40])
def test_an_index_built_at_once_is_one_that_grew(num_ids: int) -> None:
    rng = random.Random(num_ids)
    text = [rng.randrange(3) for _ in range(60)]
    grown = SuffixIndex([])
    for id_ in text[:num_ids]:
        grown.push(id_)
    built = SuffixIndex(text[:num_ids])
    for id_ in text[num_ids:]:
        assert built.find(built.ids) == grown.find(grown.ids) == built.find_end() == grown.find_end()
        built.push(id_)
        grown.push(id_)


def test_whatever_is_found_is_there_and_as_long_as_said() -> None:
    rng = random.Random(1)
    index = SuffixIndex([])
    found = wanted = 0
    for _ in range(1500):  # past several tables: 256 slots at first
        index.push(rng.choice((1, 2, 3, 1 << 31)))
        match, best = index.find_end(), longest_by_search(index.ids[-300:])
        wanted += best >= SHORTEST_MATCH
        if match is None:
            continue
        place, length = match
        found += remembered(length) >= remembered(best)
        assert 0 < place < len(index.ids)
        assert index.ids[place - length : place] == index.ids[-length:]
    assert found > 0.97 * wanted  # a collision may cost a match, seldom


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
