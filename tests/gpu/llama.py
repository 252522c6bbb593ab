"""Llamas of known shapes with random weights, made on the device, whose text and whose drafts' luck are known.

Speed at a shape needs no trained weights, but speculation needs a text: with plain random weights two ids are often so
near that rounding decides, drafts and plain decoding part, and what was to be accepted is not. So the output head's
rows are the embedding's in another order, and the layers only whisper: behind id c comes next(c), by a wide margin.
Every weight is read and multiplied as ever.

Masks of such a model know nothing: drafts are accepted as often as `space_server.speculation.synthetic_acceptance`
is set to, like those of a trained checkpoint.
`Foretold` knows the text without decoding it; all else, drafting, verdict, rollback, is real.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from space_kernels.dispatch import Ops
from space_model.adapters import Drafting
from space_model.heads import DraftHeadWeights, OutputHead
from space_model.model_facts import HeadFacts, ModelFacts
from space_model.networks.llama_network import compact_network
from space_model.networks.transformers_network import ATTENTION_NAME, TransformersNetwork, make_row_invariant
from space_model.recurrent_head import RecurrentHeadWeights
from space_model.space_model import SpaceModel
from space_server.batch import RunningSequence
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

NUM_MASKS = 5
FIRST_MASK = 4
WHISPER = 0.02  # gain of what a layer adds to its input


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    name: str
    hidden: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab_size: int
    window: int = 8192
    head_hidden: int = 1024  # of the draft head

    def config(self) -> PreTrainedConfig:
        """As transformers has it. The head is a tensor of its own: a step reads as many bytes as with a shared one."""
        return AutoConfig.for_model(
            "llama", hidden_size=self.hidden, num_hidden_layers=self.num_layers, num_attention_heads=self.num_heads,
            num_key_value_heads=self.kv_heads, head_dim=self.head_dim, intermediate_size=self.inner,
            vocab_size=self.vocab_size, max_position_embeddings=self.window, bos_token_id=0, eos_token_id=0,
            tie_word_embeddings=False,
        )  # fmt: skip

    @property
    def step_bytes(self) -> int:
        """Of bfloat16 weights that one step of one row reads: everything but the embedding table."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return 2 * (self.num_layers * layer + self.hidden * self.vocab_size + self.hidden)

    @property
    def num_bytes(self) -> int:
        return self.step_bytes + 2 * self.hidden * self.vocab_size


SHAPES: Mapping[str, Shape] = {
    "1b": Shape("1b", 2048, 16, 32, 8, 64, 8192, 128256),  # Llama-3.2-1B
    "8b": Shape("8b", 4096, 32, 32, 8, 128, 14336, 128256),  # Llama-3.1-8B
}
DRY = Shape("dry", 64, 2, 4, 2, 16, 128, 512, window=1024, head_hidden=32)


def next_ids(vocab_size: int, seed: int = 0) -> Tensor:
    """[V]: what follows each id: one cycle through all that can be generated; special ids and masks stay."""
    generator = torch.Generator().manual_seed(seed)
    first = FIRST_MASK + NUM_MASKS
    order = first + torch.randperm(vocab_size - first, generator=generator)
    following = torch.arange(vocab_size)
    following[order] = order.roll(-1)
    return following


