"""How soon pages come back, counted in steps of a worker that can count them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from doubles.router import Script, ScriptedWorker, never
from doubles.tcp import tcp_connection
from doubles.tokenizers import VOCAB_SIZE, write_checkpoint
from space_router.api.service import Service
from space_router.app import create_app
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.metrics import Metrics
from space_router.text.model_text import ModelText

STEP_SECONDS = 0.05  # Far longer than a disconnect takes to be noticed, so that steps can be counted
SCRIPT: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "mask_ids": (), "eos_ids": (), "step_seconds": STEP_SECONDS}


@asynccontextmanager
async def listening(folder: Path, worker: ScriptedWorker, **settings: int) -> AsyncIterator[tuple[Engine, int]]:
    """A router in this process, in front of `worker`: its engine, and its port."""
    write_checkpoint(folder)
    config = ServeConfig(model=str(folder), worker_address=(worker.address,), **settings)
    text, metrics = ModelText.load(config), Metrics()
    async with Engine(config, metrics) as engine:
        await engine.wait_ready()
        service = Service(config, text, engine, metrics)
        server = uvicorn.Server(uvicorn.Config(create_app(service), port=0, log_config=None, lifespan="off"))
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        yield engine, server.servers[0].sockets[0].getsockname()[1]
        server.should_exit = True
        await serving


@asynccontextmanager
async def asked(port: int, **fields: object) -> AsyncIterator[asyncio.StreamWriter]:
    """A connection on which a request has been sent."""
    body = json.dumps({"max_tokens": 60, "temperature": 0, "ignore_eos": True, **fields}).encode()
    async with tcp_connection(f"127.0.0.1:{port}") as (_, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        yield writer


async def until(holds: Callable[[], bool]) -> None:
    """Let the others run until `holds()`."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - what is waited for happens behind a socket and sets no event
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_frees_its_pages_within_two_steps(tmp_path: Path, stream: bool) -> None:
    # One block holds a whole request, so that the one that stays holds one all the while.
    script = Script(block_size=128, num_blocks=8, accepts=never, **SCRIPT)
    async with (
        ScriptedWorker(script) as worker,
        listening(tmp_path, worker) as (engine, port),
        asked(port, prompt="one that stays and keeps the worker stepping", stream=True) as stays,
    ):
        await until(lambda: engine.load().num_running == 1)
        assert engine.load().blocks_held == 1
        async with asked(port, prompt="one that goes", stream=stream) as goes:
            await until(lambda: worker.figures.num_admits == 2)
            both_since = worker.figures.num_steps
            await until(lambda: worker.figures.num_steps >= both_since + 2)
            assert engine.load().blocks_held == 2
            step_in_flight = worker.figures.num_steps + 1
            goes.close()
            await until(lambda: engine.load().blocks_held == 1)
            assert worker.figures.num_steps <= step_in_flight + 2
        stays.close()
        await until(lambda: engine.load().blocks_held == 0)
        engine.check()
        worker.check()


async def test_a_client_that_disconnects_in_the_queue_never_reaches_the_worker(tmp_path: Path) -> None:
    script = Script(max_sequences=1, **SCRIPT)
    async with (
        ScriptedWorker(script) as worker,
        listening(tmp_path, worker) as (engine, port),
        asked(port, prompt="one", stream=True) as runs,
    ):
        await until(lambda: engine.load().num_running == 1)
        async with asked(port, prompt="two", stream=True) as waits:
            await until(lambda: engine.load().num_queued == 1)
            waits.close()
            await until(lambda: engine.load().num_queued == 0)
        runs.close()
        await until(lambda: engine.load().blocks_held == 0)
        assert worker.figures.num_admits == 1
        worker.check()
