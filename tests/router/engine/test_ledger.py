"""The scripted worker sees a router that breaks the contract: otherwise its silence would prove nothing."""

from __future__ import annotations

from typing import Any

import pytest
from doubles.router import Script, ScriptedBatch, Violation
from space_proto import worker_pb2


@pytest.fixture
def batch() -> ScriptedBatch:
    batch = ScriptedBatch(Script(block_size=4, num_blocks=8, release_steps=2, max_sequences=2))
    batch.apply(worker_pb2.Command(start=worker_pb2.Start(protocol_major=1, max_prefill_rows=64)))
    return batch


def admit(batch: ScriptedBatch, seq_id: int, pages: list[int], num_cached: int = 0, first: int = 10) -> None:
    ids = [first, 11, 12, 13, 14, 15]
    limits = worker_pb2.Limits(max_tokens=20)
    message = worker_pb2.Admit(seq_id=seq_id, ids=ids, num_prompt=6, pages=pages, num_cached=num_cached, limits=limits)
    batch.apply(worker_pb2.Command(admit=message))


def release(batch: ScriptedBatch, seq_id: int) -> None:
    batch.apply(worker_pb2.Command(release=worker_pb2.Release(seq_id=seq_id)))


Moves = list[tuple[Any, ...]]
FIRST = ("admit", 1, [0, 1])


@pytest.mark.parametrize(
    ("moves", "complaint"),
    [
        ([FIRST, ("admit", 2, [1, 2])], "still in use by"),
        ([FIRST, ("step",), ("release", 1), ("admit", 2, [0, 1])], "still in use by"),
        ([FIRST, ("step",), ("admit", 2, [0, 2], 4, 99)], "foreign content"),
        ([FIRST, ("admit", 2, [0, 2], 4)], "foreign content"),
        ([("admit", 1, [0, 1], 3)], "num_cached"),
        ([("admit", 1, [0, 1], 8)], "num_cached"),
        ([FIRST, ("admit", 1, [2, 3])], "used again"),
        ([FIRST, ("admit", 2, [2, 3]), ("admit", 3, [4, 5])], "3 sequences"),
        ([("admit", 1, [0, 8])], "outside"),
    ],
    ids=[
        "a page granted twice",
        "a page reused before its release is acknowledged",
        "a cached block with another prefix",
        "a shared block that was not computed",
        "a border inside a block",
        "no id to compute",
        "a seq_id used again",
        "one sequence too many",
        "a page that does not exist",
    ],
)
def test_a_broken_contract_is_seen(batch: ScriptedBatch, moves: Moves, complaint: str) -> None:
    do = {"admit": admit, "release": release, "step": ScriptedBatch.step}
    for name, *arguments in moves[:-1]:
        do[name](batch, *arguments)
    name, *arguments = moves[-1]
    with pytest.raises(Violation, match=complaint):
        do[name](batch, *arguments)


def test_a_page_may_be_reused_once_its_release_is_acknowledged(batch: ScriptedBatch) -> None:
    admit(batch, 1, [0, 1])
    batch.step()
    release(batch, 1)
    while not batch.step().released:
        pass
    admit(batch, 2, [0, 1])


def test_a_shared_computed_block_is_fine(batch: ScriptedBatch) -> None:
    admit(batch, 1, [0, 1])
    batch.step()
    admit(batch, 2, [0, 2], 4)
    batch.step()


def test_a_command_before_start_is_seen() -> None:
    with pytest.raises(Violation, match="before Start"):
        admit(ScriptedBatch(Script()), 1, [0, 1])


def test_a_sequence_without_slots_pauses_and_goes_on_when_it_gets_more(batch: ScriptedBatch) -> None:
    admit(batch, 1, [0, 1])
    reports = [batch.step() for _ in range(6)]
    assert [part.paused for report in reports for part in report.sequences][-1]
    assert sum(part.paused for report in reports for part in report.sequences) == 1
    batch.apply(worker_pb2.Command(extend=worker_pb2.Extend(seq_id=1, pages=[5])))
    assert batch.step().sequences[0].tokens
