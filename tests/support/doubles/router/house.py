"""A scheduler and a scripted batch in lockstep, and an engine with a scripted worker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.request import worker_messages
from space_router.engine.request.request import SamplingOptions, Stream, ValidRequest
from space_router.engine.request.request_state import Phase, RequestState
from space_router.engine.request.worker_messages import WorkerModelFacts
from space_router.engine.scheduler import Scheduler
from space_router.metrics import Metrics

from doubles.router import Script, ScriptedBatch, ScriptedWorker


def request_of(prompt: int | tuple[int, ...] = 6, max_tokens: int | None = 12, **fields: Any) -> ValidRequest:
    """A request with so many prompt ids (or these); `name` is its request_id, other fields as in ValidRequest."""
    ids = tuple(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
    name = fields.pop("name", "r")
    sampling = fields.pop("sampling", SamplingOptions(seed=0))
    return ValidRequest(request_id=name, prompt_ids=ids, sampling=sampling, max_tokens=max_tokens, **fields)


def answer(request: ValidRequest, script: Script) -> tuple[int, ...]:
    """What the scripted language says to a request, asked one id at a time."""
    ids = list(request.prompt_ids)
    sampling = worker_messages.sampling(request.sampling)
    assert request.max_tokens is not None
    while len(ids) - len(request.prompt_ids) < request.max_tokens:
        ids.append(script.language.next_id(ids, len(request.prompt_ids), sampling))
        if ids[-1] in request.eos_ids + request.stop_ids:
            break
    return tuple(ids[len(request.prompt_ids) :])


class Lockstep:
    """A router's schedule and a worker's batch without sockets: `step` is one step of the worker.

    `delay`: reports reach the router so many steps late.
    """

    def __init__(self, script: Script, *, max_prefill_rows: int = 64, delay: int = 0) -> None:
        self.script = script
        self.batch = ScriptedBatch(script)
        hello = ScriptedWorker(script).hello()
        self.scheduler = Scheduler(
            WorkerModelFacts.from_hello(hello), max_prefill_rows=max_prefill_rows, max_draft_length=None
        )
        start = worker_pb2.Start(protocol_major=1, max_prefill_rows=max_prefill_rows, max_draft_length=8)
        self.batch.apply(worker_pb2.Command(start=start))
        self.queue = RequestQueue(1000)
        self.lives: list[RequestState] = []
        self.messages: list[list[worker_pb2.Command]] = []  # what the router said, moment by moment
        self._delay = delay
        self._mail: deque[worker_pb2.StepReport] = deque()

    def submit(self, request: ValidRequest) -> RequestState:
        live = RequestState(request, request.max_tokens or 1, age=len(self.lives), submitted=0.0)
        self.lives.append(live)
        self.queue.push(live)
        return live

    def cancel(self, live: RequestState) -> None:
        self.queue.remove(live)
        live.phase = Phase.ENDED
        self.scheduler.release(live)

    def step(self) -> None:
        while (live := self.queue.head()) is not None and (placement := self.scheduler.placement(live)):
            self.queue.admitted(live, 0.0)
            self.scheduler.admit(live, placement)
        self.scheduler.grant_pages()
        self.messages.append(self.scheduler.take_commands())
        for command in self.messages[-1]:
            self.batch.apply(command)
        self._mail.append(self.batch.step())
        if len(self._mail) > self._delay:
            outcome = self.scheduler.report(self._mail.popleft())
            for live in outcome.readmit:
                self.queue.push(live)
        self.scheduler.check()

    def run(self, max_steps: int = 5000) -> None:
        """Until every request has ended and every page is back."""
        for _ in range(max_steps):
            if all(live.phase is Phase.ENDED for live in self.lives) and not self.scheduler.sequences:
                assert self.scheduler.pool.num_held == 0
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {[live.phase for live in self.lives]}")

    def text(self, live: RequestState) -> tuple[int, ...]:
        return tuple(live.ids[live.num_prompt :])


async def text_of(engine: Engine, request: ValidRequest, leader: Stream | None = None) -> tuple[int, ...]:
    """Everything that an engine streams for a request."""
    async with engine.submit(request, leader=leader) as stream:
        return tuple([token async for delta in stream for token in delta.tokens])


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something holds."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  conditions of every kind, none of which is an event
            await asyncio.sleep(0)


class House:
    """An engine and its scripted worker, over a real socket."""

    def __init__(self, engine: Engine, worker: ScriptedWorker, metrics: Metrics) -> None:
        self.engine = engine
        self.worker = worker
        self.metrics = metrics

    async def text(self, request: ValidRequest, leader: Stream | None = None) -> tuple[int, ...]:
        """Everything the engine streams for a request."""
        return await text_of(self.engine, request, leader)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop turn until something holds."""
        await until(condition)

    async def quiet(self) -> None:
        """Until every page is free or cached; the books must balance then and the worker have no complaint."""
        await self.until(lambda: self.engine.load().blocks_held == 0)
        self.engine.check()
        load = self.engine.load()
        assert load.blocks_free + load.blocks_cached == self.worker.script.num_blocks * load.num_workers_up
        assert load.num_running == load.num_queued == 0
        self.worker.check()


@asynccontextmanager
async def in_house(script: Script | None = None, **fields: Any) -> AsyncIterator[House]:
    """At the end every page is free or cached. `fields`: of ServeConfig, and `max_lag`, `tokenizer_hash` of Engine."""
    engine_fields = {name: fields.pop(name) for name in ("max_lag", "tokenizer_hash") if name in fields}
    async with asyncio.timeout(60), ScriptedWorker(script) as worker:
        metrics = Metrics()
        config = replace(ServeConfig(worker_address=(worker.address,)), **fields)
        async with Engine(config, metrics, **engine_fields) as engine:
            await engine.wait_ready()
            house = House(engine, worker, metrics)
            yield house
            await house.quiet()
        worker.check()
