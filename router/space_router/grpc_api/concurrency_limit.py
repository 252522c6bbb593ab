"""The limit of concurrent calls."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from space_router.errors import Unavailable
from space_router.grpc_api.access import OPEN_SERVICE
from space_router.grpc_api.handlers import Following, Handler, in_place_of, method_of
from space_router.grpc_api.status import Context, refuse
from space_router.metrics import Metrics

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
