"""Real processes over real sockets: `spaceserve` in front of a scripted worker."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
from doubles.tokenizers import write_checkpoint
from space_common.process import ModuleProcess

READY_SECONDS = 60


class Process(ModuleProcess):
    """A process that does not outlive the block, with its lines as they come."""

    def __init__(self, *command: str) -> None:
        unset = {name: "" for name in os.environ if name.startswith("SPACESERVE_")}
        super().__init__([sys.executable, "-m", *command], {**unset, "PYTHONUNBUFFERED": "1"}, kept=100_000)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.code is None:
            self.process.kill()
            self.process.wait()
        self.close()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line that matches; fails where the process ends without one."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        with self._news:
            self._news.wait_for(lambda: found() or not self.has_output(), READY_SECONDS)
            match = found()
        if match is None:
            pytest.fail(f"no line matches {pattern!r}:\n{self.last_lines()}")
        return match

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(READY_SECONDS)
        self.close()
        return code


@pytest.fixture
def spawn() -> type[Process]:
    """`with spawn("module", "--flag", ...) as process`."""
    return Process


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
            scripted = stack.enter_context(Process("doubles.router", *listen, *(worker or [])))
            address = scripted.wait_for(r"^ready (.*)")[1]
            front = ["router", "--model", str(folder), "--port", "0", "--worker-address", address]
            router = stack.enter_context(Process("space_router", *front, *flags))
            url = router.wait_for(r"listening on (\S+)")[1]
            router.wait_for(r"ready: tiny")
            yield Server(url, router, scripted)

    return start


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Process]:
    """A router that has said its first line and will never find its worker."""
    front = ["router", "--model", str(write_checkpoint(tmp_path)), "--port", "0"]
    with Process("space_router", *front, "--worker-address", f"unix:{tmp_path}/nobody.sock") as router:
        router.wait_for("connecting to workers")
        yield router
