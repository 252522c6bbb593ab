"""A whole router in one process: HTTP over ASGI in front, a scripted worker over gRPC behind."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from space_router.api.service import Service
from space_router.app import create_app
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.metrics import Metrics
from space_router.testing import FixedReply, HashLanguage, Script, ScriptedWorker
from space_router.text.chat_template import BUILT_IN, ChatTemplate
from space_router.text.model_text import ModelText
from space_router.text.testing import EOS_ID, FIRST_BYTE_ID, MASK_ID, VOCAB_SIZE, tiny_tokenizer
from starlette.types import ASGIApp

TOKENIZER = tiny_tokenizer()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in a loop of its own, with the routers it asks for started in the same loop.

    By asyncio.run, for grpc's one poller per process may still tell the loop of an earlier test something, which
    only asyncio itself takes lightly.
    """
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
    """One router to ask."""

    client: httpx.AsyncClient
    service: Service
    worker: ScriptedWorker
    app: ASGIApp

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        """A completion's answer, which must be one."""
        answer = await self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

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
async def running(
    script: Script, *, config: ServeConfig | None = None, chat: str | None = "chatml", ready: bool = True
) -> AsyncIterator[Router]:
    """A router in front of a worker that follows the script; at the end every page must be free or cached."""
    template = None if chat is None else ChatTemplate(BUILT_IN[chat], {})
    text = ModelText("tiny", TOKENIZER, template, MappingProxyType({}))
    metrics = Metrics()
    async with ScriptedWorker(script) as worker:
        served = replace(config or ServeConfig(), worker_address=(worker.address,))
        async with Engine(served, metrics) as engine:
            service = Service(served, text, engine, metrics)
            app = create_app(service)
            if ready:
                await engine.wait_ready()
                service.started = True
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                yield Router(client, service, worker, app)
            engine.check()
        worker.check()


Start = Callable[..., AbstractAsyncContextManager[Router]]


@pytest.fixture
def start() -> Start:
    """`async with start("the reply", config=..., chat=...) as router`."""

    def begin(reply: str | None = None, *, config: ServeConfig | None = None, chat: str | None = "chatml",
              ready: bool = True, **changes: Any) -> AbstractAsyncContextManager[Router]:  # fmt: skip
        return running(script(reply, **changes), config=config, chat=chat, ready=ready)

    return begin


@pytest.fixture
def router() -> AbstractAsyncContextManager[Router]:
    """In the test: a running Router, in front of a worker that speaks a made-up language."""
    return running(script())
