"""What makes vectors of texts, or scores of pairs: the encoder beside the model, or the served model itself."""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from operator import mul
from typing import Any, Literal, Protocol

from space_router.api.generation import translate
from space_router.api.request_builder import NAMELESS, PromptOptions, RequestBuilder, choice_id, served_names
from space_router.api.service import Service
from space_router.engine import errors as engine_errors
from space_router.engine.engine import Engine
from space_router.engine.request.encoding import EncodingText
from space_router.engine.request.request import Pooling, SamplingOptions, ServedLora, Stream, ValidRequest
from space_router.engine.request.request_state import Timer
from space_router.engine.request.worker_messages import ServedEncoder
from space_router.errors import ApiError, InvalidRequest, QueueTimedOut, TooManyTokens, Unavailable
from space_router.http_server.body import short_repr
from space_router.text.encoder_text import EncoderText, TextTooLong

MAX_TEXTS = 2048  # of one request, as OpenAI has it
AT_ONCE = 16  # texts of one request that the served model reads at once

Vector = Sequence[float]


@dataclass(frozen=True)
class InputOptions:
    """How texts are tokenised."""

    param: str = "input"  # the request field of the texts
    add_special_tokens: bool = True
    truncate: int | None = None  # ids that are kept of each; -1: as many as the model takes; None: too many are refused
    prompt_name: str | None = None  # of a prompt that the encoder puts before each text
    role: Literal["query", "document"] | None = None  # selects an encoder's own prompt, if it has one


Tokenised = Sequence[Any]
"""Texts as one source has tokenised them."""


class PoolingSource(Protocol):
    """Tokenises texts, and makes vectors of them, or scores of pairs."""

    @property
    def name(self) -> str:
        """The model name for responses."""

    @property
    def scores_pairs(self) -> bool:
        """Whether it scores pairs; else it makes vectors of single texts."""

    @property
    def num_values(self) -> int:
        """Numbers of a vector, or scores of a pair."""

    def tokenise(self, texts: Sequence[Any], options: InputOptions) -> Tokenised:
        """Return texts, or lists of ids, as ids. Raises InvalidRequest."""

    def tokenise_pairs(self, pairs: Sequence[tuple[str, str]], options: InputOptions) -> Tokenised:
        """Return pairs of texts as ids. Raises InvalidRequest."""

    def num_tokens(self, texts: Tokenised) -> int:
        """Return the ids of these texts together."""

    async def run(self, request_id: str, texts: Tokenised) -> list[Vector]:
        """Return a vector of each text, or the scores of each pair. Raises ApiError."""


def too_long(num_ids: int, window: int, param: str) -> TooManyTokens:
    """Return the error for a text with more ids than the model takes, in the words that clients look for."""
    return TooManyTokens(
        f"This model's maximum context length is {window} tokens. `{param}` has {num_ids} tokens. Shorten it or set "
        "`truncate_prompt_tokens`.",
        num_prompt=num_ids,
        limit=window,
        param=param,
    )


