"""Authentication: the same API keys as over HTTP, in the call's metadata."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from space_router.api_keys import ApiKeys
from space_router.grpc_api.handlers import Following, Handler, in_place_of
from space_router.grpc_api.status import Context, refuse
from space_router.metrics import Metrics

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
