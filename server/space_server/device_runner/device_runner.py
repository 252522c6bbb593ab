"""Steps on the device, one launched before the last is read.

    stepper.launch(layout)     lines, pages and layout as they are now; nothing waits
    stepper.read()             the oldest step that was launched: how its sequences went on

    launch 1 | launch 2 | read 1 | launch 3 | read 2 | …
    device:    [ step 1     ][ step 2           ][ step 3  …

What the host decides between two launches takes effect at the second of them. A sequence that ended in a step that is
not read yet goes along in the next one as a dead line, which writes nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from space_kernels.sampling.sampling_tensors import Stages
from space_kernels.step.ops import StepOps, step_ops_for
from space_kernels.step.state import RESULT_FIXED, result_width
from space_kernels.step.step_verification import EndCode
from space_model.geometry.draft_layout import DraftLayout
from space_model.networks.paged_kv import PagedKV
from torch import Tensor

from space_server.batch.limits import SequenceEnd
from space_server.batch.sequence import RunningSequence
from space_server.device_runner.device_batch import DeviceBatch
from space_server.device_runner.device_forward import DeviceForward, Forward, HostForward, StepKind, TensorForward
from space_server.device_runner.device_graphs import StepGraphs
from space_server.device_runner.device_logprobs import MOST_TOP, LogprobReport, few_asking, few_tops, num_cells
from space_server.device_runner.timeline import CudaTimeline, HostTimeline, Timeline, TimelineMark
from space_server.drafts.drafts import mask_chances
from space_server.host_runner.host_runner import SequenceOutput, no_choice
from space_server.scheduling.scheduled_batch import ScheduledSequence
from space_server.speculation.proposing import Proposing
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.step_costs.step_cost import StepShape
from space_server.step_model import StepModel

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Lines of a step: the least of these that holds all sequences, and multiples of the last one."""

_ENDS = {
    EndCode.NONE: None,
    EndCode.EOS: SequenceEnd.EOS,
    EndCode.STOP_ID: SequenceEnd.STOP_ID,
    EndCode.LENGTH: SequenceEnd.LENGTH,
    EndCode.ERROR: None,
}

