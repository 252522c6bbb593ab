"""Layouts fit what a sequence has and can use."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from space_common.worker.client import WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_model.space_model import SpaceModel
from space_server.drafts import Acceptance, AcceptanceShape, DraftSources
from space_server.speculation.controller import (
    CHANGE_MARGIN,
    DOUBTED_TRIALS,
    ENABLE_MARGIN,
    FIRST_TRIAL_AFTER,
    GAIN_RATE,
    LEAST_READING_STEPS,
    LOOK_EVERY,
    LOOK_SELDOM,
    LOOKUP_RETRY_EVERY,
    PATIENCE,
    PAUSE_STEPS,
    PROBE_SELDOM,
    READING_SECONDS,
    READING_WINDOW,
    TRIAL_STEPS,
    BatchMix,
    ChainTally,
    DraftLimits,
    FixedLayout,
    LayoutYield,
    LookupPolicy,
    Offer,
    SpeculationController,
    SpeculationProbe,
    StepLoad,
    few_layouts,
    layout_yields,
)
from space_server.step_cost import StepCost, StepShape
from space_server.worker import Worker


def room(num_drafts: int = 5, max_masks: int = 5, num_left: int = 100) -> DraftLimits:
    return DraftLimits(seq_id=1, num_drafts=num_drafts, max_masks=max_masks, num_left=num_left)


def test_a_layout_is_cut_to_the_drafts_and_masks_there_are() -> None:
    assert room(num_drafts=1, max_masks=2).fit(DraftLayout.full(3, 3)) == DraftLayout(1, (2, 2))


def test_a_group_lays_out_only_what_may_still_be_emitted_behind_its_bonus() -> None:
    assert room(num_drafts=2, num_left=4).fit(DraftLayout.full(2, 5)) == DraftLayout(2, (2, 1, 0))


def test_a_fixed_layout_is_whole() -> None:
    assert FixedLayout.full(3).layouts([room(num_drafts=2)], StepLoad()) == [DraftLayout.full(2, 3)]


chances_of = st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4).map(tuple)


def simulated(layout: DraftLayout, chances: tuple[float, ...], steps: int) -> tuple[float, float, float]:
    """Tokens, chain rows, mask rows per step, by throwing dice."""
    rng = random.Random(1)
    num_drafts, first = 0, 1
    tokens = chain = masks = 0
    for _ in range(steps):
        step = layout.with_drafts(num_drafts)
        accepted = 0
        while accepted < num_drafts and rng.random() < chances[min(first + accepted, len(chances)) - 1]:
            accepted += 1
        tokens, chain, masks = tokens + accepted + 1, chain + 1 + num_drafts, masks + step.num_masks
        choice = step.next_drafts(accepted)
        num_drafts, first = (0, 1) if choice is None else (min(choice.num_drafts, layout.num_drafts), choice.first_mask)
    return tokens / steps, chain / steps, masks / steps


@given(chances_of)
def test_a_full_layout_yields_what_the_paper_says(chances: tuple[float, ...]) -> None:
    k = len(chances)
    reach, total = 1.0, 1.0
    for chance in chances:
        reach *= chance
        total += reach
    layout_yield = LayoutYield.of(DraftLayout.full(k, k), chances)
    assert layout_yield.tokens == pytest.approx(total)
    assert (layout_yield.chain_rows, layout_yield.mask_rows) == pytest.approx((k + 1, k * (k + 1)))


@pytest.mark.parametrize("num_kept", [3, 6, 9])
def test_a_pruned_layout_yields_what_dice_say(num_kept: int) -> None:
    chances = (0.7, 0.6, 0.5)
    layout = DraftLayout.pruned(3, 3, num_kept, (1.0, 0.7, 0.42, 0.21))
    layout_yield = LayoutYield.of(layout, chances)
    assert (layout_yield.tokens, layout_yield.chain_rows, layout_yield.mask_rows) == pytest.approx(
        simulated(layout, chances, 40_000), rel=0.03
    )


@given(chances_of)
def test_of_the_layouts_considered_more_rows_bring_more_tokens(chances: tuple[float, ...]) -> None:
    found = layout_yields(chances, len(chances))
    assert found[0].layout == DraftLayout.plain()
    rows = [layout_yield.chain_rows + layout_yield.mask_rows for layout_yield in found]
    assert rows == sorted(rows)
    assert [layout_yield.tokens for layout_yield in found] == sorted(layout_yield.tokens for layout_yield in found)


@given(chances_of)
def test_layouts_of_captured_steps_do_not_follow_the_acceptance(chances: tuple[float, ...]) -> None:
    found = layout_yields(chances, len(chances), few=True)
    assert found[0].layout == DraftLayout.plain()
    assert {each.layout for each in found[1:]} <= set(few_layouts(len(chances)))
    tokens = [each.tokens for each in found]
    assert tokens == sorted(tokens)


def test_captured_steps_have_six_layouts_of_masks_at_most() -> None:
    assert few_layouts(1) == (DraftLayout.full(1, 1),)
    assert [layout.num_masks for layout in few_layouts(5)] == [2, 6, 6, 12, 15, 30]
    assert max(len(few_layouts(most)) for most in range(1, 17)) == 6


ROOM_ENOUGH = 100
CHANCES = (0.7, 0.6, 0.5, 0.5, 0.5)


class Machine(StepCost):
    """A step costs a fixed part, and so much for each row beyond a ridge."""

    def __init__(self, fixed: float, per_row: float, ridge: int = 0) -> None:
        super().__init__([])
        self.fixed, self.per_row, self.ridge = fixed, per_row, ridge

    def seconds(self, shape: StepShape) -> float:
        return self.fixed + self.per_row * max(0, shape.num_rows - self.ridge)


def measured_room(chances: tuple[float, ...] = CHANCES, num_drafts: int = 5) -> DraftLimits:
    acceptance = Acceptance(AcceptanceShape(chances, len(chances)))
    return DraftLimits(1, num_drafts, len(chances), ROOM_ENOUGH, acceptance=acceptance)


def next_layout(controller: SpeculationController, rooms: list[DraftLimits]) -> DraftLayout:
    """The layout of the next step."""
    return controller.layouts(rooms, StepLoad())[0]


def settled(
    controller: SpeculationController,
    rooms: list[DraftLimits],
    load: StepLoad = StepLoad(),  # noqa: B008
) -> list[DraftLayout]:
    for _ in range(PATIENCE + 2 * LOOK_SELDOM):
        layouts = controller.layouts(rooms, load)
    return layouts


@pytest.mark.parametrize("per_row", [0.0, 0.005, 0.02, 0.05])
def test_captured_steps_keep_to_few_layouts_whatever_is_accepted_and_left(per_row: float) -> None:
    controller, rng = SpeculationController(Machine(1.0, per_row), has_few_layouts=True), random.Random(0)
    usual = {DraftLayout.plain(), *few_layouts(5)}
    seen = set()
    for _ in range(60):
        chances = tuple(rng.uniform(0.3, 0.95) for _ in range(5))
        [layout] = settled(controller, [measured_room(chances)])
        assert layout in usual
        seen.add(layout)
        [late] = controller.layouts(
            [dataclasses.replace(measured_room(chances), num_left=rng.randrange(2, 9))], StepLoad()
        )
        assert late in usual or late.masks == (0,) * (late.num_drafts + 1)
    assert len(seen) > 1 or not per_row


def test_where_rows_are_free_all_are_laid_out() -> None:
    assert settled(SpeculationController(Machine(1.0, 0.0)), [measured_room()]) == [DraftLayout.full(5, 5)]


def test_where_rows_cost_as_much_as_a_step_decoding_is_plain() -> None:
    assert settled(SpeculationController(Machine(0.01, 1.0)), [measured_room()] * 4) == [DraftLayout.plain()] * 4


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("ridge", [8, 32, 128])
def test_no_other_layout_used_by_all_brings_more(batch: int, ridge: int) -> None:
    machine = Machine(1.0, 0.02, ridge)
    rooms = [measured_room()] * batch
    layout = settled(SpeculationController(machine), rooms)[0]
    snapshot = rooms[0].acceptance.shape.snapshot  # type: ignore[union-attr]
    chances = tuple(1 / (1 + 2.718281828459045**-odds) for odds in snapshot)

    def rate(tokens: float, chain: float, masks: float) -> float:
        return batch * tokens / machine.seconds(StepShape(batch, round(batch * chain), round(batch * masks)))

    rates = {w.layout: rate(w.tokens, w.chain_rows, w.mask_rows) for w in layout_yields(chances, 5)}
    plain, best = rates[DraftLayout.plain()], max(rates.values())
    assert rates[layout] * (1 + CHANGE_MARGIN) >= best or (
        layout == DraftLayout.plain() and best <= (1 + ENABLE_MARGIN) * plain
    )
    assert rates[layout] >= plain


def test_sequences_that_accept_nothing_decode_plainly_beside_those_that_do() -> None:
    good, bad = measured_room((0.95,) * 5), measured_room((0.03,) * 5)
    layouts = settled(SpeculationController(Machine(1.0, 0.05)), [good, bad] * 2)
    assert layouts[0].num_masks > 0
    assert layouts[1] == DraftLayout.plain()
    assert layouts[:2] == layouts[2:]


def test_masks_go_when_a_prompt_fills_the_step() -> None:
    controller = SpeculationController(Machine(1.0, 0.05, ridge=64))
    alone = settled(controller, [measured_room()])
    crowded = settled(controller, [measured_room()], StepLoad(num_other_rows=400))
    assert alone[0].num_rows > crowded[0].num_rows


def test_where_decoding_is_plain_a_prompt_brings_no_masks() -> None:
    """However cheap they are beside it: the next step would drop their drafts."""

    class CheapBesidePrompts(Machine):
        def seconds(self, shape: StepShape) -> float:
            return 1.0 if shape.num_prefill_rows else super().seconds(shape)

    controller = SpeculationController(CheapBesidePrompts(0.01, 1.0))
    assert settled(controller, [measured_room()] * 4) == [DraftLayout.plain()] * 4
    assert controller.layouts([measured_room()] * 4, StepLoad(num_other_rows=400)) == [DraftLayout.plain()] * 4


def test_a_crowd_that_changes_by_few_is_not_looked_at_anew_each_time() -> None:
    """Under load somebody comes or goes with every step; what was best for 31 is best for 32."""
    asked: list[StepShape] = []

    class Asked(Machine):
        def seconds(self, shape: StepShape) -> float:
            asked.append(shape)
            return super().seconds(shape)

    controller = SpeculationController(Asked(1.0, 0.0, 0))
    settled(controller, [measured_room()] * 32)
    counts = []
    for size in (32, 31, 33, 32, 20):
        asked.clear()
        controller.layouts([measured_room()] * size, StepLoad())
        counts.append(len(asked))
    assert max(counts[1:4]) < min(20, counts[4])


class Watched(SpeculationController):
    """Counts how often it looks at all there is to choose from."""

    num_looks = 0

    def _choose(self, crowd: BatchMix, load: StepLoad) -> None:
        super()._choose(crowd, load)
        self.num_looks += 1


@pytest.mark.parametrize(
    ("per_row", "looks"), [pytest.param(1.0, 4, id="plain"), pytest.param(0.0, 4 * LOOK_SELDOM, id="drafting")]
)
def test_who_drafts_looks_at_once_where_costs_change_and_plain_decoding_in_its_turn(per_row: float, looks: int) -> None:
    machine = Machine(1.0, per_row)
    controller = Watched(machine)
    settled(controller, [measured_room()] * 16)
    before = controller.num_looks
    for _ in range(4 * LOOK_SELDOM):
        machine.num_surprises += 1
        controller.layouts([measured_room()] * 16, StepLoad())
    assert controller.num_looks - before == looks


@pytest.mark.parametrize(
    ("per_row", "looks"),
    [pytest.param(1.0, 4, id="plain"), pytest.param(1e-4, 4 * LOOK_SELDOM // LOOK_EVERY, id="drafting")],
)
def test_a_restless_machine_has_nobody_look_more_often(per_row: float, looks: int) -> None:
    """Every other step takes half as long again as the ones between."""
    sizes = [StepShape(1, 1 + k, k * (1 + k), int(k > 0)) for k in range(6)]
    cost = StepCost.from_points([(shape, 1.0 + per_row * shape.num_rows) for shape in sizes])
    controller, alone = Watched(cost), [measured_room()]
    settled(controller, alone)
    before = controller.num_looks
    for number in range(4 * LOOK_SELDOM):
        layout = alone[0].fit(controller.layouts(alone, StepLoad())[0])
        shape = StepShape(1, 1 + layout.num_drafts, layout.num_masks, int(layout.num_masks > 0))
        cost.learn(shape, (1.0 + per_row * shape.num_rows) * (1.2, 0.8)[number % 2])
    assert controller.num_looks - before == looks


def test_crowds_far_too_large_for_drafts_are_looked_at_in_their_turn_however_their_size_changes() -> None:
    controller = Watched(Machine(1.0, 0.3, ridge=4))
    assert settled(controller, [measured_room()] * 16) == [DraftLayout.plain()] * 16
    before = controller.num_looks
    for number in range(8 * LOOK_SELDOM):
        assert not controller.layouts([measured_room()] * (12, 16, 24, 9)[number % 4], StepLoad())[0].num_masks
    assert controller.num_looks - before <= 16
    laid_out = [
        next_layout(controller, [measured_room()]).num_masks for _ in range(LOOK_EVERY + 1)
    ]  # one alone is no such crowd
    assert laid_out[-1] > 0


def test_who_may_draft_need_not_wait_behind_others_who_may_not() -> None:
    controller = SpeculationController(Machine(1.0, 0.0))
    plain = DraftLimits(1, 0, 0, ROOM_ENOUGH)
    assert settled(controller, [plain]) == [DraftLayout.plain()]
    assert controller.layouts([plain], StepLoad()) == [DraftLayout.plain()]
    assert next_layout(controller, [measured_room()]) == DraftLayout.full(5, 5)


def test_at_the_threshold_the_choice_does_not_swing() -> None:
    """Costs that tell two layouts apart by less than the margin, in turn one and the other."""
    machine = Machine(1.0, 0.02, ridge=16)
    controller = SpeculationController(machine)
    seen = []
    for number in range(400):
        machine.per_row = 0.02 * (1.0 + 0.002 * (-1) ** (number // LOOK_EVERY))
        seen.append(controller.layouts([measured_room()] * 4, StepLoad())[0])
    steady = seen[PATIENCE + LOOK_EVERY :]
    assert sum(one != other for one, other in pairwise(steady)) <= 2 * 400 // 256 + 1


def test_drafts_that_no_mask_made_are_laid_out_while_they_pay() -> None:
    controller = SpeculationController(Machine(1.0, 0.1))
    found = DraftLimits(1, 4, 0, ROOM_ENOUGH, chances=(0.9, 0.9, 0.05, 0.9))
    assert controller.layouts([found], StepLoad()) == [DraftLayout(2, (0, 0, 0))]


def test_nobody_is_asked_where_nobody_reaches_a_root() -> None:
    assert SpeculationController(Machine(1.0, 0.1)).layouts([], StepLoad(num_other_rows=8)) == []


def test_drafts_that_bring_less_than_they_promise_are_given_up_and_tried_again_later() -> None:
    controller = SpeculationController(Machine(1.0, 0.045))
    rooms = [measured_room()]
    steps = []
    for _ in range(6000):
        drafts = next_layout(controller, rooms).num_masks > 0
        steps.append(drafts)
        controller.stepped(1, 1.3 if drafts else 1.045)  # never more than plain decoding's, and longer
    first = steps.index(True)
    ends = steps.index(False, first)
    assert ends - first < 10 * LOOK_EVERY
    assert sum(steps[ends : ends + 200]) < 20
    assert any(steps[ends + 200 :])  # what was true then need not be true now
    assert sum(steps) < 0.1 * len(steps)


def test_what_lies_between_steps_makes_drafts_pay_where_steps_alone_would_not() -> None:
    """Rows that cost as much as they bring; but every step, however many rows, is followed by a pause."""
    machine = Machine(0.0, 0.0005)
    assert settled(SpeculationController(machine), [measured_room()]) == [DraftLayout.plain()]
    controller = SpeculationController(machine)
    for _ in range(200):
        controller.stepped(1, 0.0005, pause=0.004)
    assert settled(controller, [measured_room()])[0].num_drafts > 0


def test_a_hiccup_while_drafting_is_no_reason_to_stop() -> None:
    machine = Machine(0.01, 0.001)
    controller = SpeculationController(machine)
    drafted = settled(controller, [measured_room()])
    assert drafted[0].num_drafts > 0
    for number in range(400):
        layout = controller.layouts([measured_room()], StepLoad())[0]
        assert layout.num_drafts > 0
        usual = machine.seconds(StepShape(1, 1 + layout.num_drafts, layout.num_masks))
        hiccup = number % 5 == 0  # fifty times what was expected
        controller.stepped(1 + layout.num_drafts, 50 * usual if hiccup else usual)  # and all drafts are accepted


def test_what_was_measured_in_a_bad_moment_is_found_out_by_a_trial() -> None:
    class Misjudged(Machine):
        """Rows look dearer than they are, until some steps have had more than one."""

        num_tried = 0

        def seconds(self, shape: StepShape) -> float:
            return super().seconds(shape) * (1.45 if shape.num_rows > 1 and self.num_tried < 8 else 1.0)

    machine = Misjudged(1.0, 0.06)
    controller = SpeculationController(machine)
    assert settled(controller, [measured_room()]) == [DraftLayout.plain()]
    for _ in range(2 * FIRST_TRIAL_AFTER):
        layout = next_layout(controller, [measured_room()])
        machine.num_tried += layout.num_masks > 0
    assert layout.num_masks > 0


def test_plain_decoding_that_was_measured_in_a_bad_moment_is_found_out_by_a_probe() -> None:
    class Misjudged(Machine):
        """Plain steps look far dearer than they are, until one has been taken."""

        num_plain = 0

        def seconds(self, shape: StepShape) -> float:
            is_plain = shape.num_rows == shape.num_sequences
            return super().seconds(shape) * (2.5 if is_plain and not self.num_plain else 1.0)

    machine = Misjudged(1.0, 0.37)
    controller = SpeculationController(machine)
    assert settled(controller, [measured_room()])[0].num_masks > 0
    for _ in range(PROBE_SELDOM + 2 * LOOK_EVERY):
        layout = next_layout(controller, [measured_room()])
        machine.num_plain += layout == DraftLayout.plain()
    assert layout == DraftLayout.plain()


def test_where_plain_decoding_is_best_trials_become_rare() -> None:
    machine = Machine(1.0, 0.37)
    controller = SpeculationController(machine)
    assert settled(controller, [measured_room()]) == [DraftLayout.plain()]
    tried = [next_layout(controller, [measured_room()]).num_masks > 0 for _ in range(12_000)]
    assert 2 * TRIAL_STEPS <= sum(tried) < 0.01 * len(tried)


def test_a_crowd_that_may_not_draft_teaches_nothing_about_drafts() -> None:
    machine = Machine(1.0, 0.37)
    controller = SpeculationController(machine)
    assert settled(controller, [measured_room()]) == [DraftLayout.plain()]
    for _ in range(4 * FIRST_TRIAL_AFTER):
        assert controller.layouts([DraftLimits(1, 4, 0, ROOM_ENOUGH)], StepLoad()) == [DraftLayout.plain()]
        controller.stepped(1, 1.0)
    tried = [next_layout(controller, [measured_room()]).num_masks > 0 for _ in range(FIRST_TRIAL_AFTER // 2)]
    assert not any(tried)


def steps_until_drafts_stay(cost: StepCost, true: Callable[[StepShape], float], batch: int, most: int) -> int:
    """Steps of a server that takes what the controller says, on a machine whose steps take `true` seconds, until nine
    in ten of a hundred have drafts."""
    controller, rng = SpeculationController(cost), random.Random(0)
    rooms, recent = [measured_room()] * batch, deque[bool](maxlen=100)
    for number in range(most):
        layouts = [one.fit(layout) for one, layout in zip(rooms, controller.layouts(rooms, StepLoad()), strict=True)]
        chain, masks = sum(1 + one.num_drafts for one in layouts), sum(one.num_masks for one in layouts)
        shape = StepShape(batch, chain, masks, sum(one.num_masks > 0 for one in layouts))
        seconds = true(shape) * rng.lognormvariate(0.0, 0.03)
        kept = [list(takewhile(lambda chance: rng.random() < chance, CHANCES[: one.num_drafts])) for one in layouts]
        cost.learn(shape, seconds)
        controller.stepped(batch + sum(map(len, kept)), seconds, 0.0)
        recent.append(masks > 0)
        if sum(recent) >= 90:
            return number
    return most


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_server_that_started_beside_other_work_finds_the_drafts_that_pay(batch: int) -> None:
    """Measured while rows cost eight times as much, beside a plain step, as they do: no draft looks worth a trial."""

    def machine(slow: float, per_row: float) -> Callable[[StepShape], float]:
        return lambda shape: slow * (1.0 + per_row / batch * (shape.num_rows - shape.num_sequences))

    layouts = [DraftLayout.plain(), *(DraftLayout.full(k, k) for k in (1, 2, 3, 5))]
    sizes = [
        StepShape(batch, batch * (1 + one.num_drafts), batch * one.num_masks, batch * (one.num_masks > 0))
        for one in layouts
    ]
    points = [(shape, machine(5.0, 0.2)(shape)) for shape in sizes]
    true = machine(1.0, 0.025)
    assert steps_until_drafts_stay(StepCost.from_points(points, are_sure=False), true, batch, 6000) < 3000
    sure = [(shape, true(shape)) for shape in sizes]
    assert steps_until_drafts_stay(StepCost.from_points(sure), true, batch, 6000) < 300


class TimedServer:
    """A server with a controller and measured costs: `run` takes steps of so many sequences, and says which drafted."""

    def __init__(self, per_row: float = 0.02, seed: int = 0) -> None:
        self._per_row = per_row
        layouts = [DraftLayout.plain(), *(DraftLayout.full(k, k) for k in (1, 2, 3, 5))]
        points = []
        for batch in (1, 2, 4, 8, 16, 32):
            for one in layouts:
                rows, masks = batch * (1 + one.num_drafts), batch * one.num_masks
                shape = StepShape(batch, rows, masks, batch * (masks > 0))
                points.append((shape, self.true_seconds(shape)))
        self._cost, self._rng = StepCost.from_points(points), random.Random(seed)
        self.controller = SpeculationController(self._cost)

    def true_seconds(self, shape: StepShape) -> float:
        more = shape.num_rows - shape.num_sequences - 4
        return 1.0 + 0.04 * shape.num_sequences + self._per_row * max(0, more)

    def run(self, most: int, num_steps: int, *, slow: float = 1.0, least: int = 0) -> list[bool]:
        """`least`: fewest sequences of a step, where some come and go, with prompts; 0: there are always `most`."""
        drafted = []
        for _ in range(num_steps):
            batch = self._rng.randint(least, most) if least else most
            num_prompt_rows = 32 if least and self._rng.random() < 0.3 else 0
            rooms = [measured_room()] * batch
            found = self.controller.layouts(rooms, StepLoad(num_prompt_rows))
            found = [one.fit(layout) for one, layout in zip(rooms, found, strict=True)]
            chain, masks = sum(1 + one.num_drafts for one in found), sum(one.num_masks for one in found)
            shape = StepShape(batch, chain, masks, sum(one.num_masks > 0 for one in found), num_prompt_rows)
            seconds = slow * self.true_seconds(shape) * self._rng.lognormvariate(0.0, 0.05)
            drafts = (takewhile(lambda chance: self._rng.random() < chance, CHANCES[: one.num_drafts]) for one in found)
            self._cost.learn(shape, seconds)
            self.controller.stepped(batch + sum(len(list(kept)) for kept in drafts), seconds, 0.0)
            drafted.append(masks > 0)
        return drafted


def test_drafts_come_back_within_a_hundred_steps_after_a_flood() -> None:
    """Steps took three times as long in the flood, and nothing but a trial shows that drafts no longer do."""
    server = TimedServer()
    assert sum(server.run(1, 400)[-100:]) > 90
    assert sum(server.run(32, 3000, slow=3.0)[-100:]) < 10
    assert sum(server.run(1, 200)[100:]) > 90


@pytest.mark.parametrize("seed", [4, 6, 7, 9])
def test_a_flood_of_prompts_and_sequences_that_come_and_go_leaves_what_one_alone_kept(seed: int) -> None:
    """The machine slows down while the first of the flood draft: what they fall short by says nothing about later."""
    server = TimedServer(0.13, seed)
    assert sum(server.run(1, 400)[-100:]) > 90
    server.run(16, 400, slow=4.0, least=12)
    assert sum(server.run(1, 200)[100:]) > 90


def test_what_is_known_to_be_hopeless_is_not_tried_without_a_doubt() -> None:
    known = SpeculationProbe()
    assert not known.is_due(0.5, 10**9)
    known.doubt()
    assert not known.is_due(0.5, FIRST_TRIAL_AFTER)
    assert known.is_due(0.5, 4 * FIRST_TRIAL_AFTER)
    assert not known.is_due(0.05, 100 * FIRST_TRIAL_AFTER)
    for _ in range(DOUBTED_TRIALS):
        known.begin()
        known.failed()
    assert not known.is_due(0.5, 10**9)


def test_trials_that_failed_in_a_flood_delay_none_of_one_alone() -> None:
    probe = SpeculationProbe()
    probe.resize(1)
    for _ in range(5):
        probe.resize(32)
        probe.begin()
        probe.failed()
    assert not probe.is_due(0.95, FIRST_TRIAL_AFTER)
    probe.resize(1)
    assert probe.is_due(0.95, FIRST_TRIAL_AFTER)
    probe.resize(40)
    assert not probe.is_due(0.95, FIRST_TRIAL_AFTER)


BAD = Offer(tokens=0.1, seconds=1e-3, plain_tokens=8, plain_seconds=8e-3, num_chains=8)


def good(seconds: float) -> Offer:
    """It saves so many."""
    return Offer(tokens=1000.0 * seconds, seconds=0.0, plain_tokens=8, plain_seconds=8e-3, num_chains=8)


def stepped(
    worth: LookupPolicy, num_sequences: int = 8, *, num_read: int | None = None, by_masks: bool = False
) -> None:
    worth.stepped(num_sequences, num_sequences if num_read is None else num_read, by_masks=by_masks)


def napping(num_sequences: int = 8) -> LookupPolicy:
    """Who has read that many for nothing."""
    worth = LookupPolicy()
    for _ in range(READING_WINDOW):
        stepped(worth, num_sequences)
    assert worth.is_paused
    return worth


class Tiled(StepCost):
    """Rows are cheap, but for the first beyond one of each sequence: a product's next tile, say."""

    def __init__(self, tile: float) -> None:
        super().__init__([])
        self.tile = tile

    def seconds(self, shape: StepShape) -> float:
        more = shape.num_rows - shape.num_sequences
        return 1e-3 * (1.0 + self.tile * (more > 0) + 0.005 * more)


