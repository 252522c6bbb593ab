"""The scripted worker sees a router that breaks the contract: otherwise its silence would prove nothing."""

from __future__ import annotations

import pytest
from doubles.router import Script, ScriptedBatch, Violation
from space_proto import worker_pb2


@pytest.fixture
def batch() -> ScriptedBatch:
    batch = ScriptedBatch(Script(block_size=4, num_blocks=8, release_steps=2, max_sequences=2))
    batch.apply(worker_pb2.Command(start=worker_pb2.Start(protocol_major=1, max_prefill_rows=64)))
    return batch


def admit(batch: ScriptedBatch, seq_id: int, pages: list[int], *, num_cached: int = 0, first: int = 10) -> None:
    ids = [first, 11, 12, 13, 14, 15]
    limits = worker_pb2.Limits(max_tokens=20)
    message = worker_pb2.Admit(seq_id=seq_id, ids=ids, num_prompt=6, pages=pages, num_cached=num_cached, limits=limits)
    batch.apply(worker_pb2.Command(admit=message))


def release(batch: ScriptedBatch, seq_id: int) -> None:
    batch.apply(worker_pb2.Command(release=worker_pb2.Release(seq_id=seq_id)))


def test_a_page_that_is_granted_twice_is_seen(batch: ScriptedBatch) -> None:
    admit(batch, 1, [0, 1])
    with pytest.raises(Violation, match="still in use by"):
        admit(batch, 2, [1, 2])


def test_a_page_that_is_reused_before_its_release_is_acknowledged_is_seen(batch: ScriptedBatch) -> None:
    admit(batch, 1, [0, 1])
    batch.step()
    release(batch, 1)
    with pytest.raises(Violation, match="still in use by"):
        admit(batch, 2, [0, 1])


def test_a_page_may_be_reused_once_its_release_is_acknowledged(batch: ScriptedBatch) -> None:
    admit(batch, 1, [0, 1])
    batch.step()
    release(batch, 1)
    while not batch.step().released:
        pass
    admit(batch, 2, [0, 1])


def test_a_cached_block_with_another_prefix_is_seen(batch: ScriptedBatch) -> None:
    admit(batch, 1, [0, 1])
    batch.step()
    with pytest.raises(Violation, match="foreign content"):
        admit(batch, 2, [0, 2], num_cached=4, first=99)


def test_a_shared_block_that_was_not_computed_is_seen(batch: ScriptedBatch) -> None:
    admit(batch, 1, [0, 1])
    with pytest.raises(Violation, match="foreign content"):
        admit(batch, 2, [0, 2], num_cached=4)


def test_a_shared_computed_block_is_fine(batch: ScriptedBatch) -> None:
    admit(batch, 1, [0, 1])
    batch.step()
    admit(batch, 2, [0, 2], num_cached=4)
    batch.step()


@pytest.mark.parametrize("num_cached", [3, 8])
def test_a_border_inside_a_block_or_without_an_id_to_compute_is_seen(batch: ScriptedBatch, num_cached: int) -> None:
    with pytest.raises(Violation, match="num_cached"):
        admit(batch, 1, [0, 1], num_cached=num_cached)


def test_a_seq_id_used_again_is_seen(batch: ScriptedBatch) -> None:
    admit(batch, 1, [0, 1])
    with pytest.raises(Violation, match="used again"):
        admit(batch, 1, [2, 3])


def test_one_sequence_too_many_is_seen(batch: ScriptedBatch) -> None:
    admit(batch, 1, [0, 1])
    admit(batch, 2, [2, 3])
    with pytest.raises(Violation, match="3 sequences"):
        admit(batch, 3, [4, 5])


def test_a_page_that_does_not_exist_is_seen(batch: ScriptedBatch) -> None:
    with pytest.raises(Violation, match="outside"):
        admit(batch, 1, [0, 8])


def test_a_command_before_start_is_seen() -> None:
    batch = ScriptedBatch(Script())
    with pytest.raises(Violation, match="before Start"):
        admit(batch, 1, [0, 1])


def test_a_sequence_without_slots_pauses_and_goes_on_when_it_gets_more(batch: ScriptedBatch) -> None:
    admit(batch, 1, [0, 1])
    reports = [batch.step() for _ in range(6)]
    assert [part.paused for report in reports for part in report.sequences][-1]
    assert sum(part.paused for report in reports for part in report.sequences) == 1
    batch.apply(worker_pb2.Command(extend=worker_pb2.Extend(seq_id=1, pages=[5])))
    assert batch.step().sequences[0].tokens
