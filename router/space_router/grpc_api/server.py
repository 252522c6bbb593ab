"""The gRPC server: `spaceserve.v1.Generate` on the engine that HTTP uses, health, port and limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from space_common.certificate import server_credentials
from space_common.grpc_calls import stop_server
from space_common.tracing import parent_of
from space_proto import generate_pb2, generate_pb2_grpc

from space_router.api.openai.chat import conversation_text
from space_router.api.openai.fields import ChatBody
from space_router.api.ops.operating import VERSION
from space_router.api.pooling import embeddings
from space_router.api.pooling.sources import counted, request_id
from space_router.api.request_builder import PromptOptions, RequestBuilder, max_forced_drafts
from space_router.api.service import Service
from space_router.api_keys import ApiKeys
from space_router.errors import ConfigError, InvalidRequest, SlowReader, Unauthorized, Unavailable
from space_router.grpc_api.interceptors import NUM_GUESTS, CallChecks, Context, answering, authorization
from space_router.grpc_api.messages import Events, conversation, embedding_body, read, refuse_unknown, shown
from space_router.http_server.body import validate
from space_router.http_server.listening import bound_buffers

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WATCH_SECONDS = 0.1  # maximum delay of a change for watchers

HealthContext: TypeAlias = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """SERVING while new requests are accepted; the whole server ("") and each service have the same status.

    Watches need no key, so their number is bounded, and one task looks for all of them whether the status changes.
    """

    def __init__(self, service: Service, names: Sequence[str], max_watches: int) -> None:
        self._service = service
        self._names = ("", *names)
        self._max_watches = max_watches
        self.watches: dict[asyncio.Event, bool] = {}  # what wakes each, and whether it knows that it is SERVING
        self._looking: asyncio.Task[None] | None = None  # while there are watches
        self._closed = False

    def close(self) -> None:
        """End all watches, so that they do not delay shutdown."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        for changed in self.watches:
            changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: HealthContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            names = ", ".join(filter(None, self._names))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"There is no service of this name; there are {names}.")
        return self._now(request.service)

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> health_pb2.HealthListResponse:
        return health_pb2.HealthListResponse(statuses={name: self._now(name) for name in self._names})

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: HealthContext) -> None:
        async with answering(context, self._service.metrics):
            self._check_room()
        changed, sent = asyncio.Event(), None
        try:
            while not self._closed:
                changed.clear()
                self.watches[changed] = self._service.ready
                if self._looking is None:
                    self._looking = asyncio.create_task(self._look(), name="health")
                if (now := self._now(request.service)) != sent:
                    await context.write(now)
                    sent = now
                await changed.wait()
        finally:
            self.watches.pop(changed, None)

    def _check_room(self) -> None:
        """Raise Unavailable if there are as many watches as there may be."""
        if len(self.watches) >= self._max_watches:
            message = (
                f"There are {self._max_watches} watches of the status already, the most (`--max-connections`). Use "
                "Check, or come again later."
            )
            raise Unavailable(message, reason="too_many_connections")

    async def _look(self) -> None:
        """Wake each watch that knows another status."""
        try:
            while self.watches:
                ready = self._service.ready
                for changed, known in self.watches.items():
                    if known is not ready:
                        changed.set()
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            self._looking = None

    def _now(self, name: str) -> health_pb2.HealthCheckResponse:
        if name not in self._names:
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        ready = self._service.ready
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)


@contextmanager
def call_span(tracer: Tracer | None, method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Iterator[None]:
    """Run the block in a span; no effect without a tracer. `method`: package.Service/Method."""
    if tracer is None:
        yield
        return
    from opentelemetry.trace import SpanKind

    said = {key: str(value) for key, value in metadata or () if key in ("traceparent", "tracestate")}
    parent = parent_of(said.get("traceparent", ""), said.get("tracestate", ""))
    attributes = {"rpc.system": "grpc", "rpc.method": method}
    with tracer.start_as_current_span(method, parent, SpanKind.SERVER, attributes, record_exception=False):
        yield


GenerateContext: TypeAlias = grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateEvent]


