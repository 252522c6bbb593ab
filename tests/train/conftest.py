"""The base that tests of the command train, one thread for its tiny network, and short measurements and plots."""

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


@pytest.fixture(autouse=True)
def short_reports(request: pytest.FixtureRequest) -> Iterator[None]:
    """A plot takes longer than a tiny run, as do 0.3 s in which products are timed; tests with `plots` draw them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("space_train.self_generation.own_cost.PROBE_SECONDS", 0.01)
        if "plots" not in request.fixturenames:
            patch.setattr("space_train.reports.plot", lambda file, *_: file.write_bytes(b"") == 0)
        yield


@pytest.fixture
def plots() -> None:
    """Asked for by tests of whole reports: see `short_reports`."""
