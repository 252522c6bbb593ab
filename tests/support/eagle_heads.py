"""EAGLE heads for tests: computed densely as the published model files do, trained for a moment, written as released.

The arithmetic follows EAGLE's cnets.py, vLLM's llama_eagle3.py and llama_eagle.py, and speculators' eagle3.py: a whole
text at once, plain torch in float32. It shares no code with the server.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

THETA, EPS = 10000.0, 1e-5


@dataclass(frozen=True)
class HeadShape:
    """What a head is made of."""

    generation: int = 3
    hidden: int = 48
    num_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 96
    norm_before_residual: bool = False
    fuse_bias: bool = False
    owns_embedding: bool = True
    draft_ids: tuple[int, ...] | None = None  # None: all


class DenseHead(nn.Module):
    """A head for the model `base`, over a whole text at once."""

    def __init__(self, base: PreTrainedModel, shape: HeadShape, layers: Sequence[int], seed: int = 0) -> None:
        """`layers`: whose inputs it reads."""
        super().__init__()
        self.shape, self.layers = shape, tuple(layers)
        sizes = base.config
        vocab, read = int(sizes.vocab_size), int(sizes.hidden_size)
        hidden, heads, dim = shape.hidden, shape.num_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        inputs = 2 * hidden if shape.generation == 3 else hidden
        self.ids = torch.arange(vocab) if shape.draft_ids is None else torch.tensor(shape.draft_ids)
        weights = {
            "fc.weight": (hidden, 3 * read if shape.generation == 3 else hidden + read),
            "midlayer.self_attn.q_proj.weight": (heads, inputs),
            "midlayer.self_attn.k_proj.weight": (dim, inputs),
            "midlayer.self_attn.v_proj.weight": (dim, inputs),
            "midlayer.self_attn.o_proj.weight": (hidden, heads),
            "midlayer.mlp.gate_proj.weight": (shape.inner, hidden),
            "midlayer.mlp.up_proj.weight": (shape.inner, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, shape.inner),
        }
        norms = ["midlayer.post_attention_layernorm.weight"]
        if shape.generation == 3:
            weights["lm_head.weight"] = (len(self.ids), hidden)
            norms += ["midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight"]
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: torch.randn(size, generator=generator) * size[1] ** -0.5 for name, size in weights.items()
        } | {name: 1.0 + 0.1 * torch.randn(hidden, generator=generator) for name in norms}
        if shape.fuse_bias:
            self.tensors["fc.bias"] = 0.1 * torch.randn(hidden, generator=generator)
        table = base.get_input_embeddings().weight.detach().float()
        if shape.owns_embedding:
            table = torch.randn(vocab, hidden, generator=generator)
            self.tensors["embed_tokens.weight"] = table
        self.table, self.head = table, base.get_output_embeddings().weight.detach().float()

    def states_of(self, base: PreTrainedModel, ids: Tensor) -> Tensor:
        """ids [N, T] -> [N, T, …]: what the head reads of the model."""
        out = base.base_model(ids, output_hidden_states=True, use_cache=False)
        if self.shape.generation == 3:
            return torch.cat([out.hidden_states[number] for number in self.layers], dim=-1)
        return out.last_hidden_state  # type: ignore[no-any-return]

    def fuse(self, states: Tensor) -> Tensor:
        """What the first pass reads in place of a former output."""
        return self._linear(states, "fc") if self.shape.generation == 3 else states

    def forward(self, ids: Tensor, states: Tensor) -> Tensor:
        """ids of the next positions [N, T], states [N, T, hidden] -> the layer's output [N, T, hidden]."""
        embedded, layer = F.embedding(ids, self.table), "midlayer."
        if self.shape.generation == 3:
            normed = self._norm(states, layer + "hidden_norm")
            x = torch.cat([self._norm(embedded, layer + "input_layernorm"), normed], dim=-1)
            residual = normed if self.shape.norm_before_residual else states
        else:
            residual = x = self._linear(torch.cat([embedded, states], dim=-1), "fc")
        y = residual + self._attention(x, layer + "self_attn.")
        z = self._norm(y, layer + "post_attention_layernorm")
        gate, up = self._linear(z, layer + "mlp.gate_proj"), self._linear(z, layer + "mlp.up_proj")
        return y + self._linear(F.silu(gate) * up, layer + "mlp.down_proj")

    def logits(self, out: Tensor) -> Tensor:
        """[N, T, hidden] -> [N, T, D] of the draft vocabulary."""
        return self._linear(self._norm(out, "norm"), "lm_head") if self.shape.generation == 3 else out @ self.head.T

    @torch.no_grad()
    def drafts(self, base: PreTrainedModel, known: list[int], count: int) -> list[int]:
        """Greedy drafts behind `known`."""
        states = self.fuse(self.states_of(base, torch.tensor([known]))[:, :-1])
        ids, drafts = known[1:], list[int]()
        for _ in range(count):
            out = self(torch.tensor([ids]), states)
            drafts.append(int(self.ids[self.logits(out)[0, -1].argmax()]))
            ids, states = [*ids, drafts[-1]], torch.cat([states, out[:, -1:]], dim=1)
        return drafts

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.tensors[f"{name}.weight"]

    def _attention(self, x: Tensor, at: str) -> Tensor:
        shape, (count, length, _) = self.shape, x.shape
        query, key, value = (
            self._linear(x, f"{at}{name}_proj").view(count, length, -1, shape.head_dim).transpose(1, 2)
            for name in "qkv"
        )
        frequencies = THETA ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        turns = torch.arange(length)[:, None] * frequencies.repeat(2)
        half = shape.head_dim // 2

        def turned(rows: Tensor) -> Tensor:
            other = torch.cat([-rows[..., half:], rows[..., :half]], dim=-1)
            return rows * turns.cos() + other * turns.sin()

        shared = shape.num_heads // shape.kv_heads
        key, value = (part.repeat_interleave(shared, dim=1) for part in (turned(key), value))
        scores = turned(query) @ key.transpose(2, 3) * shape.head_dim**-0.5
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self._linear((weights @ value).transpose(1, 2).flatten(2), f"{at}o_proj")

    def train_on(self, base: PreTrainedModel, *, steps: int = 100, seed: int = 1) -> DenseHead:
        """Learn what `base` says behind random text, two drafts deep, so that some drafts are right."""
        generator = torch.Generator().manual_seed(seed)
        leaves = [tensor.requires_grad_() for tensor in self.tensors.values()]
        optimizer = torch.optim.AdamW(leaves, lr=6e-3, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
        for _ in range(steps):
            ids = torch.randint(16, int(base.config.vocab_size), (12, 24), generator=generator)
            with torch.no_grad():
                wanted = base(ids, use_cache=False).logits[..., self.ids].softmax(-1)
                read = self.states_of(base, ids)
            states, loss = self.fuse(read[:, :-1]), torch.zeros(())
            for depth in range(2):
                out = self(ids[:, 1:], states)
                loss = loss + F.cross_entropy(
                    self.logits(out)[:, depth:].flatten(0, 1), wanted[:, depth + 1 :].flatten(0, 1)
                )
                states = torch.cat([states[:, :1], out[:, :-1]], dim=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        for tensor in leaves:
            tensor.requires_grad_(requires_grad=False)
        return self

    def save(self, path: Path, form: str = "eagle", **config: Any) -> Path:
        """Write the head to the folder `path`, and return it. `form`: eagle, as EAGLE and SpecForge do, pickled, the
        same in a pickle, or speculators; `config`: further fields of config.json."""
        path.mkdir(parents=True, exist_ok=True)
        shape = self.shape
        vocab = len(self.table)
        fields: dict[str, Any] = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "vocab_size": vocab,
            "max_position_embeddings": 512,
            "hidden_act": "silu",
        }
        tensors = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        if shape.draft_ids is not None:
            drafted = torch.zeros(vocab, dtype=torch.bool)
            drafted[self.ids] = True
            tensors |= {"d2t": self.ids - torch.arange(len(self.ids)), "t2d": drafted}
        if form == "speculators":
            verifier = {"name_or_path": "base", "architectures": ["LlamaForCausalLM"]}
            whole: dict[str, Any] = {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.2.0",
                "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
                "transformer_layer_config": fields,
                "draft_vocab_size": len(self.ids),
                "norm_before_residual": shape.norm_before_residual,
            }
        elif shape.generation == 3:
            whole = fields | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(self.ids)}
            whole |= {"norm_before_residual": True} if shape.norm_before_residual else {}
        else:
            whole = fields
        if form == "speculators" or shape.generation == 1:
            tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        (path / "config.json").write_text(json.dumps(whole | config, indent=1), encoding="utf-8")
        if form == "pickled":
            torch.save(tensors, path / "pytorch_model.bin")
        else:
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path


def dense_base(folder: Path) -> PreTrainedModel:
    """Return a checkpoint as transformers computes it, in float32."""
    return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
        folder, dtype=torch.float32, attn_implementation="eager"
    )
