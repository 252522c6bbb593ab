"""Loads evaluation data, a list of JSON objects, by path or hub id."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class RecordError(ValueError):
    """Data that cannot be used; the message names the source, the line and the cure."""


def load_records(source: str, *, needs: Sequence[Sequence[str]], split: str = "test") -> list[Record]:
    """Return the records of `source`: a `.jsonl` or `.json` file, or `split` of a data set on the hub (`owner/name`, or
    `owner/name:configuration`).

    `needs` are alternatives: every record must have all the fields of at least one of them, as strings.
    """
    path = Path(source).expanduser()
    if path.is_file():
        records = _of_file(path)
    elif path.suffix in {".jsonl", ".json", ".txt"} or source.startswith(("/", ".", "~")) or source.count("/") != 1:
        raise RecordError(f"There is no file {source}. Give the path of a JSONL file, or a hub id (owner/name).")
    else:
        records = _of_hub(source, split)
    if not records:
        raise RecordError(f"{source} holds no records. Give at least one JSON line.")
    for number, record in enumerate(records, start=1):
        if not any(all(isinstance(record.get(field), str) for field in fields) for fields in needs):
            wanted = " or ".join("+".join(fields) for fields in needs)
            has = ", ".join(sorted(record)) or "none"
            raise RecordError(f"Record {number} of {source} has the fields {has}; it needs {wanted}, as strings.")
    return records


def _of_file(path: Path) -> list[Record]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error
    if path.suffix == ".json":
        loaded = _parsed(text, str(path))
        records = loaded if isinstance(loaded, list) else [loaded]
    else:
        records = [
            _parsed(line, f"{path}:{number}") for number, line in enumerate(text.split("\n"), start=1) if line.strip()
        ]
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise RecordError(f"Record {number} of {path} is no JSON object.")
    return records


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"{where} is not JSON: {error}.") from error


def _of_hub(source: str, split: str) -> list[Record]:
    name, _, configuration = source.partition(":")
    try:
        datasets: Any = importlib.import_module("datasets")  # imported here because files do not need it
    except ImportError as error:
        raise RecordError(f"{source} is no file; hub data needs: pip install 'spaceserve[train]'") from error
    try:
        loaded = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the library and the network below it raise errors of many kinds
        first_line = str(error).partition("\n")[0][:200]
        raise RecordError(
            f"There is no file {source}, and the hub did not give it ({type(error).__name__}: {first_line}). "
            "Without a network give the path of a JSONL file."
        ) from error
    return [dict(record) for record in loaded]
