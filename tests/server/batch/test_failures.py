"""What goes wrong in one sequence harms that sequence alone, and where plain decoding would meet it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from doubles.worker import ScriptedModel, router_of, script
from space_kernels.sampling.sampler import TokenCounts
from space_model.geometry.forward_batch import ForwardBatch
from space_model.networks.network import PagedKV
from space_proto import worker_pb2 as pb
from space_server import batch as admission
from space_server import host_runner, worker
from space_server.machine.memory import is_lost
from torch import Tensor


@pytest.mark.parametrize("page", [256, 0])
def test_pages_that_cannot_be_had_fail_the_sequence_they_extend_alone(page: int) -> None:
    model = ScriptedModel()
    router = router_of(model)
    bad, good = router.admit([5] * 3, num_pages=1), router.admit([5] * 60)
    router.worker.apply(pb.Command(extend=pb.Extend(seq_id=bad, pages=[page])))
    router.run()
    assert router.sequences[bad].finish == pb.FINISH_ERROR
    assert router.sequences[bad].error.startswith(f"Block {page} ")
    assert router.sequences[good].tokens == script(model, 60, 16)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"ids": [5, 64]}, "Id 64 is outside the vocabulary of 64."),
        ({"ids": [5, 2]}, "Id 2 is a mask token; prompts cannot contain it."),
        ({"ids": []}, "num_prompt must be 1 .. 0"),
        ({"ids": [5], "num_prompt": 2}, "num_prompt must be 1 .. 1"),
        ({"ids": [5] * 9, "num_cached": 3}, "num_cached must be a multiple of 4 below the 9 ids; got 3."),
        ({"ids": [5] * 8, "num_cached": 8}, "num_cached must be a multiple of 4 below the 8 ids; got 8."),
        ({"ids": [5] * 9, "num_cached": 8, "pages": [1]}, "8 cached ids do not fit in 1 pages."),
        ({"ids": [5], "pages": [256]}, "Block 256 does not exist; there are 256."),
        ({"ids": [5], "pages": [3, 4, 3]}, "Block 3 is given twice to one sequence."),
        ({"ids": [5] * 1024}, "Nothing is left to generate"),
        ({"ids": [5], "limits": pb.Limits()}, "Nothing is left to generate"),
        ({"ids": [5], "sampling": pb.Sampling(temperature=float("nan"))}, "temperature must be finite; got nan."),
        ({"ids": [5], "sampling": pb.Sampling(top_p=-1)}, "top_p must not be negative; got -1."),
        ({"ids": [5], "sampling": pb.Sampling(allowed_ids=[99])}, "Id 99 of a parameter is outside"),
        ({"ids": [5], "sampling": pb.Sampling(bad_words=[pb.IdRun()])}, "A bad word has no ids."),
        ({"ids": [5] * 5, "num_cached": 4, "num_prompt_logprobs": 0}, "Prompt log-probabilities need num_cached = 0."),
    ],
)
def test_a_bad_admission_fails_alone(fields: dict[str, object], error: str) -> None:
    model = ScriptedModel()
    router = router_of(model)
    good = router.admit([5] * 6, max_tokens=5)
    bad = {"seq_id": 9, "num_prompt": len(fields["ids"]), "pages": [200, 201, 202], "limits": pb.Limits(max_tokens=4)}  # type: ignore[arg-type]
    router.worker.apply(pb.Command(admit=pb.Admit(**(bad | fields))))  # type: ignore[arg-type]
    report = router.worker.step()
    assert report is not None
    failed = next(sequence for sequence in report.sequences if sequence.seq_id == 9)
    assert failed.finish == pb.FINISH_ERROR
    assert failed.error.startswith(error)
    tokens = [token for sequence in report.sequences if sequence.seq_id == good for token in sequence.tokens]
    assert tokens == script(model, 6, 1)


class NoRoom(TokenCounts):
    """No memory for the counts of a sequence that begins with 7."""

    def __init__(self, ids: Sequence[int], *args: Any) -> None:
        if ids[0] == 7:
            raise MemoryError("no room")
        super().__init__(ids, *args)


def test_an_error_while_a_sequence_is_admitted_fails_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TokenCounts", NoRoom)
    model, penalises = ScriptedModel(), pb.Sampling(presence_penalty=1e-6)
    router = router_of(model)
    good = router.admit([5] * 6, sampling=penalises)
    router.step()
    bad, other = router.admit([7] * 3, sampling=penalises), router.admit([5] * 60, sampling=penalises)
    router.run()
    assert router.sequences[bad].finish == pb.FINISH_ERROR
    assert router.sequences[bad].error == "The sequence could not be taken in: MemoryError: no room"
    assert router.sequences[good].tokens == script(model, 6, 16)
    assert router.sequences[other].tokens == script(model, 60, 16)
    assert len(router.free) == 256


def test_an_error_of_a_lost_device_is_not_one_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(admission, "TokenCounts", fails)
    router = router_of(ScriptedModel())
    monkeypatch.setattr(worker, "is_lost", lambda device: True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        router.admit([7] * 3, sampling=pb.Sampling(presence_penalty=1.0))


def test_a_forward_that_fails_harms_the_culprit_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = ScriptedModel(poison=7)
    router = router_of(model)
    good, bad, other = router.admit([5] * 6), router.admit([7] * 3), router.admit([5] * 60)
    router.run()
    assert router.sequences[bad].finish == pb.FINISH_ERROR
    assert router.sequences[bad].error == "The step failed: RuntimeError: id 7 is poison"
    assert router.sequences[good].tokens == script(model, 6, 16)
    assert router.sequences[other].tokens == script(model, 60, 16)
    assert "one by one" in caplog.text


def test_a_worker_that_has_lost_its_device_does_not_fail_one_sequence_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = router_of(ScriptedModel(poison=7))
    router.admit([5] * 6)
    router.admit([7] * 3)
    monkeypatch.setattr(host_runner, "is_lost", lambda device: True)
    with pytest.raises(RuntimeError, match="id 7 is poison"):
        router.run()
    assert not any(ran.error for ran in router.sequences.values())


def test_a_device_is_lost_where_waiting_for_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert not is_lost(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    assert is_lost(torch.device("cuda", 1))
    assert not is_lost(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not is_lost(torch.device("cuda", 1))


class SmallDevice(ScriptedModel):
    """No step of more than `most` rows fits its memory; what is not given back is lost to the next step."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.kept, self.num_given_back = most, 0, 0

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        if batch.num_rows + self.kept > self.most:
            self.kept = self.most
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(batch, kv)

    def give_back(self) -> None:
        self.kept, self.num_given_back = 0, self.num_given_back + 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SmallDevice:
    model = SmallDevice(most=40)
    monkeypatch.setattr(host_runner, "give_back_unused", model.give_back)
    return model


