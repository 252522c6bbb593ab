"""Training records: read from files, folders or datasets, and recognised by their form."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any


class DataError(Exception):
    """Training data that cannot be used."""


class SourceNotFound(DataError):
    """The path does not exist, and the hub has no such dataset or split."""


class BadRecord(DataError):
    """A record that is malformed, in no known form, or in another form than the rest of its file."""


class UnusableTemplate(DataError):
    """A chat template that does not exist, or does not render a conversation."""


class UnusableTokenizer(DataError):
    """A tokenizer whose ids do not fit this model."""


class NothingToLearn(DataError):
    """All records are empty, or all their targets were cut off."""


JSON_LINES = frozenset({".jsonl", ".ndjson"})
TEXT = frozenset({".txt", ".text", ".md", ".rst", ".tex"})
CODE = frozenset({".py", ".pyi", ".js", ".ts", ".go", ".rs", ".c", ".h", ".cc", ".cpp", ".hpp", ".java", ".rb", ".sh"})
TABLES = frozenset({".parquet", ".arrow", ".csv", ".tsv"})
PACKED = frozenset({".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".7z"})
READ_HERE = JSON_LINES | {".json"} | TEXT | CODE
SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class SourceRecord:
    """One record and the place it was read from."""

    file: str
    line: int  # the line it begins on, from 1; the row of a table
    value: object

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def records(source: str, *, split: str = "train") -> Iterator[SourceRecord]:
    """Yield the records of `source` in order: a file, a folder (all files in it, by path), or a dataset's split. A
    dataset is a folder with parquet, arrow or CSV files, a folder written by `save_to_disk`, or an id of the hub
    (`owner/name`, or `owner/name:config`)."""
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _folder(path, split)
    elif path.is_file():
        if path.suffix.lower() in TABLES:
            yield from _dataset(str(path), split)
        elif path.suffix.lower() in READ_HERE:
            _only_train(source, split)
            yield from _file(path)
        else:
            cure = "Unpack it, and name" if path.suffix.lower() in PACKED else "Name"
            raise SourceNotFound(
                f"{path} ends in {path.suffix or 'nothing'}, which says no form of data. "
                f"{cure} it {', '.join(sorted(READ_HERE | TABLES))}."
            )
    elif source.startswith(("/", ".", "~")) or path.suffix.lower() in READ_HERE | TABLES or not source.strip():
        instead = ", not a pipe: it is read several times" * path.exists()
        raise SourceNotFound(
            f"There is no file or folder {source!r}. Give a file, a folder, or the id of a dataset{instead}."
        )
    else:
        yield from _dataset(source, split)


def _folder(folder: Path, split: str) -> Iterator[SourceRecord]:
    there = (path for path in folder.rglob("*") if path.is_file())
    files = sorted(p for p in there if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    suffixes = {path.suffix.lower() for path in files}
    if suffixes & TABLES or any((folder / name).is_file() for name in SAVED_BY_DATASETS):
        yield from _dataset(str(folder), split)
        return
    usable = [path for path in files if path.suffix.lower() in READ_HERE]
    if not usable:
        found = ", ".join(sorted(suffix or "(none)" for suffix in suffixes)) or "no file"
        raise SourceNotFound(
            f"The folder {folder} has nothing to read: {found}. Read are {', '.join(sorted(READ_HERE | TABLES))}."
        )
    _only_train(str(folder), split)
    for path in usable:
        yield from _file(path)


def _only_train(source: str, split: str) -> None:
    if split != "train":
        raise SourceNotFound(f"{source} has no split {split!r}: plain files are all of the split 'train'.")


def _file(path: Path) -> Iterator[SourceRecord]:
    """Yield the records of one file; a text file is one record."""
    try:
        if path.suffix.lower() in JSON_LINES:
            yield from _json_lines(path)
        elif path.suffix.lower() == ".json":
            yield from _json(path)
        else:
            yield SourceRecord(str(path), 1, {"text": path.read_text(encoding="utf-8-sig")})
    except UnicodeDecodeError as error:
        raise BadRecord(f"{path} is not UTF-8 ({error.reason}). Convert it first.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _json_lines(path: Path) -> Iterator[SourceRecord]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield SourceRecord(str(path), number, json.loads(line))
                except ValueError as error:
                    raise BadRecord(f"{path}:{number} is not JSON: {error}.") from error


def _json(path: Path) -> Iterator[SourceRecord]:
    """Yield records from a JSON list or from JSON lines (many files that end in .json are JSON lines)."""
    text, decoder = path.read_text(encoding="utf-8-sig"), json.JSONDecoder()
    at, line, counted = _behind_spaces(text, 0), 1, 0
    is_list = text[at : at + 1] == "["
    at = _behind_spaces(text, at + is_list)
    while at < len(text):
        if is_list and text[at] == "]":
            return
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise BadRecord(f"{path}:{error.lineno} is not JSON: {error.msg}.") from error
        yield SourceRecord(str(path), line, value)
        at = _behind_spaces(text, end)
        if is_list and text[at : at + 1] == ",":
            at = _behind_spaces(text, at + 1)
        elif is_list and text[at : at + 1] != "]":
            line += text.count("\n", counted, at)
            raise _cut_off(path, line)
    if is_list:
        raise _cut_off(path, line)


def _cut_off(path: Path, line: int) -> BadRecord:
    return BadRecord(f"{path}:{line} is not JSON: the list must go on with ',' or end with ']'. Was the file cut off?")


def _behind_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _dataset(source: str, split: str) -> Iterator[SourceRecord]:
    for number, row in enumerate(_open_dataset(source, split), start=1):
        yield SourceRecord(f"{source}[{split}]", number, row)


def _open_dataset(source: str, split: str) -> Any:
    try:
        datasets: Any = importlib.import_module("datasets")  # imported here because plain files do not need it
    except ImportError as error:
        raise DataError(f"{source} needs the package `datasets`: pip install 'spaceserve[train]'.") from error
    path = Path(source).expanduser()
    try:
        if path.is_file():
            form = {".parquet": "parquet", ".arrow": "arrow"}.get(path.suffix.lower(), "csv")
            options = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
            return datasets.load_dataset(form, data_files={"train": str(path)}, split=split, **options)
        if any((path / name).is_file() for name in SAVED_BY_DATASETS):
            saved = datasets.load_from_disk(str(path))
            if isinstance(saved, datasets.DatasetDict):
                if split not in saved:
                    raise SourceNotFound(f"{source} has no split {split!r}; it has {', '.join(saved)}.")
                return saved[split]
            _only_train(source, split)
            return saved
        name, _, config = (source, "", "") if path.is_dir() else source.partition(":")
        return datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceNotFound(
            f"{source!r} is no file or folder here, and `datasets` does not open it (split {split!r}): {reason}"
            if not path.exists()
            else f"`datasets` does not open {source} (split {split!r}): {reason}"
        ) from error


Fields = Mapping[str, object]


class Role(StrEnum):
    """The speaker of a turn."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True)
