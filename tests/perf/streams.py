"""What one router adds and costs, from one stream to a thousand.

The workers in front of it compute nothing and emit one token per stream and step, so that what is measured is the
router's. Every stream gets the same token, whose text is one letter. At its end each worker (`python -m perf.streams
--listen …`) writes when each token was handed to the router, on the monotonic clock of the machine, which the clients
read, too. Streams are identified by their seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.resources
import json
import math
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import grpc.aio
from processes import ProcessFigures
from space_common.process import ServerProcess, cpu_seconds
from space_common.worker.client import PROTOCOL_MAJOR
from space_eval.flags import whole_from
from space_eval.report import percentile
from space_proto import worker_pb2, worker_pb2_grpc
from tokenizers import Tokenizer

from perf.harness import PerfError, Report, log, numbers, start_module, table

BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 16
WINDOW = 8192
MAX_SEQUENCES = 1024
HEARTBEAT_SECONDS = 1.0

Emitted = dict[int, list[float]]  # by seed: when each token was emitted


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
            protocol_major=PROTOCOL_MAJOR, incarnation="instant", vocab_size=self._vocab_size, block_size=BLOCK_SIZE,
            num_blocks=self._num_blocks, window=WINDOW, max_sequences=self._max_sequences,
            max_draft_length=3 * (self._per_step > 1), dtype="none", device="none", model_name="instant",
        )  # fmt: skip

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
                seq_id=seq_id, tokens=[self._token] * count, num_computed=stream.computed,
                num_drafted=self._per_step - 1, num_accepted=count - 1, decoded=True,
                finish=worker_pb2.FINISH_NONE if stream.num_left else worker_pb2.FINISH_LENGTH,
            )  # fmt: skip
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


def worker_main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.streams")
    parser.add_argument("--listen", required=True, help="unix:PATH or HOST:PORT")
    parser.add_argument("--token", type=int, required=True, help="the id that is emitted")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--log", type=Path, required=True, help="file for the times, written at the end")
    return asyncio.run(serve(parser.parse_args()))


CONNECTING = 64  # clients that connect at once
SECONDS = 300.0  # longest wait for all streams of one point, beside their pace
FILES_PER_STREAM = 2  # this process and the router have one each; and some to spare
LETTER = b"a"
_TEXT = re.compile(rb'"text":"(' + LETTER + rb'*)"')
_END = b"data: [DONE]"
_OVERLAP = 64  # bytes kept of the last piece: an event may be cut anywhere


@dataclass(frozen=True)
class Load:
    """One point: so many streams at once, each at such a pace."""

    num_streams: int
    pace: float  # tokens per second and stream; 0: as fast as the router takes them
    num_tokens: int  # of each stream


class StreamReader(asyncio.Protocol):
    """One streamed completion, from the request to [DONE]."""

    def __init__(self, request: bytes, on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        """`on_begin`: at the first token; `on_end`: once the connection is over, however it ended."""
        self.seconds = array("d")  # of each token, on the monotonic clock
        self.num_events = 0
        self.num_bytes = 0  # of the answer, its head included
        self.is_whole = False  # it reached [DONE]
        self._request, self._on_begin, self._on_end = request, on_begin, on_end
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.num_bytes += len(data)
        data = self._rest + data
        last = 0
        for match in _TEXT.finditer(data):
            last = match.end()
            self.num_events += 1
            if not self.seconds:
                self._on_begin()
            self.seconds.extend([now] * (match.end(1) - match.start(1)))
        if _END in data[last:]:
            self.is_whole = True
            assert self._transport is not None
            self._transport.close()
        self._rest = data[max(last, len(data) - _OVERLAP) :]

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()


def request(url: str, seed: int, max_tokens: int) -> bytes:
    """A streamed completion as HTTP bytes; its seed identifies it."""
    body = {"prompt": f"stream {seed}: ", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1}
    content = json.dumps({**body, "seed": seed, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


@dataclass(frozen=True)
class Mark:
    """The router at one moment."""

    seconds: float  # monotonic
    cpu_seconds: float
    process: ProcessFigures


class Clients:
    """All clients of one point, and the router's state before, once all have begun, and when the first ends."""

    def __init__(self, server: ServerProcess, load: Load) -> None:
        self.marks: dict[str, Mark] = {}
        self._server, self._load = server, load
        self._num_begun = self._num_over = 0
        self._all_over = asyncio.Event()
        self.readers = {
            seed: StreamReader(request(server.url, seed, load.num_tokens), self._began, self._over)
            for seed in range(1, load.num_streams + 1)
        }

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        host, port = urlsplit(self._server.url).netloc.rsplit(":", 1)
        self._mark("before")
        turns = asyncio.Semaphore(CONNECTING)

        async def connect(reader: StreamReader) -> None:
            async with turns:
                await loop.create_connection(lambda: reader, host, int(port))

        try:
            async with asyncio.timeout(SECONDS + (self._load.num_tokens / self._load.pace if self._load.pace else 0.0)):
                await asyncio.gather(*(connect(reader) for reader in self.readers.values()))
                await self._all_over.wait()
        except TimeoutError:
            late = sum(1 for reader in self.readers.values() if not reader.is_whole)
            raise PerfError(f"{late} of {len(self.readers)} streams have not ended within {SECONDS:g} s") from None

    def _began(self) -> None:
        self._num_begun += 1
        if self._num_begun == len(self.readers):
            self._mark("begun")

    def _over(self) -> None:
        if not self._num_over:
            self._mark("ending")
        self._num_over += 1
        if self._num_over == len(self.readers):
            self._all_over.set()

    def _mark(self, name: str) -> None:
        pid = self._server.pid
        self.marks[name] = Mark(time.monotonic(), cpu_seconds(pid), ProcessFigures.of(pid))


