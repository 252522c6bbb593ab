"""Router and workers on a Ray cluster, without Ray: the application's settings, and its replicas."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from doubles.router import Script, ScriptedWorker
from space_common.worker.secret import SecretFile
from space_router.config import ServeConfig
from space_router.engine.workers.supervisor import WorkerDidNotStart, worker_command
from space_router.engine.workers.worker_connection import Link, LinkRefused, Watchdog
from space_router.errors import ConfigError
from space_router.ray_cluster.cluster import ELSEWHERE, Cluster, config_file, main
from space_router.ray_cluster.replicas import FIGURE_SECONDS, Present, RouterReplica, WorkerReplica, write_secret
from space_router.ray_cluster.scaling import Scaling


def test_flags_of_serve_and_numbers_of_workers_come_as_text_or_as_yaml_reads_them() -> None:
    cluster = Cluster.of({"model": "demo", "max_workers": 3, "min_workers": "2", "speculation": False, "exact": True})
    assert (cluster.min_workers, cluster.max_workers) == (2, 3)
    assert Cluster.of({"min_workers": 4}).max_workers == 4, "as many as the fewest"
    config = cluster.config()
    assert (config.model, config.speculation, config.exact) == ("demo", "off", "on")


def test_the_gpus_of_a_worker_are_its_ranks() -> None:
    config = Cluster.of({"gpus_per_worker": 2}).config()
    command = worker_command(config, "10.0.0.1:50051")
    assert command[command.index("--tensor-parallel") + 1] == "2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_workres": 3}, "There is no argument 'max_workres'"),
        ({"max_workers": 0}, "max_workers='0': must be a whole number from 1 to 1024"),
        ({"min_workers": 3, "max_workers": 2}, "min_workers=3 is more than max_workers=2"),
        ({"gpus_per_worker": 2, "tensor_parallel": 4}, "each rank has one GPU"),
        ({"block_size": 7}, "--block-size='7'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_cure(arguments: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster.of(arguments)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_flag_that_would_do_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="does nothing on a Ray cluster"):
        Cluster.of({name: "1"})


class Seen:
    """What Serve's autoscaler shows of three workers."""

    target_num_replicas = 2

    def __init__(self, *figures: float) -> None:
        self.aggregated_metrics = {"requests": dict(enumerate(figures))} if figures else {}


@pytest.mark.parametrize(
    ("figures", "wanted"), [((), 2), ((0.0,), 0), ((8.0, 8.0, 0.0), 1), ((8.1, 7.9), 2), ((24.0,), 3)]
)
def test_there_is_a_worker_for_every_so_many_requests(figures: tuple[float, ...], wanted: int) -> None:
    assert Scaling(8)(Seen(*figures)) == (wanted, {})


def test_the_policy_needs_nothing_of_ours_for_serve_pickles_it_alone() -> None:
    code = (
        "import runpy, sys; from pathlib import Path; runpy.run_path(sys.argv[1]); "
        "print([name for name in sys.modules if name.startswith('space_')])"
    )
    words = [sys.executable, "-c", code, inspect.getfile(Scaling)]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_command_prints_a_config_file_that_serve_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=demo", "max_workers=3", "gpus_per_worker=0", "--host", "0.0.0.0"]) == 0
    reported = yaml.safe_load(capsys.readouterr().out)
    (application,) = reported["applications"]
    assert reported["http_options"] == {"host": "0.0.0.0", "port": 8000}
    assert application["import_path"] == "space_router.ray_cluster.app:app"
    assert Cluster.of(application["args"]).max_workers == 3


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 2
    assert "'demo' is no NAME=VALUE" in capsys.readouterr().err
    assert main(["port=80"]) == 2
    assert "`http_options` of the Serve config" in capsys.readouterr().err


def test_the_file_beside_the_images_is_what_the_command_prints() -> None:
    arguments = {"model": "Qwen/Qwen3-8B", "min_workers": "1", "max_workers": "8"}
    file = Path(__file__).parents[2] / "docker/ray.yaml"
    assert file.read_text() == config_file(arguments, host="0.0.0.0", port=8000) + "\n"


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_application_names_the_cure() -> None:
    with pytest.raises(ImportError, match=r"pip install 'spaceserve\[ray\]'"):
        importlib.import_module("space_router.ray_cluster.app")


LIMIT = 60.0
SECRET = "a secret of thirty-two characters".replace(" ", "-")
CONFIG = ServeConfig(model="demo", drain_timeout=0.5, worker_start_timeout=LIMIT)


def scripted(config: ServeConfig, address: str, secret_file: Path) -> Sequence[str]:
    return [sys.executable, "-m", "doubles.router", "--listen", address, "--worker-secret-file", str(secret_file)]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  conditions of every kind, none of which is an event
        await asyncio.sleep(0.01)


async def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def is_healthy(replica: WorkerReplica) -> bool:
    try:
        replica.check_health()
    except WorkerDidNotStart:
        return False
    return True