class ConversationTurn:
    """One message; `learned` if it is a training target."""

    role: Role
    content: str
    learned: bool


@dataclass(frozen=True)
class DataConversation:
    """Turns in order; every assistant turn is learned, except an OpenAI message with `weight` 0."""

    turns: tuple[ConversationTurn, ...]

    @property
    def content(self) -> str:
        return "\0".join(f"{turn.role}\0{turn.content}" for turn in self.turns)


@dataclass(frozen=True)
class PlainText:
    """Text of which every token is learned."""

    text: str

    @property
    def content(self) -> str:
        return self.text


Document = DataConversation | PlainText


@dataclass(frozen=True)
class DataForm:
    """One record form."""

    name: str
    fields: tuple[tuple[str, ...], ...]  # a record has this form if it has every field of one of these
    read: Callable[[Fields, str], Document]

    def fits(self, record: Fields) -> bool:
        """Whether the record has the fields of this form."""
        return any(all(name in record for name in names) for names in self.fields)

    def __str__(self) -> str:
        return f"{self.name} ({' or '.join('+'.join(names) for names in self.fields)})"


ROLES = {
    Role.SYSTEM: ("system", "developer"),
    Role.USER: ("user", "human"),
    Role.ASSISTANT: ("assistant", "gpt", "chatgpt", "bot", "model", "bing", "bard"),
    Role.TOOL: ("tool", "function", "observation", "function_response"),
}
"""Names of each role in the data."""

