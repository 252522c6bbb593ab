"""What computes a step: the interface of networks, and their paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from space_kernels.attention.attention import KVPages
from space_kernels.paging.step_rows import Ints
from space_kernels.recurrence.states import RecurrentStates
from torch import Tensor

from space_model.geometry.forward_batch import ForwardBatch
from space_model.lora import Lora
from space_model.model_facts import ModelFacts


class StateRoom(NamedTuple):
    """For how many sequences and drafts recurrent states are kept."""

    num_sequences: int
    most_drafts: int  # of one sequence in one step
    num_kept: int = 0  # states that can be kept for other sequences


USUAL_ROOM = StateRoom(8, 16)
"""Where a caller does not say."""


@dataclass(frozen=True)
class PagedKV:
    """Keys and values by layer: [num_blocks, kv_heads, block_size, head_dim] each. Layers may differ in heads and head
    size, and a layer that shares the keys and values of another has that one's. In latent attention values are a part
    of the keys, and their tensors the same."""

    keys: list[Tensor]
    values: list[Tensor]
    num_blocks: int
    block_size: int
    states: RecurrentStates | None = None  # of recurrent layers; None: there are none
    draft: DraftKV | None = None  # of the network that drafts, in blocks of the same numbers; None: there is none

    def attends(self, number: int) -> bool:
        """Return whether a layer has keys and values."""
        return self.keys[number].shape[1] > 0

    def recurs(self, number: int) -> bool:
        """Return whether a layer has recurrent states."""
        return self.states is not None and number in self.states.layers

    def layer(self, number: int) -> KVPages:
        """Return one layer's pages."""
        return KVPages(self.keys[number], self.values[number])

    @classmethod
    def allocate(
        cls,
        facts: ModelFacts,
        num_blocks: int,
        block_size: int,
        *,
        room: StateRoom = USUAL_ROOM,
        in_turn: bool = False,
    ) -> PagedKV:
        """Allocate blocks of zeros, and room for recurrent states where layers have them; every page is touched now, so
        that lack of memory fails here. `in_turn`: layers with as many heads of one size have the same pages, for one
        layer at a time."""
        layers = [facts.kv_of(number) for number in range(facts.num_layers)]

        def pages(*, values: bool = False) -> list[Tensor]:
            made: dict[object, Tensor] = {}
            for layer in layers:
                place = layer[:2] if in_turn else layer.source
                if place not in made:
                    dim = layer.value_dim if values else layer.head_dim
                    shape = (num_blocks, layer.kv_heads, block_size, dim)
                    made[place] = torch.zeros(shape, dtype=facts.kv_dtype, device=facts.device)
            return [made[layer[:2] if in_turn else layer.source] for layer in layers]

        keys = pages()
        recurrent = {number: state for number, state in enumerate(facts.states) if state is not None}
        states = None
        if recurrent:
            sizes = room.num_sequences, room.most_drafts
            states = RecurrentStates(recurrent, *sizes, facts.device, num_kept=room.num_kept, in_turn=in_turn)
        return cls(keys, keys if facts.latent_dim is not None else pages(values=True), num_blocks, block_size, states)


# one sequence's slots
# [0 ........... num_read_of)            [num_read_of ...
#  the text that is known, read          unread, or keys of drafts that were tried
@dataclass(frozen=True)
class DraftKV:
    """Keys and values of a draft network, and how much of each block they cover."""

    pages: PagedKV
    num_read: Ints  # [num_blocks] leading slots of each block that were read
    states: Tensor | None = None  # [num_blocks, block_size, width] the model's own, for a network that reads them

    @classmethod
    def of(cls, pages: PagedKV, states: Tensor | None = None) -> DraftKV:
        """Return the record of pages that were not read."""
        return cls(pages, np.zeros(pages.num_blocks, dtype=np.int64), states)

    def keep(self, batch: ForwardBatch, hidden: Tensor) -> None:
        """Keep the states [chain rows and more, width] of the model's chain rows, where the network reads them."""
        if self.states is not None:
            slots = torch.from_numpy(batch.rows.chain_slots()).to(hidden.device)
            self.states.view(-1, self.states.shape[2])[slots] = hidden[: batch.num_chain_rows]

    def states_at(self, batch: ForwardBatch) -> Tensor | None:
        """Return the states [R, width] that the chain rows of a batch read, with zeros for padding; None: none."""
        if self.states is None:
            return None
        slots = torch.from_numpy(batch.rows.chain_slots()).to(self.states.device)
        found = self.states.new_zeros(len(batch.ids), self.states.shape[2])
        found[: batch.num_chain_rows] = self.states.view(-1, self.states.shape[2])[slots]
        return found

    def forget(self, pages: Sequence[int]) -> None:
        """Count these blocks as unread: they hold another text from now on."""
        self.num_read[list(pages)] = 0

    def num_read_of(self, pages: Ints) -> int:
        """Return how many leading positions of a sequence on these pages were read."""
        read = self.num_read[pages]
        whole = read == self.pages.block_size
        first = int(whole.argmin()) if not whole.all() else len(pages)
        return first * self.pages.block_size + (int(read[first]) if first < len(pages) else 0)

    def mark_read(self, pages: Ints, start: int, stop: int) -> None:
        """Count the positions from `start` to before `stop` as read; those before `start` are."""
        size = self.pages.block_size
        last = stop // size
        self.num_read[pages[start // size : last]] = size
        if stop % size:
            self.num_read[pages[last]] = stop % size


@dataclass(frozen=True)
class Taps:
    """The inputs of chosen layers, copied while the network computes the rows."""

    layers: tuple[int, ...]  # from 0 to the number of layers, which stands for the last one's output
    states: Tensor  # [chain rows, len(layers), hidden]; padding and mask rows are not copied

    @classmethod
    def of(cls, layers: tuple[int, ...], batch: ForwardBatch, facts: ModelFacts) -> Taps:
        """Return room for these layers' inputs, of a model with these facts."""
        shape = batch.num_chain_rows, len(layers), facts.hidden_size
        return cls(layers, torch.empty(shape, dtype=facts.dtype, device=facts.device))

    def take(self, number: int, hidden: Tensor) -> None:
        """Copy the input of layer `number`, hidden [R, hidden], if it is chosen."""
        for place, layer in enumerate(self.layers):
            if layer == number:
                self.states[:, place] = hidden[: len(self.states)]


class Network(Protocol):
    """The model from ids to the input of the head."""

    def forward(self, batch: ForwardBatch, kv: PagedKV, taps: Taps | None = None) -> Tensor:
        """[R, hidden] after the final norm. `taps`: filled with the inputs of its layers."""

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]: rows of the embedding table, unscaled."""

    def add_lora(self, number: int, lora: Lora) -> None:
        """Let a LoRA act on the rows that name it by `number`. Raises UnsupportedModel where it cannot."""

    def remove_lora(self, number: int) -> None:
        """Drop a LoRA that no step under way uses."""

    # The parts of `forward`, separately, for the check at load. The batch has no masks.

    def enter(self, batch: ForwardBatch) -> Tensor:
        """[R, hidden]: the input of the first layer."""

    def layer(self, number: int, hidden: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden] -> [R, hidden]: one layer alone; its K and V are stored in the KV cache."""

    def norm(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, hidden]: the final norm alone."""
