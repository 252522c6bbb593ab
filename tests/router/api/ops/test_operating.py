"""What operators and clients ask beside generating; and what happens when a client goes away."""

import asyncio
import logging
import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
from doubles.router import ScriptedWorker, never
from doubles.router.whole_router import Start
from space_router import app
from space_router.api_keys import ApiKey, plain_keys, read_keys
from space_router.config import ServeConfig
from space_router.engine.workers.rolling_restart import RestartState
from space_router.errors import ConfigError
from space_router.http_server.gone_clients import GoneClients
from space_router.metrics import Metrics


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/readyz",
        "/ping",
        "/livez",
        "/startupz",
        "/version",
        "/metrics",
        "/load",
        "/info",
        "/workers",
        "/v1/models",
        "/v1/models/tiny",
        "/docs",
        "/openapi.json",
        "/",
        "/page/page.css",
    ],
)
async def test_the_head_of_what_can_be_got_can_be_asked_for(router: Any, path: str) -> None:
    """As monitors do. The server leaves the body out."""
    head, whole = await router.client.head(path), await router.client.get(path)
    assert head.status_code == whole.status_code == 200
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    if path == "/openapi.json":
        assert not any("head" in operations for operations in whole.json()["paths"].values())


async def test_the_head_of_an_unready_server_is_503(start: Start) -> None:
    async with start() as router:
        router.service.draining = True
        assert (await router.client.head("/readyz")).status_code == 503
        assert (await router.client.head("/livez")).status_code == 200


async def test_adapters_are_listed_as_models_of_their_own(start: Start) -> None:
    async with start(adapters=("code", "prose")) as router:
        base, code, prose = (await router.client.get("/v1/models")).json()["data"]
        assert (base["id"], base["parent"]) == ("tiny", None)
        assert [(card["id"], card["parent"], card["max_model_len"]) for card in (code, prose)] == [
            ("code", "tiny", 512),
            ("prose", "tiny", 512),
        ]
        assert (await router.client.get("/v1/models/prose")).json() == prose
        missing = (await router.client.get("/v1/models/verse")).json()["error"]
        assert missing["message"].endswith("`tiny`, `code` and `prose` are.")
        info = (await router.client.get("/info")).json()
        assert info["adapters"] == ["code", "prose"]
        assert info["adapter_formats"] == {"code": "space", "prose": "space"}
        assert info["speculation"]["mask_format"] is None


