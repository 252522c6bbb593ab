"""Steps whose state is on the device give the texts of steps on the host, and say what those say."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from space_model.draft_layout import DraftLayout
from space_model.forward_batch import ForwardBatch
from space_model.load import load_model
from space_model.paged_kv import PagedKV
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.controller import FixedLayout, Room
from space_server.step_model import StepModel
from space_server.testing import Ran, ScriptedModel, SmallRouter
from space_server.worker import Worker
from torch import Tensor

BLOCK, BLOCKS = 4, 300
EOS, STOP = [60, 20, 21], [61, 22]


def router_of(model: StepModel, *, device: bool = True, **settings: object) -> SmallRouter:
    fixed = {"num_blocks": BLOCKS, "block_size": BLOCK, "controller": FixedLayout.full(3), "device_steps": device}
    return SmallRouter(Worker(model, **(fixed | settings)))  # type: ignore[arg-type]


def launches(router: SmallRouter) -> int:
    assert router.worker._device is not None
    return router.worker._device.stepper.num_launches


@pytest.fixture(autouse=True)
def no_step_fails_unseen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A step on the device that fails is taken on the host: the text alone would not show it."""
    yield
    assert [record.message for record in caplog.get_records("call") if "failed" in record.message] == []


# ---------------------------------------------------------------------------------------------- random traffic


class Leaning(ScriptedModel):
    """A text by position that chain rows mostly follow; masks guess it, sometimes wrongly."""

    def __init__(self, num_masks: int = 3) -> None:
        super().__init__(num_masks=num_masks, vocab_size=64, window=120)
        generator = torch.Generator().manual_seed(5)
        self._of_id = torch.randn(64, 64, generator=generator)
        self._of_position = torch.randn(160, 64, generator=generator)
        self._of_position.scatter_add_(
            1, torch.randint(4, 64, (160, 1), generator=generator), torch.full((160, 1), 6.0)
        )

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        return self._of_id[batch.ids] + self._of_position[batch.positions]


def sampling(draw: random.Random) -> pb.Sampling:
    """Neutral, or with some of everything."""
    if draw.random() < 0.3:
        return pb.Sampling()
    if draw.random() < 0.3:
        return pb.Sampling(temperature=draw.choice([0.5, 1.0]), seed=draw.getrandbits(64))
    return pb.Sampling(
        seed=draw.getrandbits(64),
        temperature=draw.choice([0.0, 0.7, 1.0]),
        top_k=draw.choice([0, 5]),
        top_p=draw.choice([0.0, 0.8]),
        min_p=draw.choice([0.0, 0.05]),
        typical_p=draw.choice([0.0, 0.7]),
        repetition_penalty=draw.choice([0.0, 1.3]),
        presence_penalty=draw.choice([0.0, 0.4]),
        frequency_penalty=draw.choice([0.0, 0.2]),
        min_tokens=draw.choice([0, 6]),
        logit_bias=draw.choice([{}, {5: 1.5, 9: -2.0}]),
        bad_words=draw.choice([[], [pb.IdRun(ids=[7]), pb.IdRun(ids=[4, 5])]]),
        allowed_ids=draw.choice([[], list(range(4, 62))]),
    )


