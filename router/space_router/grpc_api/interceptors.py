"""Checks of every call before its method runs: concurrency, API key, and a request that can be decoded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from space_router.api_keys import ApiKeys
from space_router.errors import InvalidRequest, Unavailable
from space_router.grpc_api.status import Context, refuse
from space_router.metrics import Metrics

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Following: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

_KINDS: dict[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether requests and responses are streams."""


def method_of(handler: Handler) -> Any:
    """Return the function that a handler calls with its one request."""
    return handler.unary_stream if handler.response_streaming else handler.unary_unary


def in_place_of(handler: Handler, method: Callable[..., Any], read: Callable[[bytes], Any] | None = None) -> Handler:
    """Return a handler of the same kind that calls `method`. `read`: deserializes requests, None: as before."""
    make = _KINDS[handler.request_streaming, handler.response_streaming]
    made: Handler = make(method, read or handler.request_deserializer, handler.response_serializer)
    return made


OPEN_SERVICE = "/grpc.health.v1.Health/"
"""Service that needs no key, for probes."""

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


def authorization(metadata: Metadata | None) -> str:
    """Return the `authorization` of a call's metadata, or ""."""
    return next((str(value) for key, value in metadata or () if key == "authorization"), "")


class GrpcAccess(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid key before their request is read."""

    def __init__(self, keys: ApiKeys, metrics: Metrics) -> None:
        self._keys = keys
        self._metrics = metrics

    async def intercept_service(
        self, continuation: Following, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_SERVICE):
            return handler
        if self._keys.name_of(authorization(handler_call_details.invocation_metadata)) is not None:
            return handler
        return self._refusing(handler)

    def _refusing(self, handler: Handler) -> Handler:
        """Return a handler of the same kind that refuses every call."""

        async def unauthorized(request: Any, context: Context) -> None:
            self._metrics.rejected_total.labels(reason="unauthorized").inc()
            await refuse(context, self._keys.refusal())

        return in_place_of(handler, unauthorized)


NUM_GUESTS = 32
"""Extra connections and calls beyond the limit, so that probes are answered and calls get an error with a reason.
Beyond these gRPC itself refuses.
"""


class ConcurrencyLimit(grpc.aio.ServerInterceptor):
    """Refuses calls beyond `most` concurrent ones, over all connections."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self._most = most
        self._metrics = metrics
        self._num_calls = 0

    async def intercept_service(
        self, continuation: Following, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler_call_details.method.startswith(OPEN_SERVICE):
            return handler
        method = method_of(handler)

        async def answer(request: Any, context: Context) -> Any:
            if self._num_calls >= self._most:
                self._metrics.rejected_total.labels(reason="too_many_connections").inc()
                await refuse(context, self._refusal())
            self._num_calls += 1
            try:
                return await method(request, context)
            finally:
                self._num_calls -= 1

        return in_place_of(handler, answer)

    def _refusal(self) -> Unavailable:
        return Unavailable(
            f"There are {self._most} calls already, the most (`--max-connections`). End some, or come again later.",
            reason="too_many_connections",
        )


@dataclass(frozen=True)
class Unreadable:
    """Stands for a request that could not be decoded."""

    reason: str


class Readable(grpc.aio.ServerInterceptor):
    """Refuses undecodable requests before the method is called."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self, continuation: Following, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        method = method_of(handler)
        deserialize = handler.request_deserializer

        def read(content: bytes) -> Any:
            try:
                return deserialize(content)
            except DecodeError as error:
                return Unreadable(str(error)[:200])

        async def answer(request: Any, context: Context) -> Any:
            if isinstance(request, Unreadable):
                self._metrics.rejected_total.labels(reason="invalid").inc()
                await refuse(context, InvalidRequest(f"The request cannot be read: {request.reason}."))
            return await method(request, context)

        return in_place_of(handler, answer, read)
