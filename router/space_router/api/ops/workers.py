"""`GET /workers`, and the route for rolling restarts of workers."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from space_router.api.openai.answers import OpenAIError
from space_router.api.ops.operating_answers import Workers
from space_router.api.schema import answers, json_body
from space_router.api.service import Service
from space_router.engine.errors import RestartRefused
from space_router.engine.workers.rolling_restart import FINISH_SECONDS
from space_router.engine.workers.worker_connection import WorkerConnection
from space_router.errors import Conflict, Forbidden, InvalidRequest, Unavailable
from space_router.http_server.answers import answer
from space_router.http_server.body import Body, read_object, validate
from space_router.http_server.paths import key_of


class RestartBody(Body):
    """Which workers to restart, and how long their streams may take to end where they are."""

    workers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=1024)] | None = Field(
        default=None, description="numbers as in GET /workers; without it, all"
    )
    finish_seconds: Annotated[float, Field(ge=0, le=86400)] = Field(
        default=FINISH_SECONDS,
        description="what still runs on a worker after so many seconds goes on elsewhere, with the same text",
    )


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["operating"])

    @router.get("/workers", responses=answers(Workers, errors=OpenAIError))
    async def workers() -> Response:
        """Every worker, and how far a rolling restart is."""
        return answer(describe(service))

    @router.post(
        "/workers/restart",
        responses=answers(Workers, errors=OpenAIError, statuses=(400, 403, 408, 409, 413, 415, 499, 503)),
        openapi_extra=json_body(RestartBody),
    )
    async def restart(request: Request) -> Response:
        """Restart workers one after the other without losing a stream; GET /workers says how far it is.

        Needs an API key with `operator=yes`. The same as signal SIGUSR1 to the router.
        """
        if not service.keys.is_operator(key_of(request)):
            raise Forbidden(
                "This needs an operator's key: `KEY name=ops operator=yes` in --api-key-file. On the router's own "
                "machine, `kill -USR1` does it without.",
                code="not_an_operator",
            )
        received = await read_object(request, service.config)
        body = validate(RestartBody, received.values, {})
        if service.draining:
            raise Unavailable("The server is stopping.", reason="draining")
        try:
            service.restart.begin(finish_seconds=body.finish_seconds, numbers=body.workers)
        except RestartRefused as refused:
            if refused.is_busy:
                raise Conflict(str(refused), code="restart_under_way") from refused
            raise InvalidRequest(str(refused), param="workers") from refused
        return answer(describe(service))

    return router


def describe(service: Service) -> dict[str, Any]:
    """Return the body of `GET /workers`."""
    restart = service.restart
    return {
        "workers": [_described(connection) for connection in service.engine.connections],
        "restart": {
            "state": restart.state.value,
            "num_done": restart.num_done,
            "num_wanted": restart.num_wanted,
            "error": restart.error or None,
        },
    }


def _described(connection: WorkerConnection) -> dict[str, Any]:
    scheduler = connection.scheduler
    return {
        "number": connection.number,
        "name": connection.source.name,
        "state": "away" if scheduler is None else "leaving" if scheduler.closing else "up",
        "address": connection.address,
        "incarnation": None if scheduler is None else scheduler.facts.incarnation,
        "num_incarnations": connection.num_incarnations,
        "num_running": 0 if scheduler is None else scheduler.num_running,
        "num_cached_blocks": 0 if scheduler is None else scheduler.pool.num_cached,
        "num_available_blocks": 0 if scheduler is None else scheduler.pool.num_available,
        "trouble": connection.trouble or None,
    }
