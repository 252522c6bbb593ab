"""All requests of this router, from the door to the last token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from space_router.config import ServeConfig
from space_router.engine.model_facts import ModelFacts
from space_router.engine.request import ValidRequest
from space_router.engine.stream import Stream
from space_router.metrics import Metrics


@dataclass(frozen=True)
class LoadFigures:
    """How busy the engine is now."""

    num_queued: int
    num_running: int
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    num_workers_up: int
    draining: bool


class Engine:
    """Queue, pages, workers and streams.

        async with Engine(config, metrics) as engine:
            async with engine.submit(request) as stream:
                async for delta in stream: ...

    Entering starts the workers and does not wait for them: see `ready` and `wait_ready`. `submit` is synchronous and
    either queues the request or raises `errors.Refused`.
    """

    def __init__(
        self,
        config: ServeConfig,
        metrics: Metrics,
        *,
        tokenizer_hash: str | None = None,
        worker_timeout: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tokenizer_hash`: what a worker's Hello must say (sha256 of tokenizer.json), None to take any."""

    facts: ModelFacts | None
    """What the workers said about the model; None until the first Hello."""

    async def __aenter__(self) -> Engine: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    @property
    def ready(self) -> bool:
        """At least one worker is up and the engine is not draining."""
        raise NotImplementedError

    async def wait_ready(self) -> ModelFacts:
        """Wait for the first worker. Raises WorkerStartFailed with the worker's own last words."""
        raise NotImplementedError

    async def failed(self) -> None:
        """Return never, or raise WorkerStartFailed once no worker can be started any more."""
        raise NotImplementedError

    def submit(self, request: ValidRequest, *, leader: Stream | None = None) -> Stream:
        """Queue a request, or raise PromptTooLong, CacheTooSmall, QueueFull, NotReady or Draining.

        `leader`: a stream with the same prompt (choice 0); this request waits until the leader's prompt is computed,
        and shares its blocks.
        """
        raise NotImplementedError

    def cancel(self, request_id: str) -> bool:
        """End a request by its name with RequestCancelled; False where there is none."""
        raise NotImplementedError

    def load(self) -> LoadFigures:
        raise NotImplementedError

    async def drain(self, timeout: float) -> bool:
        """Take no new work; wait until every stream has ended, at most `timeout` seconds; True if all did."""
        raise NotImplementedError
