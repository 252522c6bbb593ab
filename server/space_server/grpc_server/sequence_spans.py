"""The worker's tracing spans: one per traced sequence, from Admit to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from space_common.tracing import parent_of
from space_proto import worker_pb2 as pb

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

ENDS = {
    pb.FINISH_EOS: "eos",
    pb.FINISH_STOP_ID: "stop_id",
    pb.FINISH_LENGTH: "length",
    pb.FINISH_ERROR: "error",
    pb.FINISH_RETURNED: "returned",
}


@dataclass
class _Followed:
    """A running traced sequence and its counts so far."""

    span: Span
    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class SequenceSpans:
    """Observes the commands and reports of one session, on the stepping thread. Records no ids or text."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._followed: dict[int, _Followed] = {}

    def applied(self, command: pb.Command) -> None:
        """Record a command that was applied."""
        if command.HasField("admit") and command.admit.traceparent:
            admit = command.admit
            span = self._tracer.start_span(
                "worker",
                parent_of(admit.traceparent),
                attributes={
                    "spaceserve.sequence": admit.seq_id,
                    "gen_ai.usage.input_tokens": len(admit.ids),
                    "spaceserve.cached_tokens": admit.num_cached,
                },
            )
            self._followed[admit.seq_id] = _Followed(span)
        elif command.HasField("release"):
            self._end(command.release.seq_id, "released")

    def reported(self, report: pb.StepReport) -> None:
        """Record a step's report."""
        for part in report.sequences if self._followed else ():
            followed = self._followed.get(part.seq_id)
            if followed is None:
                continue
            if part.tokens and not followed.num_tokens:
                followed.span.add_event("first token")
            if part.paused:
                followed.span.add_event("paused without a page")
            followed.num_tokens += len(part.tokens)
            followed.num_steps += part.decoded
            followed.num_drafted += part.num_drafted
            followed.num_accepted += part.num_accepted
            if part.finish != pb.FINISH_NONE:
                self._end(part.seq_id, ENDS.get(part.finish, "unknown"))

    def close(self) -> None:
        """End every span: the session is over."""
        for seq_id in list(self._followed):
            self._end(seq_id, "router lost")

    def _end(self, seq_id: int, how: str) -> None:
        from opentelemetry.trace import StatusCode

        followed = self._followed.pop(seq_id, None)
        if followed is None:
            return
        followed.span.set_attributes(
            {
                "spaceserve.outcome": how,
                "gen_ai.usage.output_tokens": followed.num_tokens,
                "spaceserve.steps": followed.num_steps,
                "spaceserve.drafted_tokens": followed.num_drafted,
                "spaceserve.accepted_tokens": followed.num_accepted,
            }
        )
        if how == "error":
            followed.span.set_status(StatusCode.ERROR)
        followed.span.end()
