"""The documentation can be read without a key, without a network and without trusting anything in it."""

import re
from html.parser import HTMLParser
from typing import Any

from doubles.router.whole_router import Start
from space_router.api.ops.pages import _html
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig


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
