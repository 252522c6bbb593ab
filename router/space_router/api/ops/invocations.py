"""`POST /invocations` for SageMaker: one route for three kinds of body."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from space_router.api.schema import TGI_STATUSES, answers
from space_router.api.service import Service
from space_router.api.tgi.answers import TgiError
from space_router.errors import InvalidRequest
from space_router.http_server.body import read_object

ROUTE_OF = {"inputs": "/", "messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""The field that identifies each kind of body, and the route that handles it, as in TGI."""

JSON, EVENTS = "application/json", "text/event-stream"


def routes(service: Service, routers: list[APIRouter]) -> APIRouter:
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
    described = answers({"anyOf": wholes}, errors=TgiError, statuses=TGI_STATUSES)
    described[200]["content"][EVENTS] = {"schema": {"anyOf": events}}
    body = {"required": True, "content": {JSON: {"schema": {"anyOf": bodies}}}}
    return {"openapi_extra": {"requestBody": body}, "responses": described}
