"""Grammars, compiled beside the steps: the bytes of each id, the state of an output, and the ids that may come next."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from space_common.files import read_text
from space_common.grammar import (
    GrammarError,
    GrammarProcess,
    compile_grammar,
    is_stuck,
    is_used_up,
    reason,
    tokenizer_of,
)
from space_common.json_places import JsonPlaces
from space_common.tokenizer.byte_level import byte_letters
from space_common.tokenizer.special_tokens import further_tokens, named_tokens, token_text
from space_common.tokenizer.tokenizer_files import TokenizerFileError, tokenizer_json
from space_common.worker.errors import GRAMMAR, GRAMMARS_BUSY
from space_kernels.sampling.sampling_params import IdBits
from space_model.checkpoint.checkpoint import read_object
from space_model.model_error import ModelError
from space_proto import worker_pb2 as pb

from space_server.drafts import Forced
from space_server.machine.threads import DeepStackExecutor
from space_server.repeated_keys import KeyState, KeyTokens, RepeatedKeys

if TYPE_CHECKING:
    from llguidance import LLMatcher

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class NoVocabulary(Exception):
    """The bytes of the checkpoint's ids are unknown; the message says why."""


def bits_of(ids: Iterable[int], num_ids: int) -> IdBits:
    """Return a bit set of ids. [ceil(V / 32)], V = num_ids"""
    found = np.zeros(-(-num_ids // 32) * 32, dtype=np.bool_)
    found[[*ids]] = True
    return np.packbits(found, bitorder="little").view(np.int32)


def ids_of(bits: IdBits) -> list[int]:
    """Return the ids in a bit set, ascending."""
    return [int(id_) for id_ in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))]


def _each_id(bits: IdBits) -> Iterator[int]:
    """Return the ids in a bit set one after the other, for a search that ends early."""
    for word in np.flatnonzero(bits):
        row = int(bits[word])
        yield from (32 * int(word) + place for place in range(32) if row >> place & 1)


class TokenVocabulary:
    """The bytes of each id; none for ids without text: special ids, masks, padding rows of the output head. It equals
    the router's detokenization, so clients get what the grammar allows. A grammar can name a special id by number."""

    def __init__(self, texts: Sequence[bytes], special: Mapping[int, bytes] | None = None) -> None:
        """`texts`: of each row of the output head; `special`: names of special ids that a grammar may use."""
        special = special or {}
        self.texts = texts
        self.possible = bits_of((id_ for id_, text in enumerate(texts) if text or id_ in special), len(texts))
        by_text = {text: id_ for id_, text in enumerate(texts) if len(text) == 1}
        marks = [by_text[mark] for mark in (b'"', b"}", b"]", b":", b",", b"{", b"[", b"1") if mark in by_text]
        self.letters = [*marks, *sorted(set(by_text.values()).difference(marks))]  # ids of one byte, brackets first
        table = [special.get(id_, text) for id_, text in enumerate(texts)]
        self.tokens = [*table, b"<end>"], frozenset(special)
        """Those of the tokenizer: with an end of its own behind the ids, and which of them are special."""
        self.tokenizer = tokenizer_of(*self.tokens)
        self.key_tokens = KeyTokens.of(texts, special)

    @property
    def size(self) -> int:
        """Rows of the output head."""
        return len(self.texts)

    @classmethod
    def read(cls, folder: Path, num_ids: int, never: Collection[int] = ()) -> TokenVocabulary:
        """Read a folder's tokenizer files; ids in `never` are in no grammar. Raises NoVocabulary, ImportError."""
        content = _content(folder)
        kinds = _decoder_kinds(content)
        named = _special_texts(folder)
        try:
            tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise NoVocabulary(f"tokenizer.json cannot be read: {str(error)[:200]}") from error
        added = tokenizer.get_added_tokens_decoder()
        letters = byte_letters() if "ByteLevel" in kinds else None
        texts, special = [b""] * num_ids, {}
        for token, id_ in tokenizer.get_vocab(with_added_tokens=True).items():
            if id_ >= num_ids or id_ in never:
                continue
            if (id_ in added and added[id_].special) or token in named:
                special[id_] = token.encode()
            else:
                texts[id_] = added[id_].content.encode() if id_ in added else _text(token, letters)
        return cls(texts, special)


