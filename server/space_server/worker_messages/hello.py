"""The first message of a worker to its router."""

from __future__ import annotations

from space_model.model_facts import ModelFacts
from space_proto import worker_pb2 as pb

from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.step_cost import CostOrigin

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 8


def hello_of(
    facts: ModelFacts,
    incarnation: str,
    *,
    num_blocks: int,
    block_size: int,
    max_sequences: int,
    max_draft_length: int,
    takes_grammars: bool,
    synthetic: SyntheticAcceptance | None,
    cost_origin: CostOrigin,
) -> pb.Hello:
    """Describe the worker's model, capacity and features."""
    return pb.Hello(
        protocol_major=PROTOCOL_MAJOR,
        protocol_minor=PROTOCOL_MINOR,
        incarnation=incarnation,
        model_hash=facts.model_hash,
        tokenizer_hash=facts.tokenizer_hash,
        vocab_size=facts.vocab_size,
        block_size=block_size,
        num_blocks=num_blocks,
        window=facts.window,
        max_draft_length=max_draft_length,
        num_masks=facts.num_masks,
        mask_ids=sorted(set(facts.mask_ids)),
        dtype=facts.number_format,
        device=str(facts.device),
        has_draft_head=facts.has_draft_head,
        model_name=facts.name,
        max_sequences=max_sequences,
        attention=facts.attention,
        eos_ids=facts.eos_ids,
        takes_grammars=takes_grammars,
        synthetic_acceptance=synthetic.chances if synthetic is not None else (),
        step_cost_source=cost_origin.source,
        step_cost_reason=cost_origin.reason,
        adapters=[
            pb.Adapter(name=adapter.name, num_masks=adapter.num_masks, has_draft_head=adapter.has_draft_head)
            for adapter in facts.adapters
            if adapter.name
        ],
    )
