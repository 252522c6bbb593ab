"""Python files of the current folder are never executed, whichever command is started in it."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import space_router
from space_eval.bench.server_process import ServerProcess
from space_router.commands.programs import PROGRAMS

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


def test_a_server_and_all_that_it_starts_execute_no_file_of_the_current_folder(marker: Path) -> None:
    """The worker, and the process that tries grammars."""
    with ServerProcess(["--model", "demo", "--num-threads", "1", "--calibration-seconds", "0"]) as server:
        body = {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "[ab]{4}"}}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert executed(marker) == ""


def test_the_doctor_s_look_at_a_worker_executes_no_file_of_the_current_folder(marker: Path) -> None:
    spaceserve = Path(sys.executable).with_name("spaceserve")
    ran = subprocess.run([str(spaceserve), "doctor", "--port", "0", "--json"], capture_output=True, text=True)
    assert (ran.returncode, executed(marker)) == (0, ""), ran.stdout
