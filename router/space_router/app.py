"""The ASGI application with all routes."""

from collections.abc import Iterable

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from space_router.api.anthropic import messages
from space_router.api.openai import chat, completions, responses, stored_responses
from space_router.api.ops import loras, operating, pages, tokens
from space_router.api.pooling import embeddings, scores
from space_router.api.schema import DocumentedApp
from space_router.api.service import HttpAccess, Service, Traced
from space_router.api.tgi import generate
from space_router.errors import ApiError, ClientGone, MethodNotAllowed, NotFound
from space_router.http_server.gone_clients import gone_clients
from space_router.http_server.responses import error_response, is_open, log_failure

_INSTEAD = {
    "/v1/responses/compact": 'no conversation is compacted. `truncation: "auto"` leaves out the oldest turns.',
    "/v1/conversations": "a conversation goes on by `previous_response_id`, with `--response-store`.",
}
"""Routes of OpenAI's API that clients of `/v1/responses` ask for, and what does the same here."""


def _allowed(routes: Iterable[BaseRoute], request: Request) -> str:
    """Return the methods of all routes at this path, as an `Allow` header.

    A route of exactly this path comes before one that has a parameter there, as in OpenAPI: `input_tokens` is no
    response's id.
    """
    here = [r for r in routes if isinstance(r, Route) and r.matches(request.scope)[0] is not Match.NONE]
    here = [route for route in here if route.path == request.scope["path"]] or here
    return ", ".join(sorted({method for route in here for method in route.methods or ()}))


def _answer_head(router: APIRouter) -> None:
    """Add HEAD to every GET route (RFC 9110 §9.3.2), for monitors; the server sends no body."""
    for route in tuple(router.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            router.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def create_app(service: Service) -> DocumentedApp:
    """Return the ASGI application of a service. The caller starts and stops the service's engine."""
    app = DocumentedApp(
        title="spaceserve",
        version=operating.VERSION,
        description="Language models with SPACE decoding, for OpenAI and TGI clients.",
        redirect_slashes=False,
        openapi_url=None,  # of FastAPI, which would write the document anew for each request
        docs_url=None,
        redoc_url=None,
    )
    app.keyed = bool(service.config.api_keys)
    parts = [completions.routes, chat.routes, responses.routes, stored_responses.routes, messages.routes]
    parts += [embeddings.routes, scores.routes, generate.routes, tokens.routes, operating.routes, loras.routes]
    parts += [operating.model_routes]
    routers = [routes(service) for routes in parts]
    routers += [generate.invocation_routes(service, routers), pages.docs_routes(app.openapi), pages.web_ui_routes()]
    for router in routers:
        _answer_head(router)
        app.include_router(router)
    every_route = [*app.routes, *(route for router in routers for route in router.routes)]

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            raise error
        if not is_open(request.url.path, request.method):  # probes ask again and again while nothing is ready
            log_failure(error)
        if isinstance(error, ClientGone):
            gone_clients.log(f"{request.url.path}: 499, {error.message}")
        elif error.reason is not None:
            service.metrics.rejected_total.labels(reason=error.reason).inc()
        return error_response(error, request.url.path)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: Exception) -> Response:
        path, method = request.url.path[:200], request.method
        instead = next(
            (cure for start, cure in _INSTEAD.items() if path == start or path.startswith(f"{start}/")), None
        )
        if instead is not None:
            refusal: ApiError = NotFound(f"There is no {method} {path} here: {instead}", code="not_found")
        elif isinstance(error, HTTPException) and error.status_code == 405:
            refusal = MethodNotAllowed(f"{path} does not take {method}.", code="method_not_allowed")
            refusal.headers = {"allow": _allowed(every_route, request)}
        else:
            refusal = NotFound(f"There is no {method} {path}. /docs lists what there is.", code="not_found")
        return error_response(refusal, request.url.path)

    app.add_middleware(HttpAccess, service=service)
    if service.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("*",),
        )
    if service.tracer is not None:
        app.add_middleware(Traced, tracer=service.tracer)
    return app
