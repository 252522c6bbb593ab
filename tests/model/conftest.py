"""Random tiny checkpoints, written once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from space_model.testing import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint of a family."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tiny_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are fastest on one thread; tests of other thread counts set their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
