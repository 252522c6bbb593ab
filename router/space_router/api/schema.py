"""OpenAPI schemas of request bodies and responses.

Each schema carries the models that it refers to under `$defs`; `document` moves them to one place.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from space_router.http_server.body import BOOKKEEPING, Body

Responses = dict[int | str, dict[str, Any]]

OPENAI_STATUSES = (400, 401, 404, 408, 413, 415, 429, 499, 500, 503)
"""Error statuses of generation routes."""

TGI_STATUSES = (401, 404, 408, 413, 415, 422, 424, 429, 499, 500, 503)
"""Error statuses of TGI's generation routes."""

_MEANING = {
    400: "A field is wrong: `param` names it. Or prompt and answer do not fit the window.",
    401: "The API key is missing or not known.",
    403: "The API key is not an operator's.",
    404: "There is no such model, adapter or request.",
    408: "The request's own deadline has passed, or would.",
    409: "Another restart is under way.",
    413: "The body exceeds `--max-body`.",
    415: "The body is not announced as JSON.",
    422: "A field is wrong.",
    424: "This request alone failed.",
    429: "The queue is full, or the key has asked too often. `Retry-After` says when to try again.",
    499: "The request was cancelled by its id.",
    500: "The request failed; of an unforeseen error the message gives the id under which the log has it.",
    503: "The server is starting or stopping.",
}


def referred(model: type[BaseModel]) -> dict[str, Any]:
    """Return a reference to a model, with the definitions of everything it refers to."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    return {"$ref": f"#/components/schemas/{model.__name__}", "$defs": {**definitions, model.__name__: schema}}


def neutral_fields(neutral: Mapping[str, Collection[Any]]) -> dict[str, Any]:
    """Return schemas of unsupported fields, which accept only the values that have no effect."""
    return {
        name: {"enum": [*values, None], "description": "not supported: leave it out"}
        for name, values in neutral.items()
    }


def json_body(model: type[Body], neutral: Mapping[str, Collection[Any]] | None = None) -> dict[str, Any]:
    """Describe a JSON body: the model's fields, unsupported `neutral` fields, and fields that have no effect."""
    schema = referred(model)
    properties = schema["$defs"][model.__name__].setdefault("properties", {})
    notes = {name: {"description": "the client's own note: changes nothing"} for name in sorted(BOOKKEEPING)}
    properties |= {**neutral_fields(neutral or {}), **notes, **properties}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _event(model: type[BaseModel], errors: type[BaseModel], *, done: bool) -> dict[str, Any]:
    """Describe one stream event by its lines, as OpenAPI does; `data` is JSON in a string."""
    said = {"anyOf": [referred(model), referred(errors)]}
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": said}
    if done:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    return {"type": "object", "required": ["data"], "properties": {"data": data, "event": {"type": "string"}}}


def answers(
    model: type[BaseModel] | Mapping[str, Any] | None = None,
    *,
    errors: type[BaseModel],
    statuses: Iterable[int] = (),
    event: type[BaseModel] | None = None,
    done: bool = False,
    media: str = "application/json",
) -> Responses:
    """Describe all responses of a route.

    `model`: the body for status 200; `event`: the events of a streamed response; `done`: they end with `[DONE]`.
    """
    content: dict[str, Any] = {}
    if model is not None:
        content[media] = {"schema": dict(model) if isinstance(model, Mapping) else referred(model)}
    if event is not None:
        content["text/event-stream"] = {"schema": _event(event, errors, done=done)}
    described: Responses = {200: {"description": "The answer.", "content": content}}
    error = {"application/json": {"schema": referred(errors)}}
    for status in sorted({401, 500, *statuses}):
        described[status] = {"description": _MEANING[status], "content": error}
        if status == 429:
            described[status]["headers"] = {"Retry-After": {"required": True, "schema": {"type": "string"}}}
    return described
