"""The gRPC server: its port, limits and services."""

import logging
from types import TracebackType

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from space_common.certificate import server_credentials
from space_proto import generate_pb2, generate_pb2_grpc

from space_router.api.service import Service
from space_router.errors import ConfigError
from space_router.grpc_api import health
from space_router.grpc_api.interceptors import NUM_GUESTS, ConcurrencyLimit, GrpcAccess, Readable
from space_router.grpc_api.service import GenerateService
from space_router.http_server.listening import bound_buffers

GENERATE: str = generate_pb2.DESCRIPTOR.services_by_name["Generate"].full_name

log = logging.getLogger(__name__)

MAX_MESSAGE = 256 * 1024**2
"""Maximum size of an event in bytes; events with many prompt logprobs are split long before."""


class GrpcServer:
    """Listens from construction on, serves inside its block.

    async with GrpcServer(service, "127.0.0.1", 50051) as face:
        face.address
        await face.stop(5.0)    # lets calls finish; leaving the block ends them at once
    """

    def __init__(self, service: Service, host: str, port: int) -> None:
        """`port` 0: any free port. Raises ConfigError if the address cannot be bound."""
        keys, config = service.keys, service.config
        unread_ms = round(1000 * config.slow_reader_timeout)
        self._server = grpc.aio.server(
            interceptors=[
                ConcurrencyLimit(config.max_connections, service.metrics),
                GrpcAccess(keys, service.metrics),
                Readable(service.metrics),
            ],
            options=[
                ("grpc.max_receive_message_length", config.max_body),
                ("grpc.max_send_message_length", MAX_MESSAGE),
                ("grpc.so_reuseport", 0),  # otherwise two servers could share a port
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),  # allow clients to ping idle streams
                ("grpc.max_allowed_incoming_connections", config.max_connections + NUM_GUESTS),
                ("grpc.max_concurrent_streams", config.max_connections + NUM_GUESTS),
                # A connection whose client does not read is closed, a little later than its streams.
                ("grpc.keepalive_time_ms", unread_ms),
                ("grpc.keepalive_timeout_ms", 2 * unread_ms),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
            ],
        )
        self._health = health.Health(service, (GENERATE,))
        generate_pb2_grpc.add_GenerateServicer_to_server(  # type: ignore[no-untyped-call]
            GenerateService(service, keys), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (GENERATE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        shown = f"[{host}]" if ":" in host else host
        try:
            certificate = config.certificate()
            if certificate is None:
                bound = self._server.add_insecure_port(f"{shown}:{port}")
            else:
                bound = self._server.add_secure_port(f"{shown}:{port}", server_credentials(certificate))
        except RuntimeError:
            raise ConfigError(
                f"--host={host!r} --grpc-port={port}: cannot listen there: the port is taken, or the address is not "
                "this machine's."
            ) from None
        if bound_buffers(bound, config.client_buffer) == 0:
            log.info("--client-buffer does not bound gRPC clients here: their sockets cannot be found")
        self.address = f"{shown}:{bound}"

    async def __aenter__(self) -> "GrpcServer":
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop(0.0)

    async def stop(self, seconds: float) -> None:
        """Accept no more calls; end running calls after `seconds`."""
        self._health.close()
        await self._server.stop(seconds)
