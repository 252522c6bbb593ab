"""The commands measure a quantised checkpoint in the bits that a server multiplies it with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doubles.gguf_files import write_gguf
from space_eval.__main__ import main
from space_model.model_error import UnsupportedModel
from tiny_checkpoints import tiny_checkpoint

COMMANDS = {
    "equivalence": ("acceptance.equivalence", ["--prompts", "prompts.jsonl"]),
    "speed": ("acceptance.speed", ["--prompts", "prompts.jsonl"]),
    "paper": ("paper.command", ["--tasks", "human_eval", "--data", "human_eval=prompts.jsonl", "--no-execution"]),
}


@pytest.fixture(autouse=True)
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    problem = {"task_id": "t/0", "prompt": "def add(a, b):\n", "test": "", "entry_point": "add", "declaration": ""}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(problem) + "\n", encoding="utf-8")


@pytest.mark.parametrize("command", COMMANDS)
def test_weights_are_chosen_as_by_a_server(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, flags = COMMANDS[command]
    asked: list[str] = []

    def load(model: str, **how: Any) -> None:
        asked.append(how["weights"])
        raise UnsupportedModel("seen")

    monkeypatch.setattr(f"space_eval.{module}.load_model", load)
    assert main([command, "--model", "demo", *flags]) != 0
    assert asked == ["auto"]


def test_the_report_says_in_which_bits(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", num_masks=0, hidden_size=32, num_heads=2, kv_heads=1)
    file = write_gguf(source, tmp_path / "tiny.gguf", "Q8_0")
    flags = ["--k", "2", "--temperature", "0", "--max-tokens", "16", "--out", str(tmp_path)]
    main(["equivalence", "--model", str(file), *COMMANDS["equivalence"][1], *flags])
    facts = json.loads((tmp_path / "equivalence.json").read_text(encoding="utf-8"))["facts"]
    assert facts["dtype"] == "bfloat16 with gguf weights"
