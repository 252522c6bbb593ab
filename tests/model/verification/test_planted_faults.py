"""What the check at load is for: faults of every kind, in every family, are caught; rounding never is.

A fault is planted in a copy of the transformers model that the served one is compared with: the two then differ as if
the server had it.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from space_kernels.linear.packed_linear import can_pack
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading import load as load_module
from space_model.loading import sharded_model as sharded_module
from space_model.loading.load import load_model
from space_model.model_error import UnsupportedModel
from space_model.model_facts import ModelFacts
from space_model.verification.layer_reference import Reference, reference
from space_model.verification.probe import Difference, differences
from tiny_checkpoints import FAMILIES, tiny_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

VARIANTS: dict[str, dict[str, Any]] = {
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.5, "tie_word_embeddings": False},
}
"""Families with parts that none of FAMILIES has."""


def lively_checkpoint(path: Path, family: str, seed: int = 0, **config: Any) -> Path:
    """A random checkpoint in which everything counts: norms and biases are no ones and zeros, attention has favourites.
    Products of queries and keys have a standard deviation of about two; those of a family with caps reach them."""
    config = {"hidden_size": 64, "num_layers": 2} | VARIANTS.get(family, {}) | config
    tiny_checkpoint(path, family if family in FAMILIES else "llama", seed=seed, num_masks=0, window=1024, **config)
    file = path / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(seed + 1)
    one_is_added = family.startswith("gemma")
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            tensors[name] = (1.0 + 0.3 * noise - float(one_is_added)).to(tensor.dtype)
        elif name.endswith("bias"):
            tensors[name] = (0.5 * noise).to(tensor.dtype)
        elif "q_proj" in name or "k_proj" in name:
            tensors[name] = tensor * math.sqrt(2.0)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


Change = Callable[[PreTrainedModel], bool]  # plants a fault; False: the model has no such part


def attentions(model: PreTrainedModel) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")]


def norms(model: PreTrainedModel) -> list[Any]:
    return [m for m in model.modules() if "Norm" in type(m).__name__]


def each(find: Callable[[PreTrainedModel], Iterable[Any]], plant: Callable[[Any], None]) -> Change:
    """Plant the fault in everything of the model that is found."""

    def change(model: PreTrainedModel) -> bool:
        found = list(find(model))
        for one in found:
            plant(one)
        return bool(found)

    return change


def times_scale(factor: float) -> Change:
    return each(attentions, lambda attention: setattr(attention, "scaling", attention.scaling * factor))


no_scale = each(
    lambda model: [attention for attention in attentions(model) if attention.scaling != 1.0],
    lambda attention: setattr(attention, "scaling", 1.0),
)


def angles(turn: Callable[[Tensor], Tensor]) -> Change:
    def find(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if name.endswith("inv_freq") and "original" not in name:
                    yield module, name, buffer

    return each(find, lambda found: setattr(*found[:2], turn(found[2])))


def half_of(frequencies: Tensor) -> Tensor:
    count = len(frequencies)
    return torch.where(torch.arange(count) < count // 2, frequencies, 0.0)


def unscaled_llama3(model: PreTrainedModel) -> bool:
    if model.config.rope_parameters.get("rope_type") != "llama3":
        return False
    return angles(lambda f: 10000.0 ** -(torch.arange(len(f)) / len(f)))(model)


def projections(model: PreTrainedModel, kinds: str) -> Iterator[tuple[nn.Linear, slice, int]]:
    """Query (q), key (k) projections: the linear, its rows of that kind, and the head dimension."""
    for attention in attentions(model):
        size = attention.head_dim
        config = model.config
        heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
        kv_heads = kv_heads or heads
        fused = getattr(attention, "qkv_proj", None)
        rows = {"q": slice(0, heads * size), "k": slice(heads * size, (heads + kv_heads) * size)}
        for kind in kinds:
            if fused is not None:
                yield fused, rows[kind], size
            else:
                linear = getattr(attention, f"{kind}_proj")
                yield linear, slice(0, linear.out_features), size


def reorder(linear: nn.Linear, rows: slice, order: Callable[[Tensor], Tensor]) -> None:
    for tensor in (linear.weight, linear.bias):
        if tensor is not None:
            tensor.data[rows] = order(tensor.data[rows].clone())


def pairs_apart(kinds: str) -> Change:
    """Each head's rows as if pairs (2i, 2i + 1) were turned, not (i, i + D/2): GGUF's order of Llama's q and k."""

    def change(model: PreTrainedModel) -> bool:
        for linear, rows, size in projections(model, kinds):

            def order(rows_of: Tensor, size: int = size) -> Tensor:
                shape = rows_of.shape
                return rows_of.view(-1, size // 2, 2, *shape[1:]).transpose(1, 2).reshape(shape)

            reorder(linear, rows, order)
        return True

    return change


def heads_reversed(model: PreTrainedModel) -> bool:
    for linear, rows, size in projections(model, "q"):

        def order(rows_of: Tensor, size: int = size) -> Tensor:
            return rows_of.view(-1, size, *rows_of.shape[1:]).flip(0).reshape(rows_of.shape)

        reorder(linear, rows, order)
    return True


def groups_in_turn(model: PreTrainedModel) -> bool:
    """Head h reads key-value head h % G instead of h // (H / G)."""
    heads = model.config.num_attention_heads
    kv_heads = getattr(model.config, "num_key_value_heads", None) or heads
    if kv_heads in (1, heads):
        return False
    order = torch.arange(heads).view(-1, kv_heads).T.flatten()  # what stands at h, where h // (H / G) reads as h % G
    for attention in attentions(model):
        size = attention.head_dim
        columns = (order[:, None] * size + torch.arange(size)).flatten()
        (linear, rows, _), *_ = [p for p in projections(model, "q") if p[0] in attention.modules()]
        reorder(linear, rows, lambda rows_of, columns=columns: rows_of[columns])  # type: ignore[misc]
        norm = getattr(attention, "q_norm", None)
        if norm is not None and len(norm.weight) == len(columns):
            norm.weight.data = norm.weight.data[columns]
        for name in ("o_proj", "dense"):
            if (out := getattr(attention, name, None)) is not None:
                out.weight.data = out.weight.data[:, columns]
    return True


def epsilon(factor: float) -> Change:
    def plant(norm: Any) -> None:
        name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
        setattr(norm, name, getattr(norm, name) * factor)

    return each(norms, plant)


def other_offset(model: PreTrainedModel) -> bool:
    """1 is added to the weights of norms, or is not where it should be."""
    step = -1.0 if model.config.model_type.startswith("gemma") else 1.0
    return each(norms, lambda norm: norm.weight.data.add_(step))(model)


def children(model: PreTrainedModel) -> list[tuple[nn.Module, str, nn.Module]]:
    return [(parent, name, child) for parent in list(model.modules()) for name, child in parent.named_children()]


def without_norm(*names: str) -> Change:
    return each(
        lambda model: [(parent, name) for parent, name, _ in children(model) if name in names],
        lambda found: setattr(*found, nn.Identity()),
    )


def attention_cap(cap: float | None) -> Change:
    return each(
        lambda m: attentions(m) if getattr(m.config, "attn_logit_softcapping", None) is not None else [],
        lambda attention: setattr(attention, "attn_logit_softcapping", cap),
    )


def config_field(name: str, value: Callable[[Any], Any]) -> Change:
    return each(
        lambda model: [model.config] if getattr(model.config, name, None) is not None else [],
        lambda config: setattr(config, name, value(getattr(config, name))),
    )


def without_bias(*names: str) -> Change:
    def find(model: PreTrainedModel) -> Iterator[nn.Module]:
        for path, module in model.named_modules():
            if path.rpartition(".")[2] in names and isinstance(getattr(module, "bias", None), nn.Parameter):
                yield module

    return each(find, lambda module: setattr(module, "bias", None))


def activation(function: Callable[[Tensor], Tensor]) -> Change:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    def change(model: PreTrainedModel) -> bool:
        grid, planted = torch.linspace(-4.0, 4.0, 64), False
        for parent, name, child in children(model):
            if type(child).__module__ in ("transformers.activations", "torch.nn.modules.activation"):
                if torch.allclose(child(grid), function(grid)):
                    return False
                setattr(parent, name, Other())
                planted = True
        return planted

    return change


def attribute(names: str, value: Callable[[Any], Any]) -> Change:
    def find(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str]]:
        for module in model.modules():
            yield from ((module, n) for n in names.split() if isinstance(getattr(module, n, None), int | float | bool))

    return each(find, lambda found: setattr(*found, value(getattr(*found))))


