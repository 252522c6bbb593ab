"""Whether a grammar can be used, asked before a request is queued, of a process that may fail at it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from space_router.engine.request import Grammar
from space_router.errors import Overloaded

MOST_SECONDS = 5.0
"""Longest that one grammar is looked at. Common ones take a few milliseconds."""

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
        self._idle: list[_Checker] = []
        self._num_waiting = 0
        self._threads = ThreadPoolExecutor(NUM_CHECKERS, thread_name_prefix="grammar check")

    async def why_not(self, grammar: Grammar) -> str | None:
        """The reason against this grammar; None: it can be used. Raises Overloaded."""
        line = json.dumps([grammar.kind, grammar.source]).encode() + b"\n"
        name = blake2b(line, digest_size=16).digest()
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
            verdict = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, line)
        finally:
            self._num_waiting -= 1
        self._known[name] = verdict
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return verdict

    def _ask(self, line: bytes) -> str | None:
        """In a thread of its own."""
        checker = self._idle.pop() if self._idle else _Checker()
        answer = checker.ask(line, self._most_seconds)
        if answer is None:
            checker.close()
            return f"It cannot be compiled within {self._most_seconds:g} s and the memory for it. Make it smaller."
        self._idle.append(checker)
        verdict: str | None = json.loads(answer)
        return verdict


class _Checker:
    """One process that checks grammars, one after the other; it ends with whoever holds it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "space_proto.grammar"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the server, which ends it
        )
        self.close = weakref.finalize(self, _end, self._process)

    def ask(self, line: bytes, seconds: float) -> bytes | None:
        """Its answer; None where there is none in time, or the process is gone."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("The process has no pipes.")
        deadline = time.monotonic() + seconds
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            return None
        answer = b""
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(process.stdout.fileno(), 65536) if ready else b""
            if not piece:
                return None
            answer += piece
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written yet has nobody to read it
                pipe.close()
