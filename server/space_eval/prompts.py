"""Prompts for measurements: JSONL in several well-known forms, plain text, or built-in ones."""

import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELDS = ("prompt", "question", "inputs", "text")


class PromptError(ValueError):
    """A prompt file that cannot be used; the message names the file, the line and the cure."""


@dataclass(frozen=True)
class Prompt:
    """One prompt and its name in reports."""

    name: str
    text: str


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read prompts from `path`: one per JSON line (HumanEval-X `prompt`, GSM8K `question`, the first of MT-Bench's
    `turns`), or the whole file as one prompt if it does not end in `.jsonl`."""
    if not path.is_file():
        raise PromptError(f"There is no prompt file at {path}. Give --prompts a JSONL or text file.")
    if path.suffix != ".jsonl":
        return [Prompt(path.stem, path.read_text(encoding="utf-8"))]
    prompts = []
    for number, record in itertools.islice(json_lines(path), limit):
        text = text_of(record)
        if text is None:
            raise PromptError(f"{path}:{number} has none of the fields {', '.join(FIELDS)}, turns.")
        name = record.get("task_id") or record.get("question_id") or f"{path.stem}/{number}"
        prompts.append(Prompt(str(name), text))
    if not prompts:
        raise PromptError(f"{path} holds no prompt. Give at least one JSON line with one of {', '.join(FIELDS)}.")
    return prompts


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of each non-empty line. Raises PromptError."""
    # Not splitlines, which also splits at U+2028 and U+0085; they may occur in a JSON string.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(f"{path}:{number} is not JSON: {error}.") from error
        if not isinstance(record, dict):
            raise PromptError(f"{path}:{number} is not a JSON object.")
        yield number, record


def text_of(record: Mapping[str, Any]) -> str | None:
    """Return the prompt of a record, under any of the known field names."""
    turns = record.get("turns")
    texts = [turns[0]] if isinstance(turns, list) and turns else []
    texts += [record[name] for name in FIELDS if name in record]
    return next((text for text in texts if isinstance(text, str)), None)


_TASKS = (
    ("count_vowels", "text: str", "int", "The number of vowels in `text`, whatever their case."),
    ("running_mean", "values: list[float]", "list[float]", "The mean of all values up to each place."),
    ("is_palindrome", "text: str", "bool", "Whether `text` reads the same from both ends, spaces aside."),
    ("merge_sorted", "left: list[int], right: list[int]", "list[int]", "One ascending list from two."),
    ("parse_header", "line: bytes", "tuple[str, str]", "Name and value of a `name: value` line."),
    ("fibonacci", "count: int", "list[int]", "The first `count` numbers, each the sum of the two before it."),
    ("group_by_length", "words: list[str]", "dict[int, list[str]]", "Words under their number of letters."),
    ("read_config", "path: str", "dict[str, str]", "The `key = value` lines of a file; `#` starts a comment."),
)


def built_in() -> list[Prompt]:
    """Return eight function heads with docstrings."""
    return [
        Prompt(name, f'def {name}({arguments}) -> {result}:\n    """{doc}"""\n')
        for name, arguments, result, doc in _TASKS
    ]


_MODULES = ("heapq", "textwrap", "difflib", "argparse", "statistics", "ast", "csv", "string")


def long_text(num_characters: int = 1 << 17) -> str:
    """Return source code of the standard library: long, non-repeating text for prompts of a given length."""
    specs = [importlib.util.find_spec(name) for name in _MODULES]
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    return "".join(file.read_text(encoding="utf-8") for file in files)[:num_characters]
