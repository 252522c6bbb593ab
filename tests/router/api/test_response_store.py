"""Stored responses: conversations go on from an id, for the key that made it, within bounds, over restarts."""

import asyncio
import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.router.whole_router import Seen
from doubles.tokenizers import tiny_tokenizer
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig
from space_router.errors import ConfigError
from space_router.response_store import ResponseStore, StoredResponse

ROOM = {"window": 4096, "num_blocks": 2048}
REPLY = "Hello. <|endoftext|>"
MEMORY = replace(ServeConfig(), response_store="memory")


def prompt_of(seen: Seen) -> str:
    return tiny_tokenizer().decode(list(seen.take()[-1].prompt_ids), skip_special_tokens=False)


async def respond(router: Any, key: str = "none", **body: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"}
    answer = await router.client.post("/v1/responses", json={"input": "Hi", **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


async def test_a_conversation_goes_on_from_an_id(start: Any, seen: Seen) -> None:
    async with start(REPLY, config=MEMORY, **ROOM) as router:
        first = await respond(router, instructions="Be brief.")
        assert first["store"] is True
        second = await respond(router, input="More", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        talk = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello. <|im_end|>\n"
        assert prompt_of(seen) == talk + "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
        streamed = await router.post("/v1/responses", input="And", previous_response_id=second["id"], stream=True)
        assert streamed.status_code == 200
        assert prompt_of(seen).count("Hello. ") == 2
        got = await router.client.get(f"/v1/responses/{first['id']}")
        assert got.json() == first
        assert (await router.client.delete(f"/v1/responses/{first['id']}")).json()["deleted"] is True
        assert (await router.client.get(f"/v1/responses/{first['id']}")).status_code == 404
        await router.refuses(
            "/v1/responses", "previous_response_id", "no stored response", 404, input="Hi",
            previous_response_id=first["id"],
        )  # fmt: skip
        assert prompt_of_next(await respond(router, previous_response_id=second["id"]), seen).count("Hello. ") == 2


def prompt_of_next(_: dict[str, Any], seen: Seen) -> str:
    return prompt_of(seen)


async def test_nothing_is_stored_unless_both_want_it(start: Any) -> None:
    async with start(REPLY, config=MEMORY, **ROOM) as router:
        made = await respond(router, store=False)
        assert made["store"] is False
        assert (await router.client.get(f"/v1/responses/{made['id']}")).status_code == 404
    async with start(REPLY, **ROOM) as router:
        made = await respond(router, store=True)
        assert made["store"] is False
        await router.refuses(
            "/v1/responses", "previous_response_id", "--response-store memory", input="Hi",
            previous_response_id=made["id"],
        )  # fmt: skip


async def test_an_id_belongs_to_the_key_that_made_it(start: Any) -> None:
    config = replace(MEMORY, api_keys=plain_keys("sk-a", "sk-b"))
    async with start(REPLY, config=config, **ROOM) as router:
        made = await respond(router, "sk-a", request_id="mine")
        other = {"authorization": "Bearer sk-b"}
        body = {"input": "Hi", "previous_response_id": made["id"]}
        for answer in (
            await router.client.post("/v1/responses", json=body, headers=other),
            await router.client.get(f"/v1/responses/{made['id']}", headers=other),
            await router.client.delete(f"/v1/responses/{made['id']}", headers=other),
        ):
            assert answer.status_code == 404
        await respond(router, "sk-b", request_id="mine", input="Of another key")
        got = await router.client.get("/v1/responses/mine", headers={"authorization": "Bearer sk-a"})
        assert got.json() == made
        await respond(router, "sk-a", previous_response_id=made["id"])


async def test_a_file_survives_a_restart(start: Any, tmp_path: Path, seen: Seen) -> None:
    config = replace(ServeConfig(), response_store=str(tmp_path / "responses.sqlite"))
    async with start(REPLY, config=config, **ROOM) as router:
        made = await respond(router)
    async with start(REPLY, config=config, **ROOM) as router:
        await respond(router, input="More", previous_response_id=made["id"])
        assert "Hello. <|im_end|>\n<|im_start|>user\nMore" in prompt_of(seen)


async def test_a_store_is_bounded_and_drops_what_was_not_used_longest() -> None:
    store = ResponseStore("memory", 2000)
    stored = StoredResponse({"id": "x"}, [{"text": "".join(chr(33 + i * i % 90) for i in range(200))}])
    for number in range(20):
        assert await store.put(f"r{number}", "a", stored)
        await asyncio.sleep(0.001)
        assert await store.get("r0", "a") is not None  # used again and again
    kept = [number for number in range(20) if await store.get(f"r{number}", "a") is not None]
    assert 2 < len(kept) < 20
    assert kept == [0, *range(20 - len(kept) + 1, 20)]
    assert not await store.put("huge", "a", StoredResponse({}, [list(range(5000))]))
    assert await store.get("huge", "a") is None


def test_a_file_that_cannot_be_used_is_refused_at_start(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"not a database at all" * 100)
    for place in (tmp_path / "no" / "folder", broken):
        with pytest.raises(ConfigError, match="--response-store"):
            ResponseStore(str(place), 1000)


@pytest.mark.parametrize(("version", "is_taken"), [(0, True), (1, True), (2, False)])
async def test_a_file_of_another_version_is_left_as_it_is_with_one_line(
    version: int, is_taken: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "responses.sqlite"
    first = ResponseStore(str(path), 1 << 20)
    assert await first.put("resp_1", "key", StoredResponse({"id": "resp_1"}, []))
    first.close()
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute(f"PRAGMA user_version={version}")
    content = path.read_bytes()
    store = ResponseStore(str(path), 1 << 20)
    assert (await store.get("resp_1", "key") is not None) is is_taken
    assert await store.put("resp_2", "key", StoredResponse({"id": "resp_2"}, []))
    assert await store.get("resp_2", "key") is not None
    store.close()
    assert len(caplog.records) == (0 if is_taken else 1)
    assert (path.read_bytes() == content) is not is_taken
