"""The real worker on a model without weights.

Commands, admission, planning, control and reports are the worker's own. Only the forward pass is replaced: by what it
would cost, and which drafts would be accepted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from space_model.geometry.draft_layout import DraftLayout
from space_model.model_facts import ModelFacts
from space_model.networks.network import PagedKV
from space_server.host_runner import HostRunner
from space_server.model_runner import SequenceOutput, StepTimes
from space_server.scheduled_batch import ScheduledSequence, shape_of
from space_server.speculation.controller import Controller, DraftLimits, FixedLayout, SpeculationController, StepLoad
from space_server.step_cost import StepCost
from space_server.worker import Worker

from simulation.machine import SimulatedMachine
from simulation.texts import EOS, VOCABULARY, TextLibrary

Speculation = Literal["auto", "off"] | int


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker is started with."""

    speculation: Speculation = "auto"
    num_masks: int = 5
    num_blocks: int = 16384
    block_size: int = 16
    max_sequences: int = 64
    window: int = 131072
    prefill_budget: float | None = 0.1  # seconds


class VirtualClock:
    """Seconds on one worker's clock, which runs ahead of the cluster's during a step."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class NoWeights:
    """What a worker asks a model before its first step."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.facts = ModelFacts(
            name="simulated",
            vocab_size=VOCABULARY,
            hidden_size=1,
            num_layers=0,
            num_heads=1,
            kv_heads=1,
            head_dim=1,
            window=setup.window,
            dtype=torch.float32,
            dtype_reason="simulated",
            device=torch.device("cpu"),
            eos_ids=(EOS,),
            mask_ids=(),
            num_masks=setup.num_masks,
            model_hash="simulated",
            tokenizer_hash="",
            has_draft_head=False,
            kv_bytes_per_token=0,
            attention="none",
            num_threads=1,
        )

    def allocate_kv(self, num_blocks: int, block_size: int) -> PagedKV:
        return PagedKV([], [], num_blocks, block_size)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a simulated model has no {name}: it never runs")


class CostedStepper(HostRunner):
    """Continues each sequence by its text, and advances the clock by the machine's seconds."""

    def __init__(
        self,
        worker: Worker,
        model: NoWeights,
        machine: SimulatedMachine,
        library: TextLibrary,
        clock: VirtualClock,
        noise: Callable[[], float],
    ) -> None:
        """`noise`: factor on the seconds of a step."""
        controller = worker.engine.host.controller
        super().__init__(model, worker.kv, controller=controller, cost=worker.cost, clock=clock)
        self._machine, self._library, self._time, self._noise = machine, library, clock, noise
        self._next_drafts: dict[tuple[DraftLayout, int], tuple[int, int]] = {}  # -> first mask, drafts

    def run(self, plans: Sequence[ScheduledSequence], times: StepTimes) -> list[SequenceOutput]:
        seconds = self._machine.seconds(shape_of(plans)) * self._noise()
        self._time.now += seconds
        times.forward += seconds
        self.num_forwards += 1
        return [self._advance(plan) for plan in plans]

    def _advance(self, plan: ScheduledSequence) -> SequenceOutput:
        advance = SequenceOutput(plan)
        if not plan.closes:
            return advance
        sequence, layout = plan.sequence, plan.layout
        num_ids = len(sequence.ids)
        text = self._library.text(sequence.sampling_params.key)
        num_accepted = self._library.num_accepted(text, num_ids, sequence.draft_depth, layout.num_drafts)
        begin, num_left = num_ids - sequence.num_prompt, sequence.num_left
        ids = self._library.ids(text, begin, begin + num_accepted + 1)
        count, advance.end = sequence.limits.cut(ids, num_left)
        advance.tokens = ids[:count]
        advance.num_accepted = min(num_accepted, count)
        wanted = min(sequence.max_drafts, num_left - count - 1)
        if advance.end is None and wanted > 0:
            choice = self._next_drafts.get((layout, count))
            if choice is None:
                group = layout.next_drafts(count - 1)
                choice = (1, 0) if group is None else (group.first_mask, group.num_drafts)
                self._next_drafts[layout, count] = choice
            advance.draft_depth = choice[0]
            advance.drafts = [0] * min(choice[1], wanted)
        return advance


class CountingController:
    """A controller, and how often it switched between plain decoding and drafts."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.num_switches = 0
        self._drafts = False

    @property
    def row_price(self) -> float:
        return self.controller.row_price

    @property
    def is_paused(self) -> bool:
        return self.controller.is_paused

    def stepped(self, num_tokens: int, seconds: float, pause: float | None = None) -> None:
        self.controller.stepped(num_tokens, seconds, pause)

    def layouts(self, rooms: Sequence[DraftLimits], load: StepLoad) -> list[DraftLayout]:
        chosen = self.controller.layouts(rooms, load)
        if isinstance(self.controller, SpeculationController):
            drafts = self.controller.rule is not None
            self.num_switches += drafts != self._drafts
            self._drafts = drafts
        return chosen


class SimulatedWorker:
    """One incarnation of a worker, and its time."""

    def __init__(
        self,
        setup: WorkerSetup,
        machine: SimulatedMachine,
        library: TextLibrary,
        cost: StepCost,
        *,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`cost`: what it knows of the machine at its start; `jitter`: standard deviation of a step's log seconds."""
        self.clock = VirtualClock()
        fixed = setup.speculation if isinstance(setup.speculation, int) else 0
        self.controller = CountingController(FixedLayout.full(fixed) if fixed else SpeculationController(cost))
        model = NoWeights(setup)
        self.worker = Worker(
            model,
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            max_sequences=setup.max_sequences,
            max_draft_length=0 if setup.speculation == "off" else fixed or None,
            prefill_seconds=setup.prefill_budget,
            cost=cost,
            controller=self.controller,
            clock=self.clock,
        )
        source = random.Random(f"noise {seed}")
        noise = (lambda: source.lognormvariate(0.0, jitter)) if jitter else (lambda: 1.0)
        self.worker.engine.host = CostedStepper(self.worker, model, machine, library, self.clock, noise)