async def test_a_worker_that_is_killed_listens_again_at_the_same_address_and_none_is_left_behind() -> None:
    replica = WorkerReplica(CONFIG, "127.0.0.1", scripted)
    await replica.start()
    address = replica.meet(7, SECRET)
    assert replica.record_autoscaling_stats() == {"requests": 7.0}
    assert await listens(address)
    first = replica.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: replica.pid not in (None, first))
    while not await listens(address):  # noqa: ASYNC110  nothing says when
        await asyncio.sleep(0.01)
    assert replica.meet(0, SECRET) == address
    replica.check_health()
    await replica.stop()
    assert replica.pid is None
    assert not await listens(address)


async def test_a_worker_takes_the_secret_of_each_router_that_asks_and_refuses_the_others(tmp_path: Path) -> None:
    file, other = tmp_path / "router", tmp_path / "stranger"
    replica = WorkerReplica(CONFIG, "127.0.0.1", scripted)
    await replica.start()
    for number in range(2):  # a router, and the one that takes its place
        write_secret(file, f"{SECRET}-{number}")
        write_secret(other, f"{SECRET}-{number + 1}")
        address = replica.meet(0, f"{SECRET}-{number}")
        async with Link(address, watchdog=Watchdog(LIMIT), secret=SecretFile(file)) as link:
            assert link.hello.num_blocks
        with pytest.raises(LinkRefused, match="has not proven that it knows this worker's secret"):
            async with Link(address, watchdog=Watchdog(LIMIT), secret=SecretFile(other)):
                pytest.fail("a router with another secret was heard")
    await replica.stop()


async def test_a_number_of_requests_is_believed_for_as_long_as_a_router_asks() -> None:
    now = [0.0]
    replica = WorkerReplica(CONFIG, "127.0.0.1", scripted, clock=lambda: now[0])
    replica.meet(64, SECRET)
    for now[0], figure in ((FIGURE_SECONDS, 64.0), (FIGURE_SECONDS + 1.0, 0.0)):
        assert replica.record_autoscaling_stats() == {"requests": figure}
    replica.meet(3, SECRET)
    assert replica.record_autoscaling_stats() == {"requests": 3.0}, "of the router that took its place"
    await replica.stop()


async def test_workers_that_are_not_placed_are_named_once_with_what_they_wait_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = 0

    async def meet(num_requests: int, secret: str) -> Present:
        nonlocal asked
        asked += 1
        return Present(frozenset(), True)

    router = RouterReplica(
        CONFIG, meet, meet_seconds=0.01, min_workers=2, explain=lambda: "each asks for 1 CPU", placing_seconds=0.0
    )
    await router.start()
    await until(lambda: asked > 5)
    await router.stop()
    lines = [record.getMessage() for record in caplog.records if "min_workers" in record.getMessage()]
    assert len(lines) == 1
    assert "0 of min_workers=2 workers are placed and answer; each asks for 1 CPU" in lines[0]


async def test_a_replica_whose_worker_does_not_start_says_its_last_words() -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(WorkerDidNotStart, match="no such model"):
        await WorkerReplica(CONFIG, "127.0.0.1", lambda config, address, file: words).start()


async def test_a_replica_whose_worker_does_not_come_back_is_not_healthy() -> None:
    starts: list[str] = []

    def once(config: ServeConfig, address: str, secret_file: Path) -> Sequence[str]:
        starts.append(address)
        return (
            scripted(config, address, secret_file)
            if len(starts) == 1
            else [sys.executable, "-c", "raise SystemExit(3)"]
        )

    replica = WorkerReplica(CONFIG, "127.0.0.1", once)
    await replica.start()
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGKILL)
    await until(lambda: not is_healthy(replica))
    with pytest.raises(WorkerDidNotStart, match="ended with code 3"):
        replica.check_health()
    await replica.stop()


async def test_the_router_serves_once_a_worker_answers_and_keeps_those_that_missed_one_question(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    async with AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(ScriptedWorker(Script(eos_ids=()), secret=SecretFile(file)))
            for _ in range(2)
        ]
        answers = [Present(frozenset(), True)]
        reported: list[int] = []

        async def meet(num_requests: int, secret: str) -> Present:
            write_secret(file, secret)
            reported.append(num_requests)
            if not answers:
                raise ConnectionError("the controller is away")
            return answers[-1]

        router = RouterReplica(CONFIG, meet, meet_seconds=0.01)
        application = await router.start()
        stack.push_async_callback(router.stop)
        engine = router.service.engine
        transport = httpx.ASGITransport(application)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://router"))
        assert (await client.get("/health")).status_code == 503
        answers.append(Present(frozenset({one.address, two.address}), True))
        await until(lambda: engine.load().num_workers_up == 2)
        assert (await client.get("/health")).status_code == 200
        for unsure in (Present(frozenset({two.address}), False), None):  # one did not answer; nobody could be asked
            answers[:] = [] if unsure is None else [unsure]
            asked = len(reported)
            await until(lambda asked=asked: len(reported) > asked + 3)  # type: ignore[misc]
            assert engine.load().num_workers_up == 2
        answers.append(Present(frozenset({two.address}), True))
        await one.drained.wait()
        body = {"prompt": "a", "max_tokens": 5}
        assert (await client.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"] == 5
        assert reported[0] == 0
