"""Constrained output: its fields in the OpenAI and TGI routes, and the check of a grammar before it is queued."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import Field, model_validator
from space_common.grammar import (
    AS_ANY_OF,
    MOST_CHARACTERS,
    TOO_MANY_WAYS,
    WHITESPACE,
    GrammarError,
    GrammarProcess,
    check_depth,
)

from space_router.api.json_schema import enforceable, without_annotations
from space_router.api.schema_parts import parts_to_try
from space_router.engine.request.request import Grammar
from space_router.engine.request.worker_messages import WorkerModelFacts
from space_router.errors import InvalidRequest, Overloaded
from space_router.http_server.body import Body, short_repr
from space_router.text import written_numbers

OLD_NAMES = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
"""Older fields of other servers, and their names in `structured_outputs`."""

# Strings, comments and regular expressions. An unclosed one extends to the end, so matching stays linear.
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*+"?|(?://|#)[^\n]*|/(?:\\.|[^/\\])++/?', re.DOTALL)
_JSON_RULE = re.compile(rf"{_LITERAL.pattern}|(?P<rule>%json\b\s*)", re.DOTALL)
_SPECIAL = re.compile(r"<[^<>\s]*>?")

Text = Annotated[str, Field(max_length=MOST_CHARACTERS)]


class JsonSchemaFormat(Body):
    """A named JSON schema; with `strict`, a keyword that cannot be enforced is refused."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: Annotated[str, Field(max_length=65536)] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What OpenAI's clients ask for; with `value`, what TGI's do."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchemaFormat | None = None
    value: Annotated[Any, Field(description="as in TGI's `grammar`: a JSON schema or a regular expression")] = None

    def grammar(self) -> Grammar | None:
        """Raises InvalidRequest."""
        if self.value is not None or self.type in ("json", "regex"):
            if self.type == "text" or self.json_schema is not None:
                raise InvalidRequest(
                    f"`response_format.value` goes with no `json_schema` and not with type {self.type}; give one.",
                    param="response_format",
                )
            return tgi_grammar(TgiGrammar.model_construct(type=self.type, value=self.value), "response_format")
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidRequest(
                "`response_format.json_schema` is required with the type json_schema.", param="response_format"
            )
        if self.type != "json_schema" and self.json_schema is not None:
            raise InvalidRequest(
                f"`response_format.json_schema` goes with the type json_schema only; got type {self.type}.",
                param="response_format",
            )
        if self.type == "text":
            return None
        form = self.json_schema
        if form is None or form.schema_ is None:
            return Grammar("json_object", "")
        return json_schema_grammar(form.schema_, "response_format", strict=bool(form.strict))


class StructuredOutputs(Body):
    """One of these, as vLLM names them."""

    json_: Annotated[dict[str, Any] | Text | None, Field(alias="json", description="a JSON schema")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=10_000)] | None = None
    grammar: Annotated[Text | None, Field(description="in the syntax of Lark, or GBNF")] = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None

    def wanted(self) -> Grammar | None:
        """Raises InvalidRequest."""
        names = ("json_", "json_object", "regex", "choice", "grammar")
        given = [name for name in names if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) > 1:
            named = " and ".join(f"`{name.rstrip('_')}`" for name in given)
            raise InvalidRequest(
                f"`structured_outputs` takes one of json, json_object, regex, choice and grammar; got {named}.",
                param="structured_outputs",
            )
        if self.json_ is not None:
            return json_schema_grammar(self.json_, "structured_outputs")
        if self.json_object:
            return Grammar("json_object", "")
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return Grammar("choice", orjson.dumps(self.choice).decode())
        return None if self.grammar is None else lark_grammar(self.grammar, "structured_outputs")

    @property
    def is_gbnf(self) -> bool:
        """Whether the grammar is in GBNF (`root ::= ...`), which `GrammarCheck.convert` turns into Lark."""
        return self.grammar is not None and "::=" in self.grammar


