"""Run a plan: submit all of its choices or none, merge their deltas, release their streams, and report its figures."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from space_common.worker.errors import CONTRADICTION, GRAMMAR, GRAMMARS_BUSY
from starlette.requests import Request

from space_router import errors
from space_router.api.request_builder import GenerationPlan, PlannedChoice
from space_router.engine import errors as engine_errors
from space_router.engine.engine import Engine
from space_router.engine.request.request import RequestTrace, Statistics, Stream, TokenLogprobs
from space_router.engine.request.request_state import Timer
from space_router.http_server.responses import ANTHROPIC_PATHS
from space_router.metrics import Metrics
from space_router.text.text_stream import FinishReason, TextDelta, TextStatistics, TextStream, TextToken
from space_router.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def translate(error: engine_errors.EngineError, param: str = "prompt", limit: str = "max_tokens") -> errors.ApiError:
    """Convert an engine error to an ApiError. `param`, `limit`: the field names of the prompt and of max_tokens."""
    match error:
        case engine_errors.PromptTooLong():
            message, size = error.message_for(limit), error.num_prompt
            window = error.window + error.is_of_prompts  # the limit includes a token of output
            return errors.TooManyTokens(message, num_prompt=size, limit=window, param=param)
        case engine_errors.CacheTooSmall():
            return errors.TooManyTokens(str(error), num_prompt=error.num_prompt, limit=error.num_slots, param=param)
        case engine_errors.QueueFull():
            return errors.Overloaded(str(error), retry_after=error.retry_after)
        case engine_errors.QueueTimeout():
            return errors.QueueTimedOut(str(error), retry_after=error.retry_after)
        case engine_errors.Draining():
            return errors.Unavailable("The server is stopping and takes no new work.", reason="draining")
        case engine_errors.NotReady():
            return errors.Unavailable("The server is starting: no worker is up yet.", reason="not_ready")
        case engine_errors.DeadlineExceeded():
            return errors.TimedOut(str(error))
        case engine_errors.RequestCancelled():
            return errors.ClientGone(str(error), code="cancelled")
        case engine_errors.Refused() | engine_errors.LoraRefused():
            return errors.InvalidRequest(str(error))
        case engine_errors.RequestFailed() if str(error).startswith(CONTRADICTION):
            return errors.InvalidRequest(str(error), code="contradictory_constraints")
        case engine_errors.RequestFailed() if str(error).startswith(GRAMMAR):
            return errors.InvalidRequest(str(error)[:300], code="invalid_grammar")
        case engine_errors.RequestFailed() if str(error).startswith(GRAMMARS_BUSY):
            return errors.Overloaded(str(error)[:300], retry_after=GRAMMAR_RETRY_SECONDS)
        case _:
            return errors.GenerationFailed(str(error)[:300], code="generation_failed")


GRAMMAR_RETRY_SECONDS = 10.0  # after which a worker may have compiled the grammars that it was asked for


@dataclass
class ChoiceState:
    """The progress of one choice."""

    choice: PlannedChoice
    stream: Stream
    text_stream: TextStream
    scope: AsyncExitStack  # closing it releases the stream; idempotent
    finish: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def statistics(self) -> TextStatistics:
        return self.text_stream.statistics


Step = list[tuple[ChoiceState, TextDelta]]  # Deltas that became ready together


@dataclass
class CompletedChoice:
    """The complete text and tokens of one choice."""

    progress: ChoiceState
    text: str = ""
    tokens: list[TextToken] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Generation:
    """The streams of a plan. Entering submits every choice or none; leaving releases all of them.

    async with Generation(engine, tokenizer, metrics, plan) as running:
        async for step in running.steps(): ...      # [(choice, TextDelta), ...] that became ready together
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        metrics: Metrics,
        plan: GenerationPlan,
        charge: Callable[[int, int, float], None] = lambda num_prompt, num_generated, num_charged: None,
        tracer: "Tracer | None" = None,
    ) -> None:
        """`charge(num_prompt, num_generated, num_charged)` is called with the prompt tokens once, and at the end of
        each choice with the generated tokens and what they are charged. `tracer`: creates a span for each choice; None
        turns tracing off.
        """
        self.plan = plan
        self._charge = charge
        self._tracer = tracer
        self.choices: list[ChoiceState] = []
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._tasks: list[asyncio.Task[None]] = []
        self.since = time.monotonic()  # when the request was validated
        self._outcome = "cancelled"  # outcome of choices that have not finished
        self._wait_bound: Timer | None = None  # ends a request that waits too long for its turn

    @property
    def device(self) -> str:
        """The worker's torch device."""
        return "" if self._engine.facts is None else self._engine.facts.device

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: a seed gives the same text as long as it is unchanged."""
        return "" if self._engine.facts is None else self._engine.facts.fingerprint

    async def __aenter__(self) -> "Generation":
        leader: Stream | None = None
        async with AsyncExitStack() as undo:
            for choice in self.plan.choices:
                follows = leader if choice.request.sampling.choice else None
                request = choice.request
                if self._tracer is not None:
                    request = replace(request, trace=RequestTrace(self._tracer, request.request_id))
                try:
                    stream = self._engine.submit(request, leader=follows)
                except engine_errors.EngineError as error:
                    if request.trace is not None:
                        request.trace.ended("error", Statistics(num_prompt=len(request.prompt_ids)))
                    refusal = translate(error, choice.prompt.param, self.plan.limit_param)
                    refusal.request_id = self.plan.request_id
                    if isinstance(error, engine_errors.QueueFull) and self.choices:
                        refusal.message = self._too_many(error)
                    raise refusal from error
                scope = await undo.enter_async_context(AsyncExitStack())
                await scope.enter_async_context(stream)
                leader = stream if follows is None else leader
                text = TextStream(self._tokenizer, choice.prompt.ids, choice.rules)
                self.choices.append(ChoiceState(choice, stream, text, scope))
            undo.pop_all()
        self._wait_bound = self._engine.bound_wait([progress.stream for progress in self.choices])
        self._charge(sum(len(prompt.ids) for prompt in self.plan.prompts), 0, 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._wait_bound is not None:
            self._wait_bound.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        seconds = time.monotonic() - self.since
        for progress in self.choices:
            outcome = self._outcome if progress.finish is None else progress.finish.value
            self._metrics.requests_total.labels(outcome=outcome).inc()
            self._metrics.request_seconds.observe(seconds)
            request, statistics = progress.stream.request, progress.stream.statistics
            num_generated = statistics.num_generated
            self._charge(0, num_generated, request.charge(num_generated, statistics.num_steps))
            if request.trace is not None:
                request.trace.ended(outcome, statistics)
            await progress.scope.aclose()

    def _too_many(self, error: engine_errors.QueueFull) -> str:
        """Return why the queue refuses this request, though it has taken some of the request's prompts."""
        num_placed = -(-len(self.choices) // self.plan.per_prompt)
        return (
            f"The queue has no room for the {len(self.plan.prompts)} prompts of this request: {num_placed} would find "
            f"a place now. Send fewer, or try again in about {error.retry_after:.0f} s."
        )

    def overdue(self) -> None:
        """Record that the client's deadline passed: unfinished choices count as `deadline`, not as `cancelled`."""
        self._outcome = "deadline"

    async def begun(self) -> None:
        """Wait until a choice is admitted to a worker, where the wait is bounded: a stream has no status before, so a
        request whose turn does not come is refused by its status. Raises ApiError."""
        if self._wait_bound is None:
            return
        waits = [asyncio.ensure_future(progress.stream.begun.wait()) for progress in self.choices]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if error := next((one.stream.error for one in self.choices if one.stream.error is not None), None):
            raise self._failure(error) from error

    async def steps(self) -> AsyncIterator[Step]:
        """Yield the deltas of all choices that became ready together. Raises ApiError."""
        try:
            if len(self.choices) == 1:
                async for delta in self._read(self.choices[0]):
                    yield [(self.choices[0], delta)]
            else:
                async for step in self._merge():
                    yield step
        except engine_errors.EngineError as error:
            raise self._failure(error) from error

    def _failure(self, error: engine_errors.EngineError) -> errors.ApiError:
        """Record the outcome of the choices that an error has ended, and return the error for the client."""
        match error:
            case engine_errors.DeadlineExceeded():
                self._outcome = "deadline"
            case engine_errors.QueueTimeout():
                self._outcome = "queue_timeout"
            case engine_errors.RequestCancelled():
                self._outcome = "cancelled"
            case _:
                self._outcome = "error"
        refusal = translate(error)
        refusal.request_id = self.plan.request_id
        return refusal

    async def whole(self) -> list[CompletedChoice]:
        """Run every choice to its end."""
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
        """Yield a choice's text deltas, without empty ones."""
        async for step in progress.stream:
            delta = progress.text_stream.push(step)
            if delta is None:
                continue
            if delta.finish is not None:
                progress.finish, progress.stop_reason = delta.finish, delta.stop_reason
                # Release the pages now; other choices may still be running.
                await progress.scope.aclose()
            if progress.choice.ends_in_prompt:  # the generated token is the prompt's last
                known = tuple(token.logprobs for token in delta.tokens if token.logprobs is not None)
                delta = delta._replace(text="", tokens=(), prompt_logprobs=delta.prompt_logprobs + known)
            yield delta
            if delta.finish is not None:
                return

    async def _merge(self) -> AsyncIterator[Step]:
        """Yield the choices' deltas in order of arrival; those that are ready together form one step."""
        # Bounded, so that a slow reader holds back the streams instead of filling memory.
        ready: asyncio.Queue[tuple[ChoiceState, TextDelta] | Exception | None] = asyncio.Queue(2 * len(self.choices))

        async def pump(progress: ChoiceState) -> None:
            try:
                async for delta in self._read(progress):
                    await ready.put((progress, delta))
                await ready.put(None)
            except Exception as error:  # raised again by the merging loop
                await ready.put(error)

        self._tasks = [asyncio.create_task(pump(progress)) for progress in self.choices]
        num_open = len(self.choices)
        while num_open:
            items = [await ready.get()]
            await asyncio.sleep(0)  # let the other choices of this step arrive
            while not ready.empty():
                items.append(ready.get_nowait())
            step: Step = []
            for item in items:
                if item is None:
                    num_open -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    step.append(item)
            if step:
                yield step


async def with_prompts(steps: AsyncIterator[Step], plan: GenerationPlan) -> AsyncIterator[Step]:
    """Yield the same steps, with the prompt's log-probabilities before each choice's tokens.

    The first choice gets them as they are computed. The deltas of the others are held until they are complete.
    """
    known: list[list[TokenLogprobs]] = [[] for _ in plan.prompts]
    waiting: list[Step] = [[] for _ in plan.prompts]
    served: set[int] = set()  # other choices that already have them
    async for step in steps:
        ready: Step = []
        for progress, delta in step:
            place, choice = divmod(progress.choice.index, plan.per_prompt)
            complete = len(progress.choice.prompt.ids) - 1
            if choice == 0:
                ready.append((progress, delta))
                known[place] += delta.prompt_logprobs
                given = waiting[place] if len(known[place]) == complete else []
            elif len(known[place]) < complete:
                waiting[place].append((progress, delta))
                given = []
            else:
                given = [(progress, delta)]
            for other, held in given:
                values = () if other.choice.index in served else tuple(known[place])
                served.add(other.choice.index)
                ready.append((other, held._replace(prompt_logprobs=values)))
            if given is waiting[place]:
                waiting[place] = []
        if ready:
            yield ready


def mean_logprob(tokens: Iterable[TextToken]) -> float:
    """Return the mean log-probability of a choice's tokens, the rank in `best_of`; minus infinity if none is known."""
    values = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
    return sum(values) / len(values) if values else float("-inf")


def most_probable(choices: Sequence[CompletedChoice]) -> list[CompletedChoice]:
    """Return the choices sorted best first; the order of equal ones is kept."""
    return sorted(choices, key=lambda one: mean_logprob(one.tokens), reverse=True)


def usage(plan: GenerationPlan, choices: Sequence[ChoiceState]) -> dict[str, Any]:
    """Return OpenAI's `usage` so far, over all choices; each prompt counts once."""
    num_prompt = sum(len(prompt.ids) for prompt in plan.prompts)
    num_generated = sum(choice.statistics.num_tokens for choice in choices) if plan.answered else 0
    leaders = choices[:: plan.per_prompt]
    # Each prediction token counts once for each choice, as accepted or rejected (so far).
    num_predicted = sum(len(choice.choice.request.prediction or ()) for choice in choices)
    num_found = 0
    if num_predicted and plan.answered:
        num_found = sum(min(one.statistics.num_predicted, one.statistics.num_tokens) for one in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(leader.stream.statistics.num_cached for leader in leaders)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.statistics.num_reasoning for one in choices),
            "accepted_prediction_tokens": num_found,
            "rejected_prediction_tokens": num_predicted - num_found,
        },
    }


