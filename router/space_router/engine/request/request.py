"""A validated request, the deltas that its steps produce, its stream and its tracing spans."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from space_common.json_places import JsonPlaces
from space_common.tracing import traceparent_of

from space_router.engine.errors import EngineError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer


class RequestTrace:
    """A `queue` span from construction to the first admission, then a `generate` span until `ended`.

    Both are children of the span that is current at construction.
    """

    def __init__(self, tracer: Tracer, request_id: str) -> None:
        from opentelemetry import context

        self._tracer = tracer
        self._parent: Context = context.get_current()
        self._queue: Span | None = self._start("queue", request_id)
        self._generate: Span | None = None
        self._request_id = request_id

    def admitted(self) -> str:
        """Record an admission (the first or a later one) and return the traceparent for the worker's span."""
        if self._queue is not None:
            self._queue.end()
            self._queue, self._generate = None, self._start("generate", self._request_id)
        elif self._generate is not None:
            self._generate.add_event("admitted again")
        return "" if self._generate is None else traceparent_of(self._generate)

    def ended(self, outcome: str, statistics: Statistics) -> None:
        """End the span with its outcome and statistics. Later calls have no effect."""
        from opentelemetry.trace import StatusCode

        span = self._generate or self._queue
        self._generate = self._queue = None
        if span is None:
            return
        span.set_attributes(
            {
                "spaceserve.outcome": outcome,
                "gen_ai.usage.input_tokens": statistics.num_prompt,
                "gen_ai.usage.output_tokens": statistics.num_generated,
                "spaceserve.cached_tokens": statistics.num_cached,
                "spaceserve.steps": statistics.num_steps,
                "spaceserve.drafted_tokens": statistics.num_drafted,
                "spaceserve.accepted_tokens": statistics.num_accepted,
                "spaceserve.worker_losses": statistics.num_worker_losses,
            }
        )
        if statistics.first_token_seconds is not None:
            span.set_attribute("spaceserve.time_to_first_token_seconds", statistics.first_token_seconds)
        if outcome in ("error", "deadline"):
            span.set_status(StatusCode.ERROR, outcome)
        span.end()

    def _start(self, name: str, request_id: str) -> Span:
        return self._tracer.start_span(name, self._parent, attributes={"spaceserve.request_id": request_id})


GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


@dataclass(frozen=True)
class Grammar:
    """A constraint on the output; only ids that it allows are sampled."""

    kind: GrammarKind
    source: str  # by kind: a JSON schema as JSON text; ""; a regular expression; a JSON list of strings; a Lark grammar
    json_places: JsonPlaces | None = None
    """Of a Lark grammar: where JSON texts stand, whose objects must not repeat a key."""

    @property
    def known_places(self) -> JsonPlaces | None:
        """Where JSON texts stand in the output, or None if that is not known."""
        return JsonPlaces() if self.kind in ("json_schema", "json_object") else self.json_places


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling parameters (SPACE §3). The defaults leave the model's distribution unchanged."""

    seed: int  # 0 .. 2^64-1, the effective one
    choice: int = 0  # choice index of n and best_of; choice 0 uses the plain seed
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    allowed_ids: tuple[int, ...] = ()  # empty: every id is allowed
    grammar: Grammar | None = None  # None: the output may be any text
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0


Pooling = Literal["last", "mean"]
"""How the hidden states of a prompt become one vector."""

_LORA_SALT = "lora "
_LONG_SALT = " long"


@dataclass(frozen=True)
class ServedLora:
    """An ordinary LoRA adapter, which changes text, keys and values."""

    name: str  # as requests name it
    digest: str  # sha256 of its files
    folder: str  # where workers read it; "": they had it at start
    root: str  # where it came from


@dataclass(frozen=True)
class ValidRequest:
    """One request, validated; the engine accepts no other."""

    request_id: str
    prompt_ids: tuple[int, ...]  # at least one
    sampling: SamplingOptions
    max_tokens: int | None = None  # None: up to the window, cut to what fits the cache
    eos_ids: tuple[int, ...] = ()  # empty: EOS is ignored
    stop_ids: tuple[int, ...] = ()
    max_draft_length: int | None = None  # maximum drafts per step; None: the worker chooses; 0: plain decoding
    num_forced_drafts: int = 0  # mask drafts of each decode step, whatever they cost; 0: the worker chooses
    want_logprobs: bool = False
    num_logprobs: int = 0  # alternatives per emitted id, 0..20
    num_prompt_logprobs: int | None = None  # alternatives per prompt id; None: no logprobs of the prompt
    priority: int = 0  # lower goes first
    deadline: float | None = None  # seconds from submit to the last token
    cache_salt: str = ""  # prefixes are shared only among requests with the same salt
    prediction: tuple[int, ...] | None = None  # expected output ids to draft from; None: none given
    adapter: str = ""  # gated adapter that drafts; "": the checkpoint's own masks. Affects neither text nor KV cache
    lora: ServedLora | None = None  # acts on the whole sequence; prefixes are shared only under the same content
    share_prefix: bool = True  # False: neither reads nor fills the prefix cache
    key: str = ""  # name of the API key, never the key itself; "": none. Keys share the server fairly
    pooling: Pooling | None = None  # its prompt becomes one vector in place of an output; None: it generates
    stops_on_text: bool = False  # a stop string may end it before max_tokens
    trace: RequestTrace | None = field(default=None, compare=False, repr=False)  # its spans; None: not traced

    def charge(self, num_tokens: float, num_steps: float) -> float:
        """Return the tokens that its key is charged for generating `num_tokens` in `num_steps` decode steps: these, or
        with forced drafts the most rows of these steps, if they are more.
        """
        rows_per_step = (self.num_forced_drafts + 1) ** 2 if self.num_forced_drafts else 0
        return max(num_tokens, num_steps * rows_per_step)

    def prefix_salt(self, *, is_long: bool) -> str:
        """Return what its keys and values depend on besides ids: requests with another salt share no prefix.
        `is_long`: it has the rotary angles of a long sequence."""
        if self.lora is None and not is_long and not self.cache_salt.startswith(_LORA_SALT):
            return self.cache_salt
        # A client's salt that looks like a LoRA's is another one than any LoRA's.
        digest = "none" if self.lora is None else self.lora.digest
        return f"{_LORA_SALT}{digest}{_LONG_SALT if is_long else ''}\0{self.cache_salt}"

    @property
    def can_end_early(self) -> bool:
        return bool(self.eos_ids or self.stop_ids) or self.stops_on_text