def rooms(num_proposing: int, chances: tuple[float, ...] = (0.8, 0.8)) -> list[DraftLimits]:
    proposing = [DraftLimits(n, len(chances), 0, 100, chances=chances) for n in range(num_proposing)]
    return proposing + [DraftLimits(n, 0, 0, 100) for n in range(num_proposing, 8)]


@pytest.mark.parametrize(("num_proposing", "taken"), [(1, False), (8, True)])
def test_one_sequences_drafts_are_not_taken_where_all_pay_for_them(num_proposing: int, taken: bool) -> None:
    controller = SpeculationController(Tiled(0.3))
    layouts = [controller.layouts(rooms(num_proposing), StepLoad()) for _ in range(LOOKUP_RETRY_EVERY - 1)][-1]
    assert [layout.num_drafts for layout in layouts] == ([2] * num_proposing if taken else [0] * 8)


def test_where_the_first_row_more_is_cheap_one_sequences_drafts_are_taken() -> None:
    controller = SpeculationController(Tiled(0.0))
    assert controller.layouts(rooms(1), StepLoad())[0] == DraftLayout.of(2, (0, 0, 0))


def test_the_price_of_what_does_not_pay_is_looked_at_again() -> None:
    worth = LookupPolicy()
    assert [worth.pays(BAD) for _ in range(2 * LOOKUP_RETRY_EVERY)].count(True) == 2


