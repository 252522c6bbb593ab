"""`spaceserve train`, from its flags to a folder that is served; and what it says where it cannot."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.train_command import TINY, train, write_records
from doubles.training import random_examples, tiny_plan
from quantized_testing import write_quantized
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.load import load_model
from space_model.random_checkpoint import CHAT_TEMPLATE
from space_router.text.chat_template import find
from space_train.__main__ import arguments, main
from space_train.data.examples import TEMPLATES
from space_train.run_folder import load_checkpoint
from space_train.session import choose_precision, held_out_rows, load_base, rows_per_evaluation
from space_train.train_plan import Budget, Method
from tiny_checkpoints import tiny_checkpoint
from transformers import AutoConfig

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "far", "away", "from", "home"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty records, of which a few are held out."""
    records = [
        {"instruction": f"Say {WORDS[n % 14]}", "output": " ".join(WORDS[n % 7 : n % 7 + 2 + n % 5])} for n in range(60)
    ]
    return write_records(tmp_path_factory.mktemp("data") / "chats.jsonl", records)


def assert_refused(capsys: pytest.CaptureFixture[str], code: int, message: str) -> None:
    """Exit status 2, and one line behind what reading the data says."""
    before = ("data: ", "rows: ", "memory: ")
    lines = [line for line in capsys.readouterr().err.splitlines() if line and not line.startswith(before)]
    said = [line for line in lines if not re.search(r"% ?[|]|\(\d+ %\)$", line)]  # progress
    assert code == 2
    assert len(said) == 1, said
    assert said[0].startswith("spaceserve train: ")
    assert re.search(message, said[0]), said[0]


