"""The worker's own step with another rule in the verdict's place: for measuring. Only the coupling serves."""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass, replace

import numpy as np
import torch
from space_model.forward_batch import ForwardBatch
from space_model.space_model import SpaceModel
from space_server.controller import FixedLayout
from space_server.step import Advance, Stepper
from space_server.worker import Worker
from torch import Tensor

from space_eval.exact_law import Floats, softmax
from space_eval.verdict_rules import Rule, expected_accepted, first_draft_chances, outcome_law


class RecordedModel(SpaceModel):
    """A SpaceModel that keeps what its output head said last: to the masks, and to the rescored candidates."""

    def __init__(self, model: SpaceModel) -> None:
        vars(self).update(vars(model))
        self.facts = replace(model.facts, head_rows=0)  # the masks' logits are asked for behind the verdict, alone
        if self.draft_head is not None:  # compiled it would rescore where nobody sees it; the bits are the same
            self.draft_head = replace(self.draft_head, compiled=None)
        self.last_logits = torch.empty(0)
        self.rescored: list[tuple[Tensor, Tensor]] = []  # per mask: ids [M], logits [M]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V]."""
        logits = super().logits(hidden)
        self.last_logits = logits.clone()  # processors write over what is given out
        return logits

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[1, hidden], ids [1, M] -> [1, M]."""
        logits = super().logits_of(hidden, ids)
        self.rescored.append((ids[0], logits[0].clone()))
        return logits


@dataclass(frozen=True)
class Place:
    """A step that had drafts to judge, and what rules would make of it at this very place."""

    num_drafted: int
    first_draft: dict[Rule, float]  # chance that a rule's first draft stands, over drafts and noise
    same_drafts: dict[Rule, float]  # mean accepted drafts of the rules that could judge these drafts


class RuledStepper(Stepper):
    """Steps of one sequence at a time, at a positive temperature and without other processors."""

    def __init__(self, model: SpaceModel, worker: Worker, rule: Rule, seed: int) -> None:
        self._recorded = RecordedModel(model)
        super().__init__(self._recorded, worker.kv)
        self.places: list[Place] = []
        self._rule, self._rng = rule, np.random.default_rng(seed)
        self._mask_ids = sorted(set(model.facts.mask_ids))
        self._q = np.empty((0, model.facts.vocab_size))  # [drafts, V]: what the live drafts were drawn from

    def _judge(self, advances: Run[Advance], logits: Tensor) -> None:
        (advance,) = advances
        drafts, sequence = advance.plan.drafts, advance.plan.sequence
        p, q = self._probabilities(logits, sequence.law.temperature), self._q[: len(drafts)]
        if drafts:
            drawn = () if self._rule.is_coupled else (Rule.TOKEN_WISE, Rule.BLOCK)
            same = {rule: expected_accepted(outcome_law(rule, p, q, drafts)) for rule in drawn}
            self.places.append(Place(len(drafts), first_draft_chances(p[0], q[0]), same))
        if self._rule.is_coupled:
            super()._judge(advances, logits)
            return
        outcomes = outcome_law(self._rule, p, q, drafts)
        accepted = self._draw(outcomes.sum(axis=1))
        made = [*drafts[:accepted], self._draw(outcomes[accepted])]
        count, advance.end = sequence.limits.cut(made, sequence.num_left)
        advance.tokens = made[:count]
        advance.num_accepted = min(accepted, count)

    def _draft(self, batch: ForwardBatch, hidden: Tensor, logits: Tensor | None, advances: Run[Advance]) -> None:
        (advance,) = advances
        sequence = advance.plan.sequence
        law = sequence.law
        if self._rule is Rule.ARGMAX:
            sequence.law = replace(law, temperature=0.0)
        elif not self._rule.is_coupled:  # noise of its own: an independent draw from q
            sequence.law = replace(law, key=int(self._rng.integers(1 << 63)))
        self._recorded.rescored.clear()
        try:
            super()._draft(batch, hidden, logits, advances)
        finally:
            sequence.law = law
        self._q = self._draft_laws(len(advance.drafts), law.temperature)

    def _draft_laws(self, num_drafts: int, temperature: float) -> Floats:
        """[drafts, V]: the head's law over each mask's candidates where there is a head, else the mask's own."""
        if not self._recorded.rescored:
            return self._probabilities(self._recorded.last_logits[:num_drafts], temperature)
        logits = torch.full((num_drafts, self._recorded.facts.vocab_size), -torch.inf)
        for row, (ids, rescored) in zip(logits, self._recorded.rescored, strict=False):
            row[ids.cpu()] = rescored.float().cpu()
        return self._probabilities(logits, temperature)

    def _probabilities(self, logits: Tensor, temperature: float) -> Floats:
        """[N, V] raw -> [N, V]; masks are never chosen."""
        z: Floats = logits.double().cpu().numpy().copy()
        z[:, self._mask_ids] = -np.inf
        return softmax(z / temperature) if len(z) else z

    def _draw(self, weights: Floats) -> int:
        reached = np.cumsum(weights)
        at = int(np.searchsorted(reached, self._rng.random() * reached[-1], side="right"))
        return min(at, int(np.flatnonzero(weights)[-1]))


def ruled_worker(model: SpaceModel, rule: Rule, *, num_drafts: int, seed: int) -> tuple[Worker, RuledStepper]:
    """A worker for one sequence at a time that lays out every group of `num_drafts` masks and judges by `rule`."""
    num_blocks = -(-(model.facts.window + model.facts.num_masks + 1) // 16)
    worker = Worker(
        model,
        num_blocks=num_blocks,
        max_sequences=1,
        max_draft_length=num_drafts,
        controller=FixedLayout.full(num_drafts),
    )
    worker.stepper = stepper = RuledStepper(model, worker, rule, seed)
    return worker, stepper