@pytest.mark.parametrize(("num_sequences", "num_steps"), [(1, 64), (2, 32), (8, 8), (64, 8)])
def test_texts_are_not_read_where_that_has_not_paid_for_itself(num_sequences: int, num_steps: int) -> None:
    worth = LookupPolicy()
    for _ in range(num_steps):
        assert not worth.is_paused
        stepped(worth, num_sequences)
    assert worth.is_paused


def test_steps_of_those_whose_texts_nobody_reads_say_nothing() -> None:
    worth = LookupPolicy()
    for _ in range(5 * READING_WINDOW):
        stepped(worth, num_read=0)
        assert not worth.is_paused


def test_texts_are_read_as_long_as_drafts_save_more_than_reading_takes() -> None:
    worth = LookupPolicy()
    for _ in range(3 * READING_WINDOW):
        assert worth.pays(good(16 * READING_SECONDS))
        stepped(worth)
        assert not worth.is_paused


def naps_of(worth: LookupPolicy, num_steps: int) -> list[int]:
    """The steps of each nap that ended."""
    lengths, slept = [], 0
    for _ in range(num_steps):
        stepped(worth)
        if worth.is_paused:
            slept += 1
        elif slept:
            lengths.append(slept)
            slept = 0
    return lengths


def test_texts_are_read_again_in_every_hundred_steps_however_often_that_was_in_vain() -> None:
    num_steps = 10 * (PAUSE_STEPS + LEAST_READING_STEPS)
    assert PAUSE_STEPS + LEAST_READING_STEPS <= 100
    assert naps_of(LookupPolicy(), num_steps) == [PAUSE_STEPS] * 10


