"""`POST /v1/rerank` and `POST /v1/score`, and their older paths; `/rerank` also in text-embeddings-inference's form."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from space_router.api.pooling.embeddings import EmbeddingUsage, Truncation
from space_router.api.pooling.sources import (
    MAX_TEXTS,
    InputOptions,
    PoolingSource,
    choose_source,
    cosine,
    counted,
    normalised,
    now,
    request_id,
    usage,
)
from space_router.api.schema import (
    STATUSES,
    Count,
    OpenAIError,
    ResponseModel,
    describe_responses,
    json_body,
    schema_ref,
)
from space_router.api.service import Service
from space_router.errors import InvalidRequest
from space_router.http_server.body import Body, short_repr
from space_router.http_server.responses import json_response, key_of, while_connected

_TEXT = {"type": "string", "minLength": 1}
_DOCUMENT = {"anyOf": [_TEXT, {"type": "object", "required": ["text"], "properties": {"text": _TEXT}}]}
Documents = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _DOCUMENT, "minItems": 1}, {"type": "null"}]})
]
OneOrMore = Annotated[
    Any, WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, {"type": "null"}]})
]


class RerankBody(Body):
    """A query and texts, in the form of Cohere, Jina and vLLM (`documents`) or of text-embeddings-inference
    (`texts`)."""

    model: Annotated[str, Field(max_length=512)] | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Documents = None
    top_n: Annotated[int, Field(ge=0, lt=2**31, description="results that are returned; 0: all")] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=2**31, description="as `truncate_prompt_tokens`")] | None = None
    truncate_prompt_tokens: Truncation | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    texts: Documents = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None


class ScoreBody(Body):
    """One text or several, against one or several, in vLLM's form."""

    model: Annotated[str, Field(max_length=512)] | None = None
    text_1: OneOrMore = None
    text_2: OneOrMore = None
    queries: OneOrMore = None
    documents: OneOrMore = None
    truncate_prompt_tokens: Truncation | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None


class RankedDocument(ResponseModel):
    """A text that was ranked."""

    text: str


class RankedResult(ResponseModel):
    """One text, and how relevant it is to the query."""

    index: Count
    document: RankedDocument | None = None
    relevance_score: float


class Ranking(ResponseModel):
    """The texts, the most relevant first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: EmbeddingUsage


class RankedText(ResponseModel):
    """One text, in text-embeddings-inference's form."""

    index: Count
    score: float
    text: str | None = None


class ScoredPair(ResponseModel):
    """The score of one pair."""

    object: Literal["score"]
    index: Count
    score: float


class ScoreList(ResponseModel):
    """The scores of all pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoredPair]
    usage: EmbeddingUsage


def _texts(value: Any, param: str) -> list[str]:
    """Return one or more texts as a list; a document may be an object with a `text`. Raises InvalidRequest."""
    values = value if isinstance(value, list) else [value]
    texts = [one.get("text") if isinstance(one, dict) else one for one in values]
    found = [text for text in texts if isinstance(text, str) and text]
    if not texts or len(found) < len(texts):
        wrong = next((one for one in values if not isinstance(one, str) or not one), value)
        raise InvalidRequest(f"`{param}` must be texts that are not empty; got {short_repr(wrong)}.", param=param)
    if len(texts) > MAX_TEXTS:
        raise InvalidRequest(f"`{param}` has {len(texts)} texts; at most {MAX_TEXTS} in one request.", param=param)
    return found


def _pairs(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Return which texts are scored together: one with each, or each with its counterpart. Raises InvalidRequest."""
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{len(first)} texts cannot be paired with {len(second)}: give one, or as many.", param="text_1"
        )
    return [(0 if len(first) == 1 else number, number) for number in range(len(second))]


