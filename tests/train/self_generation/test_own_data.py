"""Training without a data set: prompts of the model's own, the same after a kill, and filters that name their drops."""

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.train_command import TINY, train, write_records
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.load import load_model
from space_model.random_checkpoint import END
from space_train.__main__ import main
from space_train.data.decontamination import NUM_WORDS, EvaluationTexts, word_grams
from space_train.data.examples import ChatText
from space_train.estimate import SHAPES
from space_train.run_folder import fingerprint, load_checkpoint
from space_train.self_generation import prompts as prompts_module
from space_train.self_generation.own_cost import DEFAULT_TEXTS, FEWEST_IN_TIME, FEWEST_TEXTS, OwnCost
from space_train.self_generation.prompts import (
    REQUESTS,
    TOPICS,
    PromptMaker,
    PromptSource,
    installed_snippets,
    topic_requests,
)
from space_train.self_generation.self_generate import (
    OwnText,
    OwnTextFile,
    OwnTextRecipe,
    OwnTexts,
    Question,
    ScribeCounts,
    tokens_left,
)
from space_train.train_plan import Budget, TrainPlan
from tiny_checkpoints import tiny_checkpoint
from transformers import AutoTokenizer

FUNCTION = 'def area(width, height):\n    """Return the area of a rectangle, in square metres."""\n'
DOCUMENTATION = "Tools for rectangles. Each takes metres. None is fast."


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small packages, as site-packages is."""
    folder = tmp_path_factory.mktemp("site-packages")
    for name in ("one", "two", "tests", "_hidden"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")
        body = f'"""{DOCUMENTATION} It is package {name}."""\n\n\n{FUNCTION}    return width * height\n\n\n'
        body = body.replace("area", f"area_{name}")
        body += (
            f'def test_{name}() -> None:\n    """Check the area of a rectangle, which is a test."""\n    assert True\n'
        )
        (folder / name / "shapes.py").write_text(body)
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template and a window of 1024."""
    return tiny_checkpoint(tmp_path_factory.mktemp("chat"), num_masks=0, window=1024)


