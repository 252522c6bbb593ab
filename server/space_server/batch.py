"""One running sequence, how an Admit message becomes one, and the sequences of a router stream until they end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from types import MappingProxyType

import numpy as np
from space_kernels.paging.step_rows import Ints
from space_kernels.sampling.noise import request_key
from space_kernels.sampling.sampler import TokenCounts
from space_kernels.sampling.sampling_params import SamplingParams
from space_model.encoder.prompt_pooling import PromptPooling
from space_model.lora import LoadedLora
from space_model.model_facts import ModelFacts
from space_proto import worker_pb2 as pb

from space_server.drafts import BY_MASKS, Acceptance, Drafter, DraftOrigin, DraftSources, Origin
from space_server.grammar import Grammars, GrammarState, Preparation


class SequenceEnd(Enum):
    """Why a sequence ended."""

    EOS = auto()
    STOP_ID = auto()
    LENGTH = auto()


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Ends a sequence at the first EOS id or stop id, or at max_tokens or the context window."""

    max_tokens: int  # generated tokens in all
    window: int  # context window: prompt and output tokens
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    most_ids: int | None = None  # prompt and output tokens of this admission; a longer sequence is admitted again

    def num_left(self, num_known: int, num_prompt: int) -> int:
        """Return how many tokens may still be emitted in this admission."""
        num_left = self._num_left_in_all(num_known, num_prompt)
        return num_left if self.most_ids is None else min(num_left, self.most_ids - num_known)

    def needs_readmission(self, num_known: int, num_prompt: int) -> bool:
        """Whether more tokens may be emitted, after another admission."""
        is_full = self.most_ids is not None and num_known >= self.most_ids
        return is_full and self._num_left_in_all(num_known, num_prompt) > 0

    def _num_left_in_all(self, num_known: int, num_prompt: int) -> int:
        return min(self.max_tokens - (num_known - num_prompt), self.window - num_known)

    def cut(self, emitted: Sequence[int], num_left: int) -> tuple[int, SequenceEnd | None]:
        """Return how many of these tokens are kept, and why the sequence ends there (None: it goes on). An EOS or stop
        token is the last one kept. At the last allowed position it still counts as the reason of the end."""
        for count, token in enumerate(emitted, start=1):
            if token in self.eos_ids:
                return count, SequenceEnd.EOS
            if token in self.stop_ids:
                return count, SequenceEnd.STOP_ID
            if count >= num_left:
                return count, SequenceEnd.LENGTH
        return len(emitted), None


# buffer  [0 ........ known)[known .... known + new)[.......... free
#         earlier arrays     written now             of later ones
def appended(known: Ints, pages: Sequence[int]) -> Ints:
    """Return `known` followed by `pages`. Memory is shared while it has capacity; `known` must be the newest array."""
    count = len(known) + len(pages)
    buffer = known.base
    if not isinstance(buffer, np.ndarray) or len(buffer) < count:
        buffer = np.empty(2 * count, dtype=np.int64)
        buffer[: len(known)] = known
    buffer[len(known) : count] = pages
    return buffer[:count]


def begins_with(pages: Ints, known: Ints) -> bool:
    """Whether `pages` starts with `known`."""
    if pages is known:
        return True
    if len(pages) < len(known):
        return False
    if pages.base is not None and pages.base is known.base and _start(pages) == _start(known):
        return True  # written entries never change
    return bool((pages[: len(known)] == known).all())


def _start(numbers: Ints) -> int:
    return int(numbers.__array_interface__["data"][0])


