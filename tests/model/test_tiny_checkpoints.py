"""The tiny checkpoints of the tests are the same in every process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import tiny_checkpoint


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "mamba"])
def test_weights_do_not_depend_on_what_was_drawn_before(family: str, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    files = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn = torch.get_rng_state()
        files.append(tiny_checkpoint(tmp_path / str(seed), family) / "model.safetensors")
        assert torch.equal(torch.get_rng_state(), drawn)
    torch.set_rng_state(before)
    assert files[0].read_bytes() == files[1].read_bytes()
