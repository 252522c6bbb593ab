"""What every process of this project sets up: environment of subprocesses, log lines, garbage collection."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

SAFE_PATH = "PYTHONSAFEPATH"


def module_command(module: str, *words: object) -> list[str]:
    """Return the command `python -m module words` of this interpreter.

    `python -m` puts the current folder first on the path, so that a `json.py` or `torch.py` there would run in place of
    the real module. `-P` omits the folder; the folders of PYTHONPATH stay.
    """
    return [sys.executable, "-P", "-m", module, *map(str, words)]


def safe_environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment for a subprocess, with the variables `added`.

    PYTHONSAFEPATH does for the subprocess's own children what `-P` does for it.
    """
    return {**os.environ, **(added or {}), SAFE_PATH: "1"}


_NEW_OBJECTS = 50_000
"""Net new objects before a collection. Steps and events create no cycles, so reference counting frees what they
allocate."""


def collect_seldom() -> None:
    """Exclude all current objects from garbage collection, and collect new ones seldom.

    A step of many sequences, or the events of many streams, allocates more objects than Python's default threshold, so
    each would trigger a collection. Measured with 1,000 streams: a ninth of the router's time, in pauses.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extensions report frozen objects as leaks and print lists of them
    gc.set_threshold(_NEW_OBJECTS, 20, 50)


class JsonLines(logging.Formatter):
    """{"time", "level", "logger", "message"}, plus "exception" if any, and "trace_id" and "span_id" within a span."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        trace = sys.modules.get("opentelemetry.trace")  # loaded only if there may be spans
        if trace is not None and (context := trace.get_current_span().get_span_context()).is_valid:
            line["trace_id"], line["span_id"] = f"{context.trace_id:032x}", f"{context.span_id:016x}"
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str, form: str) -> None:
    """Log this process's messages from `level` on to stderr. `form`: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])
