"""Which drafts were judged, what goes with their standing, and sentences that follow from the numbers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from space_eval.__main__ import main
from space_eval.exact_law import softmax
from space_eval.explain_drafts import JudgedDraft, judged_drafts, next_token_entropies, repeats
from space_eval.explain_factors import (
    ENTROPY,
    ENTROPY_GROUPS,
    REPETITION,
    TOKEN,
    Group,
    by_group,
    difference,
    explained_share,
    over_all,
    position,
)
from space_eval.explain_reading import Portrait, compare, reading
from space_eval.generation import Generation, Step
from space_eval.measured import Measured
from space_eval.token_class import TokenClass
from space_model.load import load_model
from space_model.testing import tiny_checkpoint
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def measured(folder: Path) -> Measured:
    model = load_model(folder, dtype="float32")
    return Measured(model, Tokenizer.from_file(str(folder / "tokenizer.json")))


def draft(
    stood: bool, *, place: int = 1, entropy: float = 0.0, kind: TokenClass = TokenClass.WORD, again: bool = False
) -> JudgedDraft:
    return JudgedDraft(place, stood, entropy, kind, again)


def test_a_step_judges_its_drafts_up_to_the_first_that_falls(measured: Measured) -> None:
    encode = measured.tokenizer.encode
    (x, y, one, space, dot), prompt = encode("xy1 .").ids, encode("a = ").ids
    steps = [Step((x, y, one), 3, 2), Step((space,), 2, 0), Step((dot, x), 2, 2)]  # the last run was cut
    drafts = judged_drafts(measured, Generation(prompt, first=[y], steps=steps))
    assert [(d.position, d.stood) for d in drafts] == [
        (1, True), (2, True), (3, False), (1, False), (1, True), (2, True)
    ]  # fmt: skip
    kinds = [TokenClass.IDENTIFIER] * 3 + [TokenClass.WHITESPACE, TokenClass.PUNCTUATION, TokenClass.WORD]
    assert [d.token_class for d in drafts] == kinds
    assert len({d.entropy for d in drafts}) == len(drafts)


def test_a_step_without_drafts_judges_none(measured: Measured) -> None:
    assert judged_drafts(measured, Generation([20, 21], first=[22], steps=[Step((23,), 0, 0)])) == []


def test_a_token_repeats_if_the_four_that_it_ends_stood_before() -> None:
    ids = [1, 2, 3, 4, 9, 1, 2, 3, 4, 9, 3, 4]
    assert repeats(ids, 5) == [False, False, False, True, True, False, False]
    assert repeats([1, 1], 0) == [False, False]


def test_entropies_are_those_of_dense_attention_without_the_masks(folder: Path, measured: Measured) -> None:
    ids = [30 + i * 7 % 60 for i in range(300)]  # more than one chunk
    oracle = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        logits = oracle(torch.tensor([ids])).logits[0, 249:-1].double().numpy()
    p = softmax(np.delete(logits, list(measured.model.facts.mask_ids), axis=1))
    wanted = -(p * np.log(p)).sum(axis=1)
    assert next_token_entropies(measured.model, ids, 250) == pytest.approx(wanted, abs=1e-4)


def test_each_draft_is_in_the_group_of_its_bounds() -> None:
    drafts = [draft(True, entropy=value) for value in (0.0, 0.0999, 0.1, 0.5, 2.9, 3.0, 11.0)]
    groups = by_group(ENTROPY, drafts)
    assert tuple(groups) == ENTROPY_GROUPS == ("< 0.1", "0.1–0.5", "0.5–1", "1–2", "2–3", "≥ 3")
    assert [group.num for group in groups.values()] == [2, 1, 1, 0, 1, 2]
    assert math.isnan(groups["1–2"].rate)


def test_the_share_explained_is_one_where_groups_decide_and_none_where_they_do_not() -> None:
    decided = [draft(True, again=True), draft(True, again=True), draft(False), draft(False)]
    assert explained_share(REPETITION, decided) == 1
    assert explained_share(TOKEN, decided) == 0
    assert math.isnan(explained_share(TOKEN, [draft(True)]))
    mixed = [draft(True, place=1), draft(False, place=1), draft(True, place=2), draft(True, place=2)]
    # rates ½ and 1 around ¾: between 1/16, in all 3/16
    assert explained_share(position(2), mixed) == pytest.approx(1 / 3)


def test_a_difference_is_composition_and_what_is_left_at_equal_places() -> None:
    sure = [draft(True, again=True)] * 8 + [draft(False)] * 2
    unsure = [draft(True, again=True)] * 2 + [draft(False)] * 8
    found = difference(REPETITION, sure, unsure)
    assert found.composition == pytest.approx(0.6)
    assert found.within == pytest.approx(0)
    found = difference(TOKEN, sure, unsure)  # all are words: nothing but a difference at equal places
    assert found.composition == pytest.approx(0)
    assert found.within == pytest.approx(0.6)
    only_here = [draft(True, kind=TokenClass.NUMBER)] * 5 + [draft(False)] * 5
    found = difference(TOKEN, only_here, [draft(False)] * 10)
    assert found.composition == pytest.approx(0.5)
    assert found.within == pytest.approx(0)
    for factor in (ENTROPY, TOKEN, REPETITION, position(2)):
        found = difference(factor, sure, only_here)
        assert found.composition + found.within == pytest.approx(over_all(sure).rate - over_all(only_here).rate)


def test_rates_are_compared_by_two_standard_errors() -> None:
    assert compare(Group(100, 60), Group(100, 40)) == 1
    assert compare(Group(100, 40), Group(100, 60)) == -1
    assert compare(Group(100, 52), Group(100, 48)) == 0


def portrait(name: str, drafts: list[JudgedDraft], tokens_per_step: float = 2.0, num_texts: int = 6) -> Portrait:
    return Portrait(name, 0.8, False, num_texts, 7, round(100 * tokens_per_step), 100, drafts)


def drafts_of(num_sure: int, num_unsure: int) -> list[JudgedDraft]:
    """Nine in ten of the sure ones stand, one in five of the others."""
    sure = [draft(i % 10 != 0, entropy=0.05) for i in range(num_sure)]
    return sure + [draft(i % 5 == 0, entropy=4.0, place=2) for i in range(num_unsure)]


def test_the_paragraph_says_what_the_numbers_say() -> None:
    said = reading([portrait("code", drafts_of(200, 100))], 5)
    assert "At temperature 0.8, outputs that do not loop: code 2.00 tokens per step (6 of 7 texts)." in said
    assert (
        "Draft 1 stands in 0.90 of its places, draft 2 in 0.20 of the places that it reaches: later drafts are" in said
    )
    assert "entropy is below 0.1 nats (67% of the places) 0.90 stand, where it is 3 nats or more (33%) 0.20" in said
    assert "By token class" not in said  # there is one
    assert "repeat" not in said.partition("Of the variance")[0]


def test_other_numbers_make_other_sentences() -> None:
    drafts = [draft(i % 2 == 0, entropy=value, place=2) for value in (0.05, 4.0) for i in range(100)]
    said = reading([portrait("chat", drafts)], 5)
    assert "0.50 stand, where it is 3 nats or more (50%) 0.50, a difference that may be chance." in said
    turned = [draft(i % 10 == 0, entropy=0.05) for i in range(100)] + [draft(True, entropy=4.0) for _ in range(100)]
    assert "more where it is less sure" in reading([portrait("chat", turned)], 5)
    again = [draft(True, again=True)] * 50 + [draft(i % 2 == 0) for i in range(50)]
    assert "are drafted right more often than new ones: 1.00 against 0.50" in reading([portrait("x", again)], 5)


def test_two_sets_are_told_apart_by_what_they_are_made_of() -> None:
    said = reading([portrait("chat", drafts_of(100, 300), 1.5), portrait("code", drafts_of(300, 100), 2.5)], 5)
    assert "code gains more than chat (2.50 against 1.50 tokens per step)" in said
    assert "Nearly all of that (100%) goes with entropy: code has more places with entropy below 0.1 nats" in said
    assert "(75% against 25%); 0% is left at equal entropy. The others, each alone: token class 0%" in said


def test_a_difference_within_chance_is_called_so() -> None:
    said = reading([portrait("a", drafts_of(50, 50), 2.1), portrait("b", drafts_of(48, 52), 2.0)], 5)
    assert "which may be chance" in said
    assert "goes with" not in said


def test_a_set_of_few_texts_is_compared_with_no_other() -> None:
    said = reading(
        [portrait("chat", drafts_of(100, 300), 1.5, num_texts=4), portrait("code", drafts_of(300, 100), 2.5)], 5
    )
    assert "code and chat are not compared: of chat only 4 texts do not loop." in said
    assert "gains more" not in said


def test_of_too_few_drafts_nothing_is_said() -> None:
    assert "nothing is said of them" in reading([portrait("code", drafts_of(5, 5))], 5)


@pytest.fixture
def sets(tmp_path: Path) -> list[str]:
    code, chat = tmp_path / "code.jsonl", tmp_path / "talk.jsonl"
    code.write_text('{"prompt": "def add(a, b):"}\n{"prompt": "x = 1\\ny = 2\\n"}\n', encoding="utf-8")
    chat.write_text('{"turns": ["Why is it so?"]}\n', encoding="utf-8")
    return [str(code), f"chat={chat}"]


def test_the_command_writes_tables_record_and_figures(
    folder: Path, sets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    flags = ["--model", str(folder), "--prompts", *sets, "--chat", "chat", "--max-tokens", "16", "--k", "3"]
    assert main(["explain", *flags, "--out", str(out)]) == 0
    record = json.loads((out / "explain.json").read_text(encoding="utf-8"))
    assert [(p["prompts"], p["temperature"], p["looping"]) for p in record["portraits"]] == [
        (name, heat, looping) for heat in (0.0, 0.8) for name in ("code", "chat") for looping in (False, True)
    ]
    for found in record["portraits"]:
        counts = [sum(g["judged"] for g in f["groups"].values()) for f in found["factors"].values()]
        assert len(set(counts)) == 1
        # every token of a step but a bonus behind a whole chain was a judged draft's place
        assert counts[0] <= found["tokens"]
    assert sum(found["texts"] for found in record["portraits"]) == 6
    assert (out / "explain.md").read_text(encoding="utf-8") in capsys.readouterr().out
    for name in ("position", "entropy", "class", "repetition"):
        assert (out / f"explain-{name}.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompts", "a=x.jsonl", "a=y.jsonl"], "Two sets of --prompts are called a"),
        (["--prompts", "a=x.jsonl", "--chat", "b"], "--chat b is no set of --prompts; there are a"),
        (["--prompts", "a=x.jsonl"], "no prompt file at x.jsonl"),
    ],
)
def test_settings_that_mean_nothing_are_refused_in_one_line(
    flags: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--model", str(folder), *flags]) == 2
    assert words in capsys.readouterr().err