@dataclass(frozen=True)
class Point:
    """The figures of one load. Rates and processor time are of the time in which all streams ran."""

    num_streams: int
    pace: float
    num_lost: int  # that did not end with every token
    num_tokens: int  # read in all
    bytes_per_event: float  # of HTTP, heads included
    seconds: float  # that all ran
    tokens_per_second: float
    added_ms: Mapping[str, float]  # from the worker's report to the client: median, p99, most
    cpu_us_per_token: float
    cpu_ms_per_request: float  # from the first connection until all have begun
    resident_kib_per_stream: float  # of the router while all ran, above before
    router_mib: Sequence[float]  # before, while all ran, after

    @property
    def tokens_per_core_second(self) -> float:
        """What one core of router would carry."""
        return 1e6 / self.cpu_us_per_token if self.cpu_us_per_token > 0 else math.nan


def figures(
    load: Load,
    emitted: Mapping[int, Sequence[float]],
    readers: Mapping[int, StreamReader],
    marks: Mapping[str, Mark],
    after: ProcessFigures,
) -> Point:
    """`emitted`: the moment of each token of each stream at the worker."""
    before, begun, ending = marks["before"], marks["begun"], marks["ending"]
    added: list[float] = []
    lost = 0
    seconds = max(0.0, ending.seconds - begun.seconds)
    for seed, reader in readers.items():
        sent = emitted.get(seed, ())
        lost += not (reader.is_whole and len(reader.seconds) == load.num_tokens == len(sent))
        for came, went in zip(reader.seconds, sent, strict=False):
            if begun.seconds <= came <= ending.seconds:
                added.append(1e3 * (came - went))
    cpu = ending.cpu_seconds - begun.cpu_seconds
    num_events = sum(reader.num_events for reader in readers.values())
    mib = [process.resident_bytes / 2**20 for process in (before.process, ending.process, after)]
    return Point(
        num_streams=load.num_streams, pace=load.pace, num_lost=lost,
        num_tokens=sum(len(reader.seconds) for reader in readers.values()),
        bytes_per_event=sum(reader.num_bytes for reader in readers.values()) / num_events if num_events else math.nan,
        seconds=seconds, tokens_per_second=len(added) / seconds if added else math.nan,
        added_ms={"median": percentile(added, 0.5), "p99": percentile(added, 0.99), "most": percentile(added, 1.0)},
        cpu_us_per_token=1e6 * cpu / len(added) if added else math.nan,
        cpu_ms_per_request=1e3 * (begun.cpu_seconds - before.cpu_seconds) / load.num_streams,
        resident_kib_per_stream=1024 * (mib[1] - mib[0]) / load.num_streams, router_mib=mib,
    )  # fmt: skip


