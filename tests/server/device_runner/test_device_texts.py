"""Steps whose state is on the device give the texts of steps on the host: random requests, and real checkpoints."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from doubles import worker
from doubles.worker import PROMPTS, ScriptedModel
from space_common.worker.client import ClientSequence, WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch
from space_model.loading.load import load_model
from space_model.networks.network import PagedKV
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.model_runner import StepModel
from space_server.speculation.controller import DraftLimits, FixedLayout
from torch import Tensor

BLOCK, BLOCKS = 4, 300
EOS, STOP = [60, 20, 21], [61, 22]
router_of = partial(worker.router_of, device=True, num_blocks=BLOCKS)

pytestmark = pytest.mark.usefixtures("no_device_step_fails_unseen")


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
        seed=draw.getrandbits(64), temperature=draw.choice([0.0, 0.7, 1.0]), top_k=draw.choice([0, 5]),
        top_p=draw.choice([0.0, 0.8]), min_p=draw.choice([0.0, 0.05]), typical_p=draw.choice([0.0, 0.7]),
        repetition_penalty=draw.choice([0.0, 1.3]), presence_penalty=draw.choice([0.0, 0.4]),
        frequency_penalty=draw.choice([0.0, 0.2]), min_tokens=draw.choice([0, 6]),
        logit_bias=draw.choice([{}, {5: 1.5, 9: -2.0}]),
        bad_words=draw.choice([[], [pb.IdRun(ids=[7]), pb.IdRun(ids=[4, 5])]]),
        allowed_ids=draw.choice([[], list(range(4, 62))]),
    )  # fmt: skip


def traffic(model: StepModel, *, device: bool, seed: int, rule: Callable[[DraftLimits], DraftLayout]) -> WorkerClient:
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
            ran = router.sequences[sequence.seq_id]
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
        ran = router.sequences[seq_id]
        ran.tokens = ran.tokens[: cancelled[seq_id]]  # how far it got beyond that is the worker's affair
    return router


LAYOUTS: dict[str, Callable[[DraftLimits], DraftLayout]] = {
    "full": lambda room: DraftLayout.full(min(room.num_drafts, 3), 3),
    "pruned": lambda room: DraftLayout(2, (3, 0, 2)).with_drafts(room.num_drafts),
    "plain": lambda room: DraftLayout.plain(),
}


@pytest.mark.parametrize(("seed", "layout"), [(1, "full"), (2, "full"), (3, "pruned"), (4, "plain")])
def test_random_requests_get_the_texts_that_the_host_steps_give(seed: int, layout: str) -> None:
    on_host = traffic(Leaning(), device=False, seed=seed, rule=LAYOUTS[layout])
    on_device = traffic(Leaning(), device=True, seed=seed, rule=LAYOUTS[layout])
    assert on_device.worker.engine.device.num_forwards > 30
    for seq_id, ran in on_host.sequences.items():
        assert on_device.sequences[seq_id].tokens == ran.tokens, seq_id
        if ran.finish != pb.FINISH_NONE:
            assert on_device.sequences[seq_id].finish == ran.finish
    accepted = [count for ran in on_device.sequences.values() for count in ran.accepted]
    if layout == "full":
        assert {0, 1, 2, 3} <= set(accepted)
    finishes = {ran.finish for ran in on_device.sequences.values()}
    assert {pb.FINISH_EOS, pb.FINISH_LENGTH} <= finishes
    assert any(report.paused for ran in on_device.sequences.values() for report in ran.reports)


# ---------------------------------------------------------------------------------------------- real checkpoints


class Whispering:
    """Masks that draft the known texts, except where `wrong`: with random weights no draft is accepted."""

    def __init__(self, model: SpaceModel, wrong: Callable[[int], bool]) -> None:
        self._model, self._wrong = model, wrong
        self.facts = replace(model.facts, hidden_size=model.facts.hidden_size + 1, has_draft_head=False)
        self.texts: dict[int, list[int]] = {}  # by the first page
        self.allocate_kv, self.logits_of, self.embed = model.allocate_kv, model.logits_of, model.embed

    draft_network = None

    def draft_head_of(self, adapter: int | None) -> None:
        return None

    def recurrent_head_of(self, adapter: int | None) -> None:
        return None

    def sampled_step(self, kv: PagedKV, banned_ids: Tensor) -> None:
        return None

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden+1]: behind each row the id to predict, 0 for none."""
        hidden = self._model.forward(batch, kv)
        expected_ids = hidden.new_zeros(len(hidden), 1)
        for segment, groups in zip(batch.segments, batch.mask_rows, strict=True):
            text = self.texts.get(int(segment.pages[0]), [])
            for row in (row for rows in groups for row in rows):
                position = int(batch.positions[row]) + 1
                if position < len(text):
                    expected_ids[row] = text[position] - self._wrong(position)
        return torch.cat([hidden, expected_ids], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        expected_ids = hidden[:, -1].long()
        logits = self._model.logits(hidden[:, :-1].contiguous())
        return logits + 1000.0 * (
            torch.nn.functional.one_hot(expected_ids, logits.shape[1]) * (expected_ids > 0)[:, None]
        )


SAMPLINGS = [
    pb.Sampling(),
    pb.Sampling(seed=3, temperature=0.9),
    pb.Sampling(seed=9, temperature=1.0, top_k=40, top_p=0.9, min_p=0.01),
    pb.Sampling(seed=8, temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=10),
]


def decode(
    model: StepModel, *, device: bool, after: Callable[[WorkerClient], None] | None = None, k: int
) -> list[ClientSequence]:
    router = router_of(model, device=device, controller=FixedLayout.full(k))
    for prompt, sampling_params in zip(PROMPTS, SAMPLINGS, strict=True):
        router.admit(prompt, max_tokens=24, sampling=sampling_params)
        if after is not None:
            after(router)
    router.run()
    assert not device or router.worker.engine.device.num_forwards > 5
    return list(router.sequences.values())


@pytest.mark.parametrize("k", [1, 3, 5])
def test_real_attention_over_accepted_drafts_gives_the_plain_text(tiny: SpaceModel, k: int) -> None:
    plain = [ran.tokens for ran in decode(tiny, device=False, k=0)]
    expected_ids = Whispering(tiny, lambda position: position % 16 in (0, 1, 2, 5))
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)]

    def tell(router: WorkerClient) -> None:
        number = len(router.sequences)
        expected_ids.texts[router.sequences[number].pages[0]] = texts[number - 1]

    runs = decode(expected_ids, device=True, after=tell, k=k)
    assert [ran.tokens for ran in runs] == plain
    accepted = {count for ran in runs for count in ran.accepted}
    assert {0, k} <= accepted
    assert k == 1 or accepted & set(range(1, k))


def test_a_draft_head_drafts_what_it_drafts_on_the_host(tiny: SpaceModel) -> None:
    assert tiny.drafting.draft_head is not None
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
        found.append([(ran.tokens, ran.accepted) for ran in router.sequences.values()])
    assert found[0] == found[1]
    assert max(count for _, accepted in found[0] for count in accepted) > 1


@pytest.fixture(scope="module")
def demo() -> SpaceModel:
    return load_model("demo", dtype="float32", num_threads=1)
