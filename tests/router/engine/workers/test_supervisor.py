"""A worker process is started, heard, started again and ended; nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from doubles.router import HashLanguage
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.errors import WorkerStartFailed
from space_router.engine.request.request import SamplingOptions, ValidRequest
from space_router.engine.workers.supervisor import ExitCause, Supervisor, WorkerDidNotStart, count_oom_kills
from space_router.engine.workers.worker_command import worker_command
from space_router.metrics import Metrics

READY = "import sys, time; print('ready', sys.argv[1], flush=True); time.sleep(60)"


def supervised(code: str, *, start_timeout: float = 20.0, grace: float = 5.0) -> Supervisor:
    """Of `python -c code ADDRESS`."""
    return Supervisor(
        lambda address: [sys.executable, "-S", "-E", "-c", textwrap.dedent(code), address],
        name="worker 0",
        start_timeout=start_timeout,
        grace=grace,
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def state(pid: int) -> str:
    """As the system has it: T for stopped, Z for a zombie, X where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


async def until(condition: Callable[[], bool]) -> None:
    """Another process decides when something holds, so it is asked for again and again."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_the_socket_lies_in_a_folder_only_this_user_can_enter() -> None:
    async with supervised(READY) as supervisor:
        address = await supervisor.start()
        folder = Path(address.removeprefix("unix:")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_leaving_the_block_ends_the_process_and_the_folder() -> None:
    seen: list[object] = []

    async with supervised(READY) as supervisor:
        seen.append(Path((await supervisor.start()).removeprefix("unix:")).parent)
        seen.append(supervisor.pid)
    folder, pid = seen
    assert isinstance(folder, Path)
    assert not folder.exists()
    assert isinstance(pid, int)
    assert not alive(pid)


async def test_a_process_deaf_to_sigterm_is_killed_with_all_its_children() -> None:
    code = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = os.fork()
        if child:
            print("child", child, file=sys.stderr, flush=True)
            print("ready", sys.argv[1], flush=True)
        time.sleep(60)
    """
    pids: list[int] = []

    async with supervised(code, grace=0.05) as supervisor:
        await supervisor.start()
        assert supervisor.pid is not None
        pids.append(supervisor.pid)
        await until(lambda: bool(supervisor._last_words))
        pids.append(int(supervisor._last_words[0].split()[1]))
    assert len(pids) == 2
    assert not alive(pids[0])
    await until(lambda: state(pids[1]) in "ZX")  # the system's own reaper sees a killed grandchild in its time


async def test_starting_again_gives_a_new_process_at_a_new_address() -> None:
    async with supervised(READY) as supervisor:
        first, pid = await supervisor.start(), supervisor.pid
        supervisor.reset_backoff()
        assert await supervisor.start() != first
        assert pid is not None
        assert not alive(pid)
        assert supervisor.pid not in (None, pid)
        assert supervisor.num_starts == 2


async def test_a_process_that_ends_before_it_is_ready_leaves_its_last_words() -> None:
    async with supervised("import sys; print('no model at /x', file=sys.stderr); sys.exit(3)") as supervisor:
        with pytest.raises(WorkerDidNotStart, match=r"ended with code 3 before it was ready(.|\n)*no model at /x"):
            await supervisor.start()
        assert supervisor.pid is None


BUSY = """
import sys, time
for step in range(9):
    print("busy with step", step, flush=True)
    time.sleep(0.5)
print("ready", sys.argv[1], flush=True)
time.sleep(60)
"""


async def test_a_process_that_says_it_is_busy_has_its_time_anew() -> None:
    """A download takes longer than a start may."""

    async with supervised(BUSY, start_timeout=4.0) as supervisor:
        assert (await supervisor.start()).startswith("unix:")


async def test_a_process_that_is_never_ready_is_ended_after_its_time() -> None:
    async with supervised("import time; time.sleep(60)", start_timeout=0.05) as supervisor:
        with pytest.raises(WorkerDidNotStart, match=r"was not ready within 0\.05 s"):
            await supervisor.start()
        assert supervisor.pid is None


