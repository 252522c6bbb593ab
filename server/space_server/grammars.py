"""Grammars, compiled beside the steps: whose grammar takes long, or is none, waits or fails alone."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from collections.abc import Sequence as Run
from functools import partial
from pathlib import Path
from random import Random

from llguidance import LLMatcher
from space_proto import worker_pb2 as pb
from space_proto.grammar import GrammarError, compile_grammar

from space_server.grammar_state import GrammarState
from space_server.grammar_trial import GrammarTrial
from space_server.vocabulary import NoVocabulary, Vocabulary

MOST_SECONDS = 20.0
"""Longest that a sequence waits for its grammar. One is tried for half of this time, in a process that ends with it."""

MOST_AT_ONCE = 2
"""Grammars that are compiled at the same time; the library lets other threads run meanwhile."""

MOST_KEPT = 64
"""Compiled grammars that are kept, the last used ones."""

WALK_LENGTH, WALK_SECONDS = 100, 0.5
"""Places of a text that are looked at in advance, and the longest that this takes."""

STACK_BYTES = 64 * 1024**2
"""Of a compiling thread: the library recurses as deep as rules refer to rules."""


class Preparation:
    """A grammar that is being compiled for a sequence."""

    def __init__(self) -> None:
        self.state: GrammarState | None = None  # where the sequence's output stands in it, once it is there
        self.error: str | None = None  # why it never will
        self._ended = threading.Lock()  # held from then on

    @property
    def is_over(self) -> bool:
        """There is a state or an error."""
        return self.state is not None or self.error is not None

    def end(self, state: GrammarState | None = None, error: str | None = None) -> bool:
        """This is how it ended, if it had not already."""
        if not self._ended.acquire(blocking=False):
            return False
        self.state, self.error = state, error
        return True


class Grammars:
    """Compiles each grammar once, and gives every sequence a state of its own in it."""

    def __init__(
        self,
        read: Callable[[], Vocabulary],
        *,
        why_none: str | None = None,
        most_seconds: float = MOST_SECONDS,
        most_kept: int = MOST_KEPT,
    ) -> None:
        """`read` is called once, when the first grammar comes; `why_none`: no grammar can be had, and why."""
        self.why_none = why_none
        self._read, self._most_seconds, self._most_kept = read, most_seconds, most_kept
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()  # at their beginning, never moved
        self._lock = threading.Lock()  # of both
        self.trial: GrammarTrial | None = None  # from the first grammar on
        self._turns = threading.Semaphore(MOST_AT_ONCE)

    @classmethod
    def of(cls, folder: Path, num_ids: int, never: Collection[int]) -> Grammars:
        """For the checkpoint in a folder, whose vocabulary is read now: that takes seconds for a large one, in which no
        other thread could run. Ids in `never` never come out of a grammar.
        """
        try:
            vocabulary = Vocabulary.read(folder, num_ids, never)
        except NoVocabulary as error:
            return cls(lambda: Vocabulary.read(folder, num_ids, never), why_none=str(error))
        return cls(lambda: vocabulary)

    def prepare(
        self,
        grammar: pb.Grammar,
        *,
        eos_ids: Collection[int],
        stop_ids: Collection[int],
        ignores_eos: bool,
        output: Run[int],
        done: Callable[[], None],
    ) -> Preparation:
        """Compile this, if it is not known; `done` is called, by another thread, when it is over.

        The other arguments are those of the GrammarState.
        """
        preparation = Preparation()
        stand = partial(GrammarState, eos_ids=eos_ids, stop_ids=stop_ids, ignores_eos=ignores_eos, output=output)

        def end(state: GrammarState | None = None, error: str | None = None) -> None:
            if preparation.end(state, error):
                done()

        def run() -> None:
            try:
                end(self._state(grammar, stand))
            except (GrammarError, NoVocabulary, ValueError) as error:
                end(error=f"The grammar cannot be used: {error}")
            except BaseException as error:  # a panic of the library is no Exception
                end(error=f"The grammar cannot be compiled: {type(error).__name__}: {str(error)[:200]}")
            finally:
                overdue.cancel()

        late = f"The grammar was not compiled within {self._most_seconds:g} s. Make it smaller."
        overdue = threading.Timer(self._most_seconds, end, kwargs={"error": late})
        overdue.daemon = True
        overdue.start()
        _start_deep(run)
        return preparation

    def _state(
        self, grammar: pb.Grammar, stand: Callable[[Vocabulary, Callable[[], LLMatcher]], GrammarState]
    ) -> GrammarState:
        deadline = time.monotonic() + self._most_seconds
        if not self._turns.acquire(timeout=self._most_seconds):
            raise GrammarError(f"others took the {self._most_seconds:g} s that it had to be compiled in")
        try:
            if time.monotonic() > deadline:
                raise GrammarError("it was its turn too late")
            vocabulary = self._known_vocabulary()
            name = grammar.SerializeToString(deterministic=True)
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
        finally:
            self._turns.release()

    def _trial_with(self, vocabulary: Vocabulary) -> GrammarTrial:
        with self._lock:
            if self.trial is None:
                self.trial = GrammarTrial(vocabulary, self._most_seconds / 2)
            return self.trial

    def _copy(self, compiled: LLMatcher) -> LLMatcher:
        with self._lock:
            return compiled.deep_copy()

    def _known_vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read()
            return self._vocabulary


def _walked(fresh: LLMatcher, vocabulary: Vocabulary) -> LLMatcher:
    """The matcher, gone through a text of the grammar and back. What may follow is remembered by the kind of place, and
    the first look at some kinds takes tens of milliseconds, which a step need not wait for.
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


_starting = threading.Lock()


def _start_deep(run: Callable[[], None]) -> None:
    """A thread with a deep stack, which ends with the process."""
    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
