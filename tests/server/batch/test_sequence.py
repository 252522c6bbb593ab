"""A run of emitted ids is cut at the first end inside it."""

from __future__ import annotations

import numpy as np
import pytest
from doubles.worker import ScriptedModel
from space_common.worker.client import WorkerClient
from space_proto import worker_pb2 as pb
from space_server import worker
from space_server.batch import SequenceEnd, SequenceLimits, appended, begins_with
from space_server.worker import Worker

LIMITS = SequenceLimits(max_tokens=5, window=20, eos_ids=frozenset({9}), stop_ids=frozenset({7, 9}))


@pytest.mark.parametrize(
    ("emitted", "num_left", "expected"),
    [
        ([1, 2, 3], 5, (3, None)),
        ([1, 2, 3], 3, (3, SequenceEnd.LENGTH)),
        ([1, 2, 3], 2, (2, SequenceEnd.LENGTH)),
        ([1, 9, 3], 5, (2, SequenceEnd.EOS)),
        ([7, 9, 3], 5, (1, SequenceEnd.STOP_ID)),
        ([1, 2, 9], 3, (3, SequenceEnd.EOS)),
        ([1, 2, 9], 2, (2, SequenceEnd.LENGTH)),
    ],
)
def test_cut(emitted: list[int], num_left: int, expected: tuple[int, SequenceEnd | None]) -> None:
    assert LIMITS.cut(emitted, num_left) == expected


def test_what_is_left_is_bounded_by_max_tokens_and_by_the_window() -> None:
    assert LIMITS.num_left(num_known=6, num_prompt=4) == 3
    assert LIMITS.num_left(num_known=18, num_prompt=18) == 2


def test_appended_pages_come_behind_and_earlier_arrays_stay() -> None:
    numbers = [np.array([7, 3], dtype=np.int64)]
    for page in range(10, 40):
        numbers.append(appended(numbers[-1], [page, page + 100]))
    whole = numbers[-1].tolist()
    assert whole[:4] == [7, 3, 10, 110]
    assert [one.tolist() for one in numbers] == [whole[: 2 + 2 * n] for n in range(31)]
    assert all(begins_with(numbers[n], numbers[m]) == (m <= n) for n in range(31) for m in range(31))


def test_memory_is_taken_seldom() -> None:
    numbers, rooms = np.array([0], dtype=np.int64), []
    for page in range(1, 5000):
        numbers = appended(numbers, [page])
        if not rooms or numbers.base is not rooms[-1]:
            rooms.append(numbers.base)
    assert len(rooms) <= 14


def test_other_pages_are_told_apart_wherever_they_are() -> None:
    room = np.arange(9)
    assert begins_with(room[:5], room[:3])
    assert not begins_with(room[:5], room[1:3])
    assert begins_with(np.array([0, 1, 2]), room[:2])
    assert not begins_with(np.array([0, 2, 2]), room[:2])
    assert not begins_with(room[:2], room[:3])


def test_an_extension_looks_at_the_new_pages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def check(pages: list[int], *bounds: object) -> None:
        looked.append(len(pages))
        check_pages(pages, *bounds)  # type: ignore[arg-type]

    check_pages = worker.check_pages
    monkeypatch.setattr(worker, "check_pages", check)
    router = WorkerClient(Worker(ScriptedModel(), num_blocks=300, block_size=4))
    seq_id = router.admit([5] * 6, num_pages=100)
    for _ in range(50):
        router.extend(seq_id)
    assert looked == [1] * 50
    sequence = router.worker.batch.get(seq_id)
    assert sequence is not None
    assert sequence.page_numbers.tolist() == sequence.pages == router.sequences[seq_id].pages
    router.worker.apply(pb.Command(extend=pb.Extend(seq_id=seq_id, pages=sequence.pages[120:121])))
    router.run()
    assert router.sequences[seq_id].error.startswith("Block 120 is given twice")
