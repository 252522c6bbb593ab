"""The state shared by all routes, and the ASGI middleware around them: API keys, rate limits, errors, tracing."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from space_common.tracing import parent_of
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from space_router.api.generation import RECEIVED, Generation, end_headers, start_headers, translate
from space_router.api.grammar_fields import GrammarCheck, GrammarFields
from space_router.api.request_builder import GenerationPlan, RequestBuilder, served_names
from space_router.api_keys import ApiKeys, KeyLimits, RateLimits
from space_router.config import ServeConfig
from space_router.engine import errors as engine_errors
from space_router.engine.engine import Engine
from space_router.engine.request.request import Grammar
from space_router.engine.workers.rolling_restart import RollingRestart
from space_router.errors import ApiError, Unauthorized
from space_router.http_server.body import BodyT, Neutral, ignoring_unknown_fields, read_object, validate
from space_router.http_server.responses import (
    EMBEDDING_PATHS,
    GENERATING_PATHS,
    LIMITED_PATHS,
    TOKENIZING_PATHS,
    EventStream,
    as_api_error,
    error_response,
    is_open,
    json_response,
    key_of,
    log_failure,
    take_client_id,
    while_connected,
)
from space_router.http_server.warnings import collect_warnings, warning_headers
from space_router.metrics import Metrics
from space_router.response_store import ResponseStore
from space_router.text.encoder_text import EncoderText
from space_router.text.model_text import ModelText
from space_router.text.text_pool import LONG_BODY, NeedsThread, TextPool

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


T = TypeVar("T")
P = ParamSpec("P")


class Reply(Protocol):
    """The answer to one validated request, whole or as a stream of events; a failure of a stream is an event, too."""

    @property
    def plan(self) -> GenerationPlan: ...

    async def whole(self, running: Generation) -> Any: ...

    def events(self, running: Generation) -> AsyncGenerator[bytes]: ...


@dataclass
class Service:
    """The components of one running server."""

    config: ServeConfig
    text: ModelText
    engine: Engine
    metrics: Metrics
    grammars: GrammarCheck = field(default_factory=GrammarCheck)
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
    started: bool = False  # the engine has been ready once
    draining: bool = False  # SIGTERM was received
    tracer: Tracer | None = None  # None: tracing is off
    keys: ApiKeys = field(init=False)
    rate_limits: RateLimits = field(init=False)
    restart: RollingRestart = field(init=False)
    encoder: EncoderText | None = None  # the text side of the encoder beside the model; None: there is none
    text_pool: TextPool = field(default_factory=TextPool)
    responses: ResponseStore | None = field(init=False)  # None: responses are not stored

    def __post_init__(self) -> None:
        config = self.config
        limits = KeyLimits(config.key_requests_per_minute, config.key_tokens_per_minute, config.key_concurrency)
        self.rate_limits = RateLimits(config.api_keys, limits, self.metrics)
        self.keys = ApiKeys(config.api_keys, config.key_source, self.rate_limits.update_keys)
        place = config.response_store
        self.responses = None if place is None else ResponseStore(place, config.response_store_size)
        self.restart = RollingRestart(self.engine.connections, back_seconds=config.worker_start_timeout)

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted and a worker is ready."""
        return self.engine.ready and not self.draining

    def builder(self, key: str = "") -> RequestBuilder:
        """Return a builder for requests of the API key named `key`. Raises Unavailable while starting or draining."""
        if self.draining:
            raise translate(engine_errors.Draining())
        if self.engine.facts is None:
            raise translate(engine_errors.NotReady())
        return RequestBuilder(self.config, self.text, self.engine.facts, key, dict(self.engine.loras.named))

    async def checked(self, grammar: Grammar | None, param: str) -> Grammar | None:
        """Check a grammar and return it. Raises InvalidRequest naming `param`, Overloaded, Unavailable."""
        return await self.grammars.checked(self.builder().facts, grammar, param)

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names, the first one first."""
        return served_names(self.config, self.text)

    def name_of(self, plan: GenerationPlan, asked: str | None = None) -> str:
        """Return the model name for the response: the LoRA's, the adapter's, or the model's as it was `asked` for."""
        request = plan.choices[0].request
        if request.adapter or request.lora is not None:
            return request.adapter if request.lora is None else request.lora.name
        is_name = self.config.takes_any_name or asked in (*self.names, *self.config.unlisted_names)
        return asked if asked and is_name else self.text.name

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of adapters that requests can select as `model`."""
        facts = self.engine.facts
        return tuple(name for name, _ in self.config.adapter) if facts is None else facts.adapters

    def run(self, plan: GenerationPlan) -> Generation:
        """Return the plan's generation. Its tokens count towards the limits of the request's API key."""
        charge = self.rate_limits[plan.choices[0].request.key].charge
        return Generation(self.engine, self.text.tokenizer, self.metrics, plan, charge, self.tracer)

    async def read(self, request: Request, model: type[BodyT], neutral: Neutral | None = None) -> tuple[BodyT, int]:
        """Return the request's body and its size in bytes. Raises ApiError as `read_object` and `validate` do."""
        received = await read_object(request, self.config)
        return await self.validated(model, received.values, neutral), received.size

    async def validated(self, model: type[BodyT], values: Mapping[str, Any], neutral: Neutral | None = None) -> BodyT:
        """Return the body of these values, with a grammar in Lark's syntax. Raises ApiError as `validate` does."""
        body = validate(model, values, neutral)
        if isinstance(body, GrammarFields):
            await self.grammars.convert(body)
        return body

    async def text_work(
        self, request: Request, size: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what a function gives that tokenises a body of `size` bytes. Raises Overloaded, ClientGone."""
        if size < LONG_BODY:
            with suppress(NeedsThread):
                return self.text_pool.attempt(function, *args, **kwargs)
        work = self.text_pool.run_in_thread(key_of(request), size, function, *args, **kwargs)
        return await while_connected(request.receive, work)

    async def respond(self, request: Request, reply: Reply, *, stream: bool) -> Response:
        """Submit all choices, then respond whole or as a stream. Nothing is sent before all choices are queued."""
        async with AsyncExitStack() as stack:
            running = await stack.enter_async_context(self.run(reply.plan))
            if stream:
                await while_connected(request.receive, running.begun())
                headers = start_headers(request, running)
                return EventStream(reply.events(running), stack.pop_all(), headers, reply.plan.request_id)
            made = await while_connected(request.receive, reply.whole(running))
            return json_response(made, headers=end_headers(request, running))

    def check_room(self, key: str) -> None:
        """Raise Overloaded if the queue has no room for a request of `key`, before the body is read and tokenised."""
        if (full := self.engine.full(key)) is not None:
            raise translate(full)


log = logging.getLogger(__name__)


IGNORE_HEADER = "x-ignore-unknown-fields"
"""Header by which a client says for one request whether unknown fields are ignored with a warning."""

_YES, _NO = ("true", "1", "on", "yes"), ("false", "0", "off", "no")


class HttpAccess:
    """Checks the API key and its limits, and records its name and the arrival time in the scope.

    A full queue refuses requests before their body is read. Unexpected exceptions become errors with a log id.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[RECEIVED] = time.monotonic()
        begun = False
        client_id = take_client_id(Headers(scope=scope).get("x-request-id", ""))

        async def watched_send(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                more = [*warning_headers(warnings), *self._more_headers(scope, message, client_id)]
                named = {name for name, _ in more if name != b"warning"}
                kept = (header for header in message.get("headers", ()) if header[0] not in named)
                message["headers"] = [*kept, *more]
            await send(message)

        with ExitStack() as taken, collect_warnings() as warnings, ignoring_unknown_fields(self._is_lenient(scope)):
            try:
                self._enter(scope, taken)
                await self._app(scope, receive, watched_send)
            except ApiError as error:
                log_failure(error)
                self._service.metrics.rejected_total.labels(reason=error.reason).inc()
                await error_response(error, scope["path"])(scope, receive, watched_send)
            except Exception as error:
                answer = error_response(as_api_error(error), scope["path"])
                if not begun:
                    await answer(scope, receive, watched_send)

    def _is_lenient(self, scope: Scope) -> bool:
        """Return whether unknown fields of the body get a warning instead of 400: as the client or the server says."""
        if scope["path"] not in LIMITED_PATHS:
            return False
        asked = Headers(scope=scope).get(IGNORE_HEADER, "").strip().lower()
        return asked in _YES or (asked not in _NO and self._service.config.ignores_unknown_fields)

    def _more_headers(self, scope: Scope, message: Message, client_id: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield the request's id, and how much of its key's limits is left."""
        if scope["path"] in LIMITED_PATHS:
            known = any(name == b"x-request-id" for name, _ in message.get("headers", ()))
            if client_id or not known:
                yield b"x-request-id", (client_id or f"req-{uuid.uuid4().hex}").encode()
            limits = self._service.rate_limits.get(scope.get("spaceserve.key", ""))
            for name, value in ({} if limits is None else limits.headers()).items():
                yield name.encode(), value.encode()
        elif client_id:
            yield b"x-request-id", client_id.encode()

    def _enter(self, scope: Scope, taken: ExitStack) -> None:
        """Check API key, queue and key limits. Raises ApiError. `taken` frees the key's slot when the request ends."""
        keys = self._service.keys
        headers = Headers(scope=scope)
        name = keys.name_of(headers.get("authorization", ""), headers.get("x-api-key", ""))
        scope["spaceserve.key"] = name or ""
        if name is None and not is_open(scope["path"], scope["method"]):
            raise Unauthorized
        if name is not None and scope["method"] == "POST" and scope["path"] in EMBEDDING_PATHS:
            taken.enter_context(self._service.rate_limits[name].request())
        elif name is not None and scope["method"] == "POST" and scope["path"] in GENERATING_PATHS:
            self._service.check_room(name)
            taken.enter_context(self._service.rate_limits[name].request())
        elif name is not None and scope["method"] == "POST" and scope["path"] in TOKENIZING_PATHS:
            taken.enter_context(self._service.rate_limits[name].request())


class Traced:
    """ASGI middleware, installed only if tracing is on. Probes, metric scrapes and web page files get no span."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"], scope["method"]):
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, StatusCode

        headers, method = Headers(scope=scope), scope["method"]
        parent = parent_of(headers.get("traceparent", ""), headers.get("tracestate", ""))
        with self._tracer.start_as_current_span(
            method, parent, SpanKind.SERVER, {"http.request.method": method}, record_exception=False
        ) as span:

            async def watched_send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            try:
                await self._app(scope, receive, watched_send)
            finally:
                route = getattr(scope.get("route"), "path", None)
                if route is not None:  # other paths have unbounded cardinality
                    span.set_attribute("http.route", route)
                    span.update_name(f"{method} {route}")
