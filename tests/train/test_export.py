"""A checkpoint read by transformers gives the logits of the network that was trained."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from space_train.draft_head import DraftHead
from space_train.export import export
from space_train.network import Network, NetworkShape
from space_train.tokenizer import train_tokenizer, write_tokenizer
from transformers import AutoModelForCausalLM

SHAPE = NetworkShape(300, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48)


def trained(folder: Path) -> tuple[Network, DraftHead]:
    generator = torch.Generator().manual_seed(0)
    network, head = Network(SHAPE), DraftHead(32, width=24)
    network.initialise(generator)
    with torch.no_grad():
        for parameter in (*network.parameters(), *head.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    write_tokenizer(train_tokenizer(["x = 1\n"] * 2, 300), folder / "tokenizer", SHAPE.window)
    return network, head


def test_transformers_computes_the_same_logits_and_counts_the_same_parameters(tmp_path: Path) -> None:
    network, head = trained(tmp_path)
    export(network, head, tmp_path / "tokenizer", tmp_path / "model", num_masks=3, dtype=torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.randint(12, 300, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(network.logits(network(ids)), oracle(ids).logits, rtol=1e-4, atol=1e-5)
    assert SHAPE.num_parameters == sum(parameter.numel() for parameter in oracle.parameters())
    assert SHAPE.num_parameters == sum(parameter.numel() for parameter in network.parameters())


def test_the_space_section_names_the_masks_and_the_head_and_the_files_hold_them_in_bf16(tmp_path: Path) -> None:
    network, head = trained(tmp_path)
    export(network, head, tmp_path / "tokenizer", tmp_path / "model", num_masks=3)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["space"] == {
        "num_masks": 3,
        "mask_token_ids": [4, 5, 6],
        "adapter": None,
        "draft_head": {"file": "draft_head.safetensors", "hidden": 24, "embedding_scale": 8.0},
    }
    weights, head_weights = (load_file(tmp_path / "model" / name) for name in ("model.safetensors", head_file(config)))
    assert {tensor.dtype for tensor in (*weights.values(), *head_weights.values())} == {torch.bfloat16}
    shapes = {name: tuple(tensor.shape) for name, tensor in head_weights.items()}
    assert shapes == {"draft_head.w1.weight": (24, 64), "draft_head.w2.weight": (32, 24)}
    assert (tmp_path / "model" / "tokenizer.json").exists()


def head_file(config: dict[str, dict[str, dict[str, str]]]) -> str:
    return config["space"]["draft_head"]["file"]


def test_a_checkpoint_without_a_head_says_so(tmp_path: Path) -> None:
    network, _ = trained(tmp_path)
    export(network, None, tmp_path / "tokenizer", tmp_path / "model", num_masks=3)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["space"]["draft_head"] is None
    assert not (tmp_path / "model" / "draft_head.safetensors").exists()