class GrammarFields(Body):
    """The fields that the OpenAI routes have in common."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_old_names(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for old in OLD_NAMES.keys() & value.keys():
                raise InvalidRequest(
                    f'`{old}` is not supported; send `structured_outputs`: {{"{OLD_NAMES[old]}": ...}}.',
                    param=old,
                    code="unsupported_parameter",
                )
        return value

    @property
    def grammar_field(self) -> str:
        """The request field that gives the grammar."""
        return "structured_outputs" if self.structured_outputs is not None else "response_format"

    def wanted_grammar(self) -> Grammar | None:
        """Return the grammar of the output, not checked yet, or None. Raises InvalidRequest."""
        asked = None if self.response_format is None else self.response_format.grammar()
        other = None if self.structured_outputs is None else self.structured_outputs.wanted()
        if asked is not None and other is not None:
            raise InvalidRequest(
                f"`response_format` ({self.response_format and self.response_format.type}) and `structured_outputs` "
                "both say what the output must be; give one.",
                param="structured_outputs",
            )
        return other if asked is None else asked


def json_schema_grammar(schema: dict[str, Any] | str, param: str, *, strict: bool = False) -> Grammar:
    """Return the grammar for a JSON schema, given as an object or as text; what it cannot enforce is left open and
    named in a warning, with `strict` refused. Raises InvalidRequest."""
    if isinstance(schema, str):
        try:
            schema = written_numbers.loads(schema)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"`{param}` holds a schema that is no JSON: {error.msg[:100]}.", param=param) from None
        if not isinstance(schema, dict):
            reason = f"`{param}` must hold a schema that is an object; got {short_repr(schema)}."
            raise InvalidRequest(reason, param=param)
    _check_depth(schema, param)
    _check_size(schema, param)
    kept = enforceable(schema, param, strict=strict)
    source = written_numbers.as_bytes(kept).decode()
    if len(source) > MOST_CHARACTERS:
        source = written_numbers.as_bytes(without_annotations(kept)).decode()
    return Grammar("json_schema", source)


def lark_grammar(text: str, param: str) -> Grammar:
    """Return the grammar for Lark's rules; of the schemas in it, behind `%json`, what can be enforced. Raises
    InvalidRequest."""
    written, around = "", ""  # all of it, and without the schemas
    place = 0
    for found in _JSON_RULE.finditer(text):
        if found["rule"] is None or found.start() < place:
            continue
        schema, end = _schema_at(text, found.end(), param)
        written += text[place : found.end()] + _guided(enforceable(schema, param, strict=False))
        around += text[place : found.end()]
        place = end
    around += text[place:]
    if special := _SPECIAL.search(_LITERAL.sub(" ", around)):
        raise InvalidRequest(
            f"`{param}` asks for the special token {short_repr(special[0])}; a grammar is of text. Leave it out.",
            param=param,
        )
    return Grammar("lark", written + text[place:])


_DECODER = json.JSONDecoder(parse_int=written_numbers.WrittenNumber.integer)


def _schema_at(text: str, place: int, param: str) -> tuple[dict[str, Any], int]:
    """Return the schema that is written here, and where it ends. Raises InvalidRequest."""
    try:
        schema, end = _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        schema, end = None, place
    if not isinstance(schema, dict) or "x-guidance" in schema:
        reason = f"`{param}` needs a JSON schema behind `%json`, an object without `x-guidance`."
        raise InvalidRequest(reason, param=param, code="invalid_grammar")
    _check_depth(schema, param)
    return schema, end


def _guided(schema: dict[str, Any]) -> str:
    """Return a schema as a rule of Lark's has it, read like one that is a grammar of its own."""
    return written_numbers.as_bytes(schema | {"x-guidance": {**AS_ANY_OF, "whitespace_pattern": WHITESPACE}}).decode()


