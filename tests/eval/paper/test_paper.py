"""What the paper asked, of whom, and what it published; where the questions are read from."""

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any, cast

import pytest
from space_eval.__main__ import main
from space_eval.acceptance.paired_decoding import TimedAnswer
from space_eval.flags import FlagError, JournalError, RecordError
from space_eval.paper import command
from space_eval.paper import table as table_module
from space_eval.paper.command import _family
from space_eval.paper.options import add_paper
from space_eval.paper.protocol import (
    FittedPrompt,
    MeasuredQuestion,
    PromptedModel,
    Turn,
    open_journal,
    weights_digest,
)
from space_eval.paper.table import (
    PaperRow,
    draw,
    pass_quality,
    quality_by_reference,
    record,
    summarise,
    to_markdown,
)
from space_eval.paper.tasks import (
    FAMILIES,
    PUBLISHED,
    TASKS,
    PublishedFigure,
    Question,
    family_of,
    load_questions,
    place_and_split,
    published_for,
)
from space_eval.quality.humaneval import FLAG
from space_eval.report import write_report
from space_train.training.published_options import EVALUATION_OPTIONS
from tiny_checkpoints import tiny_checkpoint
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

ADD = {
    "task_id": "t/0",
    "prompt": 'def add(a, b):\n    """Their sum."""\n',
    "test": "def check(f):\n    assert f(1, 2) == 3\ncheck(add)\n",
    "canonical_solution": "    return a + b\n",
}


def jsonl(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_code_is_asked_for_in_the_papers_words() -> None:
    question = TASKS["human_eval"].read(ADD, "-")
    asked = "Complete the following python code. Give the answer in a code block starts with '```python' and end with"
    assert question.turns == (f"{asked} '``'\n{ADD['prompt']}",)
    assert question.plain_turns == (ADD["prompt"],)
    assert FAMILIES["plain"].prompt(question.plain_turns, []) == ADD["prompt"]


def test_each_family_is_spoken_to_in_its_own_frame() -> None:
    said = ["Hello"]
    assert FAMILIES["qwen"].prompt(said, []) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert FAMILIES["chatglm"].prompt(said, []) == "\n[Round 0]\n\n问：Hello\n\n答："
    assert FAMILIES["llama-2"].prompt(said, []) == (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions.\nHuman:Hello\nAssistant:"
    )
    assert FAMILIES["llama-2-chat"].prompt(said, []).startswith("<<SYS>>\nYou are a helpful, respectful")
    assert FAMILIES["falcon"].prompt(said, []) == FAMILIES["internlm"].prompt(said, []) == "\nHuman:Hello\nAssistant:"


def test_the_second_turn_holds_the_first_answer() -> None:
    turns = ["One?", "And two?"]
    assert FAMILIES["falcon"].prompt(turns, ["1."]) == "\nHuman:One?\nAssistant:\n1.\nHuman:And two?\nAssistant:"
    assert (
        FAMILIES["llama-2-chat"]
        .prompt(turns, ["1."])
        .endswith("[INST]One? [/INST]\n1. </s><s>\n[INST]And two? [/INST]")
    )
    assert FAMILIES["plain"].prompt(turns, ["1."]) == "One?\n1.\nAnd two?"


def test_a_chat_model_of_no_family_is_asked_through_its_own_template(tmp_path: Path) -> None:
    """Its folder may have any name; a model without a template continues text."""
    chat = tiny_checkpoint(tmp_path / "mine" / "model", num_layers=1)
    family = _family("auto", str(chat))
    assert family.name == "template"
    assert family.is_chat
    own = AutoTokenizer.from_pretrained(chat)
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert family.prompt(["a", "c"], ["b"]) == own.apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        file = chat / name
        if file.is_file() and file.suffix == ".json":
            file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": None}))
        else:
            file.unlink(missing_ok=True)
    assert _family("auto", str(chat)).name == "plain"
    assert _family("auto", "demo").name == "plain"
    with pytest.raises(FlagError, match="has no chat template"):
        _family("template", str(chat))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("demo", "plain"),
        ("meta-llama/Llama-2-7b-hf", "llama-2"),
        ("models/llama2-13b-chat/", "llama-2-chat"),
        ("AntMan/vicuna-v1.3-7b-space", "vicuna"),
        ("THUDM/chatglm3-6b", "chatglm"),
        ("Qwen/Qwen-14B", "qwen"),
        ("internlm/internlm-20b", "internlm"),
        ("tiiuae/falcon-40b", "falcon"),
        ("runs/vicuna-7b/model", "vicuna"),  # where a run of ours leaves its checkpoint
        ("qwen/model/", "qwen"),
        ("runs/mine/model", "plain"),
        ("model", "plain"),
    ],
)
def test_a_models_name_tells_its_family(name: str, family: str) -> None:
    assert family_of(name).name == family


