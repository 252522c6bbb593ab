"""Two losses that train a small model out of loops: on made-up repetitions, and on those of its own texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from space_common.repetition import GRAM
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from space_train.data.rows import PackedTokens
from space_train.data.train_batch import causal
from space_train.networks.network import TrainNetwork
from space_train.networks.trainee import Trainee

DECAY = 0.5  # factor on a token's probability from one round to the next
PREFIX = (8, 96)  # ids before the loop: fewest and most
PERIOD = (3, 48)  # ids of one round of whole lines
SHORT_PERIOD = (1, 8)  # ids of one round within a line


def line_ends(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """[V] bool: ids that contain a line end (`Ċ` in byte-level BPE)."""
    size = tokenizer.get_vocab_size()
    return np.array(["Ċ" in (tokenizer.id_to_token(index) or "") for index in range(size)])


def looped(ids: Tensor, ends_line: NDArray[np.bool_], rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return windows [B, L] that end in a loop, made from `ids` [B, L], and each loop's start and period, [B]. Half of
    the loops repeat whole lines, if a window has lines that fit; the others repeat a few ids."""
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


@dataclass
class LoopsToUnlearn:
    """Loss on the repetitions in texts that the model generates from time to time."""

    streams: Sequence[tuple[PackedTokens, int]]  # sources of prompts, and how many from each
    end_id: int
    pad_id: int
    banned_ids: Sequence[int]
    weight: float = 0.5
    updates_each: int = 2  # updates before new texts are generated
    prompt: int = 48
    written: int = 112
    loops_from: float = 0.3  # share of repeated 4-grams from which a text counts as looping

    def __post_init__(self) -> None:
        self._texts = self._closed = torch.empty(0)

    def loss(self, trainee: Trainee, step: int) -> Tensor:
        """Return the loss at update `step`, computed on ordinary rows; 0 if no text loops."""
        if step % self.updates_each == 0 or not len(self._texts):
            round_number = step // self.updates_each
            drawn = round_number * self.prompt  # from each stream for each of its prompts
            prompts = torch.cat([stream.windows(drawn * count, count, self.prompt) for stream, count in self.streams])
            ids = self.end_id, self.pad_id, self.banned_ids
            self._texts = greedy_texts(trainee.decoder.model, prompts, self.written, *ids)
            self._closed = repeats(self._texts, self.prompt, self.pad_id)
            share = self._closed.sum(1) / (self._texts[:, self.prompt :] != self.pad_id).sum(1).clamp(min=1)
            self._closed &= (share >= self.loops_from)[:, None]
        return self.weight * unlikelihood(trainee, self._texts, self._closed)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for resuming."""
        return {"texts": self._texts, "closed": self._closed}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a state from `state_dict`."""
        self._texts, self._closed = state["texts"], state["closed"]

    @property
    def looping(self) -> float:
        """Share of the most recent texts that loop."""
        return float(self._closed.any(1).float().mean())


@torch.no_grad()
def greedy_texts(
    model: PreTrainedModel, prompts: Tensor, num_new: int, end_id: int, pad_id: int, banned_ids: Sequence[int]
) -> Tensor:
    """Continue `prompts` [B, P] greedily to [B, P + num_new]; padding follows an end of text."""
    was_training = model.training
    model.eval()
    texts = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=num_new,
        do_sample=False,
        bad_words_ids=[[number] for number in banned_ids],
        eos_token_id=end_id,
        pad_token_id=pad_id,
    )
    model.train(was_training)
    whole = torch.full((len(prompts), prompts.shape[1] + num_new), pad_id)
    whole[:, : texts.shape[1]] = texts
    return whole


def repeats(texts: Tensor, num_prompt: int, pad_id: int) -> Tensor:
    """[B, L] bool: the id completes a 4-gram that already occurred after the prompt."""
    closed = torch.zeros_like(texts, dtype=torch.bool)
    for row, text in enumerate(texts.tolist()):
        seen: set[tuple[int, ...]] = set()
        for end in range(num_prompt + GRAM, len(text) + 1):
            if text[end - 1] == pad_id:
                break
            gram = tuple(text[end - GRAM : end])
            closed[row, end - 1] = gram in seen
            seen.add(gram)
    return closed


def unlikelihood(trainee: Trainee, texts: Tensor, closed: Tensor) -> Tensor:
    """Return -log(1 - p), averaged over the ids of `texts` [B, L] that `closed` marks; 0 if it marks none."""
    positions = torch.arange(texts.shape[1]).expand_as(texts)
    hidden = trainee.decoder.rows(texts, positions, causal(torch.zeros_like(texts)))[:, :-1]
    marked = closed[:, 1:]
    logits = trainee.decoder.logits(hidden[marked])
    chance = logits.log_softmax(-1).gather(1, texts[:, 1:][marked][:, None])[:, 0].exp()
    losses = -torch.log1p(-chance.clamp(max=1 - 1e-4))
    return losses.sum() / closed.sum().clamp(min=1)