def random_llama(shape: Shape, device: torch.device, *, whisper: float = WHISPER) -> PreTrainedModel:
    """A transformers model on the device, bfloat16. `whisper` 1: ordinary random weights, and anybody's text."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in model.named_parameters():
        weight.requires_grad_(False)
        if weight.dim() > 1:
            quiet = name.endswith(("o_proj.weight", "down_proj.weight"))
            weight.normal_(0.0, (whisper if quiet else 1.0) * weight.shape[-1] ** -0.5, generator=generator)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding.mul_(shape.hidden**0.5)
    if whisper < 1.0:
        head[next_ids(shape.vocab_size).to(device)] = embedding * shape.hidden**-0.5
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval()


def facts_of(shape: Shape, device: torch.device, acceptance: Sequence[float] = ()) -> ModelFacts:
    return ModelFacts(
        name=f"random-llama-{shape.name}", vocab_size=shape.vocab_size, hidden_size=shape.hidden,
        num_layers=shape.num_layers, num_heads=shape.num_heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        window=shape.window, dtype=torch.bfloat16, dtype_reason="as the shape has it", device=device, eos_ids=(0,),
        mask_ids=tuple(range(FIRST_MASK, FIRST_MASK + NUM_MASKS)), num_masks=NUM_MASKS,
        model_hash=f"random-llama-{shape.name}", tokenizer_hash="", has_draft_head=True,
        kv_bytes_per_token=2 * shape.num_layers * shape.kv_heads * shape.head_dim * 2, attention="",
        num_threads=torch.get_num_threads(), acceptance=tuple(acceptance),
        head=HeadFacts(NUM_MASKS, tuple(acceptance)),
    )  # fmt: skip


def _drawn(device: torch.device, seed: int, *sizes: tuple[int, int]) -> list[Tensor]:
    """Random weights [rows, columns] that keep the variance of what they multiply."""
    generator = torch.Generator(device).manual_seed(seed)
    empty = [torch.empty(size, dtype=torch.bfloat16, device=device) for size in sizes]
    return [made.normal_(0.0, made.shape[1] ** -0.5, generator=generator) for made in empty]


def draft_head(shape: Shape, device: torch.device) -> DraftHeadWeights:
    """One that changes no draft."""
    w1, w2 = _drawn(device, 1, (shape.head_hidden, 2 * shape.hidden), (shape.hidden, shape.head_hidden))
    return DraftHeadWeights(w1, w2.mul_(WHISPER), 1.0)


def recurrent_head(shape: Shape, device: torch.device) -> RecurrentHeadWeights:
    """A recurrent head as wide as the model, with a quarter of the vocabulary; it changes its state by little."""
    w1, w2 = _drawn(device, 2, (shape.hidden, 2 * shape.hidden), (shape.hidden, shape.hidden))
    ids = torch.arange(shape.vocab_size // 2, shape.vocab_size // 2 + shape.vocab_size // 4, device=device)
    return RecurrentHeadWeights(w1, w2.mul_(WHISPER), 1.0, NUM_MASKS, ids)


def space_llama(model: PreTrainedModel, facts: ModelFacts, ops: Ops, shape: Shape) -> SpaceModel:
    """The model as a worker has it; `model` is taken apart."""
    facts = replace(facts, attention=ops.attention)
    output = OutputHead(model.get_output_embeddings().weight, None, linear=ops.linear)
    network = compact_network(model.base_model, facts, ops, (), model.base_model_prefix)
    if network is None:  # dry, on a CPU whose torch packs no bfloat16
        assert facts.device.type == "cpu", "every shape here is a Llama"
        make_row_invariant(model.base_model, facts.num_threads)
        network = TransformersNetwork(model.base_model, None, ops.space_attention)
    drafting = Drafting(draft_head(shape, facts.device), recurrent_head(shape, facts.device))
    return SpaceModel(facts, network, output, drafting, drafting.recurrent_heads(output, linear=ops.linear))


def write_checkpoint(folder: Path, model: PreTrainedModel, head: DraftHeadWeights) -> None:
    """Config, weights and draft head, as a worker loads them. There is no tokenizer: a worker needs none."""
    model.save_pretrained(folder, max_shard_size="4GB")
    tensors = {"draft_head.w1.weight": head.w1.cpu(), "draft_head.w2.weight": head.w2.cpu()}
    save_file(tensors, folder / "draft_head.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    section = {
        "num_masks": NUM_MASKS,
        "mask_token_ids": list(range(FIRST_MASK, FIRST_MASK + NUM_MASKS)),
        "adapter": None,
        "draft_head": {"file": "draft_head.safetensors", "hidden": len(head.w1), "embedding_scale": 1.0},
    }
    file.write_text(json.dumps(config | {"space": section}, indent=1), encoding="utf-8")


class Foretold:
    """Synthetic acceptance where what follows is known beforehand: nobody need decode it first."""

    def __init__(self, facts: ModelFacts, chances: Sequence[float]) -> None:
        self.synthetic = SyntheticAcceptance(chances, vocab_size=facts.vocab_size, mask_ids=facts.mask_ids)
        self._following = next_ids(facts.vocab_size).tolist()

    def tell(self, sequence: RunningSequence, num_tokens: int) -> None:
        """What will follow this sequence, which has just been admitted."""
        text, last = [], sequence.ids[-1]
        for _ in range(num_tokens):
            last = self._following[last]
            text.append(last)
        self.synthetic.ended(sequence, text)
