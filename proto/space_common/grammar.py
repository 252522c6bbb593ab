"""Grammars of structured output: the form that the router checks and the worker compiles, and their limits.

Every kind becomes one grammar in Lark's syntax, as llguidance reads it. A grammar constrains the bytes of an output and
nothing else: the allowed next ids depend on the text so far, never on its tokenization.

The library is imported only to compile a grammar: a worker without it serves all other requests.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any

from space_common.process import PipedProcess, module_command

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_CHARACTERS = 256 * 1024  # maximum length of a source

MOST_DEPTH = 64
"""Maximum nesting of lists and objects in a JSON schema, and of brackets elsewhere: the library's parsers recurse."""

MOST_MEMORY = 2 * 1024**3  # maximum bytes of memory for checking a grammar

LIMITS: dict[str, Any] = {
    "max_items_in_row": 6_144,  # about 1,500 optional properties of one object: 20 ms at each of its keys
    "initial_lexer_fuel": 1_000_000,  # about 20 ms of compiling
    "step_lexer_fuel": 200_000,  # about 15 ms at one position of an output, the first time it reaches that state
    "step_max_items": 50_000,  # about 3 ms at one position of an output
    "max_lexer_states": 50_000,  # about 100 MB per sequence
    "max_grammar_size": 500_000,
}
"""Beyond these limits the grammar is refused, or only the sequence that reached them fails."""

WHITESPACE = r" |\n[ \t]{0,40}"
"""Between the parts of a JSON text: nothing, a space, or a line break and indentation. Bounded, so that a model cannot
repeat it forever."""

AS_ANY_OF = {"coerce_one_of": True}  # the library does not enforce that just one branch of `oneOf` matches

_MOST_IDS = 1 << 20

_OPTIONS = '%llguidance {"no_forcing": true}'  # forced text would have to be tokenized exactly as the tokenizer does


TOO_MANY_WAYS = "It has too many ways to go on at one place"  # how that error begins


class GrammarError(ValueError):
    """A grammar cannot be used; the message says why in one line."""


def lark(kind: str, source: str) -> str:
    """Return the grammar in Lark's syntax. Raises GrammarError.

    `kind`: json_schema, json_object, regex, choice or lark; `worker.proto` defines `source` for each.
    """
    if len(source) > MOST_CHARACTERS:
        raise GrammarError(f"It has {len(source)} characters; at most {MOST_CHARACTERS} are taken.")
    write = _KINDS.get(kind)
    if write is None:
        raise GrammarError(f"There is no kind of grammar named {kind[:40]!r}; there are {', '.join(_KINDS)}.")
    return f"{write(source)}\n{_OPTIONS}\n"


