"""`python -m perf.streams_worker --listen unix:PATH …`: a worker that emits one token per stream and step.

It computes nothing, so that what is measured in front of it is the router's. Every stream gets the same token, whose
text is one letter. At its end it writes when each token was handed to the router, on the machine's monotonic clock,
which clients on the same machine read, too. Streams are identified by their seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from space_common.worker_client import PROTOCOL_MAJOR
from space_proto import worker_pb2, worker_pb2_grpc

BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 16
WINDOW = 8192
MAX_SEQUENCES = 1024
HEARTBEAT_SECONDS = 1.0

Emitted = dict[int, list[float]]
"""By seed: when each token was emitted."""


@dataclass(slots=True)
class Stream:
    """One stream as the worker has it."""

    seed: int
    computed: int  # ids whose keys and values would be there
    num_left: int
    num_slots: int


class InstantWorker:
    """Emits the same token, up to `per_step` times, for every stream that has slots for it; nothing is computed."""

    def __init__(
        self,
        *,
        num_blocks: int = NUM_BLOCKS,
        max_sequences: int = MAX_SEQUENCES,
        vocab_size: int = 1 << 16,
        token: int = 5,
        per_step: int = 1,
        on_token: Callable[[int], None] | None = None,
    ) -> None:
        """`on_token`: called with a stream's seed when it gets tokens."""
        self._num_blocks, self._max_sequences, self._vocab_size = num_blocks, max_sequences, vocab_size
        self._token, self._per_step, self._on_token = token, per_step, on_token
        self._streams: dict[int, Stream] = {}  # by seq_id
        self._released: list[int] = []

    def hello(self) -> worker_pb2.Hello:
        return worker_pb2.Hello(
            protocol_major=PROTOCOL_MAJOR,
            incarnation="instant",
            vocab_size=self._vocab_size,
            block_size=BLOCK_SIZE,
            num_blocks=self._num_blocks,
            window=WINDOW,
            max_sequences=self._max_sequences,
            max_draft_length=3 * (self._per_step > 1),
            dtype="none",
            device="none",
            model_name="instant",
        )

    def apply(self, command: worker_pb2.Command) -> None:
        match command.WhichOneof("command"):
            case "admit":
                admit = command.admit
                num_generated = len(admit.ids) - admit.num_prompt
                self._streams[admit.seq_id] = Stream(
                    admit.sampling.seed,
                    len(admit.ids) - 1,
                    admit.limits.max_tokens - num_generated,
                    len(admit.pages) * BLOCK_SIZE,
                )
            case "extend":
                if stream := self._streams.get(command.extend.seq_id):
                    stream.num_slots += len(command.extend.pages) * BLOCK_SIZE
            case "release":
                self._streams.pop(command.release.seq_id, None)
                self._released.append(command.release.seq_id)

    @property
    def has_work(self) -> bool:
        return bool(self._released) or any(s.num_left and s.computed < s.num_slots for s in self._streams.values())

    def step(self) -> worker_pb2.StepReport:
        report = worker_pb2.StepReport(stepped=True, released=self._released)
        self._released = []
        for seq_id, stream in self._streams.items():
            count = min(self._per_step, stream.num_left, stream.num_slots - stream.computed)
            if count <= 0:
                continue
            stream.computed += count
            stream.num_left -= count
            report.sequences.add(
                seq_id=seq_id,
                tokens=[self._token] * count,
                num_computed=stream.computed,
                num_drafted=self._per_step - 1,
                num_accepted=count - 1,
                decoded=True,
                finish=worker_pb2.FINISH_NONE if stream.num_left else worker_pb2.FINISH_LENGTH,
            )
            if self._on_token is not None:
                self._on_token(stream.seed)
        report.stats.num_sequences = report.stats.chain_rows = len(report.sequences)
        report.stats.forward_seconds = 0.001
        return report


class StreamsWorker(worker_pb2_grpc.WorkerServicer):
    """One router's connection, a step every `step_seconds`; 0: as fast as the router reads."""

    def __init__(self, *, token: int, vocab_size: int, step_seconds: float) -> None:
        self.emitted: Emitted = defaultdict(list)
        self._token, self._vocab_size, self._step_seconds = token, vocab_size, step_seconds

    async def Serve(
        self,
        request_iterator: AsyncIterator[worker_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[worker_pb2.RouterMessage, worker_pb2.WorkerMessage],
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        now = 0.0  # of the present step
        worker = InstantWorker(
            token=self._token, vocab_size=self._vocab_size, on_token=lambda seed: self.emitted[seed].append(now)
        )
        news = asyncio.Event()

        async def read() -> None:
            async for message in request_iterator:
                for command in message.commands:
                    worker.apply(command)
                news.set()

        reader = asyncio.create_task(read())
        clock = asyncio.get_running_loop().time
        due, report_no = clock(), 0
        try:
            yield worker_pb2.WorkerMessage(hello=worker.hello())
            while True:
                news.clear()
                if worker.has_work:
                    due = max(due + self._step_seconds, clock() - self._step_seconds)
                    await asyncio.sleep(max(0.0, due - clock()))
                    now = time.monotonic()
                    report = worker.step()
                else:
                    try:
                        await asyncio.wait_for(news.wait(), HEARTBEAT_SECONDS)
                        continue
                    except TimeoutError:
                        report = worker_pb2.StepReport()
                report_no += 1
                report.report_no = report_no
                yield worker_pb2.WorkerMessage(report=report)
        finally:
            reader.cancel()


async def serve(options: argparse.Namespace) -> int:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    worker = StreamsWorker(token=options.token, vocab_size=options.vocab_size, step_seconds=options.step_seconds)
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(options.listen)
    await server.start()
    print(f"ready {options.listen}", flush=True)
    await stop.wait()
    options.log.write_text(json.dumps(worker.emitted), encoding="utf-8")
    await server.stop(0)
    return 0


def emitted_at(files: Iterable[Path]) -> Emitted:
    """From the logs of all workers: a stream that moved from one to another has a part in each."""
    found: Emitted = defaultdict(list)
    for file in files:
        for seed, seconds in json.loads(file.read_text(encoding="utf-8")).items():
            found[int(seed)] += seconds
    return {seed: sorted(seconds) for seed, seconds in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.streams_worker")
    parser.add_argument("--listen", required=True, help="unix:PATH or HOST:PORT")
    parser.add_argument("--token", type=int, required=True, help="the id that is emitted")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--log", type=Path, required=True, help="file for the times, written at the end")
    return asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
