"""One conversation with one worker, over a real socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest
from doubles.router import Script, ScriptedWorker
from doubles.router.whole_router import Certificate, authority, signed
from space_proto import worker_pb2, worker_pb2_grpc
from space_router.config import ServeConfig, build
from space_router.engine.workers.supervisor import RemoteWorker
from space_router.engine.workers.worker_link import Link, LinkLost, Watchdog, WorkerMismatch

START = worker_pb2.Command(start=worker_pb2.Start(protocol_major=1, max_prefill_rows=64, max_draft_length=3))


def admit(seq_id: int) -> worker_pb2.Command:
    limits = worker_pb2.Limits(max_tokens=3)
    pages = [3 * seq_id, 3 * seq_id + 1, 3 * seq_id + 2]
    return worker_pb2.Command(
        admit=worker_pb2.Admit(seq_id=seq_id, ids=[10, 11, 12], num_prompt=3, pages=pages, limits=limits)
    )


@pytest.mark.parametrize("listen", [None, "127.0.0.1:0"])
async def test_hello_comes_first_and_commands_are_heeded_in_order(listen: str | None) -> None:
    async with ScriptedWorker(listen=listen) as worker:
        async with Link(worker.address, watchdog=Watchdog(5.0)) as link:
            assert link.hello.model_name == "scripted"
            link.send([START, admit(1)])
            link.send([admit(2)])
            report = await link.report()
            assert report.report_no == 1
            assert [part.seq_id for part in report.sequences] == [1, 2]
        worker.check()


async def test_a_worker_that_cannot_be_reached_is_lost() -> None:
    with pytest.raises(LinkLost, match="nobody"):
        async with Link("unix:/nobody.sock", watchdog=Watchdog(5.0)):
            pass


async def test_a_worker_that_dies_is_lost() -> None:
    async with ScriptedWorker() as worker, Link(worker.address, watchdog=Watchdog(5.0)) as link:
        link.send([START])
        worker.kill()
        with pytest.raises(LinkLost, match="died"):
            await link.report()


async def test_a_worker_that_is_silent_for_too_long_is_lost() -> None:
    silent = Script(hang_after_steps=0)
    async with ScriptedWorker(silent) as worker, Link(worker.address, watchdog=Watchdog(0.5)) as link:
        link.send([START])
        with pytest.raises(LinkLost, match=r"said nothing for 0\.[5-7]\d* s"):
            await link.report()


async def test_a_refusal_is_passed_on_in_the_workers_words() -> None:
    refusing = Script(refuse="not you")
    async with ScriptedWorker(refusing) as worker, Link(worker.address, watchdog=Watchdog(5.0)) as link:
        link.send([START])
        with pytest.raises(LinkLost, match="refuses: not you"):
            await link.report()


async def test_another_tokenizer_is_a_mismatch_unless_nobody_says_which() -> None:
    async with ScriptedWorker(Script(tokenizer_hash="theirs")) as worker:
        with pytest.raises(WorkerMismatch, match="tokenizer theirs, this router ours"):
            async with Link(worker.address, watchdog=Watchdog(5.0), tokenizer_hash="ours"):
                pass
        for fine in ("theirs", "", None):
            async with Link(worker.address, watchdog=Watchdog(5.0), tokenizer_hash=fine):
                pass


async def test_one_link_after_another_finds_an_empty_worker() -> None:
    async with ScriptedWorker() as worker:
        for _ in range(2):
            async with Link(worker.address, watchdog=Watchdog(5.0)) as link:
                link.send([START, admit(1)])
                assert (await link.report()).sequences[0].seq_id == 1
        worker.check()


async def test_nothing_is_left_waiting_behind_a_link() -> None:
    async with ScriptedWorker() as worker:
        before = asyncio.all_tasks()
        async with Link(worker.address, watchdog=Watchdog(5.0)) as link:
            link.send([START])
            worker.kill()
            with pytest.raises(LinkLost, match="died"):
                await link.report()
        async with asyncio.timeout(30):
            while any("_consume_request_iterator" in repr(task) for task in asyncio.all_tasks() - before):  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_a_scripted_heart_beats_before_its_router_has_said_anything() -> None:
    async with ScriptedWorker(Script(heartbeat_seconds=0.02)) as worker:
        async with Link(worker.address, watchdog=Watchdog(5.0)) as link:
            assert [(await link.report()).report_no for _ in range(2)] == [1, 2]
            link.send([START, admit(1)])
            while not (report := await link.report()).sequences:
                assert not report.stepped
        worker.check()


async def test_a_router_speaks_to_a_worker_elsewhere_by_mutual_tls(tmp_path: Path) -> None:
    ours, other = authority(tmp_path), authority(tmp_path, "other")
    of_worker, of_router = signed(tmp_path, "worker", ours), signed(tmp_path, "router", ours)

    def config(trusted: Certificate) -> ServeConfig:
        flags = {"worker_tls_ca": trusted.cert, "worker_tls_cert": of_router.cert, "worker_tls_key": of_router.key}
        return build({name: str(path) for name, path in flags.items()} | {"worker_address": "localhost:1"}, {})

    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(ScriptedWorker(), server)  # type: ignore[no-untyped-call]
    pair = (of_worker.key.read_bytes(), of_worker.cert.read_bytes())
    needed = grpc.ssl_server_credentials([pair], ours.cert.read_bytes(), require_client_auth=True)
    address = f"localhost:{server.add_secure_port('localhost:0', needed)}"
    await server.start()
    credentials = RemoteWorker(address, config(ours).worker_certificate()).credentials
    async with Link(address, watchdog=Watchdog(5.0), credentials=credentials) as link:
        assert link.hello.model_name == "scripted"
    for stranger in (RemoteWorker(address, config(other).worker_certificate()).credentials, None):
        with pytest.raises(LinkLost):
            async with Link(address, watchdog=Watchdog(5.0), credentials=stranger):
                pytest.fail("it was heard")
    await server.stop(grace=0)
