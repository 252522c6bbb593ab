"""What the router costs per stream and per token, from one stream to a thousand.

One router process in front of workers that compute nothing: they emit one token per stream and step, and record when.
Clients in this process record when it arrived. The difference is what the router (and the sockets on both sides of it)
adds. Processor time is the router's own, so that other programs do not count; waiting for a core does, in latency.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.resources
import json
import math
import re
import resource
import subprocess
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from processes import ProcessFigures
from space_common.process import cpu_seconds
from space_eval.bench.server_process import ServerProcess
from space_eval.report import percentile
from tokenizers import Tokenizer

from perf.harness import PerfError, Report, at_least, log, numbers, start_module, table
from perf.streams_worker import MAX_SEQUENCES, WINDOW, emitted_at

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
        """Raises PerfError where not all end in time."""
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
        num_streams=load.num_streams,
        pace=load.pace,
        num_lost=lost,
        num_tokens=sum(len(reader.seconds) for reader in readers.values()),
        bytes_per_event=sum(reader.num_bytes for reader in readers.values()) / num_events if num_events else math.nan,
        seconds=seconds,
        tokens_per_second=len(added) / seconds if added else math.nan,
        added_ms={"median": percentile(added, 0.5), "p99": percentile(added, 0.99), "most": percentile(added, 1.0)},
        cpu_us_per_token=1e6 * cpu / len(added) if added else math.nan,
        cpu_ms_per_request=1e3 * (begun.cpu_seconds - before.cpu_seconds) / load.num_streams,
        resident_kib_per_stream=1024 * (mib[1] - mib[0]) / load.num_streams,
        router_mib=mib,
    )


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
    """A worker process that listens."""
    token, vocab_size = _letter()
    flags = ["--listen", f"unix:{folder}/{number}.sock", "--token", token, "--vocab-size", vocab_size]
    flags += ["--log", folder / f"{number}.json", "--step-seconds", 1 / load.pace if load.pace else 0.0]
    with start_module("perf.streams_worker", *flags) as process:
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
    """Point by point."""
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
            point.num_streams,
            f"{point.pace:g}" if point.pace else "flood",
            f"{point.tokens_per_second:,.0f}",
            point.num_lost,
            *(f"{point.added_ms[name]:.1f}" for name in ("median", "p99", "most")),
            f"{point.cpu_us_per_token:.1f}",
            f"{point.tokens_per_core_second:,.0f}",
            f"{point.cpu_ms_per_request:.2f}",
            f"{point.bytes_per_event:.0f}",
            f"{point.resident_kib_per_stream:.0f}",
            ", ".join(f"{mib:.0f}" for mib in point.router_mib),
        )
        for point in points
    ]
    notes = f"{num_workers} worker processes that compute nothing, and the clients in one process, on the same machine."
    if any(math.isnan(point.cpu_us_per_token) for point in points):
        notes += "\n\n–: the first streams had ended before the last began. Give them more --tokens."
    lost = [f"{point.num_lost} of {point.num_streams} streams were lost." for point in points if point.num_lost]
    record = {"points": [asdict(point) for point in points], "serve_flags": list(serve_flags)}
    return Report("One router under many streams", notes, [table(head, rows)], record, failures=lost)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--streams", type=numbers(1), default=[1, 100, 1000], metavar="N,…", help="at once, by point [1,100,1000]")
    add("--workers", type=at_least(1), default=8, metavar="N", help="worker processes [8]")
    add("--pace", type=float, default=10.0, metavar="X", help="tokens per second and stream [10]")
    add("--tokens", type=at_least(2), default=200, metavar="N", help="of each stream [200]")
    add("--no-flood", action="store_true", help="without the last point, as fast as the router goes")
    add("serve_flags", nargs="*", metavar="FLAG", help="behind `--`: flags of `spaceserve serve`")
