"""What a draft network is: it drafts for a model, and keeps keys and values of its own.

A block of the router's holds the same positions of a sequence in the model's pages and in the draft network's
(`PagedKV.draft`), so sequences that share a prefix share both. The second are filled late: a position is read by the
draft network when drafts are wanted behind it, not when the model computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from space_model.geometry.forward_batch import ForwardBatch
from space_model.model_facts import HeadFacts
from space_model.networks.network import DraftKV, PagedKV


@dataclass(frozen=True)
class TappedStates:
    """Hidden states of inner layers that a draft network reads in place of the model's last."""

    layers: tuple[int, ...]  # whose inputs, as of networks.network.Taps
    fused: Callable[[Tensor], Tensor]  # [N, len(layers), the model's hidden] -> [N, width], what is kept of them


class DraftNetwork(Protocol):
    """Drafts one id after the other for a model of the same vocabulary.

    Row p reads the id of position p + `lag`, the keys of the rows before it and, where it has a `width`, what is kept
    of the model's hidden states of position p. It predicts the id behind the one that it reads.
    """

    @property
    def lag(self) -> int:
        """Return 1 for a network that reads hidden states, else 0."""

    @property
    def width(self) -> int:
        """Return the numbers that are kept of each position's hidden states; 0: it reads ids alone."""

    @property
    def tapped(self) -> TappedStates | None:
        """Return the inner layers whose states it reads; None: it reads the last hidden state, or none."""

    @property
    def facts(self) -> HeadFacts:
        """Return its kind and the most drafts of a step."""

    @property
    def name(self) -> str:
        """Return its name, as given by the user."""

    @property
    def window(self) -> int:
        """Return the maximum positions that it reads."""

    @property
    def vocab_size(self) -> int:
        """Return the number of ids that it reads: 0 to that."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of keys, values and hidden state of one token."""

    def allocate_kv(self, num_blocks: int, block_size: int) -> DraftKV:
        """Allocate num_blocks · block_size slots."""

    def forward(self, batch: ForwardBatch, kv: PagedKV, states: Tensor | None) -> Tensor:
        """[R, hidden]: the input of `logits`, and the states that the next draft reads. `states` [R, width]: None
        without a width. Stores the rows' keys and values in `kv`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, D] float32, of its draft vocabulary."""

    def widened(self, logits: Tensor, vocab_size: int) -> Tensor:
        """[N, D] -> [N, vocab_size]: -inf outside the draft vocabulary."""

    def best(self, logits: Tensor) -> Tensor:
        """[N, D] -> [N] int64: the most probable ids."""
