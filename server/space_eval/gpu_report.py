"""The one report of a GPU check: targets beside what was measured, then every stage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from space_eval.gpu_record import Record, Table, written
from space_eval.gpu_targets import TARGETS

_DRY = (
    "**A dry run: tiny sizes on the CPU, to see that every stage runs. Its figures mean nothing about any machine, and "
    "no target is met or missed.**"
)


def to_markdown(
    facts: Mapping[str, str], titles: Mapping[str, str], records: Mapping[str, Record], *, dry: bool
) -> str:
    """`titles`: every stage by name, in order; `records`: those there are."""
    lines = ["# GPU check", ""]
    lines += [_DRY, ""] if dry else []
    lines += [f"{name}: {value}  " for name, value in facts.items()]
    lines += ["", "## Stages", "", "| stage | outcome | seconds | |", "|---|---|---|---|"]
    for stage, title in titles.items():
        record = records.get(stage)
        if record is None:
            lines.append(f"| {stage} | not run | – | {title}. Not asked for |")
        else:
            why = f"{title}. {_cell(record.why)}".strip()
            lines.append(f"| {stage} | {record.outcome} | {record.seconds:.0f} | {why} |")
    lines += ["", "## Targets", "", "| | target | measured | |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in target_rows(records, facts.get("device", ""), titles)]
    for stage, record in records.items():
        lines += ["", f"## {stage}: {titles.get(stage, '')}", "", *_stage(record)]
    return "\n".join(lines) + "\n"


def target_rows(records: Mapping[str, Record], device: str, stages: Mapping[str, str]) -> list[list[str]]:
    """Name, bound, value, verdict of every target of these stages."""
    rows = []
    for stage in stages:
        for target in TARGETS.get(stage, ()):
            record = records.get(stage)
            figure = record.value(target.name) if record is not None else None
            verdict = target.verdict(figure, record, device) if record is not None else "not run: not asked for"
            rows.append([target.name, str(target), "–" if figure is None else str(figure), _cell(verdict)])
    return rows


def _stage(record: Record) -> list[str]:
    lines = [f"{record.outcome} on {record.machine}, {record.date}, {record.seconds:.0f} s. {record.why}".strip(), ""]
    lines += [f"- {figure.name}: {figure}" for figure in record.figures]
    lines += [f"- {name}: not run: {why}" for name, why in record.missing.items()]
    lines += [f"- {note}" for note in record.notes]
    for table in record.tables:
        lines += ["", *_table(table)]
    return lines


def _table(table: Table) -> list[str]:
    rows = [table.head, ["---"] * len(table.head), *table.rows]
    return [f"**{table.title}**", "", *(f"| {' | '.join(map(_cell, row))} |" for row in rows)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write(
    folder: Path, facts: Mapping[str, str], titles: Mapping[str, str], records: Mapping[str, Record], *, dry: bool
) -> Sequence[Path]:
    """report.md and report.json in `folder`."""
    markdown, plain = folder / "report.md", folder / "report.json"
    markdown.write_text(to_markdown(facts, titles, records, dry=dry), encoding="utf-8")
    rows = target_rows(records, facts.get("device", ""), titles)
    known = {
        "dry": dry,
        "facts": dict(facts),
        "targets": [dict(zip(("name", "target", "measured", "verdict"), row, strict=True)) for row in rows],
        "stages": {
            stage: records[stage].as_json() if stage in records else {"outcome": "not run", "why": "not asked for"}
            for stage in titles
        },
    }
    plain.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return markdown, plain


def summary(records: Mapping[str, Record]) -> str:
    """One line per stage."""
    return "\n".join(f"{r.stage:<16} {r.outcome:<10} {written(r.seconds, 's'):>8}  {r.why}" for r in records.values())
