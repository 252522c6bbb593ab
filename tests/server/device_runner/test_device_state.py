"""The batch's state on the device goes on, step by step, as the sequences on the host do."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from doubles.worker import ScriptedModel
from space_kernels.sampling import device_sampling as choosing
from space_kernels.sampling.device_sampling import SamplingCapacity, Stages
from space_kernels.sampling.sampler import SampledTokens, TokenCounts
from space_kernels.sampling.sampling_params import SamplingParams
from space_kernels.step import state as step_state
from space_kernels.step.state import RESULT_FIXED, StateAdmission, StepIndex, StepState
from space_kernels.step.verification import EndCode
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch
from space_model.networks.network import PagedKV
from space_server.batch import RunningSequence, SequenceEnd, SequenceLimits
from space_server.host_runner import HostRunner
from space_server.model_runner import StepTimes
from space_server.scheduled_batch import PrefillBudget, ScheduledSequence, plan_step
from space_server.speculation.controller import FixedLayout
from space_server.step_cost import StepCost
from torch import Tensor

VOCAB, WINDOW, BLOCK, LINES, PAGES = 24, 90, 4, 4, 400
EOS, STOP = 20, 21
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
END = {
    None: EndCode.NONE,
    SequenceEnd.EOS: EndCode.EOS,
    SequenceEnd.STOP_ID: EndCode.STOP_ID,
    SequenceEnd.LENGTH: EndCode.LENGTH,
}


class NoisyModel(ScriptedModel):
    """A text by position that rows mostly, but not always, agree on; NaN at one position in 60 of chain rows."""

    def __init__(self, num_masks: int) -> None:
        super().__init__(num_masks=num_masks, vocab_size=VOCAB, window=WINDOW)
        generator = torch.Generator().manual_seed(3)
        self._of_id = torch.randn(VOCAB, VOCAB, generator=generator)
        self._of_position = torch.randn(WINDOW + 20, VOCAB, generator=generator)
        self._of_position.scatter_add_(
            1, torch.randint(4, VOCAB, (WINDOW + 20, 1), generator=generator), torch.full((WINDOW + 20, 1), 5.0)
        )

    def rows(self, ids: Tensor, positions: Tensor, num_chain_rows: int) -> Tensor:
        """[R, V]"""
        logits = self._of_id[ids] + self._of_position[positions]
        logits[:num_chain_rows][positions[:num_chain_rows] % 60 == 37] = torch.nan
        return logits

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        return self.rows(batch.ids, batch.positions, batch.num_chain_rows)


def sampling_params(draw: random.Random) -> SamplingParams:
    """Neutral, or with some of everything."""
    if draw.random() < 0.3:
        return SamplingParams(temperature=0.0, end_ids=(EOS, STOP))
    if draw.random() < 0.3:
        return SamplingParams(temperature=draw.choice([0.5, 1.0]), key=draw.getrandbits(60), end_ids=(EOS, STOP))
    return SamplingParams(
        key=draw.getrandbits(62) - (1 << 61), bias=((5, 1.5), (9, -2.0)) if draw.random() < 0.5 else (),
        min_tokens=draw.choice([0, 6]), end_ids=(EOS, STOP), bad_words=draw.choice([(), ((7,), (4, 5), (8, 9, 10))]),
        repetition_penalty=draw.choice([1.0, 1.3]), presence_penalty=draw.choice([0.0, 0.4]),
        frequency_penalty=draw.choice([0.0, 0.2]), temperature=draw.choice([0.0, 0.7, 1.0]), top_k=draw.choice([0, 5]),
        top_p=draw.choice([1.0, 0.8]), min_p=draw.choice([0.0, 0.05]), typical_p=draw.choice([1.0, 0.7]),
    )  # fmt: skip


@dataclass
class Pair:
    """The same batch twice: sequences on the host, lines on the device."""

    layout: DraftLayout
    draw: random.Random
    ops: ModuleType = step_state  # rows, judge_step, masks and advance
    choose: Callable[..., SampledTokens] = choosing.sample
    on_host: dict[int, RunningSequence] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.k = self.layout.num_drafts
        self.model = NoisyModel(max(1, *self.layout.masks))
        self.runner = HostRunner(self.model, self.model.allocate_kv(PAGES, BLOCK))
        self.state = StepState.empty(
            LINES + 1,  # the last one is never taken
            max_drafts=self.k + 1, max_pages=WINDOW // BLOCK + 1, block_size=BLOCK, window=WINDOW, vocab_size=VOCAB,
            room=SamplingCapacity(num_biases=3, num_ends=3, num_words=3, word_length=3), device=DEVICE,
        )  # fmt: skip
        self.index = StepIndex.of(LINES + 1, self.layout, DEVICE)
        self.mask_ids = torch.tensor(self.model.facts.mask_ids, device=DEVICE)
        self._free_pages = list(range(1, PAGES))
        self._next = 0

    def admit(self, line: int) -> None:
        draw = self.draw
        ids = [draw.randrange(4, 20) for _ in range(draw.randrange(1, 40))]
        num_prompt = draw.randrange(1, len(ids) + 1)
        chosen = sampling_params(draw)
        limits = SequenceLimits(
            len(ids) - num_prompt + draw.randrange(1, 40), WINDOW, frozenset({EOS}), frozenset({STOP, EOS})
        )
        pages = [self._free_pages.pop() for _ in range((len(ids) - 1) // BLOCK + 1)]
        self._next += 1
        sequence = RunningSequence(
            seq_id=self._next, ids=ids, num_prompt=num_prompt, num_computed=len(ids) - 1, pages=pages,
            sampling_params=chosen, limits=limits, max_drafts=draw.randrange(0, self.k + 2),
            counts=TokenCounts(ids, num_prompt, VOCAB) if chosen.penalises else None,
            num_masks=self.model.facts.num_masks,
        )  # fmt: skip
        self.on_host[line] = sequence
        self.state.put(
            line,
            StateAdmission(
                ids=ids, num_prompt=num_prompt, pages=pages, sampling_params=chosen, num_left=sequence.num_left,
                eos_ids=[EOS], stop_ids=[STOP, EOS], max_drafts=sequence.max_drafts,
                max_masks=min(sequence.max_drafts, sequence.num_masks),
            ),
        )  # fmt: skip

    def host_decides(self) -> None:
        for line in range(LINES):
            sequence = self.on_host.get(line)
            if sequence is None:
                if self.draw.random() < 0.3:
                    self.admit(line)
            elif self.draw.random() < 0.02:
                self.release(line)
            elif sequence.num_free_slots(BLOCK) < self.k + 1 and self.draw.random() < 0.5:
                self.state.extend(line, len(sequence.pages), page := [self._free_pages.pop()])
                sequence.extend(page)

    def release(self, line: int) -> None:
        self._free_pages += self.on_host.pop(line).pages
        self.state.clear(line)

    def step_device(self, plans: dict[int, ScheduledSequence]) -> Tensor:
        state, index = self.state, self.index
        stages = Stages.of(sequence.sampling_params for sequence in self.on_host.values())
        ops = self.ops
        laid_out = ops.rows(state, index, self.mask_ids)
        ids, positions = laid_out.ids.cpu(), laid_out.positions.cpu()
        self.check_rows(ids, positions, laid_out.slots.cpu(), plans)
        hidden = self.model.rows(ids, positions, index.num_chain_rows).to(DEVICE)
        before = step_state.chain_choices(state, index, stages)
        choice = self.choose(
            hidden[: index.num_chain_rows].view(LINES + 1, self.k + 1, VOCAB).clone(), state.batch_params, stages,
            before, self.mask_ids, state.counts,
        )  # fmt: skip
        verification = ops.verify_step(state, index, laid_out, choice)
        from_masks = ops.masks(state, index, verification)
        before = step_state.mask_choices(state, verification, index.most_drafts, stages)
        drafts = self.choose(hidden[from_masks.rows], state.batch_params, stages, before, self.mask_ids, state.counts)
        return ops.advance(state, laid_out, verification, drafts.ids, from_masks.count, self.mask_ids)

    def check_rows(self, ids: Tensor, positions: Tensor, slots: Tensor, plans: dict[int, ScheduledSequence]) -> None:
        """Live rows are the host's; others write nothing, inside the window and the vocabulary."""
        assert ((positions >= 0) & (positions < WINDOW)).all()
        assert ((ids >= 0) & (ids < VOCAB)).all()
        chain = slots.view(LINES + 1, self.k + 1)
        for line in range(LINES + 1):
            plan = plans.get(line)
            count = 0 if plan is None else 1 + plan.layout.num_drafts
            assert (chain[line, count:] == -1).all()
            if plan is None:
                continue
            batch = ForwardBatch.build([plan.segment], block_size=BLOCK, mask_ids=self.model.facts.mask_ids)
            first = line * (self.k + 1)
            assert torch.equal(ids[first : first + count], batch.ids[:count])
            assert torch.equal(positions[first : first + count], batch.positions[:count])
            assert chain[line, :count].tolist() == batch.rows.chain_slots().tolist()
            for group, of_group in enumerate(batch.mask_rows[0]):
                begin = int(self.index.mask_starts[line, group])
                here = slice(begin, begin + len(of_group))
                assert torch.equal(ids[here], batch.ids[of_group.start : of_group.stop])
                assert torch.equal(positions[here], batch.positions[of_group.start : of_group.stop])

    def step(self) -> None:
        cost = StepCost.typical("cpu")
        controller = FixedLayout(lambda room: self.layout.with_drafts(room.num_drafts))
        planned = plan_step(self.on_host.values(), controller, block_size=BLOCK, budget=PrefillBudget(8, None, cost))
        line_of = {sequence.seq_id: line for line, sequence in self.on_host.items()}
        plans = {line_of[plan.sequence.seq_id]: plan for plan in planned.plans}
        result = self.step_device(plans).tolist()
        advances = self.runner.run(planned.plans, StepTimes()) if planned.plans else []
        for sequence in planned.out_of_slots:
            line = line_of[sequence.seq_id]
            assert result[line][0] == 0
            assert result[line][3] == EndCode.NONE
            assert bool(self.state.live[line])
            self.seen["paused"] += 1
        assert result[LINES][:4] == [0, 0, 0, 0]
        for advance_ in advances:
            sequence = advance_.plan.sequence
            line = line_of[sequence.seq_id]
            drafted = advance_.plan.layout.num_drafts
            advance_.commit()
            count, accepted, num_live, end, num_known, num_drafts = result[line][:RESULT_FIXED]
            lists = result[line][RESULT_FIXED:]
            assert lists[:count] == advance_.tokens
            assert (accepted, num_live) == (advance_.num_accepted, drafted)
            assert num_known == len(sequence.ids)
            assert end == (EndCode.ERROR if advance_.error is not None else END[advance_.end])
            self.seen[EndCode(end).name] += 1
            self.seen["none" if accepted == 0 else "all" if accepted == self.k else "some"] += 1
            if end != EndCode.NONE:
                assert not bool(self.state.live[line])
                self.release(line)
                continue
            assert lists[self.k + 2 :][:num_drafts] == sequence.drafts
            assert int(self.state.num_cached[line]) == sequence.num_computed
            assert self.state.history[line, :num_known].tolist() == sequence.ids
            assert int(self.state.num_left[line]) == sequence.num_left
            if sequence.counts is not None:
                counts = self.state.counts[line].cpu()
                assert torch.equal(counts & 0xFFFFFF, sequence.counts.output.to(torch.int32))
                assert torch.equal(counts > 0, sequence.counts.seen)


