"""transformers' table of its models comes from the cache, and is the table that transformers makes."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from space_model import kept_structure
from transformers.utils import import_utils

MODELS = Path(import_utils.__file__).parents[1] / "models"
DEFINE = inspect.unwrap(import_utils.define_import_structure)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where a server keeps it that cannot write its cache
    return tmp_path / "cache" / "spaceserve" / "transformers"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A small copy of the folders of transformers."""
    folder = tmp_path / "transformers" / "models"
    (folder / "llama").mkdir(parents=True)
    (folder.parent / "utils").mkdir()
    (folder.parent / "utils" / "import_utils.py").touch()
    (folder / "__init__.py").touch()
    for name in ("__init__.py", "configuration_llama.py", "modeling_llama.py"):
        (folder / "llama" / name).write_text((MODELS / "llama" / name).read_text(encoding="utf-8"), encoding="utf-8")
    return folder


class Counted:
    """transformers' function, and how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *arguments: object) -> kept_structure.Structure:
        self.calls += 1
        import_utils.create_import_structure_from_path.cache_clear()
        found: kept_structure.Structure = DEFINE(*arguments)
        return found


def test_it_is_the_table_of_transformers_made_once(cache: Path) -> None:
    counted = Counted()
    kept = kept_structure._kept(counted)
    for arguments in ((MODELS, "models"), (str(MODELS / "__init__.py"),), (MODELS,)):
        assert kept(*arguments) == DEFINE(*arguments)
    assert counted.calls == 1
    assert len(list(cache.iterdir())) == 1
    kept(MODELS / "llama" / "__init__.py")
    assert counted.calls == 2  # a model's own table is not kept


def test_a_changed_file_has_it_made_anew(models: Path, cache: Path) -> None:
    counted = Counted()
    kept = kept_structure._kept(counted)
    assert {"LlamaModel"} < kept(models)[frozenset({"torch"})]["llama.modeling_llama"]
    file = models / "llama" / "modeling_llama.py"
    file.write_text(file.read_text(encoding="utf-8").replace('"LlamaModel"', '"OtherModel"'), encoding="utf-8")
    assert {"OtherModel"} < kept(models)[frozenset({"torch"})]["llama.modeling_llama"]
    (models / "other").mkdir()
    (models / "other" / "modeling_other.py").write_text('__all__ = ["Other"]\n', encoding="utf-8")
    assert kept(models)[frozenset({"torch"})]["other.modeling_other"] == {"Other"}
    assert counted.calls == 3


@pytest.mark.parametrize("text", ["", "[1]", "{}[", '[["torch"]]', '[[["torch"], ["llama"]]]'])
def test_a_damaged_file_is_not_used(text: str, models: Path, cache: Path) -> None:
    counted = Counted()
    kept = kept_structure._kept(counted)
    found = kept(models)
    (file,) = cache.glob("*/structure.json")
    file.write_text(text, encoding="utf-8")
    assert kept(models) == found
    assert counted.calls == 2


def test_without_a_cache_it_is_made_each_time(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Path:
        raise OSError("read-only")

    monkeypatch.setattr(kept_structure, "keep_files", refuse)
    counted = Counted()
    kept = kept_structure._kept(counted)
    assert kept(models) == kept(models)
    assert counted.calls == 2