def _check_size(schema: dict[str, Any], param: str) -> None:
    """Raise InvalidRequest for a schema that it would take seconds to go through, whatever of it is enforced."""
    if len(written_numbers.as_bytes(schema)) <= MOST_READ:
        return
    size = len(written_numbers.as_bytes(without_annotations(schema)))
    if size > MOST_READ:
        raise InvalidRequest(f"`{param}` has a schema of {size} bytes; at most {MOST_READ} are read.", param=param)


def _check_depth(schema: dict[str, Any], param: str) -> None:
    try:
        check_depth(schema)
    except GrammarError as error:
        raise InvalidRequest(f"`{param}` cannot be used: {error}", param=param, code="invalid_grammar") from None


class TgiGrammar(Body):
    """TGI's `grammar`; json_object is another name of json."""

    type: Literal["json", "json_object", "regex", "json_schema"]
    value: Any


def tgi_grammar(grammar: TgiGrammar, param: str = "grammar") -> Grammar:
    """Return the grammar of a TGI request, not checked yet. Raises InvalidRequest."""
    value = grammar.value
    if grammar.type == "regex":
        if not isinstance(value, str):
            raise InvalidRequest(f"`{param}.value` must be a regular expression; got {short_repr(value)}.", param=param)
        return Grammar("regex", value)
    if grammar.type == "json_schema" and isinstance(value, dict) and "schema" in value:
        value = value["schema"]
    if not isinstance(value, dict | str):
        raise InvalidRequest(f"`{param}.value` must be a JSON schema; got {short_repr(value)}.", param=param)
    return json_schema_grammar(value, param)


MOST_READ = 4 * MOST_CHARACTERS  # bytes of a schema, with what cannot be enforced but without its annotations
MOST_SECONDS = 5.0  # for one grammar; common ones take a few milliseconds
START_SECONDS = 30.0  # for the start of a process
NUM_CHECKERS = 2  # processes; they start with the first grammars
MOST_WAITING = 16  # grammars being checked or waiting; further ones raise Overloaded
MOST_KNOWN = 4096  # cached results
MOST_CONVERTED = 64  # cached grammars, each of a few hundred kilobytes at most

_TOO_SLOW = "It cannot be compiled"

T = TypeVar("T")
G = TypeVar("G")


