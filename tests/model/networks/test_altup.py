"""The parts of Gemma 3n: versions of every row, and gates of which the largest are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.networks.altup import apart, beside, coefficient_linears, fix_cutoffs, predict_by_row
from tiny_checkpoints import tiny_checkpoint, tiny_lora
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAltUp, Gemma3nTextMLP

ROWS, WIDTH = 24, 64


def config(**fields: object) -> Gemma3nTextConfig:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": 2, "num_kv_shared_layers": 0}
    return Gemma3nTextConfig(**sizes, activation_sparsity_pattern=[0.95, 0.0], **fields)


def test_versions_lie_beside_each_other_and_come_apart_again() -> None:
    versions = torch.arange(3 * 5 * 2.0).view(3, 1, 5, 2)
    rows = beside(versions)
    assert rows[0, 1].tolist() == [
        *versions[0, 0, 1].tolist(),
        *versions[1, 0, 1].tolist(),
        *versions[2, 0, 1].tolist(),
    ]
    assert torch.equal(apart(rows, 3), versions)


@pytest.mark.parametrize("active", [0, 2])
@torch.inference_mode()
def test_versions_are_predicted_as_transformers_does(active: int) -> None:
    torch.manual_seed(0)
    block = Gemma3nTextAltUp(config(altup_num_inputs=4, altup_active_idx=active))
    versions = torch.randn(4, 1, ROWS, WIDTH)
    wanted = block.predict(versions)
    predict_by_row(block)
    found = block.predict(versions)
    torch.testing.assert_close(found, wanted)
    half = Gemma3nTextAltUp(config(altup_active_idx=active)).bfloat16()
    predict_by_row(half)
    assert half.predict(versions.bfloat16()).dtype is torch.bfloat16


@torch.inference_mode()
def test_the_largest_gates_are_kept_as_transformers_does_and_a_dense_mlp_stays() -> None:
    torch.manual_seed(0)
    sparse, dense = (Gemma3nTextMLP(config(), layer) for layer in (0, 1))
    gate = 3.0 * torch.randn(1, ROWS, 512) + 1.0
    wanted, rows = sparse._gaussian_topk(gate), torch.randn(1, ROWS, WIDTH)
    whole = dense(rows)
    fix_cutoffs(torch.nn.ModuleList([sparse, dense]))
    found = sparse._gaussian_topk(gate)
    assert 0.03 < float((found > 0).float().mean()) < 0.07
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(dense(rows), whole)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_what_mixes_versions_and_what_is_around_the_layers_stays_plain(weights: str, tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint(tmp_path, "gemma3n", num_masks=0), dtype="bfloat16", weights=weights)
    base = model.network.base  # type: ignore[attr-defined]
    block = base.layers[0]
    assert len([*coefficient_linears(base)]) == 3 * len(base.layers)
    plain = [*coefficient_linears(block), *base.altup_projections, base.per_layer_model_projection]
    assert {linear.weight.dtype for linear in plain} == {torch.bfloat16}
    assert block.mlp.up_proj.weight.dtype is not torch.bfloat16


def test_a_checkpoint_may_hold_the_keys_that_sharing_layers_do_not_use(tmp_path: Path) -> None:
    """As the published ones do."""
    path = tiny_checkpoint(tmp_path, "gemma3n", num_masks=0)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for part in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.3.self_attn.{part}.weight"] = tensors[f"model.layers.1.self_attn.{part}.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    load_model(path)


@torch.inference_mode()
def test_a_lora_on_every_linear_acts_as_merged_weights(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", "gemma3n", num_masks=0)
    lora = tiny_lora(tmp_path / "lora", base)
    pairs, merged = load_file(lora / "adapter_model.safetensors"), tmp_path / "merged"
    tiny_checkpoint(merged, "gemma3n", num_masks=0)
    weights = load_file(merged / "model.safetensors")
    for name in [name for name in pairs if name.endswith("lora_A.weight")]:
        path = name.removeprefix("base_model.model.").removesuffix("lora_A.weight")
        weights[f"{path}weight"] += 2.0 * pairs[name.replace("lora_A", "lora_B")] @ pairs[name]
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    ids, found = list(range(20, 60)), []
    for model, number in (
        (load_model(merged, dtype="float32"), None),
        (load_model(base, dtype="float32", loras={"x": lora}), 0),
    ):
        segment = Segment(ids, 0, (0, 1, 2), lora=number)
        batch = ForwardBatch.build([segment], block_size=16, mask_ids=())
        found.append(model.logits(model.forward(batch, model.allocate_kv(3, 16))[: len(ids)]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-4)
