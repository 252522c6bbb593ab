"""Runs steps on the device, one launched before the last is read.

    runner.launch(layout)      a step of the current batch; returns without waiting
    runner.read()              the outputs of the oldest step in flight

    launch 1 | launch 2 | read 1 | launch 3 | read 2 | …
    device:    [ step 1     ][ step 2           ][ step 3  …

Changes made by the host between two launches take effect at the second. A sequence that ended in a step not yet read
takes part in the next one as a dead row, which writes nothing.

While some sequence has a drafter that reads its text, each step is launched only after the last one was read, when its
drafts are known. That leaves a gap between steps, which costs less than stepping those sequences from the host: that
would be a second pass over the weights.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from space_kernels.dispatch import StepOps, step_ops_for
from space_kernels.sampling.device_sampling import Stages
from space_kernels.step.state import RESULT_FIXED, result_width
from space_kernels.step.verification import EndCode
from space_model.free_memory import is_out_of_memory
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch
from space_model.networks.network import PagedKV
from torch import Tensor

from space_server.batch import RunningSequence, SequenceEnd
from space_server.device_runner.device_batch import DeviceBatch, DeviceScheduler, layout_ahead
from space_server.device_runner.device_forward import (
    MOST_TOP,
    DeviceForward,
    Forward,
    HostForward,
    LogprobReport,
    StepGraphs,
    StepKind,
    TensorForward,
    num_cells,
    round_up_count,
    round_up_pages,
    round_up_top,
)
from space_server.device_runner.graphs_ahead import GraphsAhead, kinds_ahead, sizes_ahead
from space_server.device_runner.prompt_graphs import PromptForward, PromptKind
from space_server.drafts import BY_HEAD, chances_of
from space_server.host_runner import no_choice
from space_server.machine.memory import free_bytes, give_back_unused
from space_server.model_runner import ModelRunner, Proposing, SequenceOutput, StepModel, StepOutput, StepTimes
from space_server.scheduled_batch import PrefillBudget, ScheduledSequence
from space_server.speculation.controller import Controller, SpeculationController, StepLoad
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.step_cost import StepCost, StepShape


class Timeline:
    """Marks in a device's work queue, and seconds between them; of a CPU, whose work is done when a call returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def mark(self) -> Any:
        """Record the moment at which all work queued so far is done."""
        return self._clock()

    def wait(self, mark: Any) -> None:
        """Block until that moment."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two moments that have passed."""
        return float(end - begin)


class CudaTimeline(Timeline):
    """Marks in the current stream of a CUDA device, whose clock counts."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000.0


BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Padded batch sizes: the smallest that holds all sequences; beyond the last, multiples of it."""

_ENDS = {
    EndCode.NONE: None,
    EndCode.EOS: SequenceEnd.EOS,
    EndCode.STOP_ID: SequenceEnd.STOP_ID,
    EndCode.LENGTH: SequenceEnd.LENGTH,
    EndCode.ERROR: None,
}

_USUAL_CONTEXT = 256  # computed ids of a usual sequence