# computed                  pending                      drafts
# [0 ....... num_computed)  [num_computed .... len(ids)) [len(ids) ... + len(drafts))
#  K, V in the pages         the last one is the root     candidates of the next step
@dataclass(eq=False, slots=True, weakref_slot=True)
class RunningSequence:
    """A sequence between two steps. Prefill, decoding and resuming differ only in how many ids are pending."""

    seq_id: int
    ids: list[int]  # prompt, then output; all final
    num_prompt: int
    num_computed: int  # leading ids whose K and V are in the pages; below len(ids)
    pages: list[int]  # block numbers, position 0 onwards; `extend` adds to them
    sampling_params: SamplingParams
    limits: SequenceLimits
    max_drafts: int  # bound on drafts per step
    num_forced_drafts: int = 0  # drafts of each step by masks or recurrent head, whatever they cost; 0: as many as pay
    num_logprobs: int | None = None  # alternatives to report per emitted id; None: no log-probabilities
    num_prompt_logprobs: int | None = None  # the same for prompt ids
    counts: TokenCounts | None = None  # of `ids`, where a penalty is set
    adapter: int | None = None  # adapter whose masks draft; None: the checkpoint's own
    lora: int | None = None  # number of the LoRA of all its rows; None: the weights alone
    state: int = 0  # slot of its recurrent states, where layers have some
    keep_states: deque[tuple[int, int]] = field(default_factory=deque)  # ids behind which its state is kept, and where
    num_masks: int = 0  # masks per group that the adapter or checkpoint has
    num_head_drafts: int = 0  # drafts that its recurrent head makes; 0: there is none
    drafts: list[int] = field(default_factory=list)  # to be verified by the next step
    draft_depth: int = 1  # mask number of the first draft; 0: from no mask
    draft_chances: Sequence[float] = ()  # acceptance of each, given those before; only of drafts from no mask
    offered_chances: Sequence[float] = ()  # of the drafts that its text offered, whether taken or not
    acceptance: Acceptance | None = None  # of drafts from its masks; None: not measured
    head_acceptance: Acceptance | None = None  # of drafts from its recurrent head; None: not measured
    origin: Origin = BY_MASKS  # source of the drafts
    drafter: Drafter | None = None  # proposes drafts from the text; None: only masks draft
    grammar: GrammarState | None = None  # state of its grammar; None: unconstrained
    waits: bool = False  # for its grammar to be compiled
    pooling: PromptPooling | None = None  # of its prompt, in place of tokens; None: it generates
    is_long: bool = False  # has the rotary angles of a long sequence (LongRoPE)
    num_emitted: int = 0  # ids emitted since admission
    paused: bool = False  # has no free slot, and was reported so
    most_ids: int = field(init=False)  # upper bound on len(ids)
    most_masks: int = field(init=False)  # upper bound on masks per group
    most_head_drafts: int = field(init=False)  # upper bound on drafts of the recurrent head
    held_pages: set[int] = field(init=False, repr=False)  # `pages` as a set
    page_numbers: Ints = field(init=False, repr=False)  # `pages` as an array; replaced, never changed in place

    def __post_init__(self) -> None:
        self.held_pages = set(self.pages)
        self.page_numbers = np.array(self.pages, dtype=np.int64)
        self.most_ids = self.limits.num_left(0, self.num_prompt)
        self.most_masks = min(self.max_drafts, self.num_masks)
        self.most_head_drafts = min(self.max_drafts, self.num_head_drafts)

    @property
    def can_draft(self) -> bool:
        """Whether masks or a recurrent head can draft for it."""
        return self.most_masks > 0 or self.most_head_drafts > 0

    @property
    def num_pending(self) -> int:
        """Ids to compute; at least 1."""
        return len(self.ids) - self.num_computed

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.most_ids - len(self.ids)

    @property
    def num_mask_drafts(self) -> int:
        """How many leading drafts came from its masks."""
        if self.draft_depth == 0:
            return 0
        return len(self.drafts) if self.origin.source is DraftOrigin.MASKS else self.origin.num_mask_drafts

    def num_free_slots(self, block_size: int) -> int:
        """Return the number of KV-cache slots behind the computed ids."""
        return len(self.pages) * block_size - self.num_computed

    def extend(self, pages: Sequence[int]) -> None:
        """Append newly granted pages."""
        self.pages += pages
        self.held_pages.update(pages)
        self.page_numbers = appended(self.page_numbers, pages)

    @property
    def num_until_kept(self) -> int:
        """How many pending ids the next step may compute, which ends where a state is to be kept."""
        return self.keep_states[0][0] - self.num_computed if self.keep_states else self.num_pending

    def advance(self, num_rows: int) -> None:
        """Count a prefill chunk that did not reach the root as computed."""
        self.num_computed += num_rows

    def emit(
        self,
        tokens: list[int],
        num_accepted: int,
        drafts: list[int],
        draft_depth: int = 1,
        origin: Origin = BY_MASKS,
        offered_chances: Sequence[float] = (),
    ) -> None:
        """Append the emitted tokens and set the next step's drafts. K and V of the root and the accepted drafts are in
        place. Rejected drafts wrote the slots behind them; the next step overwrites those. Nothing is copied."""
        self.num_computed = min(len(self.ids) + num_accepted, len(self.ids) + len(tokens) - 1)
        self.ids += tokens
        self.num_emitted += len(tokens)
        self.drafts, self.draft_depth = drafts, draft_depth
        self.origin, self.draft_chances, self.offered_chances = origin, origin.chances, offered_chances
        if self.counts is not None:
            self.counts.extend(tokens)
        if self.grammar is not None:
            self.grammar.advance(tokens)


