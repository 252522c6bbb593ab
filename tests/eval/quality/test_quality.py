"""`spaceserve eval quality`: ROUGE-L and perplexity as references have them, and what the command reports."""

import argparse
import errno
import json
import math
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from space_common.worker.completion import CompletionRequest, complete
from space_eval.__main__ import main
from space_eval.flags import RecordError
from space_eval.quality import command
from space_eval.quality.humaneval import FLAG
from space_eval.quality.model import QualityModel, WritingSettings
from space_eval.quality.options import add_quality
from space_eval.quality.perplexity import PerplexityMeter, TextScore, load_texts, windows
from space_eval.quality.scores import ComparisonOutcome, Score, compare, interval, rouge_l, rouge_l_sum
from space_eval.quality.tasks import Answers, HumanEval, Summarise, TaskPrompt, open_answers
from space_eval.report import Journal
from space_model.heads import OutputHead
from space_model.loading.load import load_model
from space_model.random_checkpoint import END
from space_proto import worker_pb2 as pb
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

SENTENCES = st.text(alphabet="abc é1.\n-", max_size=60)


def check_equal(reference: str, candidate: str) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL", "rougeLsum"], use_stemmer=False)
    expected = scorer.score(reference, candidate)
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


TEXT = "def area(r):\n    return 3.14159 * r * r  # of a circle, in the unit of r squared\n" * 2


