"""`grpc.health.v1.Health`: the same status as `/readyz`, for gRPC probes."""

from __future__ import annotations  # grpcio-health-checking before 1.85 has no messages of `List`

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from space_router.api.service import Service

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WATCH_SECONDS = 0.1
"""Maximum delay of a change for watchers."""

Context: TypeAlias = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """SERVING while new requests are accepted; the whole server ("") and each service have the same status."""

    def __init__(self, service: Service, names: Sequence[str]) -> None:
        self._service = service
        self._names = ("", *names)
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End all watches, so that they do not delay shutdown."""
        self._closed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Return the current status."""
        if request.service not in self._names:
            names = ", ".join(filter(None, self._names))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"There is no service of this name; there are {names}.")
        return self._now(request.service)

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> health_pb2.HealthListResponse:
        """Return the status of all services."""
        return health_pb2.HealthListResponse(statuses={name: self._now(name) for name in self._names})

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Send the current status and every change."""
        sent: health_pb2.HealthCheckResponse | None = None
        while not self._closed.is_set():
            now = self._now(request.service)
            if now != sent:
                await context.write(now)
                sent = now
            try:
                await asyncio.wait_for(self._closed.wait(), WATCH_SECONDS)
            except TimeoutError:
                continue

    def _now(self, name: str) -> health_pb2.HealthCheckResponse:
        if name not in self._names:
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        ready = self._service.ready
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)
