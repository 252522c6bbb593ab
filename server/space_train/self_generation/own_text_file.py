"""Texts that a model wrote itself, on disk: one JSON object a line, only ever appended to."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import sys
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any


class OwnTextError(Exception):
    """Own texts cannot be written as asked; the message names the bound, the value and the cure."""


class OtherTexts(OwnTextError):
    """The file holds texts of another model, or written under another law."""


Question = tuple[tuple[int, ...], float, int]
"""Prompt, temperature and seed: under one recipe it has one answer."""


@dataclass(frozen=True)
class OwnText:
    """A prompt and how the model went on."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    temperature: float
    seed: int

    @property
    def question(self) -> Question:
        """What was asked."""
        return self.prompt, self.temperature, self.seed


@dataclass(frozen=True)
class OwnTextRecipe:
    """What, apart from its question, a text depends on; the same for all texts of a file."""

    model: str  # fingerprint of the checkpoint
    max_tokens: int
    eos_stops: bool
    banned_ids: tuple[int, ...] = ()


class OwnTextFile:
    """The file, open for appending. Another process that writes to it is waited for: then its texts are there.

    with OwnTextFile(path, recipe) as file:
        file.texts   # what is there already
        file.append(text)
    """

    def __init__(self, path: Path, recipe: OwnTextRecipe) -> None:
        self.path, self.texts = path, list[OwnText]()
        self._recipe = _plain(recipe)
        self._stream: io.FileIO | None = None

    def __enter__(self) -> OwnTextFile:
        """Raises OtherTexts, or OwnTextError for a file that is none or cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            stream = self._stream = io.FileIO(self.path, "ab")
        except OSError as error:
            raise OwnTextError(f"{self.path} cannot be written: {error.strerror}. Name another file.") from error
        try:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that writes {self.path}", file=sys.stderr, flush=True)
                fcntl.flock(stream, fcntl.LOCK_EX)
            stream.truncate(whole_lines(self.path))  # a killed run may have left half a line
            self.texts = list(_texts(self.path, self._recipe))
        except BaseException:
            stream.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is not None:
            with self._stream as stream:
                os.fsync(stream.fileno())

    def append(self, text: OwnText) -> None:
        """Write one line. Raises OwnTextError where there is no room."""
        if self._stream is None:
            raise RuntimeError("OwnTextFile.append is called outside its `with` block")
        line = json.dumps(asdict(text) | self._recipe, separators=(",", ":")).encode() + b"\n"
        try:
            while line:
                line = line[self._stream.write(line) or 0 :]
        except OSError as error:
            raise OwnTextError(
                f"{self.path} cannot be written: {error.strerror}. What it holds is kept: make room, and start again."
            ) from error
        self.texts.append(text)


def read_own_texts(path: Path) -> list[OwnText]:
    """The texts of a file, ordered by seed: whatever order they were finished in."""
    found = {text.question: text for text in _texts(path, {})}
    return sorted(found.values(), key=lambda text: (text.seed, text.temperature, text.prompt))


def keep_asked(path: Path, recipe: OwnTextRecipe, asked: Container[Question]) -> float:
    """Drop from the file what is written under another recipe, is not `asked` for or is no text; the share of the
    written ids that stays."""
    lines, num_ids, num_kept = list[bytes](), 0, 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.is_file() else (), start=1):
        with contextlib.suppress(OwnTextError):
            text = _text(path, number, line, {})
            num_ids += len(text.output)
            if text.question in asked and _text(path, number, line, _plain(recipe)):
                lines.append(line)
                num_kept += len(text.output)
    if not lines:
        path.unlink(missing_ok=True)
        return 0.0
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(lines))
    partial.replace(path)
    return num_kept / max(num_ids, 1)


def whole_lines(path: Path) -> int:
    """Bytes up to the end of the last line that ends."""
    with path.open("rb") as stream:
        end = stream.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            stream.seek(start)
            newline = stream.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def _texts(path: Path, recipe: dict[str, Any]) -> Iterator[OwnText]:
    """The texts of the whole lines, each written under `recipe`."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return  # half a line of a run that was killed
            yield _text(path, number, line, recipe)


def _text(path: Path, number: int, line: bytes, recipe: dict[str, Any]) -> OwnText:
    """The text of line `number`, written under `recipe`."""
    try:
        fields = json.loads(line)
        text = OwnText(
            tuple(fields["prompt"]), tuple(fields["output"]), float(fields["temperature"]), int(fields["seed"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise OwnTextError(
            f"Line {number} of {path} is no text of a model's own ({error!r}). Name another file, or delete it."
        ) from error
    for name, value in recipe.items():
        if fields.get(name) != value:
            raise OtherTexts(
                f"{path} was written with {name} {fields.get(name)}, and {value} is asked for. "
                "Name another file, or delete this one."
            )
    return text


def _plain(recipe: OwnTextRecipe) -> dict[str, Any]:
    """As JSON gives it back."""
    return asdict(recipe) | {"banned_ids": list(recipe.banned_ids)}
