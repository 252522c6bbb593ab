"""A whole router in this process, with a scripted worker behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from doubles.router import ScriptedWorker
from doubles.router.whole_router import model_text, script
from space_router.api.service import Service
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.metrics import Metrics

from fuzz.harness import Finding


class Router:
    """Service, engine and worker."""

    def __init__(self, service: Service, engine: Engine, worker: ScriptedWorker) -> None:
        self.service, self._engine, self._worker = service, engine, worker

    async def settle(self) -> None:
        """Wait until all is idle. Raises where a request goes on, a page is lost, or the worker got a wrong command."""
        load = self._engine.load()
        try:
            async with asyncio.timeout(20):
                while load.num_running or load.num_queued or load.blocks_held:
                    await asyncio.sleep(0.01)
                    load = self._engine.load()
        except TimeoutError:
            raise Finding(f"left behind: {load}") from None
        self._engine.check()
        self._worker.check()
        assert load.num_workers_up == 1, "the worker was lost"


@asynccontextmanager
async def serving() -> AsyncIterator[Router]:
    """A router that is ready."""
    metrics = Metrics()
    async with ScriptedWorker(script(num_blocks=32, window=48)) as worker:
        config = replace(ServeConfig(), worker_address=(worker.address,), max_queue=8)
        async with Engine(config, metrics) as engine:
            await engine.wait_ready()
            text = model_text("chatml")
            yield Router(Service(config, text, engine, metrics, started=True), engine, worker)
