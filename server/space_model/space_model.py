"""A loaded model: computes hidden states of rows, and logits on demand."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from space_model.adapters import Drafting
from space_model.draft_network import DraftNetwork
from space_model.geometry.forward_batch import ForwardBatch
from space_model.heads import DraftHeadWeights, OutputHead, ShardedHead
from space_model.lora import LoadedLoras
from space_model.model_facts import ModelFacts
from space_model.networks.llama_compiled_network import CompiledLlama
from space_model.networks.network import USUAL_ROOM, Network, PagedKV, StateRoom, Taps
from space_model.networks.sampled_step import MaskSource, SampledStep
from space_model.recurrent_head import RecurrentHead


class SpaceModel:
    """A decoder with its output head, the checkpoint's draft head if it has one, and the loaded adapters. On the CPU
    all methods are row-invariant: a row's bits do not depend on other rows, their number, or the threads."""

    def __init__(
        self,
        facts: ModelFacts,
        network: Network,
        head: OutputHead | ShardedHead,
        drafting: Drafting,
        recurrent_heads: Mapping[int | None, RecurrentHead],
        loras: LoadedLoras | None = None,
    ) -> None:
        """`recurrent_heads`: by adapter; None: the checkpoint's own. `loras`: None: it takes
        none."""
        self.facts = facts
        self.drafting, self._recurrent_heads = drafting, recurrent_heads
        self._network, self._head = network, head
        self.loras = loras
        self.draft_network: DraftNetwork | None = None

    def drafted_by(self, network: DraftNetwork) -> SpaceModel:
        """Return this model, for which `network` drafts in place of recurrent heads."""
        found = copy(self)
        found.draft_network, found._recurrent_heads = network, {}
        adapters = tuple(replace(adapter, head=network.facts) for adapter in self.facts.adapters)
        kv_bytes = self.facts.kv_bytes_per_token + network.kv_bytes_per_token
        found.facts = replace(self.facts, head=network.facts, adapters=adapters, kv_bytes_per_token=kv_bytes)
        return found

    def draft_head_of(self, adapter: int | None) -> DraftHeadWeights | None:
        """Return the draft head trained with this adapter's masks; None: with the checkpoint's own masks."""
        return self.drafting.draft_head if adapter is None else self.drafting.adapters[adapter].draft_head

    @property
    def network(self) -> Network:
        """Return what computes hidden states."""
        return self._network

    def recurrent_head_of(self, adapter: int | None) -> RecurrentHead | None:
        """Return the adapter's recurrent draft head; None: the checkpoint's own. None if there is none."""
        return self._recurrent_heads.get(adapter)

    def allocate_kv(self, num_blocks: int, block_size: int, room: StateRoom = USUAL_ROOM) -> PagedKV:
        """Allocate a KV cache of num_blocks·block_size slots, the draft network's of as many, and room for the states
        of recurrent layers."""
        kv, network = PagedKV.allocate(self.facts, num_blocks, block_size, room=room), self.draft_network
        return kv if network is None else replace(kv, draft=network.allocate_kv(num_blocks, block_size))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """Compute the batch's rows: [R, hidden] after the final norm. Stores the chain rows' K and V in `kv`, and what
        the draft network reads of them."""
        if self.draft_network is None or kv.draft is None:
            return self._network.forward(batch, kv)
        tapped = self.draft_network.tapped
        taps = None if tapped is None else Taps.of(tapped.layers, batch, self.facts)
        hidden = self._network.forward(batch, kv, taps)
        kv.draft.keep(batch, hidden if tapped is None or taps is None else tapped.fused(taps.states))
        return hidden

    def sampled_step(self, kv: PagedKV, banned_ids: Tensor) -> SampledStep | None:
        """Return what computes and samples steps on this KV cache in one call; None where this model has no such call.
        banned_ids [B] int64: never sampled."""
        network, head = self._network, self._head.logits_linear if isinstance(self._head, OutputHead) else None
        if not isinstance(network, CompiledLlama) or network.whole_library is None or head is None:
            return None
        if self.draft_network is not None or kv.draft is not None:
            return None
        sources: dict[int | None, MaskSource] = {}
        for number in (None, *range(len(self.drafting.adapters))):
            drafts = self.draft_head_of(number)
            gated = None if number is None else self.drafting.adapters[number].gated
            if drafts is None or drafts.compiled is None or (gated is not None and gated.mask_inputs is not None):
                continue
            mask_ids = self.facts.mask_ids if gated is None else ()
            sources[number] = MaskSource(drafts.compiled, mask_ids, len(mask_ids) if gated is None else gated.num_masks)
        facts = self.facts
        return SampledStep(network, head, facts.vocab_size, kv, banned_ids, sources=sources, head_rows=facts.head_rows)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32, with the family's scale and soft cap."""
        return self._head.logits(hidden)

    @torch.inference_mode()
    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N, hidden], ids [N, M] -> [N, M] float32: the logits of those ids."""
        return self._head.logits_of(hidden, ids)

    @torch.inference_mode()
    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]: rows of the embedding table, without a family's embedding scale."""
        return self._network.embed(ids)
