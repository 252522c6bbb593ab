"""A folder is the old one or the new one, whole, whenever its writer dies."""

import subprocess
import sys
from pathlib import Path

import pytest
from space_model.checkpoint.checkpoint import whole_folder

OLD, NEW = {"weights": "old", "config": "old"}, {"weights": "new", "config": "new"}

DIES_AT = """
import os, pathlib, shutil, sys
from space_model.checkpoint.checkpoint import whole_folder
left = int(sys.argv[2])
def dying(call):
    def at_last(*arguments, **keywords):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return call(*arguments, **keywords)
    return at_last
for name in ("mkdir", "rename", "write_text"):
    setattr(pathlib.Path, name, dying(getattr(pathlib.Path, name)))
shutil.rmtree = dying(shutil.rmtree)
with whole_folder(pathlib.Path(sys.argv[1])) as new:
    (new / "weights").write_text("new")
    (new / "config").write_text("new")
"""


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()} if folder.is_dir() else {}


def write(folder: Path, files: dict[str, str]) -> None:
    with whole_folder(folder) as new:
        for name, text in files.items():
            (new / name).write_text(text)


def test_a_writer_that_is_killed_leaves_the_old_or_the_new_whole(tmp_path: Path) -> None:
    num_kills = 0
    while True:
        folder = tmp_path / str(num_kills) / "model"
        write(folder, OLD)
        ended = subprocess.run([sys.executable, "-c", DIES_AT, str(folder), str(num_kills)], check=False)
        if ended.returncode == 0:
            break
        beside = folder.with_name("model.replaced")
        assert contents(folder) in (OLD, NEW) or contents(beside) == OLD, num_kills
        write(folder, NEW)  # the same command, given again
        assert contents(folder) == NEW
        assert [place.name for place in folder.parent.iterdir()] == ["model"]
        num_kills += 1
    assert num_kills == 8, "every call that moves something was the last one of a process"


def test_a_writer_that_fails_leaves_the_old_and_no_half(tmp_path: Path) -> None:
    write(tmp_path / "model", OLD)
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "model", {"weights": "new", "no/folder": "new"})
    assert contents(tmp_path / "model") == OLD
    assert [place.name for place in tmp_path.iterdir()] == ["model"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "large")
    write(tmp_path / "model", NEW)
    assert (tmp_path / "model").is_symlink()
    assert contents(tmp_path / "large") == NEW
