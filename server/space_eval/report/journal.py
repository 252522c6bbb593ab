"""Finished work on disk, appended one JSON line at a time, so that a run that was stopped or killed can resume."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from space_eval.flags import JournalError

Key = TypeVar("Key", bound=Hashable)


class Journal(Generic[Key]):
    """The lines of an append-only JSONL file by key; without a file they are kept in memory."""

    def __init__(self, file: Path | None, key_of: Callable[[Mapping[str, Any]], Key]) -> None:
        """Read the lines already in the file; half a last line of a killed run is dropped. Raises JournalError."""
        self._file, self._key_of = file, key_of
        self._lines: dict[Key, dict[str, Any]] = {}
        if file is None or not file.is_file():
            return
        raw = file.read_bytes()
        os.truncate(file, raw.rfind(b"\n") + 1)
        for number, text in enumerate(raw.split(b"\n")[:-1], start=1):
            try:
                self._keep(json.loads(text))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise JournalError(f"{file}:{number} is no answer ({error!r}). Give another --out.") from error

    def __contains__(self, key: Key) -> bool:
        return key in self._lines

    def __getitem__(self, key: Key) -> dict[str, Any]:
        return self._lines[key]

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines in the order they were added."""
        return list(self._lines.values())

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line and write it to disk."""
        text = json.dumps(line, ensure_ascii=False)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(text + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        self._keep(json.loads(text))

    def _keep(self, line: dict[str, Any]) -> None:
        self._lines[self._key_of(line)] = line


def check_settings(known: Mapping[str, Any], settings: Mapping[str, Any], where: Path) -> None:
    """Raise JournalError if `where` holds answers of a run with other settings; both are as JSON has them."""
    for name in [*settings, *known]:
        if known.get(name) != settings.get(name):
            raise JournalError(
                f"{where} holds answers for {name} {known.get(name)}; this run has {settings.get(name)}. "
                "Give another --out, or the same settings to go on there."
            )
