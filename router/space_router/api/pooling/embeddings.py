"""`POST /v1/embeddings` in OpenAI's form, and `POST /embed` in TGI's."""

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from space_router.api.openai.fields import PromptValue
from space_router.api.pooling.sources import (
    MAX_TEXTS,
    InputOptions,
    PoolingSource,
    Vector,
    choose_source,
    counted,
    normalised,
    now,
    request_id,
    usage,
)
from space_router.api.schema import STATUSES, Count, OpenAIError, ResponseModel, describe_responses, json_body
from space_router.api.service import Service
from space_router.errors import InvalidRequest
from space_router.http_server.body import Body, short_repr
from space_router.http_server.responses import json_response, key_of, while_connected

Truncation = Annotated[
    int, Field(ge=-1, lt=2**31, description="tokens that are kept of each text; -1: as many as the model takes")
]


class EmbeddingBody(Body):
    """Texts that become vectors."""

    model: Annotated[str, Field(max_length=512)] | None = None
    input: PromptValue
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, description="leading values that are kept, normalised anew")] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    normalize: Annotated[bool, Field(description="false: as the model makes them")] | None = None
    prompt_name: (
        Annotated[str, Field(max_length=128, description="of an encoder's config_sentence_transformers.json")] | None
    ) = None
    pooling: (
        Annotated[Literal["last", "mean"], Field(description="of the served model's hidden states; default: last")]
        | None
    ) = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None


class EmbedBody(Body):
    """Texts that become vectors, in the form of text-embeddings-inference."""

    inputs: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1}]})]
    model: Annotated[str, Field(max_length=512)] | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None
    prompt_name: Annotated[str, Field(max_length=128)] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class EmbeddingUsage(ResponseModel):
    """Tokens of all texts."""

    prompt_tokens: Count
    total_tokens: Count


class EmbeddingObject(ResponseModel):
    """The vector of one text: numbers, or base64 of float32 in little-endian order."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingList(ResponseModel):
    """The vectors of all texts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: EmbeddingUsage


def texts_of(value: Any, param: str) -> list[Any]:
    """Return a list of texts and lists of ids: of a text, several, ids or several lists of them. Raises
    InvalidRequest."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(one) is int for one in value)):
        texts = [value]
    elif (
        isinstance(value, list)
        and value
        and all(
            isinstance(one, str) or (isinstance(one, list) and one and all(type(id_) is int for id_ in one))
            for one in value
        )
    ):
        texts = value
    else:
        raise InvalidRequest(
            f"`{param}` must be a string, a list of strings, token ids or a list of lists of token ids, and not "
            f"empty; got {short_repr(value)}.",
            param=param,
        )
    if len(texts) > MAX_TEXTS:
        raise InvalidRequest(f"`{param}` has {len(texts)} texts; at most {MAX_TEXTS} in one request.", param=param)
    if any(text == "" for text in texts):
        raise InvalidRequest(f"`{param}` has an empty text.", param=param)
    return texts


def shown(vectors: Sequence[Vector], *, dimensions: int | None, normalise: bool) -> list[Vector]:
    """Return vectors as they are answered. Raises InvalidRequest for more dimensions than there are."""
    size = len(vectors[0])
    if dimensions is not None and dimensions > size:
        raise InvalidRequest(
            f"`dimensions` is {dimensions}; vectors of this model have {size}. Ask for at most as many.",
            param="dimensions",
        )
    kept = vectors if dimensions is None else [vector[:dimensions] for vector in vectors]
    return [normalised(vector) for vector in kept] if normalise else [list(vector) for vector in kept]


def in_base64(vector: Vector) -> str:
    """Return base64 of the vector as float32 in little-endian order."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


def asked_for(service: Service, key: str, body: EmbeddingBody) -> tuple[PoolingSource, list[Any], InputOptions]:
    """Return what makes the vectors, the texts, and how they are tokenised. Raises ApiError."""
    source = choose_source(service, key, body.model, pooling=body.pooling, priority=body.priority)
    check_makes_vectors(source)
    special = body.add_special_tokens is not False
    return (
        source,
        texts_of(body.input, "input"),
        InputOptions("input", special, body.truncate_prompt_tokens, body.prompt_name),
    )


def check_makes_vectors(source: PoolingSource) -> None:
    """Raise InvalidRequest for a cross-encoder."""
    if source.scores_pairs:
        raise InvalidRequest(
            f"`{source.name}` is a cross-encoder: it scores pairs of texts and makes no embeddings. Ask /v1/rerank or "
            "/v1/score.",
            param="model",
            code="unsupported_model",
        )


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["embeddings"])
    answers = describe_responses(EmbeddingList, errors=OpenAIError, statuses=STATUSES)

    async def vectors_of(
        request: Request, size: int, source: PoolingSource, texts: list[Any], options: InputOptions, name: str
    ) -> tuple[list[Vector], int]:
        check_makes_vectors(source)
        made = await service.text_work(request, size, source.tokenise, texts, options)
        num_tokens = source.num_tokens(made)
        async with counted(service, key_of(request), num_tokens):
            return await while_connected(request.receive, source.run(name, made)), num_tokens

    @router.post("/v1/embeddings", openapi_extra=json_body(EmbeddingBody), responses=answers)
    async def embeddings(request: Request) -> Response:
        """Vectors of texts, of length 1."""
        body, size = await service.read(request, EmbeddingBody)
        source, texts, options = asked_for(service, key_of(request), body)
        name = request_id("embd", body.request_id)
        vectors, num_tokens = await vectors_of(request, size, source, texts, options, name)
        made = shown(vectors, dimensions=body.dimensions, normalise=body.normalize is not False)
        written = [in_base64(one) for one in made] if body.encoding_format == "base64" else made
        answer = {
            "id": name,
            "object": "list",
            "created": now(),
            "model": source.name,
            "data": [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(written)],
            "usage": usage(num_tokens),
        }
        return json_response(answer, headers={"x-request-id": name})

    schema = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    lists = describe_responses(schema, errors=OpenAIError, statuses=STATUSES)

    @router.post("/embed", openapi_extra=json_body(EmbedBody), responses=lists)
    async def embed(request: Request) -> Response:
        """Vectors of texts, as text-embeddings-inference answers them."""
        body, size = await service.read(request, EmbedBody)
        if str(body.truncation_direction).lower() == "left":
            raise InvalidRequest(
                "`truncation_direction` is left; texts are cut at their end.", param="truncation_direction"
            )
        source = choose_source(service, key_of(request), body.model)
        options = InputOptions("inputs", True, -1 if body.truncate else None, body.prompt_name)
        name = request_id("embd", None)
        vectors, _ = await vectors_of(request, size, source, texts_of(body.inputs, "inputs"), options, name)
        made = shown(vectors, dimensions=body.dimensions, normalise=body.normalize is not False)
        return json_response(made, headers={"x-request-id": name})

    return router