class Finish(Enum):
    """Why a request ended normally."""

    EOS = "eos"  # an EOS id is the last token
    STOP_ID = "stop_id"  # a stop id is the last token
    LENGTH = "length"  # max_tokens or the window is reached


@dataclass(frozen=True)
class TokenLogprobs:
    """Float32 log-softmax of the raw logits for one id and for the most probable ids."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, logprob), most probable first


class Delta(NamedTuple):
    """What one step added to one request."""

    tokens: tuple[int, ...]  # empty if only prompt logprobs arrived
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of prompt ids in order; the first prompt id has none
    finish: Finish | None = None  # set in the last delta
    drafted: int = 0  # drafts verified in this step
    accepted: int = 0  # of these, accepted and not cut off by a stop condition
    decoded: bool = False  # True: a decode step; False: prefill
    predicted: tuple[int, ...] = ()  # per token, ids of the request's prediction that were matched; empty: none
    embedding: Sequence[float] | None = None  # of a request with `pooling`, in its last delta


@dataclass
class Statistics:
    """Counts and times of one request; final once its stream has ended."""

    num_prompt: int
    num_cached: int = 0  # prompt ids found in the prefix cache at the first admission
    num_generated: int = 0
    num_steps: int = 0  # decode steps
    num_decoded: int = 0  # tokens emitted by decode steps
    num_drafted: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_worker_losses: int = 0
    queue_seconds: float | None = None  # from submit to the first admission; None before it
    first_token_seconds: float | None = None  # from submit to the first token; None before it
    seconds: float = 0.0  # from submit to the latest token

    def add(self, delta: Delta, seconds: float) -> None:
        """Add a step that ended `seconds` after submit."""
        num_tokens = len(delta.tokens)
        if num_tokens:
            self.num_generated += num_tokens
            self.seconds = seconds
            if self.first_token_seconds is None:
                self.first_token_seconds = seconds
        if delta.decoded:
            self.num_steps += 1
            self.num_decoded += num_tokens
            self.num_drafted += delta.drafted
            self.num_accepted += delta.accepted

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens emitted per decode step; None before the first."""
        return self.num_decoded / self.num_steps if self.num_steps else None


class Stream:
    """Yields the deltas of one request. Leaving the block early cancels the request and frees its pages.

        async with engine.submit(request) as stream:
            async for delta in stream:
                ...

    The iterator raises `errors.Broken` after all earlier deltas. `statistics` may be read at any time. If the reader is
    more than `max_lag` tokens behind, its request gets no more pages until it has caught up; others are not affected.
    """

    def __init__(
        self,
        request: ValidRequest,
        statistics: Statistics,
        *,
        max_lag: int,
        on_leave: Callable[[], None],
        on_caught_up: Callable[[], None],
    ) -> None:
        self.request = request
        self.statistics = statistics
        self._max_lag = max_lag
        self._on_leave = on_leave
        self._on_caught_up = on_caught_up
        self._deltas: deque[Delta] = deque()
        self.num_unread = 0  # tokens in _deltas
        self.lagging = False  # the reader is so far behind that the request gets no more pages
        self._ended = False
        self.error: EngineError | None = None  # raised after the last delta
        self.begun = asyncio.Event()  # set once the request is admitted to a worker, or has ended
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Cancel the request if it has not ended, as leaving the block does."""
        self._on_leave()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self.error is not None:
                raise self.error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.read()

    def read(self) -> Delta:
        """Return the next delta without waiting. Raises IndexError if none is ready (see `num_ready`)."""
        delta = self._deltas.popleft()
        self.num_unread -= len(delta.tokens)
        if self.lagging and self.num_unread <= self._max_lag // 2:
            self.lagging = False
            self._on_caught_up()
        return delta

    @property
    def num_ready(self) -> int:
        """Deltas that can be read without waiting."""
        return len(self._deltas)

    # For the engine.

    def push(self, delta: Delta) -> None:
        """Append a delta; one with `finish` is the last."""
        if self._ended:
            return
        self._deltas.append(delta)
        self.num_unread += len(delta.tokens)
        self.lagging = self.lagging or self.num_unread > self._max_lag
        self._ended = delta.finish is not None
        self._wake()

    def fail(self, error: EngineError) -> None:
        """End the stream with an error, raised after the deltas pushed before."""
        if self._ended:
            return
        self._ended = True
        self.error = error
        self.begun.set()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
