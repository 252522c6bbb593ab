"""`spaceserve eval acceptance`: what a row counts, and the table and record of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
from space_common.repetition import is_looping, repeated_share
from space_common.worker.completion import CompletionOutput, DecodeStep, generate
from space_eval.__main__ import main
from space_eval.acceptance import command, paired_decoding, speed
from space_eval.acceptance.command import AcceptanceRow
from space_eval.acceptance.generation import AssistedDecoder, DraftMethod, is_blank, is_filler
from space_eval.acceptance.paired_decoding import PLAIN, PairedDecoder, TextsDiffer, TimedAnswer, check_same_text
from space_eval.acceptance.speed import OURS, MethodRow, SpeedRow, size, to_markdown
from space_eval.flags import FlagError
from space_eval.report import Spread, columns_table, from_json
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.load import load_model
from space_proto import worker_pb2 as pb
from tiny_checkpoints import tiny_checkpoint
from tokenizers import Tokenizer


def text(*steps: tuple[int, int]) -> CompletionOutput:
    """From (drafted, accepted) of each step; ids that do not repeat; a second a step."""
    ids = iter(range(1000))
    made = [DecodeStep(tuple(next(ids) for _ in range(a + 1)), d, a) for d, a in steps]
    return CompletionOutput([0], first=[next(ids)], steps=made, decode_seconds=float(len(made)))


def test_a_row_counts_tokens_per_step_and_acceptance_by_position() -> None:
    plain = [text(*[(0, 0)] * 8)]
    row = AcceptanceRow.of(
        [text((2, 2), (2, 0)), text((2, 1), (1, 1))], plain, lambda ids: "x" * len(ids), temperature=0.8, max_drafts=2
    )
    assert row.tokens_per_step == (3 + 1 + 2 + 2) / 4
    assert row.accepted_by_position == (3 / 4, 1 / 3)
    assert (row.num_outputs, row.num_tokens, row.looping) == (2, 8, 0)
    assert row.speedup == 1 / (4 / 8)


def test_a_model_without_masks_is_refused_with_what_gives_it_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_checkpoint(tmp_path / "model", num_layers=1, num_masks=0)
    (tmp_path / "one.jsonl").write_text('{"prompt": "def add(a, b):"}\n', encoding="utf-8")
    assert main(["acceptance", "--model", str(model), "--prompts", str(tmp_path / "one.jsonl")]) == 2
    assert "has no masks, so it drafts nothing" in (said := capsys.readouterr().err)
    assert "spaceserve train gives it masks" in said


def test_what_was_not_counted_is_a_dash_and_not_nan() -> None:
    loops = CompletionOutput([0], first=[1], steps=[DecodeStep((1,), 0, 0)] * 9, decode_seconds=9.0)
    row = AcceptanceRow.of([loops], [loops], lambda ids: "x" * len(ids), temperature=0.0, max_drafts=2)
    page = columns_table(command.COLUMNS, [row])
    assert "nan" not in page
    assert "–" in page


def test_the_command_prints_a_table_and_writes_it_with_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_checkpoint(tmp_path / "model", num_layers=1)
    prompts = tmp_path / "two.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):"}\n{"question": "Why?"}\n', encoding="utf-8")
    flags = ["--max-tokens", "8", "--k", "2", "9", "--temperature", "0", "--out", str(tmp_path / "out")]
    assert main(["acceptance", "--model", str(model), "--prompts", str(prompts), *flags]) == 0
    record = json.loads((tmp_path / "out" / "acceptance.json").read_text(encoding="utf-8"))
    assert [row["max_drafts"] for row in record["rows"]] == [0, 2, 5]  # as many as there are masks
    assert record["facts"]["prompts"].startswith("two.jsonl (2, ")
    assert (tmp_path / "out" / "acceptance.md").read_text(encoding="utf-8") in capsys.readouterr().out


def test_a_text_without_repetition_repeats_nothing() -> None:
    assert repeated_share(range(20)) == 0.0


def test_a_period_of_two_repeats_all_but_its_first_two_grams() -> None:
    assert repeated_share([1, 2] * 10) == 1 - 2 / 17


def test_texts_shorter_than_a_gram_repeat_nothing() -> None:
    assert repeated_share([1, 1, 1]) == 0.0


def test_half_of_the_grams_repeated_is_a_loop() -> None:
    assert is_looping([1, 2, 3, 4] * 3)
    assert not is_looping([*range(30), 1, 2, 3, 4])


def test_filler_is_space_and_punctuation_only() -> None:
    assert is_filler(" ):\n")
    assert not is_filler(" x)")
    assert is_blank("\n    ")
    assert not is_blank(" )")


GREEDY = pb.Sampling(temperature=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), window=256, num_layers=1)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "def add(a, b):"}\n{"question": "How many?"}\n', encoding="utf-8")
    return file


def measure(checkpoint: Path, prompts: Path, *flags: str) -> int:
    arguments = ["speed", "--model", str(checkpoint), "--prompts", str(prompts), "--max-tokens", "8", "--rounds", "2"]
    return main([*arguments, *flags])


def answer(*ids: int, steps: int = 1, seconds: tuple[float, ...] = (1.0,), rows: int = 0) -> TimedAnswer:
    return TimedAnswer(ids, "length", steps, len(ids) - 1, 0, 0, rows, seconds, seconds)


def test_ks_take_turns_and_every_other_round_runs_backwards(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = PairedDecoder(load_model(checkpoint), [2, 5])
    order: list[int] = []
    once = decoder.once

    def seen(k: int, prompt: list[int], **words: Any) -> CompletionOutput:
        order.append(k)
        return once(k, prompt, **words)

    monkeypatch.setattr(decoder, "once", seen)
    made = decoder.run([20, 21, 22], sampling=GREEDY, max_tokens=8, rounds=3)
    assert order == [0, 2, 5, 5, 2, 0, 0, 2, 5]
    assert [len(made[k].seconds) for k in (0, 2, 5)] == [3, 3, 3]
    check_same_text(made, "the prompt")
    assert made[PLAIN].num_rows == made[PLAIN].num_steps == 7
    assert made[5].num_rows > 6 * made[5].num_steps
    assert from_json(TimedAnswer, json.loads(json.dumps(made[5].__dict__))) == made[5]


def test_a_text_that_differs_from_plain_decodings_is_named_by_prompt_k_and_place() -> None:
    with pytest.raises(TextsDiffer, match=r"Prompt 3: the text with k=5 differs from plain decoding's from token 2 on"):
        check_same_text({PLAIN: answer(1, 2, 3), 3: answer(1, 2, 3), 5: answer(1, 9, 3)}, "Prompt 3")
    with pytest.raises(TextsDiffer, match="in its length"):
        check_same_text({PLAIN: answer(1, 2, 3), 5: answer(1, 2)}, "Prompt 3")


def test_the_command_fails_where_speculation_changes_a_text(
    checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def swerving(worker: Any, given: list[list[int]], *, max_draft_length: int, **words: Any) -> Any:
        for made in generate(worker, given, max_draft_length=max_draft_length, **words):
            if max_draft_length == 5:
                made.first[0] += 1
            yield made

    monkeypatch.setattr(paired_decoding, "generate", swerving)
    assert measure(checkpoint, prompts, "--k", "3", "5") == 1
    assert "Prompt 1: the text with k=5 differs" in capsys.readouterr().err
    assert measure(checkpoint, prompts, "--k", "3", "5", "--allow-ties") == 0
    shown = capsys.readouterr().out
    assert "| 0 | 3 |" in shown
    assert shown.count("2/2 |") == 1  # k=3
    assert shown.count("0/2 |") == 1  # k=5


def test_a_prompt_that_gives_two_texts_in_two_rounds_is_not_averaged(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = PairedDecoder(load_model(checkpoint), [])
    texts = iter([CompletionOutput([20], [1, 2]), CompletionOutput([20], [1, 3])])
    monkeypatch.setattr(decoder, "once", lambda *given, **words: next(texts))
    with pytest.raises(TextsDiffer, match="two texts with k=0 in two rounds"):
        decoder.run([20], sampling=GREEDY, max_tokens=2, rounds=2)


def test_a_ratio_is_of_one_round_over_all_prompts() -> None:
    pairs = [
        {PLAIN: answer(*range(11), steps=10, seconds=(3.0, 5.0)), 5: answer(*range(11), steps=4, seconds=(1.0, 2.0))},
        {PLAIN: answer(1, 2, steps=1, seconds=(1.0, 1.0)), 5: answer(1, 2, steps=1, seconds=(1.0, 1.0), rows=36)},
    ]
    row = SpeedRow.of(0.0, 5, pairs)
    assert row.speedup == Spread(2.0, 2.0, 2.0)
    assert row.tokens_per_step == 11 / 5
    assert row.rows_per_step == 36 / 5
    assert row.plain_ms_per_token == Spread.of([4000 / 13, 6000 / 13])
    assert row.num_identical == 2


def test_outputs_that_loop_are_timed_apart() -> None:
    loop = tuple([1, 2] * 10)
    pairs = [
        {PLAIN: answer(*range(9), seconds=(4.0,)), 5: answer(*range(9), seconds=(2.0,))},
        {PLAIN: answer(*loop, seconds=(8.0,)), 5: answer(*loop, seconds=(1.0,))},
    ]
    row = SpeedRow.of(0.0, 5, pairs)
    assert (row.looping, row.speedup.median) == (0.5, 4.0)
    assert row.speedup_not_looping == Spread(2.0, 2.0, 2.0)
    assert SpeedRow.of(0.0, 5, pairs[1:]).speedup_not_looping is None


def test_the_report_has_a_table_a_record_and_a_figure(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    flags = ["--k", "2", "5", "--temperature", "0", "0.8", "--against", "prompt-lookup", "--out", str(tmp_path / "o")]
    assert measure(checkpoint, prompts, *flags) == 0
    record = json.loads((tmp_path / "o" / "speed.json").read_text())
    assert [(row["temperature"], row["k"]) for row in record["rows"]] == [(0, 2), (0, 5), (0.8, 2), (0.8, 5)]
    assert all(row["num_identical"] == row["num_prompts"] == 2 for row in record["rows"])
    ours, lookup = record["rivals"]
    assert (ours["runtime"], lookup["runtime"]) == ("ours", "transformers")
    assert lookup["num_identical"] == 2
    assert lookup["extra_weight_bytes"] == lookup["extra_kv_bytes"] == lookup["num_other_passes"] == 0
    assert ours["extra_kv_bytes"] == 6 * 2 * 2 * 16 * 4  # k+1 slots of one layer: keys, values; 2 heads of 16 float32
    head = (checkpoint / "draft_head.safetensors").stat().st_size
    assert ours["extra_weight_bytes"] == head + 5 * 64 * 4
    assert (tmp_path / "o" / "speed.png").stat().st_size > 5000
    assert "The runtimes differ" in (tmp_path / "o" / "speed.md").read_text()


def test_both_loops_decode_the_same_text_of_the_same_weights(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    other = AssistedDecoder(Checkpoint.open(checkpoint), model.facts, DraftMethod.parse("prompt-lookup"))
    prompt = [20, 21, 22, 20, 21, 22, 20]
    ours = PairedDecoder(model, []).once(PLAIN, prompt, sampling=GREEDY, max_tokens=12)
    plain = other.plain(prompt, 12)
    assert plain.ids == tuple(ours.tokens) == other.assisted(prompt, 12).ids
    assert plain.num_forwards == 12


def test_a_model_that_assists_itself_has_every_draft_accepted() -> None:
    model = load_model("demo", dtype="float32")
    other = AssistedDecoder(
        Checkpoint.open("demo"), model.facts, DraftMethod.parse("assisted:demo"), num_draft_tokens=4
    )
    prompt = Tokenizer.from_file(str(Checkpoint.open("demo").folder / "tokenizer.json")).encode("def add(a, b):\n").ids
    plain, assisted = other.plain(prompt, 16), other.assisted(prompt, 16)
    assert assisted.ids == plain.ids
    assert (
        assisted.num_forwards + assisted.num_draft_forwards == 16
    )  # each pass of either model gave one id of the text
    assert assisted.num_forwards <= 8  # drafts end where the assistant is unsure
    assert plain.num_draft_forwards == 0
    assert other.draft_weight_bytes > 20_000_000  # 5.26 M parameters, the tied embedding once
    assert other.draft_kv_bytes_per_token == model.facts.kv_bytes_per_token


def test_a_draft_model_of_another_vocabulary_is_refused(checkpoint: Path) -> None:
    with pytest.raises(FlagError, match="has another vocabulary"):
        AssistedDecoder(Checkpoint.open(checkpoint), load_model(checkpoint).facts, DraftMethod.parse("assisted:demo"))


def test_a_figure_of_one_loop_is_never_over_the_other(tmp_path: Path) -> None:
    ones = Spread(1.0, 1.0, 1.0)
    row = SpeedRow.of(0.0, 5, [{PLAIN: answer(1, 2), 5: answer(1, 2)}])
    rival = MethodRow("assisted:x", "transformers", 1, 2.0, 5, 9, 1.0, Spread(1.5, 1.0, 2.0), ones, ones, 1 << 20, 0, 1)
    ours = MethodRow("SPACE", OURS, 1, 2.0, 5, 0, 1.0, ones, ones, ones, 0, 0, 1)
    shown = to_markdown([row], [ours, rival], {"model": "m"})
    assert "| assisted:x | transformers | 2.00 | 5 | 9 | 1.50 (1.00–2.00) |" in shown
    assert "1.0 MiB" in shown
    assert (size(12), size(2048), size(3 << 30)) == ("12 B", "2.0 KiB", "3.0 GiB")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--against", "medusa"], "must read assisted:DRAFT_FOLDER or prompt-lookup"),
        (["--against", "prompt-lookup", "--temperature", "1"], "compares greedy decoding"),
        (["--max-tokens", "256"], "must be below the window of 256"),
        (["--rounds", "0"], "must be at least 1"),
        (["--k", "0"], "there is nothing to compare"),
        (["--against", "assisted:no/where/at/all"], "There is no folder no/where/at/all"),
    ],
)
def test_unusable_flags_are_refused_in_one_line(
    flags: list[str], words: str, checkpoint: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(checkpoint, prompts, *flags) == 2
    assert words in capsys.readouterr().err


def test_extra_weights_of_a_checkpoint_without_head_are_its_mask_embeddings(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", num_layers=1, draft_head=False, shared_mask=True)
    assert speed.extra_weight_bytes(load_model(folder)) == 64 * 4


def test_extra_weights_of_a_gated_adapter_are_its_file_and_the_head(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", num_layers=1, adapter_rank=4)
    files = [folder / "gated_lora.safetensors", folder / "draft_head.safetensors"]
    assert speed.extra_weight_bytes(load_model(folder)) == sum(file.stat().st_size for file in files)
