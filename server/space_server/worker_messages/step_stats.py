"""Statistics of a step, for the router's report and for the cost model."""

from __future__ import annotations

from space_proto import worker_pb2 as pb

from space_server.device_runner.device_runner import StepRead
from space_server.host_runner.host_runner import StepTimes
from space_server.scheduling.scheduled_batch import ScheduledBatch
from space_server.step_costs.step_cost import StepCost, StepShape


def count_step(stats: pb.StepStats, plan: ScheduledBatch, times: StepTimes, seconds: float, cost: StepCost) -> None:
    """Record a host step in `stats`, which are empty, and teach `cost` its duration."""
    shape = plan.shape
    stats.chain_rows, stats.mask_rows, stats.prefill_rows = (
        shape.num_chain_rows,
        shape.num_mask_rows,
        shape.num_prefill_rows,
    )
    stats.forward_seconds, stats.sample_seconds, stats.draft_seconds = times.forward, times.sample, times.draft
    stats.num_sequences = len(plan.plans)
    _count_drafts(stats, [one.layout.num_drafts for one in plan.plans if one.closes and one.num_pending == 1])
    cost.learn(shape, seconds)
    if not shape.num_prefill_rows:
        stats.plain_step_seconds = cost.seconds(StepShape.plain(shape.num_sequences, shape.num_context))


def count_read(stats: pb.StepStats, read: StepRead, cost: StepCost) -> None:
    """Add a device step to `stats`, and teach `cost` its duration."""
    if read.shape.num_sequences and read.is_usual:
        cost.learn(read.shape, read.seconds)
    if not read.outputs:
        return
    layouts = [output.plan.layout for output in read.outputs]
    stats.chain_rows += sum(1 + layout.num_drafts for layout in layouts)
    stats.mask_rows += sum(layout.num_masks for layout in layouts)
    stats.forward_seconds += read.computing
    stats.num_sequences += len(layouts)
    _count_drafts(stats, [layout.num_drafts for layout in layouts])
    if not stats.prefill_rows:
        shape = read.shape
        stats.plain_step_seconds += cost.seconds(StepShape.plain(shape.num_sequences, shape.num_context))


def _count_drafts(stats: pb.StepStats, num_drafts: list[int]) -> None:
    """Count decoding sequences by their number of drafts."""
    known = stats.draft_length_counts
    known.extend([0] * (max(num_drafts, default=-1) + 1 - len(known)))
    for count in num_drafts:
        known[count] += 1
