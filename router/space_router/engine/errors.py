"""What can go wrong with a request between the door and its last token.

EngineError
├── Refused                 at the door: raised by Engine.submit, nothing was queued
│   ├── PromptTooLong       prompt (and max_tokens) do not fit the window
│   ├── CacheTooSmall       prompt and max_tokens do not fit all pages together
│   ├── QueueFull           come back later
│   ├── NotReady            no worker has said hello yet
│   └── Draining            the router is stopping
├── Broken                  later: raised out of the stream's iterator
│   ├── WorkerFailed        workers died of this request, or none can be started any more
│   ├── DeadlineExceeded    the request's own time is over, or too short (then also raised by Engine.submit)
│   ├── RequestFailed       this request alone failed in the worker
│   └── RequestCancelled    somebody cancelled it by its name
├── RestartRefused          an operator's wish that cannot be granted now
└── WorkerStartFailed       no worker can be started at all (a bad model path, for example)
"""

from __future__ import annotations


class EngineError(Exception):
    """Anything the engine says no to."""


class Refused(EngineError):
    """The request was refused at the door; nothing was queued."""


class PromptTooLong(Refused):
    """Prompt, or prompt and max_tokens, exceed the window of the model."""

    def __init__(self, *, num_prompt: int, max_tokens: int | None, window: int) -> None:
        self.num_prompt = num_prompt
        self.max_tokens = max_tokens
        self.window = window
        super().__init__(self.told("max_tokens"))

    def told(self, limit: str) -> str:
        """To a client that knows max_tokens by another name."""
        if self.max_tokens is None or self.num_prompt >= self.window:
            return (
                f"The prompt has {self.num_prompt} tokens; this model takes {self.window} with the answer, "
                f"so at most {self.window - 1} of prompt. Shorten it."
            )
        return (
            f"The prompt has {self.num_prompt} tokens and {limit} is {self.max_tokens}: "
            f"{self.num_prompt + self.max_tokens} together; this model takes {self.window}. Shorten the prompt or ask "
            f"for at most {self.window - self.num_prompt}."
        )


class CacheTooSmall(Refused):
    """Prompt and max_tokens need more slots than all pages of a worker have."""

    def __init__(self, *, num_prompt: int, max_tokens: int | None, num_slots: int) -> None:
        answer = 1 if max_tokens is None else max_tokens
        super().__init__(
            f"The request needs {num_prompt + answer + 1} slots of cache: a prompt of {num_prompt} tokens, an answer "
            f"of {answer}, and one more. All pages together have {num_slots}. Ask for less or raise `--kv-memory`."
        )
        self.num_prompt = num_prompt
        self.max_tokens = max_tokens
        self.num_slots = num_slots


class QueueFull(Refused):
    """As many requests, or prompt tokens, wait as may wait."""

    def __init__(self, waiting: str, *, retry_after: float) -> None:
        super().__init__(f"{waiting} are waiting already. Try again in about {retry_after:.0f} s.")
        self.retry_after = retry_after  # seconds


class NotReady(Refused):
    """No worker is up yet, so nothing is known about the model."""


class Draining(Refused):
    """The router is stopping and takes no new work."""


class Broken(EngineError):
    """The request was taken, and ends without its last token."""


class WorkerFailed(Broken):
    """A worker ended by itself with this request among others, and another with this one alone; or none is left."""


class DeadlineExceeded(Broken):
    """The request's own time is over, or too short for what is still to be done."""

    def __init__(self, seconds: float, *, least: float | None = None) -> None:
        """`least`: seconds it would take at least from now on, where it is refused before it has begun."""
        if least is None:
            message = f"The request did not finish within its {seconds:g} s. Ask for less or raise `timeout`."
        else:
            message = (
                f"The request cannot finish within its {seconds:g} s any more: it takes at least {least:.3g} s from "
                "now on. Ask for less or raise `timeout`."
            )
        super().__init__(message)
        self.seconds = seconds
        self.least = least


class RequestFailed(Broken):
    """This request alone failed; every other goes on."""


class RequestCancelled(Broken):
    """The request was cancelled by its name."""


class WorkerStartFailed(EngineError):
    """No worker can be started: its own last words are in the message."""


class ProtocolViolation(EngineError):
    """A worker contradicted the contract; it is not trusted any more and is started again."""


class RestartRefused(EngineError):
    """Workers cannot be restarted as it was wished."""

    def __init__(self, message: str, *, is_busy: bool = False) -> None:
        super().__init__(message)
        self.is_busy = is_busy  # another restart is under way
