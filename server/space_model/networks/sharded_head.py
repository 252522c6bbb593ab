"""The output head, its vocabulary shared out among ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from space_model.heads.output_head import OutputHead
from space_model.networks.tensor_parallel import Ranks


class ShardedHead:
    """Every rank makes the logits of its ids; rank 0 puts them together.

    Rank 0 alone needs them: it alone chooses. A choice reads counts, bans and histories, which followers do not have,
    and what one process has decided cannot be decided otherwise by another.
    """

    def __init__(self, part: OutputHead, whole: OutputHead | None, vocab_size: int, ranks: Ranks) -> None:
        """`part`: this rank's ids, as many rows on every rank; `whole`: of rank 0, where drafts are rescored."""
        self._part, self._whole, self._ranks = part, whole, ranks
        self.vocab_size = vocab_size

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32 at rank 0, [N, 0] elsewhere; every rank must ask for the same rows."""
        parts = self._ranks.gather(self._part.logits(hidden).contiguous())
        if not parts:
            return hidden.new_empty(len(hidden), 0, dtype=torch.float32)
        return torch.cat(parts, dim=1)[:, : self.vocab_size]

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N, hidden], ids [N, M] -> [N, M] float32: at rank 0, by itself."""
        if self._whole is None:
            raise RuntimeError("This rank does not have the whole head: it has no draft head to rescore with.")
        return self._whole.logits_of(hidden, ids)
