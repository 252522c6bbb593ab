"""Tables and records of an evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; nan cells become dashes."""
    lines = [f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines).replace("| nan ", "| – ") + "\n"


def columns_table(columns: Sequence[tuple[str, Callable[[Item], str]]], rows: Sequence[Item]) -> str:
    """Return a Markdown table of `rows`: each column has a head and a function that formats its cell of a row."""
    return markdown_table([name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


def markdown_facts(facts: Mapping[str, object]) -> str:
    """Return the facts as Markdown, one per line."""
    return "".join(f"{name}: {value}  \n" for name, value in facts.items())


def write_report(folder: Path, name: str, markdown: str, record: Mapping[str, object]) -> list[Path]:
    """Write `name`.md and `name`.json to `folder`, creating it if needed. In JSON nan is null."""
    folder.mkdir(parents=True, exist_ok=True)
    page, file = folder / f"{name}.md", folder / f"{name}.json"
    page.write_text(markdown.rstrip("\n") + "\n", encoding="utf-8")
    file.write_text(json.dumps(without_nan(record), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [file, page]


def without_nan(value: Any) -> Any:
    """Return the value with None for every number that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {name: without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, or nan if the denominator is 0."""
    return numerator / denominator if denominator else math.nan