@pytest.fixture(scope="module", params=["llama", "gemma2", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param, window=64)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def meter(folder: Path, tokenizer: Any) -> PerplexityMeter:
    return PerplexityMeter(load_model(folder, dtype="float32"), tokenizer, length=48, stride=20)


def nats_by_transformers(folder: Path, ids: list[int], length: int, stride: int) -> float:
    """Each window whole; an id counts in the first window that predicts it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    nats: dict[int, float] = {}
    start = 0
    while True:
        piece = torch.tensor([ids[start : start + length]])
        with torch.inference_mode():
            logits = model(piece).logits[0].double()
        costs = torch.nn.functional.cross_entropy(logits[:-1], piece[0, 1:], reduction="none")
        for offset, cost in enumerate(costs.tolist(), start=1):
            nats.setdefault(start + offset, cost)
        if start + length >= len(ids):
            assert nats.keys() == set(range(1, len(ids)))
            return sum(nats.values())
        start += stride


def test_a_long_text_costs_what_transformers_says(folder: Path, tokenizer: Any, meter: PerplexityMeter) -> None:
    ids = [END, *tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    assert len(ids) > 3 * 48
    score = meter.score(TEXT)
    nats = nats_by_transformers(folder, ids, 48, 20)
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert (score.num_tokens, score.num_bytes) == (len(ids) - 1, len(TEXT.encode()))
    assert score.nats / score.num_tokens == pytest.approx(nats / (len(ids) - 1), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(TEXT), rel=1e-5)


def test_without_a_beginning_of_text_the_first_token_is_given(
    folder: Path, meter: PerplexityMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = AutoTokenizer.from_pretrained(folder)
    own.bos_token = None
    monkeypatch.setattr(meter, "_tokenizer", own)
    ids = own("ab = c", add_special_tokens=False)["input_ids"]
    score = meter.score("ab = c")
    assert score.nats == pytest.approx(nats_by_transformers(folder, ids, 48, 20), rel=1e-5)
    assert (score.num_tokens, score.num_bytes) == (len(ids) - 1, 5)
    assert meter.score("a") == meter.score("") == TextScore(0.0, 0, 0)


def test_a_uniform_model_needs_the_logarithm_of_its_vocabulary(tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint(tmp_path, vocab_size=128, num_masks=0), dtype="float32")
    model._head = OutputHead(torch.zeros(128, model.facts.hidden_size), None)
    score = PerplexityMeter(model, AutoTokenizer.from_pretrained(tmp_path)).score("one character is one token")
    assert math.exp(score.nats / score.num_tokens) == pytest.approx(128)
    assert score.bits_per_byte == pytest.approx(7)


@given(st.integers(0, 60), st.integers(2, 20), st.data())
@settings(deadline=None)
def test_every_id_but_the_first_counts_once(num_ids: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length - 1))
    counted: list[int] = []
    for number, window in enumerate(windows(num_ids, length, stride)):
        assert window.end - window.start <= length
        assert window.first_counted - window.start >= (1 if number == 0 else length - stride)
        counted += range(window.first_counted, window.end)
    assert counted == list(range(1, num_ids))


@pytest.mark.parametrize("stride", [0, 8, 9])
def test_a_stride_that_skips_ids_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match=r"stride must lie in 1\.\.7"):
        list(windows(20, 8, stride))


def test_texts_come_from_records_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"content": "two", "text": null}\n')
    (tmp_path / "b.txt").write_text("three")
    assert load_texts(str(tmp_path / "a.jsonl")) == {"0": "one", "1": "two"}
    assert load_texts(str(tmp_path / "b.txt")) == load_texts(str(tmp_path)) == {"b.txt": "three"}


def test_unusable_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"has no \.txt, \.md or \.py file"):
        load_texts(str(tmp_path))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match=r"b\.txt cannot be read as text"):
        load_texts(str(tmp_path))


PROBLEMS = [
    {
        "task_id": f"Own/{n}",
        "prompt": f"def add{n}(x):\n",
        "test": f"def check(f):\n    assert f(1) == {n + 1}\n\ncheck(add{n})",
    }
    for n in range(3)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), window=128, num_layers=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("other"), window=128, num_layers=1, seed=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "he.jsonl").write_text("\n".join(map(json.dumps, PROBLEMS)))
    (folder / "sum.jsonl").write_text(
        json.dumps({"document": "the cat sat on the mat", "summary": "cat sat"})
        + "\n"
        + json.dumps({"article": "a long day " * 40, "highlights": "a day"})
    )
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"x = {n}\n" * 3}) for n in range(4)))
    return folder


def run(model: Path, data: Path, *flags: str, tasks: tuple[str, ...] = ("humaneval=he", "summarise=sum")) -> int:
    parser = argparse.ArgumentParser()
    add_quality(parser)
    named = ",".join(f"{name}={data / file}.jsonl" for name, _, file in (task.partition("=") for task in tasks))
    arguments = ["--model", str(model), "--tasks", named, "--max-tokens", "12", "--dtype", "float32", FLAG]
    return command.run(parser.parse_args([*arguments, *flags]))


def answers_of(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    return {(a["record"], a["sample"]): a for a in map(json.loads, file.read_text().splitlines())}


def written(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The answers without their number of steps, which depends on what else was in the batch."""
    return {key: {**answer, "num_steps": None} for key, answer in answers_of(file).items()}


def rows_of(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((out / "quality.json").read_text())["rows"]
    return rows


# ---------------------------------------------------------------------------------------------------------- the report


def test_a_task_that_neither_can_do_is_no_signal(model: Path, other: Path, data: Path, tmp_path: Path) -> None:
    assert run(model, data, "--base", str(other), "--out", str(tmp_path / "out"), tasks=("humaneval=he",)) == 0
    report = (tmp_path / "out" / "quality.md").read_text()
    assert "| humaneval | pass@1 | 3 | 0 [0, 0] | 0 [0, 0] | +0 [+0, +0] | no signal |" in report
    assert "unchanged" not in report


def test_a_lone_model_that_scores_nothing_gives_no_signal(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, data, tasks=("humaneval=he",)) == 0
    assert "| humaneval | pass@1 | 3 | 0 [0, 0] | no signal |" in capsys.readouterr().out


def test_space_and_plain_decoding_of_the_same_weights_are_equal_on_every_record(
    model: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    tasks = ("humaneval=he", "perplexity=texts")
    flags = ("--base", str(model), "--out", str(out), "--samples", "2", "--temperature", "1")
    assert run(model, data, *flags, tasks=tasks) == 0
    ours, theirs = (answers_of(out / f"{label}.humaneval.jsonl") for label in ("model", "base"))
    assert {key: a["text"] for key, a in ours.items()} == {key: a["text"] for key, a in theirs.items()}
    assert len(ours) == 6
    assert sum(a["num_steps"] for a in ours.values()) < sum(a["num_steps"] for a in theirs.values())  # it did draft
    assert [(row["score"], row["finding"]) for row in rows_of(out)] == [
        ("pass@1", "no signal"),
        ("bits per byte", "equal on every record"),
        ("perplexity", "equal on every record"),
    ]


def test_other_weights_differ_in_bits_per_byte(model: Path, other: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(model, data, "--base", str(other), "--out", str(out), tasks=("perplexity=texts",)) == 0
    row = rows_of(out)[0]
    assert row["difference"]["low"] <= row["difference"]["value"] <= row["difference"]["high"]
    assert row["difference"]["value"] == pytest.approx(row["model"]["value"] - row["base"]["value"])
    assert row["finding"] == ("worse" if row["difference"]["low"] > 0 else "better")
    assert (out / "quality.png").stat().st_size > 1000


# ------------------------------------------------------------------------------------------------------- going on again


def test_a_run_that_was_cut_off_goes_on_and_ends_the_same(model: Path, data: Path, tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    flags, tasks = ("--samples", "2", "--temperature", "1"), ("humaneval=he",)
    assert run(model, data, *flags, "--out", str(whole), tasks=tasks) == 0
    assert run(model, data, *flags, "--out", str(torn), "--limit", "1", tasks=tasks) == 0
    file = torn / "model.humaneval.jsonl"
    first = file.read_bytes()
    file.write_bytes(first + b'{"record": "Own/1", "sam')  # killed while writing
    assert run(model, data, *flags, "--out", str(torn), tasks=tasks) == 0
    assert file.read_bytes().startswith(first)
    assert written(file) == written(whole / "model.humaneval.jsonl")
    assert rows_of(torn) == rows_of(whole)


def test_a_finished_run_writes_nothing_again(model: Path, data: Path, tmp_path: Path) -> None:
    assert run(model, data, "--out", str(tmp_path / "out")) == 0
    files = {file: file.read_bytes() for file in (tmp_path / "out").glob("*.jsonl")}
    assert run(model, data, "--out", str(tmp_path / "out")) == 0
    assert {file: file.read_bytes() for file in files} == files


def test_more_samples_are_added_to_those_that_are_there(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for samples in ("1", "3"):
        flags = ("--temperature", "1", "--samples", samples, "--out", str(out))
        assert run(model, data, *flags, tasks=("humaneval=he",)) == 0
    assert len(answers_of(out / "model.humaneval.jsonl")) == 9


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--temperature", "0.7"), "holds answers for temperature 0.0; this run has 0.7"),
        (("--seed", "3"), "holds answers for seed 0; this run has 3"),
    ],
)
def test_answers_of_other_settings_are_not_mixed_in(
    flags: tuple[str, ...], words: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, data, "--out", str(tmp_path / "out"), tasks=("perplexity=texts",)) == 0
    assert run(model, data, "--out", str(tmp_path / "out"), *flags, tasks=("perplexity=texts",)) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_answers_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"record": "x"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:1 is no answer .* Give another --out"):
        open_answers(tmp_path / "a.jsonl")


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--samples", "2", "--temperature", "0"), "gives the same text 2 times"),
        (("--max-tokens", "128"), "leaves 0 of the 128 positions"),
        (("--model", "/nowhere"), "There is no folder /nowhere"),
    ],
)
def test_settings_that_cannot_be_are_one_line(
    flags: tuple[str, ...], words: str, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, data, *flags) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("spaceserve eval quality: ")]
    assert len(errors) == 1
    assert words in errors[0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nothing=x", "NAME one of humaneval, summarise, perplexity; got 'nothing=x'"),
        ("humaneval", "wants NAME=DATA"),
        ("humaneval=", "wants NAME=DATA"),
        ("humaneval=a,humaneval=b", "has humaneval twice"),
    ],
)
def test_unknown_or_doubled_tasks_are_refused(value: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_quality(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--tasks", value])
    assert words in capsys.readouterr().err


def test_the_command_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality"]) == 2
    assert "There is nothing to measure: give --tasks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device. Finished answers are kept in"),
        (KeyboardInterrupt(), 130, "with --out the same command goes on where it was"),
    ],
)
def test_a_full_disk_and_an_interruption_lose_nothing(
    error: BaseException, status: int, words: str, model: Path, data: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    add = Journal.add

    def add_two(self: Answers, answer: dict[str, Any]) -> None:
        if len(self.lines) == 2:
            raise error
        add(self, answer)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", add_two)
        assert run(model, data, "--out", str(out), tasks=("perplexity=texts",)) == status
    assert words in capsys.readouterr().err
    kept = (out / "model.perplexity.jsonl").read_bytes()
    assert len(kept.splitlines()) == 2
    assert run(model, data, "--out", str(out), tasks=("perplexity=texts",)) == 0
    whole = (out / "model.perplexity.jsonl").read_bytes()
    assert whole.startswith(kept)
    assert len(whole.splitlines()) == 4


def test_a_missing_data_file_is_one_line(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, data, tasks=("humaneval=absent",)) == 2
    assert "There is no file" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- writing


@pytest.fixture(scope="module")
def side(model: Path) -> QualityModel:
    return QualityModel("model", str(model), dtype="float32", device="cpu", num_threads=None)


WRITING = WritingSettings(
    samples=2, temperature=1.0, top_p=1.0, max_tokens=10, seed=5, chat=False, speculate=True, layout="full", batch=3
)


def texts(side: QualityModel, writing: WritingSettings, data: Path) -> dict[tuple[str, int], str]:
    task = HumanEval.load(str(data / "he.jsonl"), None, chat=writing.chat, seconds=5, memory=1 << 30)
    answers = open_answers(None)
    side.write(task, answers, writing)
    return {(a["record"], a["sample"]): a["text"] for a in answers.lines}


def test_the_batch_changes_no_text(side: QualityModel, data: Path) -> None:
    together = texts(side, WRITING, data)
    assert len(set(together.values())) > 1
    assert together == texts(side, WritingSettings(**{**vars(WRITING), "batch": 1}), data)


def test_a_chat_request_goes_through_the_template(side: QualityModel) -> None:
    chat = WritingSettings(**{**vars(WRITING), "chat": True})
    ids = side.prompt_ids(TaskPrompt("Say {prompt}", "{hi}", keep_end=True), chat)
    assert side.tokenizer.decode(ids) == "<|im_start|>user\nSay {hi}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("keep_end", [True, False])
def test_a_text_that_is_too_long_is_cut_and_its_template_kept(side: QualityModel, keep_end: bool) -> None:
    text = "".join(chr(ord("a") + n % 26) for n in range(300))
    ids = side.prompt_ids(TaskPrompt("<{prompt}>", text, keep_end=keep_end), WRITING)
    shown = side.tokenizer.decode(ids)
    assert len(ids) == 128 - WRITING.max_tokens
    assert shown == f"<{text[-116:] if keep_end else text[:116]}>"


def test_a_text_ends_where_it_is_whole(side: QualityModel) -> None:
    worker = Worker(side.model, num_blocks=12, max_sequences=3, max_draft_length=5)
    requests = [CompletionRequest(str(n), 0, [20 + n, 30, 40], pb.Sampling(seed=n, temperature=1.0)) for n in range(7)]
    ended = {
        request.key: generation
        for request, generation in complete(
            worker, requests, max_tokens=20, max_draft_length=5, is_whole=lambda ids: len(ids) >= 8
        )
    }
    assert ended.keys() == {str(n) for n in range(7)}
    for generation in ended.values():
        assert 8 <= len(generation.tokens) < 8 + 6
        assert len(generation.tokens) - len(generation.steps[-1].tokens) < 8


# -------------------------------------------------------------------------------------------------------------- scoring


def test_pass_at_ten_needs_ten_samples_of_every_problem() -> None:
    task = HumanEval({}, False, 1.0, 1)
    answers = [{"record": r, "sample": s, "passed": r == "a" and s < 3} for r in "ab" for s in range(10)]
    assert {score.name: score.value for score in task.scores(answers)} == pytest.approx(
        {"pass@1": 0.15, "pass@10": 0.5}
    )
    assert [score.name for score in task.scores(answers[:-1])] == ["pass@1"]


def test_a_base_models_summary_is_its_first_paragraph() -> None:
    task = Summarise({"0": ("document", "a cat sat")}, chat=False)
    assert task.score_answer("0", "\n\n a cat sat\n\nand so on and on")["rouge_l"] == 1.0
    assert task.is_whole("\n\n a cat sat\n\n")
    assert not task.is_whole("\n\n a cat")


def test_summaries_that_loop_are_reported_apart() -> None:
    task = Summarise({}, chat=False)
    answers = [
        {"record": str(n), "sample": 0, "rouge_l": 0.2 * n, "rouge_l_sum": 0.0, "looping": n == 3} for n in range(4)
    ]
    assert {s.name: s.value for s in task.scores(answers)} == pytest.approx(
        {"ROUGE-L": 0.3, "ROUGE-L-sum": 0.0, "ROUGE-L, not looping": 0.2}
    )


def scores(*values: float, **flags: Any) -> Score:
    return Score("score", {str(n): (value, 1.0) for n, value in enumerate(values)}, **flags)


def test_a_clear_difference_is_better_or_worse_by_the_scores_own_sense() -> None:
    high, low = scores(*[0.9, 0.8, 0.7, 0.9] * 5), scores(*[0.1, 0.3, 0.2, 0.2] * 5)
    assert compare(high, low).finding is ComparisonOutcome.BETTER
    assert compare(low, high).finding is ComparisonOutcome.WORSE
    lower = {"lower_is_better": True}
    assert (
        compare(scores(*[1.0, 2.0] * 5, **lower), scores(*[3.0, 5.0] * 5, **lower)).finding is ComparisonOutcome.BETTER
    )


def test_a_small_difference_is_not_told_apart() -> None:
    found = compare(scores(*[0.0, 1.0] * 10), scores(*[1.0, 0.0] * 9, 0.0, 0.0))
    assert found.finding is ComparisonOutcome.OPEN
    assert found.difference.low < 0 < found.difference.high


def test_pairing_sees_what_two_intervals_apart_do_not() -> None:
    model, base = scores(*[0.1 + n / 20 for n in range(20)]), scores(*[n / 20 for n in range(20)])
    assert interval(model).low < interval(base).high
    found = compare(model, base)
    assert found.finding is ComparisonOutcome.BETTER
    assert (found.difference.low, found.difference.high) == pytest.approx((0.1, 0.1))


def test_nothing_on_both_sides_is_no_signal_and_something_equal_is_equal() -> None:
    assert compare(scores(0, 0), scores(0, 0)).finding is ComparisonOutcome.NO_SIGNAL
    assert compare(scores(0, 1), scores(0, 1)).finding is ComparisonOutcome.EQUAL


def test_one_record_has_no_interval() -> None:
    found = compare(scores(1.0), scores(0.0))
    assert found.finding is ComparisonOutcome.TOO_FEW
    assert math.isnan(found.difference.low)


def test_the_interval_of_a_share_is_that_of_the_binomial_distribution() -> None:
    found = interval(scores(*[1.0] * 50, *[0.0] * 50))
    assert found.value == 0.5
    assert (found.low, found.high) == pytest.approx((0.40, 0.60), abs=0.01)  # 0.5 -+ 1.96 sqrt(.25/100)


def test_records_weigh_by_their_length() -> None:
    nats = Score("perplexity", {"a": (1.0, 1.0), "b": (9.0, 3.0)}, exponential=True)
    assert nats.value == pytest.approx(math.exp(10 / 4))
