"""A checkpoint read by transformers gives the logits of the network that was trained."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from space_train.data.corpus import train_tokenizer, write_tokenizer
from space_train.networks.network import NetworkShape, TrainNetwork, export, load_llama
from transformers import AutoModelForCausalLM

SHAPE = NetworkShape(300, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48)


def trained(folder: Path) -> TrainNetwork:
    generator = torch.Generator().manual_seed(0)
    network = TrainNetwork(SHAPE)
    network.initialise(generator)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    write_tokenizer(train_tokenizer(["x = 1\n"] * 2, 300), folder / "tokenizer", SHAPE.window)
    return network


def test_transformers_computes_the_same_logits_and_counts_the_same_parameters(tmp_path: Path) -> None:
    network = trained(tmp_path)
    export(network, tmp_path / "tokenizer", tmp_path / "model", dtype=torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.randint(12, 300, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(network.logits(network(ids)), oracle(ids).logits, rtol=1e-4, atol=1e-5)
    assert SHAPE.num_parameters == sum(parameter.numel() for parameter in oracle.parameters())
    assert SHAPE.num_parameters == sum(parameter.numel() for parameter in network.parameters())


def test_an_exported_checkpoint_is_read_back_exactly(tmp_path: Path) -> None:
    network = trained(tmp_path)
    export(network, tmp_path / "tokenizer", tmp_path / "model", dtype=torch.float32)
    other = TrainNetwork(SHAPE)
    load_llama(other, tmp_path / "model")
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    export(trained(tmp_path), tmp_path / "tokenizer", tmp_path / "model")
    with pytest.raises(ValueError, match=r"not of this shape \(first difference: .*mlp.down_proj"):
        load_llama(TrainNetwork(replace(SHAPE, intermediate_size=40)), tmp_path / "model")


def test_the_weights_are_written_in_bf16(tmp_path: Path) -> None:
    export(trained(tmp_path), tmp_path / "tokenizer", tmp_path / "model")
    assert {tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["torch_dtype"] == "bfloat16"
