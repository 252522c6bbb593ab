"""Workers on machines of their own, and what is counted there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos import hosts
from chaos.__main__ import main
from chaos.harness import StreamCounts
from chaos.machines import Host, HostError

FACTS = {"id": "m", "dtype": "float32", "device_type": "cpu", "machine": "here", "commit": "c"}


def test_a_run_passes_only_where_nothing_was_lost_and_nothing_differs() -> None:
    counts = StreamCounts(num_streams=2, num_tokens=100, seconds=4.0)
    assert counts.tokens_per_second == 25.0
    made = hosts.report(FACTS, {"one worker": counts}, [1, 2, 1], namespaces=False, workers="demo")
    assert not made.failures
    assert "| one worker | 2 | 0 | 0 | 100 | 25 | 0.0 s |" in made.markdown()
    assert "loopback addresses" in made.markdown()
    counts.lost.append("the server said no")
    made = hosts.report(FACTS, {"one worker": counts}, [1, 2, 1], namespaces=False, workers="demo")
    assert made.failures
    assert made.markdown().endswith("WRONG: one worker: the server said no\n")
    differs = StreamCounts(num_different=1)
    assert hosts.report(FACTS, {"one worker": differs}, [1], namespaces=False, workers="demo").failures


def test_a_worker_that_does_not_start_is_named_with_its_words() -> None:
    host = Host(0, lambda address: ["sh", "-c", f"echo no room at {address}; exit 1"], namespaces=False)
    with pytest.raises(HostError, match=f"no room at {host.address}"), host:
        pass


def test_a_loopback_address_cannot_be_cut_off() -> None:
    with pytest.raises(HostError, match="cannot be cut off"):
        Host(0, lambda address: [], namespaces=False).cut()


@pytest.mark.slow
@pytest.mark.parametrize("loopback", [False, True], ids=["namespaces", "loopback"])
def test_three_machines_lose_no_stream_and_no_token(tmp_path: Path, loopback: bool) -> None:
    flags = ["--scripted", "--streams", "12", "--tokens", "64", "--faults", "2", "--restarts", "1"]
    assert main(["hosts", *flags, "--out", str(tmp_path), *(["--loopback"] if loopback else [])]) == 0
    made = json.loads((tmp_path / "hosts.json").read_text())
    assert made["passed"]
    names = [phase["name"] for phase in made["phases"]]
    assert names[:3] == ["one worker", "3 workers", "workers killed"]
    assert ("machines cut off" in names) == made["namespaces"]
    assert min(made["num_starts"]) >= 2  # every worker was restarted