@pytest.mark.parametrize("num_sequences", [8, 32])
def test_a_text_that_offers_drafts_is_read_within_a_hundred_steps_after_a_flood_in_vain(num_sequences: int) -> None:
    worth = LookupPolicy()
    for _ in range(3000):
        stepped(worth, num_sequences)
    for size in (1, num_sequences):
        taken = []
        for _ in range(200):
            stepped(worth, size)
            if not worth.is_paused:
                taken.append(worth.pays(good(4 * size * READING_SECONDS)))
            else:
                taken.append(False)
        assert all(taken[100:])


def test_a_crowd_of_half_the_size_is_read_and_the_whole_one_naps_on() -> None:
    worth, is_paused = napping(8), []
    for size in (5, 4, 3, 8):
        stepped(worth, size)
        is_paused.append(worth.is_paused)
    assert is_paused == [True, False, False, True]


def test_nobody_naps_while_masks_draft() -> None:
    worth = napping()
    stepped(worth, by_masks=True)
    assert not worth.is_paused
    stepped(worth)
    assert worth.is_paused


@pytest.mark.parametrize("by_masks", [False, True])
def test_the_gain_follows_what_drafts_save_or_would(by_masks: bool) -> None:
    worth = LookupPolicy()
    for _ in range(round(5 / GAIN_RATE)):
        stepped(worth, by_masks=by_masks)
        if by_masks and worth.asks:
            worth.would_pay(good(2e-3), 8)
        elif not by_masks:
            assert worth.pays(good(2e-3))
    assert worth.rate(8, 8e-3) == pytest.approx(1.25 * 1000.0, rel=0.02)
    assert napping().rate(8, 8e-3) == pytest.approx(1000.0)


