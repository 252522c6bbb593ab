"""gRPC in the router's process: its port, its keys, its end."""

import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from doubles.tokenizers import write_checkpoint
from grpc_health.v1 import health_pb2, health_pb2_grpc
from space_proto import generate_pb2, generate_pb2_grpc
from space_router import grpc_api

pytestmark = pytest.mark.e2e
StartServer = Callable[..., AbstractContextManager[Any]]
SLOW = ["--reply", "hello world, é😀 and so on; ", "--accepts", "sometimes", "--step-seconds", "0.02"]
REQUEST = generate_pb2.GenerateRequest(prompt="x", max_tokens=240, seed=1)


@contextmanager
def channel_to(server: Any) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.router.wait_for(r"gRPC on (\S+)")[1]) as channel:
        yield channel


def test_a_stream_ends_whole_when_the_server_is_told_to_stop_and_no_other_begins(start_server: StartServer) -> None:
    with start_server("--grpc-port", "0", worker=SLOW) as server, channel_to(server) as channel:
        stub, health = generate_pb2_grpc.GenerateStub(channel), health_pb2_grpc.HealthStub(channel)
        events = stub.Generate(REQUEST)
        ids = list(next(events).token_ids)
        server.router.running.terminate()
        server.router.wait_for("stopping")
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Generate(REQUEST))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert dict(caught.value.trailing_metadata())["error-code"] == "draining"
        for event in events:
            ids += event.token_ids
        assert (len(ids), event.finish_reason) == (240, generate_pb2.FINISH_REASON_LENGTH)
        assert events.code() == grpc.StatusCode.OK
        assert server.router.running.wait(60) == 0


@pytest.mark.parametrize("flags", [("--drain-timeout", "0.1"), ()], ids=["in time", "at once"])
def test_a_stream_that_is_not_done_when_the_server_ends_does_not_look_complete(
    start_server: StartServer, flags: tuple[str, ...]
) -> None:
    endless = generate_pb2.GenerateRequest(prompt="x", max_tokens=2000)
    with start_server("--grpc-port", "0", *flags, worker=SLOW) as server, channel_to(server) as channel:
        events = generate_pb2_grpc.GenerateStub(channel).Generate(endless)
        next(events)
        server.router.running.terminate()
        server.router.wait_for("stopping")
        if not flags:
            server.router.running.terminate()
        with pytest.raises(grpc.RpcError) as caught:
            list(events)
        assert caught.value.code() in {grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
        assert server.router.running.wait(60) == 0
        assert not any("Traceback" in line for line in server.router.lines)


def test_watchers_do_not_hold_up_the_end(start_server: StartServer) -> None:
    with start_server("--grpc-port", "0", worker=SLOW) as server, channel_to(server) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        server.router.running.terminate()
        assert server.router.running.wait(20) == 0  # and not only after the 30 s that requests have


def test_the_example_in_the_packages_own_words_prints_an_answer(
    start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (grpc_api.__doc__ or "").splitlines()
    example = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))
    with start_server("--grpc-port", "0", worker=SLOW) as server:
        address = server.router.wait_for(r"gRPC on (\S+)")[1]
        assert example.count('"127.0.0.1:50051"') == 1
        exec(compile(example.replace("127.0.0.1:50051", address), "example", "exec"), {})
    assert capsys.readouterr().out.startswith("hello world, é😀 and so on; hello")


def test_without_the_flag_there_is_no_grpc(start_server: StartServer) -> None:
    with start_server(worker=SLOW) as server:
        assert server.router.stop() == 0
        assert not any("gRPC" in line for line in server.router.lines)


def test_a_port_that_is_taken_ends_the_start_with_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        front = ["router", "--model", str(write_checkpoint(tmp_path)), "--port", "0", "--worker-address", "a:1"]
        ran = subprocess.run(
            [sys.executable, "-m", "space_router", *front, "--grpc-port", port],
            capture_output=True,
            text=True,
            check=False,
        )
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert line.endswith(f"--grpc-port={port}: cannot listen there: Address already in use.")
