"""Training texts that share words with the prompts of an evaluation, found by their n-grams."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from space_train.data.records import DataError

NUM_WORDS = 13
"""Words in a row that a training text may not share with an evaluation, as in GPT-3's check (arXiv 2005.14165)."""


def word_grams(text: str, length: int) -> Iterator[tuple[str, ...]]:
    """Yield every `length` words in a row, in lower case and without punctuation."""
    words = re.findall(r"\w+", text.lower())
    yield from zip(*(words[start:] for start in range(length)), strict=False)


class EvaluationTexts:
    """The n-grams of the texts of an evaluation."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._grams = {hash(gram) for text in texts for gram in word_grams(text, NUM_WORDS)}

    @classmethod
    def read(cls, files: Sequence[Path]) -> EvaluationTexts:
        """Read every string of the records of JSON-lines or JSON files, or the whole of other text files. Raises
        DataError."""
        return cls(text for file in files for text in _texts_of(file))

    def is_shared_by(self, text: str) -> bool:
        """Return whether `text` has NUM_WORDS words in a row of an evaluation's text."""
        return any(hash(gram) in self._grams for gram in word_grams(text, NUM_WORDS))


def _texts_of(file: Path) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The evaluation file {file} cannot be read: {error}.") from error
    is_lines, is_json = file.suffix in {".jsonl", ".ndjson"}, file.suffix == ".json"
    # Not splitlines, which also splits at U+2028 and U+0085; they may occur in a JSON string.
    for part in text.split("\n") if is_lines else [text]:
        if not (is_lines or is_json):
            yield part
        elif part.strip():
            try:
                yield from _strings(json.loads(part))
            except ValueError as error:
                raise DataError(f"The evaluation file {file} is not JSON: {error}.") from error


def _strings(value: object) -> Iterator[str]:
    """Yield the strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
