"""A whole router in one process: HTTP over ASGI in front, a scripted worker over gRPC behind."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import jsonschema_rs
import pytest
from doubles.router import Script, ScriptedWorker
from doubles.router.whole_router import TOKENIZER, Seen, Start, events_of, forget_routes, model_text, script
from opentelemetry.trace import Tracer
from space_router.api.schema import DocumentedApp
from space_router.api.service import Service
from space_router.app import create_app
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.queueing.admission import LoadFigures
from space_router.metrics import Metrics
from space_router.text.encoder_text import EncoderText
from space_router.text.tokenizer import Tokenizer
from starlette.types import ASGIApp


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

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The events of one of OpenAI's streams."""
        return events_of(await self.post(path, stream=True, **body))

    def value(self, name: str, **labels: str) -> float | None:
        return self.service.metrics.value(name, **labels)

    async def refuses(self, path: str, param: str, words: str, status: int = 400, **body: Any) -> None:
        """A wrong field is named, in few words."""
        answer = await self.post(path, **body)
        shown = (str(body)[:200], answer.text)
        assert answer.status_code == status, shown
        assert answer.json()["error"]["param"] == param, shown
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert words in answer.json()["error"]["message"], shown
        assert len(answer.content) < 1000

    async def until(self, condition: Callable[[LoadFigures], object]) -> None:
        """Let everything else run until a condition of the engine's load holds."""
        async with asyncio.timeout(30):
            while not condition(self.service.engine.load()):  # noqa: ASYNC110  none of the conditions is an event
                await asyncio.sleep(0)


@asynccontextmanager
async def running(
    script: Script,
    *,
    config: ServeConfig | None = None,
    chat: str | None = "chatml",
    ready: bool = True,
    tokenizer: Tokenizer = TOKENIZER,
    tracer: Tracer | None = None,
    encoder_text: EncoderText | None = None,
) -> AsyncIterator[Router]:
    """A router in front of a worker that follows the script; at the end every page must be free or cached."""
    text = model_text(chat, tokenizer)
    metrics = Metrics()
    async with ScriptedWorker(script) as worker:
        served = replace(config or ServeConfig(), worker_address=(worker.address,))
        async with Engine(served, metrics) as engine:
            service = Service(served, text, engine, metrics, tracer=tracer, encoder=encoder_text)
            app = create_app(service)
            if ready:
                await engine.wait_ready()
                service.started = True
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
            hooks = {"response": [conformity(_document(app))]}
            async with httpx.AsyncClient(transport=transport, base_url="http://router", event_hooks=hooks) as client:
                yield Router(client, service, worker, app)
            engine.check()
        worker.check()
    forget_routes()


def conformity(document: dict[str, Any]) -> Callable[[httpx.Response], Awaitable[None]]:
    """Fails the test in which an answer is not what the OpenAPI document says: its status, kind, body or events."""

    async def conforms(answer: httpx.Response) -> None:
        request, kind = answer.request, answer.headers.get("content-type", "").partition(";")[0]
        operation = _operation(document, request.method, request.url.path)
        if operation is None:  # no route, another method, or a file of the page
            return
        described = operation["responses"].get(str(answer.status_code))
        assert described is not None, f"{request.method} {request.url.path} says nothing of {answer.status_code}"
        media = described.get("content", {}).get(kind)
        assert media is not None, f"{request.method} {request.url.path} says nothing of {kind}"
        body = (await answer.aread()).decode()
        if kind == "application/json":
            _validator(document, media["schema"]).validate(json.loads(body))
        if kind == "text/event-stream":
            event = _validator(document, {"anyOf": list(_said(media["schema"]))})
            for lines in filter(None, body.split("\n\n")):
                if lines.startswith(":"):  # a comment
                    continue
                data = lines.split("\n")[-1].removeprefix("data:").removeprefix(" ")  # behind the event's name, if any
                if data != "[DONE]":
                    event.validate(json.loads(data))

    return conforms


def _said(schema: Any) -> Iterator[dict[str, Any]]:
    """What the JSON in a stream's events is described as."""
    if isinstance(schema, dict):
        if "contentSchema" in schema:
            yield schema["contentSchema"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _said(part)


def _operation(document: dict[str, Any], method: str, path: str) -> dict[str, Any] | None:
    for template in sorted(document["paths"], key=len, reverse=True):  # an id may have slashes
        operations = document["paths"][template]
        if re.fullmatch(re.sub(r"\{\w+\}", ".+", template), path):
            found: dict[str, Any] | None = operations.get(method.lower())
            if found is not None:
                return found
    return None


_documents: dict[bool, dict[str, Any]] = {}  # made once: with keys and without, they are all the same
_validators: dict[str, Any] = {}


def _document(app: DocumentedApp) -> dict[str, Any]:
    if app.keyed not in _documents:
        _documents[app.keyed] = app.openapi()
    return _documents[app.keyed]


def _validator(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    name = json.dumps(schema)
    if name not in _validators:
        _validators[name] = jsonschema_rs.validator_for({**schema, "components": document["components"]})
    return _validators[name]


@pytest.fixture
def start() -> Start:
    """`async with start("the reply", config=..., chat=...) as router`."""

    def begin(reply: str | None = None, *, config: ServeConfig | None = None, chat: str | None = "chatml",
              ready: bool = True, tokenizer: Tokenizer = TOKENIZER, tracer: Tracer | None = None,
              encoder_text: EncoderText | None = None,
              **changes: Any) -> AbstractAsyncContextManager[Router]:  # fmt: skip
        return running(
            script(reply, **changes), config=config, chat=chat, ready=ready, tokenizer=tokenizer, tracer=tracer,
            encoder_text=encoder_text,
        )  # fmt: skip

    return begin


@pytest.fixture
def router() -> AbstractAsyncContextManager[Router]:
    """In the test: a running Router, in front of a worker that speaks a made-up language."""
    return running(script())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Every request that reaches an engine."""
    return Seen.by_engines(monkeypatch)
