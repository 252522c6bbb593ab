"""`spaceserve doctor`: checks whether the server would start with these flags, and says how to fix it if not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from space_common import default_model
from space_common.finding import Finding
from space_common.process import safe_environment
from space_common.version import version
from space_common.visible_gpus import gpus_of

from space_router.config import ServeConfig, build
from space_router.engine.workers.supervisor import unproven, worker_command
from space_router.errors import ConfigError
from space_router.http_server.listening import GUARD, UNIX, connected, is_open_to_others, listening, room_for

PARTS = ("settings", "environment", "gpu", "kernels", "model", "memory", "ports", "workers", "energy")
WORKER_SECONDS = 300.0


def run(flags: Mapping[str, str | None], environment: Mapping[str, str], *, as_json: bool) -> int:
    """Print the findings; return 0 if the server would start, else 1."""
    findings = sorted(examine(flags, environment), key=lambda finding: PARTS.index(finding.part))
    text = report(findings)
    if as_json:
        found = {"would_start": would_start(findings), "findings": [asdict(finding) for finding in findings]}
        text = json.dumps({"version": version(), **found}, indent=1)
    sys.stdout.write(text + "\n")
    return 0 if would_start(findings) else 1


def would_start(findings: Sequence[Finding]) -> bool:
    return not any(finding.state == "fail" for finding in findings)


def examine(
    flags: Mapping[str, str | None],
    environment: Mapping[str, str],
    ask_worker: Callable[[ServeConfig], Sequence[Finding]] | None = None,
) -> Iterator[Finding]:
    """Yield the findings of every part. `ask_worker`: returns those of a worker process; None starts one."""
    try:
        config = build(flags, environment)
    except ConfigError as error:
        yield Finding("settings", "fail", str(error))
        return
    given = [name for name, value in flags.items() if value is not None]
    variables = sorted(name for name in environment if name.startswith("SPACESERVE_"))
    words = ", ".join([*(f"--{name.replace('_', '-')}" for name in given), *variables]) or "none: all are defaults"
    yield Finding("settings", "ok", f"spaceserve {version()}; settings given: {words}")
    config, finding = _served(config)
    if finding is not None:
        yield finding
    if finding is None or config.model == default_model.FALLBACK:
        yield from _text(config)
    yield from _ports(config)
    yield _open_files(config.max_connections)
    if config.worker_address:
        yield from map(_reachable, config.worker_address)
        for address in config.unproven_workers():
            yield Finding("workers", "note", unproven(address))
    else:
        yield from _gpus_of_workers(config)
        yield from (ask_worker or _worker)(config)


def _served(config: ServeConfig) -> tuple[ServeConfig, Finding | None]:
    """Return the config that would be served, and a finding if the default model is not downloaded yet."""
    from space_router.text.model_text import hub_of

    if config.model != default_model.NAME:
        return config, None
    try:
        is_here = default_model.missing(hub_of(config)).num_files == 0
    except default_model.DefaultModelUnavailable as error:
        if config.model_is_named:
            return config, Finding("model", "fail", str(error))
        other = replace(config, model=default_model.FALLBACK)
        return other, Finding("model", "note", str(error), f"As it is, {other.model} would be served.")
    fact = f"Tokenizer and chat template of {config.model} come with its weights."
    return config, None if is_here else Finding("model", "note", fact)


def _text(config: ServeConfig) -> Iterator[Finding]:
    from space_router.text.model_text import ModelText

    try:
        text = ModelText.load(config)
    except ConfigError as error:
        yield Finding("model", "fail", str(error))
        return
    if text.chat_template is None:
        fact = f"{config.model} has no chat template: /v1/chat/completions is refused."
        yield Finding("model", "note", fact, "Give --chat-template, a name or a file.")
    else:
        yield Finding("model", "ok", f"tokenizer and chat template of {text.name} can be read")


def _ports(config: ServeConfig) -> Iterator[Finding]:
    for flag, port in (("--port", config.port), ("--grpc-port", config.grpc_port)):
        if port is None:
            continue
        try:
            with listening(config.host, port, flag=flag) as bound:
                bound.listen(1)
                is_open = is_open_to_others(bound)
        except (ConfigError, OSError) as error:
            cure = f"End the process that listens there (`ss -ltnp` shows it), or choose another {flag}."
            yield Finding("ports", "fail", str(error), cure)
            continue
        where = config.host if config.host.startswith(UNIX) else f"{config.host} {flag} {port}"
        yield Finding("ports", "ok", f"{where} is free")
        if is_open and flag == "--port" and not config.api_keys:
            fact = f"Any client that reaches {config.host} may use the server: it asks for no key."
            yield Finding("ports", "note", fact, GUARD)


def _open_files(num_connections: int) -> Finding:
    room = room_for(num_connections)
    if room < num_connections:
        fact = f"{room} of --max-connections {num_connections} fit into the files that may be open."
        cure = "ulimit -n 65536, or LimitNOFILE= in a unit, or docker run --ulimit nofile=65536."
        return Finding("ports", "note", fact, cure)
    return Finding("ports", "ok", f"{num_connections} connections at once fit into the files that may be open")


def _gpus_of_workers(config: ServeConfig) -> Iterator[Finding]:
    """Report which GPUs each of several workers gets."""
    if not config.gpus:
        return
    numbers = range(config.workers)
    shares = [",".join(gpus_of(number, config.gpus, config.workers, config.tensor_parallel)) for number in numbers]
    yield Finding("workers", "ok", f"{config.workers} workers, on GPU " + "; ".join(shares))
    if len(set(shares)) < len(shares) and config.kv_memory == "auto":
        fact = f"{config.workers} workers share {len(config.gpus)} GPUs, and each takes 0.9 of what is free there."
        yield Finding("workers", "note", fact, "Take --workers auto, or a --kv-memory that fits for each.")


def _reachable(address: str) -> Finding:
    """Check that a remote worker's address accepts connections."""
    try:
        connected(address, 5.0).close()
    except (OSError, ValueError) as error:
        cure = "Start `spaceserve worker --listen …` there, and open the port between the machines."
        return Finding("workers", "fail", f"No worker answers at {address}: {error}.", cure)
    return Finding("workers", "ok", f"{address} answers")


