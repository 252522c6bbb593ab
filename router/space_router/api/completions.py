"""`POST /v1/completions`."""

from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from space_router.api.access import key_of
from space_router.api.body import read_object, validate
from space_router.api.connection import beside
from space_router.api.door import Door, Parameters
from space_router.api.fields import COMPLETION_NEUTRAL, CompletionBody, GenerationFields
from space_router.api.logprobs import CompletionLogprobs, prompt_logprobs
from space_router.api.openai_stream import OpenAIAnswer, respond
from space_router.api.plan import Plan
from space_router.api.running import Progress, Written
from space_router.api.schema import json_body
from space_router.api.service import Service
from space_router.errors import InvalidRequest
from space_router.text.text_stream import TextDelta
from space_router.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""As OpenAI's."""


def common_parameters(body: GenerationFields, **rest: Any) -> Parameters:
    """The fields completions and chat have in common."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` goes with `stream: true` only.", param="stream_options")
    same = Parameters.__dataclass_fields__.keys() & GenerationFields.model_fields.keys() - rest.keys()
    predicted = None if body.prediction is None else body.prediction.text
    return Parameters(**{name: getattr(body, name) for name in same - {"prediction"}}, prediction=predicted, **rest)


def plan(door: Door, body: CompletionBody) -> Plan:
    adapter = door.adapter(body.model)
    shown = body.n or 1
    generated = shown if body.best_of is None else body.best_of
    if generated < shown:
        raise InvalidRequest(f"`best_of` is {generated}, below the {shown} of `n`.", param="best_of")
    if body.stream and generated > shown:
        raise InvalidRequest("`best_of` above `n` cannot be streamed: the best is known at the end.", param="best_of")
    if body.stream and (body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)):
        param = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest("Log-probabilities of the prompt cannot be streamed; leave `stream` out.", param=param)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("`max_tokens` must be at least 1 (0 goes with `echo` only); got 0.", param="max_tokens")
    prompts = door.prompts(
        body.prompt,
        add_special_tokens=body.add_special_tokens is not False,
        truncate=body.truncate_prompt_tokens,
        param="prompt",
    )
    echoed = body.logprobs if body.echo else None
    asked = [count for count in (echoed, body.prompt_logprobs) if count is not None]
    wanted = common_parameters(
        body,
        adapter=adapter,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_choices=generated,
        num_shown=shown,
        num_logprobs=0 if body.logprobs is None and generated > shown else body.logprobs,
        num_prompt_logprobs=max(asked, default=None),
    )
    return door.plan(prompts, wanted, prefix="cmpl")


@dataclass
class CompletionShape:
    """How a completion is written."""

    tokenizer: Tokenizer
    body: CompletionBody
    plan: Plan
    object: str = "text_completion"
    chunk_object: str = "text_completion"

    def whole(self, written: Written, prompt: Written) -> dict[str, Any]:
        choice = written.progress.choice
        echo = choice.prompt.text if self.body.echo else ""
        text, tokens = (written.text, written.tokens) if self.plan.answered else ("", [])
        logprobs = None
        if self.body.logprobs is not None:
            lists = CompletionLogprobs(self.tokenizer)
            if self.body.echo:
                lists.add_prompt(choice.prompt.ids, echo, self._top(prompt.prompt_logprobs))
            lists.add(tokens, len(echo))
            logprobs = lists.lists
        body: dict[str, Any] = {"text": echo + text, "logprobs": logprobs}
        if self.body.prompt_logprobs is not None:
            known = self._top(prompt.prompt_logprobs, self.body.prompt_logprobs)
            body["prompt_logprobs"] = prompt_logprobs(self.tokenizer, choice.prompt.ids, known)
        return body

    def piece(self, progress: Progress, delta: TextDelta, *, first: bool) -> dict[str, Any]:
        choice = progress.choice
        echo = choice.prompt.text if self.body.echo else ""
        text, tokens = (delta.text, delta.tokens) if self.plan.answered else ("", ())
        logprobs = None
        if self.body.logprobs is not None:
            lists = CompletionLogprobs(self.tokenizer)
            lists.add(tokens, len(echo))
            logprobs = lists.lists
        return {"text": (echo if first else "") + text, "logprobs": logprobs}

    def _top(self, known: list[Any], count: int | None = None) -> list[Any]:
        """The alternatives asked for here: echo and prompt_logprobs may ask for different numbers."""
        limit = self.body.logprobs if count is None else count
        return [replace(one, top=one.top[:limit]) for one in known]


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/completions", openapi_extra=json_body(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        received = await read_object(request, service.config.max_body)
        body = validate(CompletionBody, received.values, COMPLETION_NEUTRAL)
        made = await beside(received.size, plan, service.door(key_of(request)), body)
        shape = CompletionShape(service.text.tokenizer, body, made)
        return await respond(service, request, OpenAIAnswer.to(shape, made, service.name_of(made), body))

    return router
