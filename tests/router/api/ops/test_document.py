"""The OpenAPI document: every route says what it takes and all it can answer. That answers are so, conftest checks."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import jsonschema_rs
import pytest
from doubles.router.whole_router import Start
from pydantic import BaseModel
from space_router.api.ops import pages
from space_router.api.ops.pages import _html
from space_router.api.schema import DocumentedApp, ResponseModel
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig
from space_router.http_server.body import Body
from space_router.http_server.responses import is_open

GENERATING = {
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/generate_stream", "/", "/invocations",
}  # fmt: skip


async def document(router: Any) -> dict[str, Any]:
    answer = await router.client.get("/openapi.json")
    assert answer.status_code == 200
    value: dict[str, Any] = answer.json()
    return value


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


async def test_every_operation_describes_its_answer_and_its_errors(router: Any) -> None:
    for path, method, operation in operations(await document(router)):
        described = operation["responses"]
        where = f"{method} {path}"
        assert "500" in described, where
        assert ("401" in described) != is_open(path, method.upper()), where
        if path in GENERATING and method == "post":
            wrong = "400" if path.startswith("/v1") else "422"
            assert {"404", "408", "413", "415", "429", "499", "503", wrong} <= described.keys(), where
            assert "Retry-After" in described["429"]["headers"]
        for status, answer in described.items():
            assert answer["description"], f"{where} {status}"
            for media, content in answer.get("content", {}).items():
                assert content["schema"], f"{where} {status} {media}"
        if method == "post" and path != "/v1/responses/{response_id}/cancel":  # takes no body
            assert operation["requestBody"]["content"]["application/json"]["schema"], where
            assert "415" in described, where


async def test_it_refers_to_nothing_that_is_not_there_and_is_valid(router: Any) -> None:
    whole = await document(router)
    names = set(whole["components"]["schemas"])

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    assert {reference.removeprefix("#/components/schemas/") for reference in references(whole)} <= names
    assert "HTTPValidationError" not in names
    for name in names:
        schema = {"$ref": f"#/components/schemas/{name}", "components": whole["components"]}
        jsonschema_rs.validator_for(schema)
    assert "$defs" not in json.dumps(whole)


async def test_bodies_say_which_fields_there_are(router: Any) -> None:
    schemas = (await document(router))["components"]["schemas"]
    for name in ("CompletionBody", "ChatBody"):
        body = jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})
        base = {"prompt": "x"} if name == "CompletionBody" else {"messages": [{"role": "user", "content": "x"}]}
        for fields in ({}, {"user": "me"}, {"temperature": None}, {"use_beam_search": False}, {"stop": ["a", "b"]}):
            assert body.is_valid(base | fields), fields
        for fields in ({"nonsense": 1}, {"temperature": 3}, {"use_beam_search": True}, {"stop": [1]}, {"n": 0}):
            assert not body.is_valid(base | fields), fields
    assert schemas["Spaceserve"]["required"] == ["seed", "steps", "drafted", "accepted", "tokens_per_step"]


@pytest.mark.parametrize("keys", [(), ("secret",)])
async def test_it_asks_for_a_key_where_the_server_does(start: Start, keys: tuple[str, ...]) -> None:
    async with start("yes", config=ServeConfig(api_keys=plain_keys(*keys))) as router:
        whole = await document(router)
        for path, method, operation in operations(whole):
            asks = bool(keys) and not is_open(path, method.upper())
            assert operation.get("security", []) == ([{"bearer": []}, {"x-api-key": []}] if asks else [])
        assert ("securitySchemes" in whole["components"]) == bool(keys)


class Reading(HTMLParser):
    """Ids, links and what the page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        self.links.add(values.get("href") or "")
        if tag in ("script", "link", "img", "iframe", "object", "base") or "src" in values:
            self.loaded.append(tag)


async def test_every_route_and_schema_is_on_the_page_and_every_link_leads_somewhere(start: Start) -> None:
    async with start("yes", config=ServeConfig(api_keys=plain_keys("one"))) as router:
        page = await router.client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        document = (await router.client.get("/openapi.json")).json()
        reading = Reading(page.text)
        for path in document["paths"]:
            assert f"<code>{path}</code>" in page.text
        assert reading.ids >= set(document["components"]["schemas"])
        assert {link[1:] for link in reading.links if link.startswith("#")} <= reading.ids
        assert reading.links - {link for link in reading.links if link.startswith("#")} <= {"", "openapi.json"}


async def test_the_document_and_its_page_are_written_once(router: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are long, and need no key."""
    first = [(await router.client.get(path)).content for path in ("/openapi.json", "/docs")]

    def write(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is written again")

    monkeypatch.setattr(pages, "_html", write)
    monkeypatch.setattr(pages.json, "dumps", write)
    monkeypatch.setattr(DocumentedApp, "openapi", write)
    assert [(await router.client.get(path)).content for path in ("/openapi.json", "/docs")] == first
    assert (await router.client.head("/openapi.json")).status_code == 200


async def test_the_page_loads_nothing_and_may_not(router: Any) -> None:
    page = await router.client.get("/docs")
    assert not Reading(page.text).loaded
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"url\(|@import|https?://", page.text)


def test_words_of_the_document_are_text_and_no_markup() -> None:
    odd = "<img src=x onerror=alert(1)>"
    schema = {"type": "object", "description": odd, "properties": {odd: {"enum": [odd], "description": odd}}}
    operation = {"description": odd, "responses": {"200": {"description": odd, "content": {}}}}
    document = {
        "info": {"title": odd, "version": odd, "description": odd},
        "paths": {odd: {"get": operation}},
        "components": {"schemas": {"a": schema}},
    }
    assert not Reading("".join(_html(document))).loaded


async def test_applications_share_the_schemas_and_write_the_same_document(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start("one") as router:
        first = await document(router)

    def computed_again(model: type[BaseModel], **_: Any) -> None:
        pytest.fail(f"the schema of {model.__name__} is computed again")

    monkeypatch.setattr(Body, "model_json_schema", classmethod(computed_again))
    monkeypatch.setattr(ResponseModel, "model_json_schema", classmethod(computed_again))
    async with start("two") as router:
        assert await document(router) == first
