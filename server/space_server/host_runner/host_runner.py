"""One step: layout -> rows -> forward -> chain logits -> verify -> group logits -> drafts -> next state.

A step reads the sequences and returns outputs without changing them, so a step that fails half-way can be run again.
K and V that it has written lie behind the computed ids, where the next step overwrites them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Run
from dataclasses import dataclass, field
from itertools import chain

import torch
from space_kernels.paging.attention_plan import AttentionPlan
from space_kernels.paging.bucket_pattern import PlanKey
from space_kernels.sampling.choice import IdLogprobs, choose_rows, log_probabilities
from space_kernels.sampling.sampling_rows import SamplingRow, SamplingRows
from space_kernels.step.verification import num_accepted
from space_model.geometry.forward_batch import ForwardBatch
from space_model.networks.paged_kv import PagedKV
from torch import Tensor

from space_server.batch.limits import SequenceEnd
from space_server.batch.sampling_group import SamplingGroup, SamplingGroups
from space_server.batch.sequence import RunningSequence
from space_server.drafts.draft_source import DraftSource
from space_server.drafts.drafts import BY_MASKS, Origin, Proposal, mask_chances
from space_server.host_runner.drafting import MaskRows, MaskRun, bounded, draft
from space_server.host_runner.stopwatch import Stopwatch
from space_server.scheduling.scheduled_batch import ScheduledSequence
from space_server.speculation.proposing import Proposing
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.step_model import StepModel

_LOGPROB_ROWS = 64
"""Prompt rows whose logits over the vocabulary are held at once."""


@dataclass(slots=True)
class SequenceOutput:
    """What a step gave one sequence."""

    plan: ScheduledSequence
    tokens: list[int] = field(default_factory=list)  # emitted, cut at the end of the sequence
    num_accepted: int = 0  # drafts among them that were accepted
    end: SequenceEnd | None = None
    drafts: list[int] = field(default_factory=list)  # for the next step
    draft_depth: int = 1  # mask number of the first of them; 0: from no mask
    origin: Origin = BY_MASKS  # their source
    num_predicted: Run[int] = ()  # ids of the client's prediction that appeared with each token
    logprobs: Run[IdLogprobs] = ()
    prompt_logprobs: Run[IdLogprobs] = ()
    error: str | None = None  # the sequence cannot go on

    def commit(self) -> None:
        """Apply the output to the sequence."""
        sequence = self.plan.sequence
        if self.error is not None:
            return
        if self.plan.closes:
            sequence.emit(self.tokens, self.num_accepted, self.drafts, self.draft_depth, self.origin)
        else:
            sequence.advance(self.plan.num_pending)


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step.

    The first three are model computation: the network, its heads, and tensor work over the vocabulary. The rest of a
    step is host time, part of which is measured below.
    """

    forward: float = 0.0  # network, and the head over the chain rows
    sample: float = 0.0  # logits processors, sampling, log-probabilities
    draft: float = 0.0  # the head over the accepted groups, candidates, draft head

    pack: float = 0.0  # host: pack the rows
    attend: float = 0.0  # host: plan attention
    verify_sequences: float = 0.0  # host: sampling parameters of the rows, verification, ends
    propose: float = 0.0  # host: select drafts and their rows


