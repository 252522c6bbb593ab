"""Llamas of known shapes with random weights, made on the device, whose text and whose drafts' luck are known.

Speed at a shape needs no trained weights, but speculation needs a text: with plain random weights two ids are often so
near that rounding decides, drafts and plain decoding part, and what was to be accepted is not. So the output head's
rows are the embedding's in another order, and the layers only whisper: behind id c comes next(c), by a wide margin.
Every weight is read and multiplied as ever.

Masks of such a model know nothing. `Fortunate` gives each mask row the embedding of the id it stands for, or of a wrong
one, with the chances of a trained checkpoint: all else, drafting, verdict, rollback, is real.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from space_kernels.dispatch import Ops
from space_model.batch_pattern import BatchPattern
from space_model.compact_network import compact_network
from space_model.draft_head_weights import DraftHeadWeights
from space_model.forward_batch import ForwardBatch
from space_model.model_facts import ModelFacts
from space_model.output_head import OutputHead
from space_model.paged_attention_interface import ATTENTION_NAME
from space_model.paged_kv import PagedKV
from space_model.space_model import SpaceModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

NUM_MASKS = 5
FIRST_MASK = 4
WHISPER = 0.02
"""Gain of what a layer adds to its input."""


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
            "llama",
            hidden_size=self.hidden,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.inner,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.window,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
        )

    @property
    def step_bytes(self) -> int:
        """Of bfloat16 weights that one step of one row reads: everything but the embedding table."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return 2 * (self.num_layers * layer + self.hidden * self.vocab_size + self.hidden)

    @property
    def num_bytes(self) -> int:
        """Of all bfloat16 weights."""
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
    """What such a model says of itself."""
    return ModelFacts(
        name=f"random-llama-{shape.name}",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        window=shape.window,
        dtype=torch.bfloat16,
        dtype_reason="as the shape has it",
        device=device,
        eos_ids=(0,),
        mask_ids=tuple(range(FIRST_MASK, FIRST_MASK + NUM_MASKS)),
        num_masks=NUM_MASKS,
        model_hash=f"random-llama-{shape.name}",
        tokenizer_hash="",
        has_draft_head=True,
        kv_bytes_per_token=2 * shape.num_layers * shape.kv_heads * shape.head_dim * 2,
        attention="",
        num_threads=torch.get_num_threads(),
        acceptance=tuple(acceptance),
    )


def draft_head(shape: Shape, device: torch.device) -> DraftHeadWeights:
    """One that changes no draft."""
    generator = torch.Generator(device).manual_seed(1)

    def drawn(rows: int, columns: int) -> Tensor:
        made = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return made.normal_(0.0, columns**-0.5, generator=generator)

    w1, w2 = drawn(shape.head_hidden, 2 * shape.hidden), drawn(shape.hidden, shape.head_hidden)
    return DraftHeadWeights(w1, w2.mul_(WHISPER), 1.0)


def space_llama(model: PreTrainedModel, facts: ModelFacts, ops: Ops, head: DraftHeadWeights) -> SpaceModel:
    """The model as a worker has it; `model` is taken apart."""
    facts = replace(facts, attention=ops.attention)
    output = OutputHead(model.get_output_embeddings().weight, None, linear=ops.linear)
    network = compact_network(model.base_model, facts, ops, (), model.base_model_prefix)
    assert network is not None, "every shape here is a Llama"
    return SpaceModel(facts, network, output, head)


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


class Fortunate:
    """A model behind whose back the masks stand for what they should, as often as `chances` say.

    A draft of mask j for id t comes true where t's own number in [0, 1) lies below chances[j-1], as in
    `space_server.synthetic`. Three small gathers per step, on the device.
    """

    def __init__(self, model: SpaceModel, chances: Sequence[float]) -> None:
        facts = model.facts
        self._model, self._vocab_size = model, facts.vocab_size
        self._stands_for = _stands_for(facts.vocab_size, chances).to(facts.device).view(-1)  # [k+1, V], flat
        self._places = lru_cache(maxsize=None)(self._new_places)  # graphs read its tensors: none may go

    @property
    def facts(self) -> ModelFacts:
        return self._model.facts

    def draft_head_of(self, adapter: int | None) -> DraftHeadWeights | None:
        return self._model.draft_head_of(adapter)

    def allocate_kv(self, num_blocks: int, block_size: int) -> PagedKV:
        return self._model.allocate_kv(num_blocks, block_size)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        if batch.pattern.num_mask_rows:
            parents, offsets = self._places(batch.pattern)
            batch = replace(batch, ids=self._stands_for[batch.ids[parents] + offsets])
        return self._model.forward(batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self._model.logits_of(hidden, ids)

    def embed(self, ids: Tensor) -> Tensor:
        return self._model.embed(ids)

    def _new_places(self, pattern: BatchPattern) -> tuple[Tensor, Tensor]:
        """[R] the chain row that each row stands behind, or itself; [R] which mask it is, times V."""
        parents = list(range(pattern.rows.num_padded))
        depths = [0] * len(parents)
        for chain, groups in zip(pattern.chain_rows, pattern.mask_rows, strict=True):
            first = len(chain) - len(groups)  # the root's place among the segment's chain rows
            for group, rows in enumerate(groups):
                for depth, row in enumerate(rows, start=1):
                    parents[row], depths[row] = chain[first + group], depth
        device = self.facts.device
        return torch.tensor(parents, device=device), torch.tensor(depths, device=device) * self._vocab_size


def _stands_for(vocab_size: int, chances: Sequence[float]) -> Tensor:
    """[k+1, V]: the id that mask j behind id c is taken for, so that it says next^(j+1)(c), or something else."""
    following = next_ids(vocab_size)
    luck = torch.rand(vocab_size, generator=torch.Generator().manual_seed(2))
    table = [torch.arange(vocab_size)]
    right = table[0]
    for chance in chances:
        right = following[right]
        table.append(torch.where(luck[following[right]] < chance, right, following[following[right]]))
    return torch.stack(table)
