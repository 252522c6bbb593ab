"""Protocol checks of worker reports. No part of a violating report is applied."""

from __future__ import annotations

from space_proto import worker_pb2

from space_router.engine.errors import ProtocolViolation
from space_router.engine.model_facts import WorkerModelFacts
from space_router.engine.request.request import Delta
from space_router.engine.request.sequence import SequenceStep, WorkerSequence


def check_report_no(report_no: int, last: int) -> None:
    """Raise ProtocolViolation unless reports are numbered 1, 2, 3, ... without gaps."""
    if report_no != last + 1:
        raise ProtocolViolation(f"report {report_no} came after report {last}")


def check_distinct(report: worker_pb2.StepReport) -> None:
    """Raise ProtocolViolation if a report names a sequence or a release twice."""
    for seq_ids in ([part.seq_id for part in report.sequences], report.released):
        if len(set(seq_ids)) < len(seq_ids):
            raise ProtocolViolation(f"report {report.report_no} names a sequence twice: {list(seq_ids)[:20]}")


def check_released(seq_id: int, sequence: WorkerSequence | None) -> WorkerSequence:
    """Return the sequence whose release is acknowledged. Raises ProtocolViolation if none was requested."""
    if sequence is None or sequence.step is not SequenceStep.RELEASED:
        raise ProtocolViolation(f"sequence {seq_id} is acknowledged as released, but was not to be")
    return sequence


def check_sequence(
    part: worker_pb2.SequenceReport, delta: Delta, sequence: WorkerSequence | None, facts: WorkerModelFacts
) -> WorkerSequence:
    """Return the sequence that a part of a report is about. Raises ProtocolViolation if the part is impossible for it.

    `delta`: the part as read by `worker_messages.delta`.
    """
    if sequence is None:
        raise ProtocolViolation(f"a report about sequence {part.seq_id}, which does not run")
    live, num_tokens = sequence.live, len(delta.tokens)
    num_ids, num_computed = len(live.ids) + num_tokens, part.num_computed
    bound = min(num_ids - 1, sequence.num_slots)
    wrong = None
    if sequence.finished and (num_tokens or part.finish):
        wrong = "goes on after its end"
    elif num_ids > live.num_prompt + live.max_tokens:
        wrong = f"emitted {num_ids - live.num_prompt} ids, {live.max_tokens} are allowed"
    elif num_tokens and max(delta.tokens) >= facts.vocab_size:
        wrong = f"emitted id {max(delta.tokens)}; there are {facts.vocab_size}"
    elif num_computed > bound:
        wrong = f"has computed {num_computed} ids; at most {bound} are possible"
    elif num_computed < sequence.computed and (num_tokens or delta.decoded):
        wrong = f"has computed {num_computed} ids after {sequence.computed}"
    elif delta.accepted > delta.drafted or (delta.decoded and num_tokens > delta.accepted + 1):
        wrong = f"emitted {num_tokens} ids where {delta.accepted} of {delta.drafted} drafts were accepted"
    elif live.request.want_logprobs and len(delta.logprobs) != num_tokens:
        wrong = f"has {len(delta.logprobs)} logprobs for {num_tokens} ids"
    if wrong is not None:
        raise ProtocolViolation(f"sequence {part.seq_id} {wrong}")
    return sequence