ROUNDED = 0.02  # share of a deadline that may be left here when it has passed at the client, because gRPC rounds it up


class GenerateService(generate_pb2_grpc.GenerateServicer):
    """The service of one server."""

    def __init__(self, service: Service, keys: ApiKeys) -> None:
        self._service = service
        self._keys = keys

    async def Generate(self, request: generate_pb2.GenerateRequest, context: GenerateContext) -> None:
        """Stream the events of one generation. Its resources are freed when it ends or the client leaves."""
        with call_span(self._service.tracer, "spaceserve.v1.Generate/Generate", context.invocation_metadata()):
            await self._generate(request, context)

    async def _generate(self, request: generate_pb2.GenerateRequest, context: GenerateContext) -> None:
        service = self._service
        async with answering(context, service.metrics), self._admitted(context):
            seconds = context.time_remaining()
            asked = await read(service, self._builder(context), request, seconds)
            events = Events(asked, service.name_of(asked.plan, request.model), service.text.tokenizer)
            async with service.run(asked.plan) as running:
                try:
                    await context.send_initial_metadata((("x-request-id", asked.plan.request_id),))
                    async with aclosing(shown(running)) as deltas:
                        async for one in deltas:
                            for event in events.of(one, running):
                                await self._write(context, event)
                except (asyncio.CancelledError, grpc.aio.InternalError):  # InternalError: an event could not be sent
                    left = context.time_remaining()
                    if left is not None and left <= ROUNDED * seconds:
                        running.overdue()
                    raise

    async def _write(self, context: GenerateContext, event: generate_pb2.GenerateEvent) -> None:
        """Send an event once the client's flow control window has room. Raises SlowReader after a timeout."""
        seconds = self._service.config.slow_reader_timeout
        try:
            async with asyncio.timeout(seconds):
                await context.write(event)
        except TimeoutError:
            self._service.metrics.slow_readers_cut_total.inc()
            raise SlowReader(f"Nothing was read for {seconds:g} s (`--slow-reader-timeout`).") from None

    async def Tokenize(self, request: generate_pb2.TokenizeRequest, context: Context) -> generate_pb2.TokenizeReply:
        reply = generate_pb2.TokenizeReply()
        async with answering(context, self._service.metrics), self._text_work(context, request.ByteSize()):
            builder = self._builder(context)
            size = request.ByteSize()
            reply.ids.extend(await self._service.text_pool.run(builder.key, size, _ids, builder, request))
            reply.max_model_len = builder.facts.window
        return reply

    async def Detokenize(
        self, request: generate_pb2.DetokenizeRequest, context: Context
    ) -> generate_pb2.DetokenizeReply:
        reply = generate_pb2.DetokenizeReply()
        async with answering(context, self._service.metrics), self._text_work(context, request.ByteSize()):
            refuse_unknown(request)
            ids = self._builder(context).check_ids(request.ids, "ids")
            decode = self._service.text.tokenizer.decode
            reply.text = await self._service.text_pool.run(
                self._key(context), request.ByteSize(), decode, ids, skip_special_tokens=request.skip_special_tokens
            )
        return reply

    async def Embed(self, request: generate_pb2.EmbedRequest, context: Context) -> generate_pb2.EmbedReply:
        """Return the vectors of texts. What they hold is freed when the client leaves."""
        service, size, reply = self._service, request.ByteSize(), generate_pb2.EmbedReply()
        with call_span(service.tracer, "spaceserve.v1.Generate/Embed", context.invocation_metadata()):
            async with answering(context, service.metrics), self._text_work(context, size):
                key = self._key(context)
                body = embedding_body(request)
                source, texts, options = embeddings.asked_for(service, key, body)
                made = await service.text_pool.run(key, size, source.tokenise, texts, options)
                reply.prompt_tokens = source.num_tokens(made)
                reply.request_id, reply.model = request_id("embd", body.request_id), source.name
                await context.send_initial_metadata((("x-request-id", reply.request_id),))
                async with counted(service, key, reply.prompt_tokens):
                    vectors = await source.run(reply.request_id, made)
                    is_normal = body.normalize is not False
                    for one in embeddings.shown(vectors, dimensions=body.dimensions, normalise=is_normal):
                        reply.embeddings.add().values.extend(one)
        return reply

    async def Info(self, request: generate_pb2.InfoRequest, context: Context) -> generate_pb2.InfoReply:
        """Return the model's properties; those of the workers only once one is up."""
        service, facts = self._service, self._service.engine.facts
        reply = generate_pb2.InfoReply(
            model=service.text.name,
            adapters=service.adapters,
            version=VERSION,
            ready=service.ready,
            chat=service.text.chat_template is not None,
            max_choices=service.config.max_choices,
            max_stop_strings=service.config.max_stop_strings,
        )
        if facts is not None:
            reply.max_model_len, reply.vocab_size = facts.window, facts.vocab_size
            reply.dtype, reply.device = facts.dtype, facts.device
            reply.max_draft_length, reply.num_masks = max_forced_drafts(service.config, facts), facts.num_masks
            reply.synthetic_acceptance.extend(facts.synthetic_acceptance)
        return reply

    @asynccontextmanager
    async def _admitted(self, context: Context) -> AsyncIterator[None]:
        """Count a generating call while the block runs. Raises ApiError if the queue or the key's limit is full."""
        self._service.check_room(self._key(context))
        with self._service.rate_limits[self._key(context)].request():
            yield

    @asynccontextmanager
    async def _text_work(self, context: Context, size: int) -> AsyncIterator[None]:
        """Count a call that only tokenises while the block runs. Raises RateLimited."""
        limits = self._service.rate_limits[self._key(context)]
        with limits.request():
            limits.charge_bytes(size)
            yield

    def _builder(self, context: Context) -> RequestBuilder:
        return self._service.builder(self._key(context))

    def _key(self, context: Context) -> str:
        """Return the name of the call's key. Raises Unauthorized if it was revoked since the call was let in."""
        name = self._keys.name_of(authorization(context.invocation_metadata()))
        if name is None:
            raise Unauthorized
        return name