def traffic(model: StepModel, *, device: bool, seed: int, rule: Callable[[Room], DraftLayout]) -> SmallRouter:
    """Requests that come, wait for pages, and are cancelled, at random; the same for either kind of step."""
    draw = random.Random(seed)
    router = router_of(model, device=device, controller=FixedLayout(rule), max_sequences=8, max_prefill_rows=16)
    wanted = []
    for _ in range(24):
        ids = [draw.randrange(4, 60) for _ in range(draw.randrange(1, 50))]
        wanted.append(
            {
                "ids": ids,
                "num_prompt": draw.randrange(1, len(ids) + 1),
                "max_tokens": len(ids) + draw.randrange(1, 30),
                "num_pages": draw.choice([None, 1, len(ids) // BLOCK + 1]),
                "sampling": sampling(draw),
                "max_draft_length": draw.choice([0, 1, 2, 9, 9]),
                "eos_ids": EOS,
                "stop_ids": STOP,
                "want_logprobs": draw.random() < 0.1,
            }
        )
    cancelled = {number: draw.randrange(1, 9) for number in range(1, len(wanted) + 1) if draw.random() < 0.2}
    released: set[int] = set()

    def release(seq_id: int) -> None:
        router.release(seq_id)
        released.add(seq_id)

    def go_on() -> None:
        report = router.reports[-1]
        for sequence in report.sequences:
            if sequence.seq_id in released:
                continue
            ran = router.ran[sequence.seq_id]
            if sequence.finish != pb.FINISH_NONE or len(ran.tokens) >= cancelled.get(sequence.seq_id, 999):
                release(sequence.seq_id)
            elif sequence.paused:
                router.extend(sequence.seq_id)

    waiting = list(wanted)
    while True:
        while waiting and len(router.worker.batch) < 8 and draw.random() < 0.5:
            router.admit(**waiting.pop(0))  # type: ignore[arg-type]
        if router.step() is not None:
            go_on()
        elif not waiting and not router.worker.has_work:
            break
    assert sorted(router.free) == list(range(BLOCKS))
    for seq_id in cancelled:
        ran = router.ran[seq_id]
        ran.ids = ran.ids[: ran.num_prompt + cancelled[seq_id]]  # how far it got beyond that is the worker's affair
    return router


LAYOUTS: dict[str, Callable[[Room], DraftLayout]] = {
    "full": lambda room: DraftLayout.full(min(room.num_drafts, 3), 3),
    "pruned": lambda room: DraftLayout(2, (3, 0, 2)).with_drafts(room.num_drafts),
    "plain": lambda room: DraftLayout.plain(),
}


@pytest.mark.parametrize(("seed", "layout"), [(1, "full"), (2, "full"), (3, "pruned"), (4, "plain")])
def test_random_requests_get_the_texts_that_the_host_steps_give(seed: int, layout: str) -> None:
    on_host = traffic(Leaning(), device=False, seed=seed, rule=LAYOUTS[layout])
    on_device = traffic(Leaning(), device=True, seed=seed, rule=LAYOUTS[layout])
    assert launches(on_device) > 30
    for seq_id, ran in on_host.ran.items():
        assert on_device.ran[seq_id].tokens == ran.tokens, seq_id
        if ran.finish != pb.FINISH_NONE:
            assert on_device.ran[seq_id].finish == ran.finish
    accepted = [count for ran in on_device.ran.values() for count in ran.accepted]
    if layout == "full":
        assert {0, 1, 2, 3} <= set(accepted)
    finishes = {ran.finish for ran in on_device.ran.values()}
    assert {pb.FINISH_EOS, pb.FINISH_LENGTH} <= finishes
    assert any(report.paused for ran in on_device.ran.values() for report in ran.reports)


# ---------------------------------------------------------------------------------------------- real checkpoints


class Whispering:
    """A checkpoint whose masks are told the texts, where not `wrong`: random weights accept no drafts of their own."""

    def __init__(self, model: SpaceModel, wrong: Callable[[int], bool]) -> None:
        self._model, self._wrong = model, wrong
        self.facts = replace(model.facts, hidden_size=model.facts.hidden_size + 1, has_draft_head=False)
        self.texts: dict[int, list[int]] = {}  # by the first page
        self.allocate_kv, self.logits_of, self.embed = model.allocate_kv, model.logits_of, model.embed

    def draft_head_of(self, adapter: int | None) -> None:
        return None

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden+1]: behind each row what it is told, 0 for nothing."""
        hidden = self._model.forward(batch, kv)
        told = hidden.new_zeros(len(hidden), 1)
        for segment, groups in zip(batch.segments, batch.mask_rows, strict=True):
            text = self.texts.get(int(segment.pages[0]), [])
            for row in (row for rows in groups for row in rows):
                position = int(batch.positions[row]) + 1
                if position < len(text):
                    told[row] = text[position] - self._wrong(position)
        return torch.cat([hidden, told], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        told = hidden[:, -1].long()
        logits = self._model.logits(hidden[:, :-1].contiguous())
        return logits + 1000.0 * (torch.nn.functional.one_hot(told, logits.shape[1]) * (told > 0)[:, None])


PROMPTS = [[70, 71, 72, 73, 74], [20] * 17 + [33, 90], [100, 101], [50 + n % 40 for n in range(37)]]
SAMPLINGS = [
    pb.Sampling(),
    pb.Sampling(seed=3, temperature=0.9),
    pb.Sampling(seed=9, temperature=1.0, top_k=40, top_p=0.9, min_p=0.01),
    pb.Sampling(seed=8, temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=10),
]


def decode(model: StepModel, *, device: bool, after: Callable[[SmallRouter], None] | None = None, k: int) -> list[Ran]:
    router = router_of(model, device=device, controller=FixedLayout.full(k))
    for prompt, law in zip(PROMPTS, SAMPLINGS, strict=True):
        router.admit(prompt, max_tokens=24, sampling=law)
        if after is not None:
            after(router)
    router.run()
    assert not device or launches(router) > 5
    return list(router.ran.values())


@pytest.mark.parametrize("k", [1, 3, 5])
def test_real_attention_over_accepted_drafts_gives_the_plain_text(tiny: SpaceModel, k: int) -> None:
    plain = [ran.tokens for ran in decode(tiny, device=False, k=0)]
    told = Whispering(tiny, lambda position: position % 16 in (0, 1, 2, 5))
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)]

    def tell(router: SmallRouter) -> None:
        number = len(router.ran)
        told.texts[router.ran[number].pages[0]] = texts[number - 1]

    runs = decode(told, device=True, after=tell, k=k)
    assert [ran.tokens for ran in runs] == plain
    accepted = {count for ran in runs for count in ran.accepted}
    assert {0, k} <= accepted
    assert k == 1 or accepted & set(range(1, k))


def test_a_draft_head_drafts_what_it_drafts_on_the_host(tiny: SpaceModel) -> None:
    assert tiny.draft_head is not None
    on_host, on_device = (decode(tiny, device=device, k=3) for device in (False, True))
    for one, other in zip(on_host, on_device, strict=True):
        assert one.tokens == other.tokens
        assert one.accepted == other.accepted


def test_the_embedded_model_says_the_same(demo: SpaceModel) -> None:
    found = []
    for device in (False, True):
        router = router_of(demo, device=device, controller=FixedLayout.full(5), block_size=16)
        for seed, temperature in enumerate((0.0, 0.7)):
            router.admit(
                [300 + 7 * n % 900 for n in range(20)],
                max_tokens=40,
                sampling=pb.Sampling(seed=seed, temperature=temperature),
            )
        router.run()
        found.append([(ran.tokens, ran.accepted) for ran in router.ran.values()])
    assert found[0] == found[1]
    assert max(count for _, accepted in found[0] for count in accepted) > 1


@pytest.fixture(scope="module")
def demo() -> SpaceModel:
    return load_model("demo", dtype="float32", num_threads=1)


# ---------------------------------------------------------------------------------------------- what is under way


class Noting:
    """Notes down what the worker asks of its stepper."""

    def __init__(self, router: SmallRouter, monkeypatch: pytest.MonkeyPatch) -> None:
        assert router.worker._device is not None
        self.said: list[str] = []
        stepper = router.worker._device.stepper
        for name in ("launch", "read"):
            monkeypatch.setattr(stepper, name, self._noted(name, getattr(stepper, name)))

    def _noted(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def noted(*arguments: object) -> object:
            self.said.append(name)
            return call(*arguments)

        return noted


def test_the_next_step_is_launched_before_the_last_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    router = router_of(ScriptedModel(), controller=FixedLayout.full(1))
    router.admit([5] * 6, max_tokens=21)
    said = Noting(router, monkeypatch).said
    router.run()
    # one id by the prompt's step; of 20 more, two a step, but for all that is known one: 10 steps at least
    assert said[:2] == ["launch", "launch"]
    last_launch = len(said) - 1 - said[::-1].index("launch")
    assert said[2 : last_launch + 1] == ["read", "launch"] * ((last_launch - 1) // 2)
    assert said.count("read") == said.count("launch") >= 10


def test_no_step_is_launched_that_could_bring_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    router = router_of(ScriptedModel(), controller=FixedLayout(lambda room: DraftLayout.plain()))
    router.admit([5] * 6, max_tokens=8)
    said = Noting(router, monkeypatch).said
    router.run()
    assert said.count("launch") == 7


def test_pages_of_a_cancelled_sequence_are_given_back_when_no_step_under_way_has_them() -> None:
    router = router_of(ScriptedModel(), controller=FixedLayout(lambda room: DraftLayout.plain()))
    stays, goes = router.admit([5] * 6, max_tokens=30), router.admit([6] * 9, max_tokens=30)
    router.step()
    router.step()
    router.release(goes)
    assert router.worker.batch.get(goes) is None
    report = router.step()  # launches without it, reads the step before
    assert report is not None
    assert list(report.released) == [goes]
    assert [sequence.seq_id for sequence in report.sequences] == [stays]
    router.run()
    assert len(router.ran[stays].tokens) == 30
    assert sorted(router.free) == list(range(BLOCKS))


def test_a_line_that_is_taken_again_knows_nothing_of_who_had_it() -> None:
    def text(position: int) -> int:
        return 10 + position % 7

    router = router_of(ScriptedModel(text=text), max_sequences=1)
    law = pb.Sampling(frequency_penalty=100.0, temperature=0.0)
    first = router.admit([5] * 4, max_tokens=5, sampling=law)
    router.run()
    second = router.admit([5] * 4, max_tokens=5, sampling=law)
    router.run()
    assert router.ran[first].tokens == router.ran[second].tokens


def test_a_new_router_finds_an_empty_worker_and_nothing_under_way() -> None:
    worker = Worker(ScriptedModel(), num_blocks=50, block_size=4, device_steps=True)
    router = SmallRouter(worker)
    router.admit([5] * 6, max_tokens=30)
    router.step()
    router.step()
    assert worker.has_work
    worker.reset()
    assert not worker.has_work
    again = SmallRouter(worker)
    seq_id = again.admit([5] * 6, max_tokens=30)
    again.run()
    assert len(again.ran[seq_id].tokens) == 30


def test_a_step_that_fails_harms_the_culprit_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = ScriptedModel(poison=50, text=lambda position: 50 if position == 219 else 10 + position % 30)
    router = router_of(model)
    starts = (9, 100, 211)
    good, other, bad = (router.admit([5] * start, max_tokens=20) for start in starts)
    router.run()
    assert router.ran[bad].finish == pb.FINISH_ERROR
    assert "poison" in router.ran[bad].error
    for seq_id, start in ((good, 9), (other, 100)):
        assert router.ran[seq_id].tokens == [model.text(position) for position in range(start, start + 20)]
    assert any("stepped on the host" in message for message in caplog.messages)
    caplog.clear()
    assert launches(router) >= 5


def test_launches_that_keep_failing_are_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router = router_of(ScriptedModel(), controller=FixedLayout.full(1))
    seq_id = router.admit([5] * 6, max_tokens=30)
    device = router.worker._device
    assert device is not None
    tried = []

    def fails(layout: DraftLayout) -> None:
        tried.append(layout)
        raise RuntimeError("no kernel")

    monkeypatch.setattr(device.stepper, "launch", fails)
    router.run()
    assert len(router.ran[seq_id].tokens) == 30
    assert len(tried) == 3
    caplog.clear()


@pytest.mark.parametrize("k", [0, 2])
def test_nan_harms_its_own_sequence_where_the_host_would_meet_it(k: int) -> None:
    runs = []
    for device in (False, True):
        router = router_of(ScriptedModel(nan_at=17), device=device, controller=FixedLayout.full(k))
        for start in (9, 100):
            router.admit([5] * start, max_tokens=20)
        router.run()
        runs.append([(ran.tokens, ran.finish, ran.error) for ran in router.ran.values()])
    assert runs[0] == runs[1]
    assert runs[1][0][1] == pb.FINISH_ERROR


def test_draining_ends_when_the_last_step_under_way_is_read() -> None:
    router = router_of(ScriptedModel())
    router.admit([5] * 6, max_tokens=9)
    router.step()
    router.worker.apply(pb.Command(drain=pb.Drain()))
    assert not router.worker.drained
    router.run()
    assert router.worker.drained


def test_the_report_counts_what_it_counts_on_the_host() -> None:
    totals = []
    for device in (False, True):
        router = router_of(ScriptedModel(wrong=range(0, 99, 4)), device=device, prefill_seconds=1.0)
        router.admit([5] * 6, max_tokens=23)
        router.run()
        stats = [report.stats for report in router.reports if report.stepped]
        assert all(one.forward_seconds > 0 and one.host_seconds > 0 and one.plain_step_seconds > 0 for one in stats[1:])
        counts: dict[int, int] = {}
        for one in stats:
            for number, count in enumerate(one.draft_length_counts):
                counts[number] = counts.get(number, 0) + count
        totals.append((counts, sum(one.chain_rows for one in stats), sum(one.prefill_rows for one in stats)))
    assert totals[0] == totals[1]


def test_the_cost_of_device_steps_is_learnt() -> None:
    router = router_of(ScriptedModel())
    learnt = []
    cost = router.worker.cost
    cost.learn = lambda shape, seconds: learnt.append((shape, seconds))  # type: ignore[method-assign]
    for _ in range(2):
        router.admit([5] * 6, max_tokens=30)
    router.run()
    shapes = [shape for shape, _ in learnt if not shape.num_prefill_rows]
    assert {(shape.num_sequences, shape.num_chain_rows, shape.num_mask_rows) for shape in shapes} <= {
        (2, 8, 24),
        (1, 4, 12),
    }
    assert all(0 < seconds < 1 for _, seconds in learnt)


def test_gaps_are_closed_so_that_few_sequences_make_a_small_step() -> None:
    router = router_of(ScriptedModel(), max_sequences=16, controller=FixedLayout(lambda room: DraftLayout.plain()))
    lengths = [4, 4, 4, 4, 4, 4, 4, 30]
    sequences = [router.admit([5] * (3 + n), max_tokens=count) for n, count in enumerate(lengths)]
    widths: list[int] = []
    device = router.worker._device
    assert device is not None
    router.run(after_step=lambda: widths.append(device.stepper.batch.num_lines))
    assert router.ran[sequences[-1]].tokens == [router.worker.stepper.model.text(p) for p in range(10, 40)]  # type: ignore[attr-defined]
    assert widths[2] == 8
    assert min(width for width in widths if width) == 1