@pytest.mark.parametrize(("others", "seconds"), [(1, 1.0), (2, 1.3), (4, 1.5)])
def test_chains_from_no_mask_come_as_often_per_token_however_the_others_are_drafted(
    others: int, seconds: float
) -> None:
    """One in five steps accepts three drafts and takes 0.2 s longer; the other four emit one token each."""
    tally = ChainTally()
    for number in range(100 * round(1 / GAIN_RATE)):
        tally.count(*((0.0, 1, 3.0, 0.2) if number % 5 == 4 else (1.0, 0, 0.0, 0.0)))
    num_others = 4 / others  # steps for those four tokens
    taken = num_others * seconds + seconds + 0.2
    assert tally.rate(1, float(others), seconds) == pytest.approx(8.0 / taken, rel=0.02)


def test_masks_draft_beside_a_text_that_offers_drafts_now_and_then() -> None:
    """Plain decoding with the text's drafts is faster than masks alone, and slower than both."""
    controller, plain = SpeculationController(Machine(1.0, 0.02)), SpeculationController(Machine(1.0, 0.02))
    chances = (0.95,) * 8
    repeats = dataclasses.replace(measured_room(num_drafts=8), chances=chances, offered=chances, is_read=True)
    novel = dataclasses.replace(measured_room(num_drafts=0), is_read=True)
    by_masks, rng = [], random.Random(3)
    for _ in range(PATIENCE + 12 * LOOK_SELDOM):
        one = repeats if rng.random() < 0.25 else novel
        controller.layouts([one], StepLoad())
        plain.layouts([dataclasses.replace(one, max_masks=0)], StepLoad())
        by_masks.append(controller.rule is not None)
    assert all(by_masks[-4 * LOOK_SELDOM :])
    assert plain.rule is None
    masks = settled(SpeculationController(Machine(1.0, 0.02)), [measured_room()])[0]
    chosen_yield = LayoutYield.of(masks, CHANCES)
    alone = chosen_yield.tokens / (1.0 + 0.02 * (chosen_yield.chain_rows + chosen_yield.mask_rows))
    beside_plain = (3 + 1 + sum(0.95**j for j in range(1, 9))) / (4 * 1.02 + 8 * 0.02)
    assert beside_plain > alone


