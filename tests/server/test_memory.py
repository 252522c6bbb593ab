"""Amounts of memory are read exactly, and blocks are as many as fit."""

import dataclasses

import pytest
import torch
from space_server.memory import NotEnoughMemory, choose_num_blocks, free_bytes, parse_amount
from space_server.testing import ScriptedModel

FACTS = dataclasses.replace(ScriptedModel(window=100).facts, kv_bytes_per_token=1000)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("1GiB", 1024**3), ("800MiB", 800 * 1024**2), ("1.5kb", 1500), ("4096", 4096), ("0.5", 0.5), ("1.0", 1.0)],
)
def test_amounts(text: str, amount: int | float) -> None:
    assert parse_amount(text) == amount
    assert type(parse_amount(text)) is type(amount)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1 TiBs", "nan", "lots"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(NotEnoughMemory, match="no amount of memory"):
        parse_amount(text)


@pytest.mark.parametrize(
    ("amount", "available", "blocks"),
    [
        (400_000, 10**9, 25),  # blocks of 16 slots of 1000 bytes
        (0.5, 1_600_000, 50),
        (None, 10**12, 64 * 7),  # 64 windows of 7 blocks
        (None, 1_600_000, 50),  # half of what is free
    ],
)
def test_blocks_fit_the_amount(amount: int | float | None, available: int, blocks: int) -> None:
    assert choose_num_blocks(FACTS, block_size=16, amount=amount, available=available) == blocks


def test_the_default_stops_at_one_gib() -> None:
    wide = dataclasses.replace(FACTS, window=100_000)
    assert choose_num_blocks(wide, block_size=16, amount=None, available=10**12) == 1024**3 // 16_000


def test_less_than_one_window_and_more_than_there_is_are_refused() -> None:
    with pytest.raises(NotEnoughMemory, match="need 112000 bytes; there are 100000"):
        choose_num_blocks(FACTS, block_size=16, amount=100_000, available=10**9)
    with pytest.raises(NotEnoughMemory, match="asks for 2000000000 bytes; 1000000 are available"):
        choose_num_blocks(FACTS, block_size=16, amount=2_000_000_000, available=1_000_000)


def test_free_memory_is_known() -> None:
    assert free_bytes(torch.device("cpu")) > 0
