"""Statistics of paired rounds, facts of the machine, tables, records, and the journal that a run resumes from."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from space_common.version import environment

from space_eval.flags import JournalError
from space_eval.plots import PlotError

Drawn = TypeVar("Drawn")
NUM_RESAMPLES = 4000  # enough that another seed moves the bounds by less than 1 % of their distance


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed; nan for no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 9)) - 1)] if ordered else math.nan


def bootstrap(
    values: Sequence[Drawn],
    groups: Sequence[Hashable] = (),
    *,
    statistic: Callable[[Sequence[Drawn]], float] = statistics.median,  # type: ignore[assignment]
    share: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Return bounds that contain the statistic of `share` of the resamples of `values` with replacement; nan for none.

    The percentile bootstrap (Efron 1979): each resample has as many values as `values`; the remaining share is split
    evenly below and above the bounds. `groups`: the group of each value; values of a group are correlated, so groups
    are drawn first, and then as many values of each as it has.
    """
    source = random.Random(seed)
    grouped: dict[Hashable, list[Drawn]] = {}
    for value, group in zip(values, groups or [0] * len(values), strict=True):
        grouped.setdefault(group, []).append(value)
    kinds = list(grouped.values())

    def drawn() -> list[Drawn]:
        chosen = kinds if len(kinds) == 1 else source.choices(kinds, k=len(kinds))
        return [value for kind in chosen for value in source.choices(kind, k=len(kind))]

    found = [statistic(drawn()) for _ in range(num_resamples if kinds else 0)]
    outside = (1 - share) / 2
    return percentile(found, outside), percentile(found, 1 - outside)


def ratio_of_sums(parts: Sequence[tuple[float, float]]) -> float:
    """Return Σ numerators / Σ denominators."""
    return ratio(sum(above for above, _ in parts), sum(below for _, below in parts))


@dataclass(frozen=True)
class Spread:
    """A median, and the range of the values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def shown(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


@dataclass(frozen=True)
class Ratio(Spread):
    """Median of per-round ratios, and its 95 % bootstrap bounds."""

    num: int  # rounds

    @classmethod
    def of(cls, values: Sequence[float], starts: Sequence[int] = ()) -> Ratio:
        """`starts`: the number of the servers' start that each ratio was measured on."""
        low, high = bootstrap(values, starts)
        return cls(statistics.median(values), low, high, len(values))

    def shown(self, digits: int = 3) -> str:
        """Format with the lower bound first, as claims must be based on it."""
        middle, low, high = (f"{value:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{middle} (≥ {low}, ≤ {high})" if self.num > 1 else middle


_OF_THE_MODEL = ("model_id", "model_sha", "model_dtype", "model_device_type", "attention", "block_size", "num_blocks")


def facts(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of this machine and of the server's /info, `info`."""
    return {
        **environment(),
        "python": platform.python_version(),
        **{name.removeprefix("model_"): info.get(name) for name in _OF_THE_MODEL},
        "window": info.get("max_total_tokens"),
        "speculation": info.get("speculation"),
    }


Key = TypeVar("Key", bound=Hashable)


class Journal(Generic[Key]):
    """The lines of an append-only JSONL file by key; without a file they are kept in memory."""

    def __init__(self, file: Path | None, key_of: Callable[[Mapping[str, Any]], Key]) -> None:
        """Read the lines already in the file; half a last line of a killed run is dropped. Raises JournalError."""
        self._file, self._key_of = file, key_of
        self._lines: dict[Key, dict[str, Any]] = {}
        self._settings: dict[str, Any] | None = None
        if file is None or not file.is_file():
            return
        raw = file.read_bytes()
        os.truncate(file, raw.rfind(b"\n") + 1)
        for number, text in enumerate(raw.split(b"\n")[:-1], start=1):
            try:
                self._keep(json.loads(text))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise JournalError(f"{file}:{number} is no answer ({error!r}). Give another --out.") from error

    def __contains__(self, key: Key) -> bool:
        return key in self._lines

    def __getitem__(self, key: Key) -> dict[str, Any]:
        return self._lines[key]

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines in the order they were added."""
        return list(self._lines.values())

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line and write it to disk."""
        text = json.dumps(line, ensure_ascii=False)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(text + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        self._keep(json.loads(text))

    def keep_settings(self, settings: Mapping[str, Any]) -> None:
        """Add the run's settings, on a line of their own. Raises JournalError if the file has those of another run."""
        if self._settings is None:
            self.add({"settings": settings})
        elif self._file is not None:
            check_settings(self._settings, json.loads(json.dumps(settings)), self._file)

    def _keep(self, line: dict[str, Any]) -> None:
        if "settings" in line:
            self._settings = line["settings"]
        else:
            self._lines[self._key_of(line)] = line


def check_settings(known: Mapping[str, Any], settings: Mapping[str, Any], where: Path) -> None:
    """Raise JournalError if `where` holds answers of a run with other settings; both are as JSON has them."""
    for name in [*settings, *known]:
        if known.get(name) != settings.get(name):
            raise JournalError(
                f"{where} holds answers for {name} {known.get(name)}; this run has {settings.get(name)}. "
                "Give another --out, or the same settings to go on there."
            )


Item = TypeVar("Item")


def from_json(kind: type[Item], record: Mapping[str, Any]) -> Item:
    """Return the dataclass that `dataclasses.asdict` and JSON made `record` of; its sequences are tuples."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in record.items()})


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


def publish(
    name: str, out: Path | None, page: str, record: Mapping[str, object], draw: Callable[[], Sequence[Path]] = tuple
) -> None:
    """Print the page of `spaceserve eval NAME`. With a folder `out` write it, the record and the figures there."""
    print(page)
    if out is None:
        return
    files = write_report(out, name, page, record)
    try:
        files += draw()
    except PlotError as error:
        print(f"spaceserve eval {name}: no figure: {error}", file=sys.stderr)
    print(f"spaceserve eval {name}: wrote {', '.join(map(str, files))}", file=sys.stderr)


def without_nan(value: Any) -> Any:
    """Return the value with None for every number that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {name: without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def figure(value: float) -> str:
    """Two decimals, or a dash where nothing was counted, such as for outputs that do not loop where all do."""
    return "–" if math.isnan(value) else f"{value:.2f}"


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, or nan if the denominator is 0."""
    return numerator / denominator if denominator else math.nan