@pytest.mark.parametrize(
    ("family", "name", "row", "xsum", "human_eval"),
    [
        ("chatglm", "chatglm3-6b", "ChatGLM-3-6B", (2.04, 1.48), (3.34, 2.73)),
        ("llama-2", "llama-2-7b", "LLaMA-2-7B", (2.23, 1.94), (3.54, 3.18)),
        ("llama-2-chat", "Llama-2-13b-chat-hf", "LLaMA-2-13B", (2.36, 2.10), (3.76, 3.44)),
        ("llama-2", "x/llama-2-70B", "LLaMA-2-70B", (2.54, 2.35), (4.32, 4.01)),
        ("qwen", "Qwen-7B", "Qwen-14B", (2.15, 1.94), (3.51, 3.18)),
        ("internlm", "internlm-20b", "InternLM-20B", (2.15, 1.96), (3.31, 3.19)),
        ("falcon", "falcon-40b", "Falcon-40B", (2.17, 2.01), (3.58, 3.61)),
        ("plain", "demo", "LLaMA-2-7B", (2.23, 1.94), (3.54, 3.18)),
        ("vicuna", "vicuna-v1.3-7b", "LLaMA-2-7B", (2.23, 1.94), (3.54, 3.18)),
    ],
)
def test_the_published_row_of_each_family_stands_beside_ours(
    family: str, name: str, row: str, xsum: tuple[float, float], human_eval: tuple[float, float]
) -> None:
    found = published_for(family, name)
    assert found.name == row
    assert found.figures["xsum"] == PublishedFigure(*xsum)
    assert found.figures["human_eval"] == PublishedFigure(*human_eval)
    assert set(found.figures) == {"xsum", "human_eval", "cip"}


def test_the_published_table_has_its_seven_models() -> None:
    assert len(PUBLISHED) == 7
    assert PUBLISHED["LLaMA-2-70B"].figures["cip"] == PublishedFigure(2.09, 1.91)


def test_help_maps_every_option_of_the_published_script(capsys: pytest.CaptureFixture[str]) -> None:
    published = "--mask_id --mask_num --mask_diff --do_sample --use_cache --model_type --dataset --llm_dir --save_data"
    mapped = {option.published.split()[0]: option.ours for option in EVALUATION_OPTIONS}
    assert set(published.split()) <= set(mapped)
    with pytest.raises(SystemExit):
        main(["paper", "--help"])
    shown = capsys.readouterr().out
    assert all(option.published in shown and option.ours in shown for option in EVALUATION_OPTIONS)


def test_the_flags_named_beside_the_published_ones_exist() -> None:
    parser = argparse.ArgumentParser()
    add_paper(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    for option in EVALUATION_OPTIONS:
        if option.ours.startswith("--"):
            assert {word for word in option.ours.split() if word.startswith("--")} <= known


def test_gsm8ks_reference_is_what_stands_behind_the_marks() -> None:
    question = TASKS["gsm8k"].read({"question": "How many?", "answer": "2+2=<<2+2=4>>4\n#### 4"}, "gsm8k/1")
    assert (question.name, question.turns, question.reference) == ("gsm8k/1", ("How many?",), "4")


def test_instructions_may_have_an_input() -> None:
    assert TASKS["cip"].read({"prompt": "Sing."}, "-").turns == ("Sing.",)
    assert TASKS["cip"].read({"instruction": "Add.", "input": "1 2"}, "-").turns == ("Add.\n1 2",)


def test_a_missing_field_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "x.jsonl", {"document": "d", "headline": "h"})
    with pytest.raises(RecordError, match=r"has no field summary, which XSum needs. It has: document, headline"):
        load_questions(TASKS["xsum"], str(file))


def test_a_source_may_name_configuration_and_split(tmp_path: Path) -> None:
    assert place_and_split("openai/gsm8k:main@train") == ("openai/gsm8k:main", "train")
    assert place_and_split("a/b") == ("a/b", "test")
    odd = jsonl(tmp_path / "a@b.jsonl", ADD)
    assert place_and_split(str(odd)) == (str(odd), "test")


