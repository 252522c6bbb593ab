"""`spaceserve workers`: lists the workers of a running server, or restarts them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from space_common.process import say

from space_router.commands.server_client import CACERT, KEY_VARIABLE, URL, ChatError, ServerClient, own_key

CANCELLED = 130  # the exit code of a command that Ctrl-C has ended

_EXAMPLES = """\
examples:
  spaceserve workers                                       all workers, and what runs where
  spaceserve workers restart --api-key-file ops.key        one after the other; exit code 0 once all are back
  spaceserve workers restart --only 0,2 --finish-seconds 60
  kill -USR1 PID                                           the same restart on the router's machine, without a key
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, 1 if a restart failed, 2 if the server cannot be reached, 130 after Ctrl-C."""
    options = _parser().parse_args(argv)
    try:
        server = ServerClient(options.url, own_key(options.api_key_file, os.environ), options.cacert)
        if options.command == "restart":
            return restart(server, options.only, options.finish_seconds)
        say(table(server.ask("/workers")))
    except ChatError as error:
        sys.stderr.write(f"spaceserve workers: {error}\n")
        return 2
    return 0


def restart(server: ServerClient, numbers: list[int] | None, finish_seconds: float | None) -> int:
    """Have workers restarted and print the progress until it ends; return the exit code. Raises ChatError.

    The server ends the restart when this client goes away, for whatever reason.
    """
    asked = {"workers": numbers, "finish_seconds": finish_seconds}
    body = {name: value for name, value in asked.items() if value is not None}
    progress: Mapping[str, Any] = {"state": "failed", "error": None}
    shown: list[str] = []
    try:
        with closing(server.stream("/workers/restart", {**body, "stream": True})) as events:
            for event in events:
                progress = event["restart"]
                for line in _news(progress):
                    if line not in shown:
                        shown.append(line)
                        say(line)
    except KeyboardInterrupt:
        sys.stderr.write(
            "\nspaceserve workers: the restart is ended. Workers that were not restarted yet run on, and one that was "
            "asked to end comes back by itself.\n"
        )
        return CANCELLED
    if progress["state"] == "done":
        return 0
    sys.stderr.write(f"spaceserve workers: {progress['error'] or 'the server is stopping'}\n")
    return 1


def _news(progress: Mapping[str, Any]) -> Iterator[str]:
    """Yield what there is to say about a restart; the caller skips what it has said before."""
    yield from (f"left out: {reason}" for reason in progress["left_out"])
    if progress["num_done"]:
        yield f"{progress['num_done']} of {progress['num_wanted']} workers restarted"
    if progress["waits_for"]:
        yield f"waiting for {progress['waits_for']}"


def table(answer: Mapping[str, Any]) -> str:
    """Return one line per worker, and one for a restart that is running or has failed."""
    rows: list[tuple[str, ...]] = [("", "worker", "state", "starts", "running", "free blocks", "address")]
    names = ("number", "name", "state", "num_incarnations", "num_running", "num_available_blocks", "address")
    rows += [tuple("-" if one[name] is None else str(one[name]) for name in names) for one in answer["workers"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    away = [one for one in answer["workers"] if one["state"] == "away" and one["trouble"]]
    lines += [f"{one['name']}: {one['trouble']}" for one in away]
    if (state := answer["restart"])["state"] in ("running", "failed"):
        waiting = f", waiting for {state['waits_for']}" if state["waits_for"] else ""
        lines.append(f"restart {state['state']}: {state['num_done']} of {state['num_wanted']} done{waiting}")
    if state["error"]:
        lines.append(state["error"])
    return "\n".join(lines)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]  # argparse reports a ValueError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve workers",
        description="Asks a running server for its workers, or has them restarted: each ends only while all others are "
        "up that were before, and its streams go on elsewhere with the same text. Ctrl-C ends a restart.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("command", nargs="?", choices=("list", "restart"), default="list", help="[default: list]")
    add("--url", default=URL, help=f"where the server is [default: {URL}]")
    key = f"file whose first word is the key; to restart, an operator's [else: {KEY_VARIABLE}]"
    add("--api-key-file", type=Path, metavar="FILE", help=key)
    add("--cacert", type=Path, metavar="FILE", help=CACERT)
    add("--only", type=_numbers, metavar="N[,N...]", help="restart these workers only")
    finish = "what still runs on a worker after so long goes on elsewhere [default: 10; 0: at once]"
    add("--finish-seconds", type=float, metavar="SECONDS", help=finish)
    return parser


if __name__ == "__main__":
    sys.exit(main())
