"""Texts for the encoder: short batches beside sequences, nobody harmed by another's failure, the same vectors."""

from __future__ import annotations

import array
from collections.abc import Sequence

import pytest
import torch
from doubles.worker import ScriptedModel, router_of
from space_common.worker.client import WorkerClient
from space_model.encoder.text_encoder import EncoderFacts, TextIds
from space_proto import worker_pb2 as pb
from space_server.pooling.encodings import ALONE_SECONDS, BESIDE_SECONDS, MOST_TEXTS, Encodings
from space_server.worker import ProtocolError, Worker
from torch import Tensor

SECONDS_PER_ID = 0.001


class SumEncoder:
    """Two values of each text: its length and the sum of its ids. Time passes by the ids, padding included."""

    device = torch.device("cpu")
    facts = EncoderFacts("hash", "", 64, 100, 2, 2, scores_pairs=False, is_normalised=False)

    def __init__(self) -> None:
        self.now = 0.0
        self.batches: list[list[int]] = []  # lengths of the texts
        self.failing_id = -1

    def encode(self, texts: Sequence[TextIds]) -> Tensor:
        if any(self.failing_id in text.ids for text in texts):
            raise ValueError("this id cannot be encoded\nand more")
        lengths = [len(text.ids) for text in texts]
        self.batches.append(lengths)
        self.now += len(texts) * max(lengths) * SECONDS_PER_ID
        return torch.tensor([[len(text.ids), sum(text.ids)] for text in texts], dtype=torch.float32)


def made() -> tuple[SumEncoder, Encodings]:
    encoder = SumEncoder()
    return encoder, Encodings(encoder, clock=lambda: encoder.now)


def command(encode_id: int, *texts: Sequence[int]) -> pb.Encode:
    return pb.Encode(encode_id=encode_id, inputs=[pb.EncoderInput(ids=text) for text in texts])


def values_of(reports: Sequence[pb.Encoded]) -> dict[tuple[int, int], tuple[float, ...]]:
    return {
        (report.encode_id, number): tuple(array.array("f", one.values))
        for report in reports
        for number, one in zip(report.numbers, report.values, strict=True)
    }


def drained(encodings: Encodings, *, beside: bool = False) -> list[pb.Encoded]:
    found: list[pb.Encoded] = []
    while encodings.has_work:
        found += encodings.step(beside=beside)
    return found


def test_every_text_is_answered_once_whatever_is_beside_it() -> None:
    encoder, encodings = made()
    encodings.add(command(1, [1, 2, 3], [4], [5, 6]))
    encodings.add(command(2, [7] * 40, [8]))
    found = drained(encodings)
    wanted = {(1, 0): (3, 6), (1, 1): (1, 4), (1, 2): (2, 11), (2, 0): (40, 280), (2, 1): (1, 8)}
    assert values_of(found) == wanted
    assert sum(len(report.numbers) for report in found) == len(wanted)
    assert sum(map(len, encoder.batches)) == len(wanted)


def test_a_batch_lasts_no_longer_than_tokens_may_wait() -> None:
    for beside, most in ((True, BESIDE_SECONDS), (False, ALONE_SECONDS)):
        encoder, encodings = made()
        encodings.add(command(1, *([9] * 5 for _ in range(300))))
        encodings.step(beside=beside)  # the speed is known behind the first
        while encodings.has_work:
            begun, count = encoder.now, len(encoder.batches)
            encodings.step(beside=beside)
            if len(encoder.batches) == count:
                encoder.now += 0.001  # a step of sequences
                continue
            assert encoder.now - begun <= most + 1e-9
            assert len(encoder.batches[-1]) <= MOST_TEXTS
        assert sum(map(len, encoder.batches)) == 300


def test_beside_sequences_their_steps_get_half_of_the_time() -> None:
    encoder, encodings = made()
    encodings.add(command(1, *([9] * 5 for _ in range(100))))
    encodings.step(beside=True)
    begun = encoder.now
    batches = len(encoder.batches)
    assert encodings.step(beside=True) == []  # it is the sequences' turn
    encoder.now += begun + 1e-6  # as long as the first batch was
    assert encodings.step(beside=True) != []
    assert len(encoder.batches) == batches + 1


