"""The arms of a run: servers that are started or found, and with which speculation each is asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from space_eval.bench_options import BenchError, Settings
from space_eval.bench_server import ServerProcess, cpu_seconds
from space_eval.load_arm import Arm, find, token_ids
from space_eval.load_client import Endpoint
from space_eval.load_dialect import DIALECTS, Sampling
from space_eval.load_work import Work

PLAIN = "off"
CONTROL = "off again"
PLAIN_SERVER = "plain server"


@dataclass(frozen=True)
class Side:
    """A server that takes part, and its processes if it was started here."""

    name: str
    url: str
    process: ServerProcess | None = None


def sides(
    settings: Settings, serve_flags: Sequence[str], stack: ExitStack, say: Callable[[str], None], start: int = 0
) -> list[Side]:
    """The servers, started if need be for the `start`-th time; `stack` stops them. Raises ServerError."""
    if settings.urls:
        return [Side(name, url) for name, url in settings.urls]
    flags = ["--model", settings.model, *serve_flags]
    kinds = [(settings.model, flags, "")]
    if settings.plain_server:
        never = [*_without_port(flags), "--speculation", PLAIN]
        kinds.append((PLAIN_SERVER, never, " that never speculates"))
    made: dict[str, Side] = {}
    for name, words, what in kinds[:: -1 if start % 2 else 1]:  # neither is always the first
        say(f"starting a server for {settings.model}{what}")
        server = stack.enter_context(ServerProcess(words))
        made[name] = Side(name, server.url, server)
    return [made[name] for name, _, _ in kinds]


def _without_port(flags: Sequence[str]) -> list[str]:
    """A second server takes a free one."""
    kept = list(flags)
    while "--port" in kept:
        place = kept.index("--port")
        del kept[place : place + 2]
    return [flag for flag in kept if not flag.startswith("--port=")]


async def arms(settings: Settings, found: Sequence[Side]) -> tuple[list[Arm], dict[str, dict[str, Any]], int]:
    """The arms in order, their servers' /info by name, and how many of the first are compared with.

    One of our servers alone is several arms: plain, with a control plain again, and each way of speculating. Raises
    LoadError, BenchError.
    """
    sampling = Sampling(settings.temperature, settings.seed)
    known: list[Arm] = []
    infos: dict[str, dict[str, Any]] = {}
    for side in found:
        arm = Arm(
            name=side.name,
            endpoint=Endpoint.parse(side.url, _api_key(settings.api_key_file)),
            dialect=DIALECTS[settings.api],
            sampling=sampling,
            model=settings.served_model,
            speculation=next(iter(settings.speculation), None),
            ignore_eos=not settings.stop_at_eos,
            fields=settings.body,
        )
        arm, infos[side.name] = await find(arm)
        known.append(arm if arm.is_ours else replace(arm, speculation=None))
    first, *others = known
    if settings.urls and (others or not first.is_ours):
        return known, infos, 1
    mine = [replace(first, name=PLAIN, speculation=PLAIN)]
    if settings.control:
        mine.append(replace(first, name=CONTROL, speculation=PLAIN))
    for fast in settings.speculation or ("auto",):
        mine.append(replace(first, name=fast if isinstance(fast, str) else f"k {fast}", speculation=fast))
    if not others:
        return mine, infos, 1
    return [replace(others[0], speculation=PLAIN), *mine], infos, 2


def processes(found: Sequence[Side]) -> Callable[[Arm], Callable[[], Mapping[str, float]]]:
    """Processor seconds so far by process, of an arm's server; none of a server that runs elsewhere."""

    def of(arm: Arm) -> Callable[[], Mapping[str, float]]:
        servers = [side.process for side in found if side.process is not None]
        mine = [server for server in servers if Endpoint.parse(server.url).port == arm.endpoint.port]

        def used() -> Mapping[str, float]:
            if not mine:
                return {}
            workers = sum(cpu_seconds(pid) for pid in mine[0].worker_pids())
            return {"router": cpu_seconds(mine[0].pid), "workers": workers, "client": cpu_seconds(os.getpid())}

        return used

    return of


async def tokenized(work: Work, arms: Sequence[Arm]) -> Work:
    """Prompts of given length as token ids, where every arm takes the same ones, else as text of about that length."""
    if not work.cuts:
        return work
    told = {arm.endpoint: await token_ids(arm.endpoint, work.text) for arm in arms}
    ids = told[arms[0].endpoint]
    if ids is None:
        return work
    shared = len(told) < len(arms) and not all(arm.is_ours for arm in arms)  # no salts: text, which can be marked
    takes_ids = all(arm.dialect.name == "openai" for arm in arms) and all(other == ids for other in told.values())
    return replace(
        work, ids=ids if takes_ids and not shared else (), characters_per_token=len(work.text) / len(ids)
    )  # fmt: skip


def check_window(work: Work, arms: Sequence[Arm]) -> None:
    """Raises BenchError where an answer or a prompt cannot fit."""
    for arm in arms:
        if arm.window is None:
            continue
        if work.max_output_tokens >= arm.window:
            raise BenchError(
                f"--output-tokens is up to {work.max_output_tokens}; it must be below the model's window of "
                f"{arm.window}."
            )


def _api_key(file: Path | None) -> str | None:
    """The first key of a file; keys are never given on the command line, where every process can read them."""
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError):
        raise BenchError(f"--api-key-file {file}: there is no key in it.") from None
