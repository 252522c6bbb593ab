"""The step costs that a worker starts with: from a file of an earlier start, or measured now.

file        written by an earlier start, and a plain step still takes as long
measured    at this start: three passes agreed and the machine was idle; written to the file for the next start
learned     three passes differed, or the machine was busy: a first estimate that serving corrects, not written

The file is readable JSON. Its name is derived from the model and how it is computed, so each configuration has its
own. Versions are stored inside; a file of another version is measured again and replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from space_common.version import version
from space_kernels.attention_backends import installed_version
from space_kernels.build.cpu_library import cpu_fact, cpu_library
from space_model.model_facts import ModelFacts

from space_server.machine.machine_load import LoadWatch, MachineLoad
from space_server.startup.calibration import AGREE, FEWEST, NUM_PASSES, PLAIN_STEP, Calibration, Timing, case_names
from space_server.step_cost import CostOrigin, Point, StepCost, StepShape, read_points

FORMAT = 4
"""Raised whenever the file's format or the meaning of its costs changes."""

_log = logging.getLogger(__name__)


class BadCostFile(ValueError):
    """The file cannot be used; the message says why."""


@dataclass(frozen=True)
class KeptCosts:
    """The contents of a file."""

    points: list[Point]
    passes: dict[str, list[float]]  # by anchor: seconds, pass by pass
    written: str  # date and time, for messages

    @property
    def plain_seconds(self) -> float:
        """Seconds of a plain step of one sequence: the middle pass."""
        return sorted(self.passes[str(PLAIN_STEP)])[NUM_PASSES // 2]

    @property
    def plain_spread(self) -> float:
        """Relative difference of its passes."""
        found = self.passes[str(PLAIN_STEP)]
        return max(found) / min(found) - 1.0


@dataclass(frozen=True)
class CostFile:
    """The file of one model, computed in one way on one machine."""

    path: Path
    setup: Mapping[str, str | int]  # what is computed, and on what; part of the file name
    versions: Mapping[str, str | int]  # software versions; a file of others is replaced

    @classmethod
    def of(
        cls,
        folder: Path,
        facts: ModelFacts,
        *,
        block_size: int,
        max_sequences: int,
        exact: bool = False,
        steps: str = "host",
    ) -> CostFile:
        """The file in `folder` for this model on this machine."""
        on_gpu = facts.device.type == "cuda"
        setup: dict[str, str | int] = {
            "model": Path(facts.name).name,
            "model_hash": facts.model_hash,
            "numbers": facts.number_format,
            "device": str(facts.device),
            "gpu": torch.cuda.get_device_name(facts.device) if on_gpu else "none",
            "cpu": cpu_fact("model name") or platform.machine(),
            "processors": os.cpu_count() or 0,
            "threads": facts.num_threads,
            "instruction_set": _instruction_set(facts),
            "ranks": facts.num_ranks,
            "exact": "on" if exact else "off",
            "attention": facts.attention,
            "steps": steps,
            "block_size": block_size,
            "max_sequences": max_sequences,
        }
        cases = hashlib.blake2b("\n".join(case_names(facts, max_sequences)).encode(), digest_size=6).hexdigest()
        versions: dict[str, str | int] = {
            "format": FORMAT,
            "spaceserve": version(),
            "torch": torch.__version__,
            "cases": cases,
        }
        if on_gpu:
            versions["triton"] = installed_version("triton") or "none"
        digest = hashlib.blake2b(json.dumps(setup, sort_keys=True).encode(), digest_size=8).hexdigest()
        name = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(facts.name).name)[-48:].strip("-.") or "model"
        return cls(folder / f"step-cost-{name}-{digest}.json", setup, versions)

    def read(self) -> KeptCosts | None:
        """Return the kept costs; None if there is no file. Raises BadCostFile."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._name_old_files()
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise BadCostFile(f"it cannot be read ({error})") from None
        if not isinstance(found, dict):
            raise BadCostFile("it is of an older format")
        for name, own in (*self.versions.items(), *self.setup.items()):
            if found.get(name) != own:
                raise BadCostFile(f"{name} is {found.get(name)!r} there and {own!r} here")
        passes = found.get("passes")
        if not isinstance(passes, dict) or str(PLAIN_STEP) not in passes:
            raise BadCostFile("its passes are missing")
        for name, times in passes.items():
            if not isinstance(times, list) or len(times) != NUM_PASSES or not all(map(_is_time, times)):
                raise BadCostFile(f"{name!r} does not have {NUM_PASSES} passes of so many seconds each: {times!r}")
            if max(times) > (1.0 + AGREE) * min(times):
                raise BadCostFile(f"its passes of {name!r} differ by more than {100 * AGREE:.0f} %")
        return KeptCosts(kept_points(found), passes, str(found.get("written", "an unknown day")))

    def _name_old_files(self) -> None:
        """Log files of earlier formats, which do not name their configuration."""
        old = list(self.path.parent.glob(f"step-cost-{'[0-9a-f]' * 24}.json"))
        if old:
            _log.info("%d files of step costs in %s are of an older format: not used", len(old), self.path.parent)

    def write(self, calibration: Calibration, load: MachineLoad, now: datetime) -> None:
        """Keep the measurements. If the folder is not writable, the next start measures again."""
        assert calibration.spread is not None
        head = {
            "what": "seconds of steps, measured by a worker of spaceserve at its start; may be deleted at any time",
            "written": now.isoformat(timespec="seconds"),
            **self.versions,
            **self.setup,
            "load": load.as_json(),
            "spread": round(calibration.spread, 4),
            "passes": {name: [_short(one) for one in times] for name, times in calibration.passes.items()},
            "columns": [*StepShape._fields, "seconds"],
        }
        rows = ",\n".join(f"    {json.dumps([*shape, _short(seconds)])}" for shape, seconds in calibration.points)
        text = f'{json.dumps(head, indent=2)[:-2]},\n  "points": [\n{rows}\n  ]\n}}\n'
        partial = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            _log.info("what steps cost is measured again at the next start: %s", error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def kept_points(found: object) -> list[Point]:
    """Parse the points of a cost file's JSON. Raises BadCostFile."""
    try:
        if not isinstance(found, dict) or found["columns"] != [*StepShape._fields, "seconds"]:
            raise BadCostFile("its columns are of an older format")
        points = read_points(found["points"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise error if isinstance(error, BadCostFile) else BadCostFile("its points are no numbers") from None
    if any(min(shape) < 0 or not shape.num_rows or not _is_time(seconds) for shape, seconds in points):
        raise BadCostFile("some of its points are no times of steps")
    if (num_shapes := len({shape for shape, _ in points})) < FEWEST:
        raise BadCostFile(f"it holds {num_shapes} different steps; it takes {FEWEST}")
    return points


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _short(seconds: float) -> float:
    """Round to six digits; the others are noise."""
    return float(f"{seconds:.6g}")


def _instruction_set(facts: ModelFacts) -> str:
    """The instruction set of our compiled CPU kernels, where they are used."""
    if facts.device.type != "cpu":
        return "none"
    library = cpu_library() if facts.dtype is torch.bfloat16 else None
    return "torch's" if library is None else library.kind


TRIES = 3
"""Checks of a plain step against the file before it is discarded: one slow moment is not enough."""

LEAST_TOLERANCE = 0.03
"""Relative difference of a plain step between starts on a quiet machine, whatever the passes of one start show: memory
is placed differently each time.
"""

SIGMAS = 3.0
"""Standard errors of the median within which it may be off."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartingCosts:
    """Points, and their origin."""

    points: list[Point]
    origin: CostOrigin

    def cost(self) -> StepCost:
        """Build the cost model. It keeps learning, quickly where the points are only a first estimate."""
        cost = StepCost.from_points(self.points, are_sure=self.origin.source != "learned")
        cost.origin = self.origin
        return cost


def tolerance(kept: KeptCosts, timing: Timing) -> float:
    """Return the relative difference allowed for a plain step: the passes' spread plus the noise of this timing."""
    return max(LEAST_TOLERANCE, kept.plain_spread) + SIGMAS * timing.noise


def starting_costs(
    file: CostFile,
    *,
    measure: Callable[[Callable[[], None]], Calibration],
    time_plain_step: Callable[[], Timing | None],
    watch: LoadWatch,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> StartingCosts | None:
    """Return the costs kept in `file` if a plain step confirms them; else measure, and keep them if they are reliable.

    `measure` receives a function to call between steps. None if nothing could be measured.
    """
    points = _kept(file, time_plain_step)
    if points is not None:
        return StartingCosts(points, CostOrigin("file"))
    watch.begin()
    watch.look()
    calibration = measure(watch.look)
    load = watch.load()
    if not calibration.points:
        return None
    why_not = load.why_busy or calibration.why_unsure
    if why_not is not None:
        _log.info("step costs are not kept, but learned while serving: %s", why_not)
        return StartingCosts(calibration.points, CostOrigin("learned", why_not))
    file.write(calibration, load, now())
    return StartingCosts(calibration.points, CostOrigin("measured"))


def _kept(file: CostFile, time_plain_step: Callable[[], Timing | None]) -> list[Point] | None:
    """Return the file's points, scaled to today's speed, if they still hold; None: measure."""
    try:
        kept = file.read()
    except BadCostFile as error:
        _log.info("step costs kept in %s are not used: %s", file.path.name, error)
        return None
    if kept is None:
        return None
    for timing in _timings(time_plain_step):
        ratio, bound = timing.seconds / kept.plain_seconds, tolerance(kept, timing)
        if 1.0 / (1.0 + bound) <= ratio <= 1.0 + bound:
            return [(shape, ratio * seconds) for shape, seconds in kept.points]
        _log.info(
            "step costs kept in %s (%s) do not hold: a plain step takes %.3g ms now and %.3g there, and %.0f %% may be",
            file.path.name,
            kept.written,
            1000 * timing.seconds,
            1000 * kept.plain_seconds,
            100 * bound,
        )
    return None


def _timings(time_plain_step: Callable[[], Timing | None]) -> Iterator[Timing]:
    for _ in range(TRIES):
        timing = time_plain_step()
        if timing is None:
            return
        yield timing
        if len(timing.times) < 2:
            return  # a retry would take as long as measuring
