"""A rank other than 0: runs the rows of each message from rank 0."""

from __future__ import annotations

from collections.abc import Callable

import torch
from space_model.geometry.forward_batch import ForwardBatch
from space_model.networks.paged_kv import PagedKV
from space_model.space_model import SpaceModel

from space_server.tensor_parallel.plan_message import MessageLost, PlanMessageKind, PlanReader
from space_server.tensor_parallel.ranks import RankGroup


@torch.inference_mode()
def follow(model: SpaceModel, group: RankGroup, free: Callable[[], int] = lambda: 0) -> None:
    """Execute rank 0's messages until END. `free`: returns the bytes that this rank can still allocate."""
    facts, reader = model.facts, PlanReader()
    kv: PagedKV | None = None
    while True:
        try:
            message = reader.read(group.receive())
        except MessageLost as error:
            group.lost(str(error))
        match message.kind:
            case PlanMessageKind.PAGES:
                num_blocks, block_size = message.figures
                kv = None  # free the old pages first
                kv = model.allocate_kv(num_blocks, block_size)
            case PlanMessageKind.ROWS:
                if kv is None:
                    group.lost("Rank 0 sent rows before pages.")
                batch = ForwardBatch.build(
                    message.segments,
                    block_size=kv.block_size,
                    mask_ids=facts.mask_ids,
                    adapter_masks=[adapter.num_masks for adapter in facts.adapters],
                    device=facts.device,
                )
                if len(batch.ids) != message.figures[0]:
                    group.lost(f"Rank 0 lays out {message.figures[0]} rows, rank {group.rank} {len(batch.ids)}.")
                model.forward(batch, kv)
            case PlanMessageKind.HEAD:
                room = torch.empty(message.figures[0], facts.hidden_size, dtype=facts.dtype, device=facts.device)
                model.logits(group.share(room))
            case PlanMessageKind.MEMORY:
                group.least(free())
            case PlanMessageKind.BEAT:
                group.answer()
            case PlanMessageKind.END:
                return
