"""One Markdown table and one JSON file from the rows of a measurement."""

import json
from collections.abc import Sequence
from pathlib import Path

from space_eval.acceptance import AcceptanceRow

HEAD = (
    "| T | k | tokens/step | not looping | no blanks | accepted at 1, 2, … | repeated 4-grams | looping | chars/step "
    "| accepted filler | speed-up |"
)


def to_markdown(rows: Sequence[AcceptanceRow], facts: dict[str, object]) -> str:
    """The facts of the run, then the table."""
    lines = [f"{name}: {value}  " for name, value in facts.items()]
    lines += ["", HEAD, "|" + "---|" * 11]
    for row in rows:
        positions = " ".join(f"{share:.2f}" for share in row.accepted_by_position)
        lines.append(
            f"| {row.temperature:g} | {row.max_drafts} | {row.tokens_per_step:.2f} "
            f"| {row.tokens_per_step_not_looping:.2f} | {row.tokens_per_step_no_blanks:.2f} | {positions} "
            f"| {row.repeated_4grams:.2f} | {row.looping:.0%} | {row.characters_per_step:.1f} "
            f"| {row.accepted_filler:.2f} | {row.speedup:.2f} |"
        )
    return "\n".join(lines) + "\n"


def write_report(folder: Path, name: str, rows: Sequence[AcceptanceRow], facts: dict[str, object]) -> None:
    """`name`.md and `name`.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(to_markdown(rows, facts), encoding="utf-8")
    record = {"facts": facts, "rows": [row.as_json() for row in rows]}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
