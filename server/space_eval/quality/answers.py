"""Finished answers on disk, appended one line at a time, so that a killed run can resume."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

Answer = dict[str, Any]  # has `record`, `sample` and the task's own fields


class SettingsDiffer(ValueError):
    """The folder has answers of a run with other settings; the message names the setting and the cure."""


class AnswerFile:
    """The answers of one model to one task; without a file they are kept in memory. A context manager."""

    def __init__(self, file: Path | None) -> None:
        """Read the answers already in the file."""
        self._by_key: dict[tuple[str, int], Answer] = {}
        self._stream = None
        if file is None:
            return
        for number, line in enumerate(complete_lines(file), start=1):
            try:
                self._keep(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise SettingsDiffer(f"{file}:{number} is no answer ({error!r}). Give another --out.") from error
        self._stream = file.open("a", encoding="utf-8")

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.close()

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, answer: Answer) -> None:
        """Add an answer and flush it to disk."""
        if self._stream is not None:
            self._stream.write(json.dumps(answer) + "\n")
            self._stream.flush()
        self._keep(answer)

    def sorted(self) -> list[Answer]:
        """Return the answers by sample, with records in the order they were added."""
        return sorted(self._by_key.values(), key=lambda answer: int(answer["sample"]))

    def _keep(self, answer: Answer) -> None:
        self._by_key[str(answer["record"]), int(answer["sample"])] = answer


def complete_lines(file: Path) -> list[str]:
    """Return the lines of a file that may not exist, dropping an incomplete last line of a killed run."""
    if not file.is_file():
        return []
    raw = file.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        os.truncate(file, len(whole))
    return whole.decode("utf-8").split("\n")[:-1]


def open_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Create the folder, or check that its answers have the same settings. Raises SettingsDiffer."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    if not file.exists():
        file.write_text(json.dumps(settings, indent=1), encoding="utf-8")
        return
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsDiffer(f"{file} is not JSON: {error}. Give another --out, or delete the folder.") from error
    for name in sorted({*known, *settings}):
        if known.get(name) != settings.get(name):
            raise SettingsDiffer(
                f"{folder} holds answers for {name} {known.get(name)}; this run has {settings.get(name)}. "
                "Give another --out, or the same settings to go on there."
            )
