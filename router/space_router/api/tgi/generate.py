"""TGI's routes: `/generate`, `/generate_stream`, `/`, which acts as one of the two, and SageMaker's `/invocations`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from starlette.responses import Response

from space_router.api import schema
from space_router.api.generation import ChoiceState, CompletedChoice, Generation, most_probable
from space_router.api.grammar_fields import TgiGrammar, tgi_grammar
from space_router.api.openai.stream import finite
from space_router.api.request_builder import GenerationPlan, Parameters, PromptOptions, RequestBuilder
from space_router.api.schema import TGI_STATUSES, Count, ResponseModel, TgiError, describe_responses, json_body
from space_router.api.service import Service
from space_router.engine.request.request import Grammar, TokenLogprobs
from space_router.errors import InvalidRequest
from space_router.http_server.body import Body, read_object, validate
from space_router.http_server.responses import as_api_error, event_json, key_of, tgi_error
from space_router.text.text_stream import FinishReason, TextToken
from space_router.text.tokenizer import Tokenizer

# Known fields that this server does not support, with the values that mean "off".
GENERATE_NEUTRAL: dict[str, tuple[Any, ...]] = {"watermark": (False,)}


class GenerateParameters(Body):
    """`parameters`, as TGI names them; `speculation` is ours."""

    best_of: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    do_sample: bool | None = None
    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    return_full_text: bool | None = None
    stop: Any = Field(default=None, description="a list of strings")
    truncate: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=20)] | None = None
    speculation: Literal["auto", "off"] | Annotated[int, Field(ge=0)] | None = None
    adapter_id: Annotated[str, Field(max_length=512)] | None = None
    grammar: TgiGrammar | None = None

    @property
    def detailed(self) -> bool:
        """Whether to return details. Asking for any part of them by name returns all, as in TGI."""
        return bool(self.details or self.decoder_input_details or self.top_n_tokens)


class _Described:
    """The OpenAPI schema of a field that is validated by hand."""

    def __get_pydantic_json_schema__(self, _: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = handler(GenerateParameters.__pydantic_core_schema__)
        handler.resolve_ref_schema(described)["properties"] |= schema.neutral_fields(GENERATE_NEUTRAL)
        return described


Settings = Annotated[dict[str, Any], _Described()]
"""Unvalidated `parameters`; validated later as GenerateParameters, so that errors name a field without its path."""


class GenerateBody(Body):
    """`POST /generate` and `POST /generate_stream`."""

    inputs: Annotated[str, Field(min_length=1)]
    parameters: Settings | None = None


class CompatBody(GenerateBody):
    """`POST /`."""

    stream: bool | None = None


FinishName = Literal["length", "eos_token", "stop_sequence"]


class PrefillToken(ResponseModel):
    """A token of the prompt; the first has no log-probability."""

    id: Count
    text: str
    logprob: float | None


class GeneratedToken(ResponseModel):
    """A token with its part of the text."""

    id: Count
    text: str
    logprob: float
    special: bool


class Sequence(ResponseModel):
    """How one generated text came about."""

    finish_reason: FinishName
    generated_tokens: Count
    seed: Count | None
    prefill: list[PrefillToken]
    tokens: list[GeneratedToken]
    top_tokens: list[list[GeneratedToken]] | None = None


class BestOfSequence(Sequence):
    """One of the texts that were not the best."""

    generated_text: str


class Details(Sequence):
    """How the answer came about."""

    best_of_sequences: list[BestOfSequence] | None = None


class Generated(ResponseModel):
    """The answer of `/generate`."""

    generated_text: str
    details: Details | None = None


class StreamDetails(ResponseModel):
    """How the stream ended."""

    finish_reason: FinishName
    generated_tokens: Count
    seed: Count | None
    input_length: Count


class GeneratedEvent(ResponseModel):
    """One token of a stream; the last one carries the whole text."""

    index: Annotated[int, Field(ge=1)]
    token: GeneratedToken
    top_tokens: list[GeneratedToken] | None = None
    generated_text: str | None
    details: StreamDetails | None


_FINISH = {FinishReason.EOS: "eos_token", FinishReason.STOP: "stop_sequence", FinishReason.LENGTH: "length"}


BodyT = TypeVar("BodyT", bound=GenerateBody)


@dataclass(frozen=True)
class TgiGeneration:
    """A validated TGI request."""

    plan: GenerationPlan
    options: GenerateParameters
    tokenizer: Tokenizer
    sampled: bool  # False: greedy decoding, and the seed is not returned
    full_text: bool  # the returned text includes the prompt
    in_list: bool  # the whole response is a list of one

    @classmethod
    def read(
        cls,
        builder: RequestBuilder,
        body: GenerateBody,
        options: GenerateParameters,
        grammar: Grammar | None,
        *,
        stream: bool,
    ) -> "TgiGeneration":
        """Build from a body. `options`: its parameters; `grammar`: their grammar, already checked."""
        chosen = (options.temperature, options.top_k, options.top_p, options.typical_p)
        sampled = bool(options.do_sample) or any(value is not None for value in chosen)
        best_of = options.best_of or 1
        if best_of > 1 and (stream or not sampled):
            how = "cannot be streamed" if stream else "needs sampling (`do_sample`)"
            raise InvalidRequest(f"`best_of` is {best_of}, which {how}.", param="best_of")
        if stream and options.decoder_input_details:
            raise InvalidRequest("`decoder_input_details` cannot be streamed.", param="decoder_input_details")
        wanted_prompt = PromptOptions("inputs", add_special_tokens=True, truncate=options.truncate)
        prompt = builder.prompt(body.inputs, wanted_prompt)
        detailed = stream or options.detailed or best_of > 1
        wanted = Parameters(
            max_tokens=options.max_new_tokens,
            limit_param="max_new_tokens",
            default_max_tokens=100,  # TGI's default
            stop=options.stop,
            temperature=(1.0 if options.temperature is None else options.temperature) if sampled else 0.0,
            top_p=1.0 if options.top_p is None else options.top_p,
            top_k=options.top_k or 0,
            typical_p=1.0 if options.typical_p is None else options.typical_p,
            min_p=0.0,
            repetition_penalty=1.0 if options.repetition_penalty is None else options.repetition_penalty,
            frequency_penalty=options.frequency_penalty,
            num_choices=best_of,
            seed=options.seed,
            num_logprobs=(options.top_n_tokens or 0) if detailed else None,
            num_prompt_logprobs=0 if options.decoder_input_details else None,
            grammar=grammar,
            speculation=options.speculation,
            adapter=builder.adapter(options.adapter_id, "adapter_id"),
        )
        plan = builder.plan([prompt], wanted, prefix="gen-")
        # By default TGI's `/` includes the prompt in the text, `/generate` does not.
        is_compat = isinstance(body, CompatBody)
        full_text = is_compat if options.return_full_text is None else options.return_full_text
        return cls(plan, options, builder.text.tokenizer, sampled, full_text, is_compat)

    def _shown(self, text: str) -> str:
        return self.plan.prompts[0].text + text if self.full_text else text

    async def whole(self, running: Generation) -> dict[str, Any] | list[dict[str, Any]]:
        written = await running.whole()
        ranked = most_probable(written)
        best = ranked[0]
        body: dict[str, Any] = {"generated_text": self._shown(best.text)}
        if self.options.detailed:
            body["details"] = self._details(best, written[0])
            if len(ranked) > 1:
                body["details"]["best_of_sequences"] = [
                    {"generated_text": self._shown(one.text), **self._details(one, written[0])} for one in ranked[1:]
                ]
        return [body] if self.in_list else body

    def _details(self, written: CompletedChoice, first: CompletedChoice) -> dict[str, Any]:
        prefill: list[dict[str, Any]] = []
        if self.options.decoder_input_details:
            ids = self.plan.prompts[0].ids
            known: list[TokenLogprobs | None] = [None] * (len(ids) - len(first.prompt_logprobs))
            for id_, logprobs in zip(ids, [*known, *first.prompt_logprobs], strict=True):
                value = None if logprobs is None else finite(logprobs.logprob)
                prefill.append({"id": id_, "text": self.tokenizer.token_text(id_), "logprob": value})
        texts = _token_texts(written.text, written.tokens, 0)
        tokens = [self._token(token, text) for token, text in zip(written.tokens, texts, strict=True)]
        details: dict[str, Any] = {**self._end(written.progress), "prefill": prefill, "tokens": tokens}
        if self.options.top_n_tokens:
            details["top_tokens"] = [self._top(token) for token in written.tokens]
        return details

    def _end(self, progress: ChoiceState) -> dict[str, Any]:
        return {
            "finish_reason": None if progress.finish is None else _FINISH[progress.finish],
            "generated_tokens": progress.statistics.num_tokens,
            "seed": self.plan.seed if self.sampled else None,
        }

    async def events(self, running: Generation) -> AsyncGenerator[bytes]:
        """Yield one event per token; the events of one step form one chunk. An error is the last event."""
        try:
            async with aclosing(self._events(running)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Exception as error:
            yield b"data:" + event_json(tgi_error(as_api_error(error))) + b"\n\n"

    async def _events(self, running: Generation) -> AsyncGenerator[bytes]:
        # With stop strings each token is held until the next one, so that the last kept token can carry the finish.
        hold = bool(self.plan.choices[0].rules.stops)
        waiting: list[tuple[TextToken, str]] = []
        index = 0
        given = ""
        async for step in running.steps():
            chunk = bytearray()
            for progress, delta in step:
                tokens = [token for token, _ in waiting] + list(delta.tokens)
                texts = _token_texts(delta.text, tokens, len(given))
                given += delta.text
                pairs = list(zip(tokens, texts, strict=True))
                if waiting:
                    pairs[0] = (pairs[0][0], waiting[0][1] + pairs[0][1])
                ended = delta.finish is not None
                waiting = pairs[-1:] if hold and not ended else []
                for token, text in pairs[: len(pairs) - len(waiting)]:
                    index += 1
                    end = given if ended and token is tokens[-1] else None
                    chunk += self._event(index, progress, self._token(token, text), self._top(token), end)
                if ended and not pairs:  # a stop string removed every token; clients require one
                    id_ = next(iter(progress.choice.request.eos_ids), 0)
                    placeholder = {"id": id_, "text": "", "logprob": 0.0, "special": True}
                    chunk += self._event(index + 1, progress, placeholder, [], given)
            if chunk:
                yield bytes(chunk)

    def _event(
        self, index: int, progress: ChoiceState, token: dict[str, Any], top: list[dict[str, Any]], text: str | None
    ) -> bytes:
        event: dict[str, Any] = {"index": index, "token": token, "generated_text": None, "details": None}
        if top:
            event["top_tokens"] = top
        if text is not None:
            event["generated_text"] = self._shown(text)
            event["details"] = {**self._end(progress), "input_length": len(self.plan.prompts[0].ids)}
        return b"data:" + event_json(event) + b"\n\n"

    def _token(self, token: TextToken, text: str) -> dict[str, Any]:
        return self._entry(token.span.id, text, None if token.logprobs is None else token.logprobs.logprob)

    def _top(self, token: TextToken) -> list[dict[str, Any]]:
        top = token.logprobs.top if token.logprobs is not None else ()
        return [self._entry(id_, self.tokenizer.token_text(id_), value) for id_, value in top]

    def _entry(self, id_: int, text: str, logprob: float | None) -> dict[str, Any]:
        value = None if logprob is None else finite(logprob)
        return {"id": id_, "text": text, "logprob": value, "special": id_ in self.tokenizer.special_ids}


def _token_texts(text: str, tokens: list[TextToken], offset: int) -> list[str]:
    """Return the text of each token; joined they give `text`, which begins at character `offset` of the stream.

    A character belongs to the last of its tokens; text of a token that was returned earlier goes with the next token.
    """
    texts: list[str] = []
    begin = 0
    for place in range(1, len(tokens) + 1):
        end = len(text) if place == len(tokens) else min(len(text), max(begin, tokens[place].span.start - offset))
        texts.append(text[begin:end])
        begin = end
    return texts


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["TGI"])

    async def respond(request: Request, model: type[BodyT], *, stream: bool) -> Response:
        body, size = await service.read(request, model)
        options = validate(GenerateParameters, body.parameters or {}, GENERATE_NEUTRAL)
        given = options.grammar
        wanted = None if given is None else await service.text_work(request, size, tgi_grammar, given)
        grammar = await service.checked(wanted, "grammar")
        builder = service.builder(key_of(request))
        stream = stream or (isinstance(body, CompatBody) and bool(body.stream))
        reply = await service.text_work(
            request, size, TgiGeneration.read, builder, body, options, grammar, stream=stream
        )
        return await service.respond(request, reply, stream=stream)

    whole_answers = describe_responses(Generated, errors=TgiError, statuses=TGI_STATUSES)
    stream_answers = describe_responses(event=GeneratedEvent, errors=TgiError, statuses=TGI_STATUSES)
    listed = {"type": "array", "items": schema.schema_ref(Generated)}
    compat_answers = describe_responses(listed, event=GeneratedEvent, errors=TgiError, statuses=TGI_STATUSES)

    @router.post("/generate", openapi_extra=json_body(GenerateBody), responses=whole_answers)
    async def generate(request: Request) -> Response:
        """Continue a text."""
        return await respond(request, GenerateBody, stream=False)

    @router.post("/generate_stream", openapi_extra=json_body(GenerateBody), responses=stream_answers)
    async def generate_stream(request: Request) -> Response:
        """Continue a text, one event per token."""
        return await respond(request, GenerateBody, stream=True)

    @router.post("/", openapi_extra=json_body(CompatBody), responses=compat_answers)
    async def compat(request: Request) -> Response:
        """`/generate_stream` with `stream: true`, else `/generate` in a list; by default the prompt is in the text."""
        return await respond(request, CompatBody, stream=False)

    return router


ROUTE_OF = {"inputs": "/", "messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""The field that identifies each kind of body, and the route that handles it, as in TGI."""

