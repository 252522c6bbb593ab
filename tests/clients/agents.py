"""Runs a coding agent, headless, on a folder with a wrong program, against a server whose model follows a script."""

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = Path(os.environ["SPACESERVE_CLIENT"])  # what was installed of the agent

TASK = "calc.py is wrong: add(2, 3) must be 5. Fix it, run test_calc.py, and say what was wrong."
WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
TEST = "import calc\n\nassert calc.add(2, 3) == 5, calc.add(2, 3)\nprint('all passed')\n"
ANSWER = "add subtracted: it is fixed, and the test has passed."

TOOL_RESULT = "<tool_response>"
SECONDS = 240.0


def tool_call(name: str, **arguments: object) -> str:
    """A call as Hermes and Qwen write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Run:
    """What became of a task."""

    status: int
    stdout: str
    stderr: str
    program: str  # calc.py afterwards
    requests: Sequence[Mapping[str, object]]

    def bodies(self, path: str) -> list[dict[str, object]]:
        """Bodies of the requests to a route, each of which must have been answered with 200."""
        found = [each for each in self.requests if each["path"] == path and each["method"] == "POST"]
        assert found, self.requests
        assert {each["status"] for each in found} == {200}, [(each["status"], each["path"]) for each in found]
        return [json.loads(str(each["body"])) for each in found]


def run(
    replies: Callable[[Path], Sequence[str]],
    command: Callable[[str], Sequence[str]],
    *,
    marker: str = TOOL_RESULT,
    **environment: Callable[[str], str],
) -> Run:
    """`replies`: of the model, given the folder of the task. `command`, `environment`: given the server's URL."""
    with tempfile.TemporaryDirectory() as place:
        work, home = Path(place, "work"), Path(place, "home")
        work.mkdir()
        home.mkdir()
        (work / "calc.py").write_text(WRONG)
        (work / "test_calc.py").write_text(TEST)
        with scripted(Path(place), replies(work), marker) as (url, record):
            made = {name: value(url) for name, value in environment.items()}
            done = subprocess.run(
                command(url), cwd=work, env={**os.environ, "HOME": str(home), **made}, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=SECONDS, check=False,
            )  # fmt: skip
            lines = record.read_text().splitlines() if record.exists() else []
        program = (work / "calc.py").read_text()
        return Run(done.returncode, done.stdout, done.stderr, program, [json.loads(line) for line in lines])


@contextmanager
def scripted(place: Path, replies: Sequence[str], marker: str = TOOL_RESULT) -> Iterator[tuple[str, Path]]:
    """A server whose model gives the reply with the number of markers in the prompt; its URL and its requests' file.

    `place`: a folder for its files.
    """
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    record, script = place / "requests.jsonl", place / "script.json"
    script.write_text(json.dumps({"marker": marker, "replies": list(replies)}))
    words = [os.environ["SPACESERVE_PYTHON"], str(HERE / "agents" / "server.py"), str(port), str(record), str(script)]
    with (
        (place / "server.log").open("w") as log,
        subprocess.Popen(
            words, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(HERE.parent / "support")}
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            end = time.monotonic() + 60
            while not _is_ready(url):
                is_alive = process.poll() is None
                assert is_alive, (place / "server.log").read_text()[-2000:]
                assert time.monotonic() < end, "the server is not ready"
                time.sleep(0.1)
            yield url, record
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
