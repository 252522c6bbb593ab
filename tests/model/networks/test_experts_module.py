"""Experts of transformers are told by the shapes of their weights and by what they compute, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from space_model.model_error import UnsupportedModel
from space_model.networks.experts_module import router_linears
from space_model.networks.transformers_network import make_row_invariant
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.afmoe.modeling_afmoe import AfmoeSparseMoeBlock
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeTopKRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96, "num_experts": 8, "num_local_experts": 8,
    "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 3, "moe_topk": 3, "n_group": 4,
    "topk_group": 2, "num_hidden_layers": 2, "shared_expert_intermediate_size": 32, "num_shared_experts": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def made(kind: Callable[..., nn.Module], model_type: str, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    """A module with random weights, and activations large enough that limits matter."""
    known = CONFIG_MAPPING[model_type]()
    named = set(known.to_dict()) | set(known.attribute_map)
    config = CONFIG_MAPPING[model_type](**{name: value for name, value in SIZES.items() if name in named}, **more)
    config._experts_implementation = "eager"
    module = kind(config)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.randn(tensor.shape, generator=generator) * (3.0 if tensor.dim() == 3 else 0.3)
    return module.to(dtype).eval()


def rows(count: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        (GptOssExperts, "gpt_oss"),
        (AriaExperts, "aria_text"),
        (DeepseekV4Experts, "deepseek_v4"),
        (MiniMaxM3VLExperts, "minimax_m3_vl_text"),
        (Step3p7Experts, "step3p5"),
    ],
)
@torch.inference_mode()
def test_every_layout_and_gate_equals_transformers(kind: Callable[..., nn.Module], model_type: str) -> None:
    limits = {"swiglu_limit": 20.0} if kind is Step3p7Experts else {}
    theirs = made(lambda config: kind(config, **limits), model_type)
    base = nn.ModuleDict({"experts": theirs})
    chosen = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(n))[:3] for n in range(64)])
    weight = torch.rand(64, 3, generator=torch.Generator().manual_seed(2))
    wanted = theirs(rows(), chosen, weight)
    make_row_invariant(base, 1)
    ours = base["experts"]
    assert ours is not theirs
    found = ours(rows(), chosen, weight)
    torch.testing.assert_close(found, wanted, atol=3e-6 * float(wanted.abs().max()), rtol=0)
    for count in range(1, 64):
        assert torch.equal(ours(rows(count), chosen[:count], weight[:count]), found[:count]), count


@pytest.mark.parametrize(
    ("kind", "model_type", "reason"),
    [
        (MuseSparkExperts, "muse_spark_text", "computes more than a gate, an up and a down projection"),
        (NemotronHExperts, "nemotron_h", "has no gate_up_proj"),
    ],
)
def test_experts_that_compute_something_else_are_refused(
    kind: Callable[..., nn.Module], model_type: str, reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        make_row_invariant(nn.ModuleDict({"experts": made(kind, model_type)}), 1)


def test_an_unknown_gate_is_refused() -> None:
    experts = made(GptOssExperts, "gpt_oss")
    experts._apply_gate = lambda gate_up: gate_up[..., ::2] * gate_up[..., 1::2]  # type: ignore[assignment]
    with pytest.raises(UnsupportedModel, match="in a way that this server does not have row by row"):
        make_row_invariant(nn.ModuleDict({"experts": experts}), 1)


ROUTERS: list[tuple[Callable[..., nn.Module], str, dict[str, Any]]] = [
    (DeepseekV3TopkRouter, "deepseek_v3", {"routed_scaling_factor": 2.5}),
    (Cohere2MoeTopKRouter, "cohere2_moe", {"expert_selection_fn": "sigmoid"}),
    (GptOssTopKRouter, "gpt_oss", {}),
    (PhimoeTopKRouter, "phimoe", {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "model_type", "more"), ROUTERS)
@torch.inference_mode()
def test_a_router_gives_a_row_its_experts_in_any_company(
    kind: Callable[..., nn.Module], model_type: str, more: dict[str, Any], dtype: torch.dtype
) -> None:
    """Some rows are equal, and some have experts with equal scores: both choose alike wherever they are."""
    base = nn.ModuleDict({"router": made(kind, model_type, dtype, **more)})
    base["router"].weight.data[5] = base["router"].weight.data[2]
    given = rows(64, dtype)
    given[40:44] = given[3]
    theirs = base["router"](given)
    make_row_invariant(base, 1)
    whole = base["router"](given)
    if dtype is torch.float32:
        torch.testing.assert_close(whole[0], theirs[0], atol=2e-5, rtol=0)
    for count in range(1, 64):
        for part, of_all in zip(base["router"](given[:count]), whole, strict=True):
            assert torch.equal(part, of_all[:count]), count
    for part in whole:
        assert all(torch.equal(part[row], part[3]) for row in range(40, 44))


BLOCKS: list[tuple[Callable[..., nn.Module], str]] = [
    (AfmoeSparseMoeBlock, "afmoe"),
    (Qwen2MoeSparseMoeBlock, "qwen2_moe"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "model_type"), BLOCKS)
@torch.inference_mode()
def test_a_block_with_a_shared_expert_gives_a_row_its_bits(
    kind: Callable[..., nn.Module], model_type: str, dtype: torch.dtype
) -> None:
    theirs = made(kind, model_type, dtype)
    base = nn.ModuleDict({"mlp": theirs})
    wanted = theirs(rows(64, dtype)[None])
    make_row_invariant(base, 1)
    whole = base["mlp"](rows(64, dtype)[None])
    near = (2e-5 if dtype is torch.float32 else 0.05) * float(wanted.abs().max())
    torch.testing.assert_close(whole, wanted, atol=near, rtol=0)
    for count in range(1, 64):
        assert torch.equal(base["mlp"](rows(64, dtype)[None, :count]), whole[:, :count]), count


def test_linears_that_choose_experts_stay_plain() -> None:
    block = made(AfmoeSparseMoeBlock, "afmoe")
    assert [*router_linears(nn.ModuleDict({"mlp": block}))] == [block.get_submodule("router.gate")]
