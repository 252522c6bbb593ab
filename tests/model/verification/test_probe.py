"""The check at load tells rounding from something else, and says where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from space_kernels.linear.packed_linear import can_pack
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading import load as load_module
from space_model.loading.load import load_model
from space_model.model_error import UnsupportedModel
from space_model.model_facts import ModelFacts
from space_model.testing import FAMILIES
from space_model.verification.layer_reference import reference
from transformers import PreTrainedModel


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[PreTrainedModel], None]], None]:
    """Change a model after transformers has said what it computes, and before it is taken apart."""

    def plant(change: Callable[[PreTrainedModel], None]) -> None:
        def then_change(model: PreTrainedModel, facts: ModelFacts) -> object:
            wanted = reference(model, facts)
            change(model)
            return wanted

        monkeypatch.setattr(load_module, "reference", then_change)

    return plant


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_part_is_named_with_what_rounding_explains(
    dtype: str, checkpoint_of: Callable[[str], Path], planted: Callable[[Callable[[PreTrainedModel], None]], None]
) -> None:
    def other_angles(model: PreTrainedModel) -> None:
        model.base_model.rotary_emb.inv_freq *= 0.9

    def other_epsilon(model: PreTrainedModel) -> None:
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-5

    def other_final_norm(model: PreTrainedModel) -> None:
        model.base_model.norm.weight.data *= 1.1

    for change, part in (
        (other_angles, r"layer 0 of 2 \(keys\)"),
        (other_epsilon, r"layer 0 of 2 \(keys\)"),
        (other_final_norm, "the final norm"),
    ):
        planted(change)
        with pytest.raises(UnsupportedModel, match=f"served wrong: {part} computes something else .* rounding"):
            load_model(checkpoint_of("llama"), dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parts_one_after_the_other_are_the_whole_step(
    family: str, dtype: str, checkpoint_of: Callable[[str], Path]
) -> None:
    if dtype == "bfloat16" and not can_pack(torch.bfloat16):
        pytest.skip("this processor packs no bfloat16")
    model = load_model(checkpoint_of(family), dtype=dtype)
    network, kv = model._network, model.allocate_kv(3, 16)
    ids = torch.randint(16, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = ForwardBatch.build([Segment(ids, 0, [2, 0, 1])], block_size=16, mask_ids=())
    with torch.inference_mode():
        rows = network.enter(batch)
        for number in range(model.facts.num_layers):
            rows = network.layer(number, rows, batch, kv)
        assert torch.equal(network.norm(rows), network.forward(batch, model.allocate_kv(3, 16)))
