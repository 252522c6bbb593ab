"""One step: layout -> rows -> forward -> chain logits -> verdict -> group logits -> drafts -> next state.

A step reads the sequences and says how each of them goes on; it changes none of them, so a step that fails half-way
can be taken again. K and V that it has written lie behind the computed ids, where the next step writes anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Run
from dataclasses import dataclass, field

import torch
from space_kernels.processors import Row
from space_kernels.sampling import IdLogprobs, choose_rows, log_probabilities
from space_kernels.verdict import verify
from space_model.forward_batch import ForwardBatch
from space_model.paged_kv import PagedKV
from torch import Tensor

from space_server.draft_source import DraftSource
from space_server.drafting import MaskRun, draft
from space_server.drafts import BY_MASKS, Origin, Proposal
from space_server.limits import End
from space_server.plan import Plan
from space_server.step_model import StepModel
from space_server.synthetic import SyntheticAcceptance

_LOGPROB_ROWS = 64
"""Prompt rows whose whole vocabulary is held at once."""


@dataclass(slots=True)
class Advance:
    """How one sequence goes on after a step."""

    plan: Plan
    tokens: list[int] = field(default_factory=list)  # emitted, after the cut
    num_accepted: int = 0  # drafts among them that were accepted
    end: End | None = None
    drafts: list[int] = field(default_factory=list)  # for the next step
    draft_depth: int = 1  # mask number of the first of them; 0: from no mask
    origin: Origin = BY_MASKS  # who proposed them
    num_predicted: int = 0  # ids of the client's prediction that appeared with this step
    logprobs: list[IdLogprobs] = field(default_factory=list)
    prompt_logprobs: list[IdLogprobs] = field(default_factory=list)
    error: str | None = None  # the sequence cannot go on

    def commit(self) -> None:
        """Let the sequence go on."""
        sequence = self.plan.sequence
        if self.error is not None:
            return
        if self.plan.closes:
            sequence.emit(self.tokens, self.num_accepted, self.drafts, self.draft_depth, self.origin)
        else:
            sequence.advance(self.plan.num_pending)


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step, by phase."""

    forward: float = 0.0  # network, and the head over the chain rows
    sample: float = 0.0  # processors, noise, verdict, log-probabilities
    draft: float = 0.0  # the head over the accepted groups, draft head, choice of drafts


