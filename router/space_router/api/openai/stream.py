"""Whole and streamed responses of completions and chat completions."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from space_router.api.generation import ChoiceState, CompletedChoice, Generation, most_probable, with_prompts
from space_router.api.openai.fields import GenerationFields
from space_router.api.openai.logprobs import prompt_logprobs
from space_router.api.plan import GenerationPlan
from space_router.api.usage import statistics, usage
from space_router.engine.request.request import TokenLogprobs
from space_router.http_server.responses import (
    as_api_error,
    event_json,
    openai_error,
)
from space_router.text.text_stream import FinishReason, TextDelta
from space_router.text.tokenizer import Tokenizer

STEP = 128
"""Event sizes are multiples of this many bytes."""

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_FIELD = b',"obfuscation":"'
_LETTERS = bytes(_ALPHABET[i % 64] for i in range(256))


def obfuscated(event: bytes) -> bytes:
    """Append a field of random letters to a stream event (`data: {...}` and two line ends)."""
    head = event.removesuffix(b"}\n\n")
    num_letters = -(len(head) + len(_FIELD) + len(b'"}\n\n')) % STEP
    return head + _FIELD + secrets.token_bytes(num_letters).translate(_LETTERS) + b'"}\n\n'


class EventSteps:
    """Builds the `spaceserve` object of each event of one response.

    {"tokens": [{"text": " cat", "step": 3, "draft": true}, ...], "verified": 5}

    The texts join to the event's text. A character belongs to the last of its tokens; remaining text of a token in an
    earlier event goes with the next token, or is in an event without tokens. `step` 0 is the prefill; `draft` marks an
    accepted draft; `verified` is the number of drafts verified since the choice's previous event.
    """

    def __init__(self) -> None:
        self._given: dict[int, int] = {}  # characters sent for each choice
        self._drafted: dict[int, int] = {}  # drafts counted for each choice

    def of(self, progress: ChoiceState, delta: TextDelta) -> dict[str, Any]:
        index, drafted = progress.choice.index, progress.statistics.num_drafted
        offset = self._given.get(index, 0)
        verified = drafted - self._drafted.get(index, 0)
        self._given[index], self._drafted[index] = offset + len(delta.text), drafted
        tokens: list[dict[str, Any]] = []
        begin = 0
        for place, token in enumerate(delta.tokens, start=1):
            last = place == len(delta.tokens)
            end = len(delta.text) if last else max(begin, delta.tokens[place].span.start - offset)
            tokens.append({"text": delta.text[begin:end], "step": token.step, "draft": token.draft})
            begin = min(end, len(delta.text))
        return {"tokens": tokens, "verified": verified}


DONE = b"data: [DONE]\n\n"
_GOES_ON = {"finish_reason": None, "stop_reason": None}


class AnswerShape(Protocol):
    """Builds the choices of one API's responses."""

    tokenizer: Tokenizer
    object: str  # `object` of a whole response
    chunk_object: str  # `object` of an event

    def whole(self, written: CompletedChoice, prompt: CompletedChoice) -> dict[str, Any]:
        """Return a finished choice without its index. Its finish fields take precedence.

        `prompt`: the choice that has the prompt's log-probabilities.
        """

    def piece(self, progress: ChoiceState, delta: TextDelta, *, first: bool) -> dict[str, Any]:
        """Return a piece of a choice without its index. Its finish fields take precedence."""