def layout_behind(chances: tuple[float, ...]) -> DraftLayout:
    """Of a chain with these chances that no mask made, while masks draft."""
    controller = SpeculationController(Machine(1.0, 0.01))
    settled(controller, [measured_room()])
    assert controller.rule is not None
    return next_layout(controller, [dataclasses.replace(measured_room(num_drafts=len(chances)), chances=chances)])


def test_masks_stand_where_a_chain_from_elsewhere_is_expected_to_end() -> None:
    masks = layout_behind((0.98, 0.98, 0.3, 0.9)).masks
    assert masks[2] == max(masks) > 0
    assert masks[0] == masks[1] == 0


def test_behind_a_chain_that_is_nearly_certain_masks_are_not_worth_their_rows() -> None:
    assert layout_behind((0.98,) * 8) == DraftLayout.of(8, (0,) * 9)


def test_masks_must_beat_plain_decoding_with_its_proposals() -> None:
    """Ten rows of masks bring each sequence 1.5 tokens more; where texts repeat themselves proposals bring as much."""
    has_masks = {}
    for proposing in (0, 2):
        controller = SpeculationController(Ridge())
        drawn = [
            DraftLimits(
                n, 5, 5, 100, acceptance=Acceptance(AcceptanceShape((0.7,) * 5, 5)), is_read=True, chances=chances
            )
            for n, chances in enumerate([(0.95,) * 5] * proposing + [()] * (2 - proposing))
        ]
        for _ in range(PATIENCE + 8 * LOOK_SELDOM):
            layouts = controller.layouts(drawn, StepLoad())
        has_masks[proposing] = [layout.num_masks > 0 for layout in layouts]
    assert has_masks == {0: [True, True], 2: [False, False]}


