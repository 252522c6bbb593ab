"""What has been measured so far, one line for each question: a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from space_model.checkpoint import Checkpoint

from space_eval.prompts import PromptError
from space_eval.speed_decoding import space_files

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint(checkpoint: Checkpoint) -> str:
    """Of config, weights, adapter and draft head: 64 places of each file are read, so a large one takes no time."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for file in [*checkpoint.weights, *space_files(checkpoint)]:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for place in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * place // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]


class JournalError(PromptError):
    """A folder with a journal of something else; the message names what differs and the cure."""


class Journal:
    """An append-only JSONL file: the settings first, then one line per key. A line torn by a kill is dropped."""

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        """Read `file`, or begin it; a journal under other settings is refused, not mixed in."""
        self.file = file
        self._lines: dict[str, dict[str, Any]] = {}
        found = self._read()
        wanted = json.loads(json.dumps(dict(settings)))
        if found is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._append({"settings": wanted})
        elif found != wanted:
            name = next(name for name in [*wanted, *found] if found.get(name) != wanted.get(name))
            raise JournalError(
                f"{file} was begun with {name} {found.get(name)!r}; this run has {wanted.get(name)!r}. "
                "Give another --out, or the same flags as before."
            )

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._lines[key]

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, key: str, line: Mapping[str, Any]) -> None:
        """Write a line down for good."""
        self._append({"key": key, **line})
        self._lines[key] = json.loads(json.dumps(dict(line)))

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _read(self) -> dict[str, Any] | None:
        """The settings the journal was begun with; None without one."""
        if not self.file.is_file():
            return None
        whole = self.file.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]
        if len(kept) < len(whole):
            os.truncate(self.file, len(kept))
        settings: dict[str, Any] | None = None
        for number, text in enumerate(kept.decode("utf-8").split("\n")[:-1], start=1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise JournalError(f"{self.file}:{number} is not JSON: {error}. Give another --out.") from error
            if "settings" in line:
                settings = line["settings"]
            else:
                self._lines[line.pop("key")] = line
        return settings
