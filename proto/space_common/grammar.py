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
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from space_common.process import PipedProcess, module_command

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_CHARACTERS = 256 * 1024  # maximum length of a source

MOST_DEPTH = 64
"""Maximum nesting of lists and objects in a JSON schema, and of brackets elsewhere: the library's parsers recurse."""

MOST_MEMORY = 2 * 1024**3  # maximum bytes of memory for checking a grammar

LIMITS: dict[str, Any] = {
    "max_items_in_row": 4_096,  # about 1,000 optional properties of one object
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
    mask = matcher.compute_bitmask()
    if matcher.is_error() and is_stuck(matcher):
        raise GrammarError("No text can be made by it.")
    if matcher.is_error():
        raise GrammarError(reason(matcher.get_error(), places=kind == "lark"))
    # A grammar that exceeds the limits mostly does so at the first two positions.
    second = matcher.deep_copy()
    first = next(8 * place + (byte & -byte).bit_length() - 1 for place, byte in enumerate(mask) if byte)
    if first != tokenizer.eos_token and second.consume_token(first):
        second.compute_bitmask()
        if second.is_error() and not is_stuck(second):
            raise GrammarError(reason(second.get_error()))
    return matcher


def is_stuck(matcher: LLMatcher) -> bool:
    """Return whether the matcher failed because no token is allowed, and not because of a limit."""
    return matcher.get_error().startswith("NoExtension")


def reason(error: str, *, places: bool = False) -> str:
    """Return the library's error in one line; with `places`, including its position in the grammar."""
    lines = [line.strip() for line in error.strip().splitlines()] or ["no reason is known"]
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
    known: LLTokenizer | None = None
    for line in sys.stdin.buffer:
        said = json.loads(line)
        try:
            if isinstance(said, dict):
                known = tokenizer_of([*map(bytes.fromhex, said["tokens"])], said["special"])
            else:
                kind, source = said
                if kind == "gbnf":
                    _answer([lark_of_gbnf(source)])
                    continue
                single = _bytes_and(_special_ids(source) if kind == "lark" else frozenset()) if known is None else known
                compile_grammar(single, kind, source)
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


@lru_cache(maxsize=8)
def _bytes_and(special: frozenset[int]) -> LLTokenizer:
    """Return a tokenizer of single bytes and these special ids."""
    first = max(special, default=-1) + 1  # the bytes follow the special ids
    tokens = [b"<special>" if id_ in special else b"" for id_ in range(first)]
    tokens += [bytes([byte]) for byte in range(256)]
    return tokenizer_of([*tokens, b"<end>"], special)


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
