"""`spaceserve.v1.Generate`: the same validation, engine and text processing as HTTP, with protobuf messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

import grpc.aio
from space_common.tracing import parent_of
from space_proto import generate_pb2, generate_pb2_grpc

from space_router.api.openai.chat import conversation_text
from space_router.api.openai.fields import ChatBody
from space_router.api.ops.operating import VERSION
from space_router.api.request_builder import RequestBuilder
from space_router.api.service import Service
from space_router.api_keys import ApiKeys
from space_router.errors import InvalidRequest, SlowReader
from space_router.grpc_api.event import Events, shown
from space_router.grpc_api.interceptors import authorization
from space_router.grpc_api.request import conversation, read, refuse_unknown
from space_router.grpc_api.status import Context, answering
from space_router.http_server.body import validate
from space_router.http_server.responses import in_thread_if_long

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


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


ROUNDED = 0.02
"""Share of a deadline that may be left here when it has passed at the client, because gRPC rounds it up."""


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
            events = Events(asked, service.name_of(asked.plan), service.text.tokenizer)
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
        """Return the token ids of a text or chat."""
        reply = generate_pb2.TokenizeReply()
        async with answering(context, self._service.metrics):
            builder = self._builder(context)
            reply.ids.extend(await in_thread_if_long(request.ByteSize(), _ids, builder, request))
            reply.max_model_len = builder.facts.window
        return reply

    async def Detokenize(
        self, request: generate_pb2.DetokenizeRequest, context: Context
    ) -> generate_pb2.DetokenizeReply:
        """Return the text of token ids."""
        reply = generate_pb2.DetokenizeReply()
        async with answering(context, self._service.metrics):
            refuse_unknown(request)
            ids = self._builder(context).check_ids(request.ids, "ids")
            decode = self._service.text.tokenizer.decode
            reply.text = await in_thread_if_long(
                request.ByteSize(), decode, ids, skip_special_tokens=request.skip_special_tokens
            )
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
            reply.max_draft_length, reply.num_masks = facts.max_draft_length, facts.num_masks
            reply.synthetic_acceptance.extend(facts.synthetic_acceptance)
        return reply

    @asynccontextmanager
    async def _admitted(self, context: Context) -> AsyncIterator[None]:
        """Count a generating call while the block runs. Raises ApiError if the queue or the key's limit is full."""
        self._service.check_room()
        with self._service.rate_limits.of(self._key(context)).request():
            yield

    def _builder(self, context: Context) -> RequestBuilder:
        """Return a request builder for the call's API key."""
        return self._service.builder(self._key(context))

    def _key(self, context: Context) -> str:
        return self._keys.name_of(authorization(context.invocation_metadata())) or ""


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
    return encode(conversation_text(builder, body), add_special_tokens=given)
