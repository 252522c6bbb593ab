"""What a load asks for: lengths keep their law, arrivals their rate, and files may have both of their own."""

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from space_eval.bench.workload import Lengths, Recorded, Workload, load_recorded
from space_eval.data import load_prompts
from space_eval.flags import RecordError


def test_poisson_arrivals_are_seeded_and_have_their_rate() -> None:
    work = Workload([Recorded("x")], Lengths.parse("1"), seed=3)
    arrivals = [ask.arrival for ask in itertools.islice(work.requests(1, 5.0), 4000)]
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.08)  # as wide as it is long: exponential
    assert arrivals[:9] == [ask.arrival for ask in itertools.islice(work.requests(1, 5.0), 9)]
    assert arrivals[:9] != [ask.arrival for ask in itertools.islice(work.requests(2, 5.0), 9)]


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("7", 7, 7, 7.0),
        ("uniform:3:9", 3, 9, 6.0),
        ("normal:50:5", 1, 70, 50.0),
        ("normal:50:5:48:52", 48, 52, 50.0),
        ("lognormal:100:0.5:1:100000", 1, 100000, 113.3),
    ],
)
def test_lengths_keep_their_law_and_bounds(text: str, low: int, high: int, mean: float) -> None:
    sampling_params, source = Lengths.parse(text), random.Random(1)
    drawn = [sampling_params.draw(source) for _ in range(4000)]
    assert (sampling_params.low, sampling_params.high) == (low, high)
    assert low <= min(drawn) <= max(drawn) <= high
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "at least 1"),
        ("1.5", "whole numbers"),
        ("uniform:9:3", "the lower bound 9 is above the upper one, 3"),
        ("normal:5", "is no length"),
        ("normal:5:-1:1:9", "must be at least 0; got -1"),
        ("nan", "is no length"),
        ("poisson:3", "is no length"),
    ],
)
def test_lengths_that_are_none_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Lengths.parse(text)


def test_prompts_of_given_length_are_cut_from_ids_or_text() -> None:
    made = Workload([Recorded("x")], Lengths.parse("1"), Lengths.parse("uniform:3:12"), text="abcdef", ids=(1, 2, 3, 4))
    ids = [ask.prompt for ask in itertools.islice(made.requests(1), 50)]
    assert {len(prompt) for prompt in ids} <= set(range(3, 13))
    assert all(prompt[1] == prompt[0] % 4 + 1 for prompt in ids if isinstance(prompt, tuple))
    text = Workload([Recorded("x")], Lengths.parse("1"), Lengths.parse("5"), text="abcdef", characters_per_token=4.0)
    prompts = [ask.prompt for ask in itertools.islice(text.requests(1, mark="# 1"), 9)]
    assert {len(prompt) for prompt in prompts} == {20}
    assert all(isinstance(prompt, str) and prompt.startswith(f"# 1.{n}\n") for n, prompt in enumerate(prompts))


def lines(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "work.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path


def test_a_file_may_have_lengths_and_arrivals_of_its_own(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        {"prompt": "a", "output_tokens": 3, "arrival": 10},
        {"turns": ["b", "c"], "arrival": 10.5},
        {"input_length": 2, "output_length": 4, "timestamp": 12000},
    )
    recorded = load_recorded(path)
    assert [(one.text, one.prompt_tokens, one.output_tokens, one.arrival) for one in recorded] == [
        ("a", None, 3, 10.0),
        ("b", None, None, 10.5),
        (None, 2, 4, 12.0),
    ]
    work = Workload(recorded, Lengths.parse("9"), text="z", ids=(5,))
    made = list(itertools.islice(work.requests(1), 5))
    assert [(ask.prompt, ask.max_tokens) for ask in made[:3]] == [("a", 3), ("b", 9), ((5, 5), 4)]
    assert [ask.arrival for ask in made] == [0.0, 0.5, 2.0, 3.0, 3.5]  # a turn is 3 s: 2 s and a mean gap
    assert work.max_output_tokens == 9


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_ends_where_json_lines_says_and_not_at_marks_inside_a_text(tmp_path: Path, mark: str, end: str) -> None:
    texts = [f"one{mark}two", "three"]
    path = tmp_path / "work.jsonl"
    path.write_bytes("".join(json.dumps({"prompt": t}, ensure_ascii=False) + end for t in texts).encode())
    assert [one.text for one in load_recorded(path)] == texts
    assert load_prompts(path) == texts


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"nothing": 1}], "has none of the fields"),
        ([{"prompt": "a", "output_tokens": 0}], "`output_tokens` must be a whole number of at least 1; it is 0"),
        ([{"prompt": "a", "arrival": -1}], "`arrival` must be a number of at least 0; it is -1"),
        ([{"prompt": "a", "arrival": 1}, {"prompt": "b"}], "1 of 2 lines have an arrival"),
        ([{"prompt": "a", "arrival": 2}, {"prompt": "b", "arrival": 1}], "do not ascend"),
        ([], "holds no request"),
        ([[1]], "is not a JSON object"),
    ],
)
def test_a_file_that_cannot_be_used_names_the_line_and_the_cure(tmp_path: Path, records: Any, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        load_recorded(lines(tmp_path, *records))
