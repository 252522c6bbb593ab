"""What a worker's report means for the requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from space_proto import worker_pb2

from space_router.engine.request.request import Delta
from space_router.engine.request.request_state import RequestState


class SequenceUpdate(NamedTuple):
    """What one report says about one request."""

    live: RequestState
    delta: Delta  # without the prompt's logprobs that the reader has from an earlier admission
    part: worker_pb2.SequenceReport  # the message, for what is seldom asked


@dataclass
class ReportResult:
    """What one report means for the requests."""

    advances: list[SequenceUpdate] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)  # tokens of each advance that is a decode step
    readmit: list[RequestState] = field(default_factory=list)  # preempted and acknowledged: may be queued again
