"""Whether a grammar can be used, asked before a request is queued, of a process that may fail at it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from space_common.grammar_process import GrammarProcess

from space_router.engine.request.request import Grammar
from space_router.errors import Overloaded

MOST_SECONDS = 5.0
"""Longest that one grammar is looked at. Common ones take a few milliseconds."""

START_SECONDS = 30.0
"""Longest that a process may take to start."""

NUM_CHECKERS = 2
"""Processes at most; they start with the first grammars."""

MOST_WAITING = 16
"""Grammars that wait for a process; more are told to come again."""

MOST_KNOWN = 4096
"""Verdicts that are kept."""


class GrammarCheck:
    """Says why a grammar cannot be used. What takes too long, too much memory or the process with it cannot be.

    reason = await GrammarCheck().why_not(Grammar("regex", "a("))
    """

    def __init__(self, *, most_seconds: float = MOST_SECONDS) -> None:
        self._most_seconds = most_seconds
        self._known: OrderedDict[bytes, str | None] = OrderedDict()  # the last used ones, by a digest
        self._idle: list[GrammarProcess] = []
        self._num_waiting = 0
        self._threads = ThreadPoolExecutor(NUM_CHECKERS, thread_name_prefix="grammar check")

    async def why_not(self, grammar: Grammar) -> str | None:
        """The reason against this grammar; None: it can be used. Raises Overloaded."""
        name = blake2b(f"{grammar.kind} {grammar.source}".encode(errors="surrogatepass"), digest_size=16).digest()
        if name in self._known:
            self._known.move_to_end(name)
            return self._known[name]
        if self._num_waiting >= MOST_WAITING:
            raise Overloaded(
                f"{MOST_WAITING} grammars wait to be checked already, the most. Try again later.",
                retry_after=self._most_seconds,
            )
        self._num_waiting += 1
        try:
            verification = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, grammar)
        finally:
            self._num_waiting -= 1
        self._known[name] = verification
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return verification

    def _ask(self, grammar: Grammar) -> str | None:
        """In a thread of its own."""
        reasons = None
        with contextlib.suppress(IndexError):  # none is idle
            reasons = self._told(self._idle.pop(), grammar)
        if reasons is None:  # one that has tried many may be short of memory, or gone: a new one is asked
            reasons = self._told(_started(), grammar)
        if reasons is None:
            return f"It cannot be compiled within {self._most_seconds:g} s and the memory for it. Make it smaller."
        return reasons[0] if reasons else None

    def _told(self, process: GrammarProcess, grammar: Grammar) -> list[str] | None:
        with _closed_unless_kept(process) as kept:
            reasons = process.ask(grammar.kind, grammar.source, self._most_seconds)
            if reasons is not None:
                kept.pop_all()
                self._idle.append(process)
        return reasons


def _started() -> GrammarProcess:
    """One that has answered: the time a grammar has is not that of a start. Raises Overloaded."""
    process = GrammarProcess()
    with _closed_unless_kept(process) as kept:
        if process.ask("regex", "a", START_SECONDS) is None:
            raise Overloaded("Grammars cannot be checked now. Try again later.", retry_after=START_SECONDS)
        kept.pop_all()
    return process


def _closed_unless_kept(process: GrammarProcess) -> contextlib.ExitStack:
    """Ends the process with the block, whatever happens there, unless `pop_all` keeps it."""
    stack = contextlib.ExitStack()
    stack.callback(process.close)
    return stack
