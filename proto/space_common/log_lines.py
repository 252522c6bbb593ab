"""Log lines for machines: one JSON object each, with the span that is current where it is written."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """{"time", "level", "logger", "message"}; "exception" where there is one, "trace_id" and "span_id" in a span."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        trace = sys.modules.get("opentelemetry.trace")  # loaded where there may be spans
        if trace is not None and (context := trace.get_current_span().get_span_context()).is_valid:
            line["trace_id"], line["span_id"] = f"{context.trace_id:032x}", f"{context.span_id:016x}"
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str, form: str) -> None:
    """Every line of this process from `level` on, as `form` says: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])
