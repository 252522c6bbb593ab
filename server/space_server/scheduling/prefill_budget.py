"""Limits the prompt tokens of one step, so that decoding sequences do not wait long. Torch-free.

The limit uses a pessimistic step duration, not the expected one, because users notice the slowest token.
`StepCost.feared` gives that bound; it approaches the expected duration as prompts are measured.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass

from space_server.batch.sequence import RunningSequence
from space_server.step_costs.step_cost import StepCost, StepShape

LEAST_ROWS = 8
"""Every step with pending prompt tokens computes at least so many: prefill progresses under any budget."""

ROW_STEP = 4
"""Granularity of the search: steps are padded to a multiple of this."""


@dataclass(frozen=True)
class PrefillBudget:
    """At most `max_rows` prompt tokens; beside decoding sequences, few enough to stay within `seconds`."""

    max_rows: int
    seconds: float | None = None  # None: no limit
    cost: StepCost | None = None  # estimates the duration; needed with `seconds`

    def rows(self, decoding: Run[RunningSequence], able: Run[RunningSequence]) -> int:
        """Return the number of prompt tokens for the next step.

        `able`: all sequences that can run; `decoding`: those with one pending id. Every prompt row is costed at the
        longest computed prefix among the prompts.
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
        """Whether a step of prompt rows beside decoding sequences with drafts stays within `seconds`."""
        if self.seconds is None or self.cost is None or not shape.num_prefill_rows:
            return True
        has_drafts = shape.num_chain_rows > shape.num_sequences or shape.num_mask_rows > 0
        return not has_drafts or self.cost.feared(shape) <= self.seconds