class RunningBatch:
    """Sequences by seq_id, oldest first."""

    def __init__(self) -> None:
        self._running: dict[int, RunningSequence] = {}
        self._ended: set[int] = set()  # reported as ended, not released yet
        self._released: list[int] = []  # to be acknowledged
        self._failed: list[pb.SequenceReport] = []  # to be reported
        self._loras: list[pb.LoraReport] = []  # to be reported

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningSequence]:
        return iter(self._running.values())

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._running or seq_id in self._ended

    def add(self, sequence: RunningSequence) -> None:
        """Add a sequence as the youngest."""
        self._running[sequence.seq_id] = sequence

    def get(self, seq_id: int) -> RunningSequence | None:
        """Return the running sequence, or None."""
        return self._running.get(seq_id)

    def free_state(self) -> int:
        """Return the lowest slot of recurrent states that no running sequence has."""
        taken = {sequence.state for sequence in self}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def end(self, seq_id: int) -> None:
        """Stop running this sequence. The router keeps its pages until it releases it."""
        self._running.pop(seq_id, None)
        self._ended.add(seq_id)

    def hand_back(self, seq_id: int) -> None:
        """Return a sequence that was never admitted, for the router to run elsewhere."""
        self.end(seq_id)
        self._failed.append(pb.SequenceReport(seq_id=seq_id, finish=pb.FINISH_RETURNED))

    def fail(self, seq_id: int, error: str) -> None:
        """End this sequence, running or never admitted, with an error."""
        sequence = self._running.get(seq_id)
        self.end(seq_id)
        self._failed.append(
            pb.SequenceReport(
                seq_id=seq_id,
                finish=pb.FINISH_ERROR,
                error=error,
                num_computed=sequence.num_computed if sequence is not None else 0,
            )
        )

    def forget(self, seq_id: int) -> None:
        """Drop this sequence without acknowledging: a step in flight may still use its pages."""
        self._running.pop(seq_id, None)
        self._ended.discard(seq_id)
        self._failed = [report for report in self._failed if report.seq_id != seq_id]

    def acknowledge(self, seq_id: int) -> None:
        """Acknowledge the release of a forgotten sequence whose pages are no longer used."""
        self._released.append(seq_id)

    def lora_loaded(self, report: pb.LoraReport) -> None:
        """Report how the loading of a LoRA went."""
        self._loras.append(report)

    @property
    def has_news(self) -> bool:
        """Whether something is to be reported without a step."""
        return bool(self._released or self._failed or self._loras)

    def take_loras(self) -> list[pb.LoraReport]:
        """Return the LoRAs to report; each is returned once."""
        loras, self._loras = self._loras, []
        return loras

    def take_news(self) -> tuple[list[int], list[pb.SequenceReport]]:
        """Return the releases to acknowledge and the failures to report; each is returned once."""
        released, self._released = self._released, []
        failed, self._failed = self._failed, []
        return released, failed


