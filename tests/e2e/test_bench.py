"""The load benchmark against a live server: sane figures, whatever the speed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "space_eval.bench", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_smoke_bench_measures_a_running_server(live: Any, tmp_path: Path) -> None:
    out = tmp_path / "records" / "smoke.json"
    ran = bench("--url", live.url, "--smoke", "--temperature", "0.8", "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["facts"]["id"] == live.model
    assert record["facts"]["speculation"]["max_draft_length"] > 0
    assert {"machine", "commit", "dtype", "window", "num_blocks"} <= record["facts"].keys()
    assert [(row["num_streams"], row["speculation"]) for row in record["rows"]] == [
        (1, "off"), (1, "auto"), (4, "off"), (4, "auto"),
    ]  # fmt: skip
    for row in record["rows"]:
        speed, per_step = row["tokens_per_second"], row["tokens_per_step"]
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
        assert per_step["low"] >= 1
        assert 0 < row["first_token_ms"]["p50"] <= row["first_token_ms"]["p99"]
        assert 0 <= row["token_gap_ms"]["p50"] <= row["token_gap_ms"]["p99"]
        same, compared = row["identical"].split("/")
        assert same == compared == str(2 * row["num_streams"])
        assert (row["ratio"] is None) == (row["speculation"] == "off")
        assert str(row["num_streams"]) in ran.stdout
    live.wait_idle()


def test_a_server_that_is_not_there_is_one_line_and_exit_1() -> None:
    ran = bench("--url", "http://127.0.0.1:9", "--smoke")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.splitlines()[-1].startswith("bench: No connection to 127.0.0.1:9")
