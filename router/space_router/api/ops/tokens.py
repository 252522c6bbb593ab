"""`POST /tokenize`, `POST /chat_tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from space_router.api.openai.answers import OpenAIError
from space_router.api.openai.chat import conversation_text
from space_router.api.openai.chat_fields import CHAT_NEUTRAL, ChatBody
from space_router.api.openai.fields import TokenId
from space_router.api.request_builder import RequestBuilder, whole_characters
from space_router.api.schema import answers, json_body, referred
from space_router.api.service import Service
from space_router.api.tgi.answers import ConversationTokens, Detokenized, PlacedToken, TgiError, TokenIds, TokenizerInfo
from space_router.api.tgi.generate_fields import GENERATE_NEUTRAL, GenerateParameters, Settings
from space_router.errors import InvalidRequest
from space_router.http_server.answers import answer
from space_router.http_server.body import Body, read_object, validate
from space_router.http_server.connection import beside
from space_router.http_server.paths import key_of

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


def _spans(
    builder: RequestBuilder, text: str, param: str, *, add_special_tokens: bool, truncate: int | None
) -> list[dict[str, Any]]:
    """Return the tokens of a text in TGI's format; only the last `truncate` if it is set."""
    with whole_characters(param):
        spans = builder.text.tokenizer.encode_spans(text, add_special_tokens=add_special_tokens)
    kept = spans if truncate is None else spans[-truncate:]
    return [{"id": id_, "text": text[start:end], "start": start, "stop": end} for id_, start, end in kept]


def _conversation(builder: RequestBuilder, body: ChatBody) -> dict[str, Any]:
    """Return a conversation as rendered by the chat template, and its tokens."""
    text = conversation_text(builder, body)
    special = bool(body.add_special_tokens)  # the template already writes special tokens
    spans = _spans(builder, text, "messages", add_special_tokens=special, truncate=body.truncate_prompt_tokens)
    return {"tokenize_response": spans, "templated_text": text}


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    placed = {"type": "array", "items": referred(PlacedToken)}
    either = {"anyOf": [placed, referred(TokenIds)]}

    @router.post(
        "/tokenize",
        openapi_extra=json_body(TokenizeBody),
        responses=answers(either, errors=TgiError, statuses=STATUSES),
    )
    async def tokenize(request: Request) -> Response:
        """`inputs`: a list of {id, text, start, stop}; `prompt`: {tokens, count, max_model_len}."""
        received = await read_object(request, service.config)
        body = validate(TokenizeBody, received.values, {})
        parameters = validate(GenerateParameters, body.parameters or {}, GENERATE_NEUTRAL)
        builder = service.builder(key_of(request))
        special = body.add_special_tokens is not False
        if (body.inputs is None) == (body.prompt is None):
            raise InvalidRequest("Give one of `inputs` and `prompt`.", param="inputs")
        if body.inputs is not None:
            return answer(
                await beside(
                    received.size,
                    _spans,
                    builder,
                    body.inputs,
                    "inputs",
                    add_special_tokens=special,
                    truncate=parameters.truncate,
                )
            )
        if body.parameters:
            raise InvalidRequest("`parameters` go with `inputs`, not with `prompt`.", param="parameters")
        encode = service.text.tokenizer.encode
        with whole_characters("prompt"):
            ids = await beside(received.size, encode, body.prompt or "", add_special_tokens=special)
        return answer({"tokens": ids, "count": len(ids), "max_model_len": builder.facts.window})

    @router.post(
        "/chat_tokenize",
        openapi_extra=json_body(ChatBody, CHAT_NEUTRAL),
        responses=answers(ConversationTokens, errors=TgiError, statuses=STATUSES),
    )
    async def chat_tokenize(request: Request) -> Response:
        """A chat request as the prompt it becomes: {tokenize_response: [{id, text, start, stop}], templated_text}."""
        received = await read_object(request, service.config)
        body = validate(ChatBody, received.values, CHAT_NEUTRAL)
        return answer(await beside(received.size, _conversation, service.builder(key_of(request)), body))

    @router.post(
        "/detokenize",
        openapi_extra=json_body(DetokenizeBody),
        responses=answers(Detokenized, errors=OpenAIError, statuses=(400, 413, 415, 503)),
    )
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        received = await read_object(request, service.config)
        body = validate(DetokenizeBody, received.values, {})
        ids = service.builder().check_ids(body.tokens, "tokens")
        decode = service.text.tokenizer.decode
        text = await beside(received.size, decode, ids, skip_special_tokens=bool(body.skip_special_tokens))
        return answer({"prompt": text})

    @router.get("/tokenizer_info", responses=answers(TokenizerInfo, errors=OpenAIError))
    async def tokenizer_info() -> Response:
        """What clients ask that leave tokenising to the server, such as lm-eval."""
        tokenizer, template = service.text.tokenizer, service.text.chat_template
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: getattr(tokenizer, name) for name in names}
        return answer({**special, "chat_template": None if template is None else template.source})

    return router
