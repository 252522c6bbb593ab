"""The table as Markdown, for router/guides/coming_from.md: `python -m space_router.foreign_flags.markdown`."""

from __future__ import annotations

import sys

from space_router.foreign_flags import table
from space_router.foreign_flags.command_line import shown
from space_router.foreign_flags.flag import ForeignFlag, OtherEngine

BEGIN, END = "<!-- flags: begin -->", "<!-- flags: end -->"


def to_markdown() -> str:
    """Return a section for each engine: its flags, ours, and what becomes of the value."""
    parts = []
    for engine in OtherEngine:
        rows = "\n".join(_line(row, engine) for row in table.of(engine))
        parts.append(f"## {engine.label}\n\n| {engine.label} | here | value |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _line(row: ForeignFlag, engine: OtherEngine) -> str:
    names = ", ".join(f"`{name}`" for name in row.names)
    read = [name for owner, name in row.variables if owner is engine]
    variables = f" ({', '.join(f'`{name}`' for name in read)})" if read else ""
    here = ", ".join(f"`{shown(name)}`" for name in row.ours) or ("refused" if row.is_refused else "nothing to do")
    how = row.how.removeprefix("refused: ") if row.is_refused else row.how
    return f"| {names}{variables} | {here} | {how.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
