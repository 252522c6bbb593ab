"""`POST /v1/completions`."""

from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from space_router.api.generation import ChoiceState, CompletedChoice
from space_router.api.openai.answers import Completion, CompletionEvent
from space_router.api.openai.fields import COMPLETION_NEUTRAL, CompletionBody, GenerationFields
from space_router.api.openai.stream import CompletionLogprobs, Echo, OpenAIAnswer
from space_router.api.request_builder import GenerationPlan, Parameters, PromptOptions, RequestBuilder
from space_router.api.schema import STATUSES, OpenAIError, describe_responses, json_body
from space_router.api.service import Service
from space_router.engine.request.request import Grammar
from space_router.errors import InvalidRequest
from space_router.http_server.responses import key_of
from space_router.text.text_stream import TextDelta

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


def common_parameters(body: GenerationFields, **rest: Any) -> Parameters:
    """Return the parameters from the fields that completions and chat completions share."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` goes with `stream: true` only.", param="stream_options")
    same = Parameters.__dataclass_fields__.keys() & GenerationFields.model_fields.keys() - rest.keys()
    predicted = None if body.prediction is None else body.prediction.text
    return Parameters(**{name: getattr(body, name) for name in same - {"prediction"}}, prediction=predicted, **rest)


def plan(builder: RequestBuilder, body: CompletionBody, grammar: Grammar | None = None) -> GenerationPlan:
    adapter = builder.adapter(body.model)
    shown = body.n or 1
    generated = shown if body.best_of is None else body.best_of
    if generated < shown:
        raise InvalidRequest(f"`best_of` is {generated}, below the {shown} of `n`.", param="best_of")
    if body.stream and generated > shown:
        raise InvalidRequest("`best_of` above `n` cannot be streamed: the best is known at the end.", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("`max_tokens` must be at least 1 (0 goes with `echo` only); got 0.", param="max_tokens")
    if body.suffix and body.echo and body.logprobs is not None:
        message = "`echo` with `logprobs` does not go with `suffix`: the prompt is not read in its order."
        raise InvalidRequest(message, param="echo")
    infill = builder.infill(body.suffix)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    special = body.add_special_tokens is not False
    options = PromptOptions("prompt", special, body.truncate_prompt_tokens, max_tokens)
    prompts = builder.prompts(body.prompt, options, infill)
    echoed = body.logprobs if body.echo else None
    asked = [count for count in (echoed, body.prompt_logprobs) if count is not None]
    wanted = common_parameters(
        body,
        adapter=adapter,
        grammar=grammar,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        end_ids=() if infill is None else infill.tokens.end_ids,
        num_choices=generated,
        num_shown=shown,
        num_logprobs=0 if body.logprobs is None and generated > shown else body.logprobs,
        num_prompt_logprobs=max(asked, default=None),
    )
    return builder.plan(prompts, wanted, prefix="cmpl-")


@dataclass
class CompletionAnswer(OpenAIAnswer):
    """The response to a completion."""

    object = chunk_object = "text_completion"
    body: CompletionBody
    _echoes: dict[int, Echo] = field(default_factory=dict)  # by index of streamed choice

    def choice(self, written: CompletedChoice, prompt: CompletedChoice) -> dict[str, Any]:
        choice = written.progress.choice
        echo = choice.prompt.text if self.body.echo else ""
        text, tokens = (written.text, written.tokens) if self.plan.answered else ("", [])
        logprobs = None
        if self.body.logprobs is not None:
            lists = CompletionLogprobs(self.tokenizer)
            if self.body.echo:
                Echo(self.tokenizer, choice.prompt, self.body.logprobs).add(prompt.prompt_logprobs, lists)
            # With `echo` texts are scored, by clients that leave out the last entry: it must be of a generated token.
            lists.add(tokens, len(echo), keeps_end=bool(self.body.echo))
            logprobs = lists.lists
        return {"text": echo + text, "logprobs": logprobs}

    def piece(self, progress: ChoiceState, delta: TextDelta, *, first: bool) -> dict[str, Any]:
        prompt = progress.choice.prompt
        text, tokens = (delta.text, delta.tokens) if self.plan.answered else ("", ())
        if self.body.logprobs is None:
            return {"text": prompt.text + text if first and self.body.echo else text, "logprobs": None}
        lists = CompletionLogprobs(self.tokenizer)
        if not self.body.echo:
            lists.add(tokens, 0)
            return {"text": text, "logprobs": lists.lists}
        if first:
            self._echoes[progress.choice.index] = Echo(self.tokenizer, prompt, self.body.logprobs)
        echoed = self._echoes[progress.choice.index].add(delta.prompt_logprobs, lists)
        lists.add(tokens, len(prompt.text), keeps_end=True)
        return {"text": echoed + text, "logprobs": lists.lists}

    def says(self, piece: dict[str, Any]) -> bool:
        return bool(piece["text"])


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    answers = describe_responses(Completion, errors=OpenAIError, event=CompletionEvent, done=True, statuses=STATUSES)

    @router.post("/v1/completions", openapi_extra=json_body(CompletionBody, COMPLETION_NEUTRAL), responses=answers)
    async def completions(request: Request) -> Response:
        """Continue a text."""
        body, size = await service.read(request, CompletionBody, COMPLETION_NEUTRAL)
        wanted = await service.text_work(request, size, body.wanted_grammar)
        grammar = await service.checked(wanted, body.grammar_field)
        made = await service.text_work(request, size, plan, service.builder(key_of(request)), body, grammar)
        reply = CompletionAnswer(service.text.tokenizer, body, made, service.name_of(made, body.model))
        return await service.respond(request, reply, stream=bool(body.stream))

    return router
