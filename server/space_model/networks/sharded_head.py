"""The output head, sharded by vocabulary over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from space_model.heads.output_head import OutputHead
from space_model.networks.tensor_parallel import Ranks


class ShardedHead:
    """Each rank computes the logits of its ids; rank 0 concatenates them.

    Only rank 0 needs the logits, because it alone samples: sampling reads penalties' counts, bans and histories, which
    other ranks do not have, and a single process cannot disagree with itself.
    """

    def __init__(self, part: OutputHead, whole: OutputHead | None, vocab_size: int, ranks: Ranks) -> None:
        """`part`: this rank's ids, equally many on every rank; `whole`: rank 0's whole head, to rescore drafts."""
        self._part, self._whole, self._ranks = part, whole, ranks
        self.vocab_size = vocab_size

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32 on rank 0, [N, 0] elsewhere; all ranks must pass the same rows."""
        parts = self._ranks.gather(self._part.logits(hidden).contiguous())
        if not parts:
            return hidden.new_empty(len(hidden), 0, dtype=torch.float32)
        return torch.cat(parts, dim=1)[:, : self.vocab_size]

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N, hidden], ids [N, M] -> [N, M] float32; computed on rank 0 alone."""
        if self._whole is None:
            raise RuntimeError("This rank does not have the whole head: it has no draft head to rescore with.")
        return self._whole.logits_of(hidden, ids)
