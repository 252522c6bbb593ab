"""Conversion between the engine's types and the worker protocol's messages."""

from __future__ import annotations

from collections.abc import Sequence

from space_proto import worker_pb2

from space_router.engine.errors import ProtocolViolation
from space_router.engine.request.request import Delta, Finish, Grammar, SamplingOptions, TokenLogprobs
from space_router.engine.request.request_state import RequestState

FINISH = {
    worker_pb2.FINISH_EOS: Finish.EOS,
    worker_pb2.FINISH_STOP_ID: Finish.STOP_ID,
    worker_pb2.FINISH_LENGTH: Finish.LENGTH,
}

GRAMMAR = {
    "json_schema": worker_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    "json_object": worker_pb2.GRAMMAR_KIND_JSON_OBJECT,
    "regex": worker_pb2.GRAMMAR_KIND_REGEX,
    "choice": worker_pb2.GRAMMAR_KIND_CHOICE,
    "lark": worker_pb2.GRAMMAR_KIND_LARK,
}


def admit(
    live: RequestState, seq_id: int, pages: Sequence[int], num_cached: int, max_draft_length: int
) -> worker_pb2.Command:
    """Return the Admit command of a request; ids emitted in earlier admissions follow its prompt."""
    request = live.request
    return worker_pb2.Command(
        admit=worker_pb2.Admit(
            seq_id=seq_id,
            ids=live.ids,
            num_prompt=live.num_prompt,
            num_cached=num_cached,
            pages=pages,
            sampling=sampling(request.sampling),
            limits=worker_pb2.Limits(max_tokens=live.max_tokens, eos_ids=request.eos_ids, stop_ids=request.stop_ids),
            max_draft_length=max_draft_length,
            num_logprobs=request.num_logprobs,
            want_logprobs=request.want_logprobs,
            num_prompt_logprobs=request.num_prompt_logprobs if live.wants_prompt_logprobs else None,
            adapter=request.adapter,
            prediction=request.prediction or (),
            traceparent="" if request.trace is None else request.trace.admitted(),
        )
    )


def extend(seq_id: int, pages: Sequence[int]) -> worker_pb2.Command:
    return worker_pb2.Command(extend=worker_pb2.Extend(seq_id=seq_id, pages=pages))


def release(seq_id: int) -> worker_pb2.Command:
    return worker_pb2.Command(release=worker_pb2.Release(seq_id=seq_id))


def delta(part: worker_pb2.SequenceReport) -> Delta:
    """Return the delta of one sequence's report. Raises ProtocolViolation.

    Reading a message's fields is slow, so each is read once, here.
    """
    logprobs, prompt_logprobs, predicted = part.logprobs, part.prompt_logprobs, part.num_predicted
    return Delta(
        tuple(part.tokens),
        _logprobs(part, logprobs) if logprobs else (),
        _logprobs(part, prompt_logprobs) if prompt_logprobs else (),
        FINISH.get(part.finish),
        part.num_drafted,
        part.num_accepted,
        part.decoded,
        tuple(predicted) if predicted else (),
    )


def _logprobs(
    part: worker_pb2.SequenceReport, messages: Sequence[worker_pb2.TokenLogprobs]
) -> tuple[TokenLogprobs, ...]:
    if any(len(m.top_ids) != len(m.top_logprobs) for m in messages):
        raise ProtocolViolation(f"sequence {part.seq_id} has alternatives without logprobs")
    return tuple(
        TokenLogprobs(id=m.id, logprob=m.logprob, top=tuple(zip(m.top_ids, m.top_logprobs, strict=True)))
        for m in messages
    )


def sampling(options: SamplingOptions) -> worker_pb2.Sampling:
    """Return the sampling parameters as a message."""
    values = {name: getattr(options, name) for name in options.__dataclass_fields__}
    values["grammar"] = None if options.grammar is None else grammar(options.grammar)
    values["bad_words"] = [worker_pb2.IdRun(ids=run) for run in options.bad_words]
    return worker_pb2.Sampling(**{**values, "logit_bias": dict(options.logit_bias)})


def grammar(wanted: Grammar) -> worker_pb2.Grammar:
    """Return a grammar as a message."""
    return worker_pb2.Grammar(kind=GRAMMAR[wanted.kind], source=wanted.source)
