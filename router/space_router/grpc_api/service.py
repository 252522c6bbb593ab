"""`spaceserve.v1.Generate`: one way through door, engine and text with HTTP, written as messages."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TypeAlias

import grpc.aio
from space_proto import generate_pb2, generate_pb2_grpc

from space_router.api.openai.chat import conversation_text
from space_router.api.openai.chat_fields import ChatBody
from space_router.api.ops.operating import VERSION
from space_router.api.request_builder import RequestBuilder
from space_router.api.service import Service
from space_router.api_keys import ApiKeys
from space_router.errors import InvalidRequest, SlowReader
from space_router.grpc_api.access import authorization
from space_router.grpc_api.event import Events
from space_router.grpc_api.request import read, refuse_unknown
from space_router.grpc_api.shown import shown
from space_router.grpc_api.status import Context, answering
from space_router.grpc_api.traced import call_span
from space_router.grpc_api.values import conversation
from space_router.http_server.body import validate
from space_router.http_server.connection import beside

GenerateContext: TypeAlias = grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateEvent]


ROUNDED = 0.02
"""What is left here, of all of it, of a deadline that has passed where it was set: gRPC rounds it up on its way."""


class GenerateService(generate_pb2_grpc.GenerateServicer):
    """The service of one server."""

    def __init__(self, service: Service, keys: ApiKeys) -> None:
        self._service = service
        self._keys = keys

    async def Generate(self, request: generate_pb2.GenerateRequest, context: GenerateContext) -> None:
        """Admitted before anything is sent; left, by its end or its client's, it holds nothing any more."""
        with call_span(self._service.tracer, "spaceserve.v1.Generate/Generate", context.invocation_metadata()):
            await self._generate(request, context)

    async def _generate(self, request: generate_pb2.GenerateRequest, context: GenerateContext) -> None:
        service = self._service
        async with answering(context, service.metrics), self._let_in(context):
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
                except (asyncio.CancelledError, grpc.aio.InternalError):  # the second: what was written cannot be sent
                    left = context.time_remaining()
                    if left is not None and left <= ROUNDED * seconds:
                        running.overdue()
                    raise

    async def _write(self, context: GenerateContext, event: generate_pb2.GenerateEvent) -> None:
        """Returns when the client's window has room for it. Raises SlowReader where it has none for too long."""
        seconds = self._service.config.slow_reader_timeout
        try:
            async with asyncio.timeout(seconds):
                await context.write(event)
        except TimeoutError:
            self._service.metrics.slow_readers_cut_total.inc()
            raise SlowReader(f"Nothing was read for {seconds:g} s (`--slow-reader-timeout`).") from None

    async def Tokenize(self, request: generate_pb2.TokenizeRequest, context: Context) -> generate_pb2.TokenizeReply:
        """Ids as a prompt would have them."""
        reply = generate_pb2.TokenizeReply()
        async with answering(context, self._service.metrics):
            builder = self._builder(context)
            reply.ids.extend(await beside(request.ByteSize(), _ids, builder, request))
            reply.max_model_len = builder.facts.window
        return reply

    async def Detokenize(
        self, request: generate_pb2.DetokenizeRequest, context: Context
    ) -> generate_pb2.DetokenizeReply:
        """The text of ids."""
        reply = generate_pb2.DetokenizeReply()
        async with answering(context, self._service.metrics):
            refuse_unknown(request)
            ids = self._builder(context).check_ids(request.ids, "ids")
            decode = self._service.text.tokenizer.decode
            reply.text = await beside(request.ByteSize(), decode, ids, skip_special_tokens=request.skip_special_tokens)
        return reply

    async def Info(self, request: generate_pb2.InfoRequest, context: Context) -> generate_pb2.InfoReply:
        """What is known by now."""
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
    async def _let_in(self, context: Context) -> AsyncIterator[None]:
        """The time of a call that generates, if its key may still make one and there is room. Raises ApiError."""
        self._service.check_room()
        with self._service.allowances.of(self._key(context)).request():
            yield

    def _builder(self, context: Context) -> RequestBuilder:
        """For the key that the call came with."""
        return self._service.builder(self._key(context))

    def _key(self, context: Context) -> str:
        return self._keys.name_of(authorization(context.invocation_metadata())) or ""


def _ids(builder: RequestBuilder, request: generate_pb2.TokenizeRequest) -> list[int]:
    """Of a text, or of a conversation as the template writes it, special tokens and all."""
    refuse_unknown(request)
    if request.HasField("text") == bool(request.messages):
        raise InvalidRequest("Give one of `text` and `messages`.", param="text")
    encode = builder.text.tokenizer.encode
    given = request.add_special_tokens if request.HasField("add_special_tokens") else not request.messages
    if not request.messages:
        return encode(request.text, add_special_tokens=given)
    body = validate(ChatBody, {"messages": conversation(request.messages)}, {})
    return encode(conversation_text(builder, body), add_special_tokens=given)