_LEAST_PAGES = 16


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way."""

    kind: StepKind
    sequences: list[RunningSequence | None]  # by line, as they were when it was launched
    seq_ids: frozenset[int]
    asking: list[int]  # lines whose log-probabilities are in the result
    result: Tensor  # [cells] int32 on the host, once `done`
    begun: TimelineMark
    done: TimelineMark
    last: TimelineMark | None  # when the step before was done, if this one was waiting behind it
    is_usual: bool


@dataclass(frozen=True, slots=True)
class StepRead:
    """What a step brought."""

    advances: list[SequenceOutput]
    shape: StepShape  # laid out, for the sequences that took part
    computing: float  # seconds of the device
    seconds: float  # the same with the gap behind the step before, as far as that is no longer than the step
    is_usual: bool  # it took the time that such steps take: nothing was compiled or captured meanwhile


class DeviceRunner:
    """Steps the sequences of a DeviceBatch."""

    def __init__(
        self,
        model: StepModel,
        kv: PagedKV,
        *,
        max_sequences: int,
        eager: bool = False,
        ops: StepOps | None = None,
        forward: Callable[[StepModel, PagedKV], Forward] | None = None,
        max_drafts: int | None = None,
        synthetic: SyntheticAcceptance | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`eager`: no graphs; a CPU has none. `ops` and `forward`: None takes the device's.

        `max_drafts`: most per sequence and step; None: as many as there are masks. `synthetic`: decrees which drafts
        come true.
        """
        facts = self._facts = model.facts
        on_gpu = facts.device.type == "cuda"
        self.batch = DeviceBatch(
            facts,
            max_sequences=max_sequences,
            block_size=kv.block_size,
            max_drafts=max_drafts,
            synthetic=synthetic,
        )
        self._proposing = Proposing(facts)
        self._drafted_for: set[int] = set()  # sequences that the host has drafted for since the last launch
        self._synthetic = synthetic
        self.num_launches = 0
        self.waited = 0.0  # seconds in which the host waited for the device, or was the device
        state = self.batch.state
        forward = forward or (TensorForward if on_gpu else HostForward)
        ops = ops or step_ops_for(facts.device)
        step = DeviceForward(model, state, ops, forward(model, kv), self.batch.asking, self.batch.synthetic_tensors)
        self._take: Callable[[StepKind], Tensor] = step.take
        most = state.drafts.shape[1]
        self._width = result_width(most)
        size = max_sequences * self._width + num_cells(max_sequences, most + 1, min(MOST_TOP, facts.vocab_size))
        self._graphs: StepGraphs | None = None
        if on_gpu and not eager:
            self._graphs = StepGraphs(step.take, torch.zeros(size, dtype=torch.int32, device=facts.device))
            self._take = self._graphs
        # a step is read before the next but one is launched
        self._on_host = [torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._timeline: Timeline = CudaTimeline() if on_gpu else HostTimeline(clock)
        self._clock, self._on_gpu = clock, on_gpu
        self._launched: deque[Launched] = deque()
        self._last: TimelineMark | None = (
            None  # when the last step is done, if nothing else was given to the device since
        )
        self._max_pages = state.page_table.shape[1]

    @property
    def num_under_way(self) -> int:
        """Steps that were launched and are not read."""
        return len(self._launched)

    @property
    def num_replays(self) -> int:
        """Launches that replayed a graph."""
        return 0 if self._graphs is None else self._graphs.num_replays

    def num_with(self, sequence: RunningSequence) -> int:
        """How many of them it is in."""
        return sum(sequence.seq_id in launched.seq_ids for launched in self._launched)

    def refers_to(self, seq_id: int) -> bool:
        """Whether some step under way may read or write this sequence's pages."""
        return any(seq_id in launched.seq_ids for launched in self._launched)

    def launch(self, layout: DraftLayout) -> None:
        """Give the device one more step of all lines; at most two are under way. Nothing is waited for."""
        batch = self.batch
        num_lines = bucket(len(batch), len(batch.lines))
        batch.close_gaps(num_lines)
        batch.send_pages()
        batch.send_drafts(self._drafted_for)
        self._drafted_for.clear()
        asking, num_top = batch.send_asking()
        kind = StepKind(
            num_lines,
            layout,
            batch.stages,
            self._num_pages(),
            num_asking=few_asking(len(asking), num_lines),
            num_top=few_tops(num_top),
            adapter=batch.adapter if layout.num_masks else None,
        )
        begun = self._timeline.mark()
        result = self._take(kind)
        on_host = self._on_host[self.num_launches % 2][: len(result)]
        on_host.copy_(result, non_blocking=True)
        last, self._last = self._last if self._launched else None, self._timeline.mark()
        if not self._on_gpu:
            self.waited += self._timeline.seconds(begun, self._last)
        seq_ids = frozenset(sequence.seq_id for sequence in batch)
        lines = batch.lines[:num_lines]
        is_usual = self._graphs is None or self._graphs.was_usual
        self._launched.append(Launched(kind, lines, seq_ids, asking, on_host, begun, self._last, last, is_usual))
        self.num_launches += 1

    def read(self) -> StepRead:
        """Wait for the oldest step under way. Sequences that have left their line since are passed over."""
        launched = self._launched.popleft()
        timeline, waiting = self._timeline, self._clock()
        timeline.wait(launched.done)
        self.waited += self._clock() - waiting
        layout, advances = launched.kind.layout, []
        rows, logprobs = self._apart(launched)
        num_running = num_drafting = context = noisy = 0
        for line, (sequence, row) in enumerate(zip(launched.sequences, rows, strict=True)):
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
                advance = self._advance(sequence, layout, row)
                if logprobs is not None and sequence.num_logprobs is not None:
                    number = launched.asking.index(line)
                    advance.logprobs = logprobs.of(number, advance.tokens, sequence.num_logprobs)
                if sequence.drafter is not None and advance.error is None:
                    self._ask_drafter(advance)
                advances.append(advance)
        chain, masks = num_running * (layout.num_drafts + 1), num_running * layout.num_masks
        noisy_rows = noisy * (layout.num_drafts + 1)
        shape = StepShape(num_running, chain, masks, num_drafting, num_context=context, num_noisy_rows=noisy_rows)
        computing = timeline.seconds(launched.begun, launched.done)
        gap = timeline.seconds(launched.last, launched.begun) if launched.last is not None else 0.0
        seconds = computing + min(gap, computing)
        return StepRead(advances, shape, computing, seconds, launched.is_usual)

    def _ask_drafter(self, advance: SequenceOutput) -> None:
        """Let it read what was emitted; take what it proposes, if that is worth more than the masks' drafts or goes on
        behind them, and no step that was launched has these.
        """
        sequence, tokens = advance.plan.sequence, advance.tokens
        assert sequence.drafter is not None
        advance.num_predicted = sequence.drafter.extend(sequence.ids, tokens)
        wanted = min(sequence.max_drafts, sequence.num_left - len(tokens) - 1)
        if advance.end is not None or wanted < 1 or self.refers_to(sequence.seq_id):
            return
        proposal = self._proposing.proposal(sequence, tokens, wanted)
        if proposal is None:
            return
        masks = mask_chances(sequence.acceptance, advance.draft_depth, len(advance.drafts))
        if proposal.beats(masks):
            advance.draft_depth, masks = 0, ()
        elif not proposal.goes_on_behind(advance.drafts):
            return
        advance.drafts, advance.origin = proposal.ids, proposal.origin(len(proposal.ids), masks)
        self._drafted_for.add(sequence.seq_id)

    def _apart(self, launched: Launched) -> tuple[list[list[int]], LogprobReport | None]:
        """What a step said of each line, and of those who ask for log-probabilities."""
        kind, size = launched.kind, launched.kind.num_lines * self._width
        rows: list[list[int]] = launched.result[:size].view(kind.num_lines, -1).tolist()
        if not kind.num_asking:
            return rows, None
        return rows, LogprobReport(launched.result[size:], kind.num_asking, kind.layout.num_drafts + 1)

    def take_largest(self) -> None:
        """The step that takes most memory, as often as it takes until its graph is captured: every line, whole mask
        groups, samples cut by top-p, the longest page lists. Nobody is on a line, so nothing is written.
        """
        most, adapters = self._facts.most_masks, self._facts.adapters
        own = len(self._facts.mask_ids) == most
        kind = StepKind(
            len(self.batch.lines),
            DraftLayout.full(most, most) if most else DraftLayout.plain(),
            Stages(samples=True, cuts=True),
            self._max_pages,
            adapter=None if own else next(n for n, adapter in enumerate(adapters) if adapter.num_masks == most),
        )
        for _ in range(3):
            self._take(kind)

    def did_other_work(self) -> float | None:
        """The device has done something else behind the steps under way: the seconds since the last of them was done.

        None where there was none. That time is not the next step's.
        """
        last, self._last = self._last if self._launched else None, None
        if last is None:
            return None
        now = self._timeline.mark()
        self._timeline.wait(now)
        return self._timeline.seconds(last, now)

    def _num_pages(self) -> int:
        """Few numbers, so few graphs; attention passes over what nobody has."""
        count = _LEAST_PAGES
        while count < self.batch.num_pages:
            count *= 4
        return min(count, self._max_pages)

    def _advance(self, sequence: RunningSequence, layout: DraftLayout, row: list[int]) -> SequenceOutput:
        """How a sequence that took part went on."""
        length, accepted, num_live, end, _, num_drafts = row[:RESULT_FIXED]
        emitted = row[RESULT_FIXED : RESULT_FIXED + length]
        first_draft = len(row) - self.batch.state.drafts.shape[1]
        drafts = row[first_draft : first_draft + num_drafts]
        own = layout.with_drafts(num_live)
        advance = SequenceOutput(ScheduledSequence(sequence, 1, own, closes=True))
        if end == EndCode.ERROR:
            advance.error = no_choice(sequence)
            return advance
        advance.tokens, advance.num_accepted, advance.end = emitted, accepted, _ENDS[EndCode(end)]
        advance.drafts = drafts
        if self._synthetic is not None:
            self._synthetic.drafted(sequence, emitted, num_drafts)
            if advance.end is not None:
                self._synthetic.ended(sequence, emitted)
        most = min(sequence.max_drafts, sequence.num_masks)
        masks = DraftLayout.of(own.num_drafts, tuple(min(count, most) for count in own.masks))
        group = masks.next_drafts(length - 1) if drafts else None
        advance.draft_depth = group.first_mask if group is not None else 1
        return advance


def bucket(count: int, most: int) -> int:
    """The lines that a step of so many sequences has."""
    for size in BUCKETS:
        if size >= count:
            return min(size, most)
    return min(-(-count // BUCKETS[-1]) * BUCKETS[-1], most)