def _check_scores(source: PoolingSource) -> None:
    """Raise InvalidRequest for a classifier of several classes."""
    if source.scores_pairs and source.num_values != 1:
        raise InvalidRequest(
            f"`{source.name}` gives a pair {source.num_values} scores, of as many classes; one is needed.",
            param="model",
            code="unsupported_model",
        )


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["embeddings"])

    async def scored(
        request: Request,
        size: int,
        source: PoolingSource,
        texts: tuple[Sequence[str], Sequence[str]],
        options: tuple[InputOptions, InputOptions],
        name: str,
    ) -> tuple[list[float], int]:
        """Return the scores of pairs of texts, and the tokens read for them."""
        _check_scores(source)
        first, second = texts
        pairs = _pairs(first, second)
        if source.scores_pairs:
            written = [(first[one], second[other]) for one, other in pairs]
            made = await service.text_work(request, size, source.tokenise_pairs, written, options[1])
        else:
            ones = await service.text_work(request, size, source.tokenise, first, options[0])
            made = [*ones, *await service.text_work(request, size, source.tokenise, second, options[1])]
        num_tokens = source.num_tokens(made)
        async with counted(service, key_of(request), num_tokens):
            found = await while_connected(request.receive, source.run(name, made))
        if source.scores_pairs:
            return [values[0] for values in found], num_tokens
        vectors = [normalised(vector) for vector in found]
        return [cosine(vectors[one], vectors[len(first) + other]) for one, other in pairs], num_tokens

    @router.post("/v1/score", openapi_extra=json_body(ScoreBody), responses=_answers(ScoreList))
    async def score(request: Request) -> Response:
        """Scores of pairs of texts: a cross-encoder's own, else the cosine of their embeddings."""
        body, size = await service.read(request, ScoreBody)
        ones, others = ("text_1", body.text_1), ("text_2", body.text_2)
        if body.queries is not None or body.documents is not None:
            ones, others = ("queries", body.queries), ("documents", body.documents)
        for param, value in (ones, others):
            if value is None:
                raise InvalidRequest(f"`{param}` is required.", param=param, code="missing_parameter")
        texts = _texts(ones[1], ones[0]), _texts(others[1], others[0])
        source = choose_source(service, key_of(request), body.model, priority=body.priority)
        options = [InputOptions(param, truncate=body.truncate_prompt_tokens) for param in (ones[0], others[0])]
        name = request_id("score", body.request_id)
        scores, num_tokens = await scored(request, size, source, texts, (options[0], options[1]), name)
        data = [{"object": "score", "index": index, "score": one} for index, one in enumerate(scores)]
        answer = {"id": name, "object": "list", "created": now(), "model": source.name, "data": data}
        return json_response(answer | {"usage": usage(num_tokens)}, headers={"x-request-id": name})

    async def rerank(request: Request) -> Response:
        """Texts by their relevance to a query: by a cross-encoder's score, else by the cosine of their embeddings."""
        body, size = await service.read(request, RerankBody)
        if (body.texts is None) == (body.documents is None):
            raise InvalidRequest("Give one of `documents` and `texts`.", param="documents")
        is_tei = body.documents is None
        param = "texts" if is_tei else "documents"
        texts = _texts(body.texts if is_tei else body.documents, param)
        if str(body.truncation_direction).lower() == "left":
            message = "`truncation_direction` is left; texts are cut at their end."
            raise InvalidRequest(message, param="truncation_direction")
        source = choose_source(service, key_of(request), body.model, priority=body.priority)
        if body.raw_scores and source.scores_pairs:
            raise InvalidRequest("`raw_scores` is true; scores are those behind the activation.", param="raw_scores")
        truncate = body.max_tokens_per_doc if body.truncate_prompt_tokens is None else body.truncate_prompt_tokens
        truncate = -1 if body.truncate else truncate
        asked = InputOptions("query", truncate=truncate, role="query")
        ranked = InputOptions(param, truncate=truncate, role="document")
        name = request_id("rerank", body.request_id)
        scores, num_tokens = await scored(request, size, source, ([body.query], texts), (asked, ranked), name)
        order = sorted(range(len(texts)), key=lambda number: (-scores[number], number))[: body.top_n or None]
        headers = {"x-request-id": name}
        if is_tei:
            shows = bool(body.return_text)
            return json_response(
                [{"index": n, "score": scores[n], **({"text": texts[n]} if shows else {})} for n in order],
                headers=headers,
            )
        shows = body.return_documents is not False
        results = [
            {"index": n, "relevance_score": scores[n], **({"document": {"text": texts[n]}} if shows else {})}
            for n in order
        ]
        answer = {"id": name, "model": source.name, "results": results, "usage": usage(num_tokens)}
        return json_response(answer, headers=headers)

    router.add_api_route(
        "/score", score, methods=["POST"], openapi_extra=json_body(ScoreBody), responses=_answers(ScoreList)
    )
    both = {"anyOf": [schema_ref(Ranking), {"type": "array", "items": schema_ref(RankedText)}]}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        described = describe_responses(both, errors=OpenAIError, statuses=STATUSES)
        router.add_api_route(path, rerank, methods=["POST"], openapi_extra=json_body(RerankBody), responses=described)
    return router


def _answers(model: type[ResponseModel]) -> dict[int | str, dict[str, Any]]:
    return describe_responses(model, errors=OpenAIError, statuses=STATUSES)