class EncoderSource:
    """The encoder of --embedding-model."""

    def __init__(self, engine: Engine, text: EncoderText, facts: ServedEncoder, key: str) -> None:
        self._engine, self._text, self._facts, self._key = engine, text, facts, key
        self.name = text.name
        self.scores_pairs, self.num_values = facts.scores_pairs, facts.num_values

    def tokenise(self, texts: Sequence[Any], options: InputOptions) -> list[EncodingText]:
        prompt = self._text.prompt_of(options.role, options.prompt_name)
        written = [text for text in texts if isinstance(text, str)]
        window, truncate = self._facts.window, self._truncate(options)
        with self._refused(options.param):
            made = iter(
                self._text.encode(written, window, prompt=prompt, special=options.add_special_tokens, truncate=truncate)
            )
        found: list[EncodingText] = []
        for text in texts:
            if isinstance(text, str):
                found.append(EncodingText(*next(made)))
            else:
                found.append(EncodingText(self._given(text, options.param, truncate)))
        for one in found:
            self._check(one.ids, options.param)
        return found

    def tokenise_pairs(self, pairs: Sequence[tuple[str, str]], options: InputOptions) -> list[EncodingText]:
        with self._refused(options.param):
            made = self._text.encode_pairs(pairs, self._facts.window, truncate=self._truncate(options))
        for one in made:
            self._check(one.ids, options.param)
        return [EncodingText(*one) for one in made]

    def num_tokens(self, texts: Sequence[EncodingText]) -> int:
        return sum(len(text.ids) for text in texts)

    async def run(self, request_id: str, texts: Sequence[EncodingText]) -> list[Vector]:
        try:
            return await self._engine.encode(request_id, texts, self._key)
        except engine_errors.WorkerFailed as error:
            raise Unavailable(f"{error} Send it again.", reason="not_ready") from error
        except engine_errors.EngineError as error:
            raise translate(error, "input") from error

    def _truncate(self, options: InputOptions) -> int | None:
        return self._facts.window if options.truncate == -1 else options.truncate

    def _given(self, ids: Sequence[int], param: str, truncate: int | None) -> list[int]:
        """Return given ids, to which nothing is added."""
        if truncate is not None:
            return list(ids[: min(truncate, self._facts.window)])
        if len(ids) > self._facts.window:
            raise too_long(len(ids), self._facts.window, param)
        return list(ids)

    def _check(self, ids: Sequence[int], param: str) -> None:
        if not ids:
            raise InvalidRequest(f"`{param}` has a text without tokens; give at least one.", param=param)
        if min(ids) < 0 or max(ids) >= self._facts.vocab_size:
            raise InvalidRequest(
                f"`{param}` holds a token id outside 0 to {self._facts.vocab_size - 1}, those of `{self.name}`.",
                param=param,
            )

    @contextmanager
    def _refused(self, param: str) -> Iterator[None]:
        try:
            yield
        except TextTooLong as error:
            raise too_long(error.num_ids, self._facts.window, param) from None
        except UnicodeEncodeError:
            raise InvalidRequest(f"`{param}` holds half of a surrogate pair; send UTF-8.", param=param) from None


class DecoderSource:
    """The served model: its hidden states behind the final norm are pooled."""

    scores_pairs = False
    num_values = 0  # known with the first vector

    def __init__(
        self,
        service: Service,
        builder: RequestBuilder,
        name: str,
        *,
        lora: ServedLora | None = None,
        pooling: Pooling = "last",
        priority: int = 0,
    ) -> None:
        self._service, self._builder = service, builder
        self._lora, self._pooling, self._priority = lora, pooling, priority
        self.name = name

    @property
    def _window(self) -> int:
        """Most ids of a text: one place is for a token."""
        return self._builder.longest - 1

    def tokenise(self, texts: Sequence[Any], options: InputOptions) -> list[tuple[int, ...]]:
        if options.prompt_name is not None:
            raise InvalidRequest(
                f"`prompt_name` is {short_repr(options.prompt_name)}; `{self.name}` has no prompts of its own.",
                param="prompt_name",
            )
        wanted = PromptOptions(options.param, options.add_special_tokens, options.truncate)
        found = [self._builder.prompt(text, wanted).ids for text in texts]
        for ids in found:
            if len(ids) > self._window:
                raise too_long(len(ids), self._window, options.param)
        return found

    def tokenise_pairs(self, pairs: Sequence[tuple[str, str]], options: InputOptions) -> Tokenised:
        raise InvalidRequest(f"`{self.name}` does not score pairs.", param="model")

    def num_tokens(self, texts: Sequence[tuple[int, ...]]) -> int:
        return sum(map(len, texts))

    async def run(self, request_id: str, texts: Sequence[tuple[int, ...]]) -> list[Vector]:
        found: list[Vector] = [()] * len(texts)
        reading: dict[asyncio.Task[Vector], int] = {}
        streams: list[Stream] = []
        wait_bound: Timer | None = None
        try:
            for number, ids in enumerate(texts):
                stream = await self._submitted(self._request(request_id, number, len(texts), ids), reading, found)
                streams.append(stream)
                if number == 0:
                    wait_bound = self._service.engine.bound_wait(streams)
                reading[asyncio.create_task(_read(stream))] = number
            while reading:
                await _collect(reading, found)
        except engine_errors.EngineError as error:
            raise _translated(error) from error
        finally:
            if wait_bound is not None:
                wait_bound.cancel()
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        return found

    async def _submitted(
        self, request: ValidRequest, reading: dict[asyncio.Task[Vector], int], found: list[Vector]
    ) -> Stream:
        """Queue a text, once few enough of the request's others are read. Raises EngineError; a full queue only where
        none of the others is."""
        while True:
            if len(reading) >= AT_ONCE:
                await _collect(reading, found)
            try:
                return self._service.engine.submit(request)
            except engine_errors.QueueFull:
                if not reading:
                    raise
                await _collect(reading, found)

    def _request(self, request_id: str, number: int, count: int, ids: tuple[int, ...]) -> ValidRequest:
        return ValidRequest(
            request_id=request_id if count == 1 else choice_id(request_id, number),
            prompt_ids=ids,
            sampling=SamplingOptions(seed=0, temperature=0.0),
            max_tokens=1,
            max_draft_length=0,
            priority=self._priority,
            lora=self._lora,
            key=self._builder.key,
            pooling=self._pooling,
        )


