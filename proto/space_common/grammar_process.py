"""A process that tries grammars for somebody who must live on: it can be killed where a thread cannot."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Collection, Sequence


class GrammarProcess:
    """Tries one grammar after the other, of single bytes or `with_tokens`; it ends with whoever holds it.

    with closing(GrammarProcess()) as process:
        process.ask("regex", "a(", 5.0)
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "space_common.grammar"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the server, which ends it
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("The process has no pipes.")
        self._asked, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._asked, False)
        self.close = weakref.finalize(self, _end, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def with_tokens(self, tokens: Sequence[bytes], special: Collection[int], seconds: float) -> bool:
        """From now on grammars are of these tokens, the last of which is the end; False: not within `seconds`."""
        told = {"tokens": [token.hex() for token in tokens], "special": sorted(special)}
        return self._exchange(told, seconds) is not None

    def ask(self, kind: str, source: str, seconds: float) -> list[str] | None:
        """The reason against a grammar, none where it can be used; None: no answer in time, or no process any more, and
        then nobody may ask again.
        """
        answer = self._exchange([kind, source], seconds)
        if answer is None:
            return None
        verification: str | None = json.loads(answer)
        return [] if verification is None else [verification]

    def _exchange(self, said: object, seconds: float) -> bytes | None:
        deadline = time.monotonic() + seconds
        rest = memoryview(json.dumps(said).encode() + b"\n")
        while rest:
            if not _ready(self._asked, select.POLLOUT, deadline):
                return None
            try:
                rest = rest[os.write(self._asked, rest) :]
            except BlockingIOError:
                continue
            except OSError:
                return None
        answer = b""
        while not answer.endswith(b"\n"):
            piece = os.read(self._answers, 65536) if _ready(self._answers, select.POLLIN, deadline) else b""
            if not piece:
                return None
            answer += piece
        return answer


def _ready(pipe: int, event: int, deadline: float) -> bool:
    """Whether the pipe can be used, or is broken, before `deadline`. By poll: select knows no descriptor from 1024 on,
    and a router of thousands of connections has them.
    """
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written yet has nobody to read it
                pipe.close()
