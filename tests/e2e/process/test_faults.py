"""The fault experiment in small, with every kind of fault; `make faults` is the whole."""

import json
from pathlib import Path

import pytest
from chaos.__main__ import main


def faults(out: Path, *flags: str) -> dict[str, object]:
    """What a run that nothing may be lost in reports."""
    assert main(["faults", "--out", str(out), *flags, "--", "--num-threads", "1", "--num-blocks", "512"]) == 0
    made: dict[str, object] = json.loads((out / "faults.json").read_text())
    assert (made["num_streams_lost"], made["num_tokens_different"], made["num_pages_leaked"]) == (0, 0, 0)
    return made


def test_streams_survive_kills_hangs_and_nonsense_with_the_text_of_their_solo_runs(
    checkpoint: Path, tmp_path: Path
) -> None:
    made = faults(
        tmp_path, "--model", str(checkpoint), "--faults", "2", "--streams", "8", "--tokens", "64", "--pause", "0.3"
    )
    assert made["num_kills_and_hangs"] == 2
    assert made["num_faults"] == 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_same_with_every_kind_of_fault_and_more_streams(checkpoint: Path, tmp_path: Path, num_workers: int) -> None:
    made = faults(
        tmp_path, "--model", str(checkpoint), "--faults", "20", "--streams", "32", "--tokens", "160",
        "--workers", str(num_workers),
    )  # fmt: skip
    assert made["num_kills_and_hangs"] == 20