def compile_grammar(tokenizer: LLTokenizer, kind: str, source: str) -> LLMatcher:
    """Return a matcher at the start of an output. Raises GrammarError if the grammar is invalid or matches no text."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**LIMITS, verbose_errors=False)
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark(kind, source)), log_level=0, limits=limits)
    matcher.compute_bitmask()
    if matcher.is_error() and is_stuck(matcher):
        raise GrammarError("No text can be made by it.")
    if matcher.is_error():
        raise GrammarError(reason(matcher.get_error(), places=kind == "lark"))
    return matcher


class GrammarProbe:
    """Compiles grammars, and goes some way into their texts, to know the limits that are reached only there: one with
    too many ways on reaches them where an object begins, one with wide patterns within a text."""

    def __init__(self, tokens: Sequence[bytes], special: Collection[int]) -> None:
        """`tokens`: their texts; the last is an end that is never sampled."""
        self.tokenizer = tokenizer_of([*tokens], special)
        self._letters = {text: id_ for id_, text in enumerate(tokens) if len(text) == 1}

    def check(self, kind: str, source: str) -> None:
        """Raises GrammarError if the grammar cannot be compiled, or no text of it can be made within the limits."""
        matcher = compile_grammar(self.tokenizer, kind, source)
        mask = matcher.compute_bitmask()
        beginnings = [self._letters[text] for text in _BEGINNINGS if text in self._letters]
        for id_ in [id_ for id_ in beginnings if _allows(mask, id_)]:
            behind = matcher.deep_copy()
            if behind.consume_token(id_):
                behind.compute_bitmask()
            if behind.is_error() and not is_stuck(behind):
                raise GrammarError(reason(behind.get_error()))
        deadline = time.monotonic() + _WALK_SECONDS
        self._walk(matcher, kind, source, source, deadline)
        for pattern in _wide_patterns(kind, source):
            alone = json.dumps({"type": "string", "pattern": pattern})
            try:
                matcher = compile_grammar(self.tokenizer, "json_schema", alone)
                self._walk(matcher, "json_schema", alone, _NO_LETTERS.sub("", pattern), deadline)
            except GrammarError as error:
                raise GrammarError(f"The pattern {pattern[:100]!r} cannot be followed: {error}") from None

    def _walk(self, matcher: LLMatcher, kind: str, source: str, letters: str, deadline: float) -> None:
        """Go along a text, by these letters if it can. Raises GrammarError at a limit that a matcher compiled anew
        reaches at the same place."""
        matcher, chance, ids = matcher.deep_copy(), Random(0), list[int]()
        likely = [id_ for text, id_ in self._letters.items() if text.isalnum() and text.decode("latin-1") in letters]
        while len(ids) < _WALK_LENGTH and time.monotonic() < deadline:
            mask = matcher.compute_bitmask()
            if is_used_up(matcher):
                matcher = compile_grammar(self.tokenizer, kind, source)
                matcher.try_consume_tokens(ids)
                mask = matcher.compute_bitmask()
            if matcher.is_error():
                if is_stuck(matcher):
                    return
                raise GrammarError(reason(matcher.get_error()))
            allowed = [id_ for id_ in likely if _allows(mask, id_)]
            allowed = allowed or [id_ for id_ in self._letters.values() if _allows(mask, id_)]
            if not allowed:
                return
            ids.append(chance.choice(allowed))
            matcher.consume_token(ids[-1])


_BEGINNINGS = [bytes([byte]) for byte in b'{["-1tfn']  # of the kinds of JSON values
_WALK_LENGTH, _WALK_SECONDS = 100, 1.0
"""Positions of a text that are tried, and the time limit for all texts of a grammar."""
_JSON_RULE = re.compile(r"%json\s*(?=\{)")
_REPEATS = re.compile(r"[*+}]")
_NO_LETTERS = re.compile(r"\{[\d,]*\}|\\[pP]\{[^}]*\}|\\u[0-9A-F]{4}|\\.")
_MANY_REPEATS = 2  # of a pattern; one with fewer has few states


def _allows(mask: bytes, id_: int) -> bool:
    return bool(mask[id_ >> 3] >> (id_ & 7) & 1)


def schemas_of(kind: str, source: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON schemas of a grammar: the whole of a `json_schema`, each `%json` of a `lark`; none of others."""
    places = [found.end() for found in _JSON_RULE.finditer(source)] if kind == "lark" else [0]
    for place in places if kind in ("lark", "json_schema") else ():
        try:
            schema, _ = json.JSONDecoder().raw_decode(source, place)
        except (ValueError, RecursionError):
            continue
        if isinstance(schema, dict):
            yield schema


