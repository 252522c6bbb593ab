"""`spaceserve eval acceptance`: what a row counts, and the table and record of a run."""

import json
from pathlib import Path

import pytest
from space_eval.__main__ import main
from space_eval.acceptance.command import AcceptanceRow
from space_eval.acceptance.generation import CompletionOutput, DecodeStep
from space_model.testing import tiny_checkpoint


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
