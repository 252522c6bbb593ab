"""Tiny real checkpoints for the worker's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from space_common.worker.client import WorkerClient
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_server.grammar import Grammars
from tiny_checkpoints import tiny_adapter, tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", num_masks=8, window=256)


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> SpaceModel:
    """Eight masks and a draft head, float32."""
    return load_model(tiny_path, dtype="float32", num_threads=1)


@pytest.fixture(scope="session")
def tiny_bf16(tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    """Five masks that share an id, no draft head, bfloat16."""
    path = tmp_path_factory.mktemp("tiny") / "bf16"
    tiny_checkpoint(path, shared_mask=True, draft_head=False, dtype="bfloat16")
    return load_model(path, dtype="bfloat16", num_threads=1)


@pytest.fixture(scope="session")
def tiny_fp16(tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    """Masks of their own ids and a draft head, float16."""
    path = tmp_path_factory.mktemp("tiny") / "fp16"
    tiny_checkpoint(path, dtype="float16")
    return load_model(path, dtype="float16", num_threads=1)


@pytest.fixture(scope="session")
def byte_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer writes every byte."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "bytes", vocab_size=320, words=True)


@pytest.fixture(scope="session")
def byte_model(byte_path: Path) -> SpaceModel:
    """Five masks and a draft head, float32."""
    return load_model(byte_path, dtype="float32", num_threads=1)


@pytest.fixture(scope="session")
def grammars(byte_path: Path, byte_model: SpaceModel) -> Grammars:
    """For that model."""
    facts = byte_model.facts
    return Grammars.of(byte_path, facts.vocab_size, {*facts.mask_ids, *facts.eos_ids})


@pytest.fixture(scope="session")
def gated_of(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SpaceModel]:
    """Dtype -> a model with three adapters: with a draft head of its own, with fewer masks, without a head."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {
        "wide": tiny_adapter(folder / "wide", tiny_path, num_masks=5, rank=8),
        "narrow": tiny_adapter(folder / "narrow", tiny_path, num_masks=2, rank=3, seed=2),
        "bare": tiny_adapter(folder / "bare", tiny_path, num_masks=5, seed=3, draft_head=False),
    }
    return lambda dtype: load_model(tiny_path, dtype=dtype, num_threads=1, adapters=adapters)


@pytest.fixture
def no_device_step_fails_unseen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A step on the device that fails is taken on the host: the text alone would not show it."""
    yield
    assert [record.message for record in caplog.get_records("call") if "failed" in record.message] == []


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[WorkerClient], list[str]]:
    """Notes down what a worker asks of its device's stepper from here on: launch, read."""

    def noting(router: WorkerClient) -> list[str]:
        assert router.worker.engine.device is not None
        runner, said = router.worker.engine.device, list[str]()

        def noted(name: str, call: Callable[..., object]) -> Callable[..., object]:
            def calls(*arguments: object) -> object:
                said.append(name)
                return call(*arguments)

            return calls

        for name in ("launch", "read"):
            monkeypatch.setattr(runner, name, noted(name, getattr(runner, name)))
        return said

    return noting
