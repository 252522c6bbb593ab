"""Random traffic on real workers with a tiny model: every request ends once, with the text of its solo run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from doubles.router.scenario import Performance, RuleBroken, Scenario
from space_common.worker.client import WorkerClient
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_router.engine.request import worker_messages
from space_router.engine.request.request import ValidRequest
from space_router.metrics import Metrics
from space_server.kv_offload import HostBlocks
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint

BLOCK_SIZE = 8
WINDOW = 100
METRICS = Metrics()
WORDS = range(10, 120)  # ids of prompts: no mask, nothing special


class Oracle:
    """A draft source that has read every text, and is wrong about some positions of each."""

    def __init__(self, right: int) -> None:
        """`right`: of ten drafts, so many are."""
        self.texts: list[list[int]] = []
        self._right = right

    def propose(self, seq_id: int, ids: Sequence[int], max_drafts: int) -> list[int]:
        known, count = list(ids), len(ids)
        text = next((text for text in self.texts if text[:count] == known), known)
        drafts = text[count : count + max_drafts]
        return [id_ if (count + i) * 7 % 10 < self._right else 9 for i, id_ in enumerate(drafts)]


class TableWorker:
    """A worker on the table; the pages of a life hold what the lives before it left there."""

    def __init__(self, worker: Worker, life: int) -> None:
        worker.reset()
        self._worker, self._life = worker, life
        self._max_prefill_rows = 0
        self.accepted: Counter[str] = Counter()

    def hello(self) -> pb.Hello:
        return self._worker.hello(f"life {self._life}")

    def apply(self, command: pb.Command) -> None:
        if command.HasField("start"):
            self._max_prefill_rows = command.start.max_prefill_rows
        self._worker.apply(command)

    def step(self) -> pb.StepReport | None:
        report = self._worker.step()
        if report is not None:
            assert report.stats.prefill_rows <= self._max_prefill_rows
            assert report.stats.num_sequences <= self._worker.max_sequences
        for part in report.sequences if report is not None else ():
            self.accepted["readmitted"] += part.finish == pb.FINISH_READMIT
            if part.num_drafted:
                share = part.num_accepted / part.num_drafted
                self.accepted["none" if share == 0 else "all" if share == 1 else "some"] += 1
        return report


@pytest.fixture(scope="module")
def model(checkpoint_of: Callable[[str], Path]) -> SpaceModel:
    return load_model(checkpoint_of("llama"), dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    path = tiny_checkpoint(
        tmp_path_factory.mktemp("hybrid"), "qwen3_next", num_masks=5, hidden_size=32, num_heads=2, **layers
    )
    return load_model(path, dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def long_rope(tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 30,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.2],
        "long_factor": [1.0, 1.4, 2.1, 3.3, 4.0, 5.0, 6.0, 8.0],
    }  # fmt: skip
    own: dict[str, Any] = {"rope_parameters": rope, "original_max_position_embeddings": 30}
    path = tiny_checkpoint(tmp_path_factory.mktemp("long"), "phi3", hidden_size=32, num_heads=2, window=WINDOW, **own)
    return load_model(path, dtype="float32", num_threads=1, max_model_len=WINDOW)


@pytest.fixture(scope="module")
def plain(model: SpaceModel) -> Worker:
    return Worker(model, num_blocks=32, block_size=BLOCK_SIZE, controller=FixedLayout.full(0))


@pytest.fixture(scope="module")
def perform(model: SpaceModel, plain: Worker) -> Callable[..., Counter[str]]:
    """Runs a scenario by its seed; what happened in it. `on_device`: with steps as a GPU takes them."""
    return performer(model, plain)


def performer(model: SpaceModel, plain: Worker) -> Callable[..., Counter[str]]:
    """Return what runs scenarios on workers of a model; `plain` decodes each text alone."""

    def solo_text(request: ValidRequest) -> tuple[int, ...]:
        plain.reset()
        router = WorkerClient(plain, max_prefill_rows=4096, readmits=True)
        assert request.max_tokens is not None
        sequence = router.generate(
            request.prompt_ids, max_tokens=request.max_tokens, sampling=worker_messages.sampling(request.sampling),
            eos_ids=request.eos_ids, max_draft_length=0,
        )  # fmt: skip
        return tuple(sequence.tokens)

    solo_texts: dict[int, dict[str, tuple[int, ...]]] = {}  # of the scenarios that came before, by seed

    def run(seed: int, *, on_device: bool = False) -> Counter[str]:
        dice = random.Random(f"worker {seed}")
        num_blocks = dice.choice([13, 14, 16])
        scenario = Scenario.random(
            seed, window=WINDOW, num_slots=num_blocks * BLOCK_SIZE, vocabulary=WORDS, eos_ids=(7, 8), max_drafts=4,
            num_visits=7,
        )  # fmt: skip
        if seed not in solo_texts:
            solo_texts[seed] = {visit.request.request_id: solo_text(visit.request) for visit in scenario.visits}
        texts = solo_texts[seed]
        oracle = Oracle(dice.choice([0, 5, 8, 10]))
        oracle.texts = [[*v.request.prompt_ids, *texts[v.request.request_id]] for v in scenario.visits]
        workers: list[TableWorker] = []
        num_host_blocks = random.Random(f"host {seed}").choice([4, 30])
        num_state_slots = random.Random(f"states {seed}").choice([1, 3, 12])
        measured = dice.random() < 0.3  # the layouts and draft sources of a server as it is started

        reuses_pages = scenario.num_workers == 1 and not model.facts.is_recurrent  # its states have room for so many

        def new_worker() -> TableWorker:
            worker = Worker(
                model, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_sequences=dice.choice([3, 6]),
                controller=None if measured else FixedLayout.full(dice.choice([1, 3, 4])),
                draft_source=None if measured or on_device else oracle, device_steps=on_device,
                kv=workers[0]._worker.kv if workers and reuses_pages else None,
                num_host_blocks=0 if model.facts.is_recurrent else num_host_blocks, num_state_slots=num_state_slots,
            )  # fmt: skip
            workers.append(TableWorker(worker, len(workers)))
            return workers[-1]

        performance = Performance(
            scenario, new_worker, lambda request: texts[request.request_id], metrics=METRICS
        ).run()
        happened = performance.outcomes + sum((worker.accepted for worker in workers), Counter())
        happened["cached"] += performance.num_cached
        happened["restored"] += performance.num_restored
        happened["preempted"] += performance.num_preemptions
        devices = [worker._worker.engine.device for worker in workers]
        happened["launched"] += sum(device.num_forwards for device in devices if device is not None)
        return happened

    return run


MORE = range(100, 120)


def everything(perform: Callable[..., Counter[str]], seeds: Sequence[int], *wanted: str, **how: bool) -> Counter[str]:
    """Perform the scenarios of these seeds, and of `MORE` until everything wanted has happened: what some of them draft
    depends on the speed of the machine."""
    happened = sum((perform(seed, **how) for seed in seeds), Counter[str]())
    for seed in MORE:
        if all(happened[one] for one in wanted):
            return happened
        happened += perform(seed, **how)
    pytest.fail(f"{wanted} did not all happen: {happened}")


def test_every_request_ends_once_with_the_text_of_its_solo_run(perform: Callable[..., Counter[str]]) -> None:
    # Seeds 12 and 13 accept a part of their drafts at any speed of the machine; seeds 3 and 6 only at some.
    everything(perform, range(14), "finished", "none", "some", "all", "cached", "restored")


def test_steps_on_a_device_change_nothing_of_that(perform: Callable[..., Counter[str]]) -> None:
    """Among others, pages run out while steps are under way, and the router takes every report as it takes a GPU's."""
    wanted = ("finished", "none", "launched", "cached", "restored", "preempted")
    everything(perform, range(12), *wanted, on_device=True)


