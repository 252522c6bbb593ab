"""What makes a run the one that a state belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from space_train.train_plan import InvalidPlan

RESUMABLE = frozenset({"budget", "checkpoint_seconds", "checkpoint_steps", "evaluations", "compile", "accumulate"})
"""Switches that may differ when a run goes on: they do not change what an update computes."""


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    """Raises InvalidPlan where `out` holds another run."""
    for name in sorted(set(before) & set(now)):
        if name not in RESUMABLE and before[name] != now[name]:
            raise InvalidPlan(
                f"{out} holds a run with {name} = {before[name]}; this one has {now[name]}. "
                "Give the same, another --out, or --restart."
            )