def test_texts_of_about_one_length_go_together() -> None:
    encoder, encodings = made()
    encodings.add(command(1, *([9] * length for length in (60, 2, 59, 3, 58, 2))))
    encodings._seconds_per_id = ALONE_SECONDS / 200
    drained(encodings)
    assert [sorted(lengths) for lengths in encoder.batches] == [[58, 59, 60], [2, 2, 3]]


def test_a_text_that_fails_fails_its_own_request_alone() -> None:
    encoder, encodings = made()
    encoder.failing_id = 66
    encodings.add(command(1, [1], [66], [2]))
    encodings.add(command(2, [3], [4]))
    found = drained(encodings)
    assert {key: value for key, value in values_of(found).items() if key[0] == 2} == {(2, 0): (1, 3), (2, 1): (1, 4)}
    [failed] = [report for report in found if report.error]
    assert (failed.encode_id, failed.error) == (
        1,
        "The text could not be encoded: ValueError: this id cannot be encoded",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (pb.EncoderInput(ids=[]), "0 ids; 1 to 64 can be encoded"),
        (pb.EncoderInput(ids=[1] * 65), "65 ids; 1 to 64"),
        (pb.EncoderInput(ids=[100]), "outside the encoder's vocabulary of 100"),
        (pb.EncoderInput(ids=[1, 2], type_ids=[0]), "2 ids has 1 type ids"),
        (pb.EncoderInput(ids=[1], type_ids=[2]), "1 type ids, below 2"),
    ],
)
def test_a_text_that_does_not_fit_is_refused_before_it_is_computed(text: pb.EncoderInput, words: str) -> None:
    encoder, encodings = made()
    encodings.add(pb.Encode(encode_id=5, inputs=[pb.EncoderInput(ids=[1]), text]))
    [refused] = drained(encodings)
    assert words in refused.error
    assert encoder.batches == []


def test_texts_that_nobody_waits_for_are_not_computed() -> None:
    encoder, encodings = made()
    encodings.add(command(1, [1], [2]))
    encodings.add(command(2, [3]))
    encodings.stop(1)
    assert values_of(drained(encodings)) == {(2, 0): (1, 3)}
    encodings.add(command(3, [1]))
    encodings.clear()
    assert not encodings.has_work
    assert encoder.batches == [[1]]


def worker_with(encodings: Encodings | None) -> WorkerClient:
    model = ScriptedModel()
    worker = Worker(model, num_blocks=64, block_size=4, encodings=encodings)
    return WorkerClient(worker, automatic=True)


def test_sequences_and_texts_go_on_beside_each_other() -> None:
    _, encodings = made()
    alone = worker_with(None).generate([5, 5], max_tokens=20).tokens
    router = worker_with(encodings)
    sequence = router.admit([5, 5], max_tokens=20)
    router.worker.apply(pb.Command(encode=command(1, *([9] * 5 for _ in range(70)))))
    found: list[pb.Encoded] = []
    router.after_step = lambda report: found.extend(report.encoded)
    router.run()
    while (report := router.worker.step()) is not None:
        found.extend(report.encoded)
    assert router.sequences[sequence].tokens == alone
    assert len(values_of(found)) == 70


def test_a_worker_that_drains_hands_texts_back_and_finishes_those_it_has() -> None:
    _, encodings = made()
    router = worker_with(encodings)
    router.worker.apply(pb.Command(encode=command(1, [1])))
    router.worker.apply(pb.Command(drain=pb.Drain()))
    router.worker.apply(pb.Command(encode=command(2, [2])))
    assert isinstance(router.worker, Worker)
    assert not router.worker.drained
    report = router.worker.step()
    assert report is not None
    assert [(one.encode_id, one.returned, len(one.values)) for one in report.encoded] == [(2, True, 0), (1, False, 1)]
    assert router.worker.drained


def test_hello_says_what_the_encoder_takes_and_without_one_texts_are_a_violation() -> None:
    _, encodings = made()
    worker = worker_with(encodings).worker
    assert isinstance(worker, Worker)
    encoder = worker.hello("life").encoder
    assert (encoder.window, encoder.vocab_size, encoder.num_values, encoder.num_types) == (64, 100, 2, 2)
    bare = router_of(ScriptedModel()).worker
    assert isinstance(bare, Worker)
    assert not bare.hello("life").HasField("encoder")
    with pytest.raises(ProtocolError, match="this worker has no encoder"):
        bare.apply(pb.Command(encode=command(1, [1])))