async def test_a_model_has_several_names_and_star_takes_any(start: Start) -> None:
    several = replace(ServeConfig(), served_model_name=("tiny", "small"))
    async with start("Hello. <|endoftext|>", config=several, adapters=("code",)) as router:
        listed = (await router.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["tiny", "small", "code"]
        for name, said in (("small", "small"), ("small:code", "code"), ("tiny", "tiny"), (None, "tiny")):
            assert (await router.complete(prompt="Hi", model=name))["model"] == said
        await router.refuses("/v1/completions", "model", "`tiny`, `small` and `code` are", 404, prompt="Hi", model="x")
    any_name = replace(ServeConfig(), served_model_name=("tiny", "*"))
    async with start("Hello. <|endoftext|>", config=any_name, adapters=("code",)) as router:
        assert (await router.complete(prompt="Hi", model="claude-x"))["model"] == "claude-x"
        assert (await router.complete(prompt="Hi", model="code"))["model"] == "code"
        assert (await router.client.get("/v1/models/claude-x")).json()["id"] == "claude-x"
        listed = (await router.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["tiny", "code"]


async def test_the_model_as_the_command_line_names_it_is_a_name_unless_it_got_others(start: Start) -> None:
    config, chat = ServeConfig(model="org/big"), {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    async with start("Hello. <|endoftext|>", config=config, adapters=("code",)) as router:
        for name, said in (("org/big", "org/big"), ("org/big:code", "code"), ("tiny", "tiny")):
            assert (await router.complete(prompt="Hi", model=name))["model"] == said
            assert (await router.post("/v1/chat/completions", model=name, **chat)).json()["model"] == said
        assert (await router.post("/v1/embeddings", model="org/big", input="Hi")).json()["model"] == "org/big"
        assert (await router.client.get("/v1/models/org/big")).json()["id"] == "org/big"
        assert (await router.client.get("/v1/models/org/big:code")).json()["id"] == "code"
        listed = (await router.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["tiny", "code"]
        await router.refuses("/v1/completions", "model", "'big' is not", 404, prompt="Hi", model="big")
    async with start(config=ServeConfig(model="code"), adapters=("code",)) as router:
        assert (await router.complete(prompt="Hi", model="code", max_tokens=1))["model"] == "code"
        assert (await router.client.get("/v1/models/code")).json()["parent"] == "tiny"
    async with start(config=replace(config, served_model_name=("tiny",))) as router:
        await router.refuses("/v1/completions", "model", "`tiny` is", 404, prompt="Hi", model="org/big")
        assert (await router.client.get("/v1/models/org/big")).status_code == 404


async def test_a_client_of_anthropics_api_finds_its_fields_in_the_list_of_models(start: Start) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    async with start("Hello. <|endoftext|>", adapters=("code",)) as router:
        listed = (await router.client.get("/v1/models?limit=20", headers=headers)).json()
        assert [(card["type"], card["display_name"]) for card in listed["data"]] == [
            ("model", "tiny"),
            ("model", "code"),
        ]
        assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "tiny", "code")
        card = (await router.client.get("/v1/models/tiny", headers=headers)).json()
        assert card == listed["data"][0]
        assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
        plain = (await router.client.get("/v1/models/tiny")).json()
        assert card == {**plain, "type": "model", "display_name": "tiny", "created_at": card["created_at"]}
        assert set((await router.client.get("/v1/models")).json()) == {"object", "data"}


TGI_INFO = {
    "model_id", "model_sha", "model_dtype", "model_device_type", "model_pipeline_tag", "max_concurrent_requests",
    "max_best_of", "max_stop_sequences", "max_input_tokens", "max_total_tokens", "max_batch_total_tokens",
    "max_client_batch_size", "validation_workers", "router", "version", "sha", "docker_label",
}  # fmt: skip


async def test_info_says_what_runs(router: Any) -> None:
    info = (await router.client.get("/info")).json()
    assert (info["model_id"], info["max_total_tokens"], info["ready"]) == ("tiny", 512, True)
    assert info.keys() >= TGI_INFO
    assert (info["max_input_tokens"], info["validation_workers"], info["router"]) == (511, 1, "spaceserve")
    assert info["speculation"] == {
        "default": "auto",
        "max_draft_length": 3,
        "num_masks": 3,
        "max_request": 3,
        "draft_head": False,
        "head_drafts": 0,
        "head": None,
        "mask_format": None,
    }
    assert (await router.client.get("/version")).json()["version"] == info["version"]
    assert (await router.client.get("/load")).json()["num_running"] == 0
    assert (await router.client.get("/openapi.json")).status_code == 200


@pytest.mark.parametrize(
    ("source", "reason", "shown"),
    [
        ("file", "", {"source": "file", "reason": None}),
        ("measured", "", {"source": "measured", "reason": None}),
        (
            "learned",
            "5 tasks could run at once on 2 processors",
            {"source": "learned", "reason": "5 tasks could run at once on 2 processors"},
        ),
        ("", "", None),  # an older worker
        ("by a later version", "", None),
    ],
)
async def test_info_says_where_the_costs_of_steps_came_from(
    start: Start, source: str, reason: str, shown: dict[str, str | None] | None
) -> None:
    async with start(step_cost_source=source, step_cost_reason=reason) as router:
        assert (await router.client.get("/info")).json()["step_costs"] == shown


async def test_tokenize_and_detokenize_are_inverse(router: Any) -> None:
    tokens = (await router.post("/tokenize", prompt="hello é")).json()
    assert tokens["count"] == len(tokens["tokens"]) == 4
    assert (await router.post("/detokenize", tokens=tokens["tokens"])).json() == {"prompt": "hello é"}
    spans = (await router.post("/tokenize", inputs="hello w")).json()
    assert [(span["text"], span["start"], span["stop"]) for span in spans] == [("hello", 0, 5), (" w", 5, 7)]
    assert (await router.post("/detokenize", tokens=[99999])).status_code == 400


async def test_every_series_is_there_before_the_first_request() -> None:
    text = Metrics().render().decode()
    for name in (
        "tokens_per_step_bucket",
        "drafted_tokens_total",
        "accepted_tokens_total",
        'accepted_by_position_total{position="1"}',
        "draft_length_bucket",
        'rows_total{kind="mask"}',
        "speculation_speedup",
        'step_seconds_bucket{le="0.001",phase="draft"}',
        "step_host_seconds_bucket",
        "worker_up",
        "worker_restarts_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "request_seconds_bucket",
        "queue_seconds_bucket",
        'requests{state="queued"}',
        'requests_total{outcome="stop"}',
        'rejected_total{reason="queue_full"}',
        "prompt_tokens_total",
        "generated_tokens_total",
        "prefix_cache_hit_tokens_total",
        'kv_blocks{state="cached"}',
        "preemptions_total",
    ):
        assert f"\nspaceserve_{name}" in text, name
    assert "\nspaceserve_energy_joules_total{" not in text
    assert "_created" not in text


async def test_metrics_count_a_request(router: Any) -> None:
    await router.complete(prompt="x", max_tokens=9, ignore_eos=True)
    text = (await router.client.get("/metrics")).text
    assert 'spaceserve_requests_total{outcome="length"} 1.0' in text
    assert "spaceserve_generated_tokens_total 9.0" in text
    assert "spaceserve_tokens_per_step_sum 8.0" in text


class Client:
    """A hand-written ASGI client that can disconnect."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }  # fmt: skip
        self.gone = asyncio.Event()
        self.answered = asyncio.Event()
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks: list[bytes] = []
        self._body: bytes | None = orjson.dumps(body)

    async def ask(self, router: Any) -> None:
        await router.app(self.scope, self.receive, self.send)

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.headers = message.get("headers", self.headers)
        if message.get("body"):
            self.chunks.append(message["body"])
            self.answered.set()


async def test_a_client_that_goes_away_is_a_499_in_the_log_alone(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "gone_clients", GoneClients())  # no other test's clients count
    async with start("yes", step_seconds=0.01) as router:
        client = Client("/v1/completions", {"prompt": "x", "max_tokens": 400})
        client.gone.set()
        with caplog.at_level(logging.INFO):
            await client.ask(router)
        assert [record.getMessage() for record in caplog.records if "499" in record.getMessage()]
        assert client.status == 499
        assert not router.service.engine.load().num_running


@pytest.mark.parametrize("path", ["/v1/completions", "/generate_stream", "/generate"])
@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_pages(start: Start, path: str, queued: bool, stream: bool) -> None:
    async with start("yes", step_seconds=0.002, max_sequences=1, window=4096, num_blocks=2000) as router:
        body: dict[str, Any] = {"prompt": "x", "max_tokens": 4000, "stream": stream}
        if path.startswith("/generate"):
            body = {"inputs": "x", "parameters": {"max_new_tokens": 4000}}
        first = Client("/v1/completions", {"prompt": "y", "max_tokens": 4000, "stream": True})
        second = Client(path, body)
        tasks = []
        if queued:
            tasks.append(asyncio.create_task(first.ask(router)))
            await first.answered.wait()
        tasks.append(asyncio.create_task(second.ask(router)))
        expected = 1 + queued
        await router.until(lambda load: load.num_running + load.num_queued == expected)
        for client in (first, second):
            client.gone.set()
        await asyncio.gather(*tasks)
        assert router.service.engine.load().num_queued == 0
        await router.until(lambda load: not load.blocks_held)
        assert router.value("spaceserve_requests_total", outcome="cancelled") == expected


async def test_a_request_is_cancelled_by_its_id_with_all_its_choices(start: Start) -> None:
    async with start("yes", step_seconds=0.005) as router:
        body = {"prompt": "x", "max_tokens": 500, "n": 2, "request_id": "mine"}
        asking = asyncio.create_task(router.post("/v1/completions", **body))
        await router.until(lambda load: load.num_running == 2)
        cancelled = await router.client.delete("/v1/requests/mine")
        assert cancelled.json() == {"id": "mine", "object": "request", "cancelled": True}
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
        gone = await router.client.delete("/v1/requests/mine")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")


async def test_a_request_is_cancelled_by_its_own_key_only(start: Start) -> None:
    mine, yours = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with start("yes", step_seconds=0.005, config=ServeConfig(api_keys=plain_keys("one", "two"))) as router:
        body = {"prompt": "x", "max_tokens": 200, "n": 2, "request_id": "same"}
        asking = [
            asyncio.create_task(router.client.post("/v1/completions", json=body, headers=headers))
            for headers in (mine, yours)
        ]
        await router.until(lambda load: load.num_running == 4)
        assert (await router.client.delete("/v1/requests/other", headers=mine)).status_code == 404
        assert (await router.client.delete("/v1/requests/same", headers=mine)).json()["cancelled"]
        assert (await router.client.delete("/v1/requests/same", headers=mine)).status_code == 404
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [499, 200]
        assert (await router.client.delete("/v1/requests/same")).status_code == 401


async def test_a_stream_that_is_cancelled_by_its_id_ends_with_an_error_event(start: Start) -> None:
    async with start("yes", step_seconds=0.005) as router:
        client = Client("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 400}})
        asking = asyncio.create_task(client.ask(router))
        await client.answered.wait()
        name = dict(client.headers)[b"x-request-id"].decode()
        assert (await router.client.delete(f"/v1/requests/{name}")).json()["cancelled"]
        await asking
        last = orjson.loads(client.chunks[-1].removeprefix(b"data:"))
        assert (client.status, last["error_type"]) == (200, "incomplete_generation")


async def test_cancelling_one_request_leaves_those_with_similar_names(start: Start) -> None:
    async with start("yes", step_seconds=0.005) as router:
        names = ("mine", "mine-0", "mine-1")
        asking = [
            asyncio.create_task(router.post("/v1/completions", prompt="x", max_tokens=200, request_id=name))
            for name in names
        ]
        await router.until(lambda load: load.num_running == 3)
        assert (await router.client.delete("/v1/requests/mine")).json()["cancelled"]
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [499, 200, 200]


async def test_events_of_one_step_are_sent_as_one_chunk(start: Start) -> None:
    async with start("abcdefgh", accepts=never) as router:
        client = Client("/v1/completions", {"prompt": ["x", "y", "z"], "max_tokens": 40, "stream": True})
        await client.ask(router)
        events = b"".join(client.chunks).count(b"data: {")
        assert events == 120
        assert len(client.chunks) <= 50


async def test_a_long_prompt_is_tokenised_beside_the_loop_with_the_same_ids(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start("yes", window=65536, block_size=64, num_blocks=1024) as router:
        text = "hello w" * 5000
        tokenizer = router.service.text.tokenizer
        ids, pieces, on_loop = tokenizer.encode(text), tokenizer.encode_pieces, list[bool]()

        def encode_pieces(text: str, **options: Any) -> Any:
            on_loop.append(threading.current_thread() is threading.main_thread())
            return pieces(text, **options)

        monkeypatch.setattr(tokenizer, "encode_pieces", encode_pieces)
        answer = await router.complete(prompt=text, max_tokens=1, return_token_ids=True)
        assert answer["choices"][0]["prompt_token_ids"] == ids
        assert (await router.post("/tokenize", prompt=text)).json()["count"] == answer["usage"]["prompt_tokens"]
        assert len(on_loop) >= 2
        assert not any(on_loop)


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
        reported = await router.client.post("/workers/restart", json={"finish_seconds": 0}, headers=OPERATOR)
        begun = {"state": "running", "num_done": 0, "num_wanted": 1, "waits_for": None, "left_out": [], "error": None}
        assert reported.json()["restart"] == begun
        again = await router.client.post("/workers/restart", json={}, headers=OPERATOR)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "restart_under_way")
        await router.service.restart.wait()
        await keeping
        seen = (await router.client.get("/workers", headers=PLAIN)).json()
        assert seen["restart"] == begun | {"state": "done", "num_done": 1}
        assert seen["workers"][0]["incarnation"].startswith("life 2 of ")
        assert (await asking).json()["usage"]["completion_tokens"] == 60


async def test_a_restart_ends_with_the_client_that_watches_it_or_on_request(start: Start) -> None:
    async with start("yes", config=ServeConfig(api_keys=KEYS), step_seconds=0.01) as router:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        asking = asyncio.create_task(router.client.post("/v1/completions", json=body, headers=PLAIN))
        await router.until(lambda load: load.num_running == 1)
        watching = Client("/workers/restart", {"stream": True, "finish_seconds": 600})
        watching.scope["headers"] += [(b"authorization", b"Bearer ops-key")]
        watched = asyncio.create_task(watching.ask(router))
        restart = router.service.restart
        while not restart.waits_for:  # noqa: ASYNC110  the first event
            await asyncio.sleep(0.001)
        watching.gone.set()
        await watched
        await restart.wait()
        assert restart.state is RestartState.CANCELLED
        first = orjson.loads(watching.chunks[-1].removeprefix(b"data:"))["restart"]
        assert first["waits_for"].endswith("to end: what it runs has 600 s to finish")
        begun = await router.client.post("/workers/restart", json={"finish_seconds": 600}, headers=OPERATOR)
        assert begun.json()["restart"]["state"] == "running"
        assert (await router.client.delete("/workers/restart", headers=PLAIN)).status_code == 403
        ended = (await router.client.delete("/workers/restart", headers=OPERATOR)).json()["restart"]
        assert (ended["state"], ended["num_done"]) == ("cancelled", 0)
        asking.cancel()


def test_the_key_file_says_who_is_an_operator(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-1 name=ops operator=yes concurrency=2\nsk-2 name=plain\n")
    assert [(key.name, key.is_operator) for key in read_keys(str(file), "")] == [("ops", True), ("plain", False)]
    file.write_text("sk-1 operator=no\n")
    with pytest.raises(ConfigError, match="operator must be yes, or not be there"):
        read_keys(str(file), "")