class Ridge(StepCost):
    """Rows are cheap up to 14, and dear beyond: room for the drafts of two, or for some masks."""

    def __init__(self) -> None:
        super().__init__([])

    def seconds(self, shape: StepShape) -> float:
        return 1e-3 * (1.0 + 0.01 * shape.num_rows + 0.2 * max(0, shape.num_rows - 14))


class Napping(FixedLayout):
    is_paused = True


@pytest.mark.parametrize("controller", [FixedLayout.full(3), Napping.full(3)])
def test_a_worker_whose_controller_naps_looks_nothing_up(controller: FixedLayout, tiny: SpaceModel) -> None:
    router = WorkerClient(
        Worker(tiny, num_blocks=32, controller=controller, sources=DraftSources(lookup=True, masks=False))
    )
    sequence = router.generate([70, 71, 72, 70, 71, 72, 70, 71], max_tokens=40)
    assert (sum(sequence.accepted) > 0) is not isinstance(controller, Napping)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_drafts_and_verification_in_turns_yield_what_dice_say(k: int) -> None:
    chances = (0.8,) * 7
    found = LayoutYield.of(DraftLayout.turns(k), chances)
    reached = sum(0.8**j for j in range(1, k + 1))
    assert (found.tokens, found.chain_rows, found.mask_rows) == pytest.approx((1 + reached / 2, 1 + k / 2, k / 2))
    assert (found.tokens, found.chain_rows, found.mask_rows) == pytest.approx(
        simulated(DraftLayout.turns(k), chances, 40_000), rel=0.03
    )
    assert sorted(found.steps) == [(pytest.approx(0.5), 1, k), (pytest.approx(0.5), 1 + k, 0)]


