"""How many prompt rows go into one step: few enough that those who decode beside them do not wait. Torch-free.

What counts is not what a step is expected to take, but what it is feared to: who waits for a token feels the worst of
them. `StepCost.feared` says how far that is, and comes nearer as prompts are read.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass

from space_server.batch.sequence import RunningSequence
from space_server.step_costs.step_cost import StepCost, StepShape

LEAST_ROWS = 8
"""Of every step that has prompt rows to compute: a prompt gets on, whatever the budget."""

ROW_STEP = 4
"""Fewer rows than these make no difference: steps are padded to a multiple."""


@dataclass(frozen=True)
class PrefillBudget:
    """At most `max_rows`; and while others decode, no more than keep the step within `seconds`."""

    max_rows: int
    seconds: float | None = None  # None: those who decode wait as long as it takes
    cost: StepCost | None = None  # by which seconds are told; needed with `seconds`

    def rows(self, decoding: Run[RunningSequence], able: Run[RunningSequence]) -> int:
        """Prompt rows of the next step. `able`: all that can run; `decoding`: those with one pending id.

        All rows are taken for rows of the prompt that has most behind it, which they must attend to.
        """
        if self.seconds is None or self.cost is None or not decoding:
            return self.max_rows
        computed = max(sequence.num_computed for sequence in able if sequence.num_pending > 1)
        context = sum(sequence.num_computed for sequence in decoding)
        least, most = min(LEAST_ROWS, self.max_rows), self.max_rows
        while most - least >= ROW_STEP:
            rows = (least + most + 1) // 2
            shape = StepShape(len(decoding), len(decoding), 0, 0, rows, rows * computed, context)
            if self.cost.feared(shape) <= self.seconds:
                least = rows
            else:
                most = rows - 1
        return least

    def allows(self, shape: StepShape) -> bool:
        """Whether a step may be so large: one with prompt rows beside sequences that decode keeps within `seconds`."""
        if self.seconds is None or self.cost is None or not shape.num_prefill_rows:
            return True
        has_drafts = shape.num_chain_rows > shape.num_sequences or shape.num_mask_rows > 0
        return not has_drafts or self.cost.feared(shape) <= self.seconds
