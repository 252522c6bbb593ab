"""A clock that is set changes nothing: what waits, times out or is measured goes by the monotonic clock."""

import ast
from pathlib import Path

ROOMS = (
    "router/space_router",
    "server/space_server",
    "server/space_model",
    "kernels/space_kernels",
    "proto/space_proto",
)
DATES = {
    "router/space_router/api/openai/stream.py",  # `created`
    "router/space_router/api/openai/responses.py",  # `created_at`, `completed_at`
    "router/space_router/api/service.py",  # `created` of a model
    "router/space_router/text/chat_template.py",  # `strftime_now`
    "server/space_server/startup/starting_costs.py",  # the day on which a file was written
}
"""Where a date is told to clients, or to readers of a file; nothing is computed with it."""


def wall_clocks(source: str) -> list[str]:
    """Uses of clocks that can be set."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today"}:
                found.append(name)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"time.{alias.name}" for alias in node.names if alias.name in {"time", "time_ns"}]
    return found


def test_only_dates_that_clients_are_told_come_from_a_clock_that_can_be_set(root: Path) -> None:
    using = {
        str(file.relative_to(root))
        for room in ROOMS
        for file in (root / room).rglob("*.py")
        if wall_clocks(file.read_text(encoding="utf-8"))
    }
    assert using == DATES


def test_a_clock_that_can_be_set_is_seen() -> None:
    assert wall_clocks("import time\nbegun = time.time()") == ["time.time"]
    assert wall_clocks("from time import time") == ["time.time"]
    assert wall_clocks("import time\nbegun = time.monotonic()") == []
