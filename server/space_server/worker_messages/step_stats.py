"""What a step was and what it cost: for the router's report, and for the next choice of a layout."""

from __future__ import annotations

from space_proto import worker_pb2 as pb

from space_server.device_runner.device_runner import StepRead
from space_server.host_runner.host_runner import StepTimes
from space_server.scheduling.scheduled_batch import ScheduledBatch
from space_server.step_costs.step_cost import StepCost, StepShape


def count_step(stats: pb.StepStats, plan: ScheduledBatch, times: StepTimes, seconds: float, cost: StepCost) -> None:
    """A step of the host's, the first thing in these stats. `cost` learns from it."""
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
    """A step of the device's, beside what is in these stats already."""
    if read.shape.num_sequences and read.is_usual:
        cost.learn(read.shape, read.seconds)
    if not read.advances:
        return
    layouts = [advance.plan.layout for advance in read.advances]
    stats.chain_rows += sum(1 + layout.num_drafts for layout in layouts)
    stats.mask_rows += sum(layout.num_masks for layout in layouts)
    stats.forward_seconds += read.computing
    stats.num_sequences += len(layouts)
    _count_drafts(stats, [layout.num_drafts for layout in layouts])
    if not stats.prefill_rows:
        shape = read.shape
        stats.plain_step_seconds += cost.seconds(StepShape.plain(shape.num_sequences, shape.num_context))


def _count_drafts(stats: pb.StepStats, num_drafts: list[int]) -> None:
    """Sequences that decoded, by how many drafts they had."""
    known = stats.draft_length_counts
    known.extend([0] * (max(num_drafts, default=-1) + 1 - len(known)))
    for count in num_drafts:
        known[count] += 1
