"""`spaceserve bench streams`: what the router costs per stream and per event, from one stream to a thousand.

One router process in front of workers that compute nothing and say one token per stream and step, and when; readers in
this process note when it came. The difference is what the router (and the sockets on both sides of it) add. Processor
time is the router's own, so that what else runs on the machine does not count; waiting for a core does, in latency.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.resources
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from space_common.python_process import module_command
from tokenizers import Tokenizer

from space_eval.bench.facts import commit, machine
from space_eval.bench.server_process import ServerError, ServerProcess, cpu_seconds
from space_eval.process_figures import ProcessFigures
from space_eval.streams_reader import LETTER, StreamReader, request
from space_eval.streams_report import Point, figures, markdown, record
from space_eval.streams_worker import MAX_SEQUENCES, WINDOW, said_at
from space_eval.written import write

CONNECTING = 64  # readers that connect at once
SECONDS = 300.0  # longest wait for all streams of one point, beside their pace
FILES_PER_STREAM = 2  # this process and the router have one each; and some to spare


class StreamsError(Exception):
    """What cannot be measured as it was asked."""


@dataclass(frozen=True)
class Ask:
    """One point: so many streams at once, each at such a pace."""

    num_streams: int
    pace: float  # tokens per second and stream; 0: as fast as the router takes them
    num_tokens: int  # of each stream


def measure(ask: Ask, *, num_workers: int, serve_flags: Sequence[str] = ()) -> Point:
    """One router and its workers, fresh. Raises ServerError, StreamsError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streams-")))
        workers = [stack.enter_context(_worker(ask, folder, number)) for number in range(num_workers)]
        addresses = ",".join(f"unix:{folder}/{number}.sock" for number in range(num_workers))
        flags = ["--model", "demo", "--worker-address", addresses, "--max-queue", "100000"]
        flags += ["--max-queue-tokens", "100000000", "--log-level", "warning"]
        server = stack.enter_context(ServerProcess([*flags, *serve_flags]))
        reading = Reading(server, ask)
        asyncio.run(reading.run())
        after = ProcessFigures.of(server.pid)
        for worker in workers:
            worker.terminate()
            worker.wait(SECONDS)
        said = said_at([folder / f"{number}.json" for number in range(num_workers)])
    return figures(
        num_streams=ask.num_streams,
        num_workers=num_workers,
        pace=ask.pace,
        num_tokens=ask.num_tokens,
        said=said,
        readers=reading.readers,
        marks=reading.marks,
        after=after,
    )


@contextmanager
def _worker(ask: Ask, folder: Path, number: int) -> Iterator[subprocess.Popen[str]]:
    """A worker process that listens."""
    token, vocab_size = _letter()
    command = module_command("space_eval.streams_worker", "--listen", f"unix:{folder}/{number}.sock")
    command += ["--token", str(token), "--vocab-size", str(vocab_size), "--log", str(folder / f"{number}.json")]
    command += ["--step-seconds", str(1 / ask.pace if ask.pace else 0.0)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("ready "):
                raise StreamsError(f"worker {number} did not start; its words are above")
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


@dataclass(frozen=True)
class Mark:
    """The router at one moment."""

    seconds: float  # monotonic
    cpu_seconds: float
    process: ProcessFigures

    @classmethod
    def of(cls, pid: int) -> Mark:
        return cls(time.monotonic(), cpu_seconds(pid), ProcessFigures.of(pid))


class Reading:
    """All readers of one point, and what the router is at its borders: before, all have begun, the first has ended."""

    def __init__(self, server: ServerProcess, ask: Ask) -> None:
        self.marks: dict[str, Mark] = {}
        self._server, self._ask = server, ask
        self._num_begun = self._num_over = 0
        self._all_over = asyncio.Event()
        self.readers = {
            seed: StreamReader(request(server.url, seed, ask.num_tokens), self._began, self._over)
            for seed in range(1, ask.num_streams + 1)
        }

    async def run(self) -> None:
        """Raises StreamsError where not all end in time."""
        loop = asyncio.get_running_loop()
        host, port = urlsplit(self._server.url).netloc.rsplit(":", 1)
        self._mark("before")
        turns = asyncio.Semaphore(CONNECTING)

        async def connect(reader: StreamReader) -> None:
            async with turns:
                await loop.create_connection(lambda: reader, host, int(port))

        try:
            async with asyncio.timeout(SECONDS + (self._ask.num_tokens / self._ask.pace if self._ask.pace else 0.0)):
                await asyncio.gather(*(connect(reader) for reader in self.readers.values()))
                await self._all_over.wait()
        except TimeoutError:
            late = sum(1 for reader in self.readers.values() if not reader.is_whole)
            raise StreamsError(f"{late} of {len(self.readers)} streams have not ended within {SECONDS:g} s") from None
        self._mark("over")

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
        self.marks[name] = Mark.of(self._server.pid)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a measurement, 1 where a stream was lost, 2 for unusable flags."""
    options = _parser().parse_args(argv)
    try:
        asks = _asks(options)
        points = []
        for ask in asks:
            pace = f"{ask.pace:g} tokens/s each" if ask.pace else "as fast as it goes"
            _say(f"{ask.num_streams} streams, {pace}")
            points.append(measure(ask, num_workers=options.workers, serve_flags=options.serve_flags))
    except StreamsError as error:
        _say(str(error))
        return 2
    except ServerError as error:
        _say(str(error))
        return 1
    made = record(points, {"machine": machine(), "commit": commit(), "serve_flags": options.serve_flags})
    print(markdown(made))
    if options.out is not None:
        write(options.out, "streams", made, markdown(made))
        _say(f"wrote {options.out}/streams.md and streams.json")
    return int(any(point.num_lost for point in points))


def _asks(options: argparse.Namespace) -> list[Ask]:
    """Every number at the pace, and the largest once more as fast as it goes. Raises StreamsError."""
    most = max(options.streams)
    if min(options.streams) < 1 or options.workers < 1 or options.pace <= 0 or options.tokens < 2:
        raise StreamsError("--streams and --workers must be at least 1, --tokens 2, and --pace above 0.")
    if most > options.workers * MAX_SEQUENCES:
        raise StreamsError(f"{most} streams need {-(-most // MAX_SEQUENCES)} --workers of {MAX_SEQUENCES} each.")
    if options.tokens > WINDOW - 64:
        raise StreamsError(f"--tokens is {options.tokens}; at most {WINDOW - 64} fit the workers' window.")
    needed = FILES_PER_STREAM * most + 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise StreamsError(f"{most} streams need {needed} open files; {hard} are allowed here (`ulimit -Hn`).")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    asks = [Ask(number, options.pace, options.tokens) for number in options.streams]
    return asks if options.no_flood else [*asks, Ask(most, 0.0, options.tokens)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve bench streams",
        description="Measures what one router adds to tokens and costs per event and per stream, in front of workers "
        "that compute nothing: latency between a worker's token and its reader, processor time, memory.",
    )
    parser.add_argument(
        "--streams",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[1, 100, 1000],
        metavar="N[,N...]",
        help="streams at once, point by point [1,100,1000]",
    )
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="worker processes [8]")
    parser.add_argument("--pace", type=float, default=10.0, metavar="X", help="tokens per second and stream [10]")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="of each stream [200]")
    parser.add_argument("--no-flood", action="store_true", help="without the last point, as fast as the router goes")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write streams.json and streams.md there")
    parser.add_argument("serve_flags", nargs="*", metavar="FLAG", help="behind `--`: flags of `spaceserve serve`")
    return parser


def _say(line: str) -> None:
    print(f"bench streams: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
