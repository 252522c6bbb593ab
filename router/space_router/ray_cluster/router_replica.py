"""The router in a Ray replica: engine, web application, and a list of workers refreshed every second."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from space_common.tracing import exporting

from space_router.api.schema import DocumentedApp
from space_router.api.service import Service
from space_router.app import create_app
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.metrics import Metrics
from space_router.text.model_text import ModelText

logger = logging.getLogger(__name__)

MEET_SECONDS = 1.0


@dataclass(frozen=True)
class Present:
    """The workers that answered."""

    addresses: frozenset[str]
    is_complete: bool  # all workers answered, so a missing one is gone or shutting down


Meet = Callable[[int], Awaitable[Present]]
"""Sends the number of requests to every worker and returns those that answered."""


class RouterReplica:
    """Owns queue, pages and streams. The workers are other replicas, which come and go."""

    def __init__(self, config: ServeConfig, meet: Meet, *, meet_seconds: float = MEET_SECONDS) -> None:
        self.config = config
        self._meet = meet
        self._meet_seconds = meet_seconds
        self._exit = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._service: Service | None = None

    @property
    def service(self) -> Service:
        """The running service. Raises RuntimeError before `start`."""
        if self._service is None:
            raise RuntimeError("RouterReplica.start has not been awaited yet")
        return self._service

    async def start(self) -> DocumentedApp:
        """Start and return the application; /health is 503 until the first worker is up. Raises ConfigError."""
        text = await asyncio.to_thread(ModelText.load, self.config)
        metrics = Metrics()
        engine = Engine(self.config, metrics, tokenizer_hash=text.tokenizer.content_hash, sources=())
        tracer = None
        if self.config.tracing == "on":
            tracer = self._exit.enter_context(exporting("spaceserve", os.environ))
        self._service = Service(self.config, text, engine, metrics, tracer=tracer)
        await self._exit.enter_async_context(engine)
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._note_start())]
        return create_app(self._service)

    async def stop(self) -> None:
        """Stop at once; Ray has waited for the requests already."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._service is not None:
            self._service.draining = True
            self._service.restart.cancel()
        await self._exit.aclose()

    async def _follow(self) -> None:
        worker_pool, known = self.service.engine.worker_pool, frozenset[str]()
        while True:
            load = self.service.engine.load()
            try:
                present = await self._meet(load.num_queued + load.num_running)
            except Exception as error:  # whatever Ray raises, the known workers continue
                logger.warning("the workers cannot be asked where they are: %s", error)
            else:
                known = present.addresses if present.is_complete else known | present.addresses
                worker_pool.follow(known, finish_seconds=self.config.drain_timeout)
            await asyncio.sleep(self._meet_seconds)

    async def _note_start(self) -> None:
        await self.service.engine.wait_ready()
        self.service.started = True