def test_without_a_network_one_line_names_the_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load_dataset(name: str, config: str | None, split: str) -> None:
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert main(["paper", "--tasks", "xsum"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "EdinburghNLP/xsum" in said
    assert "--data xsum=FILE" in said


TWO_TURNS = {"question_id": 7, "category": "maths", "turns": ["One?", "And two?"]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), window=256)


@pytest.fixture
def data(tmp_path: Path) -> str:
    summaries = [{"id": str(n), "document": f"Rain fell in town {n}.", "summary": f"Rain {n}."} for n in range(3)]
    code = jsonl(tmp_path / "code.jsonl", ADD)
    bench = jsonl(tmp_path / "bench.jsonl", TWO_TURNS)
    return f"xsum={jsonl(tmp_path / 'xsum.jsonl', *summaries)},human_eval={code},mt_bench={bench}"


def measure(checkpoint: Path, data: str, out: Path, *flags: str) -> int:
    arguments = ["paper", "--model", str(checkpoint), "--tasks", "xsum,human_eval,mt_bench", "--data", data]
    return main([*arguments, "--max-tokens", "8", "--rounds", "2", "--k", "2", FLAG, "--out", str(out), *flags])


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the tiny model."""
    monkeypatch.setattr(table_module, "bar_plot", lambda path, *series, **words: path)


def table(out: Path) -> dict[str, Any]:
    """The report without times."""
    rows = json.loads((out / "paper.json").read_text())["rows"]
    timed = {"speedup", "decode_speedup", "speedup_not_looping", "speedup_over_base"}
    return {row["task"]: {n: v for n, v in row.items() if n not in timed and "second" not in n} for row in rows}


@pytest.mark.usefixtures("no_figures")
def test_a_killed_run_goes_on_and_gives_the_table_of_an_uninterrupted_one(
    checkpoint: Path, data: str, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert measure(checkpoint, data, whole) == 0

    assert measure(checkpoint, data, parts, "--stop-after", "1") == 0
    assert table(parts)["xsum"]["num_questions"] == 1
    assert "1 of 3" in (parts / "paper.md").read_text()
    journal = parts / "answers.jsonl"
    done = journal.read_bytes()
    journal.write_bytes(done[:-40])  # killed in the middle of a line

    assert measure(checkpoint, data, parts) == 0
    assert journal.read_bytes().startswith(done[: done.rfind(b"\n", 0, -1) + 1])  # what was there is not measured again
    assert table(parts) == table(whole)
    assert table(whole)["xsum"]["num_questions"] == table(whole)["xsum"]["num_identical"] == 3
    assert table(whole)["mt_bench"]["num_answers"] == 2


@pytest.mark.usefixtures("no_figures")
def test_an_exception_loses_nothing_that_was_measured(
    checkpoint: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = command.PaperProtocol.measure, []

    def failing(self: command.PaperProtocol, question: Question, number: int, max_tokens: int) -> MeasuredQuestion:
        calls.append(question.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, question, number, max_tokens)

    monkeypatch.setattr(command.PaperProtocol, "measure", failing)
    assert measure(checkpoint, data, tmp_path / "out", "--no-execution") == 130
    assert table(tmp_path / "out")["xsum"]["num_questions"] == 2
    assert measure(checkpoint, data, tmp_path / "out", "--no-execution") == 0
    assert calls == ["0", "1", "2", "2", "t/0", "7"]


@pytest.mark.usefixtures("no_figures")
def test_a_journal_of_another_setting_is_refused_by_name(
    checkpoint: Path, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(checkpoint, data, tmp_path / "out", "--tasks", "xsum") == 0
    assert measure(checkpoint, data, tmp_path / "out", "--tasks", "xsum", "--seed", "5") == 2
    assert "holds answers for seed 0; this run has 5" in capsys.readouterr().err


@pytest.mark.usefixtures("no_figures")
def test_the_base_answers_the_same_questions_with_its_own_history(checkpoint: Path, data: str, tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", window=256, num_masks=0, seed=1, num_layers=1)
    assert measure(checkpoint, data, tmp_path / "out", "--base", str(base), "--no-execution") == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    turns = next(line for line in lines[1:] if line["name"] == "7")["turns"]
    assert all(turn["base"]["ids"] != turn["plain"]["ids"] for turn in turns)
    rows = json.loads((tmp_path / "out" / "paper.json").read_text())["rows"]
    assert all(row["speedup_over_base"]["median"] > 0 for row in rows)


@pytest.mark.usefixtures("no_figures")
def test_a_gated_adapter_answers_with_its_bases_own_words(data: str, tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", window=256, num_masks=0, num_layers=1)
    gated = tiny_checkpoint(tmp_path / "gated", window=256, adapter_rank=4, num_layers=1)
    flags = ["--base", str(base), "--no-execution", "--tasks", "xsum"]
    assert measure(gated, data, tmp_path / "out", *flags) == 0
    for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()[1:]:
        for turn in json.loads(line)["turns"]:
            assert turn["space"]["ids"] == turn["plain"]["ids"] == turn["base"]["ids"]
    quality = table(tmp_path / "out")["xsum"]["quality"]
    assert quality["model"] == quality["base"]


@pytest.mark.usefixtures("no_figures")
def test_samples_for_pass_at_k_are_drawn_apart_and_kept(checkpoint: Path, data: str, tmp_path: Path) -> None:
    assert measure(checkpoint, data, tmp_path / "out", "--pass-at", "3", "--limit", "1") == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    samples = {line["name"]: line["samples"] for line in lines[1:]}
    assert len(set(samples["t/0"])) == 3
    assert samples["0"] == []
    assert table(tmp_path / "out")["human_eval"]["quality"]["name"] == "pass@3"


def test_changed_weights_of_the_same_shape_have_another_fingerprint(tmp_path: Path) -> None:
    folders = [tiny_checkpoint(tmp_path / str(seed), num_layers=1, seed=seed) for seed in (0, 1)]
    again = tiny_checkpoint(tmp_path / "again", num_layers=1, seed=0)
    first, second, same = (weights_digest(str(folder)) for folder in (*folders, again))
    assert first != second
    assert first == same
    (again / "draft_head.safetensors").write_bytes((folders[1] / "draft_head.safetensors").read_bytes())
    assert weights_digest(str(again)) not in (first, second)


@pytest.mark.usefixtures("no_figures")
def test_a_prompt_longer_than_the_window_keeps_its_end_and_room_for_half_an_answer(
    checkpoint: Path, data: str, tmp_path: Path
) -> None:
    long = jsonl(tmp_path / "long.jsonl", {"document": "word " * 100, "summary": "w"})
    arguments = ["paper", "--model", str(checkpoint), "--tasks", "xsum", "--data", f"xsum={long}", "--k", "1"]
    assert main([*arguments, "--rounds", "1", "--max-tokens", "1024", "--out", str(tmp_path / "out")]) == 0
    (row,) = table(tmp_path / "out").values()
    assert row["num_truncated"] == 1
    turn = json.loads((tmp_path / "out" / "answers.jsonl").read_text().splitlines()[1])["turns"][0]
    assert turn["num_prompt_ids"] == 128
    assert len(turn["space"]["ids"]) <= 128


def answer(*ids: int, steps: int, seconds: tuple[float, ...]) -> TimedAnswer:
    return TimedAnswer(
        ids, "length", steps, len(ids) - 1, 5 * steps, len(ids) - 1 - steps, 36 * steps, seconds, seconds
    )


def measured(text: str, *, reference: str = "", base_text: str = "", name: str = "q") -> MeasuredQuestion:
    ids = tuple(range(11))
    turn = Turn(
        num_prompt_ids=4, truncated=False, plain=answer(*ids, steps=10, seconds=(4.0, 6.0, 9.0)),
        space=answer(*ids, steps=4, seconds=(2.0, 2.0, 9.0)), text=text,
        base=answer(*ids, steps=10, seconds=(1.0, 1.0, 1.0)) if base_text else None, base_text=base_text,
    )  # fmt: skip
    return MeasuredQuestion(Question(name, ("",), ("",), reference=reference), (turn,))


def test_a_body_keeps_its_first_space_where_the_tokenizer_drops_that_of_a_text() -> None:
    """As Llama 2's does: the ids of a function's body alone would be three spaces deep, and no program."""
    tokenizer = Tokenizer(models.WordLevel({"▁def": 0, "▁f():": 1, "\n": 2, "▁▁▁": 3, "▁return": 4, "▁1": 5}, "▁1"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    speaker = PromptedModel(cast(Any, None), tokenizer, FAMILIES["plain"])
    said = speaker.text(FittedPrompt([0, 1, 2], False, 9), [3, 4, 5])
    assert said == "    return 1"


def row(*of: MeasuredQuestion, task: str = "xsum") -> PaperRow:
    return summarise(TASKS[task], of, len(of), None, PUBLISHED["LLaMA-2-7B"])


def test_a_speed_up_is_the_median_of_paired_rounds() -> None:
    made = row(measured("a"))
    assert (made.speedup.median, made.speedup.low, made.speedup.high) == (2.0, 1.0, 3.0)
    assert made.tokens_per_step == 10 / 4
    assert made.tokens_per_forward == 11 / 5
    assert made.accepted_share == 6 / 20
    assert made.rows_per_step == 36


def test_the_report_has_a_table_a_record_and_two_figures(tmp_path: Path) -> None:
    given = [row(measured("a"))], {"model": "m"}, PUBLISHED["LLaMA-2-7B"]
    written = [*write_report(tmp_path, "paper", to_markdown(*given), record(*given)), *draw(tmp_path, *given)]
    assert [file.name for file in written] == ["paper.json", "paper.md", "paper.png", "paper-speed.png"]
    assert "| XSum | 1 | 2.50 | 2.50 | 2.23 | 2.00 (1.00–3.00) | 2.00 | 1.94 |" in written[1].read_text()
    for figure in written[2:]:
        assert figure.read_bytes().startswith(b"\x89PNG")
        assert figure.stat().st_size > 5000


def test_looping_outputs_are_told_apart() -> None:
    steady = measured("a")
    turn = steady.turns[0]
    loop = tuple([1, 2] * 10)
    looping = Turn(
        4, False, answer(*loop, steps=19, seconds=(1.0,) * 3), answer(*loop, steps=4, seconds=(1.0,) * 3), ""
    )
    made = row(steady, MeasuredQuestion(steady.question, (looping,)))
    assert made.looping == 0.5
    assert made.tokens_per_step == (10 + 19) / 8
    assert made.tokens_per_step_not_looping == turn.space.num_decoded / turn.space.num_steps


def test_a_score_of_nothing_is_no_signal() -> None:
    quality = quality_by_reference(TASKS["xsum"], [measured("dog", reference="cat", base_text="cow")])
    assert quality is not None
    assert (quality.model, quality.base, quality.has_signal) == (0.0, 0.0, False)
    made = summarise(TASKS["xsum"], [measured("dog")], 1, quality, PUBLISHED["LLaMA-2-7B"])
    shown = to_markdown([made], {}, PUBLISHED["LLaMA-2-7B"])
    assert "ROUGE-L: no signal" in shown
    same = quality_by_reference(TASKS["xsum"], [measured("the cat", reference="the cat", base_text="a cat")])
    assert same is not None
    assert same.model == 1.0


def test_code_is_judged_by_its_tests(tmp_path: Path) -> None:
    problems = command._problems(TASKS["human_eval"], str(jsonl(tmp_path / "code.jsonl", ADD)))
    right, wrong = "    return a + b\n", "    return a - b\n"
    plain = [measured(right, base_text=wrong, name="t/0"), measured(wrong, base_text=wrong, name="t/0")]
    quality = pass_quality(plain, problems, chat=False)
    assert (quality.name, quality.model, quality.base) == ("pass@1", 0.5, 0.0)
    chat = [measured(f"Here:\n```python\n{ADD['prompt']}{right}```", name="t/0")]
    assert pass_quality(chat, problems, chat=True).model == 1.0


def test_sums_are_judged_by_their_last_number() -> None:
    good = measured("She has 5 and sells 2, so $1,018.00", reference="1018")
    quality = quality_by_reference(TASKS["gsm8k"], [good, measured("none", reference="18")])
    assert quality is not None
    assert quality.model == 0.5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tasks", "squad"], "must name some of xsum, human_eval"),
        (["--tasks", "xsum", "--data", "summary.jsonl"], "must read TASK=SOURCE"),
        (["--tasks", "spec_bench"], "has no home on the hub. Give --data spec_bench=FILE"),
        (["--max-tokens", "1024,xsun=3"], "must read N or N,TASK=N"),
        (["--rounds", "0"], "--rounds is 0; it must be at least 1"),
    ],
)
def test_unusable_flags_are_refused_in_one_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_model_without_masks_is_told_how_to_get_some(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tiny_checkpoint(tmp_path / "plain", num_masks=0, num_layers=1)
    assert measure(plain, data, tmp_path / "out") == 2
    assert "has 0 masks" in capsys.readouterr().err


def test_a_journal_with_a_broken_line_in_its_middle_is_not_guessed_at(tmp_path: Path) -> None:
    line = {"key": "one", "text": "line\u2028separator"}
    open_journal(tmp_path / "a.jsonl", {"k": 5}).add(line)
    assert open_journal(tmp_path / "a.jsonl", {"k": 5})["one"] == line
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write("{broken\n")
    with pytest.raises(JournalError, match=r"a\.jsonl:3 is no answer"):
        open_journal(tmp_path / "a.jsonl", {"k": 5})