JSON, EVENTS = "application/json", "text/event-stream"


def invocation_routes(service: Service, routers: list[APIRouter]) -> APIRouter:
    """Return the route. `routers`: the API's other routers, which contain the routes in ROUTE_OF."""
    router = APIRouter(tags=["TGI"])
    found = (route for one in routers for route in one.routes if isinstance(route, APIRoute))
    posts = {route.path: route for route in found if "POST" in (route.methods or ())}
    route_of = {field: posts[path] for field, path in ROUTE_OF.items()}

    @router.post("/invocations", **_described(list(route_of.values())))
    async def invocations(request: Request) -> Response:
        """`inputs` as `POST /`, `messages` as `/v1/chat/completions`, `prompt` as `/v1/completions`."""
        received = await read_object(request, service.config)
        given = [field for field in ROUTE_OF if received.values.get(field) is not None]
        if len(given) != 1:
            has = " and ".join(f"`{field}`" for field in given) or "none of them"
            raise InvalidRequest(f"Give one of `inputs`, `messages` and `prompt`; the body has {has}.", param="inputs")
        answered: Response = await route_of[given[0]].endpoint(request)
        return answered

    return router


def _described(routes: list[APIRoute]) -> dict[str, Any]:
    """Return OpenAPI arguments for a route that accepts and returns what any of `routes` does."""
    bodies = [(route.openapi_extra or {})["requestBody"]["content"][JSON]["schema"] for route in routes]
    contents = [route.responses.get(200, {}).get("content", {}) for route in routes]
    wholes = [content[JSON]["schema"] for content in contents if JSON in content]
    events = [content[EVENTS]["schema"] for content in contents if EVENTS in content]
    described = describe_responses({"anyOf": wholes}, errors=TgiError, statuses=TGI_STATUSES)
    described[200]["content"][EVENTS] = {"schema": {"anyOf": events}}
    body = {"required": True, "content": {JSON: {"schema": {"anyOf": bodies}}}}
    return {"openapi_extra": {"requestBody": body}, "responses": described}
