"""What a loaded model is, in numbers: what the worker tells the router, and sizes things by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from space_kernels.fp8 import FORMAT


def number_format(dtype: torch.dtype, weights: str, *, float8_kv: bool) -> str:
    """In words, such as `bfloat16 with fp8 weights and fp8 keys and values`."""
    small = ([] if weights == "plain" else [f"{weights} weights"]) + ["fp8 keys and values"] * float8_kv
    form = str(dtype).removeprefix("torch.")
    return f"{form} with {' and '.join(small)}" if small else form


@dataclass(frozen=True)
class AdapterFacts:
    """A gated adapter that is loaded."""

    name: str  # as requests ask for it; "" is the checkpoint's own
    num_masks: int
    has_draft_head: bool
    acceptance: tuple[float, ...] = ()  # as of ModelFacts


@dataclass(frozen=True)
class ModelFacts:
    """The checkpoint and how it is held."""

    name: str  # as given to load_model
    vocab_size: int  # rows of the output head
    hidden_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    window: int  # most positions of one sequence
    dtype: torch.dtype  # of weights, keys and values, where nothing below says otherwise
    dtype_reason: str  # why this dtype was chosen, for the log
    device: torch.device
    eos_ids: tuple[int, ...]
    mask_ids: tuple[int, ...]  # id of mask 1, 2, …, num_masks; a shared id is repeated; empty: masks without ids
    num_masks: int  # 0: a plain checkpoint
    model_hash: str
    tokenizer_hash: str  # "" where the checkpoint has no tokenizer.json
    has_draft_head: bool
    kv_bytes_per_token: int  # keys and values of one slot in all layers
    attention: str  # the attention implementation in use
    num_threads: int  # threads of one product on the CPU
    acceptance: tuple[float, ...] = ()  # of draft 1, 2, … given those before it, as the checkpoint says; empty: unknown
    adapters: tuple[AdapterFacts, ...] = ()  # by the number that rows refer to them by
    weights: str = "plain"  # how linears are held: one of precision.WEIGHTS
    float8_kv: bool = False  # keys and values are held in numbers of eight bits
    head_rows: int = 8  # whose logits cost no more than the head's weights read twice
    num_ranks: int = 1  # processes that share the model; heads and bytes of keys and values are those of one

    @property
    def number_format(self) -> str:
        """Of weights, keys and values: what two workers must have in common for the same text."""
        return number_format(self.dtype, self.weights, float8_kv=self.float8_kv)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values in their pages."""
        return FORMAT if self.float8_kv else self.dtype

    @property
    def eight_bits(self) -> bool:
        """Linears, and the output head, are held in whole numbers of eight bits and scales."""
        return self.weights == "int8"

    @property
    def most_masks(self) -> int:
        """Masks per group that a sequence can have at most, whatever its adapter."""
        return max(self.num_masks, *(adapter.num_masks for adapter in self.adapters), 0)

    @property
    def has_any_draft_head(self) -> bool:
        """Some masks, the checkpoint's own or an adapter's, have a draft head."""
        return self.has_draft_head or any(adapter.has_draft_head for adapter in self.adapters)

    def adapter_number(self, name: str) -> int | None:
        """Where the adapter is; None: the checkpoint's own masks, by their ids. Raises KeyError for an unknown name."""
        for number, adapter in enumerate(self.adapters):
            if adapter.name == name:
                return number
        if name:
            raise KeyError(name)
        return None