async def test_what_the_worker_logs_is_passed_on_line_by_line(capfd: pytest.CaptureFixture[str]) -> None:
    long = "x" * 200_000
    async with supervised(
        f"import sys; print('x' * 200_000 + '\\nhello', file=sys.stderr, flush=True); {READY}"
    ) as supervisor:
        await supervisor.start()
        await until(lambda: len(supervisor._last_words) == 2)
    lines = capfd.readouterr().err.splitlines()
    assert f"worker 0: {long}" in lines
    assert "worker 0: hello" in lines


@pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGKILL, ExitCause.EXTERNAL), (signal.SIGSTOP, ExitCause.EXTERNAL), (signal.SIGSEGV, ExitCause.CRASHED)],
)
async def test_who_ended_a_worker_is_asked_of_the_system(number: signal.Signals, cause: ExitCause) -> None:
    if count_oom_kills() is None:
        pytest.skip("this kernel does not count whom it kills for want of memory")
    async with supervised(READY) as supervisor:
        await supervisor.start()
        pid = supervisor.pid
        assert pid is not None
        os.kill(pid, number)
        await until(lambda: state(pid) in "TZX")
        assert await supervisor.find_exit_cause() is cause


async def test_a_worker_that_hangs_is_not_asked_to_leave_before_the_next_is_started() -> None:
    async with supervised(READY, grace=20.0) as supervisor:
        await supervisor.start()
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGSTOP)
        clock = asyncio.get_running_loop().time
        begun = clock()
        await supervisor.start()
        assert clock() - begun < 10, "it would not have heard SIGTERM"


def scripted_argv(*more: str) -> Callable[[ServeConfig, str], list[str]]:
    def argv(config: ServeConfig, address: str) -> list[str]:
        return [*worker_command(config, address, module="doubles.router"), *more]

    return argv


async def test_a_killed_worker_process_is_started_again_and_its_streams_go_on() -> None:
    request = ValidRequest("r", tuple(range(10, 16)), SamplingOptions(seed=0), max_tokens=300)
    ids = list(request.prompt_ids)
    from space_proto import worker_pb2

    sampling = worker_pb2.Sampling(seed=0, temperature=1.0)
    while len(ids) < 306:
        ids.append(HashLanguage(range(4, 250)).next_id(ids, 6, sampling))

    metrics = Metrics()
    argv = scripted_argv("--step-seconds", "0.001", "--num-blocks", "64")
    async with Engine(ServeConfig(), metrics, worker_argv=argv) as engine:
        await engine.wait_ready()
        tokens: list[int] = []
        async with engine.submit(request) as stream:
            async for delta in stream:
                if not tokens:
                    pid = engine.connections[0].source.pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                tokens += delta.tokens
        assert tokens == ids[6:]
        assert metrics.value("spaceserve_worker_restarts_total") == 1
        engine.check()


async def test_a_worker_that_cannot_start_is_one_clear_error_and_no_loop() -> None:
    async with Engine(ServeConfig(), Metrics(), worker_argv=scripted_argv("--fail", "no model at /x")) as engine:
        supervisor = engine.connections[0].source
        with pytest.raises(WorkerStartFailed, match="no model at /x"):
            await engine.wait_ready()
        assert supervisor.num_starts == 1


async def test_a_worker_whose_router_is_killed_ends_itself(tmp_path: Path) -> None:
    router = """
        import asyncio, sys
        from space_router.config import ServeConfig
        from space_router.engine.engine import Engine
        from space_router.metrics import Metrics
        from space_router.engine.workers.worker_command import worker_command

        async def main():
            argv = lambda config, address: worker_command(config, address, module="doubles.router")
            async with Engine(ServeConfig(), Metrics(), worker_argv=argv) as engine:
                await engine.wait_ready()
                print(engine.connections[0].source.pid, flush=True)
                await asyncio.sleep(60)

        asyncio.run(main())
    """

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(router),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    process.kill()
    await process.wait()
    await until(lambda: not alive(pid))
