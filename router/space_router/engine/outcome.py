"""What a worker's report means for the requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from space_proto import worker_pb2

from space_router.engine.live_request import LiveRequest


@dataclass(frozen=True)
class Advance:
    """What one report says about one request."""

    live: LiveRequest
    report: worker_pb2.SequenceReport
    num_prompt_logprobs_known: int  # leading ones of the report's that the reader has from an earlier admission


@dataclass
class Outcome:
    """What one report means for the requests."""

    advances: list[Advance] = field(default_factory=list)
    readmit: list[LiveRequest] = field(default_factory=list)  # preempted and acknowledged: may be queued again
