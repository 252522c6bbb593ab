"""The messages that a worker sends: hello, and reports of steps and sequences."""

from __future__ import annotations

from collections.abc import Sequence

from space_kernels.sampling.sampler import IdLogprobs
from space_model.encoder.text_encoder import EncoderFacts
from space_proto import worker_pb2 as pb
from torch import Tensor

from space_server.batch import RunningSequence, SequenceEnd
from space_server.drafts import BY_MASKS, DraftOrigin
from space_server.model_runner import SequenceOutput, StepOutput
from space_server.step_cost import StepCost, StepShape

TOO_LARGE = (
    "There is not enough memory on the device for the sequence's step, even alone. Send a shorter prompt, or start the "
    "worker with a smaller --kv-memory or --prefill-budget."
)


def failure_message(what: str, error: Exception) -> str:
    """Return one line: what failed, and the first line of the error."""
    line = str(error).partition("\n")[0][:200]
    return f"{what}: {type(error).__name__}: {line}"


PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 20

_FINISH = {SequenceEnd.EOS: pb.FINISH_EOS, SequenceEnd.STOP_ID: pb.FINISH_STOP_ID, SequenceEnd.LENGTH: pb.FINISH_LENGTH}

_SOURCE = {
    DraftOrigin.MASKS: pb.DRAFT_SOURCE_MASKS,
    DraftOrigin.HEAD: pb.DRAFT_SOURCE_HEAD,
    DraftOrigin.MODEL: pb.DRAFT_SOURCE_MODEL,
    DraftOrigin.MTP: pb.DRAFT_SOURCE_MTP,
    DraftOrigin.EAGLE: pb.DRAFT_SOURCE_EAGLE,
    DraftOrigin.LOOKUP: pb.DRAFT_SOURCE_LOOKUP,
    DraftOrigin.PREDICTION: pb.DRAFT_SOURCE_PREDICTION,
    DraftOrigin.GRAMMAR: pb.DRAFT_SOURCE_GRAMMAR,
}


def commit(output: SequenceOutput, report: pb.StepReport) -> None:
    """Apply the output to its sequence, and append a report of it to `report`."""
    plan, sequence = output.plan, output.plan.sequence
    num_drafted = plan.layout.num_drafts
    decoded, origin = sequence.num_emitted > 0, sequence.origin
    by_masks = num_drafted if origin is BY_MASKS else sequence.num_mask_drafts
    output.commit()
    # Rare fields are set only where present: every keyword argument here costs time.
    part = report.sequences.add(
        seq_id=sequence.seq_id,
        tokens=output.tokens,
        num_computed=sequence.num_computed,
        decoded=decoded,
    )
    if num_drafted:
        part.num_drafted, part.num_accepted = num_drafted, output.num_accepted
    if output.error is not None:
        part.finish, part.error = pb.FINISH_ERROR, output.error
    elif output.end is not None:
        part.finish = _finish(sequence, output.end)
    if output.logprobs:
        part.logprobs.extend(map(_logprobs, output.logprobs))
    if output.prompt_logprobs:
        part.prompt_logprobs.extend(map(_logprobs, output.prompt_logprobs))
    if output.pooling is not None and output.end is not None:
        part.embedding.values = vector_bytes(output.pooling.vector())
    if any(output.num_predicted):
        part.num_predicted.extend(output.num_predicted)
    if num_drafted and origin is not BY_MASKS and origin.source is not DraftOrigin.MASKS:
        part.draft_source, part.num_mask_drafts = _SOURCE[origin.source], min(by_masks, num_drafted)


def _finish(sequence: RunningSequence, end: SequenceEnd) -> pb.Finish.ValueType:
    if end is SequenceEnd.LENGTH and sequence.limits.needs_readmission(len(sequence.ids), sequence.num_prompt):
        return pb.FINISH_READMIT
    return _FINISH[end]


def vector_bytes(vector: Tensor) -> bytes:
    """Return a vector on the CPU as float32 in little-endian order."""
    return vector.detach().float().numpy().astype("<f4").tobytes()


def says_something(report: pb.StepReport) -> bool:
    """Whether the report is more than a heartbeat."""
    return bool(report.stepped or report.sequences or report.released or report.loras or report.encoded)


def encoder_message(facts: EncoderFacts) -> pb.Encoder:
    """Return what a router needs to know of the encoder."""
    return pb.Encoder(
        hash=facts.hash,
        tokenizer_hash=facts.tokenizer_hash,
        window=facts.window,
        vocab_size=facts.vocab_size,
        num_types=facts.num_types,
        num_values=facts.num_values,
        scores_pairs=facts.scores_pairs,
        is_normalised=facts.is_normalised,
    )


def report_paused(sequence: RunningSequence, report: pb.StepReport) -> None:
    """Report that the sequence needs another page; `report` holds at most one report per sequence."""
    sequence.paused = True
    part = next((one for one in report.sequences if one.seq_id == sequence.seq_id), None)
    if part is None:
        part = report.sequences.add(seq_id=sequence.seq_id, num_computed=sequence.num_computed)
    part.paused = True


def _logprobs(entry: IdLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(id=entry.id, logprob=entry.logprob, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs)


def count_steps(stats: pb.StepStats, steps: Sequence[StepOutput], cost: StepCost) -> None:
    """Write the steps to `stats`, which are empty; what is 0 is not written, because every access takes time."""
    chain_rows = mask_rows = prefill_rows = num_sequences = 0
    forward = sample = draft = plain = 0.0
    counts: list[int] = []  # decoding sequences by number of drafts
    for step in steps:
        for output in step.outputs:
            if output.plan.closes:
                layout = output.plan.layout
                num_drafts = layout.num_drafts
                chain_rows += 1 + num_drafts
                mask_rows += layout.num_masks
                if output.plan.num_pending == 1:
                    if num_drafts >= len(counts):
                        counts += [0] * (num_drafts + 1 - len(counts))
                    counts[num_drafts] += 1
        if step.outputs:
            shape, times = step.shape, step.times
            prefill_rows += shape.num_prefill_rows
            forward += times.forward
            sample += times.sample
            draft += times.draft
            num_sequences += len(step.outputs)
            plain += cost.seconds(StepShape.plain(shape.num_sequences, shape.num_context))
    stats.num_sequences, stats.forward_seconds = num_sequences, forward
    if chain_rows:
        stats.chain_rows = chain_rows
        stats.draft_length_counts.extend(counts)
    if mask_rows:
        stats.mask_rows = mask_rows
    if sample:
        stats.sample_seconds = sample
    if draft:
        stats.draft_seconds = draft
    if prefill_rows:
        stats.prefill_rows = prefill_rows
    else:
        stats.plain_step_seconds = plain
