"""The queue of texts for encoders: keys take turns, workers are kept busy, and what is lost is sent again."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import pytest
from doubles.router import Script
from doubles.router.encoder import VECTORS
from doubles.router.script import made_up_vector
from doubles.router.tabletop import House, in_house, request_of
from space_proto import worker_pb2
from space_router.engine.errors import Draining, ProtocolViolation, QueueFull, QueueTimeout, RequestFailed, WorkerFailed
from space_router.engine.queueing.encoding_queue import (
    CHUNKS_AHEAD,
    MAX_CRASHES,
    MAX_LOSSES,
    MIN_MEASURED,
    EncodingQueue,
)
from space_router.engine.request.encoding import CHUNK_IDS, CHUNK_TEXTS, Chunk, EncodedPart, Encoding, EncodingText
from space_router.engine.request.worker_messages import WorkerModelFacts
from space_router.engine.scheduler import Scheduler


def encoding_of(*lengths: int, key: str = "", name: str = "one") -> Encoding:
    texts = [EncodingText([9] * length) for length in lengths]
    return Encoding(name, key, texts, asyncio.get_running_loop().create_future())


def scheduler_of(script: Script | None = None) -> Scheduler:
    known = script or Script(encoder=VECTORS)
    hello = worker_pb2.Hello(
        vocab_size=256, block_size=4, num_blocks=64, window=512, max_sequences=8, encoder=known.encoder
    )
    return Scheduler(WorkerModelFacts.from_hello(hello), max_prefill_rows=64, max_draft_length=None)


def queue(max_waiting: int = 8, max_ids: int = 10_000) -> EncodingQueue:
    return EncodingQueue(max_waiting, max_ids, clock=lambda: 0.0)


def answer_to(chunk: Chunk, *numbers: int) -> EncodedPart:
    message = worker_pb2.Encoded(encode_id=1, numbers=numbers)
    return EncodedPart(chunk, message, [[float(chunk.numbers[number])] for number in numbers])


async def test_keys_take_turns_however_much_one_of_them_sends() -> None:
    waiting = queue()
    waiting.push(encoding_of(*[4] * (5 * CHUNK_TEXTS), key="busy"))
    waiting.push(encoding_of(4, key="calm"))
    worker = scheduler_of()
    assert waiting.num_waiting_tokens == 4 * 5 * CHUNK_TEXTS + 4
    waiting.dispatch([worker])
    assert [chunk.encoding.key for chunk in worker.encodings.values()] == ["busy", "calm"]
    assert waiting.num_waiting_tokens == 4 * 4 * CHUNK_TEXTS, "what is at the worker waits no more"


async def test_chunks_are_bounded_by_texts_and_by_ids_and_go_to_the_least_busy_worker() -> None:
    waiting = queue(max_ids=10**6)
    encoding = encoding_of(*[1] * (CHUNK_TEXTS + 3), CHUNK_IDS, CHUNK_IDS // 2, CHUNK_IDS // 2, 1)
    waiting.push(encoding)
    workers = [scheduler_of(), scheduler_of()]
    sent: list[Chunk] = []
    for _ in range(10):
        waiting.dispatch(workers)
        assert [len(worker.encodings) <= CHUNKS_AHEAD for worker in workers] == [True, True]
        assert abs(len(workers[0].encodings) - len(workers[1].encodings)) <= 1
        for worker in workers:
            for chunk in worker.encodings.values():
                sent.append(chunk)
                waiting.encoded(answer_to(chunk, *range(len(chunk.numbers))))
            worker.encodings.clear()
    assert sorted(number for chunk in sent for number in chunk.numbers) == list(range(CHUNK_TEXTS + 7))
    assert all(len(chunk.numbers) <= CHUNK_TEXTS for chunk in sent)
    assert all(chunk.num_ids <= CHUNK_IDS or len(chunk.numbers) == 1 for chunk in sent)
    assert encoding.values == [[float(number)] for number in range(CHUNK_TEXTS + 7)]
    assert encoding.done.done()
    assert waiting.idle.is_set()
    waiting.check()


async def test_what_a_lost_worker_had_not_encoded_is_sent_again_first() -> None:
    waiting = queue()
    waiting.push(encoding_of(1, 2, 3, name="first"))
    waiting.push(encoding_of(4, name="second"))
    worker = scheduler_of()
    waiting.dispatch([worker])
    chunk = next(iter(worker.encodings.values()))
    waiting.encoded(answer_to(chunk, 1))
    for one in worker.encodings.values():
        waiting.requeue(one)
    other = scheduler_of()
    waiting.dispatch([other])
    assert sorted(one.numbers for one in other.encodings.values()) == [[0], [0, 2]]
    waiting.check()


@pytest.mark.parametrize(("has_crashed", "most"), [(True, MAX_CRASHES), (False, MAX_LOSSES)])
async def test_texts_with_which_workers_are_lost_again_and_again_fail(has_crashed: bool, most: int) -> None:
    waiting = queue()
    encoding = encoding_of(1)
    waiting.push(encoding)
    for number in range(most):
        assert not encoding.done.done()
        worker = scheduler_of()
        waiting.dispatch([worker])
        assert len(worker.encodings) == 1, number
        waiting.requeue(next(iter(worker.encodings.values())), has_crashed=has_crashed)
    with pytest.raises(WorkerFailed, match=f"{most} workers were lost"):
        await encoding.done
    waiting.check()


async def test_the_queue_is_bounded_by_requests_and_ids_and_one_alone_may_be_of_any_size() -> None:
    waiting = queue(max_waiting=1, max_ids=50)
    waiting.push(encoding_of(100))
    with pytest.raises(QueueFull, match="100 tokens to embed"):
        waiting.push(encoding_of(1))
    waiting = queue(max_waiting=1, max_ids=500)
    for _ in range(2):
        waiting.push(encoding_of(1))
    with pytest.raises(QueueFull, match="2 embedding requests are waiting already, and the queue takes 1"):
        waiting.push(encoding_of(1))


async def test_no_text_goes_to_a_worker_that_leaves_or_has_no_encoder() -> None:
    waiting = queue()
    waiting.push(encoding_of(1))
    leaving, bare = scheduler_of(), scheduler_of(Script())
    leaving.closing = True
    waiting.dispatch([leaving, bare])
    assert not leaving.encodings
    assert not bare.encodings
    assert waiting.num_queued == 1


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (worker_pb2.Encoded(encode_id=7), "were not sent"),
        (worker_pb2.Encoded(encode_id=1, numbers=[0]), "has no texts"),
        (worker_pb2.Encoded(encode_id=1, numbers=[9], values=[worker_pb2.Values(values=bytes(32))]), "has no texts"),
        (worker_pb2.Encoded(encode_id=1, numbers=[0], values=[worker_pb2.Values(values=bytes(28))]), "other than 8"),
        (worker_pb2.Encoded(encode_id=1, numbers=[0], values=[worker_pb2.Values(values=bytes(31))]), "multiple of 4"),
    ],
)
async def test_a_report_that_cannot_be_is_a_violation(message: worker_pb2.Encoded, words: str) -> None:
    worker, waiting = scheduler_of(), queue()
    waiting.push(encoding_of(1, 2))
    waiting.dispatch([worker])
    assert worker.is_step_due
    with pytest.raises(ProtocolViolation, match=words):
        worker.report(worker_pb2.StepReport(report_no=1, encoded=[message]))


def texts_of(number: int) -> list[EncodingText]:
    return [EncodingText([place + 4, number]) for place in range(20)]


def wanted_of(number: int) -> list[list[float]]:
    return [list(array("f", made_up_vector([*text.ids]))) for text in texts_of(number)]


def as_lists(values: Sequence[Sequence[float]]) -> list[list[float]]:
    return [list(one) for one in values]


@pytest.fixture
def house_script() -> Script:
    return Script(encoder=VECTORS, encoder_texts=2, step_seconds=0.0005)


async def test_texts_and_sequences_are_answered_beside_each_other_over_deaths_of_the_worker(
    house_script: Script,
) -> None:
    async with in_house(house_script) as house:

        async def killer(house: House) -> None:
            for count in (15, 40):
                await house.until(lambda count=count: house.worker.figures.num_texts >= count)  # type: ignore[misc]
                house.worker.kill()

        request = request_of(6, 40)
        killing = asyncio.create_task(killer(house))
        found = await asyncio.gather(
            house.text(request), *(house.engine.encode(str(number), texts_of(number)) for number in range(4))
        )
        await killing
        assert [as_lists(values) for values in found[1:]] == [wanted_of(number) for number in range(4)]  # type: ignore[arg-type]
        assert found[0] == await house.text(request)
        assert house.worker.num_lives == 3


async def test_a_worker_that_leaves_hands_back_what_it_has_not_begun(house_script: Script) -> None:
    async with in_house(house_script) as house:
        asking = asyncio.create_task(house.engine.encode("one", texts_of(1) * 8))
        await house.until(lambda: house.worker.figures.num_texts >= 4)
        house.worker.leave()
        assert as_lists(await asking) == wanted_of(1) * 8


async def test_an_encoding_that_is_left_is_stopped_in_the_worker(house_script: Script) -> None:
    async with in_house(house_script) as house:
        asking = asyncio.create_task(house.engine.encode("one", texts_of(1) * 40))
        await house.until(lambda: house.worker.figures.num_texts >= 4)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await house.until(lambda: house.engine.load().num_running == 0)
        assert as_lists(await house.engine.encode("two", texts_of(2))) == wanted_of(2)
        assert house.worker.figures.num_texts < 200


async def test_one_that_fails_leaves_others(house_script: Script) -> None:
    house_script.failing_id = 99
    async with in_house(house_script) as house:
        bad, good = await asyncio.gather(
            house.engine.encode("bad", texts_of(99)), house.engine.encode("good", texts_of(5)), return_exceptions=True
        )
        assert isinstance(bad, RequestFailed)
        assert not isinstance(good, BaseException)
        assert as_lists(good) == wanted_of(5)


async def test_draining_waits_for_encodings(house_script: Script) -> None:
    async with in_house(house_script) as house:
        asking = asyncio.create_task(house.engine.encode("one", texts_of(1)))
        await house.until(lambda: house.engine.load().num_running == 1)
        assert await house.engine.drain(20.0)
        assert asking.done()
        assert as_lists(asking.result()) == wanted_of(1)


async def test_an_encoding_that_is_expected_to_wait_too_long_is_refused_once_the_speed_is_known() -> None:
    now = 0.0
    waiting, worker = EncodingQueue(99, 10**6, clock=lambda: now, max_seconds=8.0), scheduler_of()
    for _ in range(MIN_MEASURED + 2):  # 1000 ids in a second
        assert waiting.refusal("") is None
        waiting.push(encoding_of(1000))
    for _ in range(MIN_MEASURED + 1):
        now += 1.0
        waiting.dispatch([worker])
        _, chunk = worker.encodings.popitem()
        waiting.encoded(answer_to(chunk, 0))
    while waiting.refusal("busy") is None:
        waiting.push(encoding_of(1000, key="busy"))
    assert 5.0 <= waiting.expected_wait("busy") <= 8.0
    assert "what begins within 8 s" in str(waiting.refusal("busy"))
    assert waiting.refusal("calm") is None, "keys take turns"
    assert waiting.expected_wait("calm") <= 6.0


async def test_an_encoding_ends_with_its_longest_wait_unless_a_part_of_it_has_begun() -> None:
    waiting, worker = EncodingQueue(9, 10**6, clock=lambda: 0.0, max_seconds=2.0), scheduler_of()
    begun, late = encoding_of(*[4] * (3 * CHUNK_TEXTS)), encoding_of(4)
    for encoding in (begun, late):
        waiting.push(encoding)
    waiting.dispatch([worker])
    for encoding in (begun, late):
        waiting.end_late(encoding)
    assert not begun.done.done()
    with pytest.raises(QueueTimeout, match="waited 2 s"):
        await late.done
    waiting.check()
    waiting.push(last := encoding_of(4))
    waiting.end_all(RequestFailed("it has begun"), not_begun=Draining("it has not"))
    for encoding, error in ((begun, RequestFailed), (last, Draining)):
        with pytest.raises(error):
            await encoding.done
