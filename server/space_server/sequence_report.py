"""What the router is told of a sequence after a step."""

from __future__ import annotations

from space_kernels.sampling import IdLogprobs
from space_proto import worker_pb2 as pb

from space_server.drafts import Source
from space_server.limits import End
from space_server.step import Advance

_FINISH = {
    None: pb.FINISH_NONE,
    End.EOS: pb.FINISH_EOS,
    End.STOP_ID: pb.FINISH_STOP_ID,
    End.LENGTH: pb.FINISH_LENGTH,
}

_SOURCE = {
    Source.MASKS: pb.DRAFT_SOURCE_MASKS,
    Source.LOOKUP: pb.DRAFT_SOURCE_LOOKUP,
    Source.PREDICTION: pb.DRAFT_SOURCE_PREDICTION,
    Source.GRAMMAR: pb.DRAFT_SOURCE_GRAMMAR,
}


def commit(advance: Advance) -> pb.SequenceReport:
    """Let the sequence go on, and say how."""
    plan, sequence = advance.plan, advance.plan.sequence
    decoded, origin, by_masks = sequence.num_emitted > 0, sequence.origin, sequence.num_mask_drafts
    advance.commit()
    report = pb.SequenceReport(
        seq_id=sequence.seq_id,
        tokens=advance.tokens,
        logprobs=[_logprobs(entry) for entry in advance.logprobs],
        num_drafted=plan.layout.num_drafts,
        num_accepted=advance.num_accepted,
        num_computed=sequence.num_computed,
        finish=pb.FINISH_ERROR if advance.error is not None else _FINISH[advance.end],
        error=advance.error or "",
        decoded=decoded,
        prompt_logprobs=[_logprobs(entry) for entry in advance.prompt_logprobs],
        num_predicted=advance.num_predicted if any(advance.num_predicted) else (),
    )
    if origin.source is not Source.MASKS and report.num_drafted:
        report.draft_source, report.num_mask_drafts = _SOURCE[origin.source], min(by_masks, report.num_drafted)
    return report


def _logprobs(entry: IdLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(id=entry.id, logprob=entry.logprob, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs)
