"""The state shared by all routes: engine, model text, config and metrics."""

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from space_router.api.generation import Generation, translate
from space_router.api.grammar_fields import check_grammar
from space_router.api.plan import GenerationPlan
from space_router.api.request_builder import RequestBuilder
from space_router.api.usage import end_headers, start_headers
from space_router.api_keys import ApiKeys, KeyLimits, RateLimit, rate_limits
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.request.request import Grammar
from space_router.engine.workers.worker_pool import RollingRestart
from space_router.errors import Unavailable
from space_router.http_server.body import BodyT, Neutral, read_object, validate
from space_router.http_server.responses import EventStream, json_response, while_connected
from space_router.metrics import Metrics
from space_router.text.grammar import GrammarCheck
from space_router.text.model_text import ModelText

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class Reply(Protocol):
    """The answer to one validated request, whole or as a stream of events."""

    @property
    def plan(self) -> GenerationPlan: ...

    async def whole(self, running: Generation) -> Any:
        """Return the JSON value of the response."""

    def events(self, running: Generation) -> AsyncGenerator[bytes]:
        """Yield the stream. A failure is an event, too."""


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
    tracer: "Tracer | None" = None  # None: tracing is off
    keys: ApiKeys = field(init=False)
    rate_limits: dict[str, RateLimit] = field(init=False)
    restart: RollingRestart = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        limits = KeyLimits(config.key_requests_per_minute, config.key_tokens_per_minute, config.key_concurrency)
        self.keys = ApiKeys(config.api_keys)
        self.rate_limits = rate_limits(config.api_keys, limits, self.metrics)
        self.restart = RollingRestart(self.engine.connections, back_seconds=config.worker_start_timeout)

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted and a worker is ready."""
        return self.engine.ready and not self.draining

    def builder(self, key: str = "") -> RequestBuilder:
        """Return a builder for requests of the API key named `key`. Raises Unavailable while starting or draining."""
        if self.draining:
            raise Unavailable("The server is stopping and takes no new work.", reason="draining")
        facts = self.engine.facts
        if facts is None:
            raise Unavailable("The server is starting: no worker is up yet.", reason="not_ready")
        return RequestBuilder(self.config, self.text, facts, key)

    async def checked(self, grammar: Grammar | None, param: str) -> Grammar | None:
        """Check a grammar and return it. Raises InvalidRequest naming `param`, Overloaded, Unavailable."""
        return await check_grammar(self.grammars, self.builder().facts, grammar, param)

    def name_of(self, plan: GenerationPlan) -> str:
        """Return the model name for the response: the adapter's, or the model's own."""
        return plan.choices[0].request.adapter or self.text.name

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
        return validate(model, received.values, neutral), received.size

    async def respond(self, request: Request, reply: Reply, *, stream: bool) -> Response:
        """Submit all choices, then respond whole or as a stream. Nothing is sent before all choices are queued."""
        async with AsyncExitStack() as stack:
            running = await stack.enter_async_context(self.run(reply.plan))
            if stream:
                headers = start_headers(request, running)
                return EventStream(reply.events(running), stack.pop_all(), headers, reply.plan.request_id)
            made = await while_connected(request.receive, reply.whole(running))
            return json_response(made, headers=end_headers(request, running))

    def check_room(self) -> None:
        """Raise Overloaded if the queue is full, before the body is read and tokenised."""
        if (full := self.engine.full()) is not None:
            raise translate(full)
