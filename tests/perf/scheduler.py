"""What a step costs the router, by queued requests and by pages: it should depend on neither.

The real scheduler, queue and pages are driven by a worker that computes nothing. Costs are processor time, so that
other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass

from doubles.router.tabletop import Tabletop
from space_eval.flags import whole_from
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.pages import PagePool
from space_router.engine.request.request import SamplingOptions, Stream, ValidRequest
from space_router.metrics import Metrics

from perf.harness import Report, log, table, take_turns, without_tails
from perf.streams import InstantWorker

NUM_QUEUED = (10, 100, 1_000, 10_000)
NUM_BLOCKS = (1_000, 10_000, 100_000, 1_000_000)
MANY_BLOCKS = 10_000  # where the queue varies
FEW_QUEUED = 100  # where the pages vary
POINTS = [*((n, MANY_BLOCKS) for n in NUM_QUEUED), *((FEW_QUEUED, n) for n in NUM_BLOCKS if n != MANY_BLOCKS)]
"""(queued, pages): one varies while the other stands."""
BATCH = 64
NUM_KEYS = 20
WARM_UP = 40  # steps that are not timed


@dataclass(frozen=True)
class Cost:
    """Of the router's part of a step: reports read, pages granted, requests admitted in place of those that ended."""

    num_queued: int
    num_blocks: int
    median_us: float
    p99_us: float
    submit_us: float  # median of what one new request costs
    num_admitted: int


def timed(method: Callable[..., None], seconds: array[float]) -> Callable[..., None]:
    """The method; each call's processor time is appended to `seconds`."""

    def call(*arguments: object) -> None:
        begun = time.thread_time()
        method(*arguments)
        seconds.append(time.thread_time() - begun)

    return call


def measure(num_queued: int, num_blocks: int, *, num_steps: int, seed: int = 0) -> Cost:
    """A full batch, `num_queued` requests behind it, every page in use or cached; each finished request is replaced."""
    dice = random.Random(seed)
    config = ServeConfig(max_queue=num_queued + 10 * BATCH, max_prefill_rows=4096)
    table = Tabletop(
        lambda: InstantWorker(num_blocks=num_blocks, max_sequences=BATCH, per_step=2), config=config, metrics=Metrics()
    )
    engine = table.engine
    for connection in table.connections:
        if connection.scheduler is not None:
            fill(connection.scheduler.pool)
    streams: set[Stream] = set()
    submits, reports = array("d"), array("d")

    def submit(engine: Engine) -> None:
        streams.add(engine.submit(_request(dice)))

    timed_submit = timed(submit, submits)
    for _ in range(BATCH + num_queued):
        submit(engine)
    setattr(engine, "worker_report", timed(engine.worker_report, reports))  # noqa: B010  timed from outside

    def tick() -> None:
        table.tick(0.01)
        for stream in [stream for stream in streams if stream.num_ready]:
            while stream.num_ready:
                if stream.read().finish is not None:
                    streams.remove(stream)
                    timed_submit(engine)

    for _ in range(min(WARM_UP, num_steps)):
        tick()
    del reports[:], submits[:]
    while len(reports) < num_steps:
        tick()
    ordered = sorted(1e6 * seconds for seconds in reports)
    return Cost(
        num_queued, num_blocks, median_us=statistics.median(ordered), p99_us=ordered[int(0.99 * len(ordered))],
        submit_us=1e6 * statistics.median(submits), num_admitted=len(submits),
    )  # fmt: skip


def fill(pool: PagePool) -> None:
    """Cache content in every page that no request will ask for, so that each new page evicts one."""
    blocks = pool.take(pool.num_available)
    for block in blocks:
        pool.publish(block, b"old %d" % block)
    pool.give_back(blocks)


def _request(dice: random.Random) -> ValidRequest:
    """Several priorities, some deadlines, an API key each; no two share a prefix."""
    return ValidRequest(
        request_id="r", prompt_ids=tuple(dice.choices(range(1 << 16), k=48)), sampling=SamplingOptions(seed=0),
        max_tokens=dice.randint(16, 96), priority=dice.choice((0, 0, 0, 1, 2)),
        deadline=dice.choice((None, None, 1e6)), key=f"key {dice.randrange(NUM_KEYS)}",
    )  # fmt: skip


def run(options: argparse.Namespace) -> Report:
    rounds: dict[tuple[int, int], list[Cost]] = {point: [] for point in POINTS}

    def turn(point: tuple[int, int], number: int) -> None:
        log(f"round {number + 1} of {options.rounds}: {point[0]:,} queued, {point[1]:,} pages")
        rounds[point].append(measure(*point, num_steps=options.steps, seed=number))

    take_turns(POINTS, options.rounds, turn)
    rows = [
        (
            f"{queued:,}", f"{blocks:,}", without_tails([cost.median_us for cost in costs]).shown(0),
            f"{statistics.median(cost.p99_us for cost in costs):.0f}",
            f"{statistics.median(cost.submit_us for cost in costs):.0f}", sum(cost.num_admitted for cost in costs),
        )
        for (queued, blocks), costs in rounds.items()
    ]  # fmt: skip
    head = ("requests queued", "pages", "median µs", "p99 µs", "µs per new request", "admitted")
    notes = (
        f"Router's part of a step of {BATCH} sequences, two tokens each, {NUM_KEYS} keys, three priorities; every page "
        f"is in use or cached, so that each new one evicts another. Medians of {options.rounds} rounds of "
        f"{options.steps} steps, all points in turn."
    )
    record = {"batch": BATCH, "points": [asdict(cost) for costs in rounds.values() for cost in costs]}
    return Report("Router's cost of a step", notes, [table(head, rows)], record)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=whole_from(1), default=600, help="timed steps per point [600, about a second]")
    parser.add_argument("--rounds", type=whole_from(1), default=5, help="rounds over all points [5]")
