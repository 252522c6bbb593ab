"""The base that tests of the command train, and one thread for its tiny network."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import tiny_checkpoint


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """With more threads, tiny networks mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("base"), num_masks=0)


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three masks with ids, no head."""
    return tiny_checkpoint(tmp_path_factory.mktemp("space"), num_masks=3, draft_head=False)