_HALF = re.compile("[\ud800-\udfff]")
_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
_ASKED_AND_ANSWERED = "prompt completion, prompt response, question answer, instruction response, query response"
_QUESTION_AND_ANSWER = tuple(tuple(pair.split()) for pair in _ASKED_AND_ANSWERED.split(", "))


def documents(records: Iterable[SourceRecord]) -> Iterator[tuple[SourceRecord, str, Document]]:
    """Yield each record with its form's name and its document. The first record of a file sets the file's form."""
    form_of: dict[str, tuple[DataForm, str]] = {}
    for record in records:
        fields = _fields(record)
        if record.file not in form_of:
            fitting = next((form for form in FORMS if form.fits(fields)), None)
            if fitting is None:
                listed = f"{record.where} has the fields {_listed(fields)}"
                raise BadRecord(f"{listed}, which is no known form: {known_forms()}.")
            form_of[record.file] = (fitting, record.where)
        form, since = form_of[record.file]
        if not form.fits(fields):
            raise BadRecord(
                f"{record.where} has the fields {_listed(fields)}, but since {since} the form is {form}. "
                f"Put records of different forms into different files; the known forms are {known_forms()}."
            )
        document = form.read(fields, record.where)
        _check_characters(document, record.where)
        yield record, form.name, document


def known_forms() -> str:
    """Describe every form with its fields, for error messages."""
    return "; ".join(map(str, FORMS))


def _fields(record: SourceRecord) -> Fields:
    """Return the fields of a record that are not null (tables fill missing fields with nulls)."""
    if not isinstance(record.value, Mapping):
        raise BadRecord(
            f"{record.where} is {_kind(record.value)}, not an object with fields. The known forms are {known_forms()}."
        )
    return {str(name): value for name, value in record.value.items() if value is not None}


def _check_characters(document: Document, where: str) -> None:
    """Reject lone surrogates: JSON can escape them, but tokenizers cannot encode them."""
    found = _HALF.search(document.content)
    if found is not None:
        raise BadRecord(
            f"{where} has half a character, \\u{ord(found[0]):x}: a surrogate without the other one of its pair. "
            "Remove it, or write the whole character; a text was perhaps cut inside one."
        )


def _sharegpt(fields: Fields, where: str) -> DataConversation:
    name = "conversations" if "conversations" in fields else "conversation"
    turns = fields[name]
    if isinstance(turns, Sequence) and turns and all(isinstance(turn, str) for turn in turns):
        # LIMA: bare strings that alternate, the user first.
        roles = (Role.USER, Role.ASSISTANT)
        return DataConversation(
            tuple(ConversationTurn(roles[i % 2], str(turn), learned=i % 2 == 1) for i, turn in enumerate(turns))
        )
    if isinstance(turns, Sequence) and turns and isinstance(turns[0], Mapping) and "role" in turns[0]:
        return _conversation(name, ("role", "content"), fields, where)
    return _conversation(name, ("from", "value"), fields, where)


def _alpaca(fields: Fields, where: str) -> DataConversation:
    turns = _system(fields, where)
    for pair in _list(fields, "history", where):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise BadRecord(f"{where}: each entry of history must be a pair [question, answer]; got {_kind(pair)}.")
        turns += _asked(_string(pair[0], "history", where), _string(pair[1], "history", where))
    question, context = _text(fields, "instruction", where), _text(fields, "input", where)
    return DataConversation((*turns, *_asked(_joined(question, context), _text(fields, "output", where))))