def _content(folder: Path) -> str:
    try:
        file = tokenizer_json(folder)
        if file is None:
            raise NoVocabulary("the checkpoint has no tokenizer.json")
        return read_text(file)
    except TokenizerFileError as error:
        raise NoVocabulary(str(error)) from error
    except (OSError, ValueError) as error:
        raise NoVocabulary(f"tokenizer.json cannot be read: {str(error)[:200]}") from error


def _special_texts(folder: Path) -> set[str | None]:
    """Return special tokens from the files beside tokenizer.json, which need not list them."""
    names = ("tokenizer_config.json", "special_tokens_map.json")
    try:
        config, special_map = (read_object(file) if (file := folder / name).is_file() else {} for name in names)
    except ModelError as error:
        raise NoVocabulary(str(error)) from error
    return set(map(token_text, [*named_tokens(config, special_map).values(), *further_tokens(config, special_map)]))


def _decoder_kinds(content: str) -> set[str]:
    """Return the decoders of tokenizer.json. Raises NoVocabulary for one whose tokens are not bytes."""
    try:
        decoder = json.loads(content).get("decoder")
    except (ValueError, AttributeError) as error:
        raise NoVocabulary(f"tokenizer.json cannot be read: {str(error)[:200]}") from error
    kinds = _kinds(decoder)
    if not kinds & {"ByteLevel", "Metaspace", "Replace", "ByteFallback"}:
        raise NoVocabulary(
            f"tokenizer.json has the decoder {sorted(kinds) or 'null'}, neither byte-level nor SentencePiece's"
        )
    return kinds


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*(_kinds(part) for part in decoder["decoders"]))
    return {decoder["type"]}


def _text(token: str, letters: dict[str, int] | None) -> bytes:
    if letters is not None:
        try:
            return bytes(letters[letter] for letter in token)
        except KeyError:
            return token.encode()
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()


_FEW_WORDS = 8  # bit-set words with ids above which the text is not checked for being forced


@dataclass(frozen=True, slots=True)
class Possible:
    """The ids that may stand at one position of an output."""

    ids: IdBits | None  # None: unreachable, because the tail before it is impossible
    only_end: bool = False  # the text is complete and can only end

    def __contains__(self, id_: int) -> bool:
        return self.ids is None or bool(self.ids[id_ >> 5] >> (id_ & 31) & 1)


_UNASKED = Possible(None)

MOST_RENEWED = 16  # times that a sequence gets a new lexer

SLOW_SECONDS = 0.02
"""Processor time of one position from which it counts as slow; most take less than a millisecond."""
MOST_SLOW_SECONDS = 2.0
"""Longest that the slow positions of a sequence may take together: other sequences wait meanwhile."""


