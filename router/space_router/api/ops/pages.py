"""`GET /openapi.json`, and HTML for browsers: `GET /docs`, that document on one page, and `GET /`, the web UI."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from space_router.api.schema import TgiError, describe_responses
from space_router.web_ui.files import PAGE_FILES

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 14px/1.5 ui-monospace, monospace } pre { overflow-x: auto; padding: .5rem; border: 1px solid #8884 }
summary { cursor: pointer } details { margin: .3rem 0 } details > :not(summary) { margin-left: 1.2rem }
table { border-collapse: collapse } td, th { text-align: left; vertical-align: top; padding: .1rem .8rem .1rem 0 }
b { display: inline-block; min-width: 4.5rem }
"""

_LIMITS = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}"}
_LIMITS |= {"maxLength": "of at most {} characters"}
Json = Mapping[str, Any]


def docs_routes(document: Callable[[], Json]) -> APIRouter:
    """Return the routes of the OpenAPI document, which `document` returns.

    Each is written once, when it is first asked for: clients without a key can ask again and again.
    """
    router = APIRouter(include_in_schema=False)

    @cache
    def written() -> bytes:
        return json.dumps(document(), ensure_ascii=False, separators=(",", ":")).encode()

    @cache
    def shown() -> bytes:
        return "".join(_html(document())).encode()

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return Response(written(), media_type="application/json")

    @router.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(shown(), headers=HEADERS)

    return router


def _html(document: Json) -> Iterator[str]:
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><h1>{title}</h1>'
    yield f'<p>{escape(info["description"])} The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["other"])[0]
            by_tag.setdefault(tag, []).append("".join(_operation(path, method, operation)))
    for tag, written in by_tag.items():
        yield f"<h2>{escape(tag)}</h2>{''.join(written)}"
    yield "<h2>schemas</h2>"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> {_text(schema)}</summary>'
        whole = f"<pre>{escape(json.dumps(schema, indent=2, ensure_ascii=False))}</pre>"
        yield f"{_fields(schema)}<details><summary>JSON schema</summary>{whole}</details></details>"


def _operation(path: str, method: str, operation: Json) -> Iterator[str]:
    description = operation.get("description", operation.get("summary", ""))
    yield f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> {escape(description)}</summary>"
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body, <code>{escape(media)}</code>: {_names(content['schema'])}</p>"
    yield "<table>"
    for status, answer in operation["responses"].items():
        kinds = (f"<code>{escape(m)}</code> {_names(c['schema'])}" for m, c in answer.get("content", {}).items())
        yield f"<tr><td>{status}<td>{escape(answer['description'])}<td>{'<br>'.join(kinds)}"
    yield "</table></details>"


def _fields(schema: Json) -> str:
    """Return a table of an object's fields: name, type, required, description."""
    required = schema.get("required", ())
    rows = (
        f"<tr><td><code>{escape(name)}</code><td>{_type(field)}"
        f"<td>{'required' if name in required else ''}<td>{_text(field)}"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table>{''.join(rows)}</table>"


def _type(schema: Any) -> str:
    """Return a short type: `integer 0 to 20`, `array of string`, links to other schemas."""
    if not isinstance(schema, dict):
        return ""
    if "$ref" in schema:
        return _names(schema)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(one) for one in choices))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(one))}</code>" for one in values)
    kind = escape(str(schema.get("type", "anything")))
    if kind == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return " ".join([kind, *(form.format(schema[word]) for word, form in _LIMITS.items() if word in schema)])


def _names(schema: Any) -> str:
    """Return links to all schemas that this one refers to directly."""
    found = dict.fromkeys(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(schema)))
    return " or ".join(f'<a href="#{escape(name)}"><code>{escape(name)}</code></a>' for name in found)


def _text(schema: Any) -> str:
    return escape(schema.get("description", "")) if isinstance(schema, dict) else ""


def web_ui_routes() -> APIRouter:
    """Return one route for each file. Only `/`, which is also a TGI route, is in the OpenAPI document."""
    router = APIRouter()
    described = describe_responses({"type": "string"}, errors=TgiError, media="text/html")
    described[304] = {"description": "The client has it: `If-None-Match` names it."}

    async def get(request: Request) -> Response:
        """A page to try the model in."""
        return PAGE_FILES[request.scope["route"].path].answer(request.headers.get("if-none-match"))

    for path in PAGE_FILES:
        add = partial(router.add_api_route, methods=["GET"], name="the page", response_class=Response)
        add(path, get, responses=described, include_in_schema=path == "/")
    return router
