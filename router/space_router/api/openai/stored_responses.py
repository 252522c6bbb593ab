"""Stored responses by their ids: read one, list its input, delete it."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from space_router.api.openai.answers import DeletedResponse, ResponseInputItems, ResponseObject
from space_router.api.openai.response_fields import Includable
from space_router.api.schema import OpenAIError, describe_responses, query_parameters
from space_router.api.service import Service
from space_router.errors import InvalidRequest, NotFound
from space_router.http_server.body import Body, read_query, short_repr
from space_router.http_server.responses import json_response, key_of
from space_router.http_server.warnings import warn
from space_router.response_store import StoredResponse
from space_router.text import written_numbers

MAX_PAGE = 100  # items of one answer, as OpenAI has it

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


class StoredQuery(Body):
    """Query of `GET /v1/responses/{id}`."""

    include: Annotated[list[Includable], Field(max_length=16)] | None = None
    stream: bool | None = None
    starting_after: Annotated[int, Field(ge=0)] | None = None
    include_obfuscation: bool | None = None


class InputItemsQuery(Body):
    """Query of `GET /v1/responses/{id}/input_items`."""

    after: Annotated[str, Field(max_length=256)] | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: Annotated[list[Includable], Field(max_length=16)] | None = None


def no_such_response(id_: str, param: str | None) -> NotFound:
    """Return the error for an id that is not stored for this API key."""
    return NotFound(
        f"There is no stored response {short_repr(id_)} of this API key.", param=param, code="response_not_found"
    )


def input_items(given: str | list[Any]) -> list[Any]:
    """Return an `input` as a list of items."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def shown_input(stored: StoredResponse) -> list[dict[str, Any]]:
    """Return what a response answered, with what came before `previous_response_id`, as whole items with ids.

    An item without an id gets one by its place and content: the same in every response of the conversation.
    """
    given = stored.items[: len(stored.items) - len(stored.response["output"])]
    taken: set[str] = set()
    shown = []
    for place, item in enumerate(given):
        whole = _shown_item(item)
        if not item.get("id") or whole["id"] in taken:
            digest = hashlib.blake2b(f"{place}/".encode() + written_numbers.as_bytes(item), digest_size=16).hexdigest()
            whole["id"] = f"{_PREFIXES.get(whole['type'], 'item')}_{digest}"
        taken.add(whole["id"])
        shown.append(whole)
    return shown


def _shown_item(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    given = {name: value for name, value in item.items() if value is not None and name != "cache_control"}
    whole = {"id": None, "type": kind, "status": "completed", **given}
    if kind == "message":
        whole["content"] = list(_shown_parts(item["content"], is_output=item["role"] == "assistant"))
    if kind == "reasoning":
        whole["summary"] = item.get("summary") or []
    return whole


def _shown_parts(content: str | Sequence[Mapping[str, Any]], *, is_output: bool) -> Iterator[dict[str, Any]]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        if part["type"] == "refusal":
            yield {"type": "refusal", "refusal": part["refusal"]}
        elif is_output:
            yield {
                "type": "output_text",
                "text": part["text"],
                "annotations": part.get("annotations") or [],
                "logprobs": part.get("logprobs") or [],
            }
        else:
            yield {"type": "input_text", "text": part["text"]}


def some_items(items: Sequence[dict[str, Any]], query: InputItemsQuery) -> dict[str, Any]:
    """Return the part of a list that a query asks for. Raises NotFound if `after` is no item of it."""
    ordered = items[::-1] if query.order == "desc" else items
    start = 0
    if query.after is not None:
        ids = [item["id"] for item in ordered]
        if query.after not in ids:
            raise NotFound(f"`after` is {short_repr(query.after)}: no input item has this id.", param="after")
        start = ids.index(query.after) + 1
    shown = ordered[start : start + query.limit]
    return {
        "object": "list",
        "data": list(shown),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + len(shown) < len(ordered),
    }


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    async def stored(request: Request, id_: str) -> StoredResponse:
        found = None if service.responses is None else await service.responses.get(id_, key_of(request))
        if found is None:
            raise no_such_response(id_, None)
        return found

    shown = describe_responses(ResponseObject, errors=OpenAIError, statuses=(400, 404))
    listed = describe_responses(ResponseInputItems, errors=OpenAIError, statuses=(400, 404))
    deleted = describe_responses(DeletedResponse, errors=OpenAIError, statuses=(404,))
    refused = describe_responses(ResponseObject, errors=OpenAIError, statuses=(400, 404))
    del refused[200]

    @router.get("/v1/responses/{response_id}", responses=shown, openapi_extra=query_parameters(StoredQuery))
    async def stored_response(request: Request, response_id: str) -> Response:
        """A stored response of the same API key."""
        query = read_query(request, StoredQuery)
        found = await stored(request, response_id)
        if query.stream or query.starting_after is not None:
            raise InvalidRequest(
                "Only a response that was made in the background can be streamed again, and none is made so here. "
                "Leave `stream` and `starting_after` out: the response is whole.",
                param="stream" if query.stream else "starting_after",
                code="unsupported_parameter",
            )
        if "message.output_text.logprobs" in (query.include or ()):
            warn("`include` has no effect: log-probabilities are kept where the response was made with them.")
        return json_response(found.response)

    @router.get(
        "/v1/responses/{response_id}/input_items", responses=listed, openapi_extra=query_parameters(InputItemsQuery)
    )
    async def stored_input(request: Request, response_id: str) -> Response:
        """What a stored response of the same API key answered, with the conversation before it."""
        query = read_query(request, InputItemsQuery)
        return json_response(some_items(shown_input(await stored(request, response_id)), query))

    @router.post("/v1/responses/{response_id}/cancel", responses=refused)
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Refused: a response that is stored is finished, as none is made in the background."""
        await stored(request, response_id)
        raise InvalidRequest(
            "Only a response that is made in the background can be cancelled, and none is made so here. To end one "
            "that is running, close its connection, or send `DELETE /v1/requests/{id}`.",
            code="unsupported_operation",
        )

    @router.delete("/v1/responses/{response_id}", responses=deleted)
    async def delete_response(request: Request, response_id: str) -> Response:
        """Delete a stored response of the same API key."""
        if service.responses is None or not await service.responses.delete(response_id, key_of(request)):
            raise no_such_response(response_id, None)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return router
