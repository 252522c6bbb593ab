"""`POST /tokenize`, `POST /chat_tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from space_router.api.openai.chat import conversation_text
from space_router.api.openai.fields import CHAT_NEUTRAL, ChatBody, TokenId
from space_router.api.request_builder import PromptOptions, RequestBuilder, refuse_surrogates
from space_router.api.schema import (
    Count,
    OpenAIError,
    ResponseModel,
    TgiError,
    describe_responses,
    json_body,
    schema_ref,
)
from space_router.api.service import Service
from space_router.api.tgi.generate import GENERATE_NEUTRAL, GenerateParameters, Settings
from space_router.errors import InvalidRequest
from space_router.http_server.body import Body, validate
from space_router.http_server.responses import in_thread_if_long, json_response, key_of

STATUSES = (413, 415, 422, 503)


class TokenizeBody(Body):
    """`inputs` is answered as TGI does, `prompt` as OpenAI-like servers do."""

    inputs: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    parameters: Settings | None = None  # as for `/generate`; only `truncate` has an effect


class DetokenizeBody(Body):
    """Ids to text."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=2**20)]
    skip_special_tokens: bool | None = None


class PlacedToken(ResponseModel):
    """A token and the characters of the text that it stands for."""

    id: Count
    text: str
    start: Count
    stop: Count


class TokenIds(ResponseModel):
    """The ids of a text."""

    tokens: list[Count]
    count: Count
    max_model_len: Count


class ConversationTokens(ResponseModel):
    """A conversation as the prompt it becomes."""

    tokenize_response: list[PlacedToken]
    templated_text: str


class TokenizerInfo(ResponseModel):
    """What a client needs to know of the tokenizer."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class Detokenized(ResponseModel):
    """The text of ids."""

    prompt: str


def _spans(builder: RequestBuilder, text: str, options: PromptOptions) -> list[dict[str, Any]]:
    """Return the tokens of a text in TGI's format."""
    with refuse_surrogates(options.param):
        spans = builder.text.tokenizer.encode_spans(text, add_special_tokens=options.add_special_tokens)
    kept = spans if options.truncate is None else spans[-options.truncate :]
    return [{"id": id_, "text": text[start:end], "start": start, "stop": end} for id_, start, end in kept]


def _conversation(builder: RequestBuilder, body: ChatBody) -> dict[str, Any]:
    """Return a conversation as rendered by the chat template, and its tokens."""
    text = conversation_text(builder, body)
    special = bool(body.add_special_tokens)  # the template already writes special tokens
    spans = _spans(builder, text, PromptOptions("messages", special, body.truncate_prompt_tokens))
    return {"tokenize_response": spans, "templated_text": text}


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    placed = {"type": "array", "items": schema_ref(PlacedToken)}
    either = describe_responses({"anyOf": [placed, schema_ref(TokenIds)]}, errors=TgiError, statuses=STATUSES)
    conversation = describe_responses(ConversationTokens, errors=TgiError, statuses=STATUSES)
    detokenized = describe_responses(Detokenized, errors=OpenAIError, statuses=(400, 413, 415, 503))

    @router.post("/tokenize", openapi_extra=json_body(TokenizeBody), responses=either)
    async def tokenize(request: Request) -> Response:
        """`inputs`: a list of {id, text, start, stop}; `prompt`: {tokens, count, max_model_len}."""
        body, size = await service.read(request, TokenizeBody)
        parameters = validate(GenerateParameters, body.parameters or {}, GENERATE_NEUTRAL)
        builder = service.builder(key_of(request))
        special = body.add_special_tokens is not False
        if (body.inputs is None) == (body.prompt is None):
            raise InvalidRequest("Give one of `inputs` and `prompt`.", param="inputs")
        if body.inputs is not None:
            options = PromptOptions("inputs", special, parameters.truncate)
            return json_response(await in_thread_if_long(size, _spans, builder, body.inputs, options))
        if body.parameters:
            raise InvalidRequest("`parameters` go with `inputs`, not with `prompt`.", param="parameters")
        encode = service.text.tokenizer.encode
        with refuse_surrogates("prompt"):
            ids = await in_thread_if_long(size, encode, body.prompt or "", add_special_tokens=special)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": builder.facts.window})

    @router.post("/chat_tokenize", openapi_extra=json_body(ChatBody, CHAT_NEUTRAL), responses=conversation)
    async def chat_tokenize(request: Request) -> Response:
        """A chat request as the prompt it becomes: {tokenize_response: [{id, text, start, stop}], templated_text}."""
        body, size = await service.read(request, ChatBody, CHAT_NEUTRAL)
        return json_response(await in_thread_if_long(size, _conversation, service.builder(key_of(request)), body))

    @router.post("/detokenize", openapi_extra=json_body(DetokenizeBody), responses=detokenized)
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        body, size = await service.read(request, DetokenizeBody)
        ids = service.builder().check_ids(body.tokens, "tokens")
        decode = service.text.tokenizer.decode
        text = await in_thread_if_long(size, decode, ids, skip_special_tokens=bool(body.skip_special_tokens))
        return json_response({"prompt": text})

    @router.get("/tokenizer_info", responses=describe_responses(TokenizerInfo, errors=OpenAIError))
    async def tokenizer_info() -> Response:
        """What clients ask that leave tokenising to the server, such as lm-eval."""
        named, template = service.text.tokenizer.named_tokens, service.text.chat_template
        special = {name: named.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return json_response({**special, "chat_template": None if template is None else template.source})

    return router
