"""Compiles grammars in a separate process, which can be killed if one takes too long; a thread cannot."""

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
    """Tests one grammar after the other, over single bytes or `with_tokens`. The process ends with this object.

    with closing(GrammarProcess()) as process:
        process.ask("regex", "a(", 5.0)
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "space_common.grammar"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach only the server, which ends this process
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
        """Use these tokens for all further grammars; the last is EOS. Returns False after `seconds`."""
        told = {"tokens": [token.hex() for token in tokens], "special": sorted(special)}
        return self._exchange(told, seconds) is not None

    def ask(self, kind: str, source: str, seconds: float) -> list[str] | None:
        """Return a list with the grammar's error, empty if it is valid.

        Returns None after `seconds` or if the process has ended; then this object must not be used again.
        """
        answer = self._exchange([kind, source], seconds)
        if answer is None:
            return None
        error: str | None = json.loads(answer)
        return [] if error is None else [error]

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
    """Return whether the pipe becomes usable or breaks before `deadline`.

    Uses poll, because select does not support descriptors from 1024 on.
    """
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # flushing fails, because the reader has ended
                pipe.close()
