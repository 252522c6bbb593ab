"""A server that is told to end under load cuts no stream, over HTTP and gRPC, and exits 0."""

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import grpc
import httpx
import pytest
from space_eval.bench.server_process import ServerProcess
from space_proto import generate_pb2, generate_pb2_grpc

Serve = Callable[..., AbstractContextManager[ServerProcess]]
NUM_HTTP, NUM_GRPC = 16, 8
SECONDS = 120.0
BODY: dict[str, Any] = {"max_tokens": 200, "temperature": 0.8, "ignore_eos": True}


def over_http(url: str, seed: int, begun: Callable[[], None] | None = None) -> list[int]:
    """The ids of a stream that must come to its end."""
    body = {**BODY, "prompt": "x = ", "seed": seed, "stream": True, "return_token_ids": True}
    ids: list[int] = []
    finish = None
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as answer:
        lines = [line for line in _lines(answer, begun) if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        ids += choice["token_ids"]
        finish = choice["finish_reason"] or finish
    assert finish == "length"
    return ids


def _lines(answer: httpx.Response, begun: Callable[[], None] | None) -> list[str]:
    lines = []
    for line in answer.iter_lines():
        lines.append(line)
        if begun is not None and len(lines) == 5:
            begun()
    return lines


def over_grpc(channel: grpc.Channel, seed: int, begun: Callable[[], None] | None = None) -> list[int]:
    request = generate_pb2.GenerateRequest(prompt="x = ", seed=seed, **BODY)
    ids: list[int] = []
    call = generate_pb2_grpc.GenerateStub(channel).Generate(request, timeout=SECONDS)
    for number, event in enumerate(call):
        ids += event.token_ids
        if begun is not None and number == 3:
            begun()
    assert event.finish_reason == generate_pb2.FINISH_REASON_LENGTH
    assert call.code() == grpc.StatusCode.OK
    return ids


@pytest.mark.parametrize(
    "worker_dies", [pytest.param(False, marks=pytest.mark.slow), True], ids=["in peace", "while its worker is killed"]
)
def test_every_stream_ends_whole_after_sigterm_under_load(serve: Serve, worker_dies: bool) -> None:
    begun = threading.Semaphore(0)
    with (
        serve("--grpc-port", "0", "--drain-timeout", "100") as server,
        grpc.insecure_channel(server.grpc_address) as channel,
        ThreadPoolExecutor(NUM_HTTP + NUM_GRPC) as pool,
    ):
        alone = over_http(server.url, 1), over_grpc(channel, 2)
        streams = [pool.submit(over_http, server.url, 1, begun.release) for _ in range(NUM_HTTP)]
        streams += [pool.submit(over_grpc, channel, 2, begun.release) for _ in range(NUM_GRPC)]
        for _ in streams:
            assert begun.acquire(timeout=SECONDS)
        server.signal(signal.SIGTERM)
        if worker_dies:
            os.kill(server.worker_pids()[-1], signal.SIGKILL)
        told = [stream.result(SECONDS) for stream in streams]
        assert told == [alone[0]] * NUM_HTTP + [alone[1]] * NUM_GRPC
        assert server.wait() == 0
