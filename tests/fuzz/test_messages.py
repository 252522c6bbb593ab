"""Hostile messages: of gRPC clients to the router, of a worker to the router, of a router to a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from doubles.router import Script, ScriptedBatch, ScriptedWorker
from doubles.worker import ScriptedModel
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy
from space_proto import generate_pb2, worker_pb2
from space_router.engine.errors import ProtocolViolation
from space_router.engine.queueing.queue import RequestQueue
from space_router.engine.request.request import SamplingOptions, ValidRequest
from space_router.engine.request.request_state import RequestState
from space_router.engine.request.worker_messages import WorkerModelFacts
from space_router.engine.scheduler import Scheduler
from space_router.grpc_api.server import GrpcServer
from space_server.speculation.controller import FixedLayout
from space_server.worker import ProtocolError, Worker

from fuzz.harness import SECONDS, Finding, Fuzzer, filled, often, serving, sometimes, spoiled

Draw = Callable[[SearchStrategy[Any]], Any]

# ----------------------------------------------------------------------------------------------- clients

GENERATE = generate_pb2.GenerateRequest
REQUESTS: dict[type[Message], str] = {
    GENERATE: "Generate",
    generate_pb2.TokenizeRequest: "Tokenize",
    generate_pb2.DetokenizeRequest: "Detokenize",
    generate_pb2.InfoRequest: "Info",
    generate_pb2.EmbedRequest: "Embed",
}
_CODE = grpc.StatusCode
BAD = {_CODE.UNKNOWN, _CODE.INTERNAL, _CODE.DATA_LOSS, _CODE.UNIMPLEMENTED, _CODE.UNAVAILABLE}


@st.composite
def client_messages(draw: Draw) -> tuple[type[Message], bytes]:
    """Type and bytes of a request to `spaceserve.v1.Generate`."""
    kind: type[Message] = draw(st.sampled_from([*[GENERATE] * 9, *REQUESTS]))
    start = GENERATE(prompt="a b", max_tokens=2) if kind is GENERATE and draw(st.booleans()) else kind()
    content = filled(start, draw(st.sampled_from((1, 2, 8)))).map(lambda message: message.SerializeToString())
    return kind, draw(often(content, spoiled, 3))


def test_hostile_grpc_messages_get_an_answer_or_the_status_of_a_wrong_request(fuzzer: Fuzzer) -> None:
    async def ask(method: Any, kind: type[Message], content: bytes) -> str:
        try:
            if kind is GENERATE:
                async for _ in method(content, timeout=SECONDS):
                    pass
            else:
                await method(content, timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in BAD:
                raise Finding(f"{error.code().name}: {error.details()}") from None
            return error.code().name.lower()
        return "ok"

    context = serving()
    router = fuzzer.wait(context.__aenter__())
    server = GrpcServer(router.service, "127.0.0.1", 0)
    fuzzer.wait(server.__aenter__())

    async def opened() -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(server.address)

    channel = fuzzer.wait(opened())
    try:
        methods: dict[type[Message], Any] = {
            kind: (channel.unary_stream if kind is GENERATE else channel.unary_unary)(f"/spaceserve.v1.Generate/{name}")
            for kind, name in REQUESTS.items()
        }
        fuzzer.run(
            client_messages(),
            lambda sent: fuzzer.wait(ask(methods[sent[0]], *sent)),
            few=40,
            settle=lambda: fuzzer.wait(router.settle()),
        )
    finally:
        fuzzer.wait(channel.close())
        fuzzer.wait(server.__aexit__(None, None, None))
        fuzzer.wait(context.__aexit__(None, None, None))


# ----------------------------------------------------------------------------------------------- reports


@st.composite
def hostile_reports(draw: Draw, true: worker_pb2.StepReport) -> bytes:
    """What a worker may send in place of a true report."""
    report = draw(filled(true, draw(st.sampled_from((0, 1, 3)))))
    for part in report.sequences:
        if draw(st.booleans()):
            part.CopyFrom(draw(filled(part, 1)))
            part.seq_id = draw(st.sampled_from((part.seq_id, 1, 2, 3)))
    if not draw(sometimes(5)):
        report.report_no = true.report_no
    return bytes(draw(often(st.just(report.SerializeToString()), spoiled, 5)))


def test_a_report_is_believed_or_the_worker_is_given_up_and_the_books_balance(fuzzer: Fuzzer) -> None:
    script = Script(num_blocks=32, block_size=4, window=64)
    facts = WorkerModelFacts.from_hello(ScriptedWorker(script).hello())
    start = worker_pb2.Command(start=worker_pb2.Start(protocol_major=1, max_prefill_rows=16, max_draft_length=3))

    def attempt(data: DataObject) -> str:
        batch, queue = ScriptedBatch(script), RequestQueue(9)
        scheduler = Scheduler(facts, max_prefill_rows=16, max_draft_length=None)
        batch.apply(start)
        sizes = st.tuples(st.integers(1, 12), st.integers(1, 12))
        for age, (num_ids, max_tokens) in enumerate(data.draw(st.lists(sizes, min_size=1, max_size=4))):
            ids = tuple(range(10, 10 + num_ids))
            request = ValidRequest(f"r{age}", ids, SamplingOptions(seed=age), max_tokens=max_tokens)
            queue.push(RequestState(request, max_tokens, age, 0.0))
        for _ in range(data.draw(st.integers(1, 6))):
            while (head := queue.head()) is not None and (placement := scheduler.placement(head)):
                queue.admitted(head, 0.0)
                scheduler.admit(head, placement)
            scheduler.grant_pages()
            for command in scheduler.take_commands():
                batch.apply(command)
            report = batch.step()
            hostile = worker_pb2.StepReport()
            try:
                hostile.ParseFromString(data.draw(hostile_reports(report)))
                scheduler.report(hostile)
            except DecodeError:
                return "undecodable"
            except ProtocolViolation:
                return "refused"
            scheduler.check()
            if hostile != report:
                return "believed"
        return "true"

    fuzzer.run(st.data(), attempt, few=150)


# ---------------------------------------------------------------------------------------------- commands

MOST_STEPS = 12
START = worker_pb2.Command(start=worker_pb2.Start(protocol_major=1, max_prefill_rows=64, max_draft_length=3))


def _good(seq_id: int) -> worker_pb2.Admit:
    return worker_pb2.Admit(
        seq_id=seq_id, ids=[5, 6, 7], num_prompt=3, pages=range(8 * seq_id, 8 * seq_id + 6),
        limits=worker_pb2.Limits(max_tokens=8), max_draft_length=3,
    )  # fmt: skip


@st.composite
def hostile_commands(draw: Draw, number: int) -> bytes:
    """Bytes of a command that a router of another version might send."""
    command = worker_pb2.Command()
    match draw(st.sampled_from(("admit",) * 6 + ("extend", "release", "any", "any"))):
        case "admit":
            command.admit.CopyFrom(draw(filled(_good(number), draw(st.integers(0, 2)))))
            if not draw(sometimes(5)):
                command.admit.seq_id = number
        case "extend":
            extend = worker_pb2.Extend(seq_id=draw(st.integers(0, number)), pages=[draw(st.integers(0, 70))])
            command.extend.CopyFrom(extend)
        case "release":
            command.release.CopyFrom(worker_pb2.Release(seq_id=draw(st.integers(0, number))))
        case _:
            command = draw(filled(command, 3))
    return bytes(draw(often(st.just(command.SerializeToString()), spoiled, 7)))


@st.composite
def conversations(draw: Draw) -> list[tuple[bytes, int]]:
    """Commands in order, each with the number of steps after it."""
    started = [] if draw(sometimes(20)) else [(START.SerializeToString(), 0)]
    numbers = range(1, draw(st.integers(2, 5)))
    return [*started, *((draw(hostile_commands(number)), draw(st.integers(0, 3))) for number in numbers)]


def test_a_hostile_command_harms_its_own_sequence_alone_or_ends_the_session(fuzzer: Fuzzer) -> None:
    def made() -> Worker:
        controller = FixedLayout.full(3)
        return Worker(ScriptedModel(), num_blocks=64, block_size=4, max_sequences=8, controller=controller)

    worker = made()

    def renewed() -> Worker:
        """The worker without sequences; another one where it has been asked to end."""
        nonlocal worker
        worker = made() if worker.draining else worker
        worker.reset()
        return worker

    def attempt(commands: list[tuple[bytes, int]]) -> str:
        renewed()
        try:
            for content, num_steps in commands:
                worker.apply(worker_pb2.Command.FromString(content))
                for _ in range(num_steps):
                    worker.step()
            for _ in range(MOST_STEPS):
                worker.step()
        except ProtocolError:
            return "refused"
        except DecodeError:
            return "undecodable"
        return "applied"

    def settle() -> None:
        """A good sequence gets its text, whatever came before it."""
        renewed()
        worker.apply(START)
        worker.apply(worker_pb2.Command(admit=_good(1)))
        reports = [report for _ in range(MOST_STEPS) if (report := worker.step()) is not None]
        assert sum(len(part.tokens) for report in reports for part in report.sequences) == 8

    fuzzer.run(conversations(), attempt, few=60, settle=settle)
