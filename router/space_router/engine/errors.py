"""Errors of a request between submission and its last token.

EngineError
├── Refused                 raised by Engine.submit; nothing was queued
│   ├── PromptTooLong       prompt (and max_tokens) do not fit the window
│   ├── CacheTooSmall       prompt and max_tokens do not fit all pages together
│   ├── QueueFull           too many requests or prompt tokens wait: retry later
│   ├── NotReady            no worker has said hello yet
│   └── Draining            the router is stopping
├── Broken                  raised by the stream's iterator
│   ├── WorkerFailed        this request crashed workers, or no worker can be started any more
│   ├── QueueTimeout        its turn did not come within the longest wait: retry later
│   ├── DeadlineExceeded    the request's deadline has passed or cannot be met (then also raised by Engine.submit)
│   ├── RequestFailed       this request alone failed in the worker
│   └── RequestCancelled    cancelled by its id, or its stream was left
├── RestartRefused          workers cannot be restarted as requested
├── LoraRefused             a LoRA cannot be loaded or unloaded as requested
└── WorkerStartFailed       no worker can be started (a bad model path, for example)
"""

from __future__ import annotations


class EngineError(Exception):
    """Base class of the engine's errors."""


class Refused(EngineError):
    """The request was refused on submission; nothing was queued."""


class PromptTooLong(Refused):
    def __init__(self, *, num_prompt: int, max_tokens: int | None, window: int, is_of_prompts: bool = False) -> None:
        """`is_of_prompts`: the window is that of prompts alone (--max-prompt-tokens)."""
        self.is_of_prompts = is_of_prompts
        self.num_prompt = num_prompt
        self.max_tokens = max_tokens
        self.window = window
        super().__init__(self.message_for("max_tokens"))

    def message_for(self, limit: str) -> str:
        """Return the message for an API that calls max_tokens `limit`."""
        if self.is_of_prompts:
            return (
                f"This server's maximum context length is {self.window} tokens for a prompt (--max-prompt-tokens). The "
                f"prompt has {self.num_prompt} tokens. Shorten it."
            )
        if self.max_tokens is None or self.num_prompt >= self.window:
            return (
                f"This model's maximum context length is {self.window} tokens, the answer included. The prompt has "
                f"{self.num_prompt} tokens; at most {self.window - 1} fit. Shorten it."
            )
        return (
            f"This model's maximum context length is {self.window} tokens. The prompt has {self.num_prompt} tokens and "
            f"{limit} is {self.max_tokens}: {self.num_prompt + self.max_tokens} together. Shorten the prompt or ask "
            f"for at most {self.window - self.num_prompt}."
        )


class CacheTooSmall(Refused):
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
    """`waiting`: what waits, with its number; `most`: how many of it the queue takes."""

    def __init__(self, waiting: str, most: str, *, retry_after: float) -> None:
        super().__init__(
            f"{waiting} are waiting already, and the queue takes {most}. Try again in about {retry_after:.0f} s."
        )
        self.retry_after = retry_after  # seconds


class NotReady(Refused):
    """No worker is up yet, so the model's limits are not known."""


class Draining(Refused):
    """The router is stopping and takes no new requests."""


class Broken(EngineError):
    """The request was queued and ended before its last token."""


class WorkerFailed(Broken):
    """Workers crashed running this request, the last one running it alone; or no worker is left."""


class DeadlineExceeded(Broken):
    def __init__(self, seconds: float, *, least: float | None = None) -> None:
        """`seconds`: the deadline; `least`: minimum seconds the request needs, if it is refused before it began."""
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


class QueueTimeout(Broken):
    def __init__(self, seconds: float, *, retry_after: float) -> None:
        """`seconds`: the longest wait."""
        super().__init__(
            f"The request waited {seconds:g} s, as long as this server lets one wait, and its turn did not come. "
            f"Nothing of it was computed. Try again in about {retry_after:.0f} s."
        )
        self.retry_after = retry_after  # seconds


class RequestFailed(Broken):
    """This request failed; others are not affected."""


class RequestCancelled(Broken):
    """The request was cancelled by its id, or its stream was left."""


class WorkerStartFailed(EngineError):
    """No worker can be started; the message has the end of its stderr, which `summary` leaves out."""

    def __init__(self, message: str, summary: str | None = None) -> None:
        super().__init__(message)
        self.summary = summary or message


class ProtocolViolation(EngineError):
    """A worker violated the protocol; it is restarted."""


class LoraRefused(EngineError):
    """A LoRA that cannot be loaded or unloaded as requested; the message says why."""


class RestartRefused(EngineError):
    def __init__(self, message: str, *, is_busy: bool = False) -> None:
        super().__init__(message)
        self.is_busy = is_busy  # another restart is under way
