"""Takes a schema as a request would, and makes random texts under it as a worker would."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema_rs
from space_common.grammar import GrammarError, GrammarProcess, compile_grammar
from space_common.json_places import JsonPlaces
from space_router.api.grammar_fields import json_schema_grammar
from space_router.api.json_schema import enforceable
from space_router.errors import InvalidRequest
from space_server.grammar import GrammarState, TokenVocabulary, ids_of

EOS, FIRST = 0, 1
PIECES = [
    b'": ',
    b'","',
    b'", "',
    b"true",
    b"false",
    b"null",
    b"10",
    b'": "',
    b'": [',
    b'": {',
    b"}, {",
    b"ab",
    b'"}',
    b'"a"',
]
VOCABULARY = TokenVocabulary([b"", *(bytes([byte]) for byte in range(256)), *PIECES], {EOS: b"<eos>"})
_LIKELY = frozenset(FIRST + byte for byte in b'{}[]",:0123abcAB-. ') | frozenset(range(257, 257 + len(PIECES)))
_ENDING = [FIRST + byte for byte in b'}]"0a']
NUM_FREE, NUM_MOST = 160, 900  # tokens before a text is brought to its end, and before it is given up
SECONDS = 5.0  # for one grammar, as in the router


class _Process(threading.local):
    """Each thread's process that tries grammars."""

    def __init__(self) -> None:
        self._process: GrammarProcess | None = None

    def known(self) -> GrammarProcess:
        if self._process is None:
            self._process = GrammarProcess()
            self._process.ask("regex", "a", 60.0)  # its start is no part of a grammar's time
        return self._process

    def end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


_process = _Process()


@dataclass
class Taken:
    """A schema that is taken. `open`: the keywords that are named in the warning."""

    enforced: dict[str, Any]
    open: tuple[str, ...]
    source: str


@dataclass
class Outcome:
    """What became of one schema."""

    refusal: str | None = None
    open: tuple[str, ...] = ()
    num_texts: int = 0
    num_unfinished: int = 0
    failures: list[str] = field(default_factory=list)  # texts that the worker would have failed with
    broken: list[str] = field(default_factory=list)  # texts that break what is enforced
    num_open_broken: int = 0


def taken(schema: Mapping[str, Any], process: GrammarProcess) -> Taken | str | None:
    """Return what is enforced, or why the schema is refused; None: the process is of no use any more."""
    try:
        source = json_schema_grammar(dict(schema), "response_format").source
    except InvalidRequest as error:
        return str(error)
    reasons = process.ask("json_schema", source, SECONDS)
    if reasons is None:
        return None
    return reasons[0] if reasons else Taken(json.loads(source), _open_keywords(schema), source)


def _open_keywords(schema: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        enforceable(schema, "response_format", strict=True)
    except InvalidRequest as error:
        named = str(error).partition("asks for ")[2].partition(", which cannot")[0]
        return tuple(re.findall(r"`([^`]+)`", named))
    return ()


def texts(source: str, count: int, seed: int) -> Iterator[str | Exception]:
    """Make texts under a schema: complete ones, "" for one that does not end, or the failure that a request has."""
    compiled = compile_grammar(VOCABULARY.tokenizer, "json_schema", source)
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        state = GrammarState(
            VOCABULARY, compiled.deep_copy, eos_ids=[EOS], json_places=JsonPlaces(),
            has_patterns="patternProperties" in source,
        )  # fmt: skip
        output: list[int] = []
        yield _text(state, output, chance)


def _text(state: GrammarState, output: list[int], chance: random.Random) -> str | Exception:
    while len(output) < NUM_MOST:
        possible = state.possible().ids
        ids = [] if possible is None else ids_of(possible)
        if not ids:
            return GrammarError(f"{state.trouble}, behind {_bytes(output)[-60:]!r}")
        id_ = _chosen(ids, chance, ends=len(output) > NUM_FREE)
        if id_ == EOS:
            return _bytes(output).decode()
        state.advance([id_])
        output.append(id_)
    return ""


def _bytes(output: list[int]) -> bytes:
    return b"".join(VOCABULARY.texts[id_] for id_ in output)


def _chosen(ids: list[int], chance: random.Random, *, ends: bool) -> int:
    if ends:
        found = [id_ for id_ in (EOS, *_ENDING) if id_ in ids]
        if found and chance.random() < 0.9:
            return found[0]
    likely = [id_ for id_ in ids if id_ in _LIKELY or id_ == EOS]
    return chance.choice(likely if likely and chance.random() < 0.9 else ids)


def tried(schema: Mapping[str, Any], count: int, seed: int = 0) -> Outcome:
    """Take a schema, make `count` texts under it, and validate them."""
    found = taken(schema, _process.known())
    if found is None:
        _process.end()
        return Outcome(refusal=f"It cannot be compiled within {SECONDS:g} s and the memory for it.")
    if isinstance(found, str):
        return Outcome(refusal=found)
    outcome = Outcome(open=found.open)
    enforced = _validator(_as_any_of(found.enforced) if "oneOf" in found.open else found.enforced)
    whole = _validator(dict(schema))
    for text in texts(found.source, count, seed):
        outcome.num_texts += 1
        if isinstance(text, Exception):
            outcome.failures.append(str(text))
        elif not text:
            outcome.num_unfinished += 1
        else:
            value = json.loads(text, object_pairs_hook=_distinct, parse_float=_finite)
            if enforced is not None and not enforced.is_valid(value):
                outcome.broken.append(text)
            elif whole is not None and not whole.is_valid(value):
                outcome.num_open_broken += 1
    return outcome


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"an object repeats a key: {pairs}")
    return found


def _finite(written: str) -> float:
    """Return the number, or the largest of its sign: JSON has no infinity, which a number like 1e400 would become."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(written)))


def _validator(schema: dict[str, Any]) -> Any:
    """Return a validator, or None if it cannot use the schema."""
    try:
        return jsonschema_rs.validator_for(schema, validate_formats=True, offline=True)
    except (ValueError, jsonschema_rs.ReferencingError):
        return None


def _as_any_of(value: Any) -> Any:
    """Return a schema with `oneOf` as the grammar takes it where that is left open."""
    if isinstance(value, dict):
        return {"anyOf" if key == "oneOf" else key: _as_any_of(inner) for key, inner in value.items()}
    return [_as_any_of(inner) for inner in value] if isinstance(value, list) else value
