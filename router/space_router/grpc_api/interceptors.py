"""Errors of calls as gRPC statuses, and the checks of every call before its method runs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from space_router.api_keys import ApiKeys
from space_router.errors import ApiError, ClientGone, InvalidRequest, Unauthorized, Unavailable
from space_router.http_server.gone_clients import gone_clients
from space_router.http_server.responses import as_api_error
from space_router.metrics import Metrics

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
        gone_clients.log(GONE)
        return
    except asyncio.CancelledError:
        gone_clients.log(GONE)
        raise
    except Exception as error:
        refusal = as_api_error(error)
    if isinstance(refusal, ClientGone):
        gone_clients.log(f"499, {refusal.message}")
    elif refusal.reason is not None:
        metrics.rejected_total.labels(reason=refusal.reason).inc()
    await refuse(context, refusal)


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Following: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

_MAKE_HANDLER: dict[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether requests and responses are streams."""

OPEN_SERVICE = "/grpc.health.v1.Health/"  # service that needs no key, for probes; it bounds its long calls itself

NUM_GUESTS = 32
"""Extra connections and calls beyond the limit, so that probes are answered and calls get an error with a reason.
Beyond these gRPC itself refuses.
"""

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


def authorization(metadata: Metadata | None) -> str:
    return next((str(value) for key, value in metadata or () if key == "authorization"), "")


@dataclass(frozen=True)
class Unreadable:
    """Stands for a request that could not be decoded."""

    reason: str


class CallChecks(grpc.aio.ServerInterceptor):
    """Refuses calls beyond `max_calls` at once over all connections, without a valid key, or that cannot be decoded."""

    def __init__(self, max_calls: int, keys: ApiKeys, metrics: Metrics) -> None:
        self._max_calls, self._keys, self._metrics = max_calls, keys, metrics
        self._num_calls = 0
        self._too_many = (
            f"There are {max_calls} calls already, the most (`--max-connections`). End some, or come again later."
        )

    async def intercept_service(
        self, continuation: Following, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        is_open = handler_call_details.method.startswith(OPEN_SERVICE)
        has_key = is_open or self._keys.name_of(authorization(handler_call_details.invocation_metadata)) is not None
        is_stream = handler.request_streaming
        if is_stream:
            method: Any = handler.stream_stream if handler.response_streaming else handler.stream_unary
        else:
            method = handler.unary_stream if handler.response_streaming else handler.unary_unary
        deserialize: Any = handler.request_deserializer

        def read(content: bytes) -> Any:
            try:
                return deserialize(content)
            except DecodeError as error:
                return Unreadable(str(error)[:200])

        async def answer(request: Any, context: Context) -> Any:
            if not has_key:
                await self._refuse(context, Unauthorized())
            if isinstance(request, Unreadable):
                await self._refuse(context, InvalidRequest(f"The request cannot be read: {request.reason}."))
            if not inspect.isasyncgenfunction(method):
                return await method(request, context)
            async for one in method(request, context):
                await context.write(one)
            return None

        async def counted(request: Any, context: Context) -> Any:
            if self._num_calls >= self._max_calls:
                await self._refuse(context, Unavailable(self._too_many, reason="too_many_connections"))
            self._num_calls += 1
            try:
                return await answer(request, context)
            finally:
                self._num_calls -= 1

        make = _MAKE_HANDLER[is_stream, handler.response_streaming]
        checked = answer if is_open else counted
        made: Handler = make(checked, deserialize if is_stream else read, handler.response_serializer)
        return made

    async def _refuse(self, context: Context, error: ApiError) -> None:
        self._metrics.rejected_total.labels(reason=error.reason).inc()
        await refuse(context, error)