def embedding_scale(model: PreTrainedModel) -> bool:
    if model.config.model_type == "gemma3_text":
        model.get_input_embeddings().embed_scale.fill_(1.0)
        return True
    return False


def head_of_the_next_id(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().roll(1, 0), requires_grad=False)
    return True


def window(value: Callable[[int], int]) -> Change:
    return config_field("sliding_window", value)


def windows_elsewhere(model: PreTrainedModel) -> bool:
    kinds = list(getattr(model.config, "layer_types", None) or ())
    if len(set(kinds)) < 2:
        return False
    masks = {"sliding_attention": "full_attention", "full_attention": "sliding_attention"}
    model.config.layer_types = [masks[kind] for kind in kinds]
    return True


def layers_swapped(model: PreTrainedModel) -> bool:
    first, second = model.base_model.layers[0], model.base_model.layers[1]
    ours, theirs = dict(first.named_parameters()), dict(second.named_parameters())
    for name in ours:
        ours[name].data, theirs[name].data = theirs[name].data, ours[name].data
    return True


def gate_and_up(model: PreTrainedModel) -> bool:
    """The gate's and the other product's weights change places."""
    for module in model.modules():
        if hasattr(module, "gate_proj") and hasattr(module, "up_proj"):
            module.gate_proj, module.up_proj = module.up_proj, module.gate_proj
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            module.gate_up_proj.data = module.gate_up_proj.data.roll(module.gate_up_proj.shape[1] // 2, 1)
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Linear):
            linear = module.gate_up_proj
            linear.weight.data = linear.weight.data.roll(linear.out_features // 2, 0)
        else:
            continue
        found = True
    return "found" in locals()


FAULTS: dict[str, Change] = {
    "attention scale √2 too large": times_scale(2**0.5),
    "attention scale 10 % off": times_scale(0.9),
    "attention scale missing": no_scale,
    "rope base 10 times too large": angles(lambda f: f**1.25),
    "rope turned the other way": angles(torch.neg),
    "rope on half of the head": angles(half_of),
    "rope off": angles(torch.zeros_like),
    "llama3 scaling of rope missing": unscaled_llama3,
    "rope pairs of q and k apart": pairs_apart("qk"),
    "rope pairs of k apart": pairs_apart("k"),
    "query heads in reverse": heads_reversed,
    "key-value heads in turn": groups_in_turn,
    "epsilon 10 times too large": epsilon(10.0),
    "epsilon 10 times too small": epsilon(0.1),
    "offset of norm weights": other_offset,
    "norms of query and key missing": without_norm("q_norm", "k_norm"),
    "norm in front of attention missing": without_norm("input_layernorm"),
    "norm behind attention missing": without_norm("post_attention_layernorm"),
    "norm around MLP missing": without_norm("post_feedforward_layernorm", "pre_feedforward_layernorm"),
    "final norm missing": without_norm("norm", "final_layernorm"),
    "attention cap missing": attention_cap(None),
    "attention cap wrong": attention_cap(30.0),
    "logit cap missing": config_field("final_logit_softcapping", lambda cap: None),
    "logit cap wrong": config_field("final_logit_softcapping", lambda cap: 0.67 * cap),
    "bias of q, k, v dropped": without_bias("q_proj", "k_proj", "v_proj"),
    "bias of k dropped": without_bias("k_proj"),
    "bias of o dropped": without_bias("o_proj", "dense"),
    "bias of MLP dropped": without_bias("gate_proj", "up_proj", "down_proj", "c_fc", "c_proj", "fc1", "fc2"),
    "bias of norms dropped": without_bias("input_layernorm", "post_attention_layernorm", "norm", "final_layernorm"),
    "bias of the head dropped": without_bias("lm_head"),
    "activation is gelu": activation(F.gelu),
    "activation is silu": activation(F.silu),
    "activation is relu": activation(F.relu),
    "gate and up change places": gate_and_up,
    "residual scale missing": attribute("residual_multiplier", lambda value: 1.0),
    "embedding scale missing": attribute("embedding_multiplier", lambda value: 1.0),
    "embedding scale of Gemma missing": embedding_scale,
    "logit scale missing": config_field("logits_scaling", lambda value: 1.0),
    "logit scale of Cohere missing": attribute("logit_scale", lambda value: 1.0),
    "window one too wide": window(lambda width: width + 1),
    "window one too narrow": window(lambda width: width - 1),
    "window missing": window(lambda width: 1 << 20),
    "windows in the other layers": windows_elsewhere,
    "head of the next id": head_of_the_next_id,
    "layers change places": layers_swapped,
    "weights of experts not normalised": attribute("norm_topk_prob", lambda value: not value),
    "one expert too few": attribute("top_k", lambda value: value - 1),
    "experts of any group": attribute("topk_group", lambda value: value + 1),
    "scale of experts 1.1 times": attribute("routed_scaling_factor", lambda value: value * 1.1),
    "sinks missing": each(
        lambda model: [m for m in model.modules() if isinstance(getattr(m, "sinks", None), nn.Parameter)],
        lambda attention: attention.sinks.data.fill_(-torch.inf),
    ),
    "limit of the gate far lower": attribute("limit", lambda limit: 0.1 * limit),
    "slope of the gate 1": attribute("alpha", lambda alpha: 1.0),
    "experts chosen without a bias": each(
        lambda model: [m for m in model.modules() if hasattr(m, "e_score_correction_bias")],
        lambda router: router.e_score_correction_bias.zero_(),
    ),
}


@dataclass
class Served:
    """A checkpoint as it is served, and all that comparing needs."""

    family: str
    model: PreTrainedModel  # a copy, whole
    facts: ModelFacts
    found: Callable[[Reference], list[Difference]]

    def caught(self, fault: str) -> bool | None:
        """None: this family cannot have it."""
        copied = copy.deepcopy(self.model)
        if not FAULTS[fault](copied):
            return None
        return any(not one.is_rounding for one in self.found(reference(copied, self.facts)))


def serve(path: Path, family: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Served:
    kept: dict[str, Any] = {}

    def keep(model: PreTrainedModel, facts: ModelFacts) -> Reference:
        kept["model"] = copy.deepcopy(model)
        return reference(model, facts)

    def compare(network: Any, logits: Any, facts: ModelFacts, wanted: Reference) -> None:
        kept["facts"] = facts

        def found(of: Reference) -> list[Difference]:
            with torch.inference_mode():
                return list(differences(network, logits, facts, of))

        kept["found"] = found
        kept["first"] = found(wanted)

    monkeypatch.setattr(load_module, "reference", keep)
    monkeypatch.setattr(load_module, "check_parts", compare)
    load_model(path, **settings)
    wrong = [one for one in kept["first"] if not one.is_rounding]
    assert not wrong, wrong
    return Served(family, kept["model"], kept["facts"], kept["found"])


ALL_FAMILIES = [*FAMILIES, *VARIANTS]

BELOW_ROUNDING = {"activation is gelu"}
"""Of a family with gelu_tanh: the two differ by at most 5e-4, which only float32 tells from rounding."""


def settings_of(form: str) -> dict[str, Any]:
    """For load_model: a dtype, weights of eight bits, or keys and values of eight bits."""
    if form in ("int8", "fp8", "int4"):
        return {"weights": form}
    return {"dtype": "bfloat16", "kv_dtype": "fp8"} if form == "fp8 keys and values" else {"dtype": form}


def assert_caught(served: Served) -> None:
    """Every fault that the family can have."""
    results = {fault: served.caught(fault) for fault in FAULTS}
    had = [fault for fault, caught in results.items() if caught is not None]
    missed = [fault for fault in had if not results[fault]]
    if served.facts.dtype is not torch.float32:
        missed = [fault for fault in missed if fault not in BELOW_ROUNDING]
    assert not missed, f"{served.family}: {len(missed)} of {len(had)} faults pass for rounding: {missed}"
    assert len(had) >= 20


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (number % 2)) for number, name in enumerate(ALL_FAMILIES)],
)
def test_every_planted_fault_is_caught(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(serve(lively_checkpoint(tmp_path, family), family, monkeypatch, dtype="bfloat16"))


FORMS = ["float32", "bfloat16", "float16", "int8", "fp8", "fp8 keys and values", "int4"]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_faults_are_caught_in_any_format(
    family: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "fp8" and family in ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"):
        pytest.skip("fp8 weights are those of linears, and experts are none")
    for seed in range(3):
        path = lively_checkpoint(tmp_path / str(seed), family, seed)
        assert_caught(serve(path, family, monkeypatch, **settings_of(form)))


@pytest.mark.parametrize(
    ("family", "form", "fault"),
    [
        ("gemma2", "int8", "attention scale 10 % off"),
        ("gpt_oss", "int8", "sinks missing"),
        ("gpt_oss", "fp8 keys and values", "sinks missing"),
    ],
)
def test_a_fault_that_a_few_loud_rows_hide_is_caught(
    family: str, form: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve(lively_checkpoint(tmp_path, family), family, monkeypatch, **settings_of(form)).caught(fault)


def random_checkpoint(path: Path, seed: int) -> tuple[str, Path]:
    """Of one family after the other, small and less so, with weights as they are made at random, and lively ones."""
    family = ALL_FAMILIES[seed % len(ALL_FAMILIES)]
    sizes = {} if seed % 3 else {"hidden_size": 128, "num_heads": 8, "head_dim": 32, "num_layers": 3}
    if seed // len(ALL_FAMILIES) % 2:
        of = family if family in FAMILIES else "llama"
        return family, tiny_checkpoint(path, of, seed=seed, num_masks=0, **VARIANTS.get(family, {}) | sizes)
    return family, lively_checkpoint(path, family, seed, **sizes)


def assert_no_alarm(seeds: range, form: str, tmp_path: Path) -> None:
    for seed in seeds:
        family, path = random_checkpoint(tmp_path / str(seed), seed)
        if form == "fp8" and family in ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"):
            continue
        load_model(path, **settings_of(form))
        shutil.rmtree(path)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] * (form in ("float32", "float16", "int8"))) for form in FORMS]
)
def test_rounding_is_no_alarm(form: str, tmp_path: Path) -> None:
    """In a dtype alone other tests of this file load every family, too: every second model is enough there."""
    is_dtype = form in ("float32", "bfloat16", "float16")
    assert_no_alarm(range(200, 216, 2 if is_dtype else 1), form, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_rounding_is_no_alarm_in_two_hundred_models(form: str, tmp_path: Path) -> None:
    assert_no_alarm(range(208), form, tmp_path)


def test_a_rank_says_what_is_wrong_with_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone:
        """A rank whose others have not come yet: it may not ask them for anything."""

        rank, size = 1, 2

        def sum(self, x: Tensor) -> Tensor:
            raise AssertionError("asked before the ranks have joined")

        def gather(self, x: Tensor) -> list[Tensor]:
            raise AssertionError("asked before the ranks have joined")

    path = lively_checkpoint(tmp_path, "qwen2")
    load_model(path, dtype="bfloat16", ranks=Alone())

    def faulty(model: PreTrainedModel, facts: ModelFacts) -> Reference:
        copied = copy.deepcopy(model)
        assert FAULTS["bias of k dropped"](copied)
        return reference(copied, facts)

    monkeypatch.setattr(sharded_module, "reference", faulty)
    with pytest.raises(UnsupportedModel, match=r"served wrong: layer 0 of 2 \(keys\)"):
        load_model(path, dtype="bfloat16", ranks=Alone())


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
    dtype: str, llama: Path, planted: Callable[[Callable[[PreTrainedModel], None]], None]
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
            load_model(llama, dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parts_in_turn_are_the_whole_step(family: str, dtype: str, checkpoint_of: Callable[[str], Path]) -> None:
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
