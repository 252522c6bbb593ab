"""Runs steps on the host: layout -> rows -> forward -> chain logits -> verify -> group logits -> drafts -> next state.

A step reads the sequences and returns outputs without changing them, so a step that fails half-way can be run again.
K and V that it has written lie behind the computed ids, where the next step overwrites them.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from types import TracebackType

import numpy as np
import torch
from space_kernels.paging.attention_plan import AttentionPlan, PlanKey
from space_kernels.paging.step_rows import Ints
from space_kernels.sampling.sampler import IdLogprobs, best_of, edit, library_for_logits, log_probabilities, sample_rows
from space_kernels.sampling.sampling_params import (
    BatchSamplingParams,
    IdBits,
    SamplingParams,
    SamplingRow,
    SamplingRows,
)
from space_kernels.step.draft_head import NUM_CANDIDATES, SamplingColumns, propose
from space_kernels.step.verification import num_accepted
from space_model.free_memory import is_out_of_memory
from space_model.geometry.forward_batch import ForwardBatch
from space_model.heads import DraftHeadWeights
from space_model.networks.network import PagedKV
from torch import Tensor

from space_server.batch import RunningSequence
from space_server.drafts import DraftSource, Proposal, mask_chances
from space_server.machine.memory import give_back_unused, is_lost
from space_server.model_runner import ModelRunner, Proposing, SequenceOutput, StepModel, StepOutput, StepTimes
from space_server.scheduled_batch import PrefillBudget, ScheduledBatch, ScheduledSequence, plan_step
from space_server.speculation.controller import Controller, SpeculationController
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.step_cost import StepCost
from space_server.worker_messages import TOO_LARGE, failure_message


class Stopwatch:
    """Adds up the seconds of its `with` blocks, which do not nest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += self._clock() - self._started


class SamplingGroup:
    """An ordered group of sequences with their sampling parameters batched once."""

    def __init__(self, sequences: list[RunningSequence]) -> None:
        self.sequences = sequences
        self.batch_params = BatchSamplingParams([sequence.sampling_params for sequence in sequences])
        self.wants_logprobs = any(sequence.num_logprobs is not None for sequence in sequences)
        self._columns: dict[torch.device, SamplingColumns] = {}

    @cached_property
    def is_alike(self) -> bool:
        """Whether all draft with the same adapter's masks and none has a grammar."""
        adapter = self.sequences[0].adapter
        return all(sequence.adapter == adapter and sequence.grammar is None for sequence in self.sequences)

    def columns(self, device: torch.device) -> SamplingColumns:
        """Return the sampling parameters that the draft head needs, on the device."""
        columns = self._columns.get(device)
        if columns is None:
            columns = self._columns[device] = SamplingColumns.of(self.batch_params, device)
        return columns


class SamplingGroups:
    """Caches the last group: consecutive steps mostly sample and draft for the same sequences."""

    def __init__(self) -> None:
        self._last = SamplingGroup([])

    def of(self, sequences: Sequence[RunningSequence]) -> SamplingGroup:
        """Return the group of these sequences, compared by identity."""
        if sequences != self._last.sequences:
            self._last = SamplingGroup([*sequences])
        return self._last


NUM_GREEDY_CANDIDATES = 64
"""Candidates rescored where all sampling is greedy. Noise lifts improbable ids; without it more candidates change no
draft."""


@dataclass(slots=True)
class MaskRun:
    """The masks that one sequence drafts from: consecutive rows of one group, which predict what follows the bonus."""

    sequence: RunningSequence
    emitted: Sequence[int]  # tokens of this step, the bonus last; not yet in sequence.ids
    first: int  # flat row number of the first draft's mask
    count: int  # masks, one per draft; at least one

    def row(self, number: int) -> SamplingRow:
        """Return the sampling row of draft `number` (from 0); the drafts before it are still unknown."""
        sequence = self.sequence
        sampling_params, possible = (sequence.sampling_params, None) if number else bounded(sequence, self.emitted)
        return SamplingRow(
            sampling_params,
            sequence.ids,
            sequence.num_prompt,
            tail=self.emitted,
            counts=sequence.counts,
            num_unknown=number,
            possible=possible,
        )


