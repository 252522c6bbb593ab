"""The recurrent draft head: drafts one after the other from the state of the last accepted chain row, without masks.

    s_j = s_{j-1} + W2·silu(W1·[s_{j-1} ; scale·e(previous)])        previous: the bonus token, then the last draft

The idea is ReDrafter's (arXiv 2403.09919): one small recurrent network instead of a head a position.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Linear = Callable[[Tensor], Tensor]


def next_state(state: Tensor, token: Tensor, first: Linear, second: Linear, scale: float) -> Tensor:
    """Return s_j [S, hidden] from s_{j-1} and the embedding `token` [S, hidden] of the id before the draft.
    `first` multiplies by W1, `second` by W2."""
    return state + second(F.silu(first(torch.cat([state, scale * token], dim=1))))
