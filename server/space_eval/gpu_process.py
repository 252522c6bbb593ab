"""A worker process, and a line to it: what the router has, in its least form."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import grpc
from space_common.python_process import module_command, safe_environment
from space_proto import worker_pb2 as pb
from space_proto import worker_pb2_grpc

READ_LINE = "weights read"
"""In the log: as soon as they are."""


class WorkerDied(RuntimeError):
    """The process ended before it was told to; the message has its last words."""


class WorkerProcess:
    """`python -m space_server` with the given flags. `with` it: the process ends with the block."""

    def __init__(self, flags: Sequence[str], *, environment: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="space")
        listen = f"unix:{self._folder.name}/w"
        command = module_command("space_server", "--listen", listen, "--parent-pid", os.getpid(), *flags)
        self.started = time.perf_counter()
        self.read_at: float | None = None  # when the weights were read
        self.ready_at: float | None = None
        self.log: list[str] = []
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=safe_environment(environment),
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(5)
        self._folder.cleanup()

    def address(self) -> str:
        """Waits until the worker listens. Raises WorkerDied."""
        assert self._process.stdout is not None
        word, _, address = self._process.stdout.readline().strip().partition(" ")
        if word != "ready":
            self._process.wait()
            self._reader.join(5)
            raise WorkerDied(f"the worker ended with status {self._process.returncode}: {' | '.join(self.log[-3:])}")
        self.ready_at = time.perf_counter()
        return address

    def stop(self) -> int:
        """SIGTERM, as an operator would; the exit status."""
        self._process.terminate()
        return self._process.wait(30)

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if self.read_at is None and READ_LINE in line:
                self.read_at = time.perf_counter()
            sys.stderr.write(line)
            self.log.append(line.rstrip())


class WorkerLine:
    """The stream to a worker, as `space_eval.desk.Desk` wants it. `with` it: the stream ends with the block."""

    def __init__(self, address: str, *, patience: float = 300.0) -> None:
        """`patience`: seconds after which the stream is given up."""
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self._orders: queue.SimpleQueue[pb.RouterMessage | None] = queue.SimpleQueue()
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self._answers: Iterator[pb.WorkerMessage] = stub.Serve(iter(self._orders.get, None), timeout=patience)
        self.hello = next(self._answers).hello

    def __enter__(self) -> WorkerLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orders.put(None)
        self._channel.close()

    @property
    def block_size(self) -> int:
        """Slots of a page."""
        return int(self.hello.block_size)

    @property
    def num_blocks(self) -> int:
        """Pages."""
        return int(self.hello.num_blocks)

    def apply(self, command: pb.Command) -> None:
        """Send one order."""
        self._orders.put(pb.RouterMessage(commands=[command]))

    def step(self) -> pb.StepReport:
        """The next report that says something; heartbeats are passed over. Raises WorkerDied after a refusal."""
        for message in self._answers:
            if message.HasField("refusal"):
                raise WorkerDied(message.refusal.reason)
            report = message.report
            if report.stepped or report.sequences or report.released:
                return report
        raise WorkerDied("the worker hung up")


def caches_in(folder: Path) -> dict[str, str]:
    """Environment of a process that finds nothing measured or compiled before, but what others left in this folder."""
    return {"XDG_CACHE_HOME": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton")}
