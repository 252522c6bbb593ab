"""Reads training records from a file, a folder of files, or a dataset through `datasets`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space_train.data.data_error import BadRecord, DataError, SourceNotFound

JSON_LINES = frozenset({".jsonl", ".ndjson"})
TEXT = frozenset({".txt", ".text", ".md", ".rst", ".tex"})
CODE = frozenset({".py", ".pyi", ".js", ".ts", ".go", ".rs", ".c", ".h", ".cc", ".cpp", ".hpp", ".java", ".rb", ".sh"})
TABLES = frozenset({".parquet", ".arrow", ".csv", ".tsv"})
READ_HERE = JSON_LINES | {".json"} | TEXT | CODE
SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class SourceRecord:
    """One record and the place it was read from."""

    file: str
    line: int  # the line it begins on, from 1; the row of a table
    value: object

    @property
    def where(self) -> str:
        """file:line."""
        return f"{self.file}:{self.line}"


def records(source: str, *, split: str = "train") -> Iterator[SourceRecord]:
    """Yield the records of `source` in order: a file, a folder (all files in it, by path), or a dataset's split.

    A dataset is a folder with parquet, arrow or CSV files, a folder written by `save_to_disk`, or an id of the hub
    (`owner/name`, or `owner/name:config`).
    """
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _folder(path, split)
    elif path.is_file():
        if path.suffix.lower() in TABLES:
            yield from _dataset(str(path), split)
        elif path.suffix.lower() in READ_HERE:
            _only_train(source, split)
            yield from _file(path)
        else:
            raise SourceNotFound(
                f"{path} ends in {path.suffix or 'nothing'}, which says no form of data. "
                f"Name it {', '.join(sorted(READ_HERE | TABLES))}."
            )
    elif source.startswith(("/", ".", "~")) or path.suffix.lower() in READ_HERE | TABLES or not source.strip():
        raise SourceNotFound(f"There is no file or folder {source!r}. Give a file, a folder, or the id of a dataset.")
    else:
        yield from _dataset(source, split)


def _folder(folder: Path, split: str) -> Iterator[SourceRecord]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(folder)))
    suffixes = {path.suffix.lower() for path in files}
    if suffixes & TABLES or any((folder / name).is_file() for name in SAVED_BY_DATASETS):
        yield from _dataset(str(folder), split)
        return
    usable = [path for path in files if path.suffix.lower() in READ_HERE]
    if not usable:
        found = ", ".join(sorted(suffix or "(none)" for suffix in suffixes)) or "no file"
        raise SourceNotFound(
            f"The folder {folder} has nothing to read: {found}. Read are {', '.join(sorted(READ_HERE | TABLES))}."
        )
    _only_train(str(folder), split)
    for path in usable:
        yield from _file(path)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _only_train(source: str, split: str) -> None:
    if split != "train":
        raise SourceNotFound(f"{source} has no split {split!r}: plain files are all of the split 'train'.")


def _file(path: Path) -> Iterator[SourceRecord]:
    """Yield the records of one file; a text file is one record."""
    try:
        if path.suffix.lower() in JSON_LINES:
            yield from _json_lines(path)
        elif path.suffix.lower() == ".json":
            yield from _json(path)
        else:
            yield SourceRecord(str(path), 1, {"text": path.read_text(encoding="utf-8-sig")})
    except UnicodeDecodeError as error:
        raise BadRecord(f"{path} is not UTF-8 ({error.reason}). Convert it first.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _json_lines(path: Path) -> Iterator[SourceRecord]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield SourceRecord(str(path), number, json.loads(line))
                except ValueError as error:
                    raise BadRecord(f"{path}:{number} is not JSON: {error}.") from error


def _json(path: Path) -> Iterator[SourceRecord]:
    """Yield records from a JSON list or from JSON lines (many files that end in .json are JSON lines)."""
    text, decoder = path.read_text(encoding="utf-8-sig"), json.JSONDecoder()
    at, line, counted = _behind_spaces(text, 0), 1, 0
    is_list = text[at : at + 1] == "["
    at = _behind_spaces(text, at + is_list)
    while at < len(text):
        if is_list and text[at] == "]":
            return
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise BadRecord(f"{path}:{error.lineno} is not JSON: {error.msg}.") from error
        yield SourceRecord(str(path), line, value)
        at = _behind_spaces(text, end)
        if is_list and text[at : at + 1] == ",":
            at = _behind_spaces(text, at + 1)
        elif is_list and text[at : at + 1] != "]":
            line += text.count("\n", counted, at)
            raise _cut_off(path, line)
    if is_list:
        raise _cut_off(path, line)


def _cut_off(path: Path, line: int) -> BadRecord:
    return BadRecord(f"{path}:{line} is not JSON: the list must go on with ',' or end with ']'. Was the file cut off?")


def _behind_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _dataset(source: str, split: str) -> Iterator[SourceRecord]:
    """Yield the rows of a dataset, read lazily."""
    for number, row in enumerate(_open_dataset(source, split), start=1):
        yield SourceRecord(f"{source}[{split}]", number, row)


def _open_dataset(source: str, split: str) -> Any:
    try:
        datasets: Any = importlib.import_module("datasets")  # imported here because plain files do not need it
    except ImportError as error:
        raise DataError(f"{source} needs the package `datasets`: pip install 'spaceserve[train]'.") from error
    path = Path(source).expanduser()
    try:
        if path.is_file():
            form = {".parquet": "parquet", ".arrow": "arrow"}.get(path.suffix.lower(), "csv")
            options = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
            return datasets.load_dataset(form, data_files={"train": str(path)}, split=split, **options)
        if any((path / name).is_file() for name in SAVED_BY_DATASETS):
            saved = datasets.load_from_disk(str(path))
            if isinstance(saved, datasets.DatasetDict):
                if split not in saved:
                    raise SourceNotFound(f"{source} has no split {split!r}; it has {', '.join(saved)}.")
                return saved[split]
            _only_train(source, split)
            return saved
        name, _, config = (source, "", "") if path.is_dir() else source.partition(":")
        return datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceNotFound(
            f"{source!r} is no file or folder here, and `datasets` does not open it (split {split!r}): {reason}"
            if not path.exists()
            else f"`datasets` does not open {source} (split {split!r}): {reason}"
        ) from error