@pytest.fixture(scope="module")
def plain(chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model: the same without a chat template."""
    bare = tmp_path_factory.mktemp("plain") / "model"
    shutil.copytree(chat, bare)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    return bare


def maker(model: Path, *, has_chat: bool = True) -> PromptMaker:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return PromptMaker(tokenizer, ChatText(tokenizer) if has_chat else None)


def prompts(made: PromptMaker, count: int, folder: Path, **options: Any) -> list[Any]:
    return made.prompts(count, folders=[folder], **{"longest": 300, "seed": 0, **options})


def test_prompts_of_a_chat_model_are_user_turns_topics_code_and_texts(chat: Path, packages: Path) -> None:
    made = maker(chat)
    found = prompts(made, 20, packages)
    texts = {source: [made.tokenizer.decode(p.ids) for p in found if p.source is source] for source in PromptSource}
    assert texts[PromptSource.USER] == ["<|im_start|>user\n"] * 12, "in place of code and texts that are not there"
    assert len(set(texts[PromptSource.TOPIC])) == 4
    assert all(text.endswith("<|im_end|>\n<|im_start|>assistant\n") for text in texts[PromptSource.TOPIC])
    assert len(texts[PromptSource.CODE]) == 2, "no tests, and no folder that hides"
    assert all("area_" in text and "return width" not in text for text in texts[PromptSource.CODE])
    assert len(texts[PromptSource.TEXT]) == 2
    assert len({p.question for p in found}) == 20
    assert found == prompts(made, 20, packages)
    assert found != prompts(made, 20, packages, seed=1)
    assert {p.question for p in prompts(made, 8, packages)} < {p.question for p in found}
    assert max(len(p.ids) for p in prompts(made, 20, packages, longest=60)) <= 60


def test_prompts_of_a_base_model_are_code_texts_and_starts(plain: Path, packages: Path) -> None:
    made = maker(plain, has_chat=False)
    found = prompts(made, 10, packages)
    code = [made.tokenizer.decode(p.ids) for p in found if p.source is PromptSource.CODE]
    assert sorted(code) == [FUNCTION.replace("area(", f"area_{name}(").replace("the area", f"the area_{name}")
                            for name in ("one", "two")]  # fmt: skip
    starts = [p for p in found if p.source is PromptSource.START]
    assert {p.ids for p in starts} == {(END,)}
    assert {p.temperature for p in starts} == {1.0}, "greedy, they would be one text"
    assert len({p.seed for p in starts}) == len(starts) == 6


def test_installed_packages_give_functions_and_documentation() -> None:
    found = installed_snippets(np.random.default_rng(0), prompts_module.installed_folders()[:1])
    code, text = next(found[PromptSource.CODE]), next(found[PromptSource.TEXT])
    assert re.match(r"def \w+\(", code)
    assert text[0].isupper()


def test_no_topic_can_share_words_with_an_evaluation() -> None:
    assert len(TOPICS) == len(set(TOPICS)) > 70
    requests = list(topic_requests(np.random.default_rng(0)))
    assert len(requests) == len(set(requests)) == len(TOPICS) * len(REQUESTS)
    assert not [text for text in requests if any(word_grams(text, NUM_WORDS))]


def test_a_user_turn_ends_with_the_models_end_or_what_the_template_puts_behind_it(chat: Path) -> None:
    made = maker(chat)

    def turn(text: str) -> str | None:
        return made.user_turn(made.tokenizer(text, add_special_tokens=False)["input_ids"], frozenset({END}))

    assert turn("How are you?<|im_end|>\n<|im_start|>assistant") == "How are you?"
    assert turn(" How are you?\n<|endoftext|>") == "How are you?"
    assert turn("<|im_end|>") == ""
    assert turn("How are you") is None


def test_words_in_a_row_are_compared_without_case_and_punctuation(tmp_path: Path) -> None:
    words = [f"w{n}" for n in range(20)]
    (tmp_path / "bench.jsonl").write_text(json.dumps({"id": 1, "turns": ["Short.", " ".join(words)]}) + "\n")
    (tmp_path / "code.txt").write_text("def f(a, b):\n" + "\n".join(f"    x{n} = {n}" for n in range(9)))
    found = EvaluationTexts.read([tmp_path / "bench.jsonl", tmp_path / "code.txt"])
    assert found.is_shared_by("Before: " + ", ".join(words[3:16]).upper() + " after")
    assert not found.is_shared_by(" ".join([*words[3:15], "other", *words[15:]]))
    assert not found.is_shared_by("Short.")
    assert found.is_shared_by("x0 = 0; x1 = 1; x2 = 2; x3 = 3; x4 = 4; x5 = 5; x6 = 6")


TURNS = ["How {} is it?<|im_end|>", "The {} cat saw one dog run far away<|im_end|>", "<|im_end|>", "Never {} ends"]


class Writer:
    """Stands for the worker: user turns from TURNS, and answers that say which prompt they answer."""

    def __init__(self, model: Path) -> None:
        self.tokenizer, self.model = AutoTokenizer.from_pretrained(model), fingerprint(Checkpoint.open(model))
        self.written, self.settings, self.dies_after = list[Question](), list[dict[str, Any]](), 10**9
        self.num_in_time = 10**9  # answers before the time is up; the next one is cut
        self.answer = "the answer {} is that one dog saw a cat on a mat<|endoftext|>"

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def output(self, question: Question, max_tokens: int) -> tuple[int, ...]:
        number = question[2] % 2**28
        is_turn = self.tokenizer.decode(question[0]).endswith("<|im_start|>user\n")
        text = TURNS[number % len(TURNS)] if is_turn else self.answer
        return self.ids(text.format("ABCDEFGHIJKLMNOPQ"[number % 17] * 3))[:max_tokens]

    def __call__(
        self, model: Path, asked: Sequence[Question], *, max_tokens: int, file: Path, what: str, **settings: Any
    ) -> OwnTexts:
        self.settings.append(settings)
        limited, most = what == "own texts" and settings["until"] is not None, self.num_in_time
        with OwnTextFile(file, OwnTextRecipe(self.model, max_tokens, eos_stops=True)) as own:
            kept = {text.question for text in own.texts}
            for question in asked:
                if question not in kept:
                    if len(self.written) == self.dies_after:
                        raise KeyboardInterrupt
                    self.written.append(question)
                    prompt, temperature, seed = question
                    if limited and len(own.texts) >= most:
                        own.append(OwnText(prompt, self.output(question, 20), temperature, seed, is_unfinished=True))
                        break
                    own.append(OwnText(prompt, self.output(question, max_tokens), temperature, seed))
        return OwnTexts((), 0, ScribeCounts(num_rows=5), 0.1)


@pytest.fixture
def writer(chat: Path, packages: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    made = Writer(chat)
    monkeypatch.setattr("space_train.self_generation.own_data.write_asked", made)
    monkeypatch.setattr("space_train.self_generation.prompts.installed_folders", lambda: [packages])
    return made


OWN = "--own-data 20 --length 400 --self-generate-tokens 64 --held-out-share 0.2 --rows-per-step 1 --steps 2"


def own(model: Path | str, out: Path, flags: str = "") -> int:
    return main(["--model", str(model), "--out", str(out), *TINY.split(), *OWN.split(), *flags.split()])


def lines_of(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_one_command_without_data_trains_and_says_what_it_left_out(
    chat: Path, tmp_path: Path, writer: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert own(chat, tmp_path) == 0
    assert load_model(tmp_path / "model").facts.num_masks == 3
    said = capsys.readouterr().err
    assert re.search(r"^estimate: 20 texts of up to 64 ids take about .*, training on them ", said, re.M)
    # Of 12 user turns 3 have no end, 3 are empty, and of 3 that begin with How, and 3 of a cat, near copies go.
    line = next(line for line in said.splitlines() if line.startswith("own data: "))
    assert "20 prompts (2 code, 2 texts, 4 topics, 12 user turns) gave " in line
    assert "3 user turns that are empty" in line
    assert "3 user turns without an end" in line
    assert "2 user turns that are near-duplicates" in line
    turns = [writer.tokenizer.decode(q[0]) for q in writer.written[12:]]
    assert sum("The AAA cat" in text or "cat saw one dog" in text for text in turns) == 1
    assert re.search(r"^rows: an epoch is \d+ rows: \d+ of its own texts", said, re.M)


def test_answers_that_loop_repeat_or_say_nothing_are_left_out_and_cut_ones_kept(
    chat: Path, tmp_path: Path, writer: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "{} 0123456789 abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    answers = ["again " * 20, "<|endoftext|>", "twice the same<|endoftext|>", long]
    whole = writer.output

    def output(question: Question, max_tokens: int) -> tuple[int, ...]:
        writer.answer = answers[len(writer.written) % 4]
        return whole(question, max_tokens)

    writer.output = output  # type: ignore[method-assign]
    assert own(chat, tmp_path) == 0
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("own data: "))
    found = {reason: int(count) for count, reason in re.findall(r"(\d+) (answers that [\w ]+)", line)}
    assert set(found) == {"answers that are duplicates", "answers that are empty", "answers that loop"}
    num_answers = len(lines_of(tmp_path / "own_texts.jsonl"))
    kept, cut = re.search(r"gave (\d+) texts of \d+ ids, (\d+) of them cut at 64", line).groups()  # type: ignore[union-attr]
    assert int(kept) == num_answers - sum(found.values())
    assert 0 < int(cut) < int(kept)


@pytest.mark.parametrize("dies_after", [5, 16], ids=["in user turns", "in answers"])
def test_a_run_that_was_killed_goes_on_with_the_same_texts(
    dies_after: int,
    chat: Path,
    tmp_path: Path,
    writer: Writer,
    packages: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert own(chat, tmp_path / "whole") == 0
    whole, writer.written = writer.written, []
    writer.dies_after = dies_after
    assert own(chat, tmp_path / "cut") == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("keeps the texts that it wrote: the same command, without --restart, goes on from there.")
    writer.dies_after = 10**9
    # Other packages since then: the prompts of the run stay.
    monkeypatch.setattr("space_train.self_generation.prompts.installed_folders", lambda: [packages / "one"])
    assert own(chat, tmp_path / "cut") == 0
    assert writer.written == whole, "each text once"
    for name in ("own_user_turns.jsonl", "own_texts.jsonl"):
        assert lines_of(tmp_path / "cut" / name) == lines_of(tmp_path / "whole" / name)
    one, other = (load_checkpoint(tmp_path / name / "state.pt") for name in ("whole", "cut"))
    assert json.loads(one["plan"]) == json.loads(other["plan"])
    assert one["counters"]["losses"] == other["counters"]["losses"]
    assert own(chat, tmp_path / "cut", "--steps 3") == 0, "the run goes on"
    assert load_checkpoint(tmp_path / "cut" / "state.pt")["counters"]["step"] == 3


def test_writing_ends_at_half_of_the_minutes_and_the_run_is_built_from_what_is_there(
    chat: Path, tmp_path: Path, writer: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    writer.num_in_time = 5
    before = time.monotonic()
    assert own(chat, tmp_path, "--minutes 4") == 0
    turns, answers = (settings["until"] for settings in writer.settings)
    assert before + 120 <= answers <= time.monotonic() + 120
    assert before + 60 <= turns <= time.monotonic() + 60
    line = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("own data: "))
    assert "0 of them cut at 64 and 1 by the time" in line
    assert re.search(r"\d answers not begun in time", line)
    texts, writer.written = (tmp_path / "own_texts.jsonl").read_bytes(), []
    assert own(chat, tmp_path, "--minutes 9 --steps 3") == 0, "the run goes on with the same texts"
    assert not writer.written
    assert (tmp_path / "own_texts.jsonl").read_bytes() == texts
    assert load_checkpoint(tmp_path / "state.pt")["counters"]["step"] == 3
    (tmp_path / "state.pt").unlink()
    writer.settings.clear()
    assert own(chat, tmp_path, "--minutes 9") == 0, "without a saved state, writing goes on as far as time is left"
    assert writer.settings[-1]["until"] < time.monotonic() + 9 * 30


def test_another_number_or_seed_is_refused_and_restart_keeps_the_texts_that_fit(
    chat: Path, tmp_path: Path, writer: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert own(chat, tmp_path) == 0
    texts = (tmp_path / "own_texts.jsonl").read_bytes()
    for flags, named in (("--own-data 9", "own_data = 20; this one has 9"), ("--seed 1", "prompts = ")):
        assert own(chat, tmp_path, flags) == 2
        assert named in capsys.readouterr().err
    data = write_records(tmp_path / "d.jsonl", [{"text": f"one dog saw {n} cats"} for n in range(30)])
    assert train(chat, data, tmp_path) == 2
    assert "holds a run with" in capsys.readouterr().err
    assert (tmp_path / "own_texts.jsonl").read_bytes() == texts
    writer.written = []
    assert own(chat, tmp_path, "--own-data 9 --restart") == 0
    assert not writer.written, "nine of the twenty"
    cost = json.loads((tmp_path / "own_texts.cost.json").read_text())
    assert 10 < cost["rows"] < 20, "of two stages then and two now, five each; less for the forgotten"
    assert train(chat, data, tmp_path, "--restart") == 0
    assert not (tmp_path / "own_texts.jsonl").exists()
    assert not (tmp_path / "own_prompts.json").exists()


def test_no_text_of_an_evaluation_is_trained_on(
    chat: Path, tmp_path: Path, writer: Writer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at in the rows that are trained on: neither with --own-data nor with --data."""
    trained: list[str] = []
    tokenizer = AutoTokenizer.from_pretrained(chat)

    def packed(examples: Sequence[Any], *arguments: Any) -> Any:
        trained.extend(tokenizer.decode(example.ids) for example in examples)
        return original(examples, *arguments)

    from space_train import text_source

    original: Callable[..., Any] = text_source.packed
    monkeypatch.setattr(text_source, "packed", packed)
    wanted = "we say that one dog saw a cat on a mat and so"
    evaluation = tmp_path / "bench.jsonl"
    evaluation.write_text(json.dumps({"prompt": f"Before it, {wanted} we did."}) + "\n")
    whole = writer.output

    def output(question: Question, max_tokens: int) -> tuple[int, ...]:
        writer.answer = f"{{}} {wanted}" if len(writer.written) % 3 else "{} the answer<|endoftext|>"
        return whole(question, max_tokens)

    writer.output = output  # type: ignore[method-assign]
    shared = EvaluationTexts.read([evaluation])
    data = [{"text": f"Once {wanted} {n} times" if n % 3 else f"one dog saw {n} cats"} for n in range(30)]
    data_file = write_records(tmp_path / "d.jsonl", data)
    flags = f"--decontaminate {evaluation}"
    runs: tuple[Callable[[str, Path], int], ...] = (
        lambda more, out: own(chat, out, more),
        lambda more, out: train(chat, data_file, out, f"--length 96 {more}"),
    )
    for number, run in enumerate(runs):
        trained.clear()
        assert run("", tmp_path / f"free{number}") == 0
        assert any(shared.is_shared_by(text) for text in trained)
        trained.clear()
        assert run(flags, tmp_path / f"clean{number}") == 0
        assert trained
        assert not [text for text in trained if shared.is_shared_by(text)]
    said = capsys.readouterr().err
    assert re.search(r"\d answers of an evaluation", said)
    assert re.search(r"decontaminate: \d+ of \d+ texts left out", said)


def test_a_base_model_without_a_chat_template_is_trained_without_user_turns(
    plain: Path, tmp_path: Path, writer: Writer
) -> None:
    assert own(plain, tmp_path, "--own-data 8") == 0
    assert not (tmp_path / "own_user_turns.jsonl").exists()
    assert len(lines_of(tmp_path / "own_texts.jsonl")) == len(writer.written) == 8


def test_short_rows_hold_a_prompt_and_an_answer_of_half_their_length(
    chat: Path, tmp_path: Path, writer: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = OWN.replace("--length 400 --self-generate-tokens 64", "--length 200")
    assert main(["--model", str(chat), "--out", str(tmp_path), *TINY.split(), *flags.split()]) == 0
    assert re.search(r"^estimate: 20 texts of up to 100 ids take about", capsys.readouterr().err, re.M)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--data and --own-data are both missing: give one"),
        ("--own-data 5 --data x.jsonl", "--data and --own-data are both given: leave one out"),
        ("--own-data 0", "--own-data must be at least 1; got 0"),
        ("--own-data --self-generate 3", "--self-generate is of --data"),
        ("--own-data --method full", "Method full trains the model's own weights"),
        ("--own-data --length 200 --self-generate-tokens 200", "--self-generate-tokens must be below --length, 200"),
        ("--own-data --decontaminate nothing.jsonl", "evaluation file nothing.jsonl cannot be read"),
    ],
)
def test_flags_that_do_not_go_together_are_named(
    flags: str, message: str, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(chat), "--out", str(tmp_path / "out"), *flags.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_only_an_adapter_is_trained_on(
    chat: Path, tmp_path: Path, writer: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert own(chat, tmp_path / "first") == 0
    section = json.loads((tmp_path / "first" / "model" / "config.json").read_text())["space"]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "config.json").write_text(json.dumps({"space": section | {"base": str(chat)}}))
    for name in (section["adapter"], section["draft_head"]["file"]):
        shutil.copyfile(tmp_path / "first" / "model" / name, adapter / name)
    writer.model = fingerprint(Checkpoint.open(adapter))
    capsys.readouterr()
    assert own(adapter, tmp_path / "second") == 0
    assert f"start: from the adapter and the draft head of {adapter}" in capsys.readouterr().err


def cost(**fields: Any) -> OwnCost:
    whole = {"shape": SHAPES["1b"], "max_tokens": 256, "device": "cuda", "product_rate": 4e14, "has_user_turns": True}
    return OwnCost(**whole | fields)


def test_the_number_of_texts_follows_the_budget() -> None:
    def number(**budget: float) -> int:
        return cost().default_count(TrainPlan(budget=Budget(**budget)))  # type: ignore[arg-type]

    assert number(epochs=2) == DEFAULT_TEXTS
    one = cost().seconds_per_text
    assert one is not None
    assert number(minutes=30) == pytest.approx(600 / one, rel=0.01)
    assert number(minutes=30, steps=100) == 100 * 8 * 1024 // 1128  # read four times
    assert number(steps=1) == FEWEST_TEXTS
    assert number(minutes=0.9 * FEWEST_TEXTS * one / 20) == int(0.9 * FEWEST_TEXTS), "what the minutes pay for"
    assert number(minutes=one / 60) == FEWEST_IN_TIME
    assert number(flops=3e15) == pytest.approx(1e15 / (282 * 2 * SHAPES["1b"].num_parameters), rel=0.01)
    line = cost().describe(TrainPlan(budget=Budget(minutes=30)), number(minutes=30))
    assert line.endswith("take about 10 min, training on them 20 min")
    line = cost().describe(TrainPlan(budget=Budget(minutes=30)), 3 * number(minutes=30))
    assert line.endswith(
        "would take about 30 min. Writing ends at half of --minutes, after 15 min; training takes 15 min"
    )
    assert "not estimated" in cost(shape=None).describe(TrainPlan(), 10)


def test_minutes_that_hold_few_updates_are_named_with_the_cure() -> None:
    slow = cost(device="cpu", product_rate=1e12)
    line = slow.describe_slow_updates(TrainPlan(budget=Budget(minutes=2)))
    assert line is not None
    one = re.search(r"^time: an update of 8 rows of 1,024 ids takes about (\d+) min", line)
    assert one
    assert "A lower --rows-per-step or --length gives more." in line
    assert slow.describe_slow_updates(TrainPlan(budget=Budget(minutes=4 * (int(one[1]) + 1)))) is None
    assert slow.describe_slow_updates(TrainPlan(budget=Budget(steps=2))) is None
    line = slow.describe_slow_updates(TrainPlan(rows_per_step=1, budget=Budget(minutes=0.1)))
    assert line is not None
    assert line.endswith("A lower --length gives more.")


def test_rows_of_an_update_are_halved_until_the_minutes_hold_enough_of_them() -> None:
    slow = cost(device="cpu", product_rate=1e12)
    one = slow.row_seconds(TrainPlan())
    assert one is not None
    for rows, least in ((8, 64.5), (4, 32.5), (2, 16.5), (1, 8.5), (1, 1.0)):
        plan = TrainPlan(budget=Budget(minutes=2 * least * one / 60))
        assert slow.with_rows_in_time(plan, 0.5).rows_per_step == rows
        assert slow.with_rows_in_time(plan, 0.0).rows_per_step == min(8, 2 * rows if least > 8 else 1), "no own texts"
    parts = TrainPlan(budget=Budget(minutes=1), accumulate=4)
    assert slow.with_rows_in_time(parts, 0.5).rows_per_step == 4, "no part is empty"
    assert slow.with_rows_in_time(TrainPlan(budget=Budget(steps=1)), 0.5).rows_per_step == 8
    assert cost(shape=None).with_rows_in_time(TrainPlan(budget=Budget(minutes=1)), 0.5).rows_per_step == 8


def test_as_many_texts_at_once_as_the_memory_holds() -> None:
    shape = SHAPES["1b"]
    text = 600 * 4 * shape.num_kv_heads * shape.head_dim * shape.num_layers
    weights = 2 * shape.num_parameters
    assert cost().worker_settings(5000, 600, 80 * 10**9)["max_sequences"] == 1024
    assert cost().worker_settings(40, 600, 80 * 10**9)["max_sequences"] == 40
    few = cost().worker_settings(5000, 600, int((weights + 20.5 * text) / 0.8))
    assert (few["max_sequences"], few["speculation"], few["max_model_len"]) == (20, "off", 600)
    assert "kv_memory" not in few
    one = cost(device="cpu").worker_settings(5000, 600, weights)
    assert (one["max_sequences"], one["kv_memory"]) == (1, 2 * text)
    assert "speculation" not in one, "few texts at once are worth drafts"
    assert cost(device="cpu").worker_settings(9, 600, 10**12)["speculation"] == "off", "but not few texts"
    assert cost(device="cpu").worker_settings(5000, 600, 10**12)["max_sequences"] == 64


def test_texts_that_run_on_are_not_taken_for_as_short_as_those_that_ended() -> None:
    assert tokens_left([10, 10, 0], 100, 0.0) == 90 + 90 + 100
    assert tokens_left([0], 10**6, 0.02) == pytest.approx(50)
    assert tokens_left([90], 100, 0.02) == pytest.approx(50 * (1 - np.exp(-0.2)))
    assert tokens_left([], 100, 0.5) == 0


@pytest.mark.slow
@pytest.mark.e2e
def test_a_real_worker_writes_user_turns_and_answers(
    chat: Path, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("space_train.self_generation.prompts.installed_folders", lambda: [packages])
    assert own(chat, tmp_path, "--own-data 24 --steps 1") == 0
    assert len(lines_of(tmp_path / "own_user_turns.jsonl")) == 15
    assert len(lines_of(tmp_path / "own_texts.jsonl")) >= 8
