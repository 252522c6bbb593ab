"""How a decoder of the Llama family is shared out among ranks: attention heads, MLP columns, the vocabulary.

query, key, value, gate, up     a rank has rows of the weight: heads, inner columns of its own
output, down                    a rank has columns: its product is one part of a sum over all ranks
norms, embedding                every rank has all of them
head                            a rank has a range of ids
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor, nn
from transformers import PreTrainedConfig

from space_model.adapters.adapter import Adapter
from space_model.adapters.gated_lora import GatedLora
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.model_error import InvalidSetting, UnsupportedModel

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
BY_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
BY_COLUMNS = frozenset({"o_proj", "down_proj"})

VOCABULARY_TILE = 64
"""Ids of a rank's part of the head are a multiple of this; the last part is filled up with rows of zeros."""


class Ranks(Protocol):
    """The processes that hold one model between them, as one of them sees it."""

    @property
    def rank(self) -> int:
        """This one's number; 0 leads."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, on every rank with the same bits; x may be overwritten."""
        ...

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in order, at rank 0; nothing elsewhere."""
        ...


class LaterRanks:
    """The others, who are not asked for anything before `come`: until then this part is all there is.

    A part is checked before the ranks join.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks = ranks
        self.sum: Callable[[Tensor], Tensor] = lambda x: x
        self.gather: Callable[[Tensor], list[Tensor]] = lambda x: [x]

    def come(self) -> None:
        """From here on they add their parts."""
        self.sum, self.gather = self._ranks.sum, self._ranks.gather


@dataclass(frozen=True)
class Share:
    """One rank's part of a model."""

    rank: int
    size: int

    def of(self, count: int) -> slice:
        """Its part of `count` rows or columns, which divide."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def of_vocabulary(self, vocab_size: int) -> slice:
        """Its ids; the last ranks may have fewer, or none."""
        each = self.vocabulary_width(vocab_size)
        return slice(min(self.rank * each, vocab_size), min((self.rank + 1) * each, vocab_size))

    def vocabulary_width(self, vocab_size: int) -> int:
        """Rows of every rank's part of the head, filled up."""
        return -(-vocab_size // (self.size * VOCABULARY_TILE)) * VOCABULARY_TILE

    def of_config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The config of a model that has this part's heads and inner columns. Raises a ModelError, as `check_size`."""
        check_size(config, self.size)
        heads, kv_heads, head_dim = family.sizes(config)
        part = copy.deepcopy(config)
        part.head_dim = head_dim
        part.num_attention_heads, part.num_key_value_heads = heads // self.size, kv_heads // self.size
        part.intermediate_size = config.intermediate_size // self.size
        return part

    def of_adapter(self, adapter: Adapter) -> Adapter:
        """The adapter's pairs, cut as the linears they add to; their deltas are parts of the same sums."""
        pairs = {}
        for path, (a, b) in adapter.gated.pairs.items():
            name = path.rpartition(".")[2]
            if name in BY_ROWS:
                b = b[self.of(len(b))].contiguous()
            elif name in BY_COLUMNS:
                a = a[:, self.of(a.shape[1])].contiguous()
            pairs[path] = (a, b)
        gated = GatedLora(adapter.gated.mask_embeddings, pairs, adapter.gated.scale)
        return replace(adapter, gated=gated)


def check_ranks(path: str | Checkpoint, size: int) -> None:
    """Whether `size` ranks can share the checkpoint at `path`, before any of them begins. Raises a ModelError."""
    check_size(family.read_config(Checkpoint.open(path)), size)


def check_size(config: PreTrainedConfig, size: int) -> None:
    """Whether `size` ranks can share a model with this config. Raises a ModelError."""
    if config.model_type not in FAMILIES:
        raise UnsupportedModel(
            f"Models of type {config.model_type!r} are not shared among ranks; those of "
            f"{', '.join(sorted(FAMILIES))} are. Use --tensor-parallel 1."
        )
    heads, kv_heads, _ = family.sizes(config)
    counts = {"heads": heads, "key-value heads": kv_heads, "inner columns": int(config.intermediate_size)}
    for what, count in counts.items():
        if count % size:
            able = [str(n) for n in range(1, kv_heads + 1) if not any(c % n for c in counts.values())]
            raise InvalidSetting(
                f"{size} ranks cannot share {count} {what} evenly; with this checkpoint --tensor-parallel can be "
                f"{_either(able)}."
            )


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


class SummedLinear(nn.Module):
    """A linear of which every rank has some columns."""

    def __init__(self, linear: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.linear = linear
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """[..., in of this rank] -> [..., out]"""
        return self._ranks.sum(self.linear(x))
