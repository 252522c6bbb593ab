"""The web application: all routes around one service."""

import logging

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from space_router.api import chat, completions, generate, models, operating, tokens
from space_router.api.access import Access
from space_router.api.answers import error_answer
from space_router.api.service import Service
from space_router.errors import ApiError, ClientGone, MethodNotAllowed, NotFound

log = logging.getLogger(__name__)


def create_app(service: Service) -> FastAPI:
    """The ASGI application of a service whose engine somebody else starts and stops."""
    app = FastAPI(
        title="spaceserve",
        version=operating.VERSION,
        description="Language models with SPACE decoding, for OpenAI and TGI clients.",
        redirect_slashes=False,
    )
    for part in (completions, chat, models, generate, tokens, operating):
        app.include_router(part.routes(service))

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            raise error
        if isinstance(error, ClientGone):
            log.info("%s: 499, %s", request.url.path, error.message)
        elif error.reason is not None:
            service.metrics.rejected_total.labels(reason=error.reason).inc()
        return error_answer(error, request.url.path)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: Exception) -> Response:
        path, method = request.url.path[:200], request.method
        if isinstance(error, HTTPException) and error.status_code == 405:
            refusal: ApiError = MethodNotAllowed(f"{path} does not take {method}.", code="method_not_allowed")
            refusal.headers = dict(error.headers or {})
        else:
            refusal = NotFound(f"There is no {method} {path}. /docs lists what there is.", code="not_found")
        return error_answer(refusal, request.url.path)

    app.add_middleware(Access, keys=service.config.api_keys, metrics=service.metrics)
    return app
