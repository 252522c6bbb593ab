"""Undecodable requests are refused as INVALID_ARGUMENT; gRPC itself would answer `unknown`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from space_router.errors import InvalidRequest
from space_router.grpc_api.handlers import Following, Handler, in_place_of, method_of
from space_router.grpc_api.status import Context, refuse
from space_router.metrics import Metrics


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
