"""A plan at work: admitted as a whole or not at all, its choices merged step by step, given back by scope."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING

from space_router.api.plan import GenerationPlan, PlannedChoice
from space_router.engine import errors as engine_errors
from space_router.engine.engine import Engine
from space_router.engine.request.request import Statistics, TokenLogprobs, ValidRequest
from space_router.engine.request.request_trace import RequestTrace
from space_router.engine.request.stream import Stream
from space_router.errors import (
    ApiError,
    ClientGone,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    TimedOut,
    TooManyTokens,
    Unavailable,
)
from space_router.metrics import Metrics
from space_router.text.text_stream import FinishReason, TextDelta, TextStatistics, TextStream, TextToken
from space_router.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def translate(error: engine_errors.EngineError, param: str = "prompt", limit: str = "max_tokens") -> ApiError:
    """An engine's error as the API's; `param` and `limit`: the fields that a prompt and max_tokens came in."""
    match error:
        case engine_errors.PromptTooLong():
            return TooManyTokens(error.message_for(limit), num_prompt=error.num_prompt, limit=error.window, param=param)
        case engine_errors.CacheTooSmall():
            return TooManyTokens(str(error), num_prompt=error.num_prompt, limit=error.num_slots, param=param)
        case engine_errors.QueueFull():
            return Overloaded(str(error), retry_after=error.retry_after)
        case engine_errors.Draining():
            return Unavailable("The server is stopping and takes no new work.", reason="draining")
        case engine_errors.NotReady():
            return Unavailable("The server is starting: no worker is up yet.", reason="not_ready")
        case engine_errors.DeadlineExceeded():
            return TimedOut(str(error))
        case engine_errors.RequestCancelled():
            return ClientGone(str(error), code="cancelled")
        case engine_errors.Refused():
            return InvalidRequest(str(error))
        case _:
            return GenerationFailed(str(error)[:300], code="generation_failed")


def _of_prompt(delta: TextDelta) -> TextDelta:
    """Its tokens are the prompt's, too."""
    known = tuple(token.logprobs for token in delta.tokens if token.logprobs is not None)
    return delta._replace(text="", tokens=(), prompt_logprobs=delta.prompt_logprobs + known)


@dataclass
class ChoiceState:
    """One choice as far as it has come."""

    choice: PlannedChoice
    stream: Stream
    text_stream: TextStream
    scope: AsyncExitStack  # closing it gives the stream back; more than once is harmless
    finish: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def statistics(self) -> TextStatistics:
        return self.text_stream.statistics


