"""The servers of a run, started here or reached by URL, and the arms measured on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from space_eval.bench.arms import APIS, Arm, find, token_ids
from space_eval.bench.client import Endpoint
from space_eval.bench.options import BenchError, BenchSettings
from space_eval.bench.server_process import ServerProcess, cpu_seconds
from space_eval.bench.workload import Workload

PLAIN = "off"
CONTROL = "off again"
PLAIN_SERVER = "plain server"


@dataclass(frozen=True)
class Target:
    """A measured server, and its process if it was started here."""

    name: str
    url: str
    process: ServerProcess | None = None


def targets(
    settings: BenchSettings, serve_flags: Sequence[str], stack: ExitStack, log: Callable[[str], None], start: int = 0
) -> list[Target]:
    """Return the servers, starting them if needed for the `start`-th time; `stack` stops them. Raises ServerError."""
    if settings.urls:
        return [Target(name, url) for name, url in settings.urls]
    flags = ["--model", settings.model, *serve_flags]
    wanted = {settings.model: (flags, "")}
    if settings.plain_server:
        wanted[PLAIN_SERVER] = ([*_without_port(flags), "--speculation", PLAIN], " that never speculates")
    started: dict[str, Target] = {}
    for name in list(wanted)[:: -1 if start % 2 else 1]:  # alternate the order
        words, what = wanted[name]
        log(f"starting a server for {settings.model}{what}")
        server = stack.enter_context(ServerProcess(words))
        started[name] = Target(name, server.url, server)
    return [started[name] for name in wanted]


def _without_port(flags: Sequence[str]) -> list[str]:
    """Return the flags without a port, for a second server on a free port."""
    kept = list(flags)
    while "--port" in kept:
        place = kept.index("--port")
        del kept[place : place + 2]
    return [flag for flag in kept if not flag.startswith("--port=")]


async def find_arms(settings: BenchSettings, servers: Sequence[Target]) -> tuple[list[Arm], dict[str, dict[str, Any]]]:
    """Return the arms in order, and their servers' /info by name. Raises LoadError, BenchError.

    A single spaceserve gives several arms: plain, with a control plain again, and each speculation setting.
    """
    arms: list[Arm] = []
    infos: dict[str, dict[str, Any]] = {}
    for server in servers:
        arm = Arm(
            name=server.name,
            endpoint=Endpoint.parse(server.url, _api_key(settings.api_key_file)),
            api=APIS[settings.api],
            temperature=settings.temperature,
            seed=settings.seed,
            model=settings.served_model,
            speculation=next(iter(settings.speculation), None),
            ignore_eos=not settings.stop_at_eos,
            fields=settings.body,
            is_baseline=not arms,
        )
        arm, infos[server.name] = await find(arm)
        arms.append(arm)
    first, *others = arms
    if settings.urls and (others or not first.is_spaceserve):
        return arms, infos
    modes: list[tuple[str, str | int]] = [(PLAIN, PLAIN)]
    if settings.control:
        modes.append((CONTROL, PLAIN))
    modes += [(mode if isinstance(mode, str) else f"k {mode}", mode) for mode in settings.speculation or ("auto",)]
    own = [replace(first, name=name, speculation=mode, is_baseline=name == PLAIN) for name, mode in modes]
    return [*(replace(other, speculation=PLAIN, is_baseline=True) for other in others), *own], infos


def cpu_counter(servers: Sequence[Target], arm: Arm) -> Callable[[], Mapping[str, float]]:
    """Return a counter of CPU seconds by process of an arm's server; it is empty for a remote server."""
    local = [server.process for server in servers if server.process is not None]
    process = next((one for one in local if Endpoint.parse(one.url).port == arm.endpoint.port), None)
    if process is None:
        return dict
    return lambda: {
        "router": cpu_seconds(process.pid),
        "workers": sum(cpu_seconds(pid) for pid in process.worker_pids()),
        "client": cpu_seconds(os.getpid()),
    }


async def tokenized(work: Workload, arms: Sequence[Arm]) -> Workload:
    """Make prompts of given length: token ids if all arms' servers tokenize alike, else text of about that length."""
    if not work.has_given_lengths:
        return work
    by_server = {arm.endpoint: await token_ids(arm.endpoint, work.text) for arm in arms}
    ids = by_server[arms[0].endpoint]
    if ids is None:
        return work
    shared = len(by_server) < len(arms) and not all(arm.is_spaceserve for arm in arms)  # unsalted: only text is marked
    takes_ids = all(arm.api.name == "openai" for arm in arms) and all(other == ids for other in by_server.values())
    work = replace(work, characters_per_token=len(work.text) / len(ids))
    return replace(work, ids=ids) if takes_ids and not shared else work


def check_window(work: Workload, arms: Sequence[Arm]) -> None:
    """Raise BenchError if the longest answer does not fit an arm's window."""
    for arm in arms:
        if arm.window is not None and work.max_output_tokens >= arm.window:
            raise BenchError(
                f"--output-tokens is up to {work.max_output_tokens}; it must be below the model's window of "
                f"{arm.window}."
            )


def _api_key(file: Path | None) -> str | None:
    """Return the first key of a file; keys on a command line would be visible to other processes."""
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError):
        raise BenchError(f"--api-key-file {file}: there is no key in it.") from None
