"""What a step costs the router, by how many requests wait and how many pages there are: it should depend on neither."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from space_proto import worker_pb2
from space_router.config import ServeConfig
from space_router.engine.cache.pages import PagePool
from space_router.engine.engine import Engine
from space_router.engine.request.request import SamplingOptions, ValidRequest
from space_router.engine.request.stream import Stream
from space_router.metrics import Metrics
from space_router.testing.tabletop import Tabletop

from space_eval.plots import PlotError, line_plot

NUM_QUEUED = (10, 100, 1_000, 10_000)
NUM_BLOCKS = (1_000, 10_000, 100_000, 1_000_000)
MANY_BLOCKS = 10_000  # where the queue varies
FEW_QUEUED = 100  # where the pages vary
BATCH = 64
BLOCK_SIZE = 16
NUM_KEYS = 20
WARM_UP = 40  # steps that are not timed


@dataclass(frozen=True)
class Cost:
    """Of the router's part of a step: reports read, pages granted, requests admitted in place of those that ended."""

    num_queued: int
    num_blocks: int
    num_steps: int
    median_us: float
    mean_us: float
    p99_us: float
    submit_us: float  # median of what one new request costs
    num_admitted: int

    @property
    def name(self) -> str:
        return f"{self.num_queued:,} queued, {self.num_blocks:,} pages"


class TalkingWorker:
    """Emits what it is told to at once: two ids per sequence and step, and nothing is computed."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._running: dict[int, list[int]] = {}  # seq_id -> ids, ids left
        self._released: list[int] = []

    def hello(self) -> worker_pb2.Hello:
        return worker_pb2.Hello(
            protocol_major=1,
            vocab_size=1 << 16,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            window=4096,
            max_draft_length=3,
            max_sequences=BATCH,
        )

    def apply(self, command: worker_pb2.Command) -> None:
        match command.WhichOneof("command"):
            case "admit":
                admit = command.admit
                self._running[admit.seq_id] = [len(admit.ids), admit.limits.max_tokens]
            case "release":
                self._running.pop(command.release.seq_id, None)
                self._released.append(command.release.seq_id)

    def step(self) -> worker_pb2.StepReport | None:
        report = worker_pb2.StepReport(stepped=True, released=self._released)
        self._released = []
        for seq_id, state in self._running.items():
            num_ids, left = state
            if not left:
                continue
            count = min(2, left)
            state[0], state[1] = num_ids + count, left - count
            report.sequences.add(
                seq_id=seq_id,
                tokens=[5] * count,
                num_computed=state[0] - 1,
                num_drafted=1,
                num_accepted=count - 1,
                decoded=True,
                finish=worker_pb2.FINISH_NONE if state[1] else worker_pb2.FINISH_LENGTH,
            )
        report.stats.num_sequences = len(report.sequences)
        report.stats.forward_seconds = 0.01
        return report


class Stopwatch:
    """CPU seconds that a method takes, call by call: what others do on the machine does not count."""

    def __init__(self) -> None:
        self.seconds = array("d")

    def on(self, method: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: object) -> None:
            begun = time.thread_time()
            method(*arguments)
            self.seconds.append(time.thread_time() - begun)

        return timed


def measure(num_queued: int, num_blocks: int, *, num_steps: int, seed: int = 0) -> Cost:
    """A full batch, `num_queued` requests behind it, every page in use or known; whoever ends is replaced."""
    dice = random.Random(seed)
    config = ServeConfig(max_queue=num_queued + 10 * BATCH, max_prefill_rows=4096)
    table = Tabletop(lambda: TalkingWorker(num_blocks), config=config, metrics=Metrics())
    engine = table.engine
    for connection in table.connections:
        if connection.scheduler is not None:
            fill(connection.scheduler.pool)
    streams: set[Stream] = set()
    submits, reports = Stopwatch(), Stopwatch()

    def submit(engine: Engine) -> None:
        streams.add(engine.submit(_request(dice)))

    timed_submit = submits.on(submit)
    for _ in range(BATCH + num_queued):
        submit(engine)
    setattr(engine, "worker_report", reports.on(engine.worker_report))  # noqa: B010  timed from outside

    def tick() -> None:
        table.tick(0.01)
        for stream in [stream for stream in streams if stream.num_ready]:
            while stream.num_ready:
                if stream.read().finish is not None:
                    streams.remove(stream)
                    timed_submit(engine)

    for _ in range(min(WARM_UP, num_steps)):
        tick()
    reports.seconds = array("d")
    submits.seconds = array("d")
    while len(reports.seconds) < num_steps:
        tick()
    ordered = sorted(1e6 * seconds for seconds in reports.seconds)
    return Cost(
        num_queued,
        num_blocks,
        num_steps,
        median_us=statistics.median(ordered),
        mean_us=statistics.fmean(ordered),
        p99_us=ordered[int(0.99 * len(ordered))],
        submit_us=1e6 * statistics.median(submits.seconds),
        num_admitted=len(submits.seconds),
    )


def fill(pool: PagePool) -> None:
    """Give every page a content of its own that nobody will ask for, so that each new page means forgetting one."""
    blocks = pool.take(pool.num_available)
    for block in blocks:
        pool.publish(block, b"old %d" % block)
    pool.give_back(blocks)


def _request(dice: random.Random) -> ValidRequest:
    """Some wait at other levels, some have deadlines, each has a key; no two share a prefix."""
    return ValidRequest(
        request_id="r",
        prompt_ids=tuple(dice.choices(range(1 << 16), k=48)),
        sampling=SamplingOptions(seed=0),
        max_tokens=dice.randint(16, 96),
        priority=dice.choice((0, 0, 0, 1, 2)),
        deadline=dice.choice((None, None, 1e6)),
        key=f"key {dice.randrange(NUM_KEYS)}",
    )


def points(num_queued: Sequence[int], num_blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(queued, pages): one varies while the other stands."""
    return [*((n, MANY_BLOCKS) for n in num_queued), *((FEW_QUEUED, n) for n in num_blocks)]


