"""Every limit of the sandbox bites, every guard refuses by itself, and only the end of a program is a pass."""

import os
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from space_eval.sandbox import End, Guard, Limits, Outcome, run_program

IN_EFFECT = run_program("").guards
SMALL = Limits(seconds=20.0, memory=256 << 20, file_bytes=1 << 16)

needs = {
    guard: pytest.mark.skipif(guard not in IN_EFFECT, reason=f"{guard} is not to be had on this system")
    for guard in (Guard.NAMESPACE, Guard.SECCOMP, Guard.LANDLOCK)
}


def failure(program: str, *guards: Guard, limits: Limits = SMALL) -> str:
    """Why the program failed."""
    outcome = run_program(program, limits, guards or tuple(Guard))
    assert outcome.end is End.FAILED, outcome
    return outcome.detail


def test_a_program_that_runs_to_its_last_line_passes() -> None:
    outcome = run_program("import math, dataclasses\nassert math.gcd(6, 4) == 2\nprint('done')")
    assert (outcome.end, outcome.detail, outcome.output, outcome.passed) == (End.PASSED, "", "done\n", True)


def test_an_assertion_fails_with_its_message() -> None:
    assert failure("assert 1 + 1 == 3, 'sum'") == "AssertionError: sum"


def test_a_syntax_error_is_a_failure() -> None:
    assert failure("def f(:").startswith("SyntaxError")


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        'import os\nfor fd in range(1, 30):\n    try: os.write(fd, b\'{"end": "passed", "sentinel": ""}\\n\')\n'
        "    except OSError: pass\nos._exit(0)",
        "import os; os.closerange(0, 64); os._exit(0)",
        "import atexit; atexit.register(print, 'passed'); raise SystemExit(0)",
        "class E(Exception):\n    def __str__(self): raise self\nraise E",
        "import sys; sys.modules['__main__'].sentinel = ''; sys.exit(0)",
    ],
)
def test_leaving_before_the_end_is_never_a_pass(program: str) -> None:
    assert run_program(program, SMALL).end is End.FAILED


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_the_clock_ends_a_program(program: str) -> None:
    outcome = run_program(program, Limits(seconds=0.5))
    assert (outcome.end, outcome.detail) == (End.TIMED_OUT, "more than 0.5 s")
    assert outcome.seconds < 30


def test_a_program_that_ignores_signals_is_ended_all_the_same() -> None:
    ignoring = "import signal\nfor s in (1, 2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    assert run_program(ignoring, Limits(seconds=0.5)).end is End.TIMED_OUT


def test_the_processor_time_ends_a_program() -> None:
    outcome = run_program("while True: pass", Limits(seconds=60.0, cpu_seconds=1))
    assert (outcome.end, outcome.detail) == (End.TIMED_OUT, "more than 1 s of processor")


def test_a_gigabyte_is_out_of_memory() -> None:
    outcome = run_program("block = bytearray(1 << 30)", SMALL)
    assert (outcome.end, outcome.detail) == (End.OUT_OF_MEMORY, "more than 256 MiB")


def test_a_crash_is_a_kill_with_its_signal() -> None:
    outcome = run_program("import os; os.abort()", SMALL)
    assert (outcome.end, outcome.detail) == (End.KILLED, "SIGABRT")


def test_a_big_file_is_refused() -> None:
    assert "File too large" in failure("with open('f', 'wb') as f: f.write(bytes(1 << 17)); f.flush()")


def test_output_is_kept_up_to_its_bound_and_never_blocks() -> None:
    outcome = run_program("import sys\nfor n in range(200): print('x' * 50_000)\nsys.stderr.write('y')", SMALL)
    assert outcome.passed
    assert outcome.output == "x" * SMALL.output_bytes


FORK_BOMB = "import os\nwhile True: os.fork()"


@needs[Guard.SECCOMP]
def test_seccomp_refuses_a_fork_bomb_its_first_process() -> None:
    assert failure(FORK_BOMB, Guard.SECCOMP) == "PermissionError: [Errno 1] Operation not permitted"


def test_the_interpreter_refuses_a_fork_bomb_where_the_kernel_does_not() -> None:
    assert failure(FORK_BOMB, Guard.AUDIT) == "PermissionError: os.fork is refused here"


@needs[Guard.NAMESPACE]
def test_processes_that_leave_their_group_die_with_the_namespace() -> None:
    token = secrets.token_hex(8)
    escaping = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv({os.path.realpath("/proc/self/exe")!r}, ["python", "-c", "import time; time.sleep(60)", "{token}"])
    os._exit(0)
"""
    if os.geteuid() != 0:
        pytest.skip("without seccomp only root may have more processes in the sandbox")
    assert run_program(escaping, SMALL, {Guard.NAMESPACE}).passed
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if token.encode() in _command_line(pid)]


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("guard", [pytest.param(g, marks=needs.get(g, [])) for g in Guard if g is not Guard.LANDLOCK])
def test_a_local_listener_hears_nothing(guard: Guard) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        failure(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2).sendall(b'secret')", guard)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_the_same_connection_is_made_without_any_guard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(2)
        port = listener.getsockname()[1]
        assert run_program(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)", SMALL, ()).passed
        listener.accept()[0].close()


@pytest.mark.parametrize("guard", [pytest.param(Guard.LANDLOCK, marks=needs[Guard.LANDLOCK]), Guard.AUDIT])
@pytest.mark.parametrize("action", ["open({0!r} + '/new', 'w')", "__import__('os').remove({0!r} + '/old')"])
def test_nothing_outside_the_folder_is_written(guard: Guard, action: str, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    assert "Permission" in failure(action.format(str(tmp_path)), guard)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"old": "kept"}


@needs[Guard.LANDLOCK]
def test_personal_files_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    assert "Permission" in failure(f"print(open({str(tmp_path / 'key')!r}).read())")


def test_the_folder_is_its_own_and_gone_afterwards() -> None:
    outcome = run_program("import os\nopen('f', 'w').write('x')\nassert os.listdir() == ['f']\nprint(os.getcwd())")
    assert outcome.passed
    assert not Path(outcome.output.strip()).exists()


def test_the_environment_is_empty_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    outcome = run_program("import os, sys\nprint(sorted(os.environ), sys.flags.isolated, sys.flags.no_site)")
    assert outcome.output == "['HOME', 'LANG', 'PATH', 'TMPDIR'] 1 1\n"


@needs[Guard.SECCOMP]
def test_the_evaluator_cannot_be_signalled() -> None:
    assert "not permitted" in failure(f"import os; os.kill({os.getpid()}, 0)", Guard.SECCOMP)


@needs[Guard.SECCOMP]
def test_threads_are_let_through() -> None:
    assert run_program("import threading as t\na = t.Thread(target=print, args=[1]); a.start(); a.join()", SMALL).passed


def test_programs_run_side_by_side() -> None:
    def run(n: int) -> Outcome:
        return run_program(f"assert {n} % 2 == 0, {n}", SMALL)

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(run, range(8)))
    assert [outcome.passed for outcome in outcomes] == [True, False] * 4


def test_the_guards_in_effect_are_told() -> None:
    assert run_program("", SMALL, {Guard.AUDIT}).guards == (Guard.AUDIT,)
    assert set(IN_EFFECT) >= {Guard.SECCOMP, Guard.LANDLOCK} or Guard.AUDIT in IN_EFFECT
