"""Random tiny checkpoints, written once per session."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint of a family."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tiny_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return make


@pytest.fixture(scope="session")
def llama(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("llama")


@pytest.fixture
def copy_of(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny Llama whose config.json has other fields (None: the field goes)."""

    def make(**fields: Any) -> Path:
        shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
        file = tmp_path / "config.json"
        config = {name: value for name, value in (json.loads(file.read_text()) | fields).items() if value is not None}
        file.write_text(json.dumps(config))
        return tmp_path

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are fastest on one thread; tests of other thread counts set their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