@pytest.mark.parametrize(
    "layout",
    [
        DraftLayout.full(3, 3),
        DraftLayout(2, (2, 0, 3)),  # an earlier group stands in for one that is not laid out
        DraftLayout.full(1, 2),
    ],
    ids=["full", "pruned", "short"],
)
def test_hundreds_of_steps_emit_and_draft_what_the_host_does(layout: DraftLayout) -> None:
    pair = Pair(layout, random.Random(layout.num_rows))
    for _ in range(180):
        pair.host_decides()
        pair.step()
    wanted = {"paused", "NONE", "EOS", "STOP_ID", "LENGTH", "ERROR", "none", "all"}
    assert wanted <= set(pair.seen), pair.seen
    assert layout.num_drafts < 2 or pair.seen["some"] > 10


@pytest.mark.slow
def test_kernels_take_the_same_steps() -> None:
    pytest.importorskip("triton")
    from space_kernels.sampling import sampling_triton
    from space_kernels.step import state_triton as step_state_triton

    # The interpreter takes seconds for a choice of this batch; that kernels choose alike is shown by itself.
    choose = sampling_triton.sample if DEVICE == "cuda" else choosing.sample
    pair = Pair(DraftLayout(2, (2, 0, 3)), random.Random(4), step_state_triton, choose)
    for _ in range(60):
        pair.host_decides()
        pair.step()
    assert {"paused", "NONE", "LENGTH", "none", "some", "all"} <= set(pair.seen), pair.seen


def test_rows_stand_where_the_host_packs_them() -> None:
    layout = DraftLayout(2, (2, 1, 3))
    index = StepIndex.of(3, layout)
    plan = ForwardBatch.build(
        [ScheduledSequence(_at(0, line), 1, layout, closes=True).segment for line in range(3)],
        block_size=BLOCK,
        mask_ids=(1, 2, 3),
    )
    pattern = plan.pattern.rows
    assert index.owner[: index.num_rows].tolist() == pattern.owner.tolist()
    assert index.offset[: index.num_rows].tolist() == pattern.offsets.tolist()
    assert (index.num_padded, index.num_chain_rows) == (pattern.num_padded, pattern.num_chain_rows)
    assert index.mask_starts.tolist() == [[run.start for run in runs] for runs in plan.mask_rows]


def _at(position: int, line: int) -> RunningSequence:
    limits = SequenceLimits(50, WINDOW, frozenset(), frozenset())
    ids, params = [5] * (position + 1), SamplingParams()
    return RunningSequence(line, ids, 1, position, [line], params, limits, 3, num_masks=3, drafts=[6, 7])