def measure_all(wanted: Sequence[tuple[int, int]], *, num_steps: int, num_rounds: int) -> list[Cost]:
    """Every point in every round, so that a machine that slows down slows all of them; of each the median round."""
    rounds: dict[tuple[int, int], list[Cost]] = {point: [] for point in wanted}
    for number in range(num_rounds):
        for point in rounds:
            rounds[point].append(measure(*point, num_steps=num_steps, seed=number))
            print(f"round {number + 1} of {num_rounds}: {rounds[point][-1].name}", file=sys.stderr)
    return [sorted(costs, key=lambda cost: cost.median_us)[len(costs) // 2] for costs in rounds.values()]


def to_markdown(costs: Sequence[Cost]) -> str:
    """The table, with what it was measured on."""
    lines = [
        f"Router's part of a step of {BATCH} sequences, two tokens each, {NUM_KEYS} keys, three levels; every page in "
        f"use or known, so that each new one means forgetting another. {_machine()}.",
        "",
        "| requests queued | pages | median µs | mean µs | p99 µs | µs per new request | admitted |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.num_queued:,} | {c.num_blocks:,} | {c.median_us:.0f} | {c.mean_us:.0f} | {c.p99_us:.0f} "
        f"| {c.submit_us:.0f} | {c.num_admitted} |"
        for c in costs
    ]
    return "\n".join(lines) + "\n"


def write(folder: Path, costs: Sequence[Cost]) -> list[Path]:
    """JSON, Markdown and a figure."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"machine": _machine(), "batch": BATCH, "points": [asdict(cost) for cost in costs]}
    files = [folder / "scheduler_cost.json", folder / "scheduler_cost.md"]
    files[0].write_text(json.dumps(record, indent=1), encoding="utf-8")
    files[1].write_text(to_markdown(costs), encoding="utf-8")
    by_queue = [(c.num_queued, c) for c in costs if c.num_blocks == MANY_BLOCKS]
    by_pages = [(c.num_blocks, c) for c in costs if c.num_queued == FEW_QUEUED]
    series = {
        f"by requests queued ({MANY_BLOCKS:,} pages)": sorted({n: c.median_us for n, c in by_queue}.items()),
        f"by pages ({FEW_QUEUED:,} queued)": sorted({n: c.median_us for n, c in by_pages}.items()),
    }
    figure = line_plot(
        folder / "scheduler_cost.png",
        {name: [(float(n), us) for n, us in line] for name, line in series.items()},
        title=f"Router's part of a step of {BATCH} sequences",
        x="requests queued, or pages",
        y="µs (median)",
        log_x=True,
        note=_machine(),
    )
    return [*files, figure]


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a measurement, 2 for unusable flags."""
    parser = argparse.ArgumentParser(
        prog="spaceserve bench scheduler",
        description="Measures what a step costs the router with 10 to 10,000 requests waiting and with 1,000 to "
        "1,000,000 pages. No model is needed: the real scheduler, queue and pages are driven by a worker that only "
        "talks.",
    )
    parser.add_argument("--out", type=Path, help="folder for JSON, Markdown and PNG; without it, the table is printed")
    parser.add_argument("--steps", type=int, default=600, help="timed steps per point [default: 600, about a second]")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all points; the median counts [default: 5]")
    options = parser.parse_args(argv)
    if options.steps < 1 or options.rounds < 1:
        print("spaceserve bench scheduler: --steps and --rounds must be at least 1.", file=sys.stderr)
        return 2
    costs = measure_all(points(NUM_QUEUED, NUM_BLOCKS), num_steps=options.steps, num_rounds=options.rounds)
    print(to_markdown(costs), end="")
    if options.out is not None:
        try:
            for file in write(options.out, costs):
                print(f"spaceserve bench scheduler: wrote {file}", file=sys.stderr)
        except OSError as error:
            print(f"spaceserve bench scheduler: {options.out} cannot be written: {error.strerror}.", file=sys.stderr)
            return 2
        except PlotError as error:
            print(f"spaceserve bench scheduler: no figure: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