@pytest.mark.parametrize(("per_row", "in_turns"), [(0.0, False), (0.001, False), (0.02, True), (1.0, False)])
def test_drafts_and_verification_take_turns_where_rows_are_dear(per_row: float, in_turns: bool) -> None:
    def layout_of(*, may_take_turns: bool) -> DraftLayout:
        shape = AcceptanceShape((0.85,) * 7, 7, may_take_turns=may_take_turns)
        one = DraftLimits(1, 7, 7, ROOM_ENOUGH, acceptance=Acceptance(shape))
        return settled(SpeculationController(Machine(1.0, per_row)), [one] * 4)[0]

    assert layout_of(may_take_turns=True).in_turns == in_turns
    assert not layout_of(may_take_turns=False).in_turns
    assert (layout_of(may_take_turns=True) == DraftLayout.plain()) == (per_row == 1.0)


def test_a_sequence_whose_turn_it_is_to_verify_lays_out_no_masks() -> None:
    turns = DraftLayout.turns(4)
    assert room(num_drafts=0).fit(turns) == DraftLayout(0, (4,))
    assert room(num_drafts=0, num_left=5).fit(turns) == DraftLayout(0, (3,))
    assert room(num_drafts=4).fit(turns) == DraftLayout(4, (0,) * 5)
    assert room(num_drafts=2).fit(turns) == DraftLayout(2, (0,) * 3)