AHEAD = 2  # most steps in flight: one that runs, and one queued behind it
MOST_FAILURES = 3  # consecutive launch failures after which all sequences are stepped on the host for good

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight."""

    kind: StepKind
    sequences: list[RunningSequence | None]  # by batch index, as of the launch
    seq_ids: frozenset[int]
    logprob_indices: list[int]  # batch indices whose log-probabilities are in the result
    result: Tensor  # [cells] int32 on the host, once `done`
    begun: Any
    done: Any
    last: Any | None  # end of the step before, if this one was queued behind it
    is_usual: bool


class DeviceRunner(ModelRunner):
    """A ModelRunner whose sequences keep their state on the device."""

    def __init__(
        self,
        model: StepModel,
        kv: PagedKV,
        *,
        max_sequences: int,
        controller: Controller | None = None,
        cost: StepCost | None = None,
        eager: bool = False,
        ops: StepOps | None = None,
        forward: Callable[[StepModel, PagedKV], Forward] | None = None,
        max_drafts: int | None = None,
        synthetic: SyntheticAcceptance | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`controller`, `cost`: None: a SpeculationController, and typical costs. `eager`: run without CUDA graphs.
        `ops` and `forward`: None selects those of the device.

        `max_drafts`: most drafts per sequence and step; None: the number of masks. `synthetic`: replaces drafts to
        reach a given acceptance.
        """
        facts = self._facts = model.facts
        on_gpu = facts.device.type == "cuda"
        self.batch = DeviceBatch(
            facts, max_sequences=max_sequences, block_size=kv.block_size, max_drafts=max_drafts, synthetic=synthetic
        )
        self._cost = cost or StepCost.typical(facts.device.type)
        captures = on_gpu and not eager
        self._fixed = controller
        self._new_controller = partial(SpeculationController, self._cost, has_few_layouts=captures, shares_layout=True)
        self.controller = controller or self._new_controller()
        self.scheduler = DeviceScheduler(self.batch, self.controller)
        self._num_failures = 0  # consecutive failed launches
        self._proposing = Proposing(facts)
        self._drafted_for: set[int] = set()  # sequences with drafts from the host since the last launch
        self._synthetic = synthetic

        state = self.batch.state
        forward = forward or (TensorForward if on_gpu else HostForward)
        ops = ops or step_ops_for(facts.device)
        step = DeviceForward(
            model, state, ops, forward(model, kv), self.batch.logprob_indices, self.batch.synthetic_tensors
        )
        self._take: Callable[[StepKind], Tensor] = step.take
        most = state.drafts.shape[1]
        self._width = result_width(most)
        size = max_sequences * self._width + num_cells(max_sequences, most + 1, min(MOST_TOP, facts.vocab_size))
        self._max_pages = state.page_table.shape[1]
        self._graphs: StepGraphs[StepKind | PromptKind] | None = None
        self._prompts: PromptForward | None = None
        self._ahead: GraphsAhead | None = None
        if captures:
            prompts = self._prompts = PromptForward(model, kv, max_pages=self._max_pages)

            def take(kind: StepKind | PromptKind) -> Tensor:
                return prompts.take(kind) if isinstance(kind, PromptKind) else step.take(kind)

            self._graphs = StepGraphs(take, torch.zeros(size, dtype=torch.int32, device=facts.device))
            self._take = self._graphs
        # two buffers: at most two steps are in flight
        self._on_host = [torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._timeline: Timeline = CudaTimeline() if on_gpu else Timeline(clock)
        self._clock, self._on_gpu = clock, on_gpu
        self._launched: deque[Launched] = deque()
        self._last: Any | None = None  # end of the last step, if no other work was queued since

    @property
    def sequences(self) -> list[RunningSequence]:
        return [*self.batch]

    @property
    def out_of_slots(self) -> list[RunningSequence]:
        return [one for one in self.batch if one.num_free_slots(self.batch.state.block_size) < 1]

    @property
    def reads_first(self) -> bool:
        return self.scheduler.reads_first

    @property
    def num_in_flight(self) -> int:
        return len(self._launched)

    @property
    def num_replays(self) -> int:
        return 0 if self._graphs is None else self._graphs.num_replays

    @property
    def works(self) -> bool:
        """False after too many failed launches."""
        return self._num_failures < MOST_FAILURES

    def schedule(
        self,
        batch: Iterable[RunningSequence],
        budget: PrefillBudget,
        *,
        reported: Set[int] = frozenset(),
        elsewhere: Sequence[RunningSequence] = (),
    ) -> DraftLayout | None:
        if reported and self.num_in_flight:  # one report holds one step of a sequence
            return None
        self.scheduler.admit(batch, works=self.works)
        return self._next_layout()

    def _next_layout(self) -> DraftLayout | None:
        """Return the layout of one more step; None where enough are in flight, or no sequence can run."""
        reads_first = self.reads_first
        if self.num_in_flight >= (1 if reads_first else AHEAD) or not self.scheduler.has_runnable(self.num_with):
            return None
        return self.scheduler.layout(reads_first=reads_first)

    def execute_model(self, scheduled: DraftLayout) -> None:
        """Launch the step, and one more behind it if its drafts need not be known."""
        layout: DraftLayout | None = scheduled
        try:
            while layout is not None:
                self.launch(layout)
                layout = self._next_layout()
            return
        except Exception as error:
            self._count_failure(error)
            wants_memory = is_out_of_memory(error)
        if wants_memory:
            give_back_unused()

    def _count_failure(self, error: Exception) -> None:
        self.has_failed = True
        self._num_failures += 1
        _log.warning("a device step of %d sequences failed (%s); they are stepped on the host", len(self.batch), error)
        if not self.works:
            _log.error(
                "%d device steps in a row have failed; all sequences are stepped on the host from now on",
                self._num_failures,
            )

    def get_output(self) -> StepOutput:
        output = self.read()
        if not self.has_failed:
            self._num_failures = 0
        return output

    def update_from_output(self, output: StepOutput, pause: float | None = None) -> None:
        if not output.is_usual or output.seconds is None:
            return
        if output.shape.num_sequences:
            self._cost.learn(output.shape, output.seconds)
        self.controller.stepped(sum(len(one.tokens) for one in output.outputs), output.seconds)

    def give_back(self) -> None:
        self.has_failed = False
        self.scheduler.give_back()

    def reset(self) -> None:
        while self.num_in_flight:
            self.read()
        self.scheduler.reset()

    def num_with(self, sequence: RunningSequence) -> int:
        """Return how many steps in flight include this sequence."""
        return sum(sequence.seq_id in launched.seq_ids for launched in self._launched)

    def refers_to(self, seq_id: int) -> bool:
        return any(seq_id in launched.seq_ids for launched in self._launched)

    def launch(self, layout: DraftLayout) -> None:
        """Launch one more step without waiting. At most two may be in flight."""
        batch = self.batch
        batch_size = bucket(len(batch), len(batch.by_index))
        batch.close_gaps(batch_size)
        batch.send_pages()
        batch.send_drafts(self._drafted_for)
        self._drafted_for.clear()
        logprob_indices, num_top = batch.send_logprob_indices()
        kind = StepKind(
            batch_size,
            layout,
            batch.stages,
            self._num_pages(),
            num_with_logprobs=round_up_count(len(logprob_indices), batch_size),
            num_top=round_up_top(num_top),
            adapter=batch.adapter if layout.makes_drafts else None,
        )
        begun = self._timeline.mark()
        result = self._take(kind)
        on_host = self._on_host[self.num_forwards % 2][: len(result)]
        on_host.copy_(result, non_blocking=True)
        last, self._last = self._last if self._launched else None, self._timeline.mark()
        if not self._on_gpu:
            self.waited += self._timeline.seconds(begun, self._last)
        seq_ids = frozenset(sequence.seq_id for sequence in batch)
        by_index = batch.by_index[:batch_size]
        is_usual = self._graphs is None or self._graphs.was_usual
        self._launched.append(
            Launched(kind, by_index, seq_ids, logprob_indices, on_host, begun, self._last, last, is_usual)
        )
        self.num_forwards += 1

    def forward_prompts(self, batch: ForwardBatch) -> tuple[Tensor, bool] | None:
        """Run the forward pass of a host step by a CUDA graph: [R, hidden] after the final norm, and whether nothing
        was compiled or captured for it. None: it is no step of small prompts, or is not captured here."""
        graphs, prompts = self._graphs, self._prompts
        if graphs is None or prompts is None:
            return None
        kind = prompts.kind_of(batch)
        if kind is None or not graphs.can_capture(kind):
            return None
        prompts.send(batch, kind)
        graphs(kind)
        return prompts.hidden(batch, kind), graphs.was_usual

    def read(self) -> StepOutput:
        """Wait for the oldest step in flight. Sequences removed since its launch are left out of the outputs."""
        launched = self._launched.popleft()
        timeline, wait_began = self._timeline, self._clock()
        timeline.wait(launched.done)
        self.waited += self._clock() - wait_began
        layout, outputs = launched.kind.layout, []
        rows, logprobs = self._split_result(launched)
        num_running = num_drafting = context = noisy = 0
        for batch_index, (sequence, row) in enumerate(zip(launched.sequences, rows, strict=True)):
            if sequence is None:
                continue
            length, _, _, end, num_known, _ = row[:RESULT_FIXED]
            if not length and end == EndCode.NONE:
                continue  # it had ended, or had no slot
            num_running += 1
            num_drafting += layout.num_masks > 0
            context += num_known - length - 1
            noisy += not sequence.sampling_params.greedy
            if sequence.seq_id in self.batch:
                output = self._advance(sequence, layout, row)
                if logprobs is not None and sequence.num_logprobs is not None:
                    number = launched.logprob_indices.index(batch_index)
                    output.logprobs = logprobs.of(number, output.tokens, sequence.num_logprobs)
                if sequence.drafter is not None and output.error is None:
                    self._ask_drafter(output)
                outputs.append(output)
        chain, masks = num_running * (layout.num_drafts + 1), num_running * layout.num_masks
        noisy_rows = noisy * (layout.num_drafts + 1)
        shape = StepShape(
            num_running,
            chain,
            masks,
            num_drafting,
            num_context=context,
            num_noisy_rows=noisy_rows,
            num_head_steps=layout.head_drafts,
        )
        computing = timeline.seconds(launched.begun, launched.done)
        gap = timeline.seconds(launched.last, launched.begun) if launched.last is not None else 0.0
        seconds = computing + min(gap, computing)
        return StepOutput(outputs, shape, StepTimes(forward=computing), seconds, launched.is_usual)

    def _ask_drafter(self, output: SequenceOutput) -> None:
        """Let the drafter read the output. Use its proposal if it is expected to beat the masks' drafts or continues
        them, and no step in flight includes the sequence."""
        sequence, tokens = output.plan.sequence, output.tokens
        assert sequence.drafter is not None
        output.num_predicted = sequence.drafter.extend(sequence.ids, tokens)
        wanted = output.max_drafts
        if output.end is not None or wanted < 1 or self.refers_to(sequence.seq_id):
            return
        proposal = self._proposing.proposal(sequence, tokens, wanted)
        is_by_head = output.origin is BY_HEAD
        acceptance = sequence.head_acceptance if is_by_head else sequence.acceptance
        masks = chances_of(acceptance, output.draft_depth, len(output.drafts))
        if proposal is not None:
            output.offered_chances = proposal.known_chances
        if proposal is not None and proposal.beats(masks):
            output.take_proposal(proposal)
        elif is_by_head or not self._proposing.join(output, proposal):
            return
        self._drafted_for.add(sequence.seq_id)

    def _split_result(self, launched: Launched) -> tuple[list[list[int]], LogprobReport | None]:
        """Split a step's result into one row per batch index, and the log-probabilities."""
        kind, size = launched.kind, launched.kind.batch_size * self._width
        rows: list[list[int]] = launched.result[:size].view(kind.batch_size, -1).tolist()
        if not kind.num_with_logprobs:
            return rows, None
        return rows, LogprobReport(launched.result[size:], kind.num_with_logprobs, kind.layout.num_drafts + 1)

    def take_largest(self) -> None:
        """Run the steps that use most memory until their graphs are captured: full batch size, whole mask groups (or
        most drafts of the recurrent head, without masks), sampling with top-p, longest page lists; and the largest
        prompts. The batch is empty and there are no prompts, so nothing is written."""
        facts = self._facts
        most, by_head = facts.most_masks, facts.most_head_drafts
        if most or not by_head:
            layout = DraftLayout.full(most, most)
            own, others = len(facts.mask_ids), [adapter.num_masks for adapter in facts.adapters]
        else:
            layout = DraftLayout.by_head(by_head, by_head)
            most, own, others = by_head, facts.head.num_drafts, [adapter.head.num_drafts for adapter in facts.adapters]
        kind = StepKind(
            len(self.batch.by_index),
            layout,
            Stages(samples=True, cuts=True),
            self._max_pages,
            adapter=None if own == most else others.index(most),
        )
        for _ in range(3):
            self._take(kind)
        if self._graphs is not None and self._prompts is not None:
            self._prompts.clear()
            for prompts in self._prompts.largest * 3:
                self._graphs(prompts)

    def plan_ahead(self, usual: RunningSequence) -> None:
        """List the graphs that steps of such sequences need, for `prepare`. Nothing is captured here."""
        graphs, prompts = self._graphs, self._prompts
        if graphs is None or prompts is None:
            return
        most = len(self.batch.by_index)
        sizes = sizes_ahead(dict.fromkeys(bucket(count, most) for count in range(1, most + 1)), self._max_pages)
        kinds = kinds_ahead(sizes, partial(self._layouts_of, usual), prompts, usual.adapter)
        self._ahead = GraphsAhead(graphs, prompts, kinds, partial(free_bytes, self._facts.device))

    def _layouts_of(self, usual: RunningSequence, count: int) -> list[DraftLayout]:
        """Return the layouts that steps of so many usual sequences are likely to have, the likeliest first."""
        sequences, load = [usual] * count, StepLoad(num_context=count * _USUAL_CONTEXT)
        chosen = [
            layout_ahead(sequences, self._fixed or self._new_controller(), load, after_masks=after_masks)
            for after_masks in (True, False)
        ]
        return [*dict.fromkeys([*chosen, DraftLayout.plain()])]

    @property
    def may_prepare(self) -> bool:
        """Whether `prepare` has more to capture."""
        return self._ahead is not None and not self._ahead.is_done

    def prepare(self) -> None:
        """Capture one of the graphs that `plan_ahead` listed, or compile it. Requires that no sequence is left but such
        as have ended, and that no step is in flight."""
        assert self._ahead is not None
        self.scheduler.admit(())  # what is left of sequences that ended computes nothing from now on
        self._ahead.step()

    def did_other_work(self) -> float | None:
        """Return the seconds from the end of the last step in flight until now, for other work queued behind it.
        None if no step was in flight. The next step's time excludes that work."""
        last, self._last = self._last if self._launched else None, None
        if last is None:
            return None
        now = self._timeline.mark()
        self._timeline.wait(now)
        return self._timeline.seconds(last, now)

    def _num_pages(self) -> int:
        """Round up to a few sizes: few graphs."""
        return round_up_pages(self.batch.num_pages, self._max_pages)

    def _advance(self, sequence: RunningSequence, layout: DraftLayout, row: list[int]) -> SequenceOutput:
        """Return the output of a sequence that took part."""
        length, accepted, num_live, end, _, num_drafts = row[:RESULT_FIXED]
        emitted = row[RESULT_FIXED : RESULT_FIXED + length]
        first_draft = len(row) - self.batch.state.drafts.shape[1]
        drafts = row[first_draft : first_draft + num_drafts]
        own = layout.with_drafts(num_live)
        output = SequenceOutput(ScheduledSequence(sequence, 1, own, closes=True))
        if end == EndCode.ERROR:
            output.error = no_choice(sequence)
            return output
        output.tokens, output.num_accepted, output.end = emitted, accepted, _ENDS[EndCode(end)]
        output.drafts = drafts
        if self._synthetic is not None:
            self._synthetic.drafted(sequence, emitted, num_drafts)
            if output.end is not None:
                self._synthetic.ended(sequence, emitted)
        if layout.head_drafts:
            output.origin = BY_HEAD
            return output
        most = min(sequence.max_drafts, sequence.num_masks)
        masks = DraftLayout.of(own.num_drafts, tuple(min(count, most) for count in own.masks))
        group = masks.next_drafts(length - 1) if drafts else None
        output.draft_depth = group.first_mask if group is not None else 1
        return output


def bucket(count: int, most: int) -> int:
    """Return the padded batch size for `count` sequences, at most `most`."""
    for size in BUCKETS:
        if size >= count:
            return min(size, most)
    return min(-(-count // BUCKETS[-1]) * BUCKETS[-1], most)