@dataclass
class CompletedChoice:
    """The whole of one choice."""

    progress: ChoiceState
    text: str = ""
    tokens: list[TextToken] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Generation:
    """Streams of a plan. Entering submits every choice, or none; leaving gives all of them back.

    async with Running(engine, tokenizer, metrics, plan) as running:
        async for step in running.steps(): ...      # [(progress, TextDelta), ...] of one moment
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        metrics: Metrics,
        plan: GenerationPlan,
        charge: Callable[[int, int], None] = lambda num_prompt, num_generated: None,
        tracer: "Tracer | None" = None,
    ) -> None:
        """`charge` is told how many tokens came in, once, and went out, at the end of each choice; `tracer`: of spans
        for each choice, None where nobody wants any.
        """
        self.plan = plan
        self._charge = charge
        self._tracer = tracer
        self.choices: list[ChoiceState] = []
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._tasks: list[asyncio.Task[None]] = []
        self.since = time.monotonic()  # the request is checked
        self._outcome = "cancelled"  # of the choices that have not finished, until something else is known

    @property
    def device(self) -> str:
        """Where it is computed, as torch names it."""
        return "" if self._engine.facts is None else self._engine.facts.device

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: while it is the same, a seed gives the same text."""
        return "" if self._engine.facts is None else self._engine.facts.fingerprint

    async def __aenter__(self) -> "Generation":
        leader: Stream | None = None
        async with AsyncExitStack() as undo:
            for choice in self.plan.choices:
                follows = leader if choice.request.sampling.choice else None
                request = self._followed(choice.request)
                try:
                    stream = self._engine.submit(request, leader=follows)
                except engine_errors.EngineError as error:
                    if request.trace is not None:
                        request.trace.ended("error", Statistics(num_prompt=len(request.prompt_ids)))
                    raise translate(error, choice.prompt.param, self.plan.limit_param) from error
                scope = await undo.enter_async_context(AsyncExitStack())
                await scope.enter_async_context(stream)
                leader = stream if follows is None else leader
                text = TextStream(self._tokenizer, choice.prompt.ids, choice.rules)
                self.choices.append(ChoiceState(choice, stream, text, scope))
            undo.pop_all()
        self._charge(sum(len(prompt.ids) for prompt in self.plan.prompts), 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        seconds = time.monotonic() - self.since
        for progress in self.choices:
            outcome = self._outcome if progress.finish is None else progress.finish.value
            self._metrics.requests_total.labels(outcome=outcome).inc()
            self._metrics.request_seconds.observe(seconds)
            self._charge(0, progress.stream.statistics.num_generated)
            if (trace := progress.stream.request.trace) is not None:
                trace.ended(outcome, progress.stream.statistics)
            await progress.scope.aclose()

    def _followed(self, request: ValidRequest) -> ValidRequest:
        """The request, with spans where they are wanted."""
        if self._tracer is None:
            return request
        return replace(request, trace=RequestTrace(self._tracer, request.request_id))

    def overdue(self) -> None:
        """Its client's own clock has ended it: what has not finished counts as out of time, not as cancelled."""
        self._outcome = "deadline"

    async def steps(self) -> AsyncIterator[list[tuple[ChoiceState, TextDelta]]]:
        """What became certain, for all choices that moved at one moment. Raises ApiError."""
        try:
            if len(self.choices) == 1:
                async for delta in self._read(self.choices[0]):
                    yield [(self.choices[0], delta)]
            else:
                async for step in self._merge():
                    yield step
        except engine_errors.EngineError as error:
            self._outcome = "deadline" if isinstance(error, engine_errors.DeadlineExceeded) else "error"
            if isinstance(error, engine_errors.RequestCancelled):
                self._outcome = "cancelled"
            raise translate(error) from error

    async def whole(self) -> list[CompletedChoice]:
        """Every choice to its end."""
        written = [CompletedChoice(progress) for progress in self.choices]
        pieces: list[list[str]] = [[] for _ in written]
        async for step in self.steps():
            for progress, delta in step:
                index = progress.choice.index
                pieces[index].append(delta.text)
                written[index].tokens += delta.tokens
                written[index].prompt_logprobs += delta.prompt_logprobs
        for one, texts in zip(written, pieces, strict=True):
            one.text = "".join(texts)
        return written

    async def _read(self, progress: ChoiceState) -> AsyncIterator[TextDelta]:
        """One delta for each of the engine's that made something certain."""
        ends_in_prompt = progress.choice.ends_in_prompt
        async for step in progress.stream:
            delta = progress.text_stream.feed(step)
            if delta is None:
                continue
            if delta.finish is not None:
                progress.finish, progress.stop_reason = delta.finish, delta.stop_reason
                # The pages are of no use any more, whatever the other choices still do.
                await progress.scope.aclose()
            yield _of_prompt(delta) if ends_in_prompt else delta
            if delta.finish is not None:
                return

    async def _merge(self) -> AsyncIterator[list[tuple[ChoiceState, TextDelta]]]:
        """The choices' deltas in the order they come; those that are there together come together."""
        # Bounded, so that a slow reader is felt by the streams and not by the memory.
        ready: asyncio.Queue[tuple[ChoiceState, TextDelta] | Exception | None] = asyncio.Queue(2 * len(self.choices))

        async def pump(progress: ChoiceState) -> None:
            try:
                async for delta in self._read(progress):
                    await ready.put((progress, delta))
                await ready.put(None)
            except Exception as error:  # raised where the choices are merged
                await ready.put(error)

        self._tasks = [asyncio.create_task(pump(progress)) for progress in self.choices]
        num_open = len(self.choices)
        while num_open:
            items = [await ready.get()]
            await asyncio.sleep(0)  # the others of this step are about to be pumped, too
            while not ready.empty():
                items.append(ready.get_nowait())
            step: list[tuple[ChoiceState, TextDelta]] = []
            for item in items:
                if item is None:
                    num_open -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    step.append(item)
            if step:
                yield step
