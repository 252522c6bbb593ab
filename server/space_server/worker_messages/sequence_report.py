"""Reports of sequences after a step."""

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


def commit(output: SequenceOutput, said: pb.StepReport) -> None:
    """Apply the output to its sequence, and append a report of it to `said`."""
    plan, sequence = output.plan, output.plan.sequence
    num_drafted = plan.layout.num_drafts
    decoded, origin = sequence.num_emitted > 0, sequence.origin
    by_masks = num_drafted if origin is BY_MASKS else sequence.num_mask_drafts
    output.commit()
    # Rare fields are set only where present: every keyword argument here costs time.
    report = said.sequences.add(
        seq_id=sequence.seq_id,
        tokens=output.tokens,
        num_drafted=num_drafted,
        num_accepted=output.num_accepted,
        num_computed=sequence.num_computed,
        decoded=decoded,
    )
    if output.error is not None:
        report.finish, report.error = pb.FINISH_ERROR, output.error
    elif output.end is not None:
        report.finish = _FINISH[output.end]
    if output.logprobs:
        report.logprobs.extend(map(_logprobs, output.logprobs))
    if output.prompt_logprobs:
        report.prompt_logprobs.extend(map(_logprobs, output.prompt_logprobs))
    if any(output.num_predicted):
        report.num_predicted.extend(output.num_predicted)
    if num_drafted and origin is not BY_MASKS and origin.source is not DraftOrigin.MASKS:
        report.draft_source, report.num_mask_drafts = _SOURCE[origin.source], min(by_masks, num_drafted)


def say_paused(sequence: RunningSequence, said: pb.StepReport) -> None:
    """Report that the sequence needs another page; `said` holds at most one report per sequence."""
    sequence.paused = True
    report = next((one for one in said.sequences if one.seq_id == sequence.seq_id), None)
    if report is None:
        report = said.sequences.add(seq_id=sequence.seq_id, num_computed=sequence.num_computed)
    report.paused = True


def _logprobs(entry: IdLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(id=entry.id, logprob=entry.logprob, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs)