async def _read(stream: Stream) -> Vector:
    """Return the vector at the end of a stream, and release it."""
    found: Vector = ()
    async with stream:
        async for delta in stream:
            found = delta.embedding or found
    return found


async def _collect(reading: dict[asyncio.Task[Vector], int], found: list[Vector]) -> None:
    """Wait for a text that is read, and keep the vectors that are there. Raises EngineError."""
    done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        found[reading.pop(task)] = task.result()


def _translated(error: engine_errors.EngineError) -> ApiError:
    if isinstance(error, engine_errors.WorkerFailed):
        return Unavailable(f"{error} Send it again.", reason="not_ready")
    return translate(error, "input")


def choose_source(
    service: Service, key: str, model: str | None, *, pooling: Pooling | None = None, priority: int | None = None
) -> PoolingSource:
    """Return what answers for a model's name: the encoder for its own name, and where none or any name is given.

    Raises NotFound, InvalidRequest for `pooling` of an encoder, Unavailable.
    """
    builder = service.builder(key)
    text, names = service.encoder, served_names(service.config, service.text)
    others = (*names, *builder.facts.adapters, *builder.loras)
    is_any = model is None or model in NAMELESS or (service.config.takes_any_name and model not in others)
    if text is not None and (is_any or model == text.name):
        if builder.facts.encoder is None:
            raise Unavailable("The workers have no encoder: they need --embedding-model, too.", reason="not_ready")
        if pooling is not None:
            raise InvalidRequest(
                f"`pooling` is for the served model; that of `{text.name}` is the one it was trained with.",
                param="pooling",
            )
        return EncoderSource(service.engine, text, builder.facts.encoder, key)
    adapter = builder.adapter(model, others=() if text is None else (text.name,))
    asked = model if model in (*names, *service.config.unlisted_names) else None
    name = adapter or asked or service.text.name
    return DecoderSource(
        service, builder, name, lora=builder.loras.get(adapter), pooling=pooling or "last", priority=priority or 0
    )


@asynccontextmanager
async def counted(service: Service, key: str, num_tokens: int) -> AsyncIterator[None]:
    """Count a request of so many tokens, its outcome and its seconds, and charge its API key."""
    begun, outcome = time.monotonic(), "cancelled"
    service.rate_limits[key].charge(num_tokens, 0, 0)
    try:
        yield
        outcome = "embedded"
    except ApiError as error:
        is_late = isinstance(error, QueueTimedOut)
        outcome = "queue_timeout" if is_late else "error" if error.status >= 500 else "cancelled"
        raise
    finally:
        service.metrics.requests_total.labels(outcome=outcome).inc()
        service.metrics.request_seconds.observe(time.monotonic() - begun)


def normalised(vector: Vector) -> list[float]:
    """Return the vector with length 1; zeros stay zeros."""
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else list(vector)


def cosine(first: Vector, second: Vector) -> float:
    """Return the cosine of two vectors of length 1; no rounding takes it beyond 1."""
    return max(-1.0, min(1.0, float(sum(map(mul, first, second)))))


def request_id(prefix: str, given: str | None) -> str:
    """Return the client's id of a request, or a fresh one."""
    return given or f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    """Return `created` of an answer, in Unix seconds."""
    return int(time.time())


def usage(num_tokens: int) -> Mapping[str, int]:
    """Return OpenAI's `usage` of a request without an output."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
