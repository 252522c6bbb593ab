"""Inputs of inner layers, copied while a step is computed, as transformers has them; no bit of the step changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import UnsupportedModel
from space_model.networks.llama_compiled_network import CompiledLlama
from space_model.networks.llama_network import LlamaNetwork
from space_model.networks.network import Taps
from space_model.networks.transformers_network import TransformersNetwork, tapping
from tiny_checkpoints import tiny_checkpoint
from transformers import AutoModelForCausalLM

IDS = torch.randint(16, 100, (50,), generator=torch.Generator().manual_seed(3)).tolist()
LAYERS = (2, 0, 3)  # out of order; 3: the last layer's output
CASES = [
    ("llama", "float32", LlamaNetwork),
    ("llama", "bfloat16", CompiledLlama),
    ("gemma2", "float32", TransformersNetwork),
    ("falcon", "float32", TransformersNetwork),
]


@pytest.mark.parametrize(("family", "dtype", "network"), CASES)
@torch.inference_mode()
def test_they_are_what_each_layer_is_given_and_the_step_stays_the_same(
    family: str, dtype: str, network: type, tmp_path: Path
) -> None:
    model = load_model(tiny_checkpoint(tmp_path, family, num_layers=3), dtype=dtype)
    assert isinstance(model.network, network)
    tapped_kv, plain_kv = model.allocate_kv(8, 16), model.allocate_kv(8, 16)
    pages, other = [5, 2, 7, 0], [3]
    steps = [
        [Segment(IDS[:37], 0, pages), Segment(IDS[:9], 0, other)],
        [Segment(IDS[37:42], 37, pages, DraftLayout(2, (3, 0, 2))), Segment(IDS[9:10], 9, other)],
    ]
    for segments in steps:
        batch = ForwardBatch.build(segments, block_size=16, mask_ids=model.facts.mask_ids)
        taps = Taps.of(LAYERS, batch, model.facts)
        found = model.network.forward(batch, tapped_kv, taps)
        assert torch.equal(found[: batch.num_rows], model.network.forward(batch, plain_kv)[: batch.num_rows])
        assert all(map(torch.equal, tapped_kv.keys + tapped_kv.values, plain_kv.keys + plain_kv.values))
        assert taps.states.shape == (batch.num_chain_rows, len(LAYERS), model.facts.hidden_size)
        last = model.network.norm(torch.cat([taps.states[:, 2], taps.states[:, 2]]))[: batch.num_chain_rows]
        assert torch.equal(last, found[: batch.num_chain_rows])


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon", "qwen3_next"])
@torch.inference_mode()
def test_they_are_the_hidden_states_of_transformers(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, family, num_masks=0, num_layers=3)
    dense = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    inputs: dict[int, torch.Tensor] = {}
    layers = dense.base_model.h if family == "falcon" else dense.base_model.layers
    for number, layer in enumerate(layers):

        def note(layer: object, rows: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor], at: int) -> None:
            inputs[at] = (rows[0] if rows else named["hidden_states"])[0]

        layer.register_forward_pre_hook(
            lambda layer, rows, named, at=number, note=note: note(layer, rows, named, at), with_kwargs=True
        )
    dense(torch.tensor([IDS]), use_cache=False)
    model = load_model(path, dtype="float32")
    kv = model.allocate_kv(4, 16)
    found = []
    for start, stop in ((0, 20), (20, 50)):
        batch = ForwardBatch.build([Segment(IDS[start:stop], start, range(4))], block_size=16, mask_ids=())
        taps = Taps.of((2, 1), batch, model.facts)
        model.network.forward(batch, kv, taps)
        found.append(taps.states)
    whole = torch.cat(found)
    torch.testing.assert_close(whole[:, 0], inputs[2], atol=2e-4, rtol=0)
    torch.testing.assert_close(whole[:, 1], inputs[1], atol=2e-4, rtol=0)


def test_layers_without_a_hidden_state_a_token_are_refused(tmp_path: Path) -> None:
    """As those of Gemma 3n do, which pass on four versions of each row."""
    network = load_model(tiny_checkpoint(tmp_path, "gemma2", num_masks=0), dtype="float32").network
    assert isinstance(network, TransformersNetwork)
    network.base.layers[0].forward = lambda rows, **named: rows
    taps = Taps((0,), torch.zeros(4, 1, 64))
    with tapping(network.base, taps), pytest.raises(UnsupportedModel, match="Gemma2Model have other inputs than"):
        network.base.layers[0](torch.zeros(4, 1, 4, 64))
