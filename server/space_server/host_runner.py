"""Runs steps on the host: layout -> rows -> forward -> chain logits -> verify -> group logits -> drafts -> next state.

A step reads the sequences and returns outputs without changing them, so a step that fails half-way can be run again.
K and V that it has written lie behind the computed ids, where the next step overwrites them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import chain

import torch
from space_common.worker.errors import CONTRADICTION, GRAMMAR
from space_kernels.paging.attention_plan import AttentionPlan, PlanKey
from space_kernels.sampling.sampler import IdLogprobs, log_probabilities, sample_rows
from space_kernels.sampling.sampling_params import (
    SamplingRow,
    SamplingRows,
)
from space_kernels.step.verification import num_accepted
from space_model.free_memory import is_out_of_memory
from space_model.geometry.forward_batch import BatchPattern, ForwardBatch
from space_model.networks.network import PagedKV
from space_model.networks.sampled_step import MOST_ROWS
from torch import Tensor

from space_server.batch import RunningSequence, SequenceEnd
from space_server.drafters.mask_drafter import (
    MaskDrafter,
    MaskRows,
    MaskRun,
    SamplingGroup,
    SamplingGroups,
    Stopwatch,
    bounded,
)
from space_server.drafters.network_drafter import NetworkDrafter
from space_server.drafters.recurrent_drafter import RecurrentDrafter
from space_server.drafters.sequential_drafts import HeadRun
from space_server.drafts import BY_MASKS, HEAD_ORIGINS, DraftSource, Proposal, chances_of
from space_server.machine.memory import give_back_unused, is_lost
from space_server.model_runner import ModelRunner, Proposing, SequenceOutput, StepModel, StepOutput, StepTimes
from space_server.scheduled_batch import PrefillBudget, ScheduledBatch, ScheduledSequence, plan_step
from space_server.speculation.controller import Controller, SpeculationController
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.step_cost import StepCost
from space_server.worker_messages import TOO_LARGE, failure_message

_log = logging.getLogger(__name__)

CapturedForward = Callable[[ForwardBatch], tuple[Tensor, bool] | None]
"""A forward pass by a CUDA graph: [R, hidden] after the final norm, and whether nothing was compiled or captured for
it; None: it is not captured."""

_LOGPROB_ROWS = 64  # prompt rows whose logits over the vocabulary are held at once


class HostRunner(ModelRunner):
    """A ModelRunner whose steps the host prepares, verifies and drafts: for every sequence, on any device."""

    def __init__(
        self,
        model: StepModel,
        kv: PagedKV,
        *,
        controller: Controller | None = None,
        cost: StepCost | None = None,
        draft_source: DraftSource | None = None,
        synthetic: SyntheticAcceptance | None = None,
        captured: CapturedForward = lambda batch: None,
        seconds_beside: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`controller`, `cost`: None: a SpeculationController, and typical costs. `captured`: tried before the model's
        own forward pass. `seconds_beside`: called after a step; the seconds it took of a device that other work keeps
        busy, else None."""
        facts = model.facts
        self.model, self.kv = model, kv
        self._cost = cost or StepCost.typical(facts.device.type)
        self.controller = controller or SpeculationController(self._cost)
        self._began = 0.0  # the last step
        self._output: StepOutput | None = None  # of the last step, until it is taken
        self._out_of_slots: Sequence[RunningSequence] = ()  # in the last step scheduled
        self._draft_source = draft_source
        self._synthetic = synthetic
        self._captured, self._is_usual = captured, True  # nothing was compiled or captured in the last step
        self._seconds_beside, self._clock = seconds_beside, clock
        self._sampling, self._sampling_groups = Stopwatch(clock), SamplingGroups()
        self._plan_keys: tuple[PlanKey, ...] = ()  # heads and windows of the layers, known after the first step
        self._banned = torch.tensor(sorted(set(facts.mask_ids)), dtype=torch.int64, device=facts.device)
        self._mask_drafter = MaskDrafter(model, self._banned, clock)
        self._head_drafter: RecurrentDrafter | NetworkDrafter = RecurrentDrafter(model, self._banned, clock)
        if kv.draft is not None:
            network, size = model.draft_network, facts.vocab_size
            assert network is not None
            self._head_drafter = NetworkDrafter(
                network, kv.draft, vocab_size=size, banned_ids=self._banned, clock=clock
            )
        self._sampled_step = model.sampled_step(kv, self._banned)
        self._proposing = Proposing(facts, in_grammars=synthetic is None)

    @property
    def num_in_flight(self) -> int:
        return int(self._output is not None)

    @property
    def out_of_slots(self) -> Sequence[RunningSequence]:
        return self._out_of_slots

    def reset(self) -> None:
        self._output, self._out_of_slots = None, []

    def schedule(
        self,
        batch: Iterable[RunningSequence],
        budget: PrefillBudget,
        *,
        reported: Set[int] = frozenset(),
        elsewhere: Sequence[RunningSequence] = (),
    ) -> ScheduledBatch | None:
        self._began = self._clock()
        busy = reported | {sequence.seq_id for sequence in elsewhere} if elsewhere else reported
        scheduled = plan_step(
            [one for one in batch if not (one.waits or one.seq_id in busy)],
            self.controller,
            block_size=self.kv.block_size,
            budget=budget,
            beside=elsewhere,
        )
        self._out_of_slots = scheduled.out_of_slots
        return scheduled if scheduled.plans else None

    def execute_model(self, scheduled: ScheduledBatch) -> None:
        """Run the step; sequences that fail do so alone. Raises if the device is lost."""
        times, self._is_usual = StepTimes(), True
        outputs = self._run_or_fail(scheduled.plans, times)
        self.waited += times.forward + times.sample + times.draft
        is_usual = not self._head_drafter.take_catching_up() and self._is_usual
        self._output = StepOutput(outputs, scheduled.shape, times, self._seconds_beside(), is_usual)

    def get_output(self) -> StepOutput:
        output, self._output = self._output, None
        assert output is not None
        return output

    def update_from_output(self, output: StepOutput, pause: float | None = None) -> None:
        seconds = self._clock() - self._began if output.seconds is None else output.seconds
        if output.is_usual:
            self._cost.learn(output.shape, seconds)
        self.controller.stepped(sum([len(one.tokens) for one in output.outputs]), seconds, pause)

    def _run_or_fail(
        self, plans: list[ScheduledSequence], times: StepTimes, *, again: bool = False
    ) -> list[SequenceOutput]:
        """Run the step. If it fails, run each sequence alone, so that only the one that causes the failure ends.
        A sequence that runs out of memory alone is tried once more (`again`) after unused memory was freed."""
        try:
            return self.run(plans, times)
        except Exception as error:
            if not (wants_memory := is_out_of_memory(error)) and is_lost(self.model.facts.device):
                raise
            if len(plans) == 1 and (again or not wants_memory):
                _log.exception("sequence %d failed", plans[0].sequence.seq_id)
                message = TOO_LARGE if wants_memory else failure_message("The step failed", error)
                failed = [SequenceOutput(plans[0], error=message)]
            else:
                _log.warning("a step of %d sequences failed (%s); they are stepped one by one", len(plans), error)
                failed = []
        # The step's tensors are unreferenced only after the except block, so memory is freed here.
        if wants_memory:
            give_back_unused()
        return failed or [
            output for plan in plans for output in self._run_or_fail([plan], times, again=len(plans) == 1)
        ]

    @property
    def _drafting_seconds(self) -> float:
        return self._mask_drafter.seconds + self._head_drafter.seconds

    def run(self, plans: Sequence[ScheduledSequence], times: StepTimes) -> list[SequenceOutput]:
        """Run the scheduled sequences in one forward pass. Adds the seconds of each phase to `times`."""
        found = self._run_in_one_call(plans, times) if self._sampled_step is not None else None
        return self._run_any(plans, times) if found is None else found

    def _run_in_one_call(self, plans: Sequence[ScheduledSequence], times: StepTimes) -> list[SequenceOutput] | None:
        """Run a step without pending ids in one call of the model, which samples and drafts from masks, too; a
        recurrent head drafts from its rows. None: it is no such step, or a row has no valid id; the pages then hold
        what another run of the step writes again."""
        num_masks = head_drafts = 0
        for plan in plans:
            layout = plan.layout
            if plan.num_pending > 1 or not plan.closes:
                return None
            num_masks += layout.num_masks
            head_drafts += layout.head_drafts
        if head_drafts and (num_masks or not isinstance(self._head_drafter, RecurrentDrafter)):
            return None
        sampled_step = self._sampled_step
        if sampled_step is None or sampled_step.num_logits([plan.layout for plan in plans]) > MOST_ROWS:
            return None
        sampling_group = self._sampling_groups.of([plan.sequence for plan in plans])
        if not sampling_group.fits_one_call:
            return None
        if num_masks and not (sampling_group.is_alike and sampled_step.drafts_for(plans[0].sequence.adapter)):
            return None
        clock = self._clock
        started = clock()
        sampled_step.pack([plan.segment for plan in plans], sampling_group.batch_params)
        packed = clock()
        ids = sampled_step.run()
        self.num_forwards += 1
        forwarded = clock()
        times.pack += packed - started
        times.forward += forwarded - packed
        if ids is None:
            return None
        outputs = [SequenceOutput(plan) for plan in plans]
        first = 0
        for output in outputs:
            behind = first + output.plan.layout.num_drafts + 1
            _accept(output, ids[first:behind])
            first = behind
        verified, drafting = clock(), self._drafting_seconds
        if head_drafts:
            with torch.inference_mode():
                self._draft(outputs, _Computed(sampled_step.pattern, sampled_step.hidden))
        else:
            self._draft(outputs, sampled_step.drafts() if num_masks else None)
        drafting = self._drafting_seconds - drafting
        times.verify += verified - forwarded
        times.draft += drafting
        times.propose += clock() - verified - drafting
        return outputs

    @torch.inference_mode()
    def _run_any(self, plans: Sequence[ScheduledSequence], times: StepTimes) -> list[SequenceOutput]:
        """Run a step of any kind."""
        clock, facts = self._clock, self.model.facts
        sampling, drafting = self._sampling.seconds, self._drafting_seconds
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
        hidden = self._forward(batch)  # [R, hidden]
        self.num_forwards += 1
        logits, of_masks = self._logits(hidden, batch, chosen)
        forwarded = clock()
        self._plan_keys = AttentionPlan.keys_of(batch.rows)
        if closing:
            self._verify(closing, logits)
        for number, output in enumerate(outputs):
            if output.plan.sequence.pooling is not None:
                _pool(output, hidden, batch.chain_rows[number])
            if output.plan.sequence.num_prompt_logprobs is not None:
                with self._sampling:
                    output.prompt_logprobs = self._prompt_logprobs(output.plan, hidden, batch.chain_rows[number])
        verified = clock()
        self._draft(outputs, _Computed(batch.pattern, hidden, of_masks))
        drafted = clock()
        sampling, drafting = self._sampling.seconds - sampling, self._drafting_seconds - drafting
        times.forward += forwarded - planned
        times.sample += sampling
        times.draft += drafting
        times.pack += packed - started
        times.attend += planned - packed
        times.verify += verified - forwarded - sampling
        times.propose += drafted - verified - drafting
        return outputs

    def _forward(self, batch: ForwardBatch) -> Tensor:
        found = self._captured(batch)
        if found is None:
            return self.model.forward(batch, self.kv)
        hidden, is_usual = found
        self._is_usual = self._is_usual and is_usual
        return hidden

    def _logits(self, hidden: Tensor, batch: ForwardBatch, chosen: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        """Return logits [N, V] of the rows to sample; also [M, V] of all mask rows where one larger matmul is cheaper
        than a second one for the selected groups, else None."""
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

    def _verify(self, outputs: Sequence[SequenceOutput], logits: Tensor) -> None:
        """Sample every chain row, accept the drafts that agree, cut at the first end.
        logits [N, V] raw, of each sequence's root and live drafts in turn."""
        plans = [output.plan for output in outputs]
        sampling_group = self._sampling_groups.of([plan.sequence for plan in plans])
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
            choice = sample_rows(logits, rows, self._banned)
            ids, valid = choice.ids.tolist(), choice.valid.tolist()
        all_valid = all(valid)
        first = 0
        for n, output in enumerate(outputs):
            sequence, behind = output.plan.sequence, first + output.plan.layout.num_drafts + 1
            sampled = ids[first:behind]
            if not all_valid:
                fit = valid[first:behind]
                if not fit[0]:
                    output.error = no_choice(sequence, is_finite=not bool(logits[first].isnan().any()))
                    first = behind
                    continue
                if not all(fit):
                    # The tokens before the row that cannot be sampled are valid; the next step has that row as its
                    # root.
                    sampled = sampled[: fit.index(False)]
            first = behind
            _accept(output, sampled)
            if n in raw:
                count = len(output.tokens)
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

    def _draft(self, outputs: Sequence[SequenceOutput], computed: _Computed | list[list[int]] | None) -> None:
        """Set the drafts of every sequence that continues: from the draft source, a drafter, its masks, the recurrent
        head or the draft network. `computed`: the step's rows, or the drafts of each sequence's masks; None: no layout
        makes drafts of them."""
        by_masks: list[tuple[SequenceOutput, Proposal | None]] = []
        by_head: list[tuple[SequenceOutput, Proposal | None]] = []
        runs: list[MaskRun] = []
        head_runs: list[HeadRun] = []
        drafted: list[list[int]] = []
        for number, output in enumerate(outputs):
            plan, sequence = output.plan, output.plan.sequence
            if self._synthetic is not None and output.end is not None:
                self._synthetic.ended(sequence, output.tokens)
            if not plan.closes or output.error is not None:
                continue
            drafter = sequence.drafter
            if drafter is not None:
                output.num_predicted = drafter.extend(sequence.ids, output.tokens)
            wanted = output.max_drafts
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
            num_by_head = min(plan.layout.head_drafts, wanted)
            if num_by_head:
                chances = chances_of(sequence.head_acceptance, 1, num_by_head)
            else:
                chances = chances_of(sequence.acceptance, depth, count)
            proposal = self._proposing.proposal(sequence, output.tokens, wanted) if drafter is not None else None
            if proposal is not None:
                output.offered_chances = proposal.known_chances
            if proposal is not None and proposal.beats(chances):
                output.take_proposal(proposal)
            elif computed is None:
                continue
            elif isinstance(computed, list):
                if group is not None:
                    output.draft_depth = depth
                    by_masks.append((output, proposal))
                    drafted.append(computed[number][:count])
            elif num_by_head:
                root = computed.pattern.chain_rows[number][-1 - plan.layout.num_drafts]
                output.origin = HEAD_ORIGINS[self.model.facts.head_of(sequence.adapter).kind]
                by_head.append((output, None))
                head_runs.append(HeadRun(sequence, output.tokens, root + len(output.tokens) - 1, num_by_head))
            elif group is not None:
                first = computed.pattern.mask_rows[number][group.group].start + depth - 1
                output.draft_depth = depth
                by_masks.append((output, proposal))
                runs.append(MaskRun(sequence, output.tokens, first, count))
        if not (by_masks or by_head):
            return
        if isinstance(computed, _Computed):
            num_chain, hidden = computed.pattern.rows.num_chain_rows, computed.hidden
            rows = MaskRows(hidden[num_chain:], computed.logits, num_chain)
            drafted = self._mask_drafter.draft(rows, runs) + self._head_drafter.draft(hidden, head_runs)
        are_ids = self._proposing.are_ids([*chain.from_iterable(drafted)])
        for (output, proposal), drafts in zip(by_masks + by_head, drafted, strict=True):
            sequence, tokens = output.plan.sequence, output.tokens
            is_valid = are_ids and sequence.grammar is None
            output.drafts = drafts if is_valid else self._proposing.valid(sequence, tokens, drafts)
            if self._synthetic is not None:
                synthetically_accepted = self._synthetic.drafts(sequence, tokens, output.draft_depth, output.drafts)
                output.drafts = self._proposing.valid(sequence, tokens, synthetically_accepted)
            elif output.origin is BY_MASKS:
                self._proposing.join(output, proposal)


@dataclass(frozen=True, slots=True)
class _Computed:
    """What a forward pass computed of a step's rows, from which drafts are made."""

    pattern: BatchPattern
    hidden: Tensor  # [R, hidden]
    logits: Tensor | None = None  # [M, V] of all mask rows, if known already


def _accept(output: SequenceOutput, sampled: Sequence[int]) -> None:
    """Accept the drafts that agree, and cut at the first end. `sampled`: ids of the root and the drafts behind it; a
    row without a valid id, and those behind it, are left out."""
    sequence = output.plan.sequence
    num_drafts = min(output.plan.layout.num_drafts, len(sampled))
    accepted = num_accepted(sampled, sequence.drafts[:num_drafts]) if num_drafts else 0
    made = [*sampled[: accepted + 1]]
    count, output.end = sequence.limits.cut(made, sequence.num_left)
    output.tokens = made[:count]
    output.num_accepted = min(accepted, count)


def _pool(output: SequenceOutput, hidden: Tensor, rows: range) -> None:
    """Pool the prompt rows of this step; where they are the last, the sequence ends without a token."""
    plan, pooling = output.plan, output.plan.sequence.pooling
    assert pooling is not None
    output.pooling = pooling.with_rows(hidden[rows.start : rows.start + plan.num_pending])
    if plan.closes and output.error is None:
        output.tokens, output.num_accepted, output.end = [], 0, SequenceEnd.LENGTH


def no_choice(sequence: RunningSequence, *, is_finite: bool = False) -> str:
    """Return the error of a sequence whose root has no id that can be sampled. `is_finite`: its logits are numbers; if
    not, or if that is not known, the model may be at fault."""
    position = len(sequence.ids)
    if sequence.grammar is not None:
        possible = sequence.grammar.possible().ids
        if possible is not None and not possible.any():
            return f"{GRAMMAR}leaves no id at position {position}: {sequence.grammar.trouble}."
        if is_finite:
            return f"{CONTRADICTION} at position {position} that its grammar allows. Drop one of them."
        return (
            f"No id can be chosen at position {position}: the logits are not finite, or bad_words, allowed ids and "
            "min_tokens forbid what the grammar allows."
        )
    if is_finite:
        return f"{CONTRADICTION} at position {position}. Allow more ids, or drop a ban."
    return f"No id can be chosen at position {position}: the logits are not finite, or every id is forbidden."


def _rows_to_sample(batch: ForwardBatch, plans: Sequence[ScheduledSequence], num_closing: int) -> Tensor | slice:
    """Return the rows at which a token is sampled: roots and live drafts of the sequences that reach their root.
    They are the leading rows if no sequence has other pending ids."""
    num_drafts = sum(plan.layout.num_drafts for plan in plans)
    if num_closing == len(plans) and batch.num_chain_rows == num_closing + num_drafts:
        return slice(batch.num_chain_rows)
    chains = zip(plans, batch.chain_rows, strict=True)
    rows = [row for plan, chain in chains if plan.closes for row in chain[-1 - plan.layout.num_drafts :]]
    return torch.tensor(rows, dtype=torch.int64, device=batch.ids.device)


def _sampling_rows(plans: Sequence[ScheduledSequence], sampling_group: SamplingGroup) -> SamplingRows:
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
