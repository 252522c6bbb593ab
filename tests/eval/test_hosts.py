"""`spaceserve eval hosts`: workers on machines of their own, and what is counted there."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from space_eval import hosts
from space_eval.host_machines import Host, HostError


def test_a_run_passes_only_where_nothing_was_lost_and_nothing_differs() -> None:
    phase = hosts.Phase("one worker", num_streams=2, num_tokens=100, seconds=4.0, words=["the server said no"])
    assert phase.tokens_per_second == 25.0
    row = {**vars(phase), "tokens_per_second": phase.tokens_per_second}
    made = {"namespaces": False, "machine": "m", "commit": "c", "num_hosts": 3, "workers": "demo"}
    page = hosts.markdown({**made, "num_streams_at_once": 2, "num_starts": [1, 2, 1], "phases": [row]})
    assert "| one worker | 2 | 0 | 0 | 100 | 25 | 0.0 s |" in page
    assert "loopback addresses" in page
    assert page.endswith("- the server said no")


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
    parser = argparse.ArgumentParser()
    hosts.add_arguments(parser)
    flags = [
        "--scripted",
        "--streams",
        "12",
        "--tokens",
        "64",
        "--faults",
        "2",
        "--restarts",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert hosts.run(parser.parse_args([*flags, *(["--loopback"] if loopback else [])])) == 0
    made = json.loads((tmp_path / "hosts.json").read_text())
    assert made["passed"]
    names = [phase["name"] for phase in made["phases"]]
    assert names[:3] == ["one worker", "3 workers", "workers killed"]
    assert ("machines cut off" in names) == made["namespaces"]
    assert min(made["num_starts"]) >= 2  # every worker was restarted
