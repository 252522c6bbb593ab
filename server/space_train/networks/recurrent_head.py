"""The recurrent head: it drafts from the last accepted row's hidden state on, token by token, without mask rows.

Letters: `B` texts, `L` real tokens, `M` drafts of a text, `D` ids of the draft vocabulary, `E` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from space_train.data.train_batch import AnchorRows
from space_train.networks.adapters import DraftHead
from space_train.networks.losses import FrozenOutput


class RecurrentHeadModule(DraftHead):
    """Draft j follows from the state s_j = s_{j-1} + W2·silu(W1·[s_{j-1} ; s·e(previous)]). s_0 is the hidden row
    (after the final norm) of the last accepted token; `previous` is the token before the draft, at first the bonus."""

    ids: Tensor | None

    def __init__(self, hidden_size: int, width: int, embedding_scale: float, ids: Tensor | None) -> None:
        """`ids` [D] int64, ascending: the ids that are drafted; None: the whole vocabulary."""
        super().__init__(hidden_size, width, embedding_scale)
        self.register_buffer("ids", ids)

    def unroll(self, real: Tensor, ids: Tensor, anchors: AnchorRows, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the states [B, M, E] of all drafts of `anchors`, each behind the text's own tokens `ids` [B, L].
        `real` [B, L, E]: their hidden rows; `embed`: ids [N] -> [N, E]."""
        depth, last = anchors.depth.flatten(), ids.shape[1] - 1
        before = ids.gather(1, anchors.positions.clamp(max=last)).flatten()
        (here,) = torch.where(depth == 1)
        state = real.gather(1, anchors.root[..., None].expand(-1, -1, real.shape[2])).flatten(0, 1)[here]
        states, places = list[Tensor](), list[Tensor]()
        for j in range(1, int(depth.max()) + 1):
            if j > 1:  # groups are consecutive: draft j - 1 stands right before draft j
                (deeper,) = torch.where(depth == j)
                state = state[torch.searchsorted(here, deeper - 1)]
                here = deeper
            state = self(state, embed(before[here]))
            states.append(state)
            places.append(here)
        return torch.cat(states)[torch.cat(places).argsort()].view(*anchors.depth.shape, -1)

    def restrict(self, output: FrozenOutput) -> FrozenOutput:
        """Return the rows of the output head that belong to the draft vocabulary."""
        if self.ids is None:
            return output
        bias = None if output.bias is None else output.bias[self.ids]
        return replace(output, weight=output.weight[self.ids], bias=bias)

    def token_of(self, number: Tensor) -> Tensor:
        """Return the ids of places in the draft vocabulary."""
        return number if self.ids is None else self.ids[number]
