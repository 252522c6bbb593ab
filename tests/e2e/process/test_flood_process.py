"""Drafts of one stream after a flood, on a real server with the embedded model."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from space_common.process import ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NOVEL = {"prompt": "def", "temperature": 2.0}
REPEATING = {"prompt": "def add(a, b):\n    return a + b\n\n\n" * 12, "temperature": 0.0}
NUM_CLIENTS, NUM_REQUESTS = 32, 128


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with ServerProcess(["--model", "demo", "--lookup", "only", "--log-level", "error"]) as server:
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        with httpx.Client(base_url=server.url, timeout=300.0, limits=limits) as client:
            yield client


def steps_of(client: httpx.Client, max_tokens: int, seed: int, asked: dict[str, Any]) -> list[int]:
    """The tokens of each step of a stream."""
    body = {**asked, "max_tokens": max_tokens, "seed": seed, "ignore_eos": True, "return_token_ids": True}
    found = []
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                found += [len(choice.get("token_ids") or ()) for choice in json.loads(line[6:])["choices"]]
    return [number for number in found if number]


@pytest.mark.parametrize("num_floods", [1, 3])
def test_drafts_are_back_within_a_hundred_steps_after_a_flood(client: httpx.Client, num_floods: int) -> None:
    """After a flood and a stream of text that does not repeat, a stream of repetitive text accepts drafts within 100
    steps."""
    for _ in range(num_floods):
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            list(pool.map(lambda seed: len(steps_of(client, 60, seed, NOVEL)), range(NUM_REQUESTS)))
    steps_of(client, 200, 0, NOVEL)
    steps = steps_of(client, 400, 0, REPEATING)
    assert sum(steps) == 400
    assert any(number > 1 for number in steps[:100])
    assert len(steps) < 300
