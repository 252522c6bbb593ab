"""Real processes over real sockets: `spaceserve` in front of a scripted worker."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from doubles.tokenizers import write_checkpoint

READY_SECONDS = 60


@dataclass
class Process:
    """A process with its lines, as they come."""

    running: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.running.stdout is not None
        for line in self.running.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self.lines.append("(end)")
            self._changed.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line that matches; fails where the process ends without one."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or "(end)" in self.lines, READY_SECONDS)
            match = found()
        if match is None:
            pytest.fail(f"no line matches {pattern!r}:\n" + "\n".join(self.lines))
        return match

    def stop(self) -> int:
        self.running.send_signal(signal.SIGTERM)
        code = self.running.wait(READY_SECONDS)
        self.read_out()
        return code

    def read_out(self) -> None:
        """Wait until all has been read that an ended process said: behind that its pipe may be closed."""
        self._reader.join(READY_SECONDS)


@contextmanager
def process(*command: str) -> Iterator[Process]:
    """A process that does not outlive the block."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPACESERVE_")}
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, "PYTHONUNBUFFERED": "1"},
    ) as running:
        found = Process(running)
        try:
            yield found
        finally:
            if running.poll() is None:
                running.kill()
            found.read_out()


@dataclass
class Server:
    """A router process in front of a scripted worker process."""

    url: str
    router: Process
    worker: Process


StartServer = Callable[..., AbstractContextManager[Server]]


@pytest.fixture
def start_server(tmp_path: Path) -> StartServer:
    """`with start_server("--flag", ..., worker=["--reply", "text"]) as server`: ready to be asked."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_checkpoint(folder)

    @contextmanager
    def start(*flags: str, worker: list[str] | None = None) -> Iterator[Server]:
        with ExitStack() as stack:
            listen = ["--listen", f"unix:{tmp_path}/w.sock", "--tokenizer", str(folder / "tokenizer.json")]
            scripted = stack.enter_context(process("doubles.router", *listen, *(worker or [])))
            address = scripted.wait_for(r"^ready (.*)")[1]
            front = ["router", "--model", str(folder), "--port", "0", "--worker-address", address]
            router = stack.enter_context(process("space_router", *front, *flags))
            url = router.wait_for(r"listening on (\S+)")[1]
            router.wait_for(r"ready: tiny")
            yield Server(url, router, scripted)

    return start


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Process]:
    """A router that has said its first line and will never find its worker."""
    front = ["router", "--model", str(write_checkpoint(tmp_path)), "--port", "0"]
    with process("space_router", *front, "--worker-address", f"unix:{tmp_path}/nobody.sock") as router:
        router.wait_for("connecting to workers")
        yield router
