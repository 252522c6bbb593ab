"""Data of an evaluation: prompts and records, from JSON lines, text files or the hub, and built-in prompts."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space_eval.flags import RecordError

Record = dict[str, Any]
FIELDS = ("prompt", "question", "inputs", "text")  # names of a prompt in a record


@dataclass(frozen=True)
class Conversation:
    """What a user says in turn, or a text to continue."""

    turns: tuple[str, ...]
    is_chat: bool  # questions, which a chat template is for; False: one text to continue

    def uses_template(self, chat: str) -> bool:
        """Return whether it goes through the chat template: `chat` is always, never or auto (questions do)."""
        return chat == "always" or (chat == "auto" and self.is_chat)


CHAT_FIELDS = ("question",)
"""Of FIELDS, those that hold something said to an assistant, as `turns` do."""


def load_conversations(path: Path, limit: int | None = None) -> list[Conversation]:
    """Read conversations from `path`: one per JSON line (MT-Bench's `turns`, GSM8K's `question`; HumanEval-X's `prompt`
    is a text to continue), or the whole file as one text if it does not end in `.jsonl`. Raises RecordError."""
    if not path.is_file():
        raise RecordError(f"There is no prompt file at {path}. Give --prompts a JSONL or text file; no pipe is read.")
    if path.suffix != ".jsonl":
        return [Conversation((path.read_text(encoding="utf-8"),), is_chat=False)]
    found = []
    for number, record in itertools.islice(json_lines(path), limit):
        if (conversation := conversation_of(record)) is None:
            raise RecordError(f"{path}:{number} has none of the fields {', '.join(FIELDS)}, turns.")
        found.append(conversation)
    if not found:
        raise RecordError(f"{path} holds no prompt. Give at least one JSON line with one of {', '.join(FIELDS)}.")
    return found


def conversation_of(record: Mapping[str, Any]) -> Conversation | None:
    """Return the conversation of a record, under any of the known field names."""
    turns = record.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return Conversation(tuple(turns), is_chat=True)
    name = next((name for name in FIELDS if isinstance(record.get(name), str)), None)
    return None if name is None else Conversation((record[name],), is_chat=name in CHAT_FIELDS)


def load_prompts(path: Path, limit: int | None = None) -> list[str]:
    """Return the first turn of each of `load_conversations`. Raises RecordError."""
    return [conversation.turns[0] for conversation in load_conversations(path, limit)]


def text_of(record: Mapping[str, Any]) -> str | None:
    """Return the prompt of a record, under any of the known field names."""
    conversation = conversation_of(record)
    return None if conversation is None else conversation.turns[0]


def json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield line number and object of each non-empty line. Raises RecordError."""
    for number, value in _json_lines(path):
        if not isinstance(value, dict):
            raise RecordError(f"{path}:{number} is not a JSON object.")
        yield number, value


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    # Not splitlines, which also splits at U+2028 and U+0085; they may occur in a JSON string.
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if line.strip():
            yield number, _parsed(line, f"{path}:{number}")


def load_records(source: str, *, needs: Sequence[Sequence[str]], split: str = "test") -> list[Record]:
    """Return the records of `source`: a `.jsonl` or `.json` file, or `split` of a data set on the hub (`owner/name`, or
    `owner/name:configuration`). Raises RecordError.

    `needs` are alternatives: every record must have all the fields of at least one of them, as strings.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".json":
        loaded = _parsed(_read(path), str(path))
        records = loaded if isinstance(loaded, list) else [loaded]
    elif path.is_file():
        records = [value for _, value in _json_lines(path)]
    elif path.suffix in {".jsonl", ".json", ".txt"} or source.startswith(("/", ".", "~")) or source.count("/") != 1:
        raise RecordError(f"There is no file {source}. Give a JSONL file (no pipe is read) or a hub id (owner/name).")
    else:
        records = _of_hub(source, split)
    if not records:
        raise RecordError(f"{source} holds no records. Give at least one JSON line.")
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise RecordError(f"Record {number} of {source} is no JSON object.")
        if not any(all(isinstance(record.get(field), str) for field in fields) for fields in needs):
            wanted = " or ".join("+".join(fields) for fields in needs)
            has = ", ".join(sorted(record)) or "none"
            raise RecordError(f"Record {number} of {source} has the fields {has}; it needs {wanted}, as strings.")
    return records


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"{where} is not JSON: {error}.") from error


def _of_hub(source: str, split: str) -> list[Record]:
    name, _, configuration = source.partition(":")
    try:
        datasets: Any = importlib.import_module("datasets")  # imported here because files do not need it
    except ImportError as error:
        raise RecordError(f"{source} is no file; hub data needs: pip install 'spaceserve[train]'") from error
    try:
        loaded = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the library and the network below it raise errors of many kinds
        first_line = str(error).partition("\n")[0][:200]
        raise RecordError(
            f"There is no file {source}, and the hub did not give it ({type(error).__name__}: {first_line}). "
            "Without a network give the path of a JSONL file."
        ) from error
    return [dict(record) for record in loaded]


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


def built_in() -> list[str]:
    """Return eight function heads with docstrings."""
    return [f'def {name}({arguments}) -> {result}:\n    """{doc}"""\n' for name, arguments, result, doc in _TASKS]


_MODULES = ("heapq", "textwrap", "difflib", "argparse", "statistics", "ast", "csv", "string")


def long_text(num_characters: int = 1 << 17) -> str:
    """Return source code of the standard library: long, non-repeating text for prompts of a given length."""
    specs = [importlib.util.find_spec(name) for name in _MODULES]
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    return "".join(file.read_text(encoding="utf-8") for file in files)[:num_characters]