def measure(load: Load, *, num_workers: int, serve_flags: Sequence[str] = ()) -> Point:
    """One router and its workers, fresh. Raises ServerError, PerfError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streams-")))
        workers = [stack.enter_context(_worker(load, folder, number)) for number in range(num_workers)]
        addresses = ",".join(f"unix:{folder}/{number}.sock" for number in range(num_workers))
        flags = ["--model", "demo", "--worker-address", addresses, "--max-queue", "100000"]
        flags += ["--max-queue-tokens", "100000000", "--log-level", "warning"]
        server = stack.enter_context(ServerProcess([*flags, *serve_flags]))
        clients = Clients(server, load)
        asyncio.run(clients.run())
        after = ProcessFigures.of(server.pid)
        for worker in workers:
            worker.terminate()
            worker.wait(SECONDS)
        emitted = emitted_at([folder / f"{number}.json" for number in range(num_workers)])
    return figures(load, emitted, clients.readers, clients.marks, after)


@contextmanager
def _worker(load: Load, folder: Path, number: int) -> Iterator[subprocess.Popen[str]]:
    token, vocab_size = _letter()
    flags = ["--listen", f"unix:{folder}/{number}.sock", "--token", token, "--vocab-size", vocab_size]
    flags += ["--log", folder / f"{number}.json", "--step-seconds", 1 / load.pace if load.pace else 0.0]
    with start_module("perf.streams", *flags) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("ready "):
                raise PerfError(f"worker {number} did not start; its output is above")
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _letter() -> tuple[int, int]:
    """The id whose text is one letter, in the embedded model's vocabulary, and the size of that."""
    with importlib.resources.as_file(importlib.resources.files("space_demo") / "tokenizer.json") as file:
        tokenizer = Tokenizer.from_file(str(file))
    (token,) = tokenizer.encode(LETTER.decode(), add_special_tokens=False).ids
    return token, tokenizer.get_vocab_size()


def loads(options: argparse.Namespace) -> list[Load]:
    """Each number of streams at the pace, and the largest once more as fast as the router goes. Raises PerfError."""
    most = max(options.streams)
    if most > options.workers * MAX_SEQUENCES:
        raise PerfError(f"{most} streams need {-(-most // MAX_SEQUENCES)} --workers of {MAX_SEQUENCES} each.")
    if options.tokens > WINDOW - 64:
        raise PerfError(f"--tokens is {options.tokens}; at most {WINDOW - 64} fit the workers' window.")
    if options.pace <= 0:
        raise PerfError("--pace must be above 0.")
    needed = FILES_PER_STREAM * most + 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise PerfError(f"{most} streams need {needed} open files; {hard} are allowed here (`ulimit -Hn`).")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    paced = [Load(number, options.pace, options.tokens) for number in options.streams]
    return paced if options.no_flood else [*paced, Load(most, 0.0, options.tokens)]


def run(options: argparse.Namespace) -> Report:
    points = []
    for load in loads(options):
        log(f"{load.num_streams} streams, {f'{load.pace:g} tokens/s each' if load.pace else 'as fast as it goes'}")
        points.append(measure(load, num_workers=options.workers, serve_flags=options.serve_flags))
    return report(points, num_workers=options.workers, serve_flags=options.serve_flags)


def report(points: Sequence[Point], *, num_workers: int, serve_flags: Sequence[str]) -> Report:
    """The table. A lost stream is a failure."""
    head = ["streams", "tokens/s each", "tokens/s", "lost", "added ms: median", "p99", "most", "µs CPU per token"]
    head += ["tokens/s per core", "ms CPU per request", "bytes per event", "KiB per stream"]
    head += ["router MiB before, while, after"]
    rows = [
        (
            point.num_streams, f"{point.pace:g}" if point.pace else "flood", f"{point.tokens_per_second:,.0f}",
            point.num_lost, *(f"{point.added_ms[name]:.1f}" for name in ("median", "p99", "most")),
            f"{point.cpu_us_per_token:.1f}", f"{point.tokens_per_core_second:,.0f}",
            f"{point.cpu_ms_per_request:.2f}", f"{point.bytes_per_event:.0f}", f"{point.resident_kib_per_stream:.0f}",
            ", ".join(f"{mib:.0f}" for mib in point.router_mib),
        )
        for point in points
    ]  # fmt: skip
    notes = f"{num_workers} worker processes that compute nothing, and the clients in one process, on the same machine."
    if any(math.isnan(point.cpu_us_per_token) for point in points):
        notes += "\n\n–: the first streams had ended before the last began. Give them more --tokens."
    lost = [f"{point.num_lost} of {point.num_streams} streams were lost." for point in points if point.num_lost]
    record = {"points": [asdict(point) for point in points], "serve_flags": list(serve_flags)}
    return Report("One router under many streams", notes, [table(head, rows)], record, failures=lost)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--streams", type=numbers(1), default=[1, 100, 1000], metavar="N,…", help="at once, by point [1,100,1000]")
    add("--workers", type=whole_from(1), default=8, metavar="N", help="worker processes [8]")
    add("--pace", type=float, default=10.0, metavar="X", help="tokens per second and stream [10]")
    add("--tokens", type=whole_from(2), default=200, metavar="N", help="of each stream [200]")
    add("--no-flood", action="store_true", help="without the last point, as fast as the router goes")
    add("serve_flags", nargs="*", metavar="FLAG", help="behind `--`: flags of `spaceserve serve`")


if __name__ == "__main__":
    sys.exit(worker_main())
