"""The effects of a worker's report on its requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from space_proto import worker_pb2

from space_router.engine.request.request import Delta
from space_router.engine.request.request_state import RequestState


class SequenceUpdate(NamedTuple):
    """One report's news of one request."""

    live: RequestState
    delta: Delta  # without prompt logprobs that were delivered in an earlier admission
    part: worker_pb2.SequenceReport  # the message, for rarely used fields


@dataclass
class ReportResult:
    """The effects of one report."""

    updates: list[SequenceUpdate] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)  # number of tokens of each update that is a decode step
    readmit: list[RequestState] = field(default_factory=list)  # preempted and released: to be queued again
