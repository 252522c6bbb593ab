"""Wrapping of gRPC method handlers by interceptors."""

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
"""By whether requests and responses are streams."""


def method_of(handler: Handler) -> Any:
    """Return the function that a handler calls with its one request."""
    return handler.unary_stream if handler.response_streaming else handler.unary_unary


def in_place_of(handler: Handler, method: Callable[..., Any], read: Callable[[bytes], Any] | None = None) -> Handler:
    """Return a handler of the same kind that calls `method`. `read`: deserializes requests, None: as before."""
    make = _KINDS[handler.request_streaming, handler.response_streaming]
    made: Handler = make(method, read or handler.request_deserializer, handler.response_serializer)
    return made
