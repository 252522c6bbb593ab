"""A whole server on one core and little memory: whether every text is exact, and what the server takes.

Affinity holds it to the core. Each process gets a share of the memory as a limit of its own data (RLIMIT_DATA), shares
add up to the limit, and what all of them have in memory, files included, is read every 50 ms and must stay below it. A
container's own limits hold as well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from space_common.http_client import Endpoint, post_json
from space_common.process import ServerError, ServerProcess
from space_common.worker.settings import parse_amount
from space_eval.data import built_in
from space_eval.flags import whole_from
from space_server.startup.model_need import shown

from perf.harness import PerfError, Report, table

ROUTERS_SHARE = 0.25  # of the memory limit; the rest is the worker's


@dataclass(frozen=True)
class Held:
    """Bytes that a process has in memory at one moment."""

    own: int = 0  # of no file: what a machine must have
    files: int = 0  # of files, which can be dropped and read again; counted for each process that has them

    @property
    def total(self) -> int:
        return self.own + self.files

    def __add__(self, other: Held) -> Held:
        return Held(self.own + other.own, self.files + other.files)

    @classmethod
    def by(cls, pid: int, processes: Path = Path("/proc")) -> Held:
        """Zeros for a process that is gone (Linux)."""
        try:
            lines = (processes / str(pid) / "smaps_rollup").read_text(encoding="utf-8").splitlines()
        except OSError:
            return cls()
        fields = {line.partition(":")[0]: line.split() for line in lines}
        own, whole = (int(fields[name][1]) * 1024 if name in fields else 0 for name in ("Anonymous", "Rss"))
        return cls(own, whole - own)


class MemoryWatch:
    """Reads the memory of some processes again and again inside its block; keeps the most they held together."""

    def __init__(self, processes: Callable[[], Iterable[int]], period: float = 0.05) -> None:
        self.most = Held()
        self.num_looks = 0
        self._processes, self._period = processes, period
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            together = sum((Held.by(pid) for pid in self._processes()), Held())
            self.most = max(self.most, together, key=lambda held: held.total)
            self.num_looks += 1
            if self._over.wait(self._period):
                return


@dataclass(frozen=True)
class Visit:
    """One start of the server: how long it took, what it held, what it wrote."""

    speculation: str
    start_seconds: float  # from the command until it is ready
    router_ready: Held
    worker_ready: Held
    most: Held  # all processes together
    num_looks: int
    stream_seconds: float  # of all streams at once
    num_tokens: int
    drafted: int
    accepted: int
    num_equal: int
    num_texts: int


def visit(flags: Sequence[str], core: int, limit: int, num_streams: int, num_tokens: int) -> Visit:
    """Start the server within its limits, ask it, end it. Raises ServerError."""
    prompts = built_in()
    bodies = [
        # Greedy, and every second one sampled.
        {"prompt": prompts[n % len(prompts)] + "#" * (n // len(prompts)), "max_tokens": num_tokens,
         "temperature": 0.8 * (n % 2), "seed": n}
        for n in range(num_streams)
    ]  # fmt: skip
    server = ServerProcess(flags, wait_ready=False)
    with ExitStack() as stack:
        with confined(core, int(limit * (1 - ROUTERS_SHARE))):
            begun = time.perf_counter()
            stack.enter_context(server)
        watch = stack.enter_context(MemoryWatch(lambda: [server.pid, *server.worker_pids()]))
        server.wait_ready()
        seconds = time.perf_counter() - begun
        resource.prlimit(server.pid, resource.RLIMIT_DATA, (int(limit * ROUTERS_SHARE),) * 2)
        (worker,) = server.worker_pids()
        router_ready, worker_ready = Held.by(server.pid), Held.by(worker)
        stream_seconds, together, alone = asyncio.run(answers(Endpoint.parse(server.url), bodies))
        if server.worker_pids() != [worker]:
            raise ServerError("The worker was restarted while it served: its memory may not have been enough.")
    steps = [answer["spaceserve"] for answer in together]
    texts, wanted = ([answer["choices"][0]["text"] for answer in of] for of in (together, alone))
    return Visit(
        speculation=flags[-1], start_seconds=seconds, router_ready=router_ready, worker_ready=worker_ready,
        most=watch.most, num_looks=watch.num_looks, stream_seconds=stream_seconds,
        num_tokens=sum(answer["usage"]["completion_tokens"] for answer in together),
        drafted=sum(one["drafted"] for one in steps), accepted=sum(one["accepted"] for one in steps),
        num_equal=sum(one == other for one, other in zip(texts, wanted, strict=True)), num_texts=len(texts),
    )  # fmt: skip


@contextmanager
def confined(core: int, num_bytes: int) -> Iterator[None]:
    """Processes started here run on one core, each with at most so many bytes of data of its own."""
    cores, (soft, hard) = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, hard)
    os.sched_setaffinity(0, {core})
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        os.sched_setaffinity(0, cores)


async def answers(endpoint: Endpoint, bodies: Sequence[dict[str, Any]]) -> tuple[float, list[Any], list[Any]]:
    """Seconds of all streams at once, their answers, and those that each has alone with plain decoding."""

    async def ask(body: dict[str, Any], **more: Any) -> Any:
        return await post_json(endpoint, "/v1/completions", body | more)

    await asyncio.gather(*(ask(body, max_tokens=4) for body in bodies))  # the first ones are slow
    started = time.perf_counter()
    together = await asyncio.gather(*map(ask, bodies))
    seconds = time.perf_counter() - started
    return seconds, together, [await ask(body, speculation="off") for body in bodies]


def installed(name: str = "spaceserve") -> dict[str, int]:
    """Bytes of each distribution that `name` needs here, itself included, without extras; largest first."""
    sizes: dict[str, int] = {}
    waiting = [name]
    while waiting:
        each = canonicalize_name(waiting.pop())
        if each in sizes:
            continue
        try:
            found = distribution(each)
        except PackageNotFoundError:
            continue  # needed on other systems only
        paths = (Path(str(found.locate_file(file))) for file in found.files or ())
        sizes[each] = sum(path.stat().st_size for path in paths if path.is_file())
        wanted = map(Requirement, found.requires or ())
        waiting += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def problems(found: Sequence[Visit], limit: int) -> list[str]:
    wrong = []
    for one in found:
        if one.num_equal != one.num_texts:
            wrong.append(
                f"{one.num_texts - one.num_equal} of {one.num_texts} texts are not those of plain decoding alone."
            )
        if one.most.total > limit:
            wrong.append(f"{shown(one.most.total)} were in memory at once; the limit is {shown(limit)}.")
    if found and not found[0].drafted:
        wrong.append("Nothing was drafted: equal texts prove nothing.")
    return wrong


def report(options: argparse.Namespace, found: Sequence[Visit], sizes: dict[str, int]) -> Report:
    """The table, how the limit was kept, and every problem."""
    limit = options.memory
    largest = ", ".join(f"{name} {shown(size)}" for name, size in list(sizes.items())[:4])
    notes = (
        f"{options.model} on one core with {shown(limit)}: data of the worker at most "
        f"{shown(int(limit * (1 - ROUTERS_SHARE)))}, of the router {shown(int(limit * ROUTERS_SHARE))} (RLIMIT_DATA), "
        f"all memory read every 50 ms; {options.streams} streams of {options.tokens} tokens, half of them sampled. The "
        "clients run on the other cores.\n\n"
        f"Installed, with all it needs and no extras: {shown(sum(sizes.values()))} ({largest})."
    )
    head = ["--speculation", "starts in", "router", "worker", "most at once", "of it files", "tokens/s", "drafted"]
    head += ["accepted", "texts as plain decoding alone"]
    rows = [
        (
            one.speculation, f"{one.start_seconds:.1f} s",
            *(shown(size) for size in (one.router_ready.total, one.worker_ready.total, one.most.total, one.most.files)),
            f"{one.num_tokens / one.stream_seconds:.0f}", one.drafted, one.accepted,
            f"{one.num_equal} of {one.num_texts}",
        )
        for one in found
    ]  # fmt: skip
    record = {"visits": [asdict(one) for one in found], "installed": sizes, "limit": limit}
    return Report("A server on one core", notes, [table(head, rows)], record, failures=problems(found, limit))


def run(options: argparse.Namespace) -> Report:
    """Two starts: with every group of masks, so that there are drafts to be wrong; then as the server chooses."""
    if not hasattr(os, "sched_setaffinity") or not Path("/proc/self/smaps_rollup").is_file():
        raise PerfError("only Linux holds a process to a core and says what it has in memory.")
    core = min(os.sched_getaffinity(0)) if options.core is None else options.core
    if core not in os.sched_getaffinity(0):
        raise PerfError(f"this process may not run on --core {core}.")
    flags = ["--model", options.model, "--max-sequences", str(options.streams)]
    found = [
        visit([*flags, "--speculation", speculation], core, options.memory, options.streams, options.tokens)
        for speculation in (str(options.drafts), "auto")
    ]
    return report(options, found, installed())


def _amount(text: str) -> int:
    try:
        amount = parse_amount(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not isinstance(amount, int):
        raise argparse.ArgumentTypeError(f"must be bytes such as 1GiB; got {text!r}")
    return amount


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="what is served (demo)")
    add("--memory", type=_amount, default=1 << 30, metavar="SIZE", help="of all processes together (1GiB)")
    add("--streams", type=whole_from(1), default=4, help="at once (4)")
    add("--tokens", type=whole_from(1), default=128, help="of each answer, at most (128)")
    add("--drafts", type=whole_from(1), default=5, help="per step of the first start, always (5)")
    add("--core", type=int, help="the one core (the first that this process may use)")
