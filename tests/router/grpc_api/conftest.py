"""A whole router in one process with both its faces, gRPC on a socket and HTTP over ASGI; a scripted worker behind."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import httpx
import pytest
from doubles.router import Script, ScriptedWorker
from doubles.router.whole_router import Seen, Start, events_of, forget_routes, model_text, script
from space_proto import generate_pb2, generate_pb2_grpc
from space_router.api.service import Service
from space_router.app import create_app
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.grpc_api.server import GrpcServer
from space_router.metrics import Metrics
from space_router.text.encoder_text import EncoderText


@dataclass
class Router:
    """One router to ask by gRPC, and by HTTP to compare with."""

    channel: grpc.aio.Channel
    stub: Any
    http: httpx.AsyncClient
    service: Service
    server: GrpcServer
    worker: ScriptedWorker
    connect: Callable[[], Awaitable[None]]  # to its worker, and until that is ready

    async def events(self, *, deadline: float | None = None, **fields: Any) -> list[generate_pb2.GenerateEvent]:
        """All events of a call, which must succeed."""
        request = generate_pb2.GenerateRequest(**fields)
        return [event async for event in self.stub.Generate(request, timeout=deadline)]

    async def refusal(self, *, deadline: float | None = None, **fields: Any) -> grpc.aio.AioRpcError:
        """The error of a call, which must have no event."""
        request = generate_pb2.GenerateRequest(**fields)
        return await self.error(self.stub.Generate(request, timeout=deadline).read())

    async def error(self, call: Awaitable[Any]) -> grpc.aio.AioRpcError:
        """The error of a call, which must fail."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            pytest.fail(f"it was answered: {await call}")
        return caught.value

    async def sse(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of the same request over HTTP."""
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return events_of(await self.http.post(path, json=body))

    def value(self, name: str, **labels: str) -> float | None:
        return self.service.metrics.value(name, **labels)


@asynccontextmanager
async def running(
    script: Script, *, config: ServeConfig, chat: str | None, ready: bool, encoder_text: EncoderText | None
) -> AsyncIterator[Router]:
    """A router in front of a worker that follows the script; at the end every page must be free or cached."""
    metrics = Metrics()
    async with ScriptedWorker(script) as worker, AsyncExitStack() as stack:
        served = replace(config, worker_address=(worker.address,))
        engine = Engine(served, metrics)
        service = Service(served, model_text(chat), engine, metrics, encoder=encoder_text)
        server = await stack.enter_async_context(GrpcServer(service, "127.0.0.1", 0))

        async def connect() -> None:
            await stack.enter_async_context(engine)
            await engine.wait_ready()
            service.started = True

        if ready:
            await connect()
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=create_app(service)), base_url="http://router")
        async with http, grpc.aio.insecure_channel(server.address) as channel:
            stub = generate_pb2_grpc.GenerateStub(channel)  # type: ignore[no-untyped-call]
            yield Router(channel, stub, http, service, server, worker, connect)
        engine.check()
        worker.check()
    forget_routes()


@pytest.fixture
def start() -> Start:
    """`async with start("the reply", config=..., chat=...) as router`."""

    def begin(reply: str | None = None, *, config: ServeConfig | None = None, chat: str | None = "chatml",
              ready: bool = True, encoder_text: EncoderText | None = None,
              **changes: Any) -> AbstractAsyncContextManager[Router]:  # fmt: skip
        served = config or ServeConfig()
        return running(script(reply, **changes), config=served, chat=chat, ready=ready, encoder_text=encoder_text)

    return begin


@pytest.fixture
def router(start: Start) -> AbstractAsyncContextManager[Router]:
    """In the test: a running Router, in front of a worker that speaks a made-up language."""
    return start()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What both APIs ask of an engine."""
    return Seen.by_engines(monkeypatch)