def statistics(plan: GenerationPlan, choices: Sequence[ChoiceState]) -> dict[str, Any]:
    """Return the `spaceserve` object: the request's speculation statistics over all choices."""
    figures = [choice.statistics for choice in choices]
    steps = sum(one.num_steps for one in figures)
    decoded = sum(one.num_decoded for one in figures)
    return {
        "seed": plan.seed,
        "steps": steps,
        "drafted": sum(one.num_drafted for one in figures),
        "accepted": sum(one.num_accepted for one in figures),
        "tokens_per_step": round(decoded / steps, 4) if steps else None,
    }


RECEIVED = "spaceserve.received"  # Scope key of a request's arrival time, in monotonic seconds


def start_headers(request: Request, running: Generation) -> dict[str, str]:
    """Return the headers known before the first token; streams send only these."""
    prompts = running.plan.prompts
    own = {"request-id": running.plan.request_id} if request.url.path in ANTHROPIC_PATHS else {}
    return own | {
        "x-request-id": running.plan.request_id,
        "x-compute-type": running.device,
        "x-compute-characters": str(sum(len(prompt.text) for prompt in prompts)),
        "x-prompt-tokens": str(sum(len(prompt.ids) for prompt in prompts)),
        "x-validation-time": _milliseconds(running.since - request.scope[RECEIVED]),
    }


def end_headers(request: Request, running: Generation) -> dict[str, str]:
    """Return all headers. With several choices: the longest wait, and the longest answer's time per token."""
    lengths = [choice.statistics.num_tokens if running.plan.answered else 0 for choice in running.choices]
    now = time.monotonic()
    total = now - request.scope[RECEIVED]
    queued = max(choice.stream.statistics.queue_seconds or 0.0 for choice in running.choices)
    inference = now - running.since - queued
    return start_headers(request, running) | {
        "x-compute-time": f"{total:.6f}",
        "x-total-time": _milliseconds(total),
        "x-queue-time": _milliseconds(queued),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(1, *lengths)),
        "x-generated-tokens": str(sum(lengths)),
    }


def _milliseconds(seconds: float) -> str:
    return str(round(1000 * seconds))
