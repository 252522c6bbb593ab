"""What so many rows take in one pass, measured, and what SPACE §5 makes of it: speed-up = E · t(B) / t(B·T)."""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_server.step_model import StepModel

BLOCK_SIZE = 16
MOST_ROWS = 512
"""Beyond it every row costs the same: the last two points are drawn on."""
NUM_TIMES = 5


@dataclass(frozen=True)
class RowCurve:
    """Seconds by number of rows: straight lines between measured points."""

    points: tuple[tuple[int, float], ...]  # ascending rows, two or more

    def seconds(self, num_rows: float) -> float:
        """Of so many rows."""
        at = bisect.bisect_left([rows for rows, _ in self.points], num_rows)
        at = min(max(at, 1), len(self.points) - 1)
        (rows, low), (more, high) = self.points[at - 1 : at + 1]
        return max(low + (high - low) * (num_rows - rows) / (more - rows), 1e-9)


@dataclass(frozen=True)
class PassCost:
    """A forward pass by its rows, and the output head by those sampled."""

    network: RowCurve
    head: RowCurve

    def seconds(self, *, num_rows: float, num_sampled: float) -> float:
        """t: model computation alone; no host, no context."""
        return self.network.seconds(num_rows) + self.head.seconds(num_sampled)

    def speed_up(self, *, tokens_per_step: float, num_sequences: int, num_rows: float, num_chain_rows: float) -> float:
        """E · t(B) / t(B·T): rows of a whole step. Sampled are the chain rows, and the masks that give next drafts."""
        plain = self.seconds(num_rows=num_sequences, num_sampled=num_sequences)
        num_sampled = 2 * num_chain_rows - num_sequences
        return tokens_per_step * plain / self.seconds(num_rows=num_rows, num_sampled=num_sampled)


def measure_pass(
    model: StepModel, *, most_rows: int = MOST_ROWS, clock: Callable[[], float] = time.perf_counter
) -> PassCost:
    """Rows of one sequence without cached ids; the median of a few times."""
    facts = model.facts
    most_rows = max(4, min(most_rows, facts.window - 1))
    kv = model.allocate_kv(-(-most_rows // BLOCK_SIZE), BLOCK_SIZE)
    pages = list(range(kv.num_blocks))
    id_ = next(id_ for id_ in range(facts.vocab_size) if id_ not in set(facts.mask_ids))
    counts = [rows for exponent in range(16) if (rows := 1 << exponent) <= most_rows]
    passes: dict[int, list[float]] = {count: [] for count in counts}
    heads: dict[int, list[float]] = {count: [] for count in counts}
    for number in range(NUM_TIMES + 1):  # all counts in turn, so that a machine that gets slower slows all
        for count in counts:
            batch = ForwardBatch.build(
                [Segment([id_] * count, 0, pages)],
                block_size=BLOCK_SIZE,
                mask_ids=facts.mask_ids,
                adapter_masks=[adapter.num_masks for adapter in facts.adapters],
                device=facts.device,
            )
            begun = clock()
            hidden = model.forward(batch, kv)[:count]
            passed = clock()
            model.logits(hidden)
            if number:  # the first time warms up
                passes[count].append(passed - begun)
                heads[count].append(clock() - passed)
    return PassCost(_curve(passes), _curve(heads))


def _curve(seconds: Mapping[int, Sequence[float]]) -> RowCurve:
    return RowCurve(tuple((count, statistics.median(values)) for count, values in seconds.items()))


def crossing(ratios: Sequence[tuple[int, float]]) -> str:
    """The batch at which the ratio falls below 1, on a straight line over log(batch): `5.7`, `< 1` or `> 64`."""
    if not ratios:
        return "–"
    if ratios[0][1] < 1.0:
        return f"< {ratios[0][0]}"
    for (batch, ratio), (next_batch, next_ratio) in pairwise(ratios):
        if next_ratio < 1.0:
            share = (ratio - 1.0) / (ratio - next_ratio)
            return f"{batch * (next_batch / batch) ** share:.1f}"
    return f"> {ratios[-1][0]}"