class GrammarState:
    """Follows a sequence's output, and looks ahead behind drafts.

    output (final)          tail (hypothetical)
    [0 ............. n)     [n ........ n + t)      the matcher stands behind both, and is rolled back as needed

    What may come next depends only on the bytes before. A position where the library fails, or where no id can follow,
    has no possible ids; that matters only if the output reaches it.
    """

    def __init__(
        self,
        vocabulary: TokenVocabulary,
        fresh: Callable[[], LLMatcher],
        *,
        eos_ids: Collection[int],
        stop_ids: Collection[int] = (),
        ignores_eos: bool = False,
        output: Sequence[int] = (),
        json_places: JsonPlaces | None = None,
        has_patterns: bool = False,
        renewed: Callable[[], LLMatcher | None] = lambda: None,
    ) -> None:
        """`fresh`: this state's own matcher, at the beginning. EOS ids, and stop ids without text, are possible where
        the text may end; with `ignores_eos`, EOS ids only where it must. `output`: ids emitted already. `json_places`:
        where objects stand, whose keys are kept apart; None: nowhere. `has_patterns`: the grammar may allow so few
        keys that all of those that begin alike are in an object. `renewed`: a matcher with a new lexer, for when the
        one that matchers have in common has too many states; it returns None if there is none in time."""
        self._vocabulary, self._fresh, self._renewed = vocabulary, fresh, renewed
        self._num_renewed = 0
        self._keys = None if json_places is None else RepeatedKeys(vocabulary.key_tokens, json_places)
        self._has_patterns = has_patterns
        self._key_states: list[KeyState] = []  # behind the output, and behind each id of the tail
        if self._keys is not None:
            self._key_states.append(self._keys.start)
        stops = {id_ for id_ in stop_ids if not vocabulary.texts[id_]}
        self._end_ids = stops.union(eos_ids)
        self._end_bits = bits_of(self._end_ids, vocabulary.size)  # where the text must end
        self._stop_bits = bits_of(stops, vocabulary.size) if ignores_eos else self._end_bits  # where it may
        self._text_bits = vocabulary.possible & ~self._end_bits
        self._matcher = fresh()
        self._output: list[int] = []
        self._tail: list[int] = []
        self._known: dict[tuple[int, ...], Possible] = {}  # cache, by tail
        self.trouble: str | None = None  # why the last dead end has no possible ids
        self._failure: str | None = None  # of the library, behind an id
        self._is_lost = False  # the output violates the grammar, or it took too long
        self._slow_seconds = 0.0  # of processor time, at slow positions
        self.advance(output)
        if self._is_lost:
            raise ValueError(f"The {len(output)} ids generated before are no beginning of one of its texts.")

    def possible(self, tail: Sequence[int] = ()) -> Possible:
        """Return the ids that may follow the output and `tail`."""
        key = tuple(tail)
        known = self._known.get(key)
        if known is None:
            if self._is_lost:
                return Possible(np.zeros_like(self._text_bits))
            begun = time.thread_time()
            reached = self._end_ids.isdisjoint(key) and self._go_behind(key)
            known = self._known[key] = self._look() if reached else _UNASKED
            if (seconds := time.thread_time() - begun) > SLOW_SECONDS:
                self._slow_seconds += seconds
            if self._slow_seconds > MOST_SLOW_SECONDS:
                self.trouble, self._is_lost = "its positions take too long to compute; make it smaller", True
                self._known = {}
                return self.possible(tail)
        return known

    def num_possible(self, tail: Sequence[int], drafts: Sequence[int]) -> int:
        """Return how many leading drafts may follow the output and `tail`, up to an end."""
        behind = list(tail)
        for count, id_ in enumerate(drafts):
            if id_ not in self.possible(behind):
                return count
            if id_ in self._end_ids:
                return count + 1
            behind.append(id_)
        return len(drafts)

    def forced(self, tail: Sequence[int], most: int) -> Forced:
        """Return up to `most` ids that must follow the output and `tail`. If the forced text has several tokenizations,
        the longest ids are used."""
        behind, certain = list(tail), True
        while len(behind) < len(tail) + most:
            ways = self._ways(self.possible(behind))
            if not ways:
                break
            behind.append(ways[0])
            certain = certain and len(ways) == 1
            if ways[0] in self._end_ids:
                break
        return Forced(tuple(behind[len(tail) :]), certain)

    def _ways(self, possible: Possible) -> list[int]:
        """Return the possible ids if all are prefixes of the first; none if the text is not forced."""
        if possible.ids is None or not 0 < np.count_nonzero(possible.ids) <= _FEW_WORDS:
            return []
        texts, ids = self._vocabulary.texts, ids_of(possible.ids)
        if len(ids) == 1:
            return ids
        ids.sort(key=lambda id_: -len(texts[id_]))
        is_forced = all(texts[id_] and texts[ids[0]].startswith(texts[id_]) for id_ in ids)  # an end has no text
        return ids if is_forced else []

    def advance(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens."""
        ended = len(tokens) > 0 and tokens[-1] in self._end_ids
        text = list(tokens[:-1] if ended else tokens)
        if not self._go_behind(text):
            self.trouble, self._is_lost = self._failure or "the last id does not go on with it", True
            self._known = {}
            return
        self._output += text
        self._tail = self._tail[len(text) :]
        self._key_states = self._key_states[len(text) :]
        key, count = tuple(text), len(text)
        self._known = {tail[count:]: known for tail, known in self._known.items() if tail[:count] == key}

    def _go_behind(self, tail: Sequence[int]) -> bool:
        """Move the matcher behind `tail`. False if an id is impossible; the matcher then stands before it."""
        common = 0
        for ours, theirs in zip(self._tail, tail, strict=False):
            if ours != theirs:
                break
            common += 1
        if len(self._tail) > common:
            if not self._matcher.rollback(len(self._tail) - common):
                self._start_again()
                common = 0
            self._cut(common)
        rest = list(tail[common:])
        if not rest:
            return True
        distinct = self._with_distinct_keys(rest)
        count = self._matcher.try_consume_tokens(distinct)
        if count < len(distinct) and not self._matcher.is_error():
            self._matcher.compute_bitmask()  # with too many states the lexer takes no id, and says so only here
        if is_used_up(self._matcher) and self._renew():
            count = self._matcher.try_consume_tokens(distinct)
        if self._matcher.is_error():
            self._failure = reason(self._matcher.get_error())
            self._start_again()
            return False
        self._tail += distinct[:count]
        self._cut(len(self._tail))
        return count == len(rest)

    def _with_distinct_keys(self, ids: list[int]) -> list[int]:
        """Return the leading ids that repeat no key, and keep the states behind them."""
        if self._keys is None:
            return ids
        for count, id_ in enumerate(ids):
            state = self._keys.advance(self._key_states[-1], id_)
            if state is None:
                return ids[:count]
            self._key_states.append(state)
        return ids

    def _cut(self, length: int) -> None:
        """Drop what is kept of the tail from `length` on."""
        del self._tail[length:]
        del self._key_states[length + 1 :]

    def _look(self) -> Possible:
        """Return the ids that may follow at the matcher's position."""
        mask = self._matcher.compute_bitmask()
        if is_used_up(self._matcher) and self._renew():
            mask = self._matcher.compute_bitmask()
        found = np.frombuffer(mask, dtype=np.int32)[: len(self._text_bits)]
        if self._matcher.is_error():
            stuck = is_stuck(self._matcher)
            self.trouble = "no id goes on with it" if stuck else reason(self._matcher.get_error())
            self._start_again()
            return Possible(np.zeros_like(self._text_bits))
        text = found & self._text_bits
        if self._keys is not None:
            text = self._keys.without_repeats(self._key_states[-1], text)
            if self._has_patterns:
                text = self._without_dead_ends(self._keys, text)
        goes_on = bool(text.any())
        ends = self._matcher.is_accepting()
        if ends:
            text |= self._stop_bits if goes_on else self._end_bits
        if not goes_on:
            self.trouble = "its text is complete, and no id ends it" if ends else "no id goes on with it"
        return Possible(text, only_end=ends and not goes_on)

    def _without_dead_ends(self, keys: RepeatedKeys, possible: IdBits) -> IdBits:
        """Return `possible` without ids behind which only a repeated key could come."""
        before = self._key_states[-1]
        stuck = list(keys.into_keys(before, possible))
        if not stuck:
            return possible
        matcher = self._matcher.deep_copy()  # a limit that is reached here must not end the sequence
        known: dict[KeyState, bool] = {}
        dead = [id_ for id_, behind in stuck if self._is_dead(keys, matcher, id_, behind, known)]
        return possible if matcher.is_error() else possible & ~bits_of(dead, self._vocabulary.size)

    def _is_dead(
        self, keys: RepeatedKeys, matcher: LLMatcher, id_: int, behind: KeyState, known: dict[KeyState, bool]
    ) -> bool:
        """Return whether behind an id, where a key must come or go on, every way on repeats a key.

        `behind`: the state there; `known`: results by state. The matcher stands before the id, and is put back there.
        """
        if behind not in known:
            known[behind] = False  # while it is looked at, white space leads back to it
            if matcher.try_consume_tokens([id_]) != 1:
                return False
            found = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[: len(self._text_bits)]
            known[behind] = not matcher.is_error() and all(
                (after := keys.advance(behind, next_)) is None
                or after == behind
                or (keys.may_be_stuck(after) and self._is_dead(keys, matcher, next_, after, known))
                for next_ in _each_id(found & self._text_bits)
            )
            if not matcher.is_error():
                matcher.rollback(1)
        return known[behind]

    def _renew(self) -> bool:
        """Replace the matcher by one with a new lexer, behind the output and the tail. Returns whether there is one."""
        if self._num_renewed == MOST_RENEWED or (matcher := self._renewed()) is None:
            return False
        self._num_renewed += 1
        before = self._output + self._tail
        if matcher.try_consume_tokens(before) < len(before):
            return False
        self._matcher = matcher
        return True

    def _start_again(self) -> None:
        """Replace a matcher that failed for good by a new one behind the output."""
        self._matcher = self._fresh()
        self._cut(0)
        self._matcher.try_consume_tokens(self._output)


START_SECONDS = 20.0
"""Longest that the process may take to load the vocabulary: a few tenths of a second, more on a busy machine."""


class GrammarsBusy(GrammarError):
    """A grammar cannot be compiled now."""


class GrammarTrial:
    """Compiles each grammar in another process first, which can be killed if it takes too much time or memory.
    It starts with the first grammar. A grammar that it cannot compile in time is never compiled in this process."""

    def __init__(self, vocabulary: TokenVocabulary, seconds: float) -> None:
        """`seconds`: time limit per grammar."""
        self._vocabulary, self._seconds = vocabulary, seconds
        self._process: GrammarProcess | None = None
        self._turn = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def check(self, kind: str, source: str, deadline: float) -> None:
        """Return if the grammar compiles, else raise GrammarError: GrammarsBusy where earlier ones leave too little
        time before `deadline` (monotonic)."""
        if not self._turn.acquire(timeout=max(0.0, deadline - self._seconds - time.monotonic())):
            raise GrammarsBusy(f"{GRAMMARS_BUSY} that this one had to be compiled in. Try again later.")
        try:
            reasons = self._started().ask(kind, source, self._seconds)
            if reasons is None:
                raise GrammarError(
                    f"it cannot be compiled within {self._seconds:g} s and the memory for it. Make it smaller"
                )
        except BaseException:  # the process is in an unknown state and cannot be reused
            self._end()
            raise
        finally:
            self._turn.release()
        if reasons:
            raise GrammarError(reasons[0])

    def _started(self) -> GrammarProcess:
        if self._process is None:
            self._process = GrammarProcess()
            tokens, special = self._vocabulary.tokens
            if not self._process.with_tokens(tokens, special, START_SECONDS):
                raise GrammarsBusy(
                    f"{GRAMMARS_BUSY}: the process that tries them was not ready within {START_SECONDS:g} s."
                )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


MOST_SECONDS = 20.0
"""Longest that a sequence waits for its grammar. The trial process gets half of it per grammar."""

MOST_AT_ONCE = 2
"""Grammars compiled at once (the library releases the GIL), and states of known grammars created at once."""

MOST_KEPT = 64  # compiled grammars cached, least recently used first out
WALK_LENGTH, WALK_SECONDS = 100, 0.5
"""Positions of a text whose masks are computed in advance, and the time limit for it."""


class Preparation:
    """A grammar that is being compiled for a sequence."""

    def __init__(self) -> None:
        self.state: GrammarState | None = None  # the sequence's state, once compiled
        self.error: str | None = None  # why there will be none
        self._ended = threading.Lock()  # held once it is over
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether there is a state or an error."""
        return self._over.is_set()

    def end(self, state: GrammarState | None = None, error: str | None = None) -> bool:
        """Set the result, unless one is set."""
        if not self._ended.acquire(blocking=False):
            return False
        self.state, self.error = state, error
        self._over.set()
        return True

    def wait(self, seconds: float) -> bool:
        """Block until it is over, at most so long; return whether it is."""
        return self._over.wait(seconds)

    def cancel(self) -> None:
        """Do not compile it if that has not begun."""
        self.end(error="Its sequence was released.")


RENEWAL_SECONDS = 0.2  # that a step waits for a grammar to be compiled anew


class CompiledGrammar:
    """A compiled grammar, of which every sequence gets a copy.

    The library keeps one lexer for all copies. Where it has too many states, all of them fail from then on, so the
    first that does has the grammar compiled anew for them all.
    """

    def __init__(self, matcher: LLMatcher, compile_again: Callable[[], LLMatcher], threads: DeepStackExecutor) -> None:
        """`matcher`: at the beginning, and never moved. `threads`: to compile in."""
        self._matcher, self._compile_again, self._threads = matcher, compile_again, threads
        self._lock = threading.Lock()

    def copies(self) -> tuple[Callable[[], LLMatcher], Callable[[], LLMatcher | None]]:
        """Return a sequence's way to a copy, and that to one with a new lexer, which is None after RENEWAL_SECONDS."""
        copied: list[LLMatcher] = [self._matcher]  # what the sequence's last copy was made of

        def fresh() -> LLMatcher:
            with self._lock:
                copied[0] = self._matcher
                return self._matcher.deep_copy()

        def renewed() -> LLMatcher | None:
            with self._lock:
                is_new = copied[0] is not self._matcher
            return fresh() if is_new or self._renew() else None

        return fresh, renewed

    def _renew(self) -> bool:
        """Compile the grammar anew in another thread. Returns whether it is there in time."""
        done = threading.Event()

        def run() -> None:
            with contextlib.suppress(BaseException):  # a panic of the library is no Exception
                matcher = self._compile_again()
                with self._lock:
                    self._matcher = matcher
                done.set()

        try:
            self._threads.take(run)
        except RuntimeError:
            return False
        return done.wait(RENEWAL_SECONDS)


class Overdue:
    """Fails preparations that miss their deadline, with one thread that runs while there are any."""

    def __init__(self, most_seconds: float) -> None:
        """`most_seconds`: time limit of each, so that deadlines come in order."""
        self._error = f"{GRAMMAR}was not compiled within {most_seconds:g} s. Make it smaller."
        self._watched: deque[tuple[Preparation, Callable[..., None], float]] = deque()
        self._lock = threading.Lock()
        self._runs = False

    def watch(self, preparation: Preparation, end: Callable[..., None], deadline: float) -> None:
        """Call end(error=…) at the deadline (monotonic), unless the preparation is over."""
        with self._lock:
            self._watched.append((preparation, end, deadline))
            if not self._runs:
                try:
                    threading.Thread(target=self._run, name="overdue grammars", daemon=True).start()
                    self._runs = True
                except RuntimeError:
                    self._watched.clear()
                    raise

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._watched:
                    self._runs = False
                    return
                preparation, end, deadline = self._watched.popleft()
            if not preparation.wait(max(0.0, deadline - time.monotonic())):
                end(error=self._error)


class Grammars:
    """Compiles each grammar once, and gives every sequence a state of its own."""

    def __init__(
        self,
        read: Callable[[], TokenVocabulary],
        *,
        why_none: str | None = None,
        most_seconds: float = MOST_SECONDS,
        most_kept: int = MOST_KEPT,
    ) -> None:
        """`read` loads the vocabulary, once, for the first grammar; `why_none`: why grammars are unsupported, if so."""
        self.why_none = why_none
        self._read, self._most_seconds, self._most_kept = read, most_seconds, most_kept
        self._vocabulary: TokenVocabulary | None = None
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()  # of the compiled ones
        self._reading = threading.Lock()  # of the vocabulary and the trial
        self.trial: GrammarTrial | None = None  # from the first grammar on
        self._compiling = DeepStackExecutor("grammar", MOST_AT_ONCE)
        self._entering = DeepStackExecutor(
            "grammar", MOST_AT_ONCE
        )  # for cached grammars, so that slow ones do not delay them
        self._overdue = Overdue(most_seconds)

    @classmethod
    def of(cls, folder: Path, num_ids: int, never: Collection[int]) -> Grammars:
        """Read a checkpoint's vocabulary now, because a large one blocks all threads for seconds. Ids in `never` are
        never allowed."""
        try:
            vocabulary = TokenVocabulary.read(folder, num_ids, never)
        except NoVocabulary as error:
            return cls(lambda: TokenVocabulary.read(folder, num_ids, never), why_none=str(error))
        except ImportError:
            why = "llguidance, which compiles them, is not installed where the worker runs: pip install llguidance"
            return cls(lambda: TokenVocabulary.read(folder, num_ids, never), why_none=why)
        return cls(lambda: vocabulary)

    def prepare(
        self,
        grammar: pb.Grammar,
        *,
        eos_ids: Collection[int],
        stop_ids: Collection[int],
        ignores_eos: bool,
        output: Sequence[int],
        done: Callable[[], None],
    ) -> Preparation:
        """Compile the grammar if it is not cached; `done` is called from another thread when that is over.
        The other arguments are those of GrammarState."""
        preparation = Preparation()
        stand = partial(GrammarState, eos_ids=eos_ids, stop_ids=stop_ids, ignores_eos=ignores_eos, output=output)

        def end(state: GrammarState | None = None, error: str | None = None) -> None:
            if preparation.end(state, error):
                done()

        def run() -> None:
            if preparation.is_over:
                return
            try:
                places, has_patterns = _json_places(grammar), "patternProperties" in grammar.source
                begin = partial(stand, json_places=places, has_patterns=has_patterns)
                end(self._state(name, grammar, begin, deadline))
            except GrammarsBusy as busy:
                end(error=str(busy))
            except NoVocabulary as missing:
                end(error=f"There are no grammars here: {missing}")
            except (GrammarError, ValueError) as error:
                end(error=f"{GRAMMAR}cannot be used: {error}")
            except BaseException as error:  # a panic of the library is no Exception
                end(error=f"{GRAMMAR}cannot be compiled: {type(error).__name__}: {str(error)[:200]}")

        deadline = time.monotonic() + self._most_seconds
        name = grammar.SerializeToString(deterministic=True)
        threads = self._entering if name in self._compiled else self._compiling  # without the lock: only a guess
        try:
            threads.take(run)
            self._overdue.watch(preparation, end, deadline)
        except BaseException:
            preparation.cancel()
            raise
        return preparation

    def _state(
        self,
        name: bytes,
        grammar: pb.Grammar,
        stand: Callable[..., GrammarState],
        deadline: float,
    ) -> GrammarState:
        vocabulary = self._known_vocabulary()
        with self._lock:
            known = self._compiled.get(name)
        if known is None:
            kind = pb.GrammarKind.Name(grammar.kind).removeprefix("GRAMMAR_KIND_").lower()
            self._trial_with(vocabulary).check(kind, grammar.source, deadline)
            again = partial(compile_grammar, vocabulary.tokenizer, kind, grammar.source)
            known = CompiledGrammar(_walked(again, vocabulary), again, self._entering)
        with self._lock:
            known = self._compiled.setdefault(name, known)
            self._compiled.move_to_end(name)
            while len(self._compiled) > self._most_kept:
                self._compiled.popitem(last=False)
        fresh, renewed = known.copies()
        return stand(vocabulary, fresh, renewed=renewed)

    def _trial_with(self, vocabulary: TokenVocabulary) -> GrammarTrial:
        with self._reading:
            if self.trial is None:
                self.trial = GrammarTrial(vocabulary, self._most_seconds / 2)
            return self.trial

    def _known_vocabulary(self) -> TokenVocabulary:
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read()
            return self._vocabulary


def _json_places(grammar: pb.Grammar) -> JsonPlaces | None:
    """Return where JSON texts stand in a grammar's texts, or None if nowhere."""
    if grammar.kind in (pb.GRAMMAR_KIND_JSON_SCHEMA, pb.GRAMMAR_KIND_JSON_OBJECT):
        return JsonPlaces()
    return JsonPlaces.from_json(grammar.json_places) if grammar.json_places else None


def _walked(compiled: Callable[[], LLMatcher], vocabulary: TokenVocabulary) -> LLMatcher:
    """Return a compiled matcher after walking through a text of the grammar and back. That caches masks, some of which
    take tens of milliseconds and would delay a step."""
    fresh, chance, begun = compiled(), Random(0), time.monotonic()
    matcher = fresh.deep_copy()
    for _ in range(WALK_LENGTH):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped() or time.monotonic() - begun > WALK_SECONDS:
            break
        allowed = [id_ for id_ in vocabulary.letters if mask[id_ >> 3] >> (id_ & 7) & 1]
        if not allowed:
            break
        # Brackets and quotes come first, so that every other place is a new kind; letters make texts long.
        if not matcher.consume_token(allowed[0] if chance.random() < 0.5 else chance.choice(allowed)):
            break
    if is_used_up(matcher):
        return compiled()
    return matcher if not matcher.is_error() and matcher.reset() else fresh