class Stepper:
    """Takes steps of one model on its pages."""

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
        facts = model.facts
        self._banned = torch.tensor(sorted(set(facts.mask_ids)), dtype=torch.int64, device=facts.device)
        self._not_drafted = frozenset(facts.mask_ids)

    @torch.inference_mode()
    def run(self, plans: Run[Plan], times: StepTimes) -> list[Advance]:
        """Run the plans in one forward pass. Adds the seconds each phase took to `times`."""
        started = self._clock()
        facts = self.model.facts
        batch = ForwardBatch.build(
            [plan.segment for plan in plans],
            block_size=self.kv.block_size,
            mask_ids=facts.mask_ids,
            adapter_masks=[adapter.num_masks for adapter in facts.adapters],
            device=facts.device,
        )
        hidden = self.model.forward(batch, self.kv)  # [R, hidden]
        self.num_forwards += 1
        advances = [Advance(plan) for plan in plans]
        closing = [number for number, plan in enumerate(plans) if plan.closes]
        logits = self._chain_logits(batch, hidden, plans, closing)
        forwarded = self._clock()
        if closing:
            self._judge([advances[number] for number in closing], logits)
        for number, advance in enumerate(advances):
            if advance.plan.sequence.num_prompt_logprobs is not None:
                advance.prompt_logprobs = self._prompt_logprobs(advance.plan, hidden, batch.chain_rows[number])
        judged = self._clock()
        self._draft(batch, hidden, advances)
        times.forward += forwarded - started
        times.sample += judged - forwarded
        times.draft += self._clock() - judged
        return advances

    def _chain_logits(self, batch: ForwardBatch, hidden: Tensor, plans: Run[Plan], closing: Run[int]) -> Tensor:
        """Roots and live drafts of the closing plans, one after the other: [N, V]."""
        rows = [row for n in closing for row in batch.chain_rows[n][-1 - plans[n].layout.num_drafts :]]
        if not rows:
            return hidden.new_empty(0, self.model.facts.vocab_size, dtype=torch.float32)
        return self.model.logits(hidden[torch.tensor(rows, device=hidden.device)])

    def _judge(self, advances: Run[Advance], logits: Tensor) -> None:
        """Choose at every chain row, accept the drafts that agree, cut at the first end. logits [N, V] raw."""
        rows = [row for advance in advances for row in _chain_choices(advance.plan)]
        first = [0]
        for advance in advances:
            first.append(first[-1] + advance.plan.layout.num_drafts + 1)
        raw = {
            n: logits[first[n] : first[n + 1]].clone()
            for n, advance in enumerate(advances)
            if advance.plan.sequence.num_logprobs is not None
        }
        choice = choose_rows(logits, rows, self._banned)

        live = [advance.plan.layout.num_drafts for advance in advances]
        k = max(live)
        column = torch.arange(k + 1, device=logits.device)
        num_live = torch.tensor(live, device=logits.device)
        at = torch.tensor(first[:-1], device=logits.device)[:, None] + torch.minimum(column, num_live[:, None])
        drafts = torch.tensor(
            [advance.plan.drafts + [0] * (k - d) for advance, d in zip(advances, live, strict=True)],
            dtype=torch.int64,
            device=logits.device,
        ).view(len(advances), k)
        verdict = verify(choice.ids[at], drafts, num_live)
        accepted, emitted = verdict.accepted.tolist(), verdict.emitted.tolist()
        usable = choice.usable[at].tolist()

        for n, advance in enumerate(advances):
            sequence, made = advance.plan.sequence, emitted[n][: accepted[n] + 1]
            if not usable[n][0]:
                advance.error = (
                    f"No id can be chosen at position {rows[first[n]].position}: "
                    "the logits are not finite, or every id is forbidden."
                )
                continue
            if not all(usable[n][: len(made)]):
                # What stands before the row without a choice stands alone too; the next step has that row for its root.
                made = made[: usable[n].index(False)]
            count, advance.end = sequence.limits.cut(made, sequence.num_left)
            advance.tokens = made[:count]
            advance.num_accepted = min(accepted[n], count)
            if n in raw:
                advance.logprobs = log_probabilities(raw[n][:count], advance.tokens, sequence.num_logprobs or 0)

    def _prompt_logprobs(self, plan: Plan, hidden: Tensor, rows: range) -> list[IdLogprobs]:
        """Row i predicts id i+1: those of them that are prompt."""
        sequence = plan.sequence
        start = sequence.num_computed
        targets = sequence.ids[start + 1 : min(start + plan.num_pending + 1, sequence.num_prompt)]
        found: list[IdLogprobs] = []
        for begin in range(0, len(targets), _LOGPROB_ROWS):
            ids = targets[begin : begin + _LOGPROB_ROWS]
            logits = self.model.logits(hidden[rows.start + begin : rows.start + begin + len(ids)])
            found += log_probabilities(logits, ids, sequence.num_prompt_logprobs or 0)
        return found

    def _draft(self, batch: ForwardBatch, hidden: Tensor, advances: Run[Advance]) -> None:
        """Propose for every sequence that goes on: by the draft source, or by its masks."""
        by_masks: list[tuple[Advance, Proposal | None]] = []
        runs: list[MaskRun] = []
        for number, advance in enumerate(advances):
            plan, sequence = advance.plan, advance.plan.sequence
            if advance.end is not None and self._synthetic is not None:
                self._synthetic.ended(sequence, advance.tokens)
            if not plan.closes or advance.error is not None:
                continue
            drafter = sequence.drafter
            if drafter is not None:
                advance.num_predicted = drafter.extend(sequence.ids, advance.tokens)
            wanted = min(sequence.max_drafts, sequence.num_left - len(advance.tokens) - 1)
            if advance.end is not None or wanted < 1:
                continue
            if self._draft_source is not None:
                known = [*sequence.ids, *advance.tokens]
                proposed = self._draft_source.propose(sequence.seq_id, known, wanted)
                if proposed is not None:
                    advance.drafts, advance.draft_depth = self._valid(list(proposed[:wanted])), 0
                    continue
            group = plan.layout.next_drafts(len(advance.tokens) - 1)  # the last token stands where its bonus does
            depth, count = (group.first_mask, min(group.num_drafts, wanted)) if group is not None else (1, 0)
            proposal = drafter.propose(wanted) if drafter is not None else None
            if (
                drafter is not None
                and proposal is not None
                and proposal.beats(drafter.mask_chances(sequence.acceptance, depth, count))
            ):
                advance.drafts, advance.draft_depth = self._valid(proposal.ids), 0
                advance.origin = proposal.origin(len(advance.drafts))
            elif group is not None:
                rows = batch.mask_rows[number][group.group][depth - 1 : depth - 1 + count]
                advance.draft_depth = depth
                by_masks.append((advance, proposal))
                runs.append(MaskRun(sequence, advance.tokens, rows))
        for (advance, proposal), drafts in zip(by_masks, draft(self.model, hidden, runs, self._banned), strict=True):
            advance.drafts = self._valid(drafts)
            if self._synthetic is not None:
                advance.drafts = self._synthetic.drafts(
                    advance.plan.sequence, advance.tokens, advance.draft_depth, advance.drafts
                )
            elif advance.plan.sequence.drafter is not None:
                self._go_on_behind(advance, proposal)

    def _go_on_behind(self, advance: Advance, proposal: Proposal | None) -> None:
        """Where the masks' drafts agree with the proposal as far as they go, the proposal goes on behind them."""
        drafter, masks = advance.plan.sequence.drafter, advance.drafts
        if drafter is None:
            return
        drafter.masks_proposed(advance.draft_depth, masks)
        if proposal is not None and proposal.goes_on_behind(masks):
            advance.drafts = self._valid(proposal.ids)
            behind = drafter.mask_chances(advance.plan.sequence.acceptance, advance.draft_depth, len(masks))
            advance.origin = proposal.origin(len(advance.drafts), behind)

    def _valid(self, drafts: list[int]) -> list[int]:
        """The drafts before the first one that can never be chosen."""
        for count, id_ in enumerate(drafts):
            if not 0 <= id_ < self.model.facts.vocab_size or id_ in self._not_drafted:
                return drafts[:count]
        return drafts


def _chain_choices(plan: Plan) -> list[Row]:
    """The choices of the root and of each draft, behind the hypothetical prefix that each of them closes."""
    sequence, drafts = plan.sequence, plan.drafts
    return [
        Row(sequence.law, sequence.ids, sequence.num_prompt, tail=drafts[:i], counts=sequence.counts)
        for i in range(len(drafts) + 1)
    ]
