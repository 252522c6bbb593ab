"""The real worker on a model of no weights: commands, admission, planning, control and reports are the worker's own;
only the forward pass is replaced, by what it would cost and which drafts would come true.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from collections.abc import Sequence as Run
from dataclasses import dataclass
from typing import Any, Literal

import torch
from space_model.draft_layout import DraftLayout
from space_model.model_facts import ModelFacts
from space_model.paged_kv import PagedKV
from space_server.controller import Controller, FixedLayout, Load, Room
from space_server.measured_controller import MeasuredController
from space_server.plan import Plan, shape_of
from space_server.step import Advance, Stepper, StepTimes
from space_server.step_cost import StepCost
from space_server.worker import Worker

from space_eval.simulate_machine import Machine
from space_eval.simulate_text import EOS, VOCABULARY, Library

Speculation = Literal["auto", "off"] | int


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is started with."""

    speculation: Speculation = "auto"
    num_masks: int = 5
    num_blocks: int = 16384
    block_size: int = 16
    max_sequences: int = 64
    window: int = 131072
    prefill_budget: float | None = 0.1  # seconds


class VirtualClock:
    """Seconds on one worker's clock: it runs ahead of the world's while a step is on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class NoWeights:
    """What a worker asks a model before its first step."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.facts = ModelFacts(
            name="simulated",
            vocab_size=VOCABULARY,
            hidden_size=1,
            num_layers=0,
            num_heads=1,
            kv_heads=1,
            head_dim=1,
            window=settings.window,
            dtype=torch.float32,
            dtype_reason="simulated",
            device=torch.device("cpu"),
            eos_ids=(EOS,),
            mask_ids=(),
            num_masks=settings.num_masks,
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


class CostedStepper(Stepper):
    """Says how each sequence goes on, by its text, and lets the machine's seconds pass."""

    def __init__(
        self, machine: Machine, library: Library, clock: VirtualClock, noise: Callable[[], float], most_masks: int
    ) -> None:
        """`noise`: what the seconds of a step are multiplied by; `most_masks`: bound of chains and groups."""
        self.num_forwards = 0
        self._machine, self._library, self._time, self._noise = machine, library, clock, noise
        self._choices: dict[tuple[DraftLayout, int], tuple[int, int]] = {}

    def run(self, plans: Run[Plan], times: StepTimes) -> list[Advance]:
        seconds = self._machine.seconds(shape_of(plans)) * self._noise()
        self._time.now += seconds
        times.forward += seconds
        self.num_forwards += 1
        return [self._advance(plan) for plan in plans]

    def _advance(self, plan: Plan) -> Advance:
        advance = Advance(plan)
        if not plan.closes:
            return advance
        sequence, layout = plan.sequence, plan.layout
        num_ids = len(sequence.ids)
        text = self._library.text(sequence.law.key)
        num_true = self._library.num_true(text, num_ids, sequence.draft_depth, layout.num_drafts)
        begin, num_left = num_ids - sequence.num_prompt, sequence.num_left
        made = self._library.ids(text, begin, begin + num_true + 1)
        count, advance.end = sequence.limits.cut(made, num_left)
        advance.tokens = made[:count]
        advance.num_accepted = min(num_true, count)
        wanted = min(sequence.max_drafts, num_left - count - 1)
        if advance.end is None and wanted > 0:
            choice = self._choices.get((layout, count))
            if choice is None:
                group = layout.next_drafts(count - 1)
                choice = (1, 0) if group is None else (group.first_mask, group.num_drafts)
                self._choices[layout, count] = choice
            advance.draft_depth = choice[0]
            advance.drafts = [0] * min(choice[1], wanted)
        return advance


class Watched:
    """A controller, and how often it changed its mind."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.num_changes = 0  # of the rule by which layouts follow, where there is one
        self.num_turns = 0  # of these, from plain decoding to drafts or back
        self._rule: object = None

    @property
    def row_price(self) -> float:
        return self.controller.row_price

    @property
    def naps(self) -> bool:
        return self.controller.naps

    def stepped(self, num_tokens: int, seconds: float, pause: float | None = None) -> None:
        self.controller.stepped(num_tokens, seconds, pause)

    def layouts(self, rooms: Sequence[Room], load: Load) -> list[DraftLayout]:
        chosen = self.controller.layouts(rooms, load)
        if isinstance(self.controller, MeasuredController):
            rule = self.controller.rule
            self.num_changes += rule != self._rule
            self.num_turns += (rule is None) != (self._rule is None)
            self._rule = rule
        return chosen


class SimulatedWorker:
    """One incarnation of a worker, and its time."""

    def __init__(
        self,
        settings: WorkerSettings,
        machine: Machine,
        library: Library,
        cost: StepCost,
        *,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`cost`: what it knows of the machine at its start; `jitter`: standard deviation of a step's log seconds."""
        self.clock = VirtualClock()
        fixed = settings.speculation if isinstance(settings.speculation, int) else 0
        self.controller = Watched(FixedLayout.full(fixed) if fixed else MeasuredController(cost))
        model = NoWeights(settings)
        self.worker = Worker(
            model,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            max_sequences=settings.max_sequences,
            max_draft_length=0 if settings.speculation == "off" else fixed or None,
            prefill_seconds=settings.prefill_budget,
            cost=cost,
            controller=self.controller,
            clock=self.clock,
        )
        source = random.Random(f"noise {seed}")
        noise = (lambda: source.lognormvariate(0.0, jitter)) if jitter else (lambda: 1.0)
        self.worker.stepper = CostedStepper(machine, library, self.clock, noise, settings.num_masks)
