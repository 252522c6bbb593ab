"""What completions and chat completions share: usage, statistics, whole answers and streams of events."""

import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from space_router.api.answers import answer, openai_error, unforeseen
from space_router.api.connection import EventStream, while_connected
from space_router.api.fields import GenerationFields
from space_router.api.plan import Plan
from space_router.api.running import Progress, Running, Written
from space_router.api.service import Service
from space_router.api.usage import statistics, usage
from space_router.errors import ApiError
from space_router.text.text_stream import FinishReason, TextDelta

DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """How one API writes a choice."""

    object: str  # of a whole answer
    chunk_object: str  # of an event

    def whole(self, written: Written, prompt: Written) -> dict[str, Any]:
        """A finished choice without index and reasons; `prompt`: the choice that has its prompt's logprobs."""

    def piece(self, progress: Progress, delta: TextDelta, *, first: bool) -> dict[str, Any]:
        """A piece of a choice without index and reasons."""


@dataclass(frozen=True)
class OpenAIAnswer:
    """One request's answer, whole or as events."""

    shape: Shape
    plan: Plan
    model: str
    options: GenerationFields
    created: int

    @classmethod
    def to(cls, shape: Shape, plan: Plan, model: str, options: GenerationFields) -> "OpenAIAnswer":
        return cls(shape, plan, model, options, int(time.time()))

    async def whole(self, running: Running) -> dict[str, Any]:
        written = await running.whole()
        choices: list[dict[str, Any]] = []
        for start in range(0, len(written), self.plan.per_prompt):
            group = written[start : start + self.plan.per_prompt]
            ranked = sorted(group, key=_mean_logprob, reverse=True) if len(group) > self.plan.num_shown else group
            for one in ranked[: self.plan.num_shown]:
                body = self.shape.whole(one, group[0])
                self._add_ids(body, one.progress, [token.span.id for token in one.tokens], first=True)
                reasons = self._reasons(one.progress.finish, one.progress.stop_reason)
                choices.append({"index": len(choices), **body, **reasons})
        return {
            "id": self.plan.request_id,
            "object": self.shape.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage(self.plan, running.choices),
            "spaceserve": statistics(self.plan, running.choices),
        }

    async def events(self, running: Running) -> AsyncGenerator[bytes]:
        """One event per step and choice; those of one moment as one chunk; an error is the last event."""
        try:
            async with aclosing(self._events(running)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ApiError as error:
            yield b"data: " + orjson.dumps(openai_error(error)) + b"\n\n"
        except Exception as error:
            yield b"data: " + orjson.dumps(openai_error(unforeseen(error))) + b"\n\n"

    async def _events(self, running: Running) -> AsyncGenerator[bytes]:
        options = self.options.stream_options
        usage_at_end = options is not None and bool(options.include_usage)
        usage_always = options is not None and bool(options.continuous_usage_stats)
        head = {"id": self.plan.request_id, "object": self.shape.chunk_object, "created": self.created}
        prefix = b"data: " + orjson.dumps({**head, "model": self.model})[:-1]
        started: set[int] = set()
        async for step in running.steps():
            chunk = bytearray()
            for progress, delta in step:
                index = progress.choice.index
                body = self.shape.piece(progress, delta, first=index not in started)
                self._add_ids(body, progress, [token.span.id for token in delta.tokens], first=index not in started)
                started.add(index)
                event: dict[str, Any] = {
                    "choices": [{"index": index, **body, **self._reasons(delta.finish, delta.stop_reason)}]
                }
                if usage_always:
                    event["usage"] = usage(self.plan, running.choices)
                elif usage_at_end:
                    event["usage"] = None
                if delta.finish is not None and all(other.finish is not None for other in running.choices):
                    event["spaceserve"] = statistics(self.plan, running.choices)
                chunk += prefix + b"," + orjson.dumps(event)[1:] + b"\n\n"
            yield bytes(chunk)
        last = bytearray()
        if usage_at_end:
            tail = {
                "choices": [],
                "usage": usage(self.plan, running.choices),
                "spaceserve": statistics(self.plan, running.choices),
            }
            last += prefix + b"," + orjson.dumps(tail)[1:] + b"\n\n"
        yield bytes(last + DONE)

    def _add_ids(self, body: dict[str, Any], progress: Progress, ids: list[int], *, first: bool) -> None:
        if self.options.return_token_ids:
            body["token_ids"] = ids if self.plan.answered else []
            if first:
                body["prompt_token_ids"] = progress.choice.prompt.ids

    def _reasons(self, finish: FinishReason | None, stop_reason: str | int | None) -> dict[str, Any]:
        if finish is not None and not self.plan.answered:  # it is the limit of 0 that ended it, whatever the engine's
            finish, stop_reason = FinishReason.LENGTH, None  # one token was
        name = None if finish is None else "length" if finish is FinishReason.LENGTH else "stop"
        return {"finish_reason": name, "stop_reason": stop_reason}


def _mean_logprob(written: Written) -> float:
    values = [token.logprobs.logprob for token in written.tokens if token.logprobs is not None]
    return sum(values) / len(values) if values else float("-inf")


async def respond(service: Service, request: Request, reply: OpenAIAnswer) -> Response:
    """Submit, then answer whole or as events; nothing is sent before all choices are queued."""
    headers = {"x-request-id": reply.plan.request_id}
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(service.run(reply.plan))
        if reply.options.stream:
            return EventStream(reply.events(running), stack.pop_all(), headers, reply.plan.request_id)
        return answer(await while_connected(request.receive, reply.whole(running)), headers=headers)
