"""What a report must never say: a worker that does is broken, and nothing it says is passed on."""

from __future__ import annotations

from space_proto import worker_pb2

from space_router.engine.errors import ProtocolViolation
from space_router.engine.model_facts import ModelFacts
from space_router.engine.sequence import Sequence


def check_report_no(report_no: int, last: int) -> None:
    """Reports are numbered 1, 2, 3, ... without gaps."""
    if report_no != last + 1:
        raise ProtocolViolation(f"report {report_no} came after report {last}")


def check_sequence(part: worker_pb2.SequenceReport, sequence: Sequence | None, facts: ModelFacts) -> Sequence:
    """The sequence that a part of a report is about; raises ProtocolViolation where the two do not fit."""
    if sequence is None:
        raise ProtocolViolation(f"a report about sequence {part.seq_id}, which does not run")
    live, who = sequence.live, f"sequence {part.seq_id}"
    num_tokens = len(part.tokens)
    if sequence.finished and (num_tokens or part.finish):
        raise ProtocolViolation(f"{who} goes on after its end")
    if live.num_generated + num_tokens > live.max_tokens:
        raise ProtocolViolation(f"{who} emitted {live.num_generated + num_tokens} ids, {live.max_tokens} are allowed")
    if num_tokens and max(part.tokens) >= facts.vocab_size:
        raise ProtocolViolation(f"{who} emitted id {max(part.tokens)}; there are {facts.vocab_size}")
    bound = min(len(live.ids) + num_tokens - 1, sequence.num_slots)
    if part.num_computed > bound:
        raise ProtocolViolation(f"{who} has computed {part.num_computed} ids; at most {bound} are possible")
    if (num_tokens or part.decoded) and part.num_computed < sequence.computed:
        raise ProtocolViolation(f"{who} has computed {part.num_computed} ids after {sequence.computed}")
    if part.num_accepted > part.num_drafted or (part.decoded and num_tokens > part.num_accepted + 1):
        raise ProtocolViolation(
            f"{who} emitted {num_tokens} ids in a step that accepted {part.num_accepted} of {part.num_drafted} drafts"
        )
    if live.request.want_logprobs and len(part.logprobs) != num_tokens:
        raise ProtocolViolation(f"{who} has {len(part.logprobs)} logprobs for {num_tokens} ids")
    return sequence
