"""Errors of calls: gRPC status, message, and details in trailing metadata."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from space_router.errors import ApiError, ClientGone
from space_router.http_server.responses import as_api_error
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
"""gRPC status by HTTP status; all others are INTERNAL."""

GONE = "499, the client has cancelled its call, or its deadline has passed"

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def metadata(error: ApiError) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of an error: the fields of HTTP's error object, and its headers."""
    known = {"error-type": error.kind, "error-code": error.code, "error-param": error.param, **error.details}
    fields = {key: str(value) for key, value in known.items() if value is not None}
    return tuple((fields | {name.lower(): value for name, value in error.headers.items()}).items())


async def refuse(context: Context, error: ApiError) -> None:
    """Abort the call with an error's status. Always raises, which ends the handler."""
    await context.abort(CODES.get(error.status, grpc.StatusCode.INTERNAL), error.message, metadata(error))


@asynccontextmanager
async def answering(context: Context, metrics: Metrics) -> AsyncIterator[None]:
    """Run one call: exceptions from the block become its status, and are logged and counted as for HTTP."""
    try:
        yield
        return
    except grpc.aio.InternalError:  # a write failed: the client is gone
        log.info(GONE)
        return
    except asyncio.CancelledError:
        log.info(GONE)
        raise
    except ApiError as error:
        refusal = error
    except Exception as error:
        refusal = as_api_error(error)
    if isinstance(refusal, ClientGone):
        log.info("499, %s", refusal.message)
    elif refusal.reason is not None:
        metrics.rejected_total.labels(reason=refusal.reason).inc()
    await refuse(context, refusal)
