"""`spaceserve bench edge`: a whole server on one core and little memory; is every text exact, and what does it take?

The core is the kernel's to hold (affinity); so is the memory: each process gets a share of it that its own data cannot
outgrow (RLIMIT_DATA), shares add up to the limit, and what all of them have in memory, files too, is looked at 20 times
a second and must stay below it. In a container with a limit of its own that one holds as well.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from space_server.machine.memory import NotEnoughMemory, parse_amount
from space_server.startup.model_need import shown

from space_eval.bench.facts import commit, machine
from space_eval.bench.server_process import ServerError, ServerProcess
from space_eval.flag_values import whole
from space_eval.installed_size import installed
from space_eval.process_memory import Held, MemoryWatch
from space_eval.prompts import built_in
from space_eval.written import write

ROUTERS_SHARE = 0.25
"""Of the memory limit; the rest is the worker's."""

_EPILOG = """\
examples:
  spaceserve bench edge
  spaceserve bench edge --memory 768MiB --streams 2 --out edge
  spaceserve bench edge --model PATH --memory 4GiB --core 3
"""


@dataclass(frozen=True)
class Answer:
    """A text, and what it took."""

    text: str
    num_tokens: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Visit:
    """One start of the server: how long it took, what it held, what it wrote."""

    speculation: str
    start_seconds: float  # from the command to an answer being possible
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


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; 1 where a text differs, the limit was passed or the server failed; 2 for unusable flags."""
    options = _parser().parse_args(argv)
    if not hasattr(os, "sched_setaffinity") or not Path("/proc/self/smaps_rollup").is_file():
        print(
            "spaceserve bench edge: Linux holds a process to a core and says what it holds; this is none.",
            file=sys.stderr,
        )
        return 2
    core = min(os.sched_getaffinity(0)) if options.core is None else options.core
    if core not in os.sched_getaffinity(0):
        print(f"spaceserve bench edge: this process may not run on --core {core}.", file=sys.stderr)
        return 2
    flags = ["--model", options.model, "--max-sequences", str(options.streams)]
    try:
        # Every group of masks first, so that drafts are there to be wrong; then as a server would choose.
        found = [
            visit([*flags, "--speculation", speculation], core, options.memory, options.streams, options.tokens)
            for speculation in (str(options.drafts), "auto")
        ]
    except (ServerError, OSError, ValueError) as error:
        print(f"spaceserve bench edge: {error}", file=sys.stderr)
        return 1
    sizes = installed()
    record = {
        "machine": machine(),
        "commit": commit(),
        "model": options.model,
        "core": core,
        "limit": options.memory,
        "streams": options.streams,
        "tokens": options.tokens,
        "visits": [asdict(one) for one in found],
        "installed": sizes,
    }
    wrong = problems(found, options.memory)
    text = markdown(record, found, wrong)
    print(text, end="")
    if options.out is not None:
        write(options.out, "edge", record, text)
    return 1 if wrong else 0


def visit(flags: Sequence[str], core: int, limit: int, num_streams: int, num_tokens: int) -> Visit:
    """Start the server within its limits, ask it, end it. Raises ServerError."""
    server = ServerProcess(flags, wait_ready=False)
    with confined(core, int(limit * (1 - ROUTERS_SHARE))):
        begun = time.perf_counter()
        server.start()
    with _ended(server), MemoryWatch(lambda: [server.pid, *server.worker_pids()]) as watch:
        server.wait_ready()
        seconds = time.perf_counter() - begun
        resource.prlimit(server.pid, resource.RLIMIT_DATA, (int(limit * ROUTERS_SHARE),) * 2)
        (worker,) = server.worker_pids()
        router_ready, worker_ready = Held.by(server.pid), Held.by(worker)
        prompts = [prompt.text for prompt in built_in()][:num_streams]
        prompts = [prompts[number % len(prompts)] + "#" * (number // len(prompts)) for number in range(num_streams)]
        bodies = [_body(prompt, number, num_tokens) for number, prompt in enumerate(prompts)]
        with ThreadPoolExecutor(num_streams) as pool:
            list(pool.map(lambda body: ask(server.url, body | {"max_tokens": 4}), bodies))  # what is first is slow
            started = time.perf_counter()
            together = list(pool.map(lambda body: ask(server.url, body), bodies))
            stream_seconds = time.perf_counter() - started
        alone = [ask(server.url, body | {"speculation": "off"}) for body in bodies]
        if server.worker_pids() != [worker]:
            raise ServerError("The worker was started again while it served: its memory may not have been enough.")
    return Visit(
        speculation=flags[-1],
        start_seconds=seconds,
        router_ready=router_ready,
        worker_ready=worker_ready,
        most=watch.most,
        num_looks=watch.num_looks,
        stream_seconds=stream_seconds,
        num_tokens=sum(answer.num_tokens for answer in together),
        drafted=sum(answer.drafted for answer in together),
        accepted=sum(answer.accepted for answer in together),
        num_equal=sum(one.text == other.text for one, other in zip(together, alone, strict=True)),
        num_texts=len(together),
    )


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


@contextmanager
def _ended(server: ServerProcess) -> Iterator[None]:
    try:
        yield
    except BaseException:
        server.kill()
        raise
    if (code := server.stop()) != 0:
        raise ServerError(f"The server ended with code {code} after SIGTERM.\n{server.last_words()}")


def _body(prompt: str, number: int, num_tokens: int) -> dict[str, Any]:
    """Greedy, and every second one sampled."""
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0.8 * (number % 2), "seed": number}


def ask(url: str, body: dict[str, Any]) -> Answer:
    """One completion. Raises ServerError."""
    told = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", told, {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=600) as answered:
            found = json.load(answered)
    except urllib.error.HTTPError as error:
        raise ServerError(f"It answered {error.code}: {error.read().decode(errors='replace')}") from error
    steps = found["spaceserve"]
    return Answer(found["choices"][0]["text"], found["usage"]["completion_tokens"], steps["drafted"], steps["accepted"])


def problems(found: Sequence[Visit], limit: int) -> list[str]:
    """What was not as it must be."""
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


def markdown(record: dict[str, Any], found: Sequence[Visit], wrong: Sequence[str]) -> str:
    """The report."""
    limit = record["limit"]
    lines = [
        f"{record['model']} on core {record['core']} alone with {shown(limit)}: data of the worker at most "
        f"{shown(int(limit * (1 - ROUTERS_SHARE)))}, of the router {shown(int(limit * ROUTERS_SHARE))} (RLIMIT_DATA), "
        f"all that is in memory looked at every 50 ms; {record['streams']} streams of {record['tokens']} tokens, half "
        f"of them sampled; {record['machine']}, commit {record['commit']}. The clients run on the other cores.",
        "",
        "| --speculation | starts in | router | worker | most at once | of it files | tokens/s | drafted | accepted "
        "| texts as plain decoding alone |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        lines.append(
            f"| {one.speculation} | {one.start_seconds:.1f} s | {shown(one.router_ready.total)} | "
            f"{shown(one.worker_ready.total)} | {shown(one.most.total)} | {shown(one.most.files)} | "
            f"{one.num_tokens / one.stream_seconds:.0f} | {one.drafted} | {one.accepted} | "
            f"{one.num_equal} of {one.num_texts} |"
        )
    sizes = record["installed"]
    largest = ", ".join(f"{name} {shown(size)}" for name, size in list(sizes.items())[:4])
    lines += ["", f"Installed, with all it needs and no extras: {shown(sum(sizes.values()))} ({largest})."]
    lines += ["", *(f"WRONG: {each}" for each in wrong)] if wrong else []
    return "\n".join(lines) + "\n"


def _amount(text: str) -> int:
    try:
        amount = parse_amount(text)
    except NotEnoughMemory as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not isinstance(amount, int):
        raise argparse.ArgumentTypeError(f"must be bytes such as 1GiB; got {text!r}")
    return amount


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve bench edge",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="demo", help="what is served (demo)")
    add("--memory", type=_amount, default=1 << 30, metavar="SIZE", help="of all processes together (1GiB)")
    add("--streams", type=whole, default=4, help="at once (4)")
    add("--tokens", type=whole, default=128, help="of each answer, at most (128)")
    add("--drafts", type=whole, default=5, help="per step of the first start, always (5)")
    add("--core", type=int, help="the one core (the first that this process may use)")
    add("--out", type=Path, metavar="FOLDER", help="folder for edge.json and .md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
