"""Every experiment is a Make target whose flags reach it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from chaos.__main__ import EXPERIMENTS, parser

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_make_runs_the_experiment_with_its_flags(name: str) -> None:
    own = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    printed = subprocess.run(
        ["make", "-n", name, "FLAGS=--help"], cwd=ROOT, check=True, capture_output=True, text=True, env=own
    )
    *_, command = printed.stdout.splitlines()
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout.startswith(f"usage: chaos {name} ")


def test_flags_behind_two_dashes_are_those_of_the_server() -> None:
    words = ["faults", "--faults", "3", "--pause", "0.5", "--", "--num-threads", "1"]
    options = parser(words).parse_args(words)
    assert (options.faults, options.pause, options.streams) == (3, 0.5, 32)
    assert options.serve_flags == ["--num-threads", "1"]
    for more in ([], ["--loopback"]):
        assert parser(["hosts"]).parse_args(["hosts", *more]).loopback is bool(more)