@dataclass(frozen=True)
class OpenAIAnswer:
    """The response to one request, whole or as events."""

    shape: AnswerShape
    plan: GenerationPlan
    model: str
    options: GenerationFields
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, running: Generation) -> dict[str, Any]:
        written = await running.whole()
        choices: list[dict[str, Any]] = []
        for start in range(0, len(written), self.plan.per_prompt):
            group = written[start : start + self.plan.per_prompt]
            ranked = most_probable(group) if len(group) > self.plan.num_shown else group
            for one in ranked[: self.plan.num_shown]:
                body = self.shape.whole(one, group[0])
                self.add_extensions(body, one, group[0].prompt_logprobs, first=True)
                reasons = self.reasons(one.progress.finish, one.progress.stop_reason)
                choices.append({"index": len(choices), **reasons, **body})
        return {
            "id": self.plan.request_id,
            "object": self.shape.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": running.fingerprint,
            "choices": choices,
            "usage": usage(self.plan, running.choices),
            "spaceserve": statistics(self.plan, running.choices),
        }

    async def events(self, running: Generation) -> AsyncGenerator[bytes]:
        """Yield one event per step and choice, ready ones as one chunk. An error is the last event."""
        steps = running.steps()
        written = _Events(self, running)
        try:
            async for step in with_prompts(steps, self.plan) if self.plan.wants_prompt_logprobs else steps:
                yield b"".join([written.event(progress, delta) for progress, delta in step])
            yield written.last()
        except Exception as error:
            yield b"data: " + event_json(openai_error(as_api_error(error))) + b"\n\n"

    @property
    def extended(self) -> bool:
        return bool(self.options.return_token_ids) or self.options.prompt_logprobs is not None

    def add_extensions(
        self, body: dict[str, Any], written: CompletedChoice, prompt: Sequence[TokenLogprobs], *, first: bool
    ) -> None:
        """Add fields that OpenAI does not have: token ids and prompt log-probabilities. `written` may be a piece."""
        if self.options.return_token_ids:
            body["token_ids"] = [token.span.id for token in written.tokens] if self.plan.answered else []
            if first:
                body["prompt_token_ids"] = written.progress.choice.prompt.ids
        if self.options.prompt_logprobs is not None and (first or prompt):
            tokenizer, count = self.shape.tokenizer, self.options.prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs(tokenizer, prompt, count, first=first)

    def reasons(self, finish: FinishReason | None, stop_reason: str | int | None) -> dict[str, Any]:
        if finish is not None and not self.plan.answered:  # it is the limit of 0 that ended it, whatever the engine's
            finish, stop_reason = FinishReason.LENGTH, None  # one token was
        name = None if finish is None else "length" if finish is FinishReason.LENGTH else "stop"
        return {"finish_reason": name, "stop_reason": stop_reason}


class _Events:
    """Builds the events of one response, in order."""

    def __init__(self, reply: OpenAIAnswer, running: Generation) -> None:
        options = reply.options.stream_options
        self._reply, self._running = reply, running
        self._usage_at_end = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)
        self._obfuscate = options is not None and bool(options.include_obfuscation)
        self._steps = EventSteps() if options is not None and options.include_steps else None
        self._extended = reply.extended
        head = {"id": reply.plan.request_id, "object": reply.shape.chunk_object, "created": reply.created}
        head |= {"model": reply.model, "system_fingerprint": running.fingerprint}
        self._prefix = b"data: " + event_json(head)[:-1] + b","  # the same in all events
        self._begun: set[int] = set()  # indexes of choices that have sent an event
        self._num_open = len(running.choices)

    def event(self, progress: ChoiceState, delta: TextDelta) -> bytes:
        """Return the event for a piece of one choice."""
        reply, index = self._reply, progress.choice.index
        first = index not in self._begun
        if first:
            self._begun.add(index)
        body = reply.shape.piece(progress, delta, first=first)
        if self._extended:
            written = CompletedChoice(progress, tokens=list(delta.tokens))
            reply.add_extensions(body, written, delta.prompt_logprobs, first=first)
        reasons = _GOES_ON if delta.finish is None else reply.reasons(delta.finish, delta.stop_reason)
        event: dict[str, Any] = {"choices": [{"index": index, **reasons, **body}]}
        if self._usage_always:
            event["usage"] = usage(reply.plan, self._running.choices)
        elif self._usage_at_end:
            event["usage"] = None
        self._num_open -= delta.finish is not None
        if not self._num_open:
            event["spaceserve"] = statistics(reply.plan, self._running.choices)
        if self._steps is not None and reply.plan.answered:
            event["spaceserve"] = event.get("spaceserve", {}) | self._steps.of(progress, delta)
        data = self._line(event)
        return obfuscated(data) if self._obfuscate else data

    def last(self) -> bytes:
        """Return the usage event, if requested, and the end of the stream."""
        if not self._usage_at_end:
            return DONE
        plan, choices = self._reply.plan, self._running.choices
        tail = {"choices": [], "usage": usage(plan, choices), "spaceserve": statistics(plan, choices)}
        return self._line(tail) + DONE

    def _line(self, event: dict[str, Any]) -> bytes:
        return b"%b%b\n\n" % (self._prefix, event_json(event)[1:])
