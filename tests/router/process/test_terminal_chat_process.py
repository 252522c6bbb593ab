"""`spaceserve chat` as people use it: in a terminal (a pty), from a pipe, and without a server."""

import fcntl
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx

SECONDS = 60.0
REPLY = "def add(a, b):\n    return a + b  # é漢\n"
StartServer = Callable[..., AbstractContextManager[Any]]
COMMAND = [sys.executable, "-m", "space_router", "chat"]
CTRL_C, CTRL_D = "\x03", "\x04"


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    return {**kept, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **more}


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, arguments: Sequence[str], **variables: str) -> None:
        self._master, slave = pty.openpty()
        self._running = subprocess.Popen(
            [*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env=environment(**variables), preexec_fn=_control,
        )  # fmt: skip
        os.close(slave)
        self.shown = ""  # everything so far
        self._seen = 0  # characters of it that were waited for
        self._bytes = b""

    def wait_for(self, pattern: str) -> str:
        """What is shown from where the last pattern ended to the end of this one."""
        limit = time.monotonic() + SECONDS
        while (match := re.search(pattern, self.shown[self._seen :])) is None:
            ready, _, _ = select.select([self._master], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"{pattern!r} was not shown:\n{self.shown}"
            try:
                content = os.read(self._master, 65536)
            except OSError:  # the program has ended
                content = b""
            assert content, f"it ended before {pattern!r}:\n{self.shown}"
            self._bytes += content
            self.shown = self._bytes.decode("utf-8", "ignore").replace("\r\n", "\n")
        found = self.shown[self._seen : self._seen + match.end()]
        self._seen += match.end()
        return found

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def code(self) -> int:
        """The exit code, once it has ended."""
        return self._running.wait(SECONDS)

    def close(self) -> None:
        if self._running.poll() is None:
            self._running.kill()
            self._running.wait()
        os.close(self._master)


def _control() -> None:
    """The terminal at descriptor 0 becomes the one whose Ctrl-C reaches this process, though these tests ignore it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def terminal(*arguments: str, **variables: str) -> Iterator[Terminal]:
    opened = Terminal(arguments, **variables)
    try:
        yield opened
    finally:
        opened.close()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def once(*arguments: str, given: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """One answer, as in a shell script."""
    return subprocess.run(
        [*COMMAND, *arguments], input=given or "", capture_output=True, text=True, encoding="utf-8", timeout=SECONDS,
        env=environment(**variables),
    )  # fmt: skip


def test_a_talk_in_a_terminal_from_the_first_word_to_ctrl_d(start_server: StartServer) -> None:
    with (
        start_server("--chat-template", "chatml", worker=["--reply", REPLY, "--accepts", "half"]) as server,
        terminal("--url", server.url, "--max-tokens", "34", "--seed", "7") as chat,
    ):
        assert "up to 3 drafts per step; chat" in chat.wait_for("Ctrl-D ends.*\n")
        chat.wait_for("› ")
        chat.type("Write add.\n")
        answer = chat.wait_for(r"\d+ tokens in \d+ steps · .* seed 7")
        assert "\x1b[4;" in answer  # accepted drafts
        assert "\x1b[1;" in answer  # the steps' own tokens
        assert "def add(a, b):\n    return a + b" in plain(answer)
        assert re.search(
            r"34 tokens in \d+ steps · \d\.\d\d per step · [\d.]+ ms per token · \d+ of \d+ drafts", answer
        )

        chat.wait_for("› ")
        chat.type("/off\n")
        chat.wait_for("speculation off")
        chat.type("Again.\n")
        assert "\x1b[4;" not in chat.wait_for(r"34 tokens in 33 steps · 1\.00 per step")  # no draft, no underline

        chat.type("/k\n")
        chat.wait_for("/k takes a whole number")
        chat.type("\x1b[A\x1b[A\n")  # up twice: the history
        chat.wait_for(r"Again\.(.|\n)*34 tokens in 33 steps")
        chat.type("/temperature 9\nHi\n")
        chat.wait_for("`temperature` must be .*9")  # the server's own words
        chat.wait_for("› ")
        time.sleep(1.0)  # nobody is faster; what comes before the line is being read is seen at its end
        chat.type(CTRL_C)
        chat.wait_for("› ")
        chat.type(CTRL_D)
        assert chat.code() == 0


def test_ctrl_c_stops_an_answer_and_the_server_stops_working_on_it(start_server: StartServer) -> None:
    slow = ["--reply", "word " * 400, "--step-seconds", "0.05", "--accepts", "never"]
    with start_server(worker=slow) as server, terminal("--url", server.url, "--max-tokens", "900") as chat:
        assert "no chat template, so each text is continued" in chat.wait_for("› ")
        chat.type("Go on\n")
        chat.wait_for("w.*o.*r.*d")
        chat.type(CTRL_C)
        chat.wait_for(r"stopped: \d+ tokens? in \d+ steps?")
        chat.wait_for("› ")
        chat.type("two lines \\\nof prompt\n")
        chat.wait_for("w.*o.*r.*d")
        chat.type(CTRL_C)
        chat.wait_for("stopped: ")
        chat.type("/quit\n")
        assert chat.code() == 0
        assert _running(server.url) == 0


def _running(url: str) -> int:
    """Requests that the server still works on, once it has noticed who left."""
    limit = time.monotonic() + SECONDS
    while (number := httpx.get(f"{url}/load").json()["num_running"]) and time.monotonic() < limit:
        pass
    return int(number)


def test_one_answer_from_the_shell_and_from_a_pipe(start_server: StartServer, tmp_path: Any) -> None:
    key = tmp_path / "key"
    key.write_text("k3y\n")
    with start_server("--api-key-file", str(key), worker=["--reply", REPLY, "--accepts", "always"]) as server:
        url = ["--url", server.url]
        flags = [*url, "--api-key-file", str(key), "--max-tokens", "8"]
        found = once(*flags, "Say it")
        assert (found.returncode, found.stdout) == (0, "def add(\n")  # the text alone: no colours, no figures
        assert re.match(r"  8 tokens in \d+ steps", found.stderr)
        piped = once(*url, "--complete", "--max-tokens", "8", given="Say it", SPACESERVE_API_KEY="k3y")
        assert (piped.returncode, piped.stdout) == (0, "def add(\n")
        refused = once(*flags, "--top-p", "7", "Say it")
        assert refused.returncode == 1
        assert "top_p" in refused.stderr
        assert refused.stdout == ""
        locked = once(*url, "Say it")
        assert (locked.returncode, locked.stdout) == (1, "")
        assert "SPACESERVE_API_KEY" in locked.stderr
        with terminal(*flags, "--seed", "1", "Say it", NO_COLOR="1") as chat:
            shown = chat.wait_for("seed 1")
            assert "\x1b[" not in shown
            assert "def add(\n" in shown
            assert chat.code() == 0


def test_without_a_server_it_says_how_to_start_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    found = once("--url", f"http://127.0.0.1:{port}", "Hi")
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1
    assert "spaceserve serve" in found.stderr


def test_ctrl_c_while_the_server_starts_gives_up(starting: Any) -> None:
    url = starting.wait_for(r"listening on (http://\S+)")[1]
    with terminal("--url", url) as chat:
        chat.wait_for("waiting for its model")
        chat.type(CTRL_C)
        assert chat.code() == 130
    starting.process.send_signal(signal.SIGTERM)
