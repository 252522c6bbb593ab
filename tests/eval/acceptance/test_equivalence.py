"""The command finds every text equal, and names the first token where it is not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from space_eval.__main__ import main
from space_eval.acceptance.equivalence import CellResult, EquivalenceCell, faults_of
from space_kernels.sampling.sampling_params import SamplingParams, SamplingRows
from tiny_checkpoints import tiny_checkpoint

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_checkpoint(folder, seed=1, hidden_size=32, num_heads=2, kv_heads=1, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "two.jsonl"
    file.write_text('{"prompt": "def add(a, b):"}\n{"prompt": "Why is it so?\\n"}\n', encoding="utf-8")
    return file


def run(folder: Path, prompts: Path, *flags: str) -> int:
    return main(["equivalence", "--model", str(folder), "--prompts", str(prompts), "--max-tokens", "16", *flags])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_text_is_equal_and_every_accepted_length_occurred(
    dtype: str, folder: Path, prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert run(folder, prompts, "--k", "3", "--seed", "1", "2", "--dtype", dtype, "--out", str(tmp_path)) == 0
    record = json.loads((tmp_path / "equivalence.json").read_text(encoding="utf-8"))
    cells = record["cells"]
    assert len(cells) == 3 * 4 * 2  # greedy and two seeds, four kinds of drafts, alone and in a batch
    assert all(cell["num_equal"] == cell["num_texts"] == 2 for cell in cells)
    for drafts, only in (("oracle", "accepted_whole"), ("wrong", "accepted_none"), ("half", "accepted_part")):
        for cell in cells:
            if cell["cell"]["drafts"] == drafts:
                counts = {name: cell[name] for name in ("accepted_none", "accepted_part", "accepted_whole")}
                assert counts.pop(only) > 0
    assert "equal: 24 cells, 48 texts, 768 tokens" in capsys.readouterr().out


def test_a_fault_ends_with_status_1_and_the_first_token_that_differs(
    folder: Path, prompts: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    def of_the_root(rows: SamplingRows, wanted: Callable[[SamplingParams], bool] = lambda _: True) -> list[int]:
        """A chain's rows share one noise."""
        runs = zip(rows.run_params, rows.run_positions, rows.run_counts, strict=True)
        return [first for sampling_params, first, count in runs if wanted(sampling_params) for _ in range(count)]

    monkeypatch.setattr(SamplingRows, "positions", of_the_root)
    assert run(folder, prompts, "--k", "3", "--temperature", "1") == 1
    said = capsys.readouterr()
    assert "NOT PROVED" in said.out
    assert "prompt 1] First difference at position" in said.err
    assert "plain decoding" in said.err


def test_texts_too_short_to_show_anything_prove_nothing(folder: Path, prompts: Path, capsys: Capture) -> None:
    assert run(folder, prompts, "--k", "3", "--temperature", "0", "--max-tokens", "2") == 1
    assert "nothing is proved. Raise --max-tokens" in capsys.readouterr().err


def test_a_plain_checkpoint_is_proved_with_drafts_from_outside(prompts: Path, tmp_path: Path, capsys: Capture) -> None:
    plain = tiny_checkpoint(tmp_path / "plain", num_masks=0, tie_word_embeddings=False)
    assert run(plain, prompts, "--k", "2") == 0
    said = capsys.readouterr().out
    assert "| oracle |" in said
    assert "| own |" not in said


def test_each_accepted_length_must_occur_at_every_k() -> None:
    def result(k: int, none: int, part: int, whole: int) -> CellResult:
        cell = EquivalenceCell(0.0, 0, k, "own", "alone")
        return CellResult(cell, accepted_none=none, accepted_part=part, accepted_whole=whole)

    assert faults_of([result(1, 1, 0, 1), result(3, 1, 1, 0), result(3, 0, 0, 2)]) == []
    (fault,) = faults_of([result(1, 1, 0, 1), result(3, 1, 0, 1)])
    assert "With k=3 no chain was accepted in part" in fault


@pytest.mark.parametrize(
    ("flags", "words"), [(["--k", "9"], "--k must lie in 1..8; got 9"), (["--seed", "-1"], "--seed must lie in 0")]
)
def test_settings_that_mean_nothing_are_refused_in_one_line(
    flags: list[str], words: str, folder: Path, prompts: Path, capsys: Capture
) -> None:
    assert run(folder, prompts, *flags) == 2
    assert words in capsys.readouterr().err
