"""Builds a sequence from an Admit message, or says in one line why it is invalid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from hashlib import blake2b

from space_kernels.sampling.noise import request_key
from space_kernels.sampling.sampler import TokenCounts
from space_kernels.sampling.sampling_params import SamplingParams
from space_model.model_facts import ModelFacts
from space_proto import worker_pb2 as pb

from space_server.batch.sequence import RunningSequence, SequenceLimits
from space_server.drafts.drafts import DraftSources


class AdmissionError(ValueError):
    """The sequence cannot run; the message names the bound and the value."""


def admit(
    message: pb.Admit, facts: ModelFacts, *, num_blocks: int, block_size: int, max_drafts: int,
    sources: DraftSources | None = None,
) -> RunningSequence:  # fmt: skip
    """Build the sequence that an Admit message describes. Raises AdmissionError. `max_drafts`: the worker's own bound.
    `sources`: draft sources besides masks; by default only the message's prediction."""
    sources = sources or DraftSources()
    ids = list(message.ids)
    _check_ids(ids, message, facts)
    check_pages(message.pages, num_blocks)
    if message.num_cached % block_size or message.num_cached >= len(ids):
        raise AdmissionError(
            f"num_cached must be a multiple of {block_size} below the {len(ids)} ids; got {message.num_cached}."
        )
    if message.num_cached > len(message.pages) * block_size:
        raise AdmissionError(f"{message.num_cached} cached ids do not fit in {len(message.pages)} pages.")
    if message.HasField("num_prompt_logprobs") and message.num_cached:
        raise AdmissionError("Prompt log-probabilities need num_cached = 0.")
    eos_ids = frozenset(message.limits.eos_ids)
    if message.sampling.HasField("grammar") and not eos_ids:
        eos_ids = frozenset(facts.eos_ids)  # EOS must stay possible where the grammar is complete
    limits = SequenceLimits(
        max_tokens=message.limits.max_tokens,
        window=facts.window,
        eos_ids=eos_ids,
        stop_ids=frozenset(message.limits.stop_ids),
    )
    if limits.num_left(len(ids), message.num_prompt) < 1:
        raise AdmissionError(
            f"Nothing is left to generate: {len(ids)} ids, {message.num_prompt} of them prompt, max_tokens "
            f"{limits.max_tokens}, window {limits.window}."
        )
    _check_prediction(message.prediction, facts)
    adapter, num_masks = _masks(message.adapter, facts)
    sampling_params = _sampling_params(message.sampling, message.limits, facts.vocab_size)
    num_masks = num_masks if sources.masks else 0
    forced, bound = message.num_forced_drafts, min(max_drafts, message.max_draft_length)
    if forced > min(bound, num_masks):
        raise AdmissionError(
            f"{forced} drafts per step are asked for; this worker drafts at most {min(bound, num_masks)} from masks."
        )
    # Without drafts no drafter is needed, except to count which ids of a prediction appeared.
    in_grammar = message.sampling.HasField("grammar")
    drafter = None
    if message.prediction or (bound and not forced):
        drafter = sources.drafter(message.num_prompt, message.prediction, in_grammar=in_grammar)
    counts = None
    if sampling_params.penalises:
        counts = TokenCounts(ids, message.num_prompt, facts.vocab_size, facts.device)
    return RunningSequence(
        seq_id=message.seq_id, ids=ids, num_prompt=message.num_prompt, num_computed=message.num_cached,
        pages=list(message.pages), sampling_params=sampling_params, limits=limits, max_drafts=forced or bound,
        num_forced_drafts=forced, num_logprobs=message.num_logprobs if message.want_logprobs else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        counts=counts, adapter=adapter, num_masks=num_masks, drafter=drafter, waits=in_grammar,
    )  # fmt: skip


def _grammar_digest(grammar: pb.Grammar) -> str:
    """Return a digest that identifies the grammar."""
    return blake2b(grammar.SerializeToString(deterministic=True), digest_size=16).hexdigest()