@dataclass(slots=True)
class MaskRows:
    """The mask rows of a step."""

    hidden: Tensor  # [M, hidden]
    logits: Tensor | None  # [M, V] if computed together with the chain rows; else None
    first: int  # flat row number of the first of them

    def of(self, runs: Sequence[MaskRun], model: StepModel) -> tuple[Tensor, Tensor]:
        """Return hidden and logits of the runs' rows, concatenated. The logits may be overwritten."""
        if len(runs) == 1:  # without a copy
            begin = runs[0].first - self.first
            at: slice | Tensor = slice(begin, begin + runs[0].count)
        else:
            numbers = _consecutive([run.first - self.first for run in runs], [run.count for run in runs])
            at = torch.from_numpy(numbers).to(self.hidden.device)
        hidden = self.hidden[at]
        return hidden, model.logits(hidden) if self.logits is None else self.logits[at]


def _draft_rows(runs: Sequence[MaskRun], sampling_group: SamplingGroup) -> SamplingRows:
    """Return the sampling rows of all runs' drafts."""
    return SamplingRows(
        sampling_group.batch_params,
        [len(run.sequence.ids) + len(run.emitted) for run in runs],
        [run.count for run in runs],
        lambda run, number: runs[run].row(number),
    )


def bounded(sequence: RunningSequence, tail: Sequence[int]) -> tuple[SamplingParams, IdBits | None]:
    """Return the sampling parameters after the sequence's ids and `tail`, and the ids its grammar allows there."""
    if sequence.grammar is None:
        return sequence.sampling_params, None
    possible = sequence.grammar.possible(tail)
    return sequence.sampling_params.ending if possible.only_end else sequence.sampling_params, possible.ids


def _consecutive(firsts: Sequence[int], counts: Sequence[int]) -> Ints:
    """Return counts[0] integers from firsts[0], then counts[1] from firsts[1], and so on."""
    starts, lengths = np.array(firsts, dtype=np.int64), np.array(counts, dtype=np.int64)
    behind = lengths.cumsum()
    found: Ints = np.arange(behind[-1], dtype=np.int64) + (starts - behind + lengths).repeat(lengths)
    return found


