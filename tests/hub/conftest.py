"""A hub of our own over HTTP: what huggingface_hub asks of the real one, with files and failures that a test sets."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class Repository:
    """The files of a model, and who may see them."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main", COMMIT)
    token: str | None = None  # the only one that may; None: anybody
    gated: bool = False
    breaks_after: int | None = None  # bytes of a body of weights, then the connection is cut
    bodies_left: int | None = None  # bodies of weights that are given, then the answer is 503
    tags: dict[str, str] = field(default_factory=dict)  # of files that are not what they should be


@dataclass
class FakeHub:
    """What is there, and what was asked."""

    models: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # method, path, headers
    status: int | None = None  # of every answer, where it is unwell
    url: str = ""

    def environment(self, home: Path, **others: str) -> dict[str, str]:
        """Of a process that knows no other hub and has no token."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SPACESERVE_"))}
        return {**kept, "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **others}

    def bodies(self) -> list[tuple[str, str | None]]:
        """Files whose bodies were asked for, and from where on."""
        found = [(path, headers) for method, path, headers in self.asked if method == "GET" and "/resolve/" in path]
        return [(path.rpartition("/")[2], headers.get("range")) for path, headers in found]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *arguments: Any) -> None: ...

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.asked.append((self.command, path, headers))
        if self.hub.status is not None:
            self._refuse(self.hub.status, "unwell")
            return
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+)|/tree/([^/]+))?", path):
            repository = self._repository(found[1], found[2] or found[3] or "main", headers)
            if repository is not None:
                self._json(_tree(repository) if found[3] else {"id": found[1], "sha": COMMIT, "siblings": []}, body)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repository = self._repository(found[1], found[2], headers)
            if repository is not None:
                self._file(repository, found[3], headers, body)
        else:
            self._refuse(404, "EntryNotFound")

    def _repository(self, name: str, revision: str, headers: dict[str, str]) -> Repository | None:
        repository = self.hub.models.get(name)
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.token and not repository.gated and given != repository.token):
            self._refuse(401, "RepoNotFound")
        elif repository.token and given != repository.token:
            self._refuse(403, "GatedRepo")
        elif revision not in repository.revisions:
            self._refuse(404, "RevisionNotFound")
        else:
            return repository
        return None

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any, body: bool) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _file(self, repository: Repository, name: str, headers: dict[str, str], body: bool) -> None:
        if name not in repository.files:
            self._refuse(404, "EntryNotFound")
            return
        data = repository.files[name]
        if body and name.endswith(".safetensors") and repository.bodies_left is not None:
            if not repository.bodies_left:
                self._refuse(503, "unwell")
                return
            repository.bodies_left -= 1
        first = int(match[1]) if (match := re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))) else 0
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{repository.tags.get(name, hashlib.sha256(data).hexdigest())}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if body:
            cut = repository.breaks_after if name.endswith(".safetensors") else None
            self.wfile.write(data[first:] if cut is None else data[first : first + cut])
            self.close_connection = cut is not None


def _tree(repository: Repository) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for name, data in repository.files.items()
    ]


@pytest.fixture(scope="session")
def one_hub() -> Iterator[FakeHub]:
    made = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": made}))
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def hub(one_hub: FakeHub) -> FakeHub:
    """With nothing in it."""
    one_hub.models.clear()
    one_hub.asked.clear()
    one_hub.status = None
    return one_hub


@pytest.fixture
def repository() -> type[Repository]:
    return Repository


FETCH = """
import json, sys
from pathlib import Path
from space_common import hub
from space_common.hub import Hub, HubError
hub.PAUSES = (0.01, 0.01)
for line in sys.stdin:
    asked = json.loads(line)
    weights, model = asked.pop("weights", True), asked.pop("model")
    paths = {name: Path(asked.pop(name)) for name in ("token_file", "folder") if name in asked}
    said = []
    outcome = {"said": said, "folder": None, "error": ""}
    try:
        outcome["folder"] = str(Hub(**asked, **paths, say=said.append).fetch(model, weights=weights))
    except HubError as error:
        outcome["error"] = str(error)
    print(json.dumps(outcome), flush=True)
"""


@dataclass
class Fetched:
    """What a process of its own made of a question."""

    folder: Path | None
    error: str
    said: list[str]
    stderr: str


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One for each environment: huggingface_hub reads it once."""
    found: dict[str, Any] = {}
    yield found
    for process, log in found.values():
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
        log.close()


@pytest.fixture
def fetch(hub: FakeHub, processes: dict[str, Any], tmp_path: Path) -> Any:
    """Ask for a model; its files come into a folder of this test unless it names one."""

    def run(model: str, environment: dict[str, str] | None = None, **asked: Any) -> Fetched:
        key = json.dumps(environment or {})
        if key not in processes:
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with its process
            known = hub.environment(tmp_path / "home", **(environment or {}))
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            processes[key] = subprocess.Popen([sys.executable, "-c", FETCH], env=known, **pipes), log
        process, log = processes[key]
        before = os.fstat(log.fileno()).st_size
        process.stdin.write(json.dumps({"model": model, "folder": str(tmp_path / "hub"), **asked}) + "\n")
        process.stdin.flush()
        reported = json.loads(process.stdout.readline())
        log.seek(before)
        folder = reported["folder"] and Path(reported["folder"])
        return Fetched(folder, reported["error"], reported["said"], log.read())

    return run
