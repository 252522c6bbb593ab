"""Hostile checkpoints: headers of safetensors, config.json and tokenizer.json that are almost right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from space_model.loading.load import load_model
from space_model.model_error import ModelError
from space_router.config import ServeConfig
from space_router.errors import ConfigError
from space_router.text.model_text import ModelText
from tiny_checkpoints import tiny_checkpoint

from fuzz.harness import Fuzzer, as_json, json_values, mutated, often, spoiled

Draw = Callable[[SearchStrategy[Any]], Any]

FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
FIELDS: dict[str, tuple[Any, ...]] = {
    "dtype": ("F64", "F16", "BF16", "I8", "F8_E4M3", "BOOL", "U64", "", "Z", 3, None),
    "shape": ([], [0], [1], [2**40, 2**40], [-1], [2**63], [10**30], "x", None),
    "data_offsets": ([0, 0], [4, 0], [0, 2**62], [-4, 4], [0], [0, 4, 8], "x", None),
}
NAMES = ("", "x" * 5000, "model.embed_tokens.weight", "__metadata__")


@st.composite
def _weights(draw: Draw, content: bytes) -> bytes:
    """A file of tensors whose header lies."""
    size = int.from_bytes(content[:8], "little")
    text, tensors = content[8 : 8 + size], content[8 + size :]
    match draw(st.sampled_from(("length", "spoiled", "cut", *["header"] * 5))):
        case "length":
            lengths = (0, 1, size - 1, size + 1, 100_000_001, 2**31, 2**63, 2**64 - 1)
            return bytes(draw(st.sampled_from(lengths)).to_bytes(8, "little") + content[8:])
        case "spoiled":
            return bytes(content[:8] + draw(spoiled(text))[:size].ljust(size) + tensors)
        case "cut":
            return content[: draw(st.integers(0, len(content) - 1))]
    header: dict[str, Any] = json.loads(text)
    name = draw(st.sampled_from(list(header)))
    match draw(st.sampled_from(("mutated", "named", "dropped", *FIELDS))):
        case "mutated":
            header[name] = draw(mutated(header[name]))
        case "named":
            header[draw(st.sampled_from(NAMES))] = draw(json_values)
        case "dropped":
            del header[name]
        case field:
            header[name] = {**header[name], field: draw(st.sampled_from(FIELDS[field]))}
    written = as_json(header)
    return len(written).to_bytes(8, "little") + written + tensors


def _changes(good: Path) -> SearchStrategy[tuple[str, bytes]]:
    """Name and new content of one file of the checkpoint."""

    def of(name: str) -> SearchStrategy[tuple[str, bytes]]:
        content = (good / name).read_bytes()
        if name.endswith(".safetensors"):
            changed = _weights(content)
        else:
            changed = often(mutated(json.loads(content), most=3).map(as_json), spoiled, 5)
        return changed.map(lambda made: (name, made))

    return st.sampled_from([name for name in FILES if (good / name).is_file()]).flatmap(of)


def test_a_hostile_checkpoint_is_served_or_refused_with_a_reason(fuzzer: Fuzzer, tmp_path: Path) -> None:
    good = tiny_checkpoint(tmp_path / "good", vocab_size=300, hidden_size=32)
    bad = tmp_path / "bad"

    def attempt(changed: tuple[str, bytes]) -> str:
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        (bad / changed[0]).write_bytes(changed[1])
        outcome = "served"
        loads: list[Callable[[], object]] = [
            lambda: load_model(bad),
            lambda: ModelText.load(ServeConfig(model=str(bad))),
        ]
        for load in loads:
            try:
                load()
            except (ModelError, ConfigError) as error:
                outcome = "refused" if str(error) else "refused without a reason"
        assert outcome in ("served", "refused")
        return outcome

    fuzzer.run(_changes(good), attempt, few=4, settle=lambda: load_model(good))
