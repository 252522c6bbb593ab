"""The known record forms of training data, each parsed to a conversation or to plain text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from space_train.data.data_error import BadRecord
from space_train.data.data_source import SourceRecord

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
        """The text of all turns, for hashing."""
        return "\0".join(f"{turn.role}\0{turn.content}" for turn in self.turns)


@dataclass(frozen=True)
class PlainText:
    """Text of which every token is learned."""

    text: str

    @property
    def content(self) -> str:
        """The whole text, for hashing."""
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
_QUESTION_AND_ANSWER = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "response"),
    ("query", "response"),
)


def documents(records: Iterable[SourceRecord]) -> Iterator[tuple[SourceRecord, str, Document]]:
    """Yield each record with its form's name and its document. The first record of a file sets the file's form."""
    form_of: dict[str, tuple[DataForm, str]] = {}
    for record in records:
        fields = _fields(record)
        if record.file not in form_of:
            form_of[record.file] = (_form(fields, record.where), record.where)
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


def _form(fields: Fields, where: str) -> DataForm:
    for form in FORMS:
        if form.fits(fields):
            return form
    raise BadRecord(f"{where} has the fields {_listed(fields)}, which is no known form: {known_forms()}.")


def _check_characters(document: Document, where: str) -> None:
    """Reject lone surrogates: JSON can escape them, but tokenizers cannot encode them."""
    found = _HALF.search(document.content)
    if found is not None:
        raise BadRecord(
            f"{where} has half a character, \\u{ord(found[0]):x}: a surrogate without the other one of its pair. "
            "Remove it, or write the whole character; a text was perhaps cut inside one."
        )


def _messages(fields: Fields, where: str) -> DataConversation:
    return _conversation(fields, "messages", ("role", "content"), where)


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
        return _conversation(fields, name, ("role", "content"), where)
    return _conversation(fields, name, ("from", "value"), where)


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
        return _conversation(both, "messages", ("role", "content"), where)
    question = _joined(_text(fields, asked, where), _text(fields, "context", where))
    return DataConversation((*_system(fields, where), *_asked(question, _text(fields, answered, where))))


def _plain_text(fields: Fields, where: str) -> PlainText:
    return PlainText(_text(fields, "text" if "text" in fields else "content", where))


FORMS: tuple[DataForm, ...] = (
    DataForm("OpenAI messages", (("messages",),), _messages),
    DataForm("ShareGPT", (("conversations",), ("conversation",)), _sharegpt),
    DataForm("alpaca", (("instruction", "output"),), _alpaca),
    DataForm("prompt and completion", _QUESTION_AND_ANSWER, _question_and_answer),
    DataForm("plain text", (("text",), ("content",)), _plain_text),
)
"""Forms in the order they are tried: Alpaca's own files also have a `text` field."""


def _conversation(fields: Fields, name: str, keys: tuple[str, str], where: str) -> DataConversation:
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


def _content(content: object, place: str) -> str:
    """Return the text of a string or of OpenAI's list of text parts."""
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
