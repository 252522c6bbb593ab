"""What the router is told of a sequence after a step."""

from __future__ import annotations

from space_kernels.sampling.choice import IdLogprobs
from space_proto import worker_pb2 as pb

from space_server.batch.limits import SequenceEnd
from space_server.batch.sequence import RunningSequence
from space_server.drafts.drafts import BY_MASKS, DraftOrigin
from space_server.host_runner.host_runner import SequenceOutput

_FINISH = {
    SequenceEnd.EOS: pb.FINISH_EOS,
    SequenceEnd.STOP_ID: pb.FINISH_STOP_ID,
    SequenceEnd.LENGTH: pb.FINISH_LENGTH,
}

_SOURCE = {
    DraftOrigin.MASKS: pb.DRAFT_SOURCE_MASKS,
    DraftOrigin.LOOKUP: pb.DRAFT_SOURCE_LOOKUP,
    DraftOrigin.PREDICTION: pb.DRAFT_SOURCE_PREDICTION,
    DraftOrigin.GRAMMAR: pb.DRAFT_SOURCE_GRAMMAR,
}


def commit(advance: SequenceOutput, said: pb.StepReport) -> None:
    """Let the sequence go on, and say how: at the end of `said`."""
    plan, sequence = advance.plan, advance.plan.sequence
    num_drafted = plan.layout.num_drafts
    decoded, origin = sequence.num_emitted > 0, sequence.origin
    by_masks = num_drafted if origin is BY_MASKS else sequence.num_mask_drafts
    advance.commit()
    # What few sequences have is written where they have it: every field that is named here takes its time.
    report = said.sequences.add(
        seq_id=sequence.seq_id,
        tokens=advance.tokens,
        num_drafted=num_drafted,
        num_accepted=advance.num_accepted,
        num_computed=sequence.num_computed,
        decoded=decoded,
    )
    if advance.error is not None:
        report.finish, report.error = pb.FINISH_ERROR, advance.error
    elif advance.end is not None:
        report.finish = _FINISH[advance.end]
    if advance.logprobs:
        report.logprobs.extend(map(_logprobs, advance.logprobs))
    if advance.prompt_logprobs:
        report.prompt_logprobs.extend(map(_logprobs, advance.prompt_logprobs))
    if any(advance.num_predicted):
        report.num_predicted.extend(advance.num_predicted)
    if num_drafted and origin is not BY_MASKS and origin.source is not DraftOrigin.MASKS:
        report.draft_source, report.num_mask_drafts = _SOURCE[origin.source], min(by_masks, num_drafted)


def say_paused(sequence: RunningSequence, said: pb.StepReport) -> None:
    """It cannot go on without another page; `said` names each sequence once, this one maybe already."""
    sequence.paused = True
    report = next((one for one in said.sequences if one.seq_id == sequence.seq_id), None)
    if report is None:
        report = said.sequences.add(seq_id=sequence.seq_id, num_computed=sequence.num_computed)
    report.paused = True


def _logprobs(entry: IdLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(id=entry.id, logprob=entry.logprob, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs)