class GrammarCheck:
    """Checks grammars. One that takes too much time or memory, or crashes the process, is rejected.

    reason = await GrammarCheck().why_not(Grammar("regex", "a("))
    """

    def __init__(self, *, most_seconds: float = MOST_SECONDS) -> None:
        self._most_seconds = most_seconds
        self._known: OrderedDict[bytes, str | None] = OrderedDict()  # results by digest, least recently used first
        self._converted: OrderedDict[bytes, str] = OrderedDict()  # GBNF in Lark's syntax, likewise
        self._idle: list[GrammarProcess] = []
        self._num_waiting = 0
        self._threads = ThreadPoolExecutor(NUM_CHECKERS, thread_name_prefix="grammar check")

    async def checked(self, facts: WorkerModelFacts, grammar: Grammar | None, param: str) -> Grammar | None:
        """Check that a grammar can be used, and return it. Raises InvalidRequest with the reason, Overloaded."""
        if grammar is None:
            return None
        if not facts.takes_grammars:
            raise InvalidRequest(
                f"`{param}` needs a checkpoint whose tokenizer.json says which bytes its tokens stand for, and this "
                "model's does not. Leave it out.",
                param=param,
                code="unsupported_parameter",
            )
        if len(grammar.source) > MOST_CHARACTERS:
            raise InvalidRequest(
                f"`{param}` has {len(grammar.source)} characters; at most {MOST_CHARACTERS} are taken.", param=param
            )
        reason = await self.why_not(grammar)
        if reason is not None:
            raise InvalidRequest(f"`{param}` cannot be used: {reason[:300]}", param=param, code="invalid_grammar")
        return grammar

    async def why_not(self, grammar: Grammar) -> str | None:
        """Return why this grammar cannot be used, or None if it can. Raises Overloaded."""
        name = _digest(grammar.kind, grammar.source)
        if name not in self._known:
            self._known[name] = await self._run(self._reason, grammar)
        return _recent(self._known, name, MOST_KNOWN)

    async def convert(self, fields: GrammarFields) -> None:
        """Turn a grammar in GBNF into Lark's syntax. Raises InvalidRequest, Overloaded."""
        given = fields.structured_outputs
        if given is None or given.grammar is None or not given.is_gbnf:
            return
        name = _digest("gbnf", given.grammar)
        if name not in self._converted:
            self._converted[name] = await self._run(self._lark, given.grammar)
        given.grammar = _recent(self._converted, name, MOST_CONVERTED)

    async def _run(self, function: Callable[[G], T], grammar: G) -> T:
        """Call the function in a thread. Raises Overloaded."""
        if self._num_waiting >= MOST_WAITING:
            message = f"{MOST_WAITING} grammars wait to be checked already, the most. Try again later."
            raise Overloaded(message, retry_after=self._most_seconds)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, grammar)
        finally:
            self._num_waiting -= 1

    def _reason(self, grammar: Grammar) -> str | None:
        """Return why this grammar cannot be used, or None if it can."""
        deadline = time.monotonic() + self._most_seconds
        if reason := self._error(grammar.kind, grammar.source, self._most_seconds):
            return reason
        for part in parts_to_try(grammar.kind, grammar.source):
            reason = self._error("json_schema", part, max(0.1, deadline - time.monotonic()))
            if reason is not None and reason.startswith((TOO_MANY_WAYS, _TOO_SLOW)):
                return reason
        return None

    def _error(self, kind: str, source: str, seconds: float) -> str | None:
        reasons = self._ask(lambda process: process.ask(kind, source, seconds))
        if reasons is None:
            return f"{_TOO_SLOW} within {self._most_seconds:g} s and the memory for it. Make it smaller."
        return reasons[0] if reasons else None

    def _lark(self, gbnf: str) -> str:
        try:
            found = self._ask(lambda process: process.lark_of_gbnf(gbnf, self._most_seconds))
        except GrammarError as error:
            raise InvalidRequest(
                f"`structured_outputs` holds a grammar that cannot be read. {error}", param="structured_outputs"
            ) from None
        if found is None:
            raise InvalidRequest(
                "`structured_outputs` holds a grammar in GBNF that cannot be read within "
                f"{self._most_seconds:g} s and the memory for it. Make it smaller.",
                param="structured_outputs",
                code="invalid_grammar",
            )
        return found

    def _ask(self, question: Callable[[GrammarProcess], T | None]) -> T | None:
        """Ask an idle or a new process; None if it does not answer. Runs in a thread."""
        answer = None
        with contextlib.suppress(IndexError):  # no process is idle
            answer = self._ask_process(self._idle.pop(), question)
        if answer is None:  # the used process may be out of memory or gone; retry in a new one
            answer = self._ask_process(GrammarProcess(), question, is_new=True)
        return answer

    def _ask_process(
        self, process: GrammarProcess, question: Callable[[GrammarProcess], T | None], *, is_new: bool = False
    ) -> T | None:
        """Return the answer, or None if there is none. The process's start is not part of the checking time."""
        with contextlib.ExitStack() as stack:
            stack.callback(process.close)
            if is_new and process.ask("regex", "a", START_SECONDS) is None:
                raise Overloaded("Grammars cannot be checked now. Try again later.", retry_after=START_SECONDS)
            try:
                answer = question(process)
            except GrammarError:
                stack.pop_all()
                self._idle.append(process)
                raise
            if answer is not None:
                stack.pop_all()
                self._idle.append(process)
        return answer


def _digest(kind: str, source: str) -> bytes:
    return blake2b(f"{kind} {source}".encode(errors="surrogatepass"), digest_size=16).digest()


def _recent(cache: OrderedDict[bytes, T], name: bytes, most: int) -> T:
    """Return an entry, which becomes the last that is dropped; those beyond `most` are."""
    cache.move_to_end(name)
    while len(cache) > most:
        cache.popitem(last=False)
    return cache[name]
