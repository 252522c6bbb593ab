"""A worker of a hybrid: slots of states, what it says of them, and steps that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from space_common.worker.client import SequenceRequest, WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch
from space_model.loading.load import load_model
from space_model.networks.network import PagedKV, StateRoom
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.__main__ import build_worker
from space_server.config import parse
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tiny_checkpoints import tiny_checkpoint
from torch import Tensor


@pytest.fixture(scope="module", params=["qwen3_next", "lfm2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    return load_model(tiny_checkpoint(tmp_path_factory.mktemp("hybrid"), request.param, num_masks=3), dtype="float32")


def worker_of(model: SpaceModel, *, k: int = 3, **more: object) -> Worker:
    layout = DraftLayout.full(k, k) if k else DraftLayout.plain()
    return Worker(
        model, num_blocks=60, block_size=4, max_sequences=3, controller=FixedLayout(lambda limits: layout), **more
    )  # type: ignore[arg-type]


def texts_of(worker: Worker, prompts: list[list[int]], max_tokens: int = 14) -> list[list[int]]:
    client = WorkerClient(worker, max_draft_length=worker.max_draft_length)
    numbers = [
        client.admit(prompt, max_tokens=max_tokens, num_pages=8, max_draft_length=worker.max_draft_length)
        for prompt in prompts
    ]
    client.run()
    return [client.sequences[number].tokens for number in numbers]


PROMPTS = [[20, 31, 17, 40, 22], [50, 51, 52], [60, 33, 61, 34, 62, 35, 63]]


def test_it_says_what_it_remembers_of_each_sequence(model: SpaceModel) -> None:
    worker = worker_of(model)
    said = worker.hello("x").state_bytes_per_sequence
    assert worker.kv.states is not None
    assert said == worker.kv.states.num_bytes // 3 == model.facts.state_bytes(worker.max_draft_length)


def test_sequences_that_come_and_go_share_no_slot(model: SpaceModel) -> None:
    alone = [texts_of(worker_of(model, k=0), [prompt])[0] for prompt in PROMPTS]
    worker = worker_of(model)
    for _ in range(2):
        assert texts_of(worker, PROMPTS) == alone
        assert texts_of(worker, PROMPTS[::-1]) == alone[::-1]
        worker.reset()


def test_cached_ids_are_refused_for_that_sequence_alone(model: SpaceModel) -> None:
    worker = worker_of(model)
    worker.apply(pb.Command(start=pb.Start(protocol_major=1, max_draft_length=3)))
    admit = pb.Admit(seq_id=1, ids=range(20, 29), num_prompt=9, num_cached=8, pages=range(5))
    admit.limits.max_tokens = 3
    worker.apply(pb.Command(admit=admit))
    report = worker.step()
    assert report is not None
    assert "recurrent states, which pages do not hold: load_state must be set" in report.sequences[0].error


def test_a_state_that_is_kept_gives_others_the_text_of_the_whole_prompt(model: SpaceModel) -> None:
    prompt = tuple(range(20, 41))
    (alone,) = texts_of(worker_of(model, k=0), [list(prompt)])
    client = WorkerClient(worker_of(model, num_state_slots=2), automatic=True, max_prefill_rows=7)
    request = SequenceRequest(prompt, pb.Sampling(), pb.Limits(max_tokens=14))
    first = client.submit(request, keep_states={8: 1, 20: 0})
    client.run(lambda: first.num_computed >= 20)
    shared = first.pages[:5]
    client.keep(shared)
    others = [client.submit(request, shared=shared[: ids // 4], load_state=slot) for ids, slot in ((20, 0), (8, 1))]
    client.run()
    assert [one.tokens for one in (first, *others)] == [alone] * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep_states": [pb.KeptState(position=9, slot=0)]}, "below the 9 ids"),
        ({"keep_states": [pb.KeptState(position=8), pb.KeptState(position=4)]}, "must be ascending"),
        ({"keep_states": [pb.KeptState(position=4, slot=2)]}, "no slot 2 for states to keep; there are 2"),
        ({"load_state": 0}, "load_state must be set where num_cached is not 0, and nowhere else"),
        ({"num_cached": 8, "load_state": 7}, "no slot 7"),
    ],
)
def test_states_that_cannot_be_kept_or_loaded_are_refused_for_that_sequence_alone(
    fields: dict[str, Any], message: str, model: SpaceModel
) -> None:
    worker = worker_of(model, num_state_slots=2)
    worker.apply(pb.Command(start=pb.Start(protocol_major=1, max_draft_length=3)))
    limits = pb.Limits(max_tokens=3)
    worker.apply(
        pb.Command(admit=pb.Admit(seq_id=1, ids=range(20, 29), num_prompt=9, pages=range(5), limits=limits, **fields))
    )
    report = worker.step()
    assert report is not None
    assert message in report.sequences[0].error


class Failing(SpaceModel):
    """Fails behind its forward passes, or in the middle of them, where it is told so."""

    def __init__(self, model: SpaceModel, *, inside: bool) -> None:
        self.__dict__ = dict(model.__dict__)
        self._inside = inside
        self.num_passes = 0

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        self.num_passes += 1
        fails = len(batch.segments) > 1 and self.num_passes % 3 == 0
        if fails and self._inside:
            with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(self._network), "_run", lambda *_: broken())  # type: ignore[attr-defined]
                return super().forward(batch, kv)
        hidden = super().forward(batch, kv)
        return broken() if fails else hidden


def broken() -> Tensor:
    raise RuntimeError("made to fail")


@pytest.mark.parametrize("inside", [False, True], ids=["behind", "inside"])
def test_a_step_that_fails_and_is_taken_again_by_each_sequence_leaves_the_texts(
    model: SpaceModel, inside: bool
) -> None:
    alone = [texts_of(worker_of(model, k=0), [prompt])[0] for prompt in PROMPTS]
    failing = Failing(model, inside=inside)
    assert texts_of(worker_of(failing), PROMPTS) == alone
    assert failing.num_passes > 12


@pytest.mark.parametrize("speculation", ["off", "2", "auto"])
def test_a_worker_starts_measures_its_steps_and_keeps_states_of_as_many_sequences_as_it_says(
    speculation: str, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path, "bamba", num_masks=3)
    words = ["--listen", "h:1", "--model", str(folder), "--dtype", "float32", "--speculation", speculation]
    worker = build_worker(parse([*words, "--max-sequences", "5", "--calibration-seconds", "0.3"]))
    states = worker.kv.states
    assert states is not None
    assert states.num_slots == worker.max_sequences == 5
    assert states.num_kept == worker.hello("x").num_state_slots == 10
    assert worker.hello("x").state_bytes_per_sequence == worker.facts.state_bytes(states.most_drafts)
    assert states.most_drafts == {"off": 3, "2": 3, "auto": 8}[speculation]
    assert texts_of(worker, PROMPTS) == texts_of(worker_of(load_model(folder, dtype="float32"), k=0), PROMPTS)


def test_a_worker_with_too_little_room_for_states_is_refused(model: SpaceModel) -> None:
    kv = model.allocate_kv(60, 4, StateRoom(2, 3))
    with pytest.raises(ValueError, match="3 sequences with 3 drafts have no room for states"):
        worker_of(model, kv=kv)