def _ids(builder: RequestBuilder, request: generate_pb2.TokenizeRequest) -> list[int]:
    """Return the ids of a text, or of a chat rendered by the chat template. Raises InvalidRequest."""
    refuse_unknown(request)
    if request.HasField("text") == bool(request.messages):
        raise InvalidRequest("Give one of `text` and `messages`.", param="text")
    encode = builder.text.tokenizer.encode
    given = request.add_special_tokens if request.HasField("add_special_tokens") else not request.messages
    if not request.messages:
        return encode(request.text, add_special_tokens=given)
    body = validate(ChatBody, {"messages": conversation(request.messages)})
    spans = builder.rendered_spans(conversation_text(builder, body), PromptOptions("messages", given))
    return [id_ for id_, _, _ in spans]


GENERATE: str = generate_pb2.DESCRIPTOR.services_by_name["Generate"].full_name

log = logging.getLogger(__name__)

MAX_MESSAGE = 256 * 1024**2  # maximum size of an event in bytes; events with many prompt logprobs are split long before


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
            interceptors=[CallChecks(config.max_connections, keys, service.metrics)],
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
        self.health = Health(service, (GENERATE,), config.max_connections)
        generate_pb2_grpc.add_GenerateServicer_to_server(  # type: ignore[no-untyped-call]
            GenerateService(service, keys), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        names = (GENERATE, SERVICE_NAME, reflection.SERVICE_NAME)
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

    async def __aenter__(self) -> GrpcServer:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0.0)

    async def stop(self, seconds: float) -> None:
        """Accept no more calls; end running calls after `seconds`."""
        self.health.close()
        await stop_server(self._server, seconds)
