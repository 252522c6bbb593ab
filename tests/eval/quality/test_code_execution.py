"""A program passes only by running to its end, every limit bites, and nothing runs unless the user allowed it."""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from space_eval.__main__ import main
from space_eval.quality import command
from space_eval.quality.code_execution import FLAG, End, ExecutionLimits, ExecutionResult, run_program

SMALL = ExecutionLimits(seconds=20.0, memory=256 << 20, file_bytes=1 << 16)


def failure(program: str) -> str:
    """Why the program failed."""
    outcome = run_program(program, SMALL)
    assert outcome.end is End.FAILED, outcome
    return outcome.detail


@pytest.mark.parametrize(
    "words",
    [
        ["quality", "--tasks", "humaneval=absent.jsonl"],
        ["quality", "--self-check", "--data", "absent.jsonl"],
        ["paper", "--tasks", "human_eval", "--data", "human_eval=HERE"],
    ],
)
def test_no_program_of_a_model_runs_without_leave(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "code.jsonl"
    file.write_text('{"task_id": "a", "prompt": "def f():", "test": "check(f)"}\n', encoding="utf-8")
    monkeypatch.setattr("subprocess.Popen", lambda *given, **words: pytest.fail("a program was run"))
    assert main([word.replace("HERE", str(file)) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "runs programs that the model writes, with your rights. Give --allow-code-execution" in line


def test_tasks_without_programs_need_no_leave(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert not parser.parse_args([]).allow_code_execution
    assert parser.parse_args([FLAG]).allow_code_execution


def test_a_program_that_runs_to_its_last_line_passes() -> None:
    outcome = run_program("import math, dataclasses\nassert math.gcd(6, 4) == 2\nprint('done')")
    assert (outcome.end, outcome.detail, outcome.passed) == (End.PASSED, "", True)


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
    outcome = run_program(program, ExecutionLimits(seconds=0.5))
    assert (outcome.end, outcome.detail) == (End.TIMED_OUT, "more than 0.5 s")
    assert outcome.seconds < 30


def test_a_program_that_ignores_signals_is_ended_all_the_same() -> None:
    ignoring = "import signal\nfor s in (1, 2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    assert run_program(ignoring, ExecutionLimits(seconds=0.5)).end is End.TIMED_OUT


def test_the_processor_time_ends_a_program() -> None:
    outcome = run_program("while True: pass", ExecutionLimits(seconds=60.0, cpu_seconds=1))
    assert (outcome.end, outcome.detail) == (End.TIMED_OUT, "more than 1 s of processor")


def test_a_gigabyte_is_out_of_memory() -> None:
    outcome = run_program("block = bytearray(1 << 30)", SMALL)
    assert (outcome.end, outcome.detail) == (End.OUT_OF_MEMORY, "more than 256 MiB")


def test_a_crash_is_a_kill_with_its_signal() -> None:
    outcome = run_program("import os; os.abort()", SMALL)
    assert (outcome.end, outcome.detail) == (End.KILLED, "SIGABRT")


def test_a_big_file_is_refused() -> None:
    assert "File too large" in failure("with open('f', 'wb') as f: f.write(bytes(1 << 17)); f.flush()")


def test_output_never_blocks_a_program() -> None:
    assert run_program("import sys\nfor n in range(200): print('x' * 50_000)\nsys.stderr.write('y')", SMALL).passed


def test_the_folder_is_its_own_and_gone_afterwards() -> None:
    folder = failure("import os\nopen('f', 'w').write('x')\nassert os.listdir() == ['f']\nraise OSError(os.getcwd())")
    assert not Path(folder.removeprefix("OSError: ")).exists()


def test_the_environment_is_empty_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    seen = failure("import os, sys\nraise OSError(sorted(os.environ), sys.flags.isolated, sys.flags.no_site)")
    assert seen == "OSError: [Errno ['HOME', 'LANG', 'PATH', 'TMPDIR']] 1: 1"


def test_programs_run_side_by_side() -> None:
    def run(n: int) -> ExecutionResult:
        return run_program(f"assert {n} % 2 == 0, {n}", SMALL)

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(run, range(8)))
    assert [outcome.passed for outcome in outcomes] == [True, False] * 4
