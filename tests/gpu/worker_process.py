"""A worker process, and a connection to it with the least that a router does."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from space_common.python_process import module_command, safe_environment
from space_proto import worker_pb2 as pb
from space_proto import worker_pb2_grpc

READ_LINE = "weights read"
"""Logged by a worker that has read its weights."""


class WorkerDied(RuntimeError):
    """The process ended before it was asked to; the message has its last lines."""


class WorkerProcess:
    """`python -m space_server`, while its log is read."""

    def __init__(self, process: subprocess.Popen[str], started: float) -> None:
        self.started = started  # by time.perf_counter
        self.read_at: float | None = None  # when the weights were read
        self.ready_at: float | None = None
        self._log: list[str] = []
        self._process = process
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def address(self) -> str:
        """Wait until the worker listens. Raises WorkerDied."""
        assert self._process.stdout is not None
        word, _, address = self._process.stdout.readline().strip().partition(" ")
        if word != "ready":
            self._process.wait()
            self._reader.join(5)
            raise WorkerDied(f"the worker ended with status {self._process.returncode}: {' | '.join(self._log[-3:])}")
        self.ready_at = time.perf_counter()
        return address

    def stop(self) -> int:
        """Send SIGTERM, as an operator would; the exit status."""
        self._process.terminate()
        status = self._process.wait(30)
        self._reader.join(5)
        return status

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if self.read_at is None and READ_LINE in line:
                self.read_at = time.perf_counter()
            sys.stderr.write(line)
            self._log.append(line.rstrip())


@contextmanager
def started_worker(flags: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[WorkerProcess]:
    """A worker with these flags; it is killed at the end of the block where it still runs."""
    with tempfile.TemporaryDirectory(prefix="space") as folder:
        words = ["--listen", f"unix:{folder}/w", "--parent-pid", os.getpid(), *flags]
        command, pipe, started = module_command("space_server", *words), subprocess.PIPE, time.perf_counter()
        with subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, env=safe_environment(environment)
        ) as process:
            try:
                yield WorkerProcess(process, started)
            finally:
                process.kill()


class WorkerConnection:
    """The stream to a worker, as `Desk` wants it."""

    def __init__(self, channel: grpc.Channel, seconds: float) -> None:
        """`seconds`: after which the stream is given up."""
        self.commands: queue.SimpleQueue[pb.RouterMessage | None] = queue.SimpleQueue()
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        self._messages: Iterator[pb.WorkerMessage] = stub.Serve(iter(self.commands.get, None), timeout=seconds)
        self.hello = next(self._messages).hello
        self.block_size, self.num_blocks = int(self.hello.block_size), int(self.hello.num_blocks)

    def apply(self, command: pb.Command) -> None:
        """Send one command."""
        self.commands.put(pb.RouterMessage(commands=[command]))

    def step(self) -> pb.StepReport:
        """The next report, without heartbeats. Raises WorkerDied after a refusal."""
        for message in self._messages:
            if message.HasField("refusal"):
                raise WorkerDied(message.refusal.reason)
            report = message.report
            if report.stepped or report.sequences or report.released:
                return report
        raise WorkerDied("the worker ended the stream")


@contextmanager
def connected(address: str, seconds: float = 300.0) -> Iterator[WorkerConnection]:
    """A connection that is closed at the end of the block."""
    with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        connection = WorkerConnection(channel, seconds)
        try:
            yield connection
        finally:
            connection.commands.put(None)


def caches_in(folder: Path) -> dict[str, str]:
    """Environment of a process that finds only what others have compiled and measured in this folder."""
    return {"XDG_CACHE_HOME": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton")}
