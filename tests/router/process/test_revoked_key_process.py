"""A key that is revoked while the server runs, over HTTP and gRPC; streams that it began end whole."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from space_proto import generate_pb2, generate_pb2_grpc

pytestmark = pytest.mark.e2e
StartServer = Callable[..., AbstractContextManager[Any]]
SECONDS = 5.0  # in which a revoked key must be refused
LONG = {"prompt": "x", "max_tokens": 150, "seed": 1, "ignore_eos": True, "stream": True, "return_token_ids": True}


def replaced(file: Path, text: str) -> None:
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").rename(file)


def status(url: str, key: str) -> int:
    return httpx.post(
        f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"authorization": f"Bearer {key}"}
    ).status_code


def grpc_code(address: str, key: str) -> grpc.StatusCode | None:
    """What a short call ends with; None: it was answered."""
    with grpc.insecure_channel(address) as channel:
        stub = generate_pb2_grpc.GenerateStub(channel)  # type: ignore[no-untyped-call]
        request = generate_pb2.GenerateRequest(prompt="x", max_tokens=1)
        try:
            list(stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),)))
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return None


def test_a_revoked_key_begins_nothing_more_and_its_stream_ends_whole(start_server: StartServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    hashed = "sha256:" + hashlib.sha256(b"sk-b").hexdigest()
    keys.write_text(f"sk-a name=alpha\n{hashed} name=beta\n")
    worker = ["--step-seconds", "0.02", "--draft-length", "0"]
    with start_server("--api-key-file", str(keys), "--grpc-port", "0", worker=worker) as server:
        address = server.router.wait_for(r"gRPC on (\S+)")[1]
        server.router.wait_for("curl .*/v1/completions -H 'Authorization: Bearer KEY' -H 'Content-Type")
        assert [status(server.url, key) for key in ("sk-a", "sk-b", "sk-c", hashed)] == [200, 200, 401, 401]
        lines: list[str] = []
        has_begun = threading.Event()

        def read() -> None:
            headers = {"authorization": "Bearer sk-a"}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, headers=headers, timeout=60) as answer:
                for line in filter(None, answer.iter_lines()):
                    lines.append(line)
                    has_begun.set()

        stream = threading.Thread(target=read)
        stream.start()
        assert has_begun.wait(60)
        replaced(keys, f"{hashed} name=beta\nsk-c name=third operator=yes\n")
        begun = time.monotonic()
        while status(server.url, "sk-a") != 401:
            assert time.monotonic() - begun < SECONDS
        assert stream.is_alive()
        assert grpc_code(address, "sk-a") is grpc.StatusCode.UNAUTHENTICATED
        assert [status(server.url, key) for key in ("sk-b", "sk-c")] == [200, 200]
        assert grpc_code(address, "sk-c") is None
        stream.join(60)
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert sum(len(event["choices"][0]["token_ids"]) for event in events if event["choices"]) == 150

        open_metrics = httpx.get(f"{server.url}/metrics").text
        assert "spaceserve_tokens_per_step" in open_metrics
        assert "alpha" not in open_metrics
        assert "beta" not in open_metrics
        whole = httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer sk-c"}).text
        assert 'spaceserve_key_requests_total{key="alpha"}' in whole

        replaced(keys, "sk-d name=fourth\n")
        server.router.process.send_signal(signal.SIGHUP)
        server.router.wait_for("API keys were read again: 1, 1 new, 2 gone")
        assert [status(server.url, key) for key in ("sk-b", "sk-d")] == [401, 200]
        replaced(keys, "")
        server.router.process.send_signal(signal.SIGHUP)
        server.router.wait_for("stay as they are: .*holds no key")
        assert [status(server.url, key) for key in ("none", "sk-d")] == [401, 200]
        assert not any("sk-" in line for line in server.router.lines if "Authorization" not in line)
        assert server.router.stop() == 0
