"""Teach a small model to leave a loop: it is shown loops, and learns that each round makes the next less likely.

The idea is DITTO's (arXiv 2206.02369): decoded greedily, a model repeats itself because repeating makes it surer of the
repeated token. Shown a passage that repeats, it learns probability `decay`·p where one period before it gave p.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from space_train.networks.network import TrainNetwork

DECAY = 0.5
"""What is left of a token's probability one round later."""

PREFIX = (8, 96)
"""Ids before the loop: fewest and most."""

PERIOD = (3, 48)
"""Ids of one round of whole lines."""

SHORT_PERIOD = (1, 8)
"""Ids of one round within a line."""


def line_ends(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """[V] which ids hold a line end (`Ċ` in byte-level BPE)."""
    size = tokenizer.get_vocab_size()
    return np.array(["Ċ" in (tokenizer.id_to_token(index) or "") for index in range(size)])


def looped(ids: Tensor, ends_line: NDArray[np.bool_], rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Windows [B, L] that end in a loop, made from real ones `ids` [B, L]; where each loop starts and its period, [B].

    Half of the loops are runs of whole lines, where a window has some that fit; the others are a few ids.
    """
    windows, starts, periods = ids.clone(), [], []
    for row in windows:
        line_starts = np.flatnonzero(ends_line[row.numpy()]) + 1
        pairs = [
            (int(first), int(last - first))
            for number, first in enumerate(line_starts)
            for last in line_starts[number + 1 :]
            if PREFIX[0] <= first < PREFIX[1] and PERIOD[0] <= last - first <= PERIOD[1]
        ]
        if pairs and rng.random() < 0.5:
            start, period = pairs[int(rng.integers(len(pairs)))]
        else:
            start, period = int(rng.integers(*PREFIX)), int(rng.integers(SHORT_PERIOD[0], SHORT_PERIOD[1] + 1))
        rest = len(row) - start
        row[start:] = row[start : start + period].repeat(-(-rest // period))[:rest]
        starts.append(start)
        periods.append(period)
    return windows, torch.tensor(starts), torch.tensor(periods)


def loop_loss(network: TrainNetwork, windows: Tensor, starts: Tensor, periods: Tensor) -> Tensor:
    """-log(1 - |p_t - decay·p_{t-period}|), averaged over the repeated ids of `windows` [B, L]."""
    logits = network.logits(network(windows)[:, :-1]).float()
    target = windows[:, 1:, None]
    chance = logits.log_softmax(-1).gather(2, target)[..., 0].exp()  # [B, L-1] of the id at 1, 2, …
    at = torch.arange(1, windows.shape[1])
    is_repeat = at >= (starts + periods)[:, None]
    before = (at - periods[:, None] - 1).clamp(min=0)
    wanted = DECAY * chance.detach().gather(1, before)
    distance = (chance - wanted).abs().clamp(max=1 - 1e-4)
    losses = -torch.log1p(-distance) * is_repeat
    return losses.sum() / is_repeat.sum()