class Waiting:
    """Starts each sequence once its grammar is compiled, or fails that sequence alone."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._preparing: dict[int, Preparation] = {}  # by sequence number
        self.woken: Callable[[], None] = lambda: None  # called from any thread when a compilation ends

    @property
    def why_none(self) -> str | None:
        """Why this worker supports no grammars; None: it does."""
        return "it was started without them" if self._grammars is None else self._grammars.why_none

    @property
    def is_over_for_some(self) -> bool:
        """Whether a compilation has ended, so that `take` would do something."""
        return any(preparation.is_over for preparation in self._preparing.values())

    def why_refused(self, sequence: RunningSequence) -> str | None:
        """Why this sequence's grammar cannot be used; None: it can be tried."""
        if self.why_none is not None:
            return f"This worker takes no grammars: {self.why_none}."
        if not sequence.limits.eos_ids | sequence.limits.stop_ids:
            return "The text of a grammar has to end, and this checkpoint has no EOS id. Set stop ids."
        return None

    def add(self, sequence: RunningSequence, grammar: pb.Grammar, *, ignores_eos: bool) -> None:
        """Start compiling the grammar of a sequence that was not refused."""
        if self._grammars is not None:
            self._preparing[sequence.seq_id] = self._grammars.prepare(
                grammar,
                eos_ids=sequence.limits.eos_ids,
                stop_ids=sequence.limits.stop_ids,
                ignores_eos=ignores_eos,
                output=sequence.ids[sequence.num_prompt :],
                done=lambda: self.woken(),
            )

    def take(self, batch: RunningBatch) -> None:
        """Start the sequences whose grammar is ready, and fail those whose grammar did not compile."""
        for seq_id, preparation in list(self._preparing.items()):
            sequence = batch.get(seq_id)
            if sequence is None:
                del self._preparing[seq_id]
                preparation.cancel()
            elif preparation.is_over:
                del self._preparing[seq_id]
                if preparation.state is None:
                    batch.fail(seq_id, preparation.error or "The grammar cannot be used.")
                else:
                    sequence.grammar, sequence.waits = preparation.state, False

    def clear(self) -> None:
        """Cancel every compilation."""
        for preparation in self._preparing.values():
            preparation.cancel()
        self._preparing.clear()


class AdmissionError(ValueError):
    """The sequence cannot run; the message names the bound and the value."""


