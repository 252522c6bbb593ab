"""Copies of KV blocks in host memory: the same bytes come back, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from space_model.networks.network import DraftKV, PagedKV
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.kv_offload import HostBlocks, choose_host_blocks
from space_server.machine.memory import NotEnoughMemory
from space_server.worker import ProtocolError, Worker
from torch import Tensor


def pages(dtype: torch.dtype, head_dim: int) -> Tensor:
    """[6, 2, 4, head_dim] random bytes."""
    return torch.randint(0, 256, (6, 2, 4, head_dim * dtype.itemsize), dtype=torch.uint8).view(dtype)


def bytes_of(kv: PagedKV) -> list[Tensor]:
    return [page.view(torch.uint8).clone() for page in (*kv.keys, *kv.values)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("form", ["plain", "latent", "shared", "unequal"])
def test_blocks_come_back_as_they_were_wherever_they_are_put(dtype: torch.dtype, form: str) -> None:
    keys = [pages(dtype, 8), pages(dtype, 16 if form == "unequal" else 8)]
    if form == "shared":
        keys[1] = keys[0]
    values = keys if form == "latent" else [pages(dtype, 8), pages(dtype, 4)]
    kv = PagedKV(keys, values, num_blocks=6, block_size=4)
    host = HostBlocks(kv, 3)
    before = bytes_of(kv)
    host.offload([4, 1], [2, 0])
    assert all(torch.equal(old, new) for old, new in zip(before, bytes_of(kv), strict=True))
    for page in (*kv.keys, *kv.values):
        page.view(torch.uint8).fill_(7)
    host.restore([0, 5, 3], [2, 0, 2])
    for old, new in zip(before, bytes_of(kv), strict=True):
        assert torch.equal(new[0], old[4])
        assert torch.equal(new[5], old[1])
        assert torch.equal(new[3], old[4])
        assert bool((new[[1, 2, 4]] == 7).all())


def test_a_host_block_that_is_written_twice_holds_the_later_block() -> None:
    kv = PagedKV([pages(torch.float32, 8)], [pages(torch.float32, 8)], num_blocks=6, block_size=4)
    host = HostBlocks(kv, 1)
    before = bytes_of(kv)
    host.offload([1, 2], [0, 0])
    host.restore([5], [0])
    assert all(torch.equal(new[5], old[2]) for old, new in zip(before, bytes_of(kv), strict=True))


@pytest.mark.parametrize(("num_bytes", "num_blocks"), [(None, 0), (1000, 1), (5999, 5)])
def test_as_many_blocks_as_fit(num_bytes: int | None, num_blocks: int) -> None:
    assert choose_host_blocks(num_bytes, block_bytes=1000, available=6000) == num_blocks


@pytest.mark.parametrize(("num_bytes", "message"), [(999, "holds no block"), (6001, "6000 are available")])
def test_a_size_that_cannot_be_is_refused(num_bytes: int, message: str) -> None:
    with pytest.raises(NotEnoughMemory, match=message):
        choose_host_blocks(num_bytes, block_bytes=1000, available=6000)


@pytest.mark.parametrize("kind", ["offload_blocks", "restore_blocks"])
@pytest.mark.parametrize(("blocks", "host_blocks"), [([8], [0]), ([0], [2]), ([0, 1], [0])])
def test_a_copy_of_blocks_that_do_not_exist_is_a_violation(
    kind: str, blocks: list[int], host_blocks: list[int], tiny: SpaceModel
) -> None:
    worker = Worker(tiny, num_blocks=8, num_host_blocks=2)
    worker.apply(pb.Command(start=pb.Start(protocol_major=1)))
    with pytest.raises(ProtocolError, match="does not exist"):
        worker.apply(pb.Command(**{kind: pb.CopyBlocks(blocks=blocks, host_blocks=host_blocks)}))
    assert worker.hello("one").num_host_blocks == 2


def test_a_draft_network_s_pages_and_how_much_of_them_was_read_come_back_too() -> None:
    own, draft = (PagedKV([pages(torch.float32, 8)], [pages(torch.float32, 8)], 6, 4) for _ in range(2))
    kv = replace(own, draft=(record := DraftKV.of(draft)))
    host = HostBlocks(kv, 2)
    record.num_read[4] = 3
    before = bytes_of(draft)
    host.offload([4], [1])
    record.forget(range(6))
    host.restore([0], [1])
    assert all(torch.equal(new[0], old[4]) for old, new in zip(before, bytes_of(draft), strict=True))
    assert record.num_read.tolist() == [3, 0, 0, 0, 0, 0]