def _worker(config: ServeConfig) -> Sequence[Finding]:
    """Return the findings of a worker process, because only it may import torch."""
    command = worker_command(config, "unix:/nowhere", module="space_server.startup.doctor")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WORKER_SECONDS, env=safe_environment())
        return [Finding(**found) for found in json.loads(done.stdout)]
    except (subprocess.TimeoutExpired, ValueError, TypeError) as error:
        words = [] if isinstance(error, subprocess.TimeoutExpired) else done.stderr.strip().splitlines()
        fact = f"A worker's process cannot begin: {words[-1] if words else error}"
        return [Finding("workers", "fail", fact, "Install anew: docker/install.sh")]


def report(findings: Sequence[Finding]) -> str:
    """Return the findings as one page of text."""
    width = max(60, min(shutil.get_terminal_size((120, 40)).columns, 120))
    lines: list[str] = []

    def add(head: str, text: str) -> None:
        wrapper = textwrap.TextWrapper(width, head, " " * len(head), break_long_words=False, break_on_hyphens=False)
        lines.extend(wrapper.wrap(text))

    for part in PARTS:
        here = [finding for finding in findings if finding.part == part]
        for number, finding in enumerate(here):
            head = part if number == 0 else ""
            mark = {"ok": "ok  ", "note": "note", "fail": "FAIL"}[finding.state]
            add(f"{head:<12} {mark}  ", finding.fact)
            if finding.cure:
                add(" " * 19 + "→ ", finding.cure)
    num = sum(finding.state == "fail" for finding in findings)
    things = "one thing" if num == 1 else f"{num} things"
    conclusion = "The server would start." if num == 0 else f"The server would not start: {things} marked FAIL."
    return "\n".join([*lines, "", conclusion])
