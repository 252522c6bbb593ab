"""The state shared by all routes: engine, model text, config and metrics."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from space_router.api.generation import Generation, translate
from space_router.api.grammar_fields import checked
from space_router.api.plan import GenerationPlan
from space_router.api.request_builder import RequestBuilder
from space_router.api_keys import ApiKeys, KeyLimits
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.request.request import Grammar
from space_router.engine.workers.rolling_restart import RollingRestart
from space_router.errors import Unavailable
from space_router.metrics import Metrics
from space_router.rate_limit import Allowances
from space_router.text.grammar import GrammarCheck
from space_router.text.model_text import ModelText

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


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
    allowances: Allowances = field(init=False)
    restart: RollingRestart = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        limits = KeyLimits(config.key_requests_per_minute, config.key_tokens_per_minute, config.key_concurrency)
        self.keys = ApiKeys(config.api_keys)
        self.allowances = Allowances(config.api_keys, limits, self.metrics)
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
        return await checked(self.grammars, self.builder().facts, grammar, param)

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
        charge = self.allowances.of(plan.choices[0].request.key).charge
        return Generation(self.engine, self.text.tokenizer, self.metrics, plan, charge, self.tracer)

    def check_room(self) -> None:
        """Raise Overloaded if the queue is full, before the body is read and tokenised."""
        if (full := self.engine.full()) is not None:
            raise translate(full)
