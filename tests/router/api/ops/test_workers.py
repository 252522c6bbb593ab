"""What operators see of the workers, and who may have them restarted."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from doubles.router import ScriptedWorker
from doubles.router.whole_router import Start
from space_router.api_keys import ApiKey, read_keys
from space_router.config import ServeConfig
from space_router.engine.workers.worker_pool import RestartState
from space_router.errors import ConfigError

KEYS = (ApiKey.of("ops-key", "ops", is_operator=True), ApiKey.of("plain-key", "plain"))
OPERATOR, PLAIN = ({"authorization": f"Bearer {key}"} for key in ("ops-key", "plain-key"))


async def test_workers_are_listed_with_what_they_run(router: Any) -> None:
    (worker,) = (await router.client.get("/workers")).json()["workers"]
    assert (worker["number"], worker["state"], worker["address"]) == (0, "up", router.worker.address)
    assert worker["incarnation"].startswith("life 1 of ")
    assert (worker["num_incarnations"], worker["num_running"]) == (1, 0)
    assert worker["num_available_blocks"] == 256
    assert worker["trouble"] is None


async def test_only_an_operator_restarts_workers(start: Start) -> None:
    async with start("yes", config=ServeConfig(api_keys=KEYS)) as router:
        for headers, status in (({}, 401), (PLAIN, 403)):
            answer = await router.client.post("/workers/restart", json={}, headers=headers)
            assert answer.status_code == status
        assert "operator=yes" in answer.json()["error"]["message"]
        assert router.service.restart.state is RestartState.NONE


async def test_without_keys_nobody_is_an_operator(router: Any) -> None:
    answer = await router.post("/workers/restart")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_an_operator")
    assert "kill -USR1" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [{"workers": [1]}, {"workers": []}, {"workers": [-1]}, {"finish_seconds": -1}, {"finish_seconds": "1"}, {"all": 1}],
)
async def test_what_cannot_be_restarted_is_refused(start: Start, body: dict[str, Any]) -> None:
    async with start("yes", config=ServeConfig(api_keys=KEYS)) as router:
        answer = await router.client.post("/workers/restart", json=body, headers=OPERATOR)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == next(iter(body))


async def test_a_restart_is_seen_to_its_end_and_only_one_at_a_time(start: Start) -> None:
    async def kept_alive(worker: ScriptedWorker) -> None:
        await worker.drained.wait()
        worker.drained.clear()
        worker.kill()  # the next incarnation listens at once

    async with start("yes", config=ServeConfig(api_keys=KEYS), step_seconds=0.01) as router:
        keeping = asyncio.create_task(kept_alive(router.worker))
        asking = asyncio.create_task(
            router.client.post(
                "/v1/completions", json={"prompt": "x", "max_tokens": 60, "ignore_eos": True}, headers=PLAIN
            )
        )
        await router.service.engine.connections[0].until(lambda: router.service.engine.load().num_running == 1)
        told = await router.client.post("/workers/restart", json={"finish_seconds": 0}, headers=OPERATOR)
        assert told.json()["restart"] == {"state": "running", "num_done": 0, "num_wanted": 1, "error": None}
        again = await router.client.post("/workers/restart", json={}, headers=OPERATOR)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "restart_under_way")
        await router.service.restart.wait()
        await keeping
        seen = (await router.client.get("/workers", headers=PLAIN)).json()
        assert seen["restart"] == {"state": "done", "num_done": 1, "num_wanted": 1, "error": None}
        assert seen["workers"][0]["incarnation"].startswith("life 2 of ")
        assert (await asking).json()["usage"]["completion_tokens"] == 60


def test_the_key_file_says_who_is_an_operator(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-1 name=ops operator=yes concurrency=2\nsk-2 name=plain\n")
    assert [(key.name, key.is_operator) for key in read_keys(str(file), "")] == [("ops", True), ("plain", False)]
    file.write_text("sk-1 operator=no\n")
    with pytest.raises(ConfigError, match="operator must be yes, or not be there"):
        read_keys(str(file), "")
