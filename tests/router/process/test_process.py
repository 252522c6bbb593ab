"""The router as a process: real clients, signals, ports, in front of a scripted worker."""

import http.client
import json
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import huggingface_hub
import openai
import pytest
from doubles.tokenizers import write_checkpoint
from grpc_health.v1 import health_pb2, health_pb2_grpc
from space_proto import generate_pb2, generate_pb2_grpc
from space_router import grpc_api

pytestmark = pytest.mark.e2e
StartServer = Callable[..., AbstractContextManager[Any]]
REPLY = ["--reply", "hello world, é😀 and so on; ", "--accepts", "sometimes"]


def test_the_openai_client_completes_and_streams(start_server: StartServer) -> None:
    with (
        start_server("--chat-template", "chatml", worker=REPLY) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.completions.create(model="tiny", prompt="Say", max_tokens=12, seed=1)
        assert whole.choices[0].text.startswith("hello world, é")
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        fields: Any = {"stream_options": {"include_usage": True}, "extra_body": {"speculation": 2}}
        with client.completions.create(model="tiny", prompt="Say", max_tokens=12, stream=True, **fields) as stream:
            events = list(stream)
        assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens == 12
        statistics: Any = events[-1].model_extra
        assert statistics["spaceserve"]["steps"] >= 4
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=9, stop="so on", logprobs=True
        )
        assert chat.choices[0].message.content == "hello world, é"[: len(chat.choices[0].message.content or "")]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="tiny", prompt="x", temperature=3)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")


def test_a_stream_ends_whole_when_the_server_is_told_to_stop(start_server: StartServer) -> None:
    slow = [*REPLY, "--step-seconds", "0.02"]
    with start_server(worker=slow) as server:
        place = urlsplit(server.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port)
        body = json.dumps({"prompt": "x", "max_tokens": 400, "stream": True, "seed": 1})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        first = answer.readline()
        server.router.process.terminate()
        server.router.wait_for("stopping")
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert httpx.get(f"{server.url}/readyz").status_code == 503
        assert httpx.get(f"{server.url}/livez").status_code == 200
        rest = answer.read()
        connection.close()
        assert (first + rest).endswith(b"data: [DONE]\n\n")
        assert server.router.process.wait(60) == 0


def test_a_stream_beyond_the_drain_timeout_ends_with_an_error_event(start_server: StartServer) -> None:
    with (
        start_server("--drain-timeout", "0.1", worker=[*REPLY, "--step-seconds", "0.05"]) as server,
        httpx.stream(
            "POST", f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1000, "stream": True}, timeout=60
        ) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        server.router.process.terminate()
        last = [line for line in lines if line][-1]
        assert "error" in json.loads(last.removeprefix("data: "))
        assert server.router.process.wait(60) == 0


def test_a_server_that_others_reach_and_that_asks_for_no_key_says_so(start_server: StartServer) -> None:
    asks_nobody = "WARNING .*any client that reaches 0.0.0.0 may use this server: it asks for no key"
    with start_server("--host", "0.0.0.0", worker=REPLY) as server:
        server.router.wait_for(asks_nobody)


def test_a_server_for_this_machine_alone_says_nothing_of_keys(start_server: StartServer) -> None:
    with start_server(worker=REPLY) as server:
        assert not [line for line in server.router.lines if "key" in line]


def test_the_hugging_face_client_generates_and_streams(start_server: StartServer) -> None:
    with start_server(worker=REPLY) as server:
        client = huggingface_hub.InferenceClient(server.url)
        assert client.text_generation("Say", max_new_tokens=3, return_full_text=False) == "hello wor"
        details = client.text_generation(
            "Say", max_new_tokens=3, details=True, seed=1, do_sample=True, return_full_text=False
        )
        assert details.details is not None
        assert (details.details.finish_reason, details.details.seed) == ("length", 1)
        assert "".join(token.text for token in details.details.tokens) == details.generated_text
        stream = client.text_generation(
            "Say", max_new_tokens=12, stream=True, details=True, stop=["and"], return_full_text=False
        )
        events = list(stream)
        assert events[-1].generated_text == "".join(event.token.text for event in events)


def test_a_server_that_is_still_starting_stops_when_it_is_told_to(starting: Any) -> None:
    assert starting.stop() == 0
    assert any("stopping" in line for line in starting.lines)


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
        server.router.process.terminate()
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
        assert server.router.process.wait(60) == 0


@pytest.mark.parametrize("flags", [("--drain-timeout", "0.1"), ()], ids=["in time", "at once"])
def test_a_stream_that_is_not_done_when_the_server_ends_does_not_look_complete(
    start_server: StartServer, flags: tuple[str, ...]
) -> None:
    endless = generate_pb2.GenerateRequest(prompt="x", max_tokens=2000)
    with start_server("--grpc-port", "0", *flags, worker=SLOW) as server, channel_to(server) as channel:
        events = generate_pb2_grpc.GenerateStub(channel).Generate(endless)
        next(events)
        server.router.process.terminate()
        server.router.wait_for("stopping")
        if not flags:
            server.router.process.terminate()
        with pytest.raises(grpc.RpcError) as caught:
            list(events)
        assert caught.value.code() in {grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
        assert server.router.process.wait(60) == 0
        assert not any("Traceback" in line for line in server.router.lines)


def test_watchers_do_not_hold_up_the_end(start_server: StartServer) -> None:
    with start_server("--grpc-port", "0", worker=SLOW) as server, channel_to(server) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        server.router.process.terminate()
        assert server.router.process.wait(20) == 0  # and not only after the 30 s that requests have


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


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_that_is_taken_ends_the_start_with_one_line(tmp_path: Path, flag: str) -> None:
    front = ["router", "--model", str(write_checkpoint(tmp_path)), "--worker-address", "a:1", "--port", "0"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "space_router", *front, flag, port]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert line.endswith(f"{flag}={port}: cannot listen there: Address already in use.")
