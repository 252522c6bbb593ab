"""The processes that render chat templates: their number, time and memory are bounded, whatever a template does.

A template is a program of the checkpoint's author, and a client's messages are its input. Each rendering is tried in a
process for quick ones; what does not finish there begins again in one of the few for slow ones, which yield to all else
on the machine. On the event loop a rendering is waited for a moment only; what takes longer begins again in a thread.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from space_common.process import SAFE_PATH, PipedProcess, module_command

from space_router.errors import Overloaded
from space_router.text import text_pool
from space_router.text.template_messages import (
    READY,
    AnswerKind,
    TemplateAnswer,
    TemplateJob,
    TemplateLimits,
    answer_length,
    pack_job,
    read_answer,
    write_job,
)
from space_router.text.text_pool import NeedsThread

QUICK_PROCESSES, SLOW_PROCESSES = 2, 2
QUICK_MEMORY, SLOW_MEMORY = 256 * 1024**2, 512 * 1024**2  # bytes of address space of one process
QUICK_SECONDS = 0.05  # of a processor; a common conversation takes 0.0002 s
_WAITING = 2  # slow renderings that may wait for a process, beside those that run
_EVENT_LOOP_SECONDS = 0.05  # that the event loop waits for an answer
_AWAY_SECONDS = 5.0  # for which the event loop renders nothing after it waited in vain
_START_SECONDS = 30.0  # for the start of a process, on a busy machine
QUICK_PATIENCE, SLOW_PATIENCE = 1.5, 8.0  # seconds of the clock, on a busy machine
_NICENESS = 10

_ENVIRONMENT = ("PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")  # and LC_..., PYTHON...

log = logging.getLogger(__name__)


class _TemplateProcess:
    """One process. It may still send answers to jobs that were given up."""

    def __init__(self, *, is_slow: bool) -> None:
        memory = SLOW_MEMORY if is_slow else QUICK_MEMORY
        command = module_command("space_router.text.template_sandbox", memory, _NICENESS if is_slow else 0)
        self._pipes = PipedProcess(command, _environment())
        self._numbers = itertools.count(1)
        self._owed: int | None = READY  # the number of the last job
        self.close = self._pipes.close

    @property
    def pid(self) -> int:
        return self._pipes.pid

    def is_free(self, seconds: float = 0.0) -> bool:
        """Whether it owes no answer within `seconds`. Raises EOFError if it has ended."""
        return self._owed is None or self._await(seconds) is not None

    def ask(self, limits: TemplateLimits, job: bytes, seconds: float) -> TemplateAnswer | None:
        """Return the answer; None: not within `seconds`. Raises EOFError if it has ended or takes no more jobs."""
        deadline = time.monotonic() + seconds
        self._owed = next(self._numbers)
        if not self._pipes.send(write_job(self._owed, limits, job), seconds):
            raise EOFError("The process takes no more jobs.")
        return self._await(deadline - time.monotonic())

    def _await(self, seconds: float) -> TemplateAnswer | None:
        deadline = time.monotonic() + seconds
        while (message := self._pipes.receive(answer_length, deadline - time.monotonic())) is not None:
            try:
                answer = read_answer(message)
            except ValueError as error:
                raise EOFError("The process does not answer as it should.") from error
            if answer.number == self._owed:
                self._owed = None
                return answer
        return None


class NotStarted(Overloaded):
    """No process that renders templates can be started now."""

    def __init__(self) -> None:
        super().__init__("Chat templates cannot be rendered now. Try again later.", retry_after=_START_SECONDS)


class TemplateProcesses:
    """All processes that render templates.

    answer = TemplateProcesses().ask(TemplateJob("{{ messages }}", {"messages": []}), TemplateLimits())
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._quick = _Kind(is_slow=False, most=QUICK_PROCESSES)
        self._slow = _Kind(is_slow=True, most=SLOW_PROCESSES)
        self._num_slow = 0  # slow renderings that run or wait
        self._away_until = 0.0  # when the event loop may try again

    def ask(self, job: TemplateJob, limits: TemplateLimits) -> TemplateAnswer:
        """Return the answer, NO_TIME and NO_MEMORY included. Raises NeedsThread on the event loop, Overloaded,
        NotStarted, RecursionError for values that are nested too deep.
        """
        packed = pack_job(job)
        quick = replace(limits, seconds=min(limits.seconds, QUICK_SECONDS))
        if text_pool.is_on_event_loop():
            return self._ask_at_once(quick, packed)
        begun = time.monotonic()
        answer = self._quick.ask(quick, packed)
        text_pool.charge_seconds(time.monotonic() - begun)
        if answer.kind not in (AnswerKind.NO_TIME, AnswerKind.NO_MEMORY):
            return answer
        begun = time.monotonic()
        with self._slowly(limits), text_pool.away():
            answer = self._slow.ask(limits, packed)
        text_pool.charge_seconds(time.monotonic() - begun)
        return answer

    @contextmanager
    def _slowly(self, limits: TemplateLimits) -> Iterator[None]:
        """Count a slow rendering. Raises Overloaded."""
        with self._lock:
            if self._num_slow >= SLOW_PROCESSES + _WAITING:
                raise Overloaded(
                    "The chat template takes long for these messages, as it does for "
                    f"{self._num_slow} other requests now, the most. Try again later.",
                    retry_after=limits.seconds,
                )
            self._num_slow += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_slow -= 1

    def close(self) -> None:
        """End the processes that have nothing to do."""
        self._quick.close()
        self._slow.close()

    def _ask_at_once(self, limits: TemplateLimits, job: bytes) -> TemplateAnswer:
        if time.monotonic() < self._away_until:
            raise NeedsThread
        answer = self._quick.ask_at_once(limits, job)
        if answer is None or answer.kind in (AnswerKind.NO_TIME, AnswerKind.NO_MEMORY):
            self._away_until = time.monotonic() + _AWAY_SECONDS
            raise NeedsThread
        return answer


