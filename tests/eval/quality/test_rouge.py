"""ROUGE-L against the reference implementation, which only the tests need."""

import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from space_eval.quality.rouge import rouge_l, rouge_l_sum

rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
SCORER = rouge_scorer.RougeScorer(["rougeL", "rougeLsum"], use_stemmer=False)

SENTENCES = st.text(alphabet="abc é1.\n-", max_size=60)


def check_equal(reference: str, candidate: str) -> None:
    expected = SCORER.score(reference, candidate)
    assert rouge_l(reference, candidate) == pytest.approx(expected["rougeL"].fmeasure, abs=1e-12)
    assert rouge_l_sum(reference, candidate) == pytest.approx(expected["rougeLsum"].fmeasure, abs=1e-12)


@given(SENTENCES, SENTENCES)
@settings(max_examples=300, deadline=None)
def test_any_two_texts_score_as_in_the_reference(reference: str, candidate: str) -> None:
    check_equal(reference, candidate)


def test_long_texts_of_few_words_score_as_in_the_reference() -> None:
    dice = random.Random(0)
    for _ in range(20):
        texts = [" ".join(dice.choices("abcdefgh\n", k=dice.randrange(1, 150))) for _ in range(2)]
        check_equal(*texts)


def test_real_paragraphs_score_as_in_the_reference() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    paragraphs = [part for part in re.split(r"\n\n+", readme) if 20 < len(part) < 1500][:14]
    assert len(paragraphs) > 5
    for reference, candidate in pairwise(paragraphs):
        check_equal(reference, candidate)


def test_a_worked_example() -> None:
    # police ... the gunman: 3 of 4 words each, in order
    assert rouge_l("police killed the gunman", "police kill the gunman") == 0.75
    assert rouge_l("police killed the gunman", "the gunman kill police") == 0.5


def test_texts_without_words_score_nothing() -> None:
    assert rouge_l("", "a") == rouge_l("a", "...") == rouge_l_sum("", "") == 0.0


@given(SENTENCES)
@settings(deadline=None)
def test_a_text_with_words_is_its_own_best_summary(text: str) -> None:
    assert rouge_l(text, text) == (1.0 if re.search("[a-z0-9]", text.lower()) else 0.0)
