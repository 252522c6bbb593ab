"""The texts of a GGUF file lie in one folder, whoever asks, wherever it can be written."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from space_common.gguf import view
from space_common.gguf.find import GgufError, find_gguf
from space_common.gguf.view import view_folder

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "spaceserve" / "gguf"


def test_a_header_has_one_folder_with_the_files_of_a_checkpoint(write: Write, cache: Path, tmp_path: Path) -> None:
    file = write()
    folder = view_folder(file)
    assert folder.parent == cache
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    written = (folder / "config.json").stat().st_mtime_ns
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    assert view_folder(copy) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    assert view_folder(write("other.gguf", values={"llama.rope.freq_base": 5e5})) != folder


def test_other_code_writes_another_folder(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    before = view_folder(write())
    monkeypatch.setattr(view, "_version", lambda: "another")
    assert view_folder(write()) != before


def test_processes_that_write_it_at_once_have_the_same_and_leave_nothing(write: Write, cache: Path) -> None:
    file, found = write(), list[Path]()
    threads = [threading.Thread(target=lambda: found.append(view_folder(file))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert list(cache.iterdir()) == [found[0]]


def test_a_cache_that_cannot_be_written_is_a_temporary_folder_of_this_user(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in a file
    monkeypatch.setattr(view.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    folder = view_folder(write())
    assert folder.parent == tmp_path / "tmp" / f"spaceserve-{os.getuid()}" / "gguf"
    assert view_folder(write()) == folder
    assert (tmp_path / "tmp" / f"spaceserve-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_that_others_may_write_is_not_trusted(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(view.tempfile, "gettempdir", lambda: str(tmp_path))
    squatted = tmp_path / f"spaceserve-{os.getuid()}"
    squatted.mkdir()
    squatted.chmod(0o777)
    with pytest.raises(GgufError, match=r"can be written neither to .*Set XDG_CACHE_HOME"):
        view_folder(write())


def test_a_refused_file_leaves_nothing_behind(write: Write, cache: Path) -> None:
    with pytest.raises(GgufError):
        view_folder(write(architecture="mamba"))
    assert not cache.exists()


def test_weights_of_another_format_come_first(write: Write, tmp_path: Path) -> None:
    file = write()
    assert find_gguf(tmp_path) == file
    (tmp_path / "draft_head.safetensors").write_bytes(b"")
    assert find_gguf(tmp_path) == file
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path / "cache") is None
