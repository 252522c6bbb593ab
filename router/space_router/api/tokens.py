"""`POST /tokenize` and `POST /detokenize`."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from space_router.api.answers import answer
from space_router.api.body import Body, read_object, validate
from space_router.api.connection import beside
from space_router.api.fields import TokenId
from space_router.api.schema import json_body
from space_router.api.service import Service
from space_router.errors import InvalidRequest

_NEUTRAL: dict[str, tuple[Any, ...]] = {"parameters": ({},)}


class TokenizeBody(Body):
    """`inputs` is answered as TGI does, `prompt` as OpenAI-like servers do."""

    inputs: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """Ids to text."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=2**20)]
    skip_special_tokens: bool | None = None


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", openapi_extra=json_body(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """`inputs`: a list of {id, text, start, stop}; `prompt`: {tokens, count, max_model_len}."""
        received = await read_object(request, service.config.max_body)
        body = validate(TokenizeBody, received.values, _NEUTRAL)
        facts = service.door().facts
        special = body.add_special_tokens is not False
        if (body.inputs is None) == (body.prompt is None):
            raise InvalidRequest("Give one of `inputs` and `prompt`.", param="inputs")
        if body.inputs is None:
            encode = service.text.tokenizer.encode
            ids = await beside(received.size, encode, body.prompt or "", add_special_tokens=special)
            return answer({"tokens": ids, "count": len(ids), "max_model_len": facts.window})
        encode_spans = service.text.tokenizer.encode_spans
        spans = await beside(received.size, encode_spans, body.inputs, add_special_tokens=special)
        return answer(
            [{"id": id_, "text": body.inputs[start:end], "start": start, "stop": end} for id_, start, end in spans]
        )

    @router.post("/detokenize", openapi_extra=json_body(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        received = await read_object(request, service.config.max_body)
        body = validate(DetokenizeBody, received.values, {})
        ids = service.door().check_ids(body.tokens, "tokens")
        decode = service.text.tokenizer.decode
        text = await beside(received.size, decode, ids, skip_special_tokens=bool(body.skip_special_tokens))
        return answer({"prompt": text})

    return router