class HostRunner:
    """Runs steps of one model on its KV cache."""

    def __init__(
        self,
        model: StepModel,
        kv: PagedKV,
        *,
        draft_source: DraftSource | None = None,
        synthetic: SyntheticAcceptance | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.kv = model, kv
        self.num_forwards = 0  # forward passes run; one per step
        self._draft_source = draft_source
        self._synthetic = synthetic
        self._clock = clock
        self._sampling, self._drafting = Stopwatch(clock), Stopwatch(clock)
        self._choosing, self._drafting_together = SamplingGroups(), SamplingGroups()
        self._plan_keys: tuple[PlanKey, ...] = ()  # heads and windows of the layers, known after the first step
        facts = model.facts
        self._banned = torch.tensor(sorted(set(facts.mask_ids)), dtype=torch.int64, device=facts.device)
        self._proposing = Proposing(facts, in_grammars=synthetic is None)

    @torch.inference_mode()
    def run(self, plans: Run[ScheduledSequence], times: StepTimes) -> list[SequenceOutput]:
        """Run the scheduled sequences in one forward pass. Adds the seconds of each phase to `times`."""
        clock, facts = self._clock, self.model.facts
        sampling, drafting = self._sampling.seconds, self._drafting.seconds
        started = clock()
        batch = ForwardBatch.build(
            [plan.segment for plan in plans],
            block_size=self.kv.block_size,
            mask_ids=facts.mask_ids,
            adapter_masks=[adapter.num_masks for adapter in facts.adapters],
            device=facts.device,
        )
        packed = clock()
        for key in self._plan_keys:
            AttentionPlan.of(batch.rows, key)
        outputs = [SequenceOutput(plan) for plan in plans]
        closing = [output for output in outputs if output.plan.closes]
        chosen = _rows_to_sample(batch, plans, len(closing))
        planned = clock()
        hidden = self.model.forward(batch, self.kv)  # [R, hidden]
        self.num_forwards += 1
        logits, of_masks = self._logits(hidden, batch, chosen)
        forwarded = clock()
        self._plan_keys = tuple(batch.rows.plans)
        if closing:
            self._verify(closing, logits)
        for number, output in enumerate(outputs):
            if output.plan.sequence.num_prompt_logprobs is not None:
                with self._sampling:
                    output.prompt_logprobs = self._prompt_logprobs(output.plan, hidden, batch.chain_rows[number])
        verified = clock()
        self._draft(batch, hidden, of_masks, outputs)
        drafted = clock()
        sampling, drafting = self._sampling.seconds - sampling, self._drafting.seconds - drafting
        times.forward += forwarded - planned
        times.sample += sampling
        times.draft += drafting
        times.pack += packed - started
        times.attend += planned - packed
        times.verify_sequences += verified - forwarded - sampling
        times.propose += drafted - verified - drafting
        return outputs

    def _logits(self, hidden: Tensor, batch: ForwardBatch, chosen: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        """Return logits [N, V] of the rows to sample; also [M, V] of all mask rows where one larger matmul is cheaper
        than a second one for the selected groups, else None.
        """
        num_chain, num_masks = batch.num_chain_rows, batch.num_mask_rows
        num_chosen = chosen.stop if isinstance(chosen, slice) else len(chosen)
        if not num_chosen:
            return hidden.new_empty(0, self.model.facts.vocab_size, dtype=torch.float32), None
        if not num_masks or num_chosen + num_masks > self.model.facts.head_rows:
            return self.model.logits(hidden[chosen]), None
        masks = hidden[num_chain : num_chain + num_masks]
        is_adjacent = isinstance(chosen, slice)
        rows = hidden[: num_chain + num_masks] if is_adjacent else torch.cat([hidden[chosen], masks])
        logits = self.model.logits(rows)
        return logits[:num_chosen], logits[num_chosen:]

    def _verify(self, outputs: Run[SequenceOutput], logits: Tensor) -> None:
        """Sample every chain row, accept the drafts that agree, cut at the first end.

        logits [N, V] raw, of each sequence's root and live drafts in turn.
        """
        plans = [output.plan for output in outputs]
        sampling_group = self._choosing.of([plan.sequence for plan in plans])
        rows = _sampling_rows(plans, sampling_group)
        raw: dict[int, Tensor] = {}
        if sampling_group.wants_logprobs:
            first = 0
            for n, plan in enumerate(plans):
                count = plan.layout.num_drafts + 1
                if plan.sequence.num_logprobs is not None:
                    raw[n] = logits[first : first + count].clone()
                first += count
        with self._sampling:
            choice = choose_rows(logits, rows, self._banned)
            ids, usable = choice.ids.tolist(), choice.usable.tolist()
        all_usable = all(usable)
        first = 0
        for n, output in enumerate(outputs):
            sequence, num_drafts = output.plan.sequence, output.plan.layout.num_drafts
            behind = first + num_drafts + 1
            accepted = num_accepted(ids[first:behind], sequence.drafts[:num_drafts]) if num_drafts else 0
            made = ids[first : first + accepted + 1]
            if not all_usable:
                fit = usable[first : first + accepted + 1]
                if not fit[0]:
                    output.error = no_choice(sequence)
                    first = behind
                    continue
                if not all(fit):
                    # The tokens before the row that cannot be sampled are valid; the next step has that row as its
                    # root.
                    made = made[: fit.index(False)]
            first = behind
            count, output.end = sequence.limits.cut(made, sequence.num_left)
            output.tokens = made[:count]
            output.num_accepted = min(accepted, count)
            if n in raw:
                with self._sampling:
                    output.logprobs = log_probabilities(raw[n][:count], output.tokens, sequence.num_logprobs or 0)

    def _prompt_logprobs(self, plan: ScheduledSequence, hidden: Tensor, rows: range) -> list[IdLogprobs]:
        """Return log-probabilities of this chunk's prompt ids: row i predicts id i+1."""
        sequence = plan.sequence
        start = sequence.num_computed
        targets = sequence.ids[start + 1 : min(start + plan.num_pending + 1, sequence.num_prompt)]
        found: list[IdLogprobs] = []
        for begin in range(0, len(targets), _LOGPROB_ROWS):
            ids = targets[begin : begin + _LOGPROB_ROWS]
            logits = self.model.logits(hidden[rows.start + begin : rows.start + begin + len(ids)])
            found += log_probabilities(logits, ids, sequence.num_prompt_logprobs or 0)
        return found

    def _draft(self, batch: ForwardBatch, hidden: Tensor, logits: Tensor | None, outputs: Run[SequenceOutput]) -> None:
        """Set the drafts of every sequence that continues: from the draft source, a drafter or its masks.

        logits [M, V]: of all mask rows, if known already.
        """
        by_masks: list[tuple[SequenceOutput, Proposal | None]] = []
        runs: list[MaskRun] = []
        for number, output in enumerate(outputs):
            plan, sequence = output.plan, output.plan.sequence
            if self._synthetic is not None and output.end is not None:
                self._synthetic.ended(sequence, output.tokens)
            if not plan.closes or output.error is not None:
                continue
            drafter = sequence.drafter
            if drafter is not None:
                output.num_predicted = drafter.extend(sequence.ids, output.tokens)
            wanted = min(sequence.max_drafts, sequence.num_left - len(output.tokens) - 1)
            if output.end is not None or wanted < 1:
                continue
            if self._draft_source is not None:
                known = [*sequence.ids, *output.tokens]
                proposed = self._draft_source.propose(sequence.seq_id, known, wanted)
                if proposed is not None:
                    output.drafts = self._proposing.valid(sequence, output.tokens, list(proposed[:wanted]))
                    output.draft_depth = 0
                    continue
            group = plan.layout.next_drafts(len(output.tokens) - 1)  # the last token is the bonus of that group
            depth, count = (group.first_mask, min(group.num_drafts, wanted)) if group is not None else (1, 0)
            proposal = self._proposing.proposal(sequence, output.tokens, wanted) if drafter is not None else None
            if proposal is not None and proposal.beats(mask_chances(sequence.acceptance, depth, count)):
                output.drafts, output.draft_depth = proposal.ids, 0
                output.origin = proposal.origin(len(output.drafts))
            elif group is not None:
                first = batch.mask_rows[number][group.group].start + depth - 1
                output.draft_depth = depth
                by_masks.append((output, proposal))
                runs.append(MaskRun(sequence, output.tokens, first, count))
        rows = MaskRows(hidden[batch.num_chain_rows :], logits, batch.num_chain_rows)
        drafted = draft(self.model, rows, runs, self._banned, self._drafting, self._drafting_together)
        are_ids = self._proposing.are_ids([*chain.from_iterable(drafted)])
        for (output, proposal), drafts in zip(by_masks, drafted, strict=True):
            sequence, tokens = output.plan.sequence, output.tokens
            is_valid = are_ids and sequence.grammar is None
            output.drafts = drafts if is_valid else self._proposing.valid(sequence, tokens, drafts)
            if self._synthetic is not None:
                synthetically_accepted = self._synthetic.drafts(sequence, tokens, output.draft_depth, output.drafts)
                output.drafts = self._proposing.valid(sequence, tokens, synthetically_accepted)
            elif proposal is not None and proposal.goes_on_behind(output.drafts):
                masks = mask_chances(sequence.acceptance, output.draft_depth, len(output.drafts))
                output.drafts = proposal.ids
                output.origin = proposal.origin(len(output.drafts), masks)


def no_choice(sequence: RunningSequence) -> str:
    """Return the error of a sequence whose root has no id that can be sampled."""
    position = len(sequence.ids)
    if sequence.grammar is not None:
        possible = sequence.grammar.possible().ids
        if possible is not None and not possible.any():
            return f"The grammar leaves no id at position {position}: {sequence.grammar.trouble}."
        return (
            f"No id can be chosen at position {position}: the logits are not finite, or bad_words, allowed ids and "
            "min_tokens forbid what the grammar allows."
        )
    return f"No id can be chosen at position {position}: the logits are not finite, or every id is forbidden."


def _rows_to_sample(batch: ForwardBatch, plans: Run[ScheduledSequence], num_closing: int) -> Tensor | slice:
    """Return the rows at which a token is sampled: roots and live drafts of the sequences that reach their root.

    They are the leading rows if no sequence has other pending ids.
    """
    num_drafts = sum(plan.layout.num_drafts for plan in plans)
    if num_closing == len(plans) and batch.num_chain_rows == num_closing + num_drafts:
        return slice(batch.num_chain_rows)
    chains = zip(plans, batch.chain_rows, strict=True)
    rows = [row for plan, chain in chains if plan.closes for row in chain[-1 - plan.layout.num_drafts :]]
    return torch.tensor(rows, dtype=torch.int64, device=batch.ids.device)


def _sampling_rows(plans: Run[ScheduledSequence], sampling_group: SamplingGroup) -> SamplingRows:
    """Return the sampling rows of each root and draft, each after its own hypothetical prefix."""

    def row(run: int, number: int) -> SamplingRow:
        sequence = plans[run].sequence
        tail = sequence.drafts[:number]
        sampling_params, possible = bounded(sequence, tail)
        return SamplingRow(
            sampling_params, sequence.ids, sequence.num_prompt, tail=tail, counts=sequence.counts, possible=possible
        )

    return SamplingRows(
        sampling_group.batch_params,
        [len(plan.sequence.ids) for plan in plans],
        [plan.layout.num_drafts + 1 for plan in plans],
        row,
    )
