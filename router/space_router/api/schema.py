"""`/openapi.json`: the schemas of request bodies and responses.

Each schema carries the models that it refers to under `$defs`; `DocumentedApp` moves them to one place.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from space_router.http_server.body import BOOKKEEPING, Body
from space_router.http_server.responses import is_open

Responses = dict[int | str, dict[str, Any]]

STATUSES = (400, 401, 404, 408, 413, 415, 429, 499, 500, 503)  # of errors of generation routes
ANTHROPIC_STATUSES = (*STATUSES, 529)
TGI_STATUSES = (401, 404, 408, 413, 415, 422, 424, 429, 499, 500, 503)

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
    529: "The queue is full. `Retry-After` says when to try again.",
}
Count = Annotated[int, Field(ge=0)]


class ResponseModel(BaseModel):
    """A JSON object with exactly these fields; those with a default may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True)


class OpenAIErrorDetails(ResponseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: Count | None = None  # only with the code context_length_exceeded
    n_ctx: Count | None = None


class OpenAIError(ResponseModel):
    """An error."""

    error: OpenAIErrorDetails


class TgiError(ResponseModel):
    """An error; in a stream, too."""

    error: str
    error_type: str


@cache
def schema_ref(model: type[BaseModel]) -> Mapping[str, Any]:
    """Return a reference to a model, with the definitions of everything it refers to; it is computed once.

    The routes of all applications of the process share it: not to be changed.
    """
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    return {"$ref": f"#/components/schemas/{model.__name__}", "$defs": {**definitions, model.__name__: schema}}


def neutral_fields(neutral: Mapping[str, Collection[Any]]) -> dict[str, Any]:
    """Return schemas of unsupported fields, which accept only the values that have no effect."""
    note = "not supported: leave it out"
    return {name: {"enum": [*values, None], "description": note} for name, values in neutral.items()}


def json_body(model: type[Body], neutral: Mapping[str, Collection[Any]] | None = None) -> dict[str, Any]:
    """Describe a JSON body: the model's fields, unsupported `neutral` fields, and fields that have no effect."""
    known = schema_ref(model)
    body = known["$defs"][model.__name__]
    properties = body.get("properties", {})
    notes = {name: {"description": "the client's own note: changes nothing"} for name in sorted(BOOKKEEPING)}
    properties = {**properties, **neutral_fields(neutral or {}), **notes, **properties}
    schema = {**known, "$defs": {**known["$defs"], model.__name__: {**body, "properties": properties}}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def query_parameters(model: type[Body]) -> dict[str, Any]:
    """Describe the parameters of a query, which `read_query` reads; a list is given by repeating its name."""
    fields = schema_ref(model)["$defs"][model.__name__]["properties"]
    return {"parameters": [{"name": name, "in": "query", "schema": one} for name, one in fields.items()]}


def _event(model: type[BaseModel], errors: type[BaseModel], *, done: bool) -> dict[str, Any]:
    """Describe one stream event by its lines, as OpenAPI does; `data` is JSON in a string."""
    content = {"anyOf": [schema_ref(model), schema_ref(errors)]}
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    if done:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    return {"type": "object", "required": ["data"], "properties": {"data": data, "event": {"type": "string"}}}


def describe_responses(
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
        content[media] = {"schema": dict(model) if isinstance(model, Mapping) else schema_ref(model)}
    if event is not None:
        content["text/event-stream"] = {"schema": _event(event, errors, done=done)}
    described: Responses = {200: {"description": "The answer.", "content": content}}
    error = {"application/json": {"schema": schema_ref(errors)}}
    for status in sorted({401, 500, *statuses}):
        described[status] = {"description": _MEANING[status], "content": error}
        if status in (429, 529):
            described[status]["headers"] = {"Retry-After": {"required": True, "schema": {"type": "string"}}}
    return described


_VALIDATION = ("HTTPValidationError", "ValidationError")  # FastAPI's own errors, which no route returns


class DocumentedApp(FastAPI):
    """A FastAPI application with an OpenAPI document that contains only what the routes declare."""

    keyed = False  # requests need an API key

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            whole = super().openapi()
            components = whole.setdefault("components", {})
            own = components.get("schemas", {}).items()
            schemas = components["schemas"] = {name: schema for name, schema in own if name not in _VALIDATION}
            if self.keyed:
                components["securitySchemes"] = {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                }
            for path, operations in whole["paths"].items():
                for method, operation in operations.items():
                    responses = operation["responses"]
                    # FastAPI adds a generic JSON body, and a 422 to routes with parameters.
                    content = responses["200"].get("content", {})
                    if not content.get("application/json", {"schema": True}).get("schema"):
                        del content["application/json"]
                    if _VALIDATION[0] in str(responses.get("422")):
                        del responses["422"]
                    if is_open(path, method.upper()):
                        responses.pop("401", None)
                    elif self.keyed:
                        operation["security"] = [{"bearer": []}, {"x-api-key": []}]
            _gather(whole, schemas)
            self.openapi_schema = whole
        return self.openapi_schema


def _gather(node: Any, schemas: dict[str, Any]) -> None:
    """Move every `$defs` into `schemas`. Raises ValueError if two models with the same name differ."""
    if isinstance(node, list):
        for item in node:
            _gather(item, schemas)
    elif isinstance(node, dict):
        for name, schema in node.pop("$defs", {}).items():
            if schemas.setdefault(name, schema) != schema:
                raise ValueError(f"two models of the OpenAPI document are called {name}")
        for value in list(node.values()):
            _gather(value, schemas)
