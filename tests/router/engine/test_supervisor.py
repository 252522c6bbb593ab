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
from space_router.engine.workers.supervisor import (
    Backoff,
    ExitCause,
    Supervisor,
    WorkerDidNotStart,
    cause_of_end,
    cause_of_silence,
    count_oom_kills,
    for_workers,
    processors,
    worker_command,
    worker_sources,
)
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
    supervisor = supervised(READY)
    async with supervisor:
        folder, pid = Path((await supervisor.start()).removeprefix("unix:")).parent, supervisor.pid
    assert not folder.exists()
    assert pid is not None
    assert state(pid) == "X"


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
    supervisor = supervised(code, grace=0.05)
    async with supervisor:
        await supervisor.start()
        pid = supervisor.pid
        assert pid is not None
        await until(lambda: bool(supervisor._last_words))
        child = int(supervisor._last_words[0].split()[1])
    assert state(pid) == "X"
    await until(lambda: state(child) in "ZX")  # the system's own reaper sees a killed grandchild in its time


async def test_starting_again_gives_a_new_process_at_a_new_address() -> None:
    async with supervised(READY) as supervisor:
        first, pid = await supervisor.start(), supervisor.pid
        supervisor.backoff.worked()
        assert await supervisor.start() != first
        assert pid is not None
        assert state(pid) == "X"
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
        from space_router.engine.workers.supervisor import worker_command

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
    await until(lambda: state(pid) == "X")


def test_waits_double_from_a_tenth_of_a_second_to_five_and_start_again_after_success() -> None:
    backoff = Backoff()
    assert [backoff.next() for _ in range(9)] == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    backoff.worked()
    assert [backoff.next() for _ in range(2)] == pytest.approx([0, 0.1])


SOMEBODY, ITSELF = ExitCause.EXTERNAL, ExitCause.CRASHED


@pytest.mark.parametrize(
    ("code", "num_oom_kills", "cause"),
    [
        (-signal.SIGKILL, (3, 3), SOMEBODY),
        (-signal.SIGKILL, (3, 4), ITSELF),
        (-signal.SIGKILL, (None, None), ExitCause.UNKNOWN),
        (-signal.SIGTERM, (None, None), SOMEBODY),
        (-signal.SIGSEGV, (3, 3), ITSELF),
        (1, (3, 3), ITSELF),
    ],
)
def test_a_kill_comes_from_somebody_unless_the_kernel_counts_one_for_want_of_memory(
    code: int, num_oom_kills: tuple[int | None, int | None], cause: ExitCause
) -> None:
    assert cause_of_end(code, num_oom_kills=num_oom_kills) is cause


@pytest.mark.parametrize(("state", "cause"), [("T", SOMEBODY), ("t", SOMEBODY), ("R", ITSELF), ("D", ITSELF)])
def test_a_process_that_is_stopped_did_not_stop_itself(tmp_path: Path, state: str, cause: ExitCause) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a (strange) name) {state} 1 7 7 0\n")
    assert cause_of_silence(7, tmp_path) is cause
    assert cause_of_silence(8, tmp_path) is ITSELF


def test_the_kernels_count_is_read_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 12\nswap_ra 0\n")
    assert count_oom_kills(tmp_path / "vmstat") == 12
    (tmp_path / "vmstat").write_text("nr_free_pages 5\n")
    assert count_oom_kills(tmp_path / "vmstat") is None
    assert count_oom_kills(tmp_path / "none") is None


def flags_of(command: list[str]) -> dict[str, str]:
    return dict(zip(command[4::2], command[5::2], strict=True))


async def test_each_worker_is_shown_its_own_gpus_alone() -> None:
    code = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], file=sys.stderr, flush=True); " + READY
    config = ServeConfig(workers=2, tensor_parallel=2, gpus=("3", "GPU-b", "1", "0", "2"))
    shown = []
    for source in worker_sources(config, lambda config, address: [sys.executable, "-S", "-E", "-c", code, address]):
        assert isinstance(source, Supervisor)
        async with source:
            await source.start()
            await until(lambda source=source: len(source._last_words) == 1)
            shown.append(source._last_words[0])
    assert shown == ["3,GPU-b", "1,0"]


def test_what_was_not_said_is_left_to_the_worker() -> None:
    command = worker_command(ServeConfig(), "unix:/w.sock")
    assert command[:4] == [sys.executable, "-P", "-m", "space_server"]
    flags = flags_of(command)
    assert flags["--listen"] == "unix:/w.sock"
    assert flags["--parent-pid"] == str(os.getpid())
    assert not {"--kv-memory", "--num-blocks", "--max-model-len", "--space-mask-ids", "--num-threads"} & flags.keys()
    assert "--tensor-parallel" not in flags


def test_what_was_said_is_passed_on() -> None:
    config = ServeConfig(
        model="/m",
        kv_memory="1GiB",
        num_blocks=9,
        max_model_len=77,
        space_mask_ids=(5, 6),
        space_num_masks=2,
        num_threads=1,
        powercap="/host/powercap",
        tensor_parallel=2,
        synthetic_acceptance=".78",
        adapter=(("code", "/a"), ("prose", "b")),
    )
    assert worker_command(config, "h:1")[-4:] == ["--adapter", "code=/a", "--adapter", "prose=b"]
    assert flags_of(worker_command(config, "h:1")).items() >= {
        "--model": "/m", "--kv-memory": "1GiB", "--num-blocks": "9", "--max-model-len": "77", "--space-mask-ids": "5,6",
        "--space-num-masks": "2", "--num-threads": "1", "--powercap": "/host/powercap", "--tensor-parallel": "2",
        "--synthetic-acceptance": ".78",
    }.items()  # fmt: skip


def test_the_certificate_for_clients_is_not_a_workers() -> None:
    assert "--tls-cert" not in worker_command(ServeConfig(tls_cert="/c", tls_key="/k"), "h:1")


@pytest.mark.parametrize(
    ("placement", "allowed", "cores"),
    [
        ("apart", {0, 1}, "0"),
        ("apart", {3, 0, 7, 5}, "0,3,5"),
        ("apart", {2}, None),
        ("auto", {0, 1}, "auto"),
        ("auto", {1}, None),
        ("shared", {0, 1, 2}, None),
    ],
)
def test_the_last_processor_is_left_to_the_router(placement: str, allowed: set[int], cores: str | None) -> None:
    assert for_workers(placement, allowed) == cores


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to processors")
def test_the_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert processors() == {0, 1, 2, 3}
    command = worker_command(ServeConfig(placement="apart", workers=2), "h:1")
    assert command[command.index("--cores") + 1] == "0,1,2"
    assert command[command.index("--num-workers") + 1] == "2"
    command = worker_command(ServeConfig(), "h:1")
    assert command[command.index("--cores") + 1] == "auto"
    assert "--cores" not in worker_command(ServeConfig(placement="shared"), "h:1")
    assert "--num-workers" not in worker_command(ServeConfig(), "h:1")