def test_a_step_too_large_for_the_memory_is_taken_one_by_one_and_fails_the_culprit_alone(device: SmallDevice) -> None:
    router = router_of(device, max_prefill_rows=512)
    first, bad, second = router.admit([5] * 6), router.admit([5] * 50), router.admit([5] * 20)
    router.run()
    assert router.sequences[bad].finish == pb.FINISH_ERROR
    assert router.sequences[bad].error.startswith(
        "There is not enough memory on the device for the sequence's step, even"
    )
    assert router.sequences[first].tokens == script(device, 6, 16)
    assert router.sequences[second].tokens == script(device, 20, 16)
    generated = router.generate([5] * 30)
    assert generated.tokens == script(device, 30, 16)


def test_a_crowd_too_large_for_the_memory_harms_nobody(device: SmallDevice) -> None:
    router = router_of(device)
    running = [router.admit([5] * (20 + n)) for n in range(4)]
    router.run()
    assert [router.sequences[seq_id].tokens for seq_id in running] == [script(device, 20 + n, 16) for n in range(4)]
    assert device.num_given_back > 0


@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("nan_at", range(6, 14))
def test_nan_harms_its_own_sequence_where_plain_decoding_would_meet_it(nan_at: int, k: int) -> None:
    model = ScriptedModel(nan_at=nan_at)
    router = router_of(model, k=k)
    good, bad = router.admit([5] * 60), router.admit([5] * 6)
    router.run()
    assert router.sequences[good].tokens == script(model, 60, 16)
    assert (router.sequences[bad].finish, router.sequences[bad].tokens) == (
        pb.FINISH_ERROR,
        script(model, 6, nan_at - 6),
    )
    assert router.sequences[bad].error.startswith(f"No id can be chosen at position {nan_at}:")


def test_nan_behind_the_end_of_a_text_or_a_wrong_draft_is_never_met() -> None:
    wrong = router_of(ScriptedModel(nan_at=12, wrong=[11]))
    seq_id = wrong.admit([5] * 10, max_tokens=2)
    wrong.run()
    assert wrong.sequences[seq_id].finish == pb.FINISH_LENGTH
    for at in range(6, 12):
        ends = ScriptedModel(nan_at=at + 1, text=lambda position, at=at: 60 if position == at else 10 + position)  # type: ignore[misc]
        router = router_of(ends)
        seq_id = router.admit([5] * 6, eos_ids=[60])
        router.run()
        assert (router.sequences[seq_id].tokens, router.sequences[seq_id].finish) == (
            script(ends, 6, at - 5),
            pb.FINISH_EOS,
        )