class _Kind:
    """The processes of one kind."""

    def __init__(self, *, is_slow: bool, most: int) -> None:
        self._is_slow = is_slow
        self._turns = threading.BoundedSemaphore(most)
        self._idle: list[_TemplateProcess] = []  # some may still owe an answer

    def ask(self, limits: TemplateLimits, job: bytes) -> TemplateAnswer:
        """Wait for a turn and for the answer. A process that ends by itself has taken too much. Raises NotStarted."""
        with self._turns:
            process = self._taken() or self._started()
            try:
                answer = process.ask(limits, job, SLOW_PATIENCE if self._is_slow else QUICK_PATIENCE)
            except EOFError:
                answer = None
            except BaseException:
                process.close()
                raise
            if answer is None:
                process.close()
                return TemplateAnswer(0, AnswerKind.NO_TIME)
            if answer.kind is AnswerKind.NO_MEMORY:
                process.close()  # gives back what it holds
            else:
                self._idle.append(process)
            return answer

    def ask_at_once(self, limits: TemplateLimits, job: bytes) -> TemplateAnswer | None:
        """Return the answer if a process is idle and gives it in a moment, else None."""
        if not self._turns.acquire(blocking=False):
            return None
        try:
            if (process := self._taken()) is None:
                return None
            try:
                answer = process.ask(limits, job, _EVENT_LOOP_SECONDS)
            except EOFError:
                process.close()
                return None
            self._idle.append(process)
            return answer
        finally:
            self._turns.release()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _started(self) -> _TemplateProcess:
        """Return a new process. Raises NotStarted."""
        try:
            process = _TemplateProcess(is_slow=self._is_slow)
            if process.is_free(_START_SECONDS):
                return process
            process.close()
            reason = f"it takes longer than {_START_SECONDS:g} s"
        except (OSError, EOFError) as error:
            reason = str(error)
        log.error("A process that renders chat templates cannot be started: %s", reason)
        raise NotStarted

    def _taken(self) -> _TemplateProcess | None:
        """Return an idle process that owes nothing; those that do are ended."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return None
            try:
                if process.is_free():
                    return process
            except EOFError:
                pass
            process.close()


def _environment() -> Mapping[str, str]:
    """Return what a process gets of the environment: no keys and tokens."""
    kept = {
        name: value for name, value in os.environ.items() if name in _ENVIRONMENT or name.startswith(("LC_", "PYTHON"))
    }
    return {**kept, SAFE_PATH: "1"}


PROCESSES = TemplateProcesses()
"""Those of this process. They are started when they are needed."""

atexit.register(PROCESSES.close)
