"""A whole router in one process with both its faces, gRPC on a socket and HTTP over ASGI; a scripted worker behind."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import grpc.aio
import httpx
import pytest
from doubles.router import FixedReply, HashLanguage, Script, ScriptedWorker
from doubles.tokenizers import EOS_ID, FIRST_BYTE_ID, MASK_ID, VOCAB_SIZE, tiny_tokenizer
from space_proto import generate_pb2, generate_pb2_grpc
from space_router.api.service import Service
from space_router.app import create_app
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.request.request import ValidRequest
from space_router.grpc_api.server import GrpcServer
from space_router.metrics import Metrics
from space_router.text.chat_template import BUILT_IN, ChatTemplate
from space_router.text.model_text import ModelText

TOKENIZER = tiny_tokenizer()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in a loop of its own, with the routers it asks for started in the same loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def whole() -> None:
        async with AsyncExitStack() as stack:
            for name, value in arguments.items():
                if isinstance(value, AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**arguments)

    asyncio.run(whole())
    return True


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

    async def refusal(self, **fields: Any) -> grpc.aio.AioRpcError:
        """The error of a call, which must have no event."""
        call = self.stub.Generate(generate_pb2.GenerateRequest(**fields))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            pytest.fail(f"an event came: {await call.read()}")
        return caught.value

    async def sse(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of the same request over HTTP."""
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def value(self, name: str, **labels: str) -> float | None:
        return self.service.metrics.value(name, **labels)


def script(reply: str | None = None, **changes: Any) -> Script:
    """A worker that always answers `reply`, or speaks a made-up language of printable bytes that ends with EOS."""
    if reply is None:
        language: Any = HashLanguage(range(FIRST_BYTE_ID + 32, FIRST_BYTE_ID + 127), eos_id=EOS_ID, eos_period=50)
    else:
        language = FixedReply(TOKENIZER.encode(reply))
    known = Script(language=language, vocab_size=VOCAB_SIZE, mask_ids=(MASK_ID,), eos_ids=(EOS_ID,), num_blocks=256)
    return replace(known, **changes)


@asynccontextmanager
async def running(script: Script, *, config: ServeConfig, chat: str | None, ready: bool) -> AsyncIterator[Router]:
    """A router in front of a worker that follows the script; at the end every page must be free or cached."""
    template = None if chat is None else ChatTemplate(BUILT_IN[chat], {})
    text = ModelText("tiny", TOKENIZER, template, MappingProxyType({}))
    metrics = Metrics()
    async with ScriptedWorker(script) as worker, AsyncExitStack() as stack:
        served = replace(config, worker_address=(worker.address,))
        engine = Engine(served, metrics)
        service = Service(served, text, engine, metrics)
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


Start = Callable[..., AbstractAsyncContextManager[Router]]


@pytest.fixture
def start() -> Start:
    """`async with start("the reply", config=..., chat=...) as router`."""

    def begin(reply: str | None = None, *, config: ServeConfig | None = None, chat: str | None = "chatml",
              ready: bool = True, **changes: Any) -> AbstractAsyncContextManager[Router]:  # fmt: skip
        return running(script(reply, **changes), config=config or ServeConfig(), chat=chat, ready=ready)

    return begin


@pytest.fixture
def router(start: Start) -> AbstractAsyncContextManager[Router]:
    """In the test: a running Router, in front of a worker that speaks a made-up language."""
    return start()


class Seen(list[ValidRequest]):
    """Every request that has reached an engine."""

    def take(self, field: str = "") -> list[ValidRequest]:
        """Those since the last time, without what is drawn anew for each unless `field` is about that."""
        taken = [
            replace(
                request,
                request_id=request.request_id if field == "request_id" else "",
                sampling=request.sampling if field == "seed" else replace(request.sampling, seed=0),
            )
            for request in self
        ]
        self.clear()
        return taken


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What both faces ask of an engine."""
    requests = Seen()
    submit = Engine.submit

    def noted(self: Engine, request: ValidRequest, **others: Any) -> Any:
        requests.append(request)
        return submit(self, request, **others)

    monkeypatch.setattr(Engine, "submit", noted)
    return requests
