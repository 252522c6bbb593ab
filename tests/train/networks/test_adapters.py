"""Adapters in training: a switch for mask rows, and the file that is served."""

from pathlib import Path

import pytest
import torch
from doubles.training import random_ids, read_model
from space_model.adapters import GatedLora
from space_model.testing import random_gated_lora, tiny_checkpoint
from space_train.networks.trainee import AdaptedLinear, Adapters, Gate
from torch import nn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, "llama", num_masks=0)


def test_an_adapted_linear_adds_its_delta_while_the_gate_is_open_and_no_bit_otherwise() -> None:
    linear, gate = nn.Linear(3, 2), Gate()
    adapted = AdaptedLinear(linear, rank=1, scale=0.5, gate=gate)
    with torch.no_grad():
        adapted.a.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
        adapted.b.copy_(torch.tensor([[4.0], [-2.0]]))
    x = torch.tensor([[1.0, 1.0, 1.0]])
    assert torch.equal(adapted(x), linear(x))
    with gate.open():
        torch.testing.assert_close(adapted(x), linear(x) + torch.tensor([[12.0, -6.0]]))
    assert torch.equal(adapted(x), linear(x))


def test_the_gate_closes_behind_an_error() -> None:
    gate = Gate()
    with pytest.raises(RuntimeError, match="out of memory"), gate.open():
        raise RuntimeError("out of memory")
    assert not gate.is_on


def test_every_linear_of_the_layers_is_adapted_and_the_output_is_not(folder: Path) -> None:
    model = read_model(folder)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    adapters = Adapters(model, rank=2, alpha=4.0, num_masks=3)
    assert set(adapters.export(torch.float32).pairs) == names


def test_fresh_adapters_change_nothing_and_masks_start_near_the_mean(folder: Path) -> None:
    model = read_model(folder)
    ids = torch.tensor([random_ids(8, 0)])
    with torch.no_grad():
        plain = model(ids).logits
        adapters = Adapters(model, rank=2, alpha=4.0, num_masks=3)
        adapters.initialise(torch.Generator().manual_seed(0), torch.full((64,), 0.25), 0.01)
        with adapters.gate.open():
            assert torch.equal(model(ids).logits, plain)
    torch.testing.assert_close(adapters.mask_embeddings.detach(), torch.full((3, 64), 0.25), atol=0.06, rtol=0)


def test_a_served_adapter_is_taken_on_and_written_again_with_the_same_deltas(folder: Path, tmp_path: Path) -> None:
    """Whatever alpha it was trained with."""
    model = read_model(folder)
    served = random_gated_lora(model, num_masks=3, rank=2, seed=5)
    adapters = Adapters(model, rank=2, alpha=16.0, num_masks=3)
    adapters.take(served)
    adapters.export(torch.float32).save(tmp_path / "adapter.safetensors")
    again = GatedLora.load(tmp_path / "adapter.safetensors", num_masks=3, hidden_size=64, dtype=torch.float32)
    assert again.scale == 8.0 != served.scale
    assert torch.equal(again.mask_embeddings, served.mask_embeddings)
    assert again.pairs.keys() == served.pairs.keys()
    for name, (a, b) in served.pairs.items():
        torch.testing.assert_close(again.scale * again.pairs[name][1] @ again.pairs[name][0], served.scale * b @ a)
