"""What gRPC calls for a method, and others in its place: of the same kind, with something before or around it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Following: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

_KINDS: dict[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether requests, and answers, are streams."""


def method_of(handler: Handler) -> Any:
    """What a handler calls with its one request."""
    return handler.unary_stream if handler.response_streaming else handler.unary_unary


def in_place_of(handler: Handler, method: Callable[..., Any], read: Callable[[bytes], Any] | None = None) -> Handler:
    """A handler of the same kind that calls `method`, with requests as `read` makes them of bytes [as before]."""
    make = _KINDS[handler.request_streaming, handler.response_streaming]
    made: Handler = make(method, read or handler.request_deserializer, handler.response_serializer)
    return made
