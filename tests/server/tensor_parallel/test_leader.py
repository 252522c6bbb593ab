"""What rank 0 says is what a follower understands, in as many words as it takes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from space_common.worker.client import WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.networks.network import USUAL_ROOM, PagedKV, StateRoom
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.tensor_parallel import (
    GroupLost,
    MessageLost,
    PlanMessage,
    PlanMessageKind,
    PlanReader,
    PlanWriter,
    RankGroup,
    TensorParallelLeader,
    run_follower,
)
from space_server.worker import Worker
from torch import Tensor


def some_steps(rng: random.Random) -> Iterator[list[Segment]]:
    """Steps of a few sequences that come and go, whose pages grow or are suddenly others."""
    pages: dict[int | None, list[int]] = {}
    for _ in range(12):
        step = []
        for owner in rng.sample([None, 1, 2, 3, 2**63], rng.randint(1, 4)):
            held = pages.get(owner, [])
            if rng.random() < 0.3:
                held = []
            pages[owner] = held = held + rng.sample(range(2**20), rng.randint(0 if held else 1, 3))
            masks = tuple(rng.randint(0, 3) for _ in range(rng.randint(1, 4)))
            ids = [rng.randrange(2**31) for _ in range(rng.randint(1, 5))]
            adapter = rng.choice([None, 0, 3])
            layout = DraftLayout(len(masks) - 1, masks)
            step.append(Segment(ids, rng.randrange(2**20), held, layout, adapter, owner))
        yield step


def understood(message: PlanMessage) -> list[tuple[object, ...]]:
    return [(list(s.ids), s.start, list(s.pages), s.layout, s.adapter) for s in message.segments]


@pytest.mark.parametrize("seed", range(20))
def test_a_follower_lays_out_the_same_rows(seed: int) -> None:
    writer, reader = PlanWriter(), PlanReader()
    for number, step in enumerate(some_steps(random.Random(seed))):
        message = reader.read(writer.rows(step, number))
        assert (message.kind, message.figures) == (PlanMessageKind.ROWS, (number,))
        assert understood(message) == understood(PlanMessage(PlanMessageKind.ROWS, (), tuple(step)))


def test_pages_are_said_once_and_then_only_the_new_ones() -> None:
    writer, reader = PlanWriter(), PlanReader()
    pages = np.arange(1000)
    sizes = []
    for held in (pages, pages, np.arange(1001), np.arange(1001)):
        said = writer.rows([Segment([7], 5, held, owner=3), Segment([8], 9, [4], owner=2)], 4)
        sizes.append(len(said) // 4)
        assert [list(s.pages) for s in reader.read(said).segments] == [list(held), [4]]
    assert sizes[0] > 1000
    assert sizes[1:] == [sizes[1], sizes[1] + 1, sizes[1]]
    assert sizes[1] < 40


def test_a_sequence_number_that_comes_again_with_other_pages_is_another_sequence() -> None:
    writer, reader = PlanWriter(), PlanReader()
    for pages in ([1, 2, 3], [1, 4], [1, 4, 3], [9]):
        (segment,) = reader.read(writer.rows([Segment([7], 0, pages, owner=1)], 4)).segments
        assert list(segment.pages) == pages


def test_messages_without_rows_carry_their_figures() -> None:
    writer, reader = PlanWriter(), PlanReader()
    for kind, figures in (
        (PlanMessageKind.PAGES, (64, 16)),
        (PlanMessageKind.HEAD, (3,)),
        (PlanMessageKind.BEAT, ()),
        (PlanMessageKind.END, ()),
    ):
        assert reader.read(writer.simple(kind, *figures)) == PlanMessage(kind, figures)


def test_a_number_that_does_not_follow_is_an_error_that_names_both() -> None:
    writer, reader = PlanWriter(), PlanReader()
    reader.read(writer.simple(PlanMessageKind.BEAT))
    writer.simple(PlanMessageKind.BEAT)
    with pytest.raises(MessageLost, match="Message 3 came where message 2 was due"):
        reader.read(writer.simple(PlanMessageKind.BEAT))


class Tape(RankGroup):
    """Keeps what rank 0 says, and says it again to a follower."""

    def __init__(self, rank: int, messages: deque[bytes], rows: deque[Tensor]) -> None:
        super().__init__(rank, 2, watchdog=60.0)
        self.messages, self.rows = messages, rows

    def lost(self, reason: str) -> NoReturn:
        raise GroupLost(reason)

    def send(self, message: bytes) -> None:
        self.messages.append(message)

    def receive(self) -> bytes:
        return self.messages.popleft()

    def answer(self) -> None:
        """Heartbeats, which rank 0 sends where a step takes long, find both alive."""

    def share(self, x: Tensor) -> Tensor:
        if self.rank == 0:
            self.rows.append(x)
            return x
        said = self.rows.popleft()
        assert said.shape == x.shape
        assert said.dtype == x.dtype
        return said


class Kept(SpaceModel):
    """A model that remembers the pages it allocated."""

    def __init__(self, model: SpaceModel) -> None:
        self.__dict__ = dict(model.__dict__)
        self.kvs: list[PagedKV] = []

    def allocate_kv(self, num_blocks: int, block_size: int, room: StateRoom = USUAL_ROOM) -> PagedKV:
        self.kvs.append(super().allocate_kv(num_blocks, block_size, room))
        return self.kvs[-1]


def pair() -> tuple[Tape, Tape]:
    messages: deque[bytes] = deque()
    rows: deque[Tensor] = deque()
    return Tape(0, messages, rows), Tape(1, messages, rows)


def test_a_follower_leaves_the_same_keys_and_values_in_the_same_pages(tiny: SpaceModel) -> None:
    zero, one = pair()
    lead = TensorParallelLeader(tiny, zero)
    worker = Worker(lead, num_blocks=64, block_size=4, controller=FixedLayout.full(3), max_prefill_rows=7)
    router = WorkerClient(worker)
    for number, prompt in enumerate(([70, 71, 72], [20] * 17 + [33, 90], [50 + n % 40 for n in range(37)])):
        router.admit(prompt, max_tokens=12, num_pages=1, sampling=pb.Sampling(seed=number, temperature=1.0))
    router.run()
    lead.end()
    reported = Kept(tiny)
    run_follower(reported, one)
    assert not one.messages
    (kv,) = reported.kvs
    assert float(kv.keys[0].abs().max()) > 0
    for found, wanted in zip((*kv.keys, *kv.values), (*worker.kv.keys, *worker.kv.values), strict=True):
        assert torch.equal(found, wanted)


def test_a_message_that_is_missing_ends_the_group_with_its_number(tiny: SpaceModel) -> None:
    _, one = pair()
    writer = PlanWriter()
    one.messages.append(writer.simple(PlanMessageKind.PAGES, 4, 16))
    writer.simple(PlanMessageKind.BEAT)
    one.messages.append(writer.simple(PlanMessageKind.END))
    with pytest.raises(GroupLost, match="Message 3 came where message 2 was due"):
        run_follower(tiny, one)


def test_rows_without_pages_and_rows_of_another_number_end_the_group(tiny: SpaceModel) -> None:
    rows = [Segment([70, 71], 0, [0])]
    _, one = pair()
    one.messages.append(PlanWriter().rows(rows, 4))
    with pytest.raises(GroupLost, match="rows before pages"):
        run_follower(tiny, one)
    writer = PlanWriter()
    one.messages.extend([writer.simple(PlanMessageKind.PAGES, 4, 16), writer.rows(rows, 8)])
    with pytest.raises(GroupLost, match="Rank 0 lays out 8 rows, rank 1 4"):
        run_follower(tiny, one)


def test_a_step_that_fails_between_ranks_ends_the_group_and_one_that_never_began_does_not(tiny: SpaceModel) -> None:
    zero, _ = pair()
    lead = TensorParallelLeader(tiny, zero)
    kv = lead.allocate_kv(4, 16)
    batch = ForwardBatch.build([Segment([70], 0, [0], DraftLayout.plain())], block_size=16, mask_ids=())
    with pytest.raises(ValueError, match="not the last that were allocated"):
        lead.forward(batch, tiny.allocate_kv(4, 16))
    with pytest.raises(ValueError, match="laid out on a device"):
        lead.forward(replace(batch, segments=()), kv)
    assert len(zero.messages) == 1
    kv.keys.clear()
    with pytest.raises(GroupLost, match="Rank 0 failed in the middle of a step: IndexError"):
        lead.forward(batch, kv)
    lead.abandon()


@pytest.mark.slow
def test_a_row_has_the_same_sum_over_three_ranks_however_many_rows_there_are(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, torch
        from torch.distributed import TCPStore
        from space_server.tensor_parallel import RankGroup
        rank, port = int(sys.argv[1]), sys.argv[2]
        if rank == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            with open(port, "w") as file: print(store.port, file=file)
        else:
            import time
            while not (said := open(port).read()).endswith("\\n"): time.sleep(0.05)
            store = TCPStore("127.0.0.1", int(said), is_master=False, wait_for_workers=False)
        group = RankGroup(rank, 3, watchdog=30.0)
        group.join(store, torch.device("cpu"))
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(64, 48, generator=torch.Generator().manual_seed(rank)).to(dtype)
            whole = group.sum(x.clone())
            for rows in (1, 2, 3, 4, 7, 16, 33):
                assert torch.equal(group.sum(x[:rows].clone()), whole[:rows]), (dtype, rows)
            assert len(group.gather(x)) == (3 if rank == 0 else 0)
        assert group.least(10 - rank) == 8
        message = bytes(range(256)) * 100  # longer than one broadcast
        if rank == 0: group.send(message)
        else: assert group.receive() == message
        group.leave()
        """
    )
    port = tmp_path / "port"
    port.touch()
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(rank), str(port)], env=os.environ) for rank in range(3)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0, 0]