def _question_and_answer(fields: Fields, where: str) -> DataConversation:
    asked, answered = next(names for names in _QUESTION_AND_ANSWER if all(name in fields for name in names))
    if isinstance(fields[asked], list) and isinstance(fields[answered], list):
        both = {"messages": [*_list(fields, asked, where), *_list(fields, answered, where)]}
        return _conversation("messages", ("role", "content"), both, where)
    question = _joined(_text(fields, asked, where), _text(fields, "context", where))
    return DataConversation((*_system(fields, where), *_asked(question, _text(fields, answered, where))))


def _conversation(name: str, keys: tuple[str, str], fields: Fields, where: str) -> DataConversation:
    who, what = keys
    turns = list(_system(fields, where))
    for number, turn in enumerate(_list(fields, name, where), start=1):
        place = f"{where}: turn {number} of {name}"
        if not isinstance(turn, Mapping):
            raise BadRecord(f"{place} must be an object with {who} and {what}; got {_kind(turn)}.")
        role = _ROLE_OF.get(str(turn.get(who)).lower())
        if role is None:
            raise BadRecord(f"{place} has {who}={turn.get(who)!r}; known are {', '.join(_ROLE_OF)}.")
        if turn.get("tool_calls") or turn.get("function_call"):
            raise BadRecord(f"{place} calls a tool, and calls are not learned. Write the call into {what} as text.")
        weight = turn.get("weight", 1)
        content = _content(turn.get(what), f"{place}: {what}")
        turns.append(ConversationTurn(role, content, learned=role is Role.ASSISTANT and weight != 0))
    return DataConversation(tuple(turns))


FORMS: tuple[DataForm, ...] = (
    DataForm("OpenAI messages", (("messages",),), partial(_conversation, "messages", ("role", "content"))),
    DataForm("ShareGPT", (("conversations",), ("conversation",)), _sharegpt),
    DataForm("alpaca", (("instruction", "output"),), _alpaca),
    DataForm("prompt and completion", _QUESTION_AND_ANSWER, _question_and_answer),
    DataForm(
        "plain text",
        (("text",), ("content",)),
        lambda fields, where: PlainText(_text(fields, "text" if "text" in fields else "content", where)),
    ),
)
"""Forms in the order they are tried: Alpaca's own files also have a `text` field."""


def _content(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
        raise BadRecord(f"{place} has a part that is no text; only text is learned.")
    raise BadRecord(f"{place} must be text; got {_kind(content)}.")


def _asked(question: str, answer: str) -> tuple[ConversationTurn, ConversationTurn]:
    return ConversationTurn(Role.USER, question, learned=False), ConversationTurn(Role.ASSISTANT, answer, learned=True)


def _system(fields: Fields, where: str) -> tuple[ConversationTurn, ...]:
    system = _text(fields, "system", where)
    return (ConversationTurn(Role.SYSTEM, system, learned=False),) if system else ()


def _joined(question: str, context: str) -> str:
    """Join question and context as the published loader does."""
    return f"{question}\n{context}" if context else question


def _text(fields: Fields, name: str, where: str) -> str:
    return _string(fields.get(name, ""), name, where)


def _string(value: object, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{where}: {name} must be text; got {_kind(value)}.")
    return value


def _list(fields: Fields, name: str, where: str) -> Sequence[object]:
    value = fields.get(name, ())
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise BadRecord(f"{where}: {name} must be a list; got {_kind(value)}.")
    return value


def _kind(value: object) -> str:
    """Return the JSON type name of a value."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", dict: "an object"}
    return names.get(type(value), "a list" if isinstance(value, Sequence) else type(value).__name__)


def _listed(fields: Fields) -> str:
    return ", ".join(fields) or "(none)"