def admit(
    message: pb.Admit,
    facts: ModelFacts,
    *,
    num_blocks: int,
    block_size: int,
    max_drafts: int,
    sources: DraftSources | None = None,
    loras: Mapping[str, LoadedLora] = MappingProxyType({}),
    readmits: bool = False,
) -> RunningSequence:
    """Build the sequence that an Admit message describes. Raises AdmissionError. `max_drafts`: the worker's own bound.
    `sources`: draft sources besides masks; by default only the message's prediction. `loras`: that are loaded.
    `readmits`: the router admits a sequence again whose rotary angles change."""
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
    if facts.is_recurrent and bool(message.num_cached) != message.HasField("load_state"):
        raise AdmissionError(
            f"{message.num_cached} ids are cached, and layers of this model have recurrent states, which pages do not "
            "hold: load_state must be set where num_cached is not 0, and nowhere else."
        )
    kept = [(one.position, one.slot) for one in message.keep_states]
    if any(not message.num_cached < position < len(ids) for position, _ in kept) or sorted(kept) != kept:
        raise AdmissionError(
            f"keep_states must be ascending, above the {message.num_cached} cached ids and below the {len(ids)} ids; "
            f"got {[position for position, _ in kept]}."
        )
    if message.HasField("num_prompt_logprobs") and message.num_cached:
        raise AdmissionError("Prompt log-probabilities need num_cached = 0.")
    if message.pooling == pb.POOLING_MEAN and message.num_cached:
        raise AdmissionError("The mean of a prompt needs num_cached = 0.")
    eos_ids = frozenset(message.limits.eos_ids)
    if message.sampling.HasField("grammar") and not eos_ids:
        eos_ids = frozenset(facts.eos_ids)  # EOS must stay possible where the grammar is complete
    switch = facts.rope_switch
    is_long = switch is not None and (len(ids) > switch or not readmits)
    limits = SequenceLimits(
        max_tokens=message.limits.max_tokens,
        window=facts.window,
        eos_ids=eos_ids,
        stop_ids=frozenset(message.limits.stop_ids),
        most_ids=None if switch is None or is_long else switch + 1,  # the last one is not computed here
    )
    if limits.num_left(len(ids), message.num_prompt) < 1:
        raise AdmissionError(
            f"Nothing is left to generate: {len(ids)} ids, {message.num_prompt} of them prompt, max_tokens "
            f"{limits.max_tokens}, window {limits.window}."
        )
    _check_prediction(message.prediction, facts)
    if message.lora and message.lora not in loras:
        raise AdmissionError(f"The LoRA {message.lora[:12]} is not loaded here.")
    adapter, num_masks = _masks(message.adapter, facts)
    num_head_drafts = facts.head_of(adapter).num_drafts if sources.head else 0
    sampling_params = _sampling_params(message.sampling, message.limits, facts.vocab_size)
    num_masks = num_masks if sources.masks else 0
    forced, bound = message.num_forced_drafts, min(max_drafts, message.max_draft_length)
    most = min(bound, num_masks or num_head_drafts)
    if forced > most:
        means = "from masks" if num_masks or not num_head_drafts else "by its recurrent head"
        if num_head_drafts and not num_masks and facts.head_of(adapter).kind != "recurrent":
            means = "without masks"
        raise AdmissionError(f"{forced} drafts per step are asked for; this worker drafts at most {most} {means}.")
    # Without drafts no drafter is needed, except to count which ids of a prediction appeared.
    in_grammar = message.sampling.HasField("grammar")
    drafter = None
    if message.prediction or (bound and not forced):
        drafter = sources.drafter(message.num_prompt, message.prediction, in_grammar=in_grammar)
    counts = None
    if sampling_params.penalises:
        counts = TokenCounts(ids, message.num_prompt, facts.vocab_size, facts.device)
    return RunningSequence(
        seq_id=message.seq_id,
        ids=ids,
        num_prompt=message.num_prompt,
        num_computed=message.num_cached,
        keep_states=deque(kept),
        pages=list(message.pages),
        sampling_params=sampling_params,
        limits=limits,
        max_drafts=forced or bound,
        num_forced_drafts=forced,
        num_logprobs=message.num_logprobs if message.want_logprobs else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        counts=counts,
        adapter=adapter,
        lora=loras[message.lora].number if message.lora else None,
        num_masks=num_masks,
        num_head_drafts=num_head_drafts,
        drafter=drafter,
        waits=in_grammar,
        is_long=is_long,
        pooling=PromptPooling(message.pooling == pb.POOLING_MEAN) if message.pooling else None,
    )


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
        key=request_key(sampling.seed, sampling.choice),
        bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_ids=tuple(sorted(set(sampling.allowed_ids))),
        grammar=_grammar_digest(sampling.grammar) if sampling.HasField("grammar") else "",
        min_tokens=sampling.min_tokens,
        end_ids=tuple(sorted({*limits.eos_ids, *limits.stop_ids})),
        bad_words=tuple(tuple(run.ids) for run in sampling.bad_words),
        repetition_penalty=sampling.repetition_penalty or 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p or 1.0,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p or 1.0,
    )
