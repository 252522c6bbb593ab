"""What is read as a gated LoRA, and why others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from space_model.adapters import GatedLora
from space_model.model_error import InvalidSpaceSection
from space_model.testing import tiny_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapter() -> GatedLora:
    pairs = {Q: (normal(1, 3, 64), normal(2, 64, 3)), DOWN: (normal(3, 3, 128), normal(4, 64, 3))}
    return GatedLora(normal(5, 4, 64), pairs, scale=0.5)


def read(path: Path, num_masks: int | None = None) -> GatedLora:
    return GatedLora.load(path, num_masks=num_masks, hidden_size=64, dtype=torch.float32)


def same(one: GatedLora, other: GatedLora) -> bool:
    halves = [torch.equal(x, y) for n in one.pairs for x, y in zip(one.pairs[n], other.pairs[n], strict=True)]
    embeddings = torch.equal(one.mask_embeddings, other.mask_embeddings)
    return one.pairs.keys() == other.pairs.keys() and one.scale == other.scale and embeddings and all(halves)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    adapter().save(tmp_path / "one.safetensors")
    adapter().save_peft(tmp_path / "peft", base="tiny")
    assert same(read(tmp_path / "one.safetensors"), adapter())
    assert same(read(tmp_path / "peft"), adapter())


def test_the_file_has_the_names_and_the_header_of_its_format(tmp_path: Path) -> None:
    adapter().save(tmp_path / "one.safetensors")
    with safe_open(tmp_path / "one.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "space-gated-lora-1", "rank": "3", "alpha": "1.5", "num_masks": "4"}
        shapes = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
    assert shapes == {
        f"gated_lora.{Q}.a": (3, 64),
        f"gated_lora.{Q}.b": (64, 3),
        f"gated_lora.{DOWN}.a": (3, 128),
        f"gated_lora.{DOWN}.b": (64, 3),
        "gated_lora.mask_embeddings": (4, 64),
    }


def test_fewer_masks_are_the_leading_ones(tmp_path: Path) -> None:
    adapter().save(tmp_path / "one.safetensors")
    assert torch.equal(read(tmp_path / "one.safetensors", 2).mask_embeddings, adapter().mask_embeddings[:2])
    with pytest.raises(InvalidSpaceSection, match="embeddings for 4 masks; 5 are asked for"):
        read(tmp_path / "one.safetensors", 5)


def test_embeddings_alone_are_an_adapter(tmp_path: Path) -> None:
    bare = replace(adapter(), pairs={})
    bare.save(tmp_path / "one.safetensors")
    assert same(read(tmp_path / "one.safetensors"), bare)


def spoil_header(file: Path, name: str, value: str) -> None:
    with safe_open(file, framework="pt") as found:
        metadata = found.metadata() | {name: value}
    save_file(load_file(file), file, metadata=metadata)


def spoil(name: str, change: Callable[[Tensor], Tensor | None], rename: str | None = None) -> Callable[[Path], None]:
    def act(file: Path) -> None:
        with safe_open(file, framework="pt") as found:
            metadata = found.metadata()
        tensors = load_file(file)
        changed = change(tensors.pop(name))
        save_file(tensors | ({} if changed is None else {rename or name: changed.contiguous()}), file, metadata)

    return act


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda file: spoil_header(file, "format", "lora-9"), "format 'lora-9' in its header; space-gated-lora-1"),
        (lambda file: spoil_header(file, "rank", "three"), "needs numbers rank, alpha and num_masks"),
        (lambda file: spoil_header(file, "rank", "0"), "says rank 0"),
        (lambda file: spoil_header(file, "alpha", "nan"), "alpha nan"),
        (lambda file: spoil_header(file, "rank", "4"), r"q_proj.a in .* has shape \(3, 64\); its header says rank 4"),
        (lambda file: spoil_header(file, "num_masks", "9"), "has 4 rows; its header says 9"),
        (spoil("gated_lora.mask_embeddings", lambda t: None), "mask_embeddings of .* is not there"),
        (spoil("gated_lora.mask_embeddings", lambda t: t[:, :9]), r"has shape \(4, 9\); it must be \[masks, 64\]"),
        (spoil(f"gated_lora.{Q}.a", lambda t: None), rf"has gated_lora.{Q}.b and lacks gated_lora.{Q}.a"),
        (spoil(f"gated_lora.{Q}.b", lambda t: t[:, :2]), r"shapes \(3, 64\) and \(64, 2\)"),
        (spoil(f"gated_lora.{Q}.b", lambda t: t * torch.nan), "q_proj in .* has values that are not finite"),
        (spoil(f"gated_lora.{Q}.b", lambda t: t, "lora.q.b"), "has a tensor lora.q.b, which is no part"),
        (lambda file: file.write_bytes(b"pickle"), "is no safetensors file"),
        (Path.unlink, "There is no adapter file"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(act: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    adapter().save(file)
    act(file)
    with pytest.raises(InvalidSpaceSection, match=message):
        read(file)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora = True, which is not served"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"r": None}, "no config of a LoRA with r and lora_alpha"),
    ],
)
def test_peft_folders_that_do_not_fit_are_refused_by_name(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    adapter().save_peft(tmp_path, base="tiny")
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(InvalidSpaceSection, match=message):
        read(tmp_path)


def test_rank_stabilised_scaling_is_kept(tmp_path: Path) -> None:
    adapter().save_peft(tmp_path, base="tiny")
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
    assert read(tmp_path).scale == 1.5 / 3**0.5


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("model.layers.2.self_attn.q_proj", "adapts model.layers.2.self_attn.q_proj, which is no linear of"),
        ("model.layers.0.input_layernorm", "no linear of the model's model.layers"),
        ("lm_head", "adapts lm_head, which is no linear of"),
        (DOWN, r"down_proj makes \[64, 64\]; the model's weight is \[64, 128\]"),
    ],
)
def test_pairs_that_fit_no_linear_of_the_model_are_refused(path: str, message: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path))
    adapter().check(model, "model.layers")
    with pytest.raises(InvalidSpaceSection, match=message):
        replace(adapter(), pairs={path: adapter().pairs[Q]}).check(model, "model.layers")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own
def test_peft_reads_what_is_saved_for_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path / "base"))
    before = {path: model.get_submodule(path).weight.detach().clone() for path in (Q, DOWN)}
    adapter().save_peft(tmp_path / "peft", base=str(tmp_path / "base"))
    merged = peft.PeftModel.from_pretrained(model, str(tmp_path / "peft")).merge_and_unload()
    for path, (a, b) in adapter().pairs.items():
        torch.testing.assert_close(merged.get_submodule(path).weight, before[path] + 0.5 * b @ a)
