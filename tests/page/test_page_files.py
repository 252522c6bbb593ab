"""The page as it is served and installed: whole, cached by its content, loading nothing from anywhere else."""

import asyncio
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from fastapi import FastAPI, Request
from space_router.api.ops.pages import web_ui_routes
from space_router.api.service import HttpAccess, Service
from space_router.api_keys import plain_keys
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.metrics import Metrics
from space_router.text.model_text import ModelText
from space_router.web_ui import files
from space_router.web_ui.files import PAGE_FILES, POLICY

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(files.__file__).parent


def _service(config: ServeConfig) -> Service:
    """As far as access goes: an engine that has room, and no model."""
    return Service(
        config, cast(ModelText, None), cast(Engine, SimpleNamespace(full=lambda key: None, connections=[])), Metrics()
    )


def application(*keys: str) -> FastAPI:
    app = FastAPI()
    app.include_router(web_ui_routes())

    @app.post("/")
    async def generate(request: Request) -> dict[str, str]:
        return {"generated_text": "TGI's"}

    app.add_middleware(HttpAccess, service=_service(ServeConfig(api_keys=plain_keys(*keys))))
    return app


def ask(
    method: str, path: str, headers: Mapping[str, str] | None = None, *, keys: tuple[str, ...] = ()
) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app=application(*keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            return await client.request(method, path, headers=dict(headers or {}))

    return asyncio.run(asked())


class Tags(HTMLParser):
    """Every tag with its attributes, and those that were left open."""

    VOID = frozenset({"meta", "link", "input", "br", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.wrong: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.wrong += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.wrong.append(f"/{tag}")


@pytest.fixture(scope="module")
def tags() -> Tags:
    return Tags((FOLDER / "index.html").read_text(encoding="utf-8"))


def test_get_of_the_root_is_the_page_and_post_is_still_tgis() -> None:
    page = ask("GET", "/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.content == (FOLDER / "index.html").read_bytes()
    assert ask("POST", "/").json() == {"generated_text": "TGI's"}


@pytest.mark.parametrize("path", sorted(PAGE_FILES))
def test_every_file_comes_with_its_type_a_policy_and_a_tag(path: str) -> None:
    answer = ask("GET", path)
    assert (answer.status_code, answer.content) == (200, PAGE_FILES[path].content)
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"].split(";")[0] in {"text/html", "text/css", "text/javascript", "image/svg+xml"}
    again = ask("GET", path, {"if-none-match": f'"old", W/{answer.headers["etag"]}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", answer.headers["etag"])
    assert ask("GET", path, {"if-none-match": '"another"'}).status_code == 200


def test_the_policy_lets_nothing_in_from_elsewhere() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert set(rules.values()) == {"'none'", "'self'"}  # no host, no inline script or style, no eval


def test_the_page_needs_no_key_and_what_it_asks_for_does() -> None:
    for path in PAGE_FILES:
        assert ask("GET", path, keys=("k3y",)).status_code == 200
    assert ask("POST", "/", keys=("k3y",)).status_code == 401
    assert ask("POST", "/", {"authorization": "Bearer k3y"}, keys=("k3y",)).status_code == 200


def test_the_api_document_has_the_page_beside_tgis_route_and_none_of_its_parts() -> None:
    paths = application().openapi()["paths"]
    assert set(paths) == {"/"}
    assert set(paths["/"]) == {"get", "post"}
    assert set(paths["/"]["get"]["responses"]["200"]["content"]) == {"text/html"}


def test_only_the_pages_own_kinds_of_files_are_served() -> None:
    assert {path.rpartition(".")[2] for path in PAGE_FILES} == {"/", "css", "mjs", "svg"}
    assert ask("GET", "/page/files.py").status_code == 404


def test_no_file_names_an_address_outside_the_server() -> None:
    namespaces = {"http://www.w3.org/2000/svg"}
    for path, file in PAGE_FILES.items():
        found = set(re.findall(r"(?:https?:)?//[a-z0-9][\w.-]*\.[a-z]{2,}[^\s\"'`)<]*", file.content.decode()))
        assert found <= namespaces, path


def test_every_file_the_page_refers_to_is_there(tags: Tags) -> None:
    links = {given.get("src") or given.get("href") or "" for tag, given in tags.found if tag in ("script", "link")}
    assert {"/" + link for link in links} <= PAGE_FILES.keys()
    for path, file in PAGE_FILES.items():
        for name in re.findall(r'from "\./([^"]+)"', file.content.decode()):
            assert f"/page/{name}" in PAGE_FILES, path


def test_addresses_are_relative_so_that_a_proxy_may_put_the_page_into_a_folder(tags: Tags) -> None:
    assert not [given for _, given in tags.found if given.get("src", given.get("href", "")).startswith("/")]
    for path, file in PAGE_FILES.items():
        if path.endswith(".mjs"):
            assert not re.search(r'["\'`]/(v1|info|page|metrics)', file.content.decode()), path


def test_the_html_is_whole_and_every_control_has_a_name(tags: Tags) -> None:
    assert tags.wrong == []
    ids = [given["id"] for _, given in tags.found if "id" in given]
    assert len(ids) == len(set(ids))
    named = {given["for"] for tag, given in tags.found if tag == "label" and "for" in given}
    controls = {
        given["id"]
        for tag, given in tags.found
        if tag in ("input", "textarea", "select") and given.get("type") not in ("radio", "checkbox")
    }
    assert controls == named
    described = {name for _, given in tags.found for name in given.get("aria-describedby", "").split()}
    assert described <= set(ids)
    assert not [given for _, given in tags.found if "style" in given or any(name.startswith("on") for name in given)]


def test_the_script_finds_every_element_it_looks_for(tags: Tags) -> None:
    ids = {given["id"] for _, given in tags.found if "id" in given}
    script = PAGE_FILES["/page/page.mjs"].content.decode()
    assert set(re.findall(r'\$\("([\w-]+)"\)', script)) <= ids


def test_the_wheel_has_the_page_and_not_its_picture(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("space_router/web_ui/")}
    served = {path.removeprefix("/page/") if path != "/" else "index.html" for path in PAGE_FILES}
    assert {f"space_router/web_ui/{name}" for name in served} <= inside
    assert not [name for name in inside if name.endswith(".png")]


HERE = Path(__file__).resolve().parent


def test_the_modules_of_the_page_do_what_their_tests_say() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node to run them")
    tests = sorted(HERE.glob("*.test.mjs"))
    written = sum(len(re.findall(r"^test\(", test.read_text(encoding="utf-8"), re.MULTILINE)) for test in tests)
    run = subprocess.run([node, "--test", "--test-reporter=tap", *tests], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout
    assert f"# pass {written}\n" in run.stdout
