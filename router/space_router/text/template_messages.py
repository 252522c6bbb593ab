"""What the router and the processes that render chat templates send each other.

A job is two messages of JSON, each behind its length: its number with the limits, and the template with its values. An
answer is a header and plain text: a template that took its process over could say nothing else.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import IO, Any

from space_router.text import written_numbers
from space_router.text.written_numbers import WrittenNumber


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may take."""

    num_steps: int = 500_000  # loop iterations and macro calls: 120 for each of 4096 messages
    num_written: int = 64 * 1024**2  # characters, counted each time they are written; far above any context window
    num_prompt: int = 16 * 1024**2  # characters of the result
    seconds: float = 5.0  # of a processor
    compile_seconds: float = 2.0  # of a processor; the longest published templates take 0.05


LIMITS = TemplateLimits()


@dataclass(frozen=True)
class TemplateJob:
    """A template to render with `values`; with None, to compile. `now`: the time of `strftime_now`."""

    source: str
    values: Mapping[str, Any] | None = None
    now: datetime | None = None


READY = 0  # the number of the answer that a process gives when it has started


class AnswerKind(enum.IntEnum):
    TEXT = 0  # the rendered text, or the variables of a compiled template, separated by blanks
    FAULT = 1  # the template's error
    TOO_LONG = 2  # the text is longer than a prompt may be
    NO_TIME = 3
    NO_MEMORY = 4


@dataclass(frozen=True)
class TemplateAnswer:
    """`number`: of the job."""

    number: int
    kind: AnswerKind
    text: str = ""


_LENGTH = struct.Struct("<Q")
_HEADER = struct.Struct("<QBQ")  # number, kind, bytes of the text


def pack_job(job: TemplateJob) -> bytes:
    """Return a job without its limits. Raises RecursionError if the values are nested too deep."""
    return _framed([job.source, job.values, None if job.now is None else job.now.isoformat()])


def write_job(number: int, limits: TemplateLimits, packed: bytes) -> bytes:
    """Return a packed job as it is sent."""
    return _framed([number, asdict(limits)]) + packed


def read_job(pipe: IO[bytes]) -> tuple[int, TemplateLimits, TemplateJob]:
    """Raises EOFError."""
    number, limits = _read(pipe)
    source, values, now = _read(pipe)
    return number, TemplateLimits(**limits), TemplateJob(source, values, now and datetime.fromisoformat(now))


def _framed(value: Any) -> bytes:
    text = written_numbers.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(text)) + text


def _read(pipe: IO[bytes]) -> Any:
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    text = pipe.read(_LENGTH.unpack(header)[0]).decode("utf-8", "surrogatepass")
    return json.loads(text, parse_float=WrittenNumber.parsed, parse_int=WrittenNumber.parsed)


def write_answer(answer: TemplateAnswer) -> bytes:
    text = answer.text.encode("utf-8", "surrogatepass")
    return _HEADER.pack(answer.number, answer.kind, len(text)) + text


def answer_length(received: bytearray) -> int:
    """Return the length of the first answer in bytes; 0: it is not complete."""
    if len(received) < _HEADER.size:
        return 0
    length = _HEADER.size + int(_HEADER.unpack_from(received)[2])
    return length if len(received) >= length else 0


def read_answer(answer: bytes) -> TemplateAnswer:
    """Raises ValueError for what is none."""
    number, kind, _ = _HEADER.unpack_from(answer)
    return TemplateAnswer(number, AnswerKind(kind), answer[_HEADER.size :].decode("utf-8", "surrogatepass"))
