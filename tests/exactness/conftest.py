"""The models under proof: tiny random ones of several families, and the embedded one."""

from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness_matrix import Subject
from space_model.checkpoint.recurrent_layers import HYBRIDS
from space_model.loading.load import load_model
from space_server.worker import Worker
from tiny_checkpoints import MORE_FAMILIES, tiny_checkpoint


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole-matrix", action="store_true", help="every cell (155,520 per model: days)")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The products are tiny: a second thread only makes them wait. What threads do to them is the model's own test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> a folder with a random checkpoint whose text is not one long loop (the head is not tied)."""
    folders: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in folders:
            folder = tmp_path_factory.mktemp(family)
            recurrent = MORE_FAMILIES.get(family, {}).get("model_type") in HYBRIDS  # their states' sizes are fixed
            sizes = {"hidden_size": 64 if recurrent else 32, "num_heads": 2, "kv_heads": 1}
            folders[family] = tiny_checkpoint(folder, family, seed=1, tie_word_embeddings=False, **sizes)
        return folders[family]

    return find


@pytest.fixture(scope="session")
def subject_of(checkpoint_of: Callable[[str], Path]) -> Callable[..., Subject]:
    """(family or `embedded`, dtype) -> the model and its plain texts, once per session. `attention` "torch": with
    torch's operations where else compiled ones would be taken; `weights` and `kv_dtype` as of load_model."""
    subjects: dict[tuple[str, str, str, str, str], Subject] = {}

    def find(name: str, dtype: str, attention: str = "auto", weights: str = "plain", kv_dtype: str = "auto") -> Subject:
        if name == "embedded" and not resources.files("space_demo").joinpath("config.json").is_file():
            pytest.skip("the embedded model has no weights in this checkout")
        key = name, dtype, attention, weights, kv_dtype
        if key not in subjects:
            path = "demo" if name == "embedded" else checkpoint_of(name)
            model = load_model(path, dtype=dtype, attention=attention, weights=weights, kv_dtype=kv_dtype)
            subjects[key] = Subject(name, model)
        return subjects[key]

    return find


@pytest.fixture
def accept_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is accepted, whatever the model samples: a fault that each matrix must catch."""
    monkeypatch.setattr("space_server.host_runner.num_accepted", lambda samples, drafts: len(drafts))


@pytest.fixture
def spoilt_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and states of the draft network hold NaN after every step."""
    step = Worker.step

    def spoilt(worker: Worker, *arguments: Any) -> Any:
        report = step(worker, *arguments)
        if (kept := worker.kv.draft) is not None:
            for tensor in (*kept.pages.keys, *kept.pages.values, kept.states):
                if tensor is not None:
                    tensor.fill_(torch.nan)
        return report

    monkeypatch.setattr(Worker, "step", spoilt)
