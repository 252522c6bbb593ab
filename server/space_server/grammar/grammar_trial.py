"""Compiles each grammar in another process first, which can be killed if it takes too much time or memory."""

from __future__ import annotations

import threading
import time

from space_common.grammar import GrammarError, GrammarProcess

from space_server.grammar.vocabulary import TokenVocabulary

START_SECONDS = 20.0
"""Longest that the process may take to load the vocabulary: a few tenths of a second, more on a busy machine."""


class GrammarTrial:
    """One process, started with the first grammar. A grammar that it cannot compile in time is never compiled in this
    one.
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
