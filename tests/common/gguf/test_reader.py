"""The header of a GGUF file is read as the gguf package reads it, and a broken one is named."""

import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize
from space_common import kept_files
from space_common.gguf import view
from space_common.gguf.find import GgufError, find_gguf
from space_common.gguf.reader import GgufFile
from space_common.gguf.view import view_folder


def write(path: Path, *, alignment: int | None = None) -> Path:
    writer = GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_context_length(64)
    writer.add_rope_freq_base(10000.0)
    writer.add_add_bos_token(True)
    writer.add_token_list(["a", "Ġé", "\u2581\U0001f600"])
    writer.add_token_types([1, -2, 3])
    writer.add_token_scores([0.5, -1.25, 0.0])
    writer.add_int64("some.long", -(2**40))
    writer.add_array("some.flags", [True, False])
    numbers = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    writer.add_tensor("plain", numbers)
    writer.add_tensor("half", numbers[:2].astype(np.float16))
    writer.add_tensor("small", quantize(numbers, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64])
def test_metadata_and_tensors_are_those_that_the_gguf_package_reads(tmp_path: Path, alignment: int | None) -> None:
    path = write(tmp_path / "x.gguf", alignment=alignment)
    found, theirs = GgufFile.open(path), GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert dict(found.metadata) == fields
    assert list(found.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = found.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.offset, mine.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.kind_name == tensor.tensor_type.name
    assert found.kinds == {"F32": 192, "Q8_0": 192, "F16": 128}


def test_a_file_cut_short_anywhere_is_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "x.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [1, 4, 7, 23, 24, 60, 400, len(whole) // 2, len(whole) - 40]:
        cut.write_bytes(whole[:length])
        with pytest.raises(GgufError, match=r"cut\.gguf.*(cut short|no GGUF file|can hold)"):
            GgufFile.open(cut)


@pytest.mark.parametrize(
    ("start", "why"),
    [
        (b"", "empty"),
        (b"\x80\x04pickled", "no GGUF file"),
        (b"FUGG" + struct.pack(">I", 3), "opposite byte order"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1) + bytes(16), "can hold"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(16), "cut short"),
        (b"tjgg" + bytes(16), "before GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_what_is_no_gguf_of_these_days_is_refused_with_the_reason(tmp_path: Path, start: bytes, why: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(start)
    with pytest.raises(GgufError, match=rf"x\.gguf.*{why}"):
        GgufFile.open(path)


def test_an_unknown_type_of_numbers_is_refused_with_the_cure(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    data = path.read_bytes()
    entry = b"plain" + struct.pack("<IQQI", 2, 64, 3, GGMLQuantizationType.F32)
    assert data.count(entry) == 1
    path.write_bytes(data.replace(entry, entry[:-4] + struct.pack("<I", 999)))
    with pytest.raises(GgufError, match=r"plain is of type 999.*Take another quantisation"):
        GgufFile.open(path)


def test_the_hash_changes_with_header_and_length(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    before = GgufFile.open(path).header_hash
    path.write_bytes(path.read_bytes() + b"\0")
    assert GgufFile.open(path).header_hash != before
    path.write_bytes(path.read_bytes().replace(b"plain", b"pla1n"))
    assert before != GgufFile.open(path).header_hash


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
        "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    }  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    written = (folder / "config.json").stat().st_mtime_ns
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    assert view_folder(copy) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    assert view_folder(write("other.gguf", values={"llama.rope.freq_base": 5e5})) != folder


def test_other_code_writes_another_folder(
    write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Older or newer: versions are digests, which have no order. What the others wrote stays, and a line says so."""
    file, kept = write(), view._version()
    with caplog.at_level("INFO"):
        folders = []
        for number, version in enumerate(("older", kept, "newer")):
            caplog.clear()
            monkeypatch.setattr(view, "_version", lambda version=version: version)
            folders.append(view_folder(file))
            said = [record.getMessage() for record in caplog.records if "other versions" in record.getMessage()]
            line = f"{folders[-1]}: made anew for this version; {number} of other versions are not used"
            assert said == ([line] if number else [])
            (folders[-1] / "config.json").write_text(version)
        monkeypatch.setattr(view, "_version", lambda: kept)
        caplog.clear()
        assert view_folder(file) == folders[1]
        assert caplog.text == "", "a folder of this version is no news"
    assert [(folder / "config.json").read_text() for folder in folders] == ["older", kept, "newer"]
    assert sorted(cache.iterdir()) == sorted(folders)


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
    monkeypatch.setattr(kept_files.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
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
    monkeypatch.setattr(kept_files.tempfile, "gettempdir", lambda: str(tmp_path))
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
