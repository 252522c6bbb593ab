"""Hostile checkpoints: headers of safetensors, config.json and tokenizer.json that are almost right."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from space_model.load import load_model
from space_model.model_error import ModelError
from space_model.testing import tiny_checkpoint
from space_router.config import ServeConfig
from space_router.errors import ConfigError
from space_router.text.model_text import ModelText

from space_eval.fuzz_target import Finding
from space_eval.fuzz_values import any_json, as_json, changed, spoiled

ALLOWED = (ModelError, ConfigError)
WORTH_A_FILE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


class Checkpoints:
    """Loaded as the worker and as the router load them: served, or refused with a reason."""

    name = "checkpoints"

    async def __aenter__(self) -> Checkpoints:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._good = tiny_checkpoint(Path(self._folder.name) / "good", vocab_size=300, hidden_size=32)
        self._bad = Path(self._folder.name) / "bad"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._folder.cleanup()

    async def settle(self) -> None:
        load_model(self._good)

    async def try_one(self, dice: Random) -> str:
        shutil.rmtree(self._bad, ignore_errors=True)
        shutil.copytree(self._good, self._bad)
        names = [name for name in WORTH_A_FILE if (self._bad / name).is_file()]
        name = dice.choice([*names, "model.safetensors", "config.json"])
        file = self._bad / name
        content = file.read_bytes()
        if name.endswith(".safetensors"):
            content = _spoiled_header(dice, content)
        elif dice.random() < 0.8:
            value = json.loads(content)
            for _ in range(dice.randint(1, 3)):
                value = changed(dice, value)
            content = as_json(value)
        else:
            content = spoiled(dice, content)
        file.write_bytes(content)
        label = "served"
        loads: list[Any] = [lambda: load_model(self._bad), lambda: ModelText.load(ServeConfig(model=str(self._bad)))]
        for load in loads:
            try:
                load()
            except ALLOWED as error:
                label = "refused"
                if not str(error):
                    raise Finding("a refusal without a reason") from None
        return label


def _spoiled_header(dice: Random, content: bytes) -> bytes:
    """A file of tensors whose header lies."""
    size = int.from_bytes(content[:8], "little")
    header: Any = json.loads(content[8 : 8 + size])
    kind = dice.random()
    if kind < 0.15:
        length = dice.choice((0, 1, size - 1, size + 1, 100_000_001, 2**31, 2**63, 2**64 - 1))
        return length.to_bytes(8, "little") + content[8:]
    if kind < 0.3:
        return content[:8] + spoiled(dice, content[8 : 8 + size])[:size].ljust(size) + content[8 + size :]
    if kind < 0.4:
        return content[: dice.randrange(len(content))]
    name = dice.choice(list(header))
    entry = header[name]
    match dice.randrange(6):
        case 0:
            header[name] = changed(dice, entry)
        case 1:
            entry["dtype"] = dice.choice(("F64", "F16", "BF16", "I8", "F8_E4M3", "BOOL", "U64", "", "Z", 3, None))
        case 2:
            entry["shape"] = dice.choice(([], [0], [1], [2**40, 2**40], [-1], [2**63], [10**30], "x", None))
        case 3:
            entry["data_offsets"] = dice.choice(([0, 0], [4, 0], [0, 2**62], [-4, 4], [0], [0, 4, 8], "x", None))
        case 4:
            header[dice.choice(("", "x" * 5000, "model.embed_tokens.weight", "__metadata__"))] = any_json(dice)
        case _:
            del header[name]
    written = as_json(header)
    return len(written).to_bytes(8, "little") + written + content[8 + size :]
