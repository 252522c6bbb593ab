"""The sizes of a dense decoder, and the weight and operation counts computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint


class UnknownShape(ValueError):
    """A model whose sizes cannot be read; the message says what is missing."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder with attention and a gated MLP, such as Llama, Mistral and Qwen; biases are not counted."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tied: bool  # output head and embedding are one matrix

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the linears of one layer: q k v o, gate up down."""
        E, mlp = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [(E, queries), (E, keys), (E, keys), (queries, E), (E, mlp), (E, mlp), (mlp, E)]

    @property
    def body(self) -> int:
        """Weights of the layers' linears."""
        return self.num_layers * sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def output(self) -> int:
        """Weights of the output head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights, including two norms per layer and the final one."""
        return self.body + self.output * (1 if self.tied else 2) + (2 * self.num_layers + 1) * self.hidden_size

    @property
    def attention(self) -> int:
        """Forward operations per row and visible key over all layers: scores, and the weighted sum of values."""
        return 4 * self.num_heads * self.head_dim * self.num_layers

    def adapters(self, rank: int) -> int:
        """Weights of low-rank adapters on every linear of the layers."""
        return self.num_layers * sum(rank * (inputs + outputs) for inputs, outputs in self.linears)

    @classmethod
    def of(cls, model: str) -> ModelShape:
        """Return the shape `1b`, `7b` or `13b`, or that of a checkpoint. Raises UnknownShape or ModelError."""
        if model.lower() in SHAPES:
            return SHAPES[model.lower()]
        return cls.from_config(model, family.read_config(Checkpoint.open(model)))

    @classmethod
    def from_config(cls, name: str, config: Any) -> ModelShape:
        """Read the sizes from a transformers config."""
        experts = next((key for key in ("num_experts", "num_local_experts") if getattr(config, key, None)), None)
        if experts is not None:
            raise UnknownShape(f"{name} has experts ({experts} in config.json); only dense decoders are estimated.")
        wanted = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        missing = [key for key in wanted if getattr(config, key, None) is None]
        if missing:
            raise UnknownShape(f"The config of {name} has no {missing[0]}; only Llama-like decoders are estimated.")
        heads = int(config.num_attention_heads)
        return cls(
            name=name,
            vocab_size=int(config.vocab_size),
            hidden_size=int(config.hidden_size),
            num_layers=int(config.num_hidden_layers),
            num_heads=heads,
            num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            intermediate_size=int(config.intermediate_size),
            tied=bool(config.tie_word_embeddings),
        )


SHAPES = {
    "1b": ModelShape("1B", 128256, 2048, 16, 32, 8, 64, 8192, tied=True),  # as Llama 3.2 1B
    "7b": ModelShape("7B", 32000, 4096, 32, 32, 32, 128, 11008, tied=False),  # as Llama 2 7B
    "13b": ModelShape("13B", 32000, 5120, 40, 40, 40, 128, 13824, tied=False),  # as Llama 2 13B
}
"""Common models by name."""
