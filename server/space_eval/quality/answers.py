"""Finished answers on disk: appended one line at a time, so that a killed run goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

Answer = dict[str, Any]  # has `record` and `sample`, and what the task wrote down


class SettingsDiffer(ValueError):
    """The folder holds the answers of another run; the message names the setting and the cure."""


class AnswerFile:
    """The answers of one model to one task; without a file they are only remembered. Taken by `with`."""

    def __init__(self, file: Path | None) -> None:
        """Read the answers that are in the file."""
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
        """Keep it, and have it on disk before returning."""
        if self._stream is not None:
            self._stream.write(json.dumps(answer) + "\n")
            self._stream.flush()
        self._keep(answer)

    def sorted(self) -> list[Answer]:
        """By sample, records in the order in which they came."""
        return sorted(self._by_key.values(), key=lambda answer: int(answer["sample"]))

    def _keep(self, answer: Answer) -> None:
        self._by_key[str(answer["record"]), int(answer["sample"])] = answer


def complete_lines(file: Path) -> list[str]:
    """The lines of a file that may not exist; a last one without its end, of a run that was killed, is cut off."""
    if not file.is_file():
        return []
    raw = file.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        os.truncate(file, len(whole))
    return whole.decode("utf-8").split("\n")[:-1]


def open_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder, or make sure that what it holds was made with the same settings; SettingsDiffer if not."""
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
