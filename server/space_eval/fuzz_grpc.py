"""Hostile messages: of gRPC clients to the router, of a router to the worker, of a worker to the router."""

from __future__ import annotations

from random import Random
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from space_proto import generate_pb2, worker_pb2
from space_router.engine.errors import ProtocolViolation
from space_router.engine.live_request import LiveRequest
from space_router.engine.model_facts import ModelFacts
from space_router.engine.queue import RequestQueue
from space_router.engine.request import Sampling, ValidRequest
from space_router.engine.scheduler import Scheduler
from space_router.grpc_face.server import GrpcServer
from space_router.testing import Script, ScriptedBatch, ScriptedWorker

from space_eval.fuzz_front import Front
from space_eval.fuzz_target import Finding
from space_eval.fuzz_values import fill, spoiled

GENERATE = "/spaceserve.v1.Generate/"
BAD = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNIMPLEMENTED}
SECONDS = 20.0


class GrpcMessages:
    """What clients may send to `spaceserve.v1.Generate`."""

    name = "grpc messages"

    def __init__(self) -> None:
        self._front = Front()

    async def __aenter__(self) -> GrpcMessages:
        await self._front.open()
        self._server = await GrpcServer(self._front.service, "127.0.0.1", 0).__aenter__()
        self._channel = grpc.aio.insecure_channel(self._server.address)
        self._generate: Any = self._channel.unary_stream(GENERATE + "Generate")
        self._unary: dict[Any, Any] = {
            generate_pb2.TokenizeRequest: self._channel.unary_unary(GENERATE + "Tokenize"),
            generate_pb2.DetokenizeRequest: self._channel.unary_unary(GENERATE + "Detokenize"),
            generate_pb2.InfoRequest: self._channel.unary_unary(GENERATE + "Info"),
        }
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()
        await self._server.__aexit__(None, None, None)
        await self._front.close()

    async def settle(self) -> None:
        await self._front.settle()

    async def try_one(self, dice: Random) -> str:
        kind: Any = generate_pb2.GenerateRequest if dice.random() < 0.8 else dice.choice(list(self._unary))
        message: Message = kind()
        if dice.random() < 0.7 and kind is generate_pb2.GenerateRequest:
            message = generate_pb2.GenerateRequest(prompt="a b", max_tokens=2)
        fill(dice, message, dice.choice((0.02, 0.05, 0.3)))
        content = message.SerializeToString()
        if dice.random() < 0.3:
            content = spoiled(dice, content)
        try:
            if kind is generate_pb2.GenerateRequest:
                async for _ in self._generate(content, timeout=SECONDS):
                    pass
            else:
                await self._unary[kind](content, timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in BAD:
                raise Finding(f"{error.code().name}: {error.details()} for {content[:600]!r}") from None
            return error.code().name.lower()
        return "ok"


class WorkerReports:
    """What a worker may say to a router that has given it sequences: believed, or the worker is given up."""

    name = "worker reports"

    async def __aenter__(self) -> WorkerReports:
        self._script = Script(num_blocks=32, block_size=4, window=64)
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def settle(self) -> None: ...

    async def try_one(self, dice: Random) -> str:
        script = self._script
        batch = ScriptedBatch(script)
        facts = ModelFacts.from_hello(ScriptedWorker(script).hello())
        scheduler, queue = Scheduler(facts, max_prefill_rows=16, max_draft_length=None), RequestQueue(9)
        batch.apply(
            worker_pb2.Command(start=worker_pb2.Start(protocol_major=1, max_prefill_rows=16, max_draft_length=3))
        )
        for age in range(dice.randint(1, 4)):
            ids = tuple(range(10, 10 + dice.randint(1, 12)))
            request = ValidRequest(f"r{age}", ids, Sampling(seed=age), max_tokens=dice.randint(1, 12))
            live = LiveRequest(request, request.max_tokens or 1, age, 0.0)
            queue.push(live)
        number = 0
        for _ in range(dice.randint(1, 6)):
            while (head := queue.head()) is not None and (placement := scheduler.placement(head)):
                queue.admitted(head, 0.0)
                scheduler.admit(head, placement)
            scheduler.feed()
            for command in scheduler.take_commands():
                batch.apply(command)
            report = batch.step()
            number = report.report_no
            hostile = worker_pb2.StepReport()
            hostile.CopyFrom(report)
            fill(dice, hostile, dice.choice((0.0, 0.05, 0.3)))
            for part in hostile.sequences:
                if dice.random() < 0.5:
                    fill(dice, part, 0.1)
                    part.seq_id = dice.choice((part.seq_id, 1, 2, 3))
            if dice.random() < 0.8:
                hostile.report_no = number
            if dice.random() < 0.2:
                try:
                    hostile.ParseFromString(spoiled(dice, hostile.SerializeToString()))
                except DecodeError:
                    return "undecodable"
            try:
                scheduler.report(hostile)
            except ProtocolViolation:
                return "refused"
            scheduler.check()
            if hostile != report:
                return "believed"
        return "true"
