"""How a call ends that could not be done: gRPC's status, our message, and trailing metadata that say the rest."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from space_router.errors import ApiError, ClientGone
from space_router.http_server.answers import unforeseen
from space_router.metrics import Metrics

log = logging.getLogger(__name__)

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""By HTTP's status; every other is INTERNAL."""

GONE = "499, the client has cancelled its call, or its deadline has passed"

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def metadata(error: ApiError) -> tuple[tuple[str, str], ...]:
    """What HTTP says in headers and in the fields of its error object."""
    known = {"error-type": error.kind, "error-code": error.code, "error-param": error.param, **error.details}
    fields = {key: str(value) for key, value in known.items() if value is not None}
    return tuple((fields | {name.lower(): value for name, value in error.headers.items()}).items())


async def refuse(context: Context, error: ApiError) -> None:
    """End the call with an error's status. Raises what ends its handler."""
    await context.abort(CODES.get(error.status, grpc.StatusCode.INTERNAL), error.message, metadata(error))


@asynccontextmanager
async def answering(context: Context, metrics: Metrics) -> AsyncIterator[None]:
    """The work of one call: whatever is raised inside becomes its status, counted as HTTP counts it."""
    try:
        yield
        return
    except grpc.aio.InternalError:  # what was written cannot be sent: nobody is there any more
        log.info(GONE)
        return
    except asyncio.CancelledError:
        log.info(GONE)
        raise
    except ApiError as error:
        refusal = error
    except Exception as error:
        refusal = unforeseen(error)
    if isinstance(refusal, ClientGone):
        log.info("499, %s", refusal.message)
    elif refusal.reason is not None:
        metrics.rejected_total.labels(reason=refusal.reason).inc()
    await refuse(context, refusal)
