"""Check grammars before requests are queued, in a separate process, because compiling one can crash or hang."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from space_common.grammar import GrammarProcess

from space_router.engine.request.request import Grammar
from space_router.errors import Overloaded

MOST_SECONDS = 5.0
"""Time limit for one grammar. Common ones take a few milliseconds."""

START_SECONDS = 30.0
"""Time limit for the start of a process."""

NUM_CHECKERS = 2
"""Maximum number of processes; they start with the first grammars."""

MOST_WAITING = 16
"""Maximum number of grammars being checked or waiting; further ones raise Overloaded."""

MOST_KNOWN = 4096
"""Number of cached results."""


class GrammarCheck:
    """Checks grammars. One that takes too much time or memory, or crashes the process, is rejected.

    reason = await GrammarCheck().why_not(Grammar("regex", "a("))
    """

    def __init__(self, *, most_seconds: float = MOST_SECONDS) -> None:
        self._most_seconds = most_seconds
        self._known: OrderedDict[bytes, str | None] = OrderedDict()  # results by digest, least recently used first
        self._idle: list[GrammarProcess] = []
        self._num_waiting = 0
        self._threads = ThreadPoolExecutor(NUM_CHECKERS, thread_name_prefix="grammar check")

    async def why_not(self, grammar: Grammar) -> str | None:
        """Return why this grammar cannot be used, or None if it can. Raises Overloaded."""
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
        """Check a grammar in an idle or new process. Runs in a thread."""
        reasons = None
        with contextlib.suppress(IndexError):  # no process is idle
            reasons = self._ask_process(self._idle.pop(), grammar)
        if reasons is None:  # the used process may be out of memory or gone; retry in a new one
            reasons = self._ask_process(_started(), grammar)
        if reasons is None:
            return f"It cannot be compiled within {self._most_seconds:g} s and the memory for it. Make it smaller."
        return reasons[0] if reasons else None

    def _ask_process(self, process: GrammarProcess, grammar: Grammar) -> list[str] | None:
        with _closed_unless_kept(process) as kept:
            reasons = process.ask(grammar.kind, grammar.source, self._most_seconds)
            if reasons is not None:
                kept.pop_all()
                self._idle.append(process)
        return reasons


def _started() -> GrammarProcess:
    """Start a process and wait until it answers: start-up is not part of the checking time. Raises Overloaded."""
    process = GrammarProcess()
    with _closed_unless_kept(process) as kept:
        if process.ask("regex", "a", START_SECONDS) is None:
            raise Overloaded("Grammars cannot be checked now. Try again later.", retry_after=START_SECONDS)
        kept.pop_all()
    return process


def _closed_unless_kept(process: GrammarProcess) -> contextlib.ExitStack:
    """Close the process at the end of the block, unless `pop_all` is called."""
    stack = contextlib.ExitStack()
    stack.callback(process.close)
    return stack
