"""The two spans of one choice, `queue` and `generate`. They hold no text of prompt or output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from space_common.tracing import traceparent_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from space_router.engine.request.request import Statistics


class RequestTrace:
    """A `queue` span from construction to the first admission, then a `generate` span until `ended`.

    Both are children of the span that is current at construction.
    """

    def __init__(self, tracer: Tracer, request_id: str) -> None:
        from opentelemetry import context

        self._tracer = tracer
        self._parent: Context = context.get_current()
        self._queue: Span | None = self._start("queue", request_id)
        self._generate: Span | None = None
        self._request_id = request_id

    def admitted(self) -> str:
        """Record an admission (the first or a later one) and return the traceparent for the worker's span."""
        if self._queue is not None:
            self._queue.end()
            self._queue, self._generate = None, self._start("generate", self._request_id)
        elif self._generate is not None:
            self._generate.add_event("admitted again")
        return "" if self._generate is None else traceparent_of(self._generate)

    def ended(self, outcome: str, statistics: Statistics) -> None:
        """End the span with its outcome and statistics. Later calls have no effect."""
        from opentelemetry.trace import StatusCode

        span = self._generate or self._queue
        self._generate = self._queue = None
        if span is None:
            return
        span.set_attributes(
            {
                "spaceserve.outcome": outcome,
                "gen_ai.usage.input_tokens": statistics.num_prompt,
                "gen_ai.usage.output_tokens": statistics.num_generated,
                "spaceserve.cached_tokens": statistics.num_cached,
                "spaceserve.steps": statistics.num_steps,
                "spaceserve.drafted_tokens": statistics.num_drafted,
                "spaceserve.accepted_tokens": statistics.num_accepted,
                "spaceserve.worker_losses": statistics.num_worker_losses,
            }
        )
        if statistics.first_token_seconds is not None:
            span.set_attribute("spaceserve.time_to_first_token_seconds", statistics.first_token_seconds)
        if outcome in ("error", "deadline"):
            span.set_status(StatusCode.ERROR, outcome)
        span.end()

    def _start(self, name: str, request_id: str) -> Span:
        return self._tracer.start_span(name, self._parent, attributes={"spaceserve.request_id": request_id})