def _wide_patterns(kind: str, source: str) -> list[str]:
    """Return the patterns that repeat several parts in a grammar's schemas, each once."""
    found: dict[str, None] = {}
    waiting: list[Any] = [*schemas_of(kind, source)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            names = value.get("patternProperties")
            for pattern in (value.get("pattern"), *(names if isinstance(names, dict) else ())):
                if isinstance(pattern, str) and len(_REPEATS.findall(pattern)) >= _MANY_REPEATS:
                    found.setdefault(pattern)
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return list(found)


def is_used_up(matcher: LLMatcher) -> bool:
    """Return whether the matcher failed because its lexer has too many states. The library keeps them in common for
    all copies of a matcher, and they fail alike; one that is compiled anew need not."""
    return matcher.is_error() and matcher.get_error().startswith("lexer error")


def is_stuck(matcher: LLMatcher) -> bool:
    """Return whether the matcher failed because no token is allowed, and not because of a limit."""
    return matcher.get_error().startswith("NoExtension")


def reason(error: str, *, places: bool = False) -> str:
    """Return the library's error in one line; with `places`, including its position in the grammar."""
    lines = [line.strip() for line in error.strip().splitlines()] or ["no reason is known"]
    if found := re.search(r"Current row has (\d+) items; max is (\d+)", error):
        return (
            f"{TOO_MANY_WAYS} ({found[1]}, at most {found[2]}): an object may have about "
            f"{int(found[2]) // 4} optional properties, and so may all alternatives together. Require some or drop some"
        )
    if "too many expressions" in error or "too many states" in error:
        return f"a regular expression in it can be matched in too many ways ({lines[0].removeprefix('lexer error: ')})"
    if lines[0].startswith("panic"):
        return "the library cannot read it"
    last = [line for line in lines[1:] if line.startswith("error: ")]
    line = " ".join([lines[0], *last[-1:]]).removeprefix("at ")
    return re.sub(r"^(\d+)\((\d+)\): ", r"line \1, column \2: " if places else "", line)[:300]


def _json_schema(source: str) -> str:
    try:
        schema = json.loads(source, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"It is no JSON: {str(error)[:100]}.") from None
    if not isinstance(schema, dict):
        raise GrammarError(f"A JSON schema is an object; this is {type(schema).__name__}.")
    if "x-guidance" in schema:
        raise GrammarError("`x-guidance` is not taken in a schema.")
    check_depth(schema)
    return f"start: %json {json.dumps(schema | {'x-guidance': {**AS_ANY_OF, 'whitespace_pattern': WHITESPACE}})}"


def _json_object(source: str) -> str:
    return _json_schema('{"type": "object"}')


def _regex(source: str) -> str:
    from llguidance import regex_to_lark

    _check_brackets(source)
    return f"start: /{regex_to_lark(source, 'dws')}/" if source else 'start: ""'


def _choice(source: str) -> str:
    try:
        texts = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"It is no JSON: {str(error)[:100]}.") from None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise GrammarError("Choices are a list of at least one string.")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))


def _lark(source: str) -> str:
    _check_brackets(source)
    return source


def lark_of_gbnf(source: str) -> str:
    """Return the rules of GBNF in Lark's syntax. Raises GrammarError. Its time grows with the square of the length of
    some sources.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    if len(source) > MOST_CHARACTERS:
        raise GrammarError(f"It has {len(source)} characters; at most {MOST_CHARACTERS} are taken.")
    try:
        return any_to_lark(source)
    except Exception as error:  # the converter raises errors of many types
        raise GrammarError(f"It is no GBNF: {str(error)[:300]}") from None


_KINDS: dict[str, Callable[[str], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "lark": _lark,
}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def check_depth(value: Any) -> None:
    """Raise GrammarError if lists and objects are nested more than MOST_DEPTH deep."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise GrammarError(f"It is nested more than {MOST_DEPTH} deep.")


def _check_brackets(source: str) -> None:
    depth = 0
    for character in source:
        if character in "([{":
            depth += 1
            if depth > MOST_DEPTH:
                raise GrammarError(f"Its brackets are nested more than {MOST_DEPTH} deep.")
        elif character in ")]}":
            depth = max(0, depth - 1)


