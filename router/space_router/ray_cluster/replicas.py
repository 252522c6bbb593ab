"""The replicas on a Ray cluster: a worker process, and the router with a list of workers refreshed every second."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from space_common.tracing import exporting

from space_router.api.schema import DocumentedApp
from space_router.api.service import Service
from space_router.app import create_app
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.workers.supervisor import Supervisor, WorkerDidNotStart, worker_command
from space_router.metrics import Metrics
from space_router.ray_cluster.scaling import FIGURE
from space_router.text.encoder_text import EncoderText
from space_router.text.model_text import ModelText

logger = logging.getLogger(__name__)

STEADY_SECONDS = 10.0  # seconds up after which the next process starts without backoff
FIGURE_SECONDS = 10.0  # that the number of requests of a router is believed; it asks every second
PLACING_SECONDS = 15.0  # that workers may take to be placed before the log says what they wait for
HANDOVER_SECONDS = 5.0  # seconds beyond the drain time for the router to take back running requests


class WorkerReplica:
    """Starts the process, restarts it when it ends, and ends it with the replica. Its address never changes."""

    def __init__(
        self,
        config: ServeConfig,
        host: str,
        argv: Callable[[ServeConfig, str, Path], Sequence[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: this machine, as the router reaches it; `argv`: returns a worker's argument list for an address and
        the file with its port's secret."""
        argv = argv or _command
        self.address = f"{host}:{_free_port(host)}"
        self._folder = tempfile.TemporaryDirectory(prefix="spaceserve-")  # mode 0700
        self._secret_file = Path(self._folder.name) / "secret"
        write_secret(self._secret_file, secrets.token_hex(32))  # until the router has brought its own
        self.num_requests = 0  # all requests of the router
        self._supervisor = Supervisor(
            lambda _: argv(config, self.address, self._secret_file),
            name=f"worker at {self.address}",
            start_timeout=config.worker_start_timeout,
            grace=config.drain_timeout + HANDOVER_SECONDS,
        )
        self._keeping: asyncio.Task[None] | None = None
        self._trouble = ""
        self._secret = ""  # of the router that asked last
        self._clock = clock
        self._met = clock()  # when a router asked last

    @property
    def pid(self) -> int | None:
        return self._supervisor.pid

    async def start(self) -> None:
        """Start the worker and wait until it listens. Raises WorkerDidNotStart with the end of its stderr."""
        await self._supervisor.__aenter__()
        try:
            await self._supervisor.start()
        except BaseException:
            await self.stop()
            raise
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End the worker after the drain time and `HANDOVER_SECONDS` at most."""
        if self._keeping is not None:
            self._keeping.cancel()
        await self._supervisor.__aexit__(None, None, None)
        self._folder.cleanup()

    def meet(self, num_requests: int, secret: str) -> str:
        """Store the router's number of requests and the secret of its connections; return this worker's address."""
        self.num_requests, self._met = num_requests, self._clock()
        if secret != self._secret:
            write_secret(self._secret_file, secret)
            self._secret = secret
        return self.address

    def check_health(self) -> None:
        """Raise WorkerDidNotStart if the worker could not be restarted; Ray then replaces the replica."""
        if self._trouble:
            raise WorkerDidNotStart(self._trouble)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the router's number of requests; 0 once no router has asked for a while."""
        is_known = self._clock() - self._met <= FIGURE_SECONDS
        return {FIGURE: float(self.num_requests if is_known else 0)}

    async def _keep(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            await self._supervisor.ended()
            if clock() - begun > STEADY_SECONDS:
                self._supervisor.backoff.worked()
            logger.warning("the worker at %s has ended: it is started again", self.address)
            try:
                await self._supervisor.start()
            except WorkerDidNotStart as error:
                self._trouble = str(error)
                return


def _command(config: ServeConfig, address: str, secret_file: Path) -> list[str]:
    return worker_command(config, address, secret_file=secret_file)


def write_secret(file: Path, secret: str) -> None:
    """Replace the file, which only this user may read; a process that reads it sees the old or the new content."""
    new = file.with_name(f"{file.name}.new")
    new.touch(mode=0o600)
    new.write_text(f"{secret}\n", encoding="ascii")
    new.replace(file)


def _free_port(host: str) -> int:
    """Return a free port. If another process takes it before the worker listens, the replica fails to start."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


MEET_SECONDS = 1.0


@dataclass(frozen=True)
class Present:
    """The workers that answered."""

    addresses: frozenset[str]
    is_complete: bool  # all workers answered, so a missing one is gone or shutting down


Meet = Callable[[int, str], Awaitable[Present]]
"""Sends the number of requests and the secret of the workers' ports to every worker; returns those that answered."""


class RouterReplica:
    """Owns queue, pages and streams. The workers are other replicas, which come and go."""

    def __init__(
        self,
        config: ServeConfig,
        meet: Meet,
        *,
        meet_seconds: float = MEET_SECONDS,
        min_workers: int = 1,
        explain: Callable[[], str] | None = None,
        placing_seconds: float = PLACING_SECONDS,
    ) -> None:
        """`min_workers`: that are to be placed; `explain`: says what one asks of the cluster and what there is."""
        self._min_workers, self._explain, self._placing_seconds = min_workers, explain, placing_seconds
        self._secret = secrets.token_hex(32)
        self._folder = tempfile.TemporaryDirectory(prefix="spaceserve-")
        secret_file = Path(self._folder.name) / "secret"
        write_secret(secret_file, self._secret)
        self.config = replace(config, worker_secret_file=str(secret_file))
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
        encoder = await asyncio.to_thread(EncoderText.load, self.config)
        metrics = Metrics()
        engine = Engine(
            self.config,
            metrics,
            tokenizer_hash=text.tokenizer.content_hash,
            encoder_hash=None if encoder is None else encoder.content_hash,
            sources=(),
        )
        tracer = None
        if self.config.tracing == "on":
            tracer = self._exit.enter_context(exporting("spaceserve", os.environ))
        self._service = Service(self.config, text, engine, metrics, tracer=tracer, encoder=encoder)
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
        self._folder.cleanup()

    async def _follow(self) -> None:
        worker_pool, known = self.service.engine.worker_pool, frozenset[str]()
        clock = asyncio.get_running_loop().time
        enough_at, has_said = clock(), False  # when there were enough workers last
        while True:
            load = self.service.engine.load()
            try:
                present = await self._meet(load.num_queued + load.num_running, self._secret)
            except Exception as error:  # whatever Ray raises, the known workers continue
                logger.warning("the workers cannot be asked where they are: %s", error)
            else:
                known = present.addresses if present.is_complete else known | present.addresses
                if len(known) >= self._min_workers:
                    enough_at, has_said = clock(), False
                has_said = has_said or self._say_missing(len(known), clock() - enough_at)
                worker_pool.follow(known, finish_seconds=self.config.drain_timeout)
            await asyncio.sleep(self._meet_seconds)

    def _say_missing(self, num_present: int, seconds: float) -> bool:
        """Log once, after `placing_seconds`, that fewer workers answer than there shall be; return whether it did."""
        if num_present >= self._min_workers or seconds < self._placing_seconds:
            return False
        why = "" if self._explain is None else f"; {self._explain()}"
        logger.warning(
            "%d of min_workers=%d workers are placed and answer%s. Add machines, or ask for fewer workers or less for "
            "each (cpus_per_worker, gpus_per_worker).",
            num_present,
            self._min_workers,
            why,
        )
        return True

    async def _note_start(self) -> None:
        await self.service.engine.wait_ready()
        self.service.started = True
