"""Stored responses: conversations go on from an id, for the key that made it, within bounds, over restarts."""

import asyncio
import contextlib
import itertools
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles.router.whole_router import Seen
from doubles.tokenizers import tiny_tokenizer
from space_router.api.openai.answers import InputTokens, ResponseInputItems
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


async def listed(router: Any, id_: str, query: str = "", key: str = "none") -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"}
    answer = await router.client.get(f"/v1/responses/{id_}/input_items{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    ResponseInputItems.model_validate(value)
    return value


CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": "b", "id": "msg_own"},
    {"type": "reasoning", "id": "rs_own"},
    CALL,
    {"type": "function_call_output", "call_id": "c1", "output": "2"},
]


async def test_the_input_of_a_stored_response_is_listed_as_whole_items(start: Any) -> None:
    async with start(REPLY, config=MEMORY, **ROOM) as router:
        made = await respond(router, input=TALK)
        items = (await listed(router, made["id"], "?order=asc"))["data"]
        ids = [item.pop("id") for item in items]
        assert ids[2:4] == ["msg_own", "rs_own"]
        assert [one.split("_")[0] for one in ids] == ["msg", "msg", "msg", "rs", "fc", "fco"]
        assert len(set(ids)) == 6
        done = {"status": "completed"}
        text = {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}
        assert items == [
            {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be brief."}], **done},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}], **done},
            {"type": "message", "role": "assistant", "content": [text], **done},
            {"type": "reasoning", "summary": [], **done},
            {**CALL, **done},
            {"type": "function_call_output", "call_id": "c1", "output": "2", **done},
        ]
        again = await respond(router, input=[{**item, "id": id_} for item, id_ in zip(items, ids, strict=True)])
        assert again["usage"]["input_tokens"] == made["usage"]["input_tokens"]
        assert [item["id"] for item in (await listed(router, again["id"], "?order=asc"))["data"]] == ids


async def test_a_conversation_lists_all_that_came_before_with_the_same_ids(start: Any) -> None:
    async with start(REPLY, config=MEMORY, **ROOM) as router:
        first = await respond(router)
        second = await respond(router, input="Hi", previous_response_id=first["id"])
        [before] = (await listed(router, first["id"]))["data"]
        items = (await listed(router, second["id"], "?order=asc"))["data"]
        assert items[:2] == [before, first["output"][0]]
        assert items[2] == {**before, "id": items[2]["id"]}
        assert len({item["id"] for item in items}) == 3


async def test_the_same_item_twice_has_two_ids(start: Any) -> None:
    async with start(REPLY, config=MEMORY, **ROOM) as router:
        twice = {"role": "user", "content": "a", "id": "msg_1"}
        made = await respond(router, input=[twice, twice, {"role": "user", "content": "b"}])
        items = (await listed(router, made["id"], "?order=asc"))["data"]
        assert items[0]["id"] == "msg_1"
        assert len({item["id"] for item in items}) == 3


async def test_pages_of_the_input_have_every_item_once(start: Any) -> None:
    async with start(REPLY, config=MEMORY, **ROOM) as router:
        made = await respond(router, input=[{"role": "user", "content": str(number)} for number in range(7)])
        for order, limit in itertools.product(("asc", "desc", ""), (1, 2, 3, 7)):
            found: list[str] = []
            query = f"?limit={limit}" + f"&order={order}" * bool(order)
            more = ""
            while True:
                part = await listed(router, made["id"], query + more)
                found += [item["content"][0]["text"] for item in part["data"]]
                assert (part["first_id"], part["last_id"]) == (part["data"][0]["id"], part["data"][-1]["id"])
                if not part["has_more"]:
                    break
                assert len(part["data"]) == limit
                more = f"&after={part['last_id']}"
            assert found == list("0123456" if order == "asc" else "6543210")
            beyond = await listed(router, made["id"], f"?after={part['last_id']}&order={order or 'desc'}")
            assert beyond == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_what_a_query_of_a_stored_response_may_be(start: Any) -> None:
    cases = [
        ("/input_items?limit=0", 400, "limit", "greater than or equal to 1"),
        ("/input_items?limit=101", 400, "limit", "less than or equal to 100"),
        ("/input_items?limit=x", 400, "limit", "integer"),
        ("/input_items?limit=1e1", 400, "limit", "integer"),
        ("/input_items?order=up", 400, "order", "'asc' or 'desc'"),
        ("/input_items?api-version=preview", 200, None, "'api-version' is no parameter of this query"),
        ("/input_items?after=msg_1", 404, "after", "no input item has this id"),
        ("/input_items?include[]=everything", 400, "include", "must be"),
        ("/input_items?include[]=reasoning.encrypted_content&include=message.output_text.logprobs", 200, None, ""),
        ("?stream=true", 400, "stream", "whole"),
        ("?stream=false", 200, None, ""),
        ("?stream=perhaps", 400, "stream", "boolean"),
        ("?starting_after=3", 400, "starting_after", "in the background"),
        ("?include[]=reasoning.encrypted_content", 200, None, ""),
        ("?verbose=1", 200, None, "'verbose' is no parameter of this query"),
        ("/cancel", 400, None, "in the background"),
    ]
    async with start(REPLY, config=MEMORY, **ROOM) as router:
        made = await respond(router)
        for path, status, param, message in cases:
            method = "POST" if path == "/cancel" else "GET"
            answer = await router.client.request(method, f"/v1/responses/{made['id']}{path}")
            assert answer.status_code == status, answer.text
            if status != 200:
                error = answer.json()["error"]
                assert error["param"] == param
                assert message in error["message"]
            assert status != 200 or message in answer.headers.get("warning", "")


async def test_a_response_of_another_key_or_none_is_not_found(start: Any) -> None:
    config = replace(MEMORY, api_keys=plain_keys("sk-a", "sk-b"))
    routes = (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"))
    async with start(REPLY, config=config, **ROOM) as router:
        made = await respond(router, "sk-a")
        for (method, path), (key, id_) in itertools.product(routes, (("sk-b", made["id"]), ("sk-a", "resp_none"))):
            headers = {"authorization": f"Bearer {key}"}
            answer = await router.client.request(method, f"/v1/responses/{id_}{path}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    async with start(REPLY, **ROOM) as router:
        for method, path in routes:
            assert (await router.client.request(method, f"/v1/responses/resp_none{path}")).status_code == 404


async def test_the_tokens_of_an_input_are_counted_as_they_are_used(start: Any) -> None:
    bodies: list[dict[str, Any]] = [
        {"input": "Hi"},
        {"input": TALK, "instructions": "Be brief."},
        {"input": "Hi", "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}]},
        {"input": "Hi", "truncation": "auto", "text": {"format": {"type": "json_object"}}},
        {"input": "Hi", "previous_response_id": "first"},
    ]
    async with start(REPLY, config=MEMORY, **ROOM) as router:
        await respond(router, request_id="first")
        for body in bodies:
            counted = await router.post("/v1/responses/input_tokens", **body)
            assert counted.status_code == 200, counted.text
            InputTokens.model_validate(counted.json())
            made = await respond(router, **body, max_output_tokens=1)
            assert counted.json()["input_tokens"] == made["usage"]["input_tokens"]
        await router.refuses("/v1/responses/input_tokens", "temperature", "not a field", input="Hi", temperature=1)
        await router.refuses(
            "/v1/responses/input_tokens", "previous_response_id", "no stored", 404, input="Hi",
            previous_response_id="none",
        )  # fmt: skip


async def test_what_is_not_served_beside_responses_is_refused_with_what_to_do(start: Any) -> None:
    async with start(REPLY, config=MEMORY, **ROOM) as router:
        for path, cure in (("responses/compact", "truncation"), ("conversations", "previous_response_id")):
            answer = await router.post(f"/v1/{path}", input="Hi")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            assert cure in answer.json()["error"]["message"]
        assert "previous_response_id" in (await router.client.get("/v1/conversations/conv_1/items")).text