def main() -> None:
    """Check grammars, one JSON line each, for a router or a worker: reads [kind, source], writes null or the error.

    Of the kind gbnf it writes [the grammar in Lark's syntax] or the error. Matches single bytes, until a line
    {"tokens": [hexadecimal, ...], "special": [id, ...]} sets the tokens to use.

    Runs as a separate process, because a grammar can take long, use much memory, or overflow a stack.
    """
    _bound_memory()
    known: GrammarProbe | None = None
    for line in sys.stdin.buffer:
        said = json.loads(line)
        try:
            if isinstance(said, dict):
                known = GrammarProbe([*map(bytes.fromhex, said["tokens"])], said["special"])
            else:
                kind, source = said
                if kind == "gbnf":
                    _answer([lark_of_gbnf(source)])
                    continue
                special = _special_ids(source) if known is None and kind == "lark" else frozenset()
                (known or _probe_of_bytes(special)).check(kind, source)
            verification = None
        except GrammarError as error:
            verification = str(error)
        _answer(verification)


def _answer(value: object) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


def _special_ids(source: str) -> frozenset[int]:
    """Return the special ids that the grammar names by number."""
    return frozenset(min(int(number), _MOST_IDS) for number in re.findall(r"<\[(\d{1,9})\]>", source))


def _bytes_and(special: frozenset[int]) -> LLTokenizer:
    """Return a tokenizer of single bytes and these special ids."""
    return _probe_of_bytes(special).tokenizer


@lru_cache(maxsize=8)
def _probe_of_bytes(special: frozenset[int]) -> GrammarProbe:
    first = max(special, default=-1) + 1  # the bytes follow the special ids
    tokens = [b"<special>" if id_ in special else b"" for id_ in range(first)]
    tokens += [bytes([byte]) for byte in range(256)]
    return GrammarProbe([*tokens, b"<end>"], special)


def tokenizer_of(tokens: list[bytes], special: Collection[int]) -> LLTokenizer:
    """Return llguidance's tokenizer for these token texts; the last is an end token that is never sampled.

    Raises ImportError if the library is not installed.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(TokenTable(tokens, special)))


class TokenTable:
    """The tokens in the form that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: Collection[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError("Text is never cut into ids here.")


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:  # not available on this system
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, hard))


class GrammarProcess:
    """Tests one grammar after the other, over single bytes or `with_tokens`. The process ends with this object.

    with closing(GrammarProcess()) as process:
        process.ask("regex", "a(", 5.0)
    """

    def __init__(self) -> None:
        self._process = PipedProcess(module_command("space_common.grammar"))
        self.close = self._process.close

    @property
    def pid(self) -> int:
        return self._process.pid

    def with_tokens(self, tokens: Sequence[bytes], special: Collection[int], seconds: float) -> bool:
        """Use these tokens for all further grammars; the last is EOS. Returns False after `seconds`."""
        message = {"tokens": [token.hex() for token in tokens], "special": sorted(special)}
        return self._exchange(message, seconds) is not None

    def ask(self, kind: str, source: str, seconds: float) -> list[str] | None:
        """Return a list with the grammar's error, empty if it is valid.

        Returns None after `seconds` or if the process has ended; then this object must not be used again.
        """
        answer = self._exchange([kind, source], seconds)
        if answer is None:
            return None
        error: str | None = json.loads(answer)
        return [] if error is None else [error]

    def lark_of_gbnf(self, source: str, seconds: float) -> str | None:
        """Return the grammar in Lark's syntax. Raises GrammarError. Returns None as `ask` does."""
        answer = self._exchange(["gbnf", source], seconds)
        if answer is None:
            return None
        found: list[str] | str = json.loads(answer)
        if isinstance(found, str):
            raise GrammarError(found)
        return found[0]

    def _exchange(self, said: object, seconds: float) -> bytes | None:
        deadline = time.monotonic() + seconds
        if not self._process.send(json.dumps(said).encode() + b"\n", seconds):
            return None
        with contextlib.suppress(EOFError):
            return self._process.receive(lambda received: received.find(b"\n") + 1, deadline - time.monotonic())
        return None


if __name__ == "__main__":
    main()