def candidates(logits: Tensor, rows: SamplingRows, banned_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return each mask's best ids, ascending, and what the sampling parameters add to their logits.

    logits [M, V] (overwritten) -> [M, C] int64, [M, C] float32

    Penalties count as a shift of the mask's own logit, which is close enough for a draft.
    """
    count = min(NUM_CANDIDATES if rows.run_params.samples else NUM_GREEDY_CANDIDATES, logits.shape[1])
    if not rows.run_params.edits and (library := library_for_logits(logits)) is not None:
        return best_of(library, logits, banned_ids, count)
    raw = logits.clone() if rows.run_params.edits else logits
    edit(logits, rows, banned_ids)
    best = torch.topk(logits, count, dim=1, sorted=False)
    ids, order = best.indices.sort(dim=1)
    allowed = best.values.gather(1, order)
    if raw is logits:
        return ids, torch.where(allowed > -math.inf, 0.0, -math.inf)
    return ids, allowed - raw.gather(1, ids)


class MaskDrafter:
    """Drafts with the sampling parameters and the noise that verification uses at the same positions.

    Without a draft head a mask's draft is the token sampled from its logits; with one, its best ids are rescored given
    the token before. Each run uses the head of its adapter.
    """

    def __init__(self, model: StepModel, banned_ids: Tensor, clock: Callable[[], float]) -> None:
        self._model, self._banned = model, banned_ids
        self._computing = Stopwatch(clock)
        self._sampling_groups = SamplingGroups()

    @property
    def seconds(self) -> float:
        """Seconds of tensor work so far."""
        return self._computing.seconds

    def draft(self, rows: MaskRows, runs: Sequence[MaskRun]) -> list[list[int]]:
        """Return the drafts of each run."""
        if not runs:
            return []
        with self._computing:
            masks, logits = rows.of(runs, self._model)  # [M, hidden], [M, V]
        sampling_group = self._sampling_groups.of([run.sequence for run in runs])
        if sampling_group.is_alike:
            return self._drafts(masks, logits, runs, sampling_group)
        kinds: dict[tuple[int | None, bool], list[int]] = {}
        for number, run in enumerate(runs):
            kinds.setdefault((run.sequence.adapter, run.sequence.grammar is not None), []).append(number)
        bounds = [0, *itertools.accumulate(run.count for run in runs)]
        drafts: list[list[int]] = [[] for _ in runs]
        for (_, in_grammar), numbers in kinds.items():
            at = torch.tensor([row for n in numbers for row in range(bounds[n], bounds[n + 1])], device=masks.device)
            some = [runs[n] for n in numbers]
            if in_grammar:
                of_kind = self._drafts_in_grammars(masks[at], logits[at], some)
            else:
                of_kind = self._drafts(masks[at], logits[at], some, SamplingGroup([run.sequence for run in some]))
            for n, chosen in zip(numbers, of_kind, strict=True):
                drafts[n] = chosen
        return drafts

    def _drafts_in_grammars(self, masks: Tensor, logits: Tensor, runs: Sequence[MaskRun]) -> list[list[int]]:
        """Like `_drafts`, one depth at a time: what the grammar allows after a draft depends on that draft."""
        starts = list(itertools.accumulate((run.count for run in runs), initial=0))
        drafts: list[list[int]] = [[] for _ in runs]
        going = list(range(len(runs)))
        for depth in range(max(run.count for run in runs)):
            going = [n for n in going if depth < runs[n].count]
            if not going:
                break
            ones = [MaskRun(runs[n].sequence, [*runs[n].emitted, *drafts[n]], runs[n].first + depth, 1) for n in going]
            at = torch.tensor([starts[n] + depth for n in going], device=masks.device)
            chosen = self._drafts(masks[at], logits[at], ones, SamplingGroup([one.sequence for one in ones]))
            for n, one, (id_,) in zip(list(going), ones, chosen, strict=True):
                if one.sequence.grammar is not None and one.sequence.grammar.num_possible(one.emitted, [id_]):
                    drafts[n].append(id_)
                else:
                    going.remove(n)
        return drafts

    def _drafts(
        self, masks: Tensor, logits: Tensor, runs: Sequence[MaskRun], sampling_group: SamplingGroup
    ) -> list[list[int]]:
        """Return drafts of runs with the same adapter. masks [M, hidden], logits [M, V] (overwritten), M rows."""
        head = self._model.draft_head_of(runs[0].sequence.adapter)
        rows = _draft_rows(runs, sampling_group)
        if head is None:
            with self._computing:
                chosen = sample_rows(logits, rows, self._banned).ids.tolist()
            ends = list(itertools.accumulate((run.count for run in runs), initial=0))
            return [chosen[begin:end] for begin, end in itertools.pairwise(ends)]
        with self._computing:
            ids, offsets = candidates(logits, rows, self._banned)
        return self._rescored(head, masks, ids, offsets, rows, runs, sampling_group)

    def _rescored(
        self,
        head: DraftHeadWeights,
        masks: Tensor,
        ids: Tensor,
        offsets: Tensor,
        rows: SamplingRows,
        runs: Sequence[MaskRun],
        sampling_group: SamplingGroup,
    ) -> list[list[int]]:
        """Run the draft head over all runs at once; a run shorter than the longest repeats its last mask, unread."""
        counts = rows.run_counts
        longest = max(counts)
        at: Tensor | None = None
        if min(counts) < longest:
            lengths = np.array(counts, dtype=np.int64)[:, None]
            starts = lengths.cumsum(axis=0) - lengths
            index = starts + np.minimum(np.arange(longest, dtype=np.int64), lengths - 1)
            at = torch.from_numpy(index).to(masks.device)  # [S, K]
        facts = np.empty((3, len(runs)), dtype=np.int64)
        facts[0] = [run.emitted[-1] for run in runs]
        facts[1], facts[2] = rows.run_positions, sampling_group.batch_params.keys
        bonus, positions, keys = torch.from_numpy(facts).to(masks.device)

        def by_run(of_rows: Tensor) -> Tensor:
            """[M, …] -> [S, K, …]"""
            return of_rows.view(len(runs), longest, -1) if at is None else of_rows[at]

        batch_params = sampling_group.columns(masks.device)
        with self._computing:
            given = by_run(masks), by_run(ids), by_run(offsets), bonus, positions, keys, batch_params
            if head.compiled is not None and head.compiled.obeys(batch_params):
                found = head.compiled.propose(*given)
            else:
                found = propose(
                    *given,
                    w1=head.w1,
                    w2=head.w2,
                    embedding_scale=head.embedding_scale,
                    form=head.form,
                    embed=self._model.embed,
                    logits_of=self._model.logits_of,
                )
            chosen = found.tolist()  # [S, K]
        return [drafts[:count] for drafts, count in zip(chosen, counts, strict=True)]


_log = logging.getLogger(__name__)

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
        seconds_beside: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`controller`, `cost`: None: a SpeculationController, and typical costs. `seconds_beside`: called after a
        step; the seconds it took of a device that other work keeps busy, else None."""
        facts = model.facts
        self.model, self.kv = model, kv
        self._cost = cost or StepCost.typical(facts.device.type)
        self.controller = controller or SpeculationController(self._cost)
        self._began = 0.0  # the last step
        self._output: StepOutput | None = None  # of the last step, until it is taken
        self._out_of_slots: Sequence[RunningSequence] = ()  # in the last step scheduled
        self._draft_source = draft_source
        self._synthetic = synthetic
        self._seconds_beside, self._clock = seconds_beside, clock
        self._sampling, self._sampling_groups = Stopwatch(clock), SamplingGroups()
        self._plan_keys: tuple[PlanKey, ...] = ()  # heads and windows of the layers, known after the first step
        self._banned = torch.tensor(sorted(set(facts.mask_ids)), dtype=torch.int64, device=facts.device)
        self._mask_drafter = MaskDrafter(model, self._banned, clock)
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
        times = StepTimes()
        outputs = self._run_or_fail(scheduled.plans, times)
        self.waited += times.forward + times.sample + times.draft
        self._output = StepOutput(outputs, scheduled.shape, times, self._seconds_beside())

    def get_output(self) -> StepOutput:
        output, self._output = self._output, None
        assert output is not None
        return output

    def update_from_output(self, output: StepOutput, pause: float | None = None) -> None:
        seconds = self._clock() - self._began if output.seconds is None else output.seconds
        self._cost.learn(output.shape, seconds)
        self.controller.stepped(sum(len(one.tokens) for one in output.outputs), seconds, pause)

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

    @torch.inference_mode()
    def run(self, plans: Sequence[ScheduledSequence], times: StepTimes) -> list[SequenceOutput]:
        """Run the scheduled sequences in one forward pass. Adds the seconds of each phase to `times`."""
        clock, facts = self._clock, self.model.facts
        sampling, drafting = self._sampling.seconds, self._mask_drafter.seconds
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
        self._plan_keys = AttentionPlan.keys_of(batch.rows)
        if closing:
            self._verify(closing, logits)
        for number, output in enumerate(outputs):
            if output.plan.sequence.num_prompt_logprobs is not None:
                with self._sampling:
                    output.prompt_logprobs = self._prompt_logprobs(output.plan, hidden, batch.chain_rows[number])
        verified = clock()
        self._draft(batch, hidden, of_masks, outputs)
        drafted = clock()
        sampling, drafting = self._sampling.seconds - sampling, self._mask_drafter.seconds - drafting
        times.forward += forwarded - planned
        times.sample += sampling
        times.draft += drafting
        times.pack += packed - started
        times.attend += planned - packed
        times.verify += verified - forwarded - sampling
        times.propose += drafted - verified - drafting
        return outputs

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
            sequence, num_drafts = output.plan.sequence, output.plan.layout.num_drafts
            behind = first + num_drafts + 1
            accepted = num_accepted(ids[first:behind], sequence.drafts[:num_drafts]) if num_drafts else 0
            made = ids[first : first + accepted + 1]
            if not all_valid:
                fit = valid[first : first + accepted + 1]
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

    def _draft(
        self, batch: ForwardBatch, hidden: Tensor, logits: Tensor | None, outputs: Sequence[SequenceOutput]
    ) -> None:
        """Set the drafts of every sequence that continues: from the draft source, a drafter or its masks.
        logits [M, V]: of all mask rows, if known already."""
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
            proposal = self._proposing.proposal(sequence, output.tokens, wanted) if drafter is not None else None
            if proposal is not None and proposal.beats(mask_chances(sequence.acceptance, depth, count)):
                output.take_proposal(proposal)
            elif group is not None:
                first = batch.mask_rows[number][group.group].start + depth - 1
                output.draft_depth = depth
                by_masks.append((output, proposal))
                runs.append(MaskRun(sequence, output.tokens, first, count))
        rows = MaskRows(hidden[batch.num_chain_rows :], logits, batch.num_chain_rows)
        drafted = self._mask_drafter.draft(rows, runs)
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
                output.take_proposal(proposal, behind=masks)


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