@pytest.mark.usefixtures("plots")
@pytest.mark.parametrize("method", ["gated-lora", "full", "sft"])
def test_a_run_ends_with_a_folder_that_is_served_and_a_report(
    method: str, base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(base, chats, tmp_path, f"--method {method}") == 0
    assert load_model(tmp_path / "model").facts.num_masks == (0 if method == "sft" else 3)
    assert {"run.json", "run.md", "run.png", "state.pt", "tensorboard"} <= {file.name for file in tmp_path.iterdir()}
    said = capsys.readouterr().err
    assert f"spaceserve serve --model {tmp_path / 'model'}" in said
    assert "\r" not in said, "no bars where the output is no terminal"
    tokenizer = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert tokenizer["chat_template"]


def test_a_checkpoint_is_served_with_the_template_it_was_trained_with(base: Path, chats: Path, tmp_path: Path) -> None:
    """Also where its base has another, in the tokenizer's config."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": " ".join(WORDS) + f" {n}"}) + "\n" for n in range(9)))
    for data, flags, name in (
        (chats, "--template raw", "raw"),
        (chats, "", None),
        (texts, "--template raw", None),  # which rendered nothing
    ):
        assert train(base, data, tmp_path / "out", f"--restart {flags}") == 0
        found = find(tmp_path / "out" / "model", None, {})
        assert found.source == (TEMPLATES[name] if name else CHAT_TEMPLATE)


def test_texts_alone_give_a_base_without_a_template_none(base: Path, chats: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(base, bare)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": " ".join(WORDS) + f" {n}"}) + "\n" for n in range(9)))
    for data, name in ((texts, None), (chats, "plain")):
        assert train(bare, data, tmp_path / "out", "--restart") == 0
        found = find(tmp_path / "out" / "model", None, {})
        assert (found and found.source) == (name and TEMPLATES[name])


def test_a_head_is_trained_on_what_a_run_left(
    base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(base, chats, tmp_path / "masks", "--head none") == 0
    assert load_model(tmp_path / "masks" / "model").facts.adapters[0].has_draft_head is False
    assert train(tmp_path / "masks" / "model", chats, tmp_path / "head", "--method head") == 0
    assert load_model(tmp_path / "head" / "model").facts.adapters[0].has_draft_head
    # Without sizes, a run has those that it goes on from.
    given = ["--model", str(tmp_path / "head" / "model"), "--data", str(chats), "--out", str(tmp_path / "more")]
    capsys.readouterr()
    flags = "--steps 1 --length 48 --rows-per-step 4 --precision no --evaluations 0"
    assert main([*given, *flags.split()]) == 0
    said, flags = capsys.readouterr().err, "--num-masks 3 --lora-rank 2 --head mlp --head-hidden 8 --head-scale 8"
    assert f"sizes: those of {given[1]}, to go on from it: {flags}.\n" in said
    assert f"start: from the adapter and the draft head of {given[1]}.\n" in said


def test_the_same_command_goes_on_and_restart_forgets_only_the_run(base: Path, chats: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert train(base, chats, tmp_path) == 0
    assert train(base, chats, tmp_path, "--steps 5") == 0
    assert load_checkpoint(tmp_path / "state.pt")["counters"]["step"] == 5
    assert train(base, chats, tmp_path, "--seed 1 --restart") == 0
    assert load_checkpoint(tmp_path / "state.pt")["counters"]["step"] == 3
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.usefixtures("plots")
def test_without_held_out_records_there_are_no_figures_but_a_report(base: Path, chats: Path, tmp_path: Path) -> None:
    assert train(base, chats, tmp_path, "--held-out-share 0") == 0
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["curve"] == []
    assert len(record["losses"]) == 3
    assert (tmp_path / "run.png").exists()


def test_rows_are_as_long_as_the_window(chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tiny_checkpoint(tmp_path / "short", num_masks=0, window=40)
    capsys.readouterr()
    assert_refused(capsys, train(short, chats, tmp_path / "out"), r"Rows of 48 ids are longer than the 40 positions")
    given = ["--model", str(short), "--data", str(chats), "--out", str(tmp_path / "out"), "--steps", "1"]
    assert main([*given, "--num-masks", "2", "--precision", "no"]) == 0
    assert json.loads((tmp_path / "out" / "run.json").read_text())["plan"]["length"] == 40


@pytest.mark.slow
def test_text_of_its_own_is_written_once_and_learnt_from(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--self-generate 4 --self-generate-tokens 8 --own-share 0.5"
    assert train(base, chats, tmp_path, flags) == 0
    assert re.search(
        r"^rows: an epoch is \d+ rows: \d+ of the data ×1 and \d+ of its own", capsys.readouterr().err, re.M
    )
    assert len((tmp_path / "own_texts.jsonl").read_text().splitlines()) >= 4
    record = json.loads((tmp_path / "run.json").read_text())
    cost = json.loads((tmp_path / "own_texts.cost.json").read_text())
    assert record["seconds"] > cost["seconds"] > 0
    assert cost["rows"] > 0
    before = (tmp_path / "own_texts.jsonl").read_bytes()
    assert train(base, chats, tmp_path, flags + " --steps 4") == 0
    assert (tmp_path / "own_texts.jsonl").read_bytes() == before
    with monkeypatch.context() as patch:
        patch.delattr("space_train.self_generation.self_generate.WorkerProcess")  # nothing is left to write
        assert train(base, chats, tmp_path, flags + " --restart") == 0
    assert (tmp_path / "own_texts.jsonl").read_bytes() == before, "texts that the new run asks for, too"
    assert json.loads((tmp_path / "own_texts.cost.json").read_text())["rows"] == cost["rows"]
    assert train(base, chats, tmp_path, flags.replace("tokens 8", "tokens 6") + " --restart") == 0
    texts = [json.loads(line) for line in (tmp_path / "own_texts.jsonl").read_text().splitlines()]
    assert {text["max_tokens"] for text in texts} == {6}
    assert train(base, chats, tmp_path, "--restart") == 0
    assert not (tmp_path / "own_texts.jsonl").exists()


def test_a_model_that_is_not_there_is_named(chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = train(tmp_path / "nowhere", chats, tmp_path / "out")
    assert_refused(capsys, code, "There is no folder .*nowhere")


@pytest.mark.parametrize("kind", ["gpt_neo", "llama4_text"])
def test_a_model_whose_layers_count_rows_is_named_before_data_and_weights_are_read(
    kind: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_hidden_layers": 2, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    sizes |= {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128}
    AutoConfig.for_model(kind, **sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").hardlink_to(base / "model.safetensors")  # another's: nobody gets so far
    words = f"type '{kind}' limit attention by row numbers .* and cannot be trained"
    assert_refused(capsys, train(tmp_path, tmp_path / "no data", tmp_path / "out"), words)


def test_a_model_with_recurrent_layers_is_named_before_the_data_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_checkpoint(tmp_path, "lfm2", num_masks=0)
    words = "type 'lfm2' have recurrent layers and cannot be trained: .* this one drafts by lookup"
    assert_refused(capsys, train(tmp_path, tmp_path / "no data", tmp_path / "out"), words)


def test_a_model_with_linear_biases_is_named_before_the_data_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_checkpoint(tmp_path, "alibi_llama", num_masks=0)
    words = r"type 'alibi_llama' have linear biases \(ALiBi\) and cannot be trained"
    assert_refused(capsys, train(tmp_path, tmp_path / "no data", tmp_path / "out"), words)


@pytest.mark.parametrize(
    "kind", ["awq", "gptq 4 bits", "int4 in groups", "fp8 per tensor", "bitsandbytes nf4", "bitsandbytes int8"]
)
def test_a_quantised_model_is_named_before_the_data_is_read(
    kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_quantized(base, tmp_path / "small", tmp_path / "plain", kind)
    monkeypatch.setattr("space_train.training.checkpoint.has_kernels", lambda _: False)
    for flags, words in (("", "is not here"), ("--method full", "its weights cannot move, as method full has them do")):
        code = train(tmp_path / "small", tmp_path / "no data", tmp_path / "out", flags)
        assert_refused(capsys, code, rf"small is quantised \(.*{words}\. Train the model that it was quantised from")


def test_memory_that_does_not_suffice_is_named_and_the_run_goes_on_in_more_parts(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr("space_train.training.trainer.TrainingRun.update", full)
        code = train(base, chats, tmp_path, "--accumulate 1")
    assert_refused(capsys, code, r"An update in 1 part does not fit \(CUDA out of memory\)\. Give --accumulate 2, ")
    assert train(base, chats, tmp_path, "--accumulate 4") == 0


def test_a_model_without_a_tokenizer_is_named(
    base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).hardlink_to(base / name)
    assert_refused(capsys, train(bare, chats, tmp_path / "out"), "tokenizer of .*bare")


def test_a_tokenizer_of_another_model_is_named(chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = (tiny_checkpoint(tmp_path / str(size), vocab_size=size, num_masks=0) for size in (110, 300))
    (small / "tokenizer.json").write_bytes((large / "tokenizer.json").read_bytes())
    capsys.readouterr()
    assert_refused(capsys, train(small, chats, tmp_path / "out"), "Use the tokenizer that belongs to the model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty: it holds no record"),
        ('{"instruction": "Say it"}\n', "form|field|output"),
        ("not json\n", "JSON"),
        ('{"instruction": "Say it", "output": ""}\n', "nothing to learn"),
    ],
    ids=["empty", "missing field", "no json", "no answer"],
)
def test_data_that_cannot_be_used_is_named(
    text: str, message: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    assert_refused(capsys, train(base, tmp_path / "data.jsonl", tmp_path / "out"), message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps -1", "A budget is 0 or more"),
        ("--num-masks 0", "num_masks must be at least 1"),
        ("--method head", "has no masks"),
        ("--mask-ids 5", "Method gated-lora gives no ids to masks: leave --mask-ids out"),
        ("--method full --mask-ids 5000", "Mask id 5000 is outside the vocabulary"),
        ("--rows-per-step 4 --accumulate 3", "must be a multiple of 3 parts"),
        ("--held-out-share 1.5", "held_out_share must be from 0 to below 1"),
        ("--own-share 1.5", "--own-share must be above 0 and at most 1; got 1.5"),
        ("--self-generate 3 --own-share -0.5", "--own-share must be above 0 and at most 1; got -0.5"),
        ("--own-share nan", "--own-share must be above 0 and at most 1; got nan"),
        ("--self-generate 3 --self-generate-tokens 48", "--self-generate-tokens must be below --length, 48"),
        ("--steps 0", "--steps 0 would train nothing: give a number above 0"),
        ("--minutes 0", "--minutes 0 would train nothing"),
        ("--flops 0 --steps 2", "--flops 0 would train nothing"),
    ],
)
def test_flags_that_do_not_do_are_named(
    flags: str, message: str, base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(capsys, train(base, chats, tmp_path, flags), message)


def test_training_into_the_model_itself_is_refused_before_anything_is_lost(
    base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(base, chats, tmp_path) == 0
    before = sorted(file.name for file in (tmp_path / "model").iterdir())
    capsys.readouterr()
    assert_refused(capsys, train(tmp_path / "model", chats, tmp_path, "--restart"), "would overwrite the model")
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == before


@pytest.mark.parametrize("place", ["space_train.training.trainer.write_checkpoint", "space_train.session.write_report"])
def test_a_run_that_is_stopped_behind_its_last_update_says_what_it_keeps(
    place: str,
    base: Path,
    chats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place, stopped)
        assert train(base, chats, tmp_path) == 130
    assert "keeps the run up to update 3: the same command, without --restart, goes on" in capsys.readouterr().err
    assert train(base, chats, tmp_path) == 0
    assert load_model(tmp_path / "model").facts.num_masks == 3


def test_a_rate_too_high_is_named(base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = train(base, chats, tmp_path, "--method full --learning-rate 1e30 --warmup 0")
    assert_refused(capsys, code, r"anew with a lower --learning-rate than 1e\+30\. No update was saved\.$")
    assert not (tmp_path / "state.pt").exists()
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("flags", ["", "--restart"])
def test_a_model_that_no_run_has_written_is_left_alone(
    flags: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--out .` beside a checkpoint of one's own; said before the data is read."""
    other = tiny_checkpoint(tmp_path / "model", num_masks=0)
    before = {file.name: file.read_bytes() for file in other.iterdir()}
    capsys.readouterr()
    code = train(base, tmp_path / "no data", tmp_path, flags)
    assert_refused(capsys, code, r"model is there already and no run has written it: .* Give another --out\.")
    assert {file.name: file.read_bytes() for file in other.iterdir()} == before


def test_the_base_of_the_model_is_not_overwritten_either(
    base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is only an adapter names the model whose weights it trains."""
    assert train(base, chats, tmp_path) == 0
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    section = json.loads((tmp_path / "model" / "config.json").read_text())["space"]
    (adapter / "config.json").write_text(json.dumps({"space": section | {"base": str(tmp_path / "model")}}))
    for name in (section["adapter"], section["draft_head"]["file"]):
        shutil.copyfile(tmp_path / "model" / name, adapter / name)
    capsys.readouterr()
    code = train(adapter, chats, tmp_path, "--method head --restart")
    assert_refused(capsys, code, "would overwrite the model it is trained from, .*adapter")
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--help"])
    words = capsys.readouterr().out
    for fact in ("spaceserve train --model", "accelerate launch", "gated-lora", "goes on where it was"):
        assert fact in words


def test_an_interrupted_run_says_so_and_the_same_command_ends_it(base: Path, chats: Path, tmp_path: Path) -> None:
    """A real process, a real signal."""
    command = [sys.executable, "-W", "ignore", "-m", "space_train", "--model", str(base), "--data", str(chats)]
    command += ["--out", str(tmp_path), *TINY.split(), "--checkpoint-steps", "1"]
    endless = subprocess.Popen(
        [*command, "--steps", "1000000"], stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "state.pt").exists() and endless.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    endless.send_signal(signal.SIGINT)
    _, said = endless.communicate(timeout=120)
    assert endless.returncode == 130, said
    assert "ends after this update" in said
    assert "Stopped after update" in said
    assert "the same command, without --restart, goes on" in said
    assert "Traceback" not in said
    done = int(load_checkpoint(tmp_path / "state.pt")["counters"]["step"])
    torch.set_num_threads(1)
    assert main([*command[5:], "--steps", str(done + 2)]) == 0
    assert len(json.loads((tmp_path / "run.json").read_text())["losses"]) == done + 2


@pytest.mark.parametrize(
    ("found", "precision"), [({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"), ({"avx2": True}, "no")]
)
def test_a_cpu_without_bfloat16_products_computes_in_float32_unless_asked(
    found: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert choose_precision(cpu=True)[0] == precision
    assert choose_precision(cpu=False)[0] == "bf16"


@pytest.mark.parametrize(
    ("flags", "precision", "said"),
    [("", "no", "precision: float32, as this CPU has no bfloat16 products"), ("--precision bf16", "bf16", "")],
)
def test_the_precision_that_the_machine_decides_is_said_and_kept(
    flags: str,
    precision: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    base, data = tiny_checkpoint(tmp_path / "base", num_masks=0), tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"one dog saw {n} cats"}) + "\n" for n in range(9)))
    sizes = "--steps 1 --length 32 --rows-per-step 2 --num-masks 2 --held-out-share 0"
    run = ["--model", str(base), "--data", str(data), "--out", str(tmp_path / "out"), *sizes.split(), *flags.split()]
    assert main(run) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("precision: ")]
    assert [line.startswith(said) for line in lines] == [True] * bool(said)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["plan"]["precision"] == precision


@pytest.mark.parametrize("method", [Method.GATED_LORA, Method.HEAD, Method.FULL])
@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_a_base_is_held_as_it_was_saved_where_products_may_be_so(
    method: Method, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, num_masks=0, dtype="bfloat16"))
    plan = tiny_plan(method, precision=precision)
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        as_saved = precision == "bf16" and method is not Method.FULL  # in bfloat16 here
        assert load_base(checkpoint, plan).dtype is (torch.bfloat16 if as_saved else torch.float32)


@pytest.mark.parametrize(
    ("budget", "rows"),
    [
        (Budget(steps=0), 4),
        (Budget(steps=50), 10),  # 200 rows are trained on, half as many read in ten looks
        (Budget(epochs=2), 30),
        (Budget(tokens=320 * 32), 16),
        (Budget(epochs=2, steps=50), 10),
        (Budget(epochs=2000), 64),
        (Budget(minutes=1), 64),
    ],
)
def test_looks_read_at_most_half_as_many_rows_as_are_trained_on_but_a_few(budget: Budget, rows: int) -> None:
    plan = tiny_plan(budget=budget, rows_per_step=4, length=32, evaluations=9)
    assert rows_per_evaluation(plan, epoch=300) == rows


def test_the_first_rows_are_looked_at() -> None:
    plan, examples = tiny_plan(), random_examples(12, 20, 30)
    whole, part = held_out_rows(examples, plan, 0), held_out_rows(examples, plan, 0, 5)
    assert len(whole.ids) == 12
    assert part.ids.tolist() == whole.ids[:5].tolist()