def test_so_it_is_with_recurrent_layers_whose_states_are_kept_behind_prompts(hybrid: SpaceModel) -> None:
    alone = Worker(hybrid, num_blocks=32, block_size=BLOCK_SIZE, controller=FixedLayout.full(0))
    perform = performer(hybrid, alone)
    # Seed 12 accepts a part of its drafts at any speed of the machine, here and below.
    everything(perform, (1, 2, 3, 5, 12), "finished", "none", "some", "all", "cached")


def test_so_it_is_where_texts_outgrow_their_rotary_angles(long_rope: SpaceModel) -> None:
    alone = Worker(long_rope, num_blocks=32, block_size=BLOCK_SIZE, controller=FixedLayout.full(0))
    perform = performer(long_rope, alone)
    wanted = ("finished", "none", "some", "all", "cached", "restored", "readmitted")
    everything(perform, (1, 2, 3, 6, 7, 12), *wanted)
    everything(perform, (1, 2, 3), "finished", "launched", "readmitted", on_device=True)


def test_a_copy_that_does_not_come_back_is_caught(
    perform: Callable[..., Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostBlocks, "restore", lambda *_: None)
    with pytest.raises(RuleBroken, match="alone it is"):
        any(perform(seed) is None for seed in range(10))


@pytest.mark.slow
def test_the_same_over_fifty_scenarios(perform: Callable[..., Counter[str]]) -> None:
    everything(perform, range(10, 50), "finished", "none", "some", "all", "cached", "preempted")
