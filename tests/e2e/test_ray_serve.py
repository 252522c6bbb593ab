"""Ray Serve places the workers, scales them and loses some: no stream is lost and no text differs."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs `pip install 'spaceserve[ray]'`")
def test_no_stream_is_lost_by_scaling_or_by_the_death_of_a_worker_or_replica() -> None:
    trial = Path(__file__).with_name("ray_trial.py")
    run = subprocess.run([sys.executable, str(trial)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert " 0 lost, 0 different" in run.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs `pip install 'spaceserve[ray]'`")
def test_a_killed_router_comes_back_though_a_worker_waits_for_a_processor() -> None:
    trial = Path(__file__).with_name("ray_trial.py")
    run = subprocess.run([sys.executable, str(trial), "pending"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert " 0 different" in run.stdout