def _masks(name: str, facts: ModelFacts) -> tuple[int | None, int]:
    """Return the adapter's number (None: the checkpoint's own masks) and its number of masks."""
    try:
        adapter = facts.adapter_number(name)
    except KeyError:
        known = ", ".join(one.name for one in facts.adapters if one.name) or "none"
        raise AdmissionError(f"There is no adapter {name}; this worker has {known}.") from None
    return adapter, facts.num_masks if adapter is None else facts.adapters[adapter].num_masks


def check_pages(pages: Iterable[int], num_blocks: int, held: Set[int] = frozenset()) -> None:
    """Raise AdmissionError for a block that does not exist, or that the sequence would hold twice."""
    seen: set[int] = set()
    for page in pages:
        if page >= num_blocks:
            raise AdmissionError(f"Block {page} does not exist; there are {num_blocks}.")
        if page in held or page in seen:
            raise AdmissionError(f"Block {page} is given twice to one sequence.")
        seen.add(page)


def _check_ids(ids: list[int], message: pb.Admit, facts: ModelFacts) -> None:
    if not 1 <= message.num_prompt <= len(ids):
        raise AdmissionError(f"num_prompt must be 1 .. {len(ids)}, the number of ids; got {message.num_prompt}.")
    if max(ids) >= facts.vocab_size:
        raise AdmissionError(f"Id {max(ids)} is outside the vocabulary of {facts.vocab_size}.")
    masks = set(facts.mask_ids).intersection(ids)
    if masks:
        raise AdmissionError(f"Id {min(masks)} is a mask token; prompts cannot contain it.")


def _check_prediction(ids: Sequence[int], facts: ModelFacts) -> None:
    if ids and max(ids) >= facts.vocab_size:
        raise AdmissionError(f"Id {max(ids)} of the prediction is outside the vocabulary of {facts.vocab_size}.")


def _sampling_params(sampling: pb.Sampling, limits: pb.Limits, vocab_size: int) -> SamplingParams:
    """Convert sampling parameters; unset fields are neutral. Raises AdmissionError."""
    numbers = {
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
    }
    for name, value in [*numbers.items(), *((f"logit_bias[{v}]", b) for v, b in sampling.logit_bias.items())]:
        if not math.isfinite(value):
            raise AdmissionError(f"{name} must be finite; got {value}.")
    for name in ("repetition_penalty", "temperature", "top_p", "min_p", "typical_p"):
        if numbers[name] < 0:
            raise AdmissionError(f"{name} must not be negative; got {numbers[name]:g}.")
    if numbers["min_p"] > 1:
        raise AdmissionError(f"min_p must be at most 1; got {numbers['min_p']:g}.")
    if any(not run.ids for run in sampling.bad_words):
        raise AdmissionError("A bad word has no ids.")
    named = [
        *sampling.logit_bias,
        *sampling.allowed_ids,
        *limits.eos_ids,
        *limits.stop_ids,
        *(id_ for run in sampling.bad_words for id_ in run.ids),
    ]
    if named and max(named) >= vocab_size:
        raise AdmissionError(f"Id {max(named)} of a parameter is outside the vocabulary of {vocab_size}.")
    return SamplingParams(
        key=request_key(sampling.seed, sampling.choice), bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_ids=tuple(sorted(set(sampling.allowed_ids))),
        grammar=_grammar_digest(sampling.grammar) if sampling.HasField("grammar") else "",
        min_tokens=sampling.min_tokens, end_ids=tuple(sorted({*limits.eos_ids, *limits.stop_ids})),
        bad_words=tuple(tuple(run.ids) for run in sampling.bad_words),
        repetition_penalty=sampling.repetition_penalty or 1.0, presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty, temperature=sampling.temperature, top_k=sampling.top_k,
        top_p=sampling.top_p or 1.0, min_p=sampling.min_p, typical_p=sampling.typical_p or 1.0,
    )  # fmt: skip
