"""What of a mapped file lies in memory goes back, unless it was changed, and is there again for who reads it."""

import sys
from pathlib import Path

import pytest
import torch
from space_model.checkpoint.weight_files import give_back, mappings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux says what is mapped")

COUNT = 1 << 18


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights of a model.safetensors"
    path.write_bytes(torch.arange(COUNT, dtype=torch.int32).numpy().tobytes())
    return path


def mapped(path: Path) -> torch.Tensor:
    return torch.from_file(str(path), shared=False, size=COUNT, dtype=torch.int32)


def test_pages_that_were_read_go_back_and_can_be_read_again(file: Path) -> None:
    tensor = mapped(file)
    total = int(tensor.sum())
    assert sum(here.resident for here in mappings([file])) >= COUNT * 4
    assert give_back([file]) >= COUNT * 4
    assert sum(here.resident for here in mappings([file])) == 0
    assert int(tensor.sum()) == total


def test_what_was_written_stays(file: Path) -> None:
    tensor = mapped(file)
    tensor[0] = 7
    assert give_back([file]) == 0
    assert int(tensor[0]) == 7


def test_other_files_are_left_alone(file: Path, tmp_path: Path) -> None:
    tensor = mapped(file)
    assert int(tensor[1]) == 1
    assert give_back([tmp_path / "another"]) == 0
    assert sum(here.resident for here in mappings([file])) > 0
