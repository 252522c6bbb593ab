"""Compiles grammars beside the steps; a slow or invalid grammar affects its own sequences only."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from space_common.grammar import GrammarError, GrammarProcess, compile_grammar
from space_proto import worker_pb2 as pb

from space_server.grammar.grammar_state import GrammarState
from space_server.grammar.vocabulary import NoVocabulary, TokenVocabulary
from space_server.machine.threads import DeepStackExecutor

if TYPE_CHECKING:
    from llguidance import LLMatcher


START_SECONDS = 20.0
"""Longest that the process may take to load the vocabulary: a few tenths of a second, more on a busy machine."""


class GrammarTrial:
    """Compiles each grammar in another process first, which can be killed if it takes too much time or memory.

    It starts with the first grammar. A grammar that it cannot compile in time is never compiled in this process.
    """

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
        """Return if the grammar compiles, else raise GrammarError. `deadline` (monotonic): gives up waiting for earlier
        grammars.
        """
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise GrammarError("others took the time that it had to be compiled in")
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
                raise GrammarError(f"the process that tries it was not ready within {START_SECONDS:g} s. Try again")
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


class Overdue:
    """Fails preparations that miss their deadline, with one thread that runs while there are any."""

    def __init__(self, most_seconds: float) -> None:
        """`most_seconds`: time limit of each, so that deadlines come in order."""
        self._error = f"The grammar was not compiled within {most_seconds:g} s. Make it smaller."
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
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()  # at their beginning, never moved
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
        never allowed.
        """
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

        The other arguments are those of GrammarState.
        """
        preparation = Preparation()
        stand = partial(GrammarState, eos_ids=eos_ids, stop_ids=stop_ids, ignores_eos=ignores_eos, output=output)

        def end(state: GrammarState | None = None, error: str | None = None) -> None:
            if preparation.end(state, error):
                done()

        def run() -> None:
            if preparation.is_over:
                return
            try:
                end(self._state(name, grammar, stand, deadline))
            except (GrammarError, NoVocabulary, ValueError) as error:
                end(error=f"The grammar cannot be used: {error}")
            except BaseException as error:  # a panic of the library is no Exception
                end(error=f"The grammar cannot be compiled: {type(error).__name__}: {str(error)[:200]}")

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
        stand: Callable[[TokenVocabulary, Callable[[], LLMatcher]], GrammarState],
        deadline: float,
    ) -> GrammarState:
        vocabulary = self._known_vocabulary()
        with self._lock:
            known = self._compiled.get(name)
        if known is None:
            kind = pb.GrammarKind.Name(grammar.kind).removeprefix("GRAMMAR_KIND_").lower()
            self._trial_with(vocabulary).check(kind, grammar.source, deadline)
            known = compile_grammar(vocabulary.tokenizer, kind, grammar.source)
            known = _walked(known, vocabulary)
        with self._lock:
            known = self._compiled.setdefault(name, known)
            self._compiled.move_to_end(name)
            while len(self._compiled) > self._most_kept:
                self._compiled.popitem(last=False)
        return stand(vocabulary, lambda: self._copy(known))

    def _trial_with(self, vocabulary: TokenVocabulary) -> GrammarTrial:
        with self._reading:
            if self.trial is None:
                self.trial = GrammarTrial(vocabulary, self._most_seconds / 2)
            return self.trial

    def _copy(self, compiled: LLMatcher) -> LLMatcher:
        with self._lock:
            return compiled.deep_copy()

    def _known_vocabulary(self) -> TokenVocabulary:
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read()
            return self._vocabulary


def _walked(fresh: LLMatcher, vocabulary: TokenVocabulary) -> LLMatcher:
    """Return the matcher after walking through a text of the grammar and back. That caches masks, some of which take
    tens of milliseconds and would delay a step.
    """
    matcher, chance, begun = fresh.deep_copy(), Random(0), time.monotonic()
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
    return matcher if not matcher.is_error() and matcher.reset() else fresh
