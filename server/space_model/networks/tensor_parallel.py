"""Tensor parallelism of the Llama family: attention heads, MLP columns and the vocabulary are sharded over ranks.

query, key, value, gate, up     a rank has rows of the weight: heads, inner columns of its own
output, down                    a rank has columns: its matmul is one term of a sum over all ranks
norms, embedding                every rank has all of them
head                            a rank has a range of ids
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn
from transformers import PreTrainedConfig

from space_model.adapters import Adapter
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.model_error import InvalidSetting, UnsupportedModel
from space_model.model_facts import Ranks
from space_model.networks.llama_parts import FAMILIES

BY_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
BY_COLUMNS = frozenset({"o_proj", "down_proj"})

VOCABULARY_TILE = 64  # a rank's part of the head is padded with zero rows to a multiple of this many ids


class LaterRanks:
    """Ranks that only join at `come`: before, sum and gather return this rank's part. So a part can be checked before
    the other ranks are ready."""

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks = ranks
        self.sum: Callable[[Tensor], Tensor] = lambda x: x
        self.gather: Callable[[Tensor], list[Tensor]] = lambda x: [x]

    def come(self) -> None:
        """Include the other ranks from now on."""
        self.sum, self.gather = self._ranks.sum, self._ranks.gather


@dataclass(frozen=True)
class Share:
    """One rank's shard of a model."""

    rank: int
    size: int

    def of(self, count: int) -> slice:
        """Return its slice of `count` rows or columns; `count` is divisible."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def of_vocabulary(self, vocab_size: int) -> slice:
        """Return its slice of ids; the last ranks may have fewer, or none."""
        each = self.vocabulary_width(vocab_size)
        return slice(min(self.rank * each, vocab_size), min((self.rank + 1) * each, vocab_size))

    def vocabulary_width(self, vocab_size: int) -> int:
        """Return the rows of every rank's part of the head, including padding."""
        return -(-vocab_size // (self.size * VOCABULARY_TILE)) * VOCABULARY_TILE

    def of_config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return the config with this shard's heads and inner columns. Raises ModelError like `check_size`."""
        check_size(config, self.size)
        heads, kv_heads, head_dim = family.sizes(config)
        part = copy.deepcopy(config)
        part.head_dim = head_dim
        part.num_attention_heads, part.num_key_value_heads = heads // self.size, kv_heads // self.size
        part.intermediate_size = config.intermediate_size // self.size
        return part

    def of_adapter(self, adapter: Adapter) -> Adapter:
        """Shard the adapter's pairs like the linears they belong to; their deltas are terms of the same sums."""
        pairs = {}
        for path, (a, b) in adapter.gated.pairs.items():
            name = path.rpartition(".")[2]
            if name in BY_ROWS:
                b = b[self.of(len(b))].contiguous()
            elif name in BY_COLUMNS:
                a = a[:, self.of(a.shape[1])].contiguous()
            pairs[path] = (a, b)
        return replace(adapter, gated=replace(adapter.gated, pairs=pairs))


def check_ranks(path: str | Checkpoint, size: int) -> None:
    """Raises ModelError unless `size` ranks can share the checkpoint at `path`; checked before any of them starts."""
    check_size(family.read_config(Checkpoint.open(path)), size)


def check_size(config: PreTrainedConfig, size: int) -> None:
    """Raises ModelError unless `size` ranks can share a model with this config."""
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
                f"{' or '.join(filter(None, (', '.join(able[:-1]), able[-1])))}."
            )


class SummedLinear(nn.Module):
    """A linear whose columns are sharded over the ranks."""

    def __init__(self, linear: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.linear = linear
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """[..., in of this rank] -> [..., out]"""
        return self._ranks.sum(self.linear(x))
