"""Files of weights stay open while somebody reads them, and nobody begins to read them once they are done with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from space_model.checkpoint import weight_files
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.weight_files import WeightFiles
from space_model.model_error import CheckpointNotFound, UnsupportedModel
from torch import Tensor

WAIT = 30.0


class SlowFile:
    """A file of one tensor, which is read when the test says so; it notes what it was asked in which order."""

    def __init__(self) -> None:
        self.asked, self.may_go_on = threading.Event(), threading.Event()
        self.story: list[str] = []

    def __call__(self, file: Path, framework: str) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: object) -> None:
        self.story.append("closed")

    def keys(self) -> list[str]:
        return ["weight"]

    def get_tensor(self, name: str) -> Tensor:
        self.asked.set()
        assert self.may_go_on.wait(WAIT)
        self.story.append("read")
        return torch.ones(2)


def test_a_file_is_closed_when_the_last_thread_has_read(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SlowFile()
    monkeypatch.setattr(weight_files, "safe_open", file)
    opened: list[WeightFiles] = []

    def fail() -> None:
        with WeightFiles.open(Checkpoint.open(checkpoint_of("llama"))) as files:
            opened.append(files)
            reading.append(threads.submit(files.whole, "weight"))
            assert file.asked.wait(WAIT)
            raise UnsupportedModel("what another thread found")

    reading: list[Any] = []
    with ThreadPoolExecutor(2) as threads:
        failing = threads.submit(fail)
        assert file.asked.wait(WAIT)
        with pytest.raises(TimeoutError):
            failing.result(0.1)
        assert file.story == []
        file.may_go_on.set()
        with pytest.raises(UnsupportedModel, match="what another thread found"):
            failing.result(WAIT)
        assert torch.equal(reading[0].result(WAIT), torch.ones(2))
    assert file.story == ["read", "closed"]
    with pytest.raises(CheckpointNotFound, match="are closed; weight comes too late"):
        opened[0].whole("weight")


def test_a_tensor_that_no_file_has_is_named(checkpoint_of: Callable[[str], Path]) -> None:
    with (
        WeightFiles.open(Checkpoint.open(checkpoint_of("llama"))) as files,
        pytest.raises(UnsupportedModel, match=r"lack model\.nothing\.weight"),
    ):
        files.rows("model.nothing.weight", slice(0, 1))
