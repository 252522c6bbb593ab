"""Trains a small model to leave loops: on looping texts it learns to make each repetition less likely.

This is DITTO (arXiv 2206.02369): greedy decoding loops because each repetition raises the probability of the repeated
token. On a repeating passage, the model learns probability `decay`·p for a token that had p one period before.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from space_train.networks.network import TrainNetwork

DECAY = 0.5
"""Factor on a token's probability from one round to the next."""

PREFIX = (8, 96)
"""Ids before the loop: fewest and most."""

PERIOD = (3, 48)
"""Ids of one round of whole lines."""

SHORT_PERIOD = (1, 8)
"""Ids of one round within a line."""


def line_ends(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """[V] bool: ids that contain a line end (`Ċ` in byte-level BPE)."""
    size = tokenizer.get_vocab_size()
    return np.array(["Ċ" in (tokenizer.id_to_token(index) or "") for index in range(size)])


def looped(ids: Tensor, ends_line: NDArray[np.bool_], rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return windows [B, L] that end in a loop, made from `ids` [B, L], and each loop's start and period, [B].

    Half of the loops repeat whole lines, if a window has lines that fit; the others repeat a few ids.
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
    """Return -log(1 - |p_t - decay·p_{t-period}|), averaged over the repeated ids of `windows` [B, L]."""
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
