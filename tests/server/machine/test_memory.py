"""Amounts of memory are read exactly, and blocks are as many as fit."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doubles.worker import ScriptedModel
from space_common.worker_settings import parse_amount
from space_server.machine.memory import FreeMemory, NotEnoughMemory, check_num_blocks, choose_num_blocks, free_bytes

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
    with pytest.raises(ValueError, match="no amount of memory"):
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


def test_blocks_asked_for_by_number_must_fit() -> None:
    assert check_num_blocks(FACTS, num_blocks=10, block_size=16, available=160_000) == 10
    with pytest.raises(NotEnoughMemory, match="--num-blocks 11 needs 176000 bytes; 160000 are available on cpu"):
        check_num_blocks(FACTS, num_blocks=11, block_size=16, available=160_000)


def test_free_memory_is_known_on_linux_and_elsewhere(tmp_path: Path) -> None:
    cpu, nowhere = torch.device("cpu"), tmp_path / "nowhere"
    assert free_bytes(cpu) > 0
    assert free_bytes(cpu, meminfo=nowhere, cgroup=nowhere) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable: 7 kB\n")
    assert free_bytes(cpu, meminfo=meminfo, cgroup=nowhere) == 7 * 1024


@pytest.mark.parametrize(
    ("names", "idle"),
    [
        (("memory.max", "memory.current", "memory.stat"), "inactive_file"),
        (
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
            "total_inactive_file",
        ),
    ],
)
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, names: tuple[str, str, str], idle: str) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 100 kB\n")
    (tmp_path / "memory").mkdir()
    for name, words in zip(names, ("5000\n", "3000\n", f"anon 9\n{idle} 1000\n"), strict=True):
        (tmp_path / name).write_text(words)
    assert free_bytes(torch.device("cpu"), meminfo=meminfo, cgroup=tmp_path) == 3000
    (tmp_path / names[0]).write_text("max\n")
    assert free_bytes(torch.device("cpu"), meminfo=meminfo, cgroup=tmp_path) == 100 * 1024


def test_a_process_has_what_the_groups_around_it_leave(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("9:memory:/pod/one\n0::/pod/one\n")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 100 kB\n")

    def free() -> FreeMemory:
        return FreeMemory.on(torch.device("cpu"), meminfo=meminfo, cgroup=tmp_path / "groups", process=tmp_path)

    def group(folder: str, limit: str, usage: str, used: str, bound: int) -> None:
        place = tmp_path / "groups" / folder
        place.mkdir(parents=True)
        (place / limit).write_text(f"{bound}\n")
        (place / usage).write_text(f"{used}\n")
        (place / "memory.stat").write_text("inactive_file 0\ntotal_inactive_file 0\n")

    assert free().bound == "the machine's memory"
    group("pod", "memory.max", "memory.current", "4000", 9000)
    assert (free().num_bytes, free().bound) == (5000, f"the limit in {tmp_path}/groups/pod/memory.max")
    group("memory/pod/one", "memory.limit_in_bytes", "memory.usage_in_bytes", "1000", 3000)
    assert free().num_bytes == 2000
    assert free().among(2).num_bytes == 1000


def test_a_process_has_what_its_own_limits_leave() -> None:
    script = (
        "import resource, torch\n"
        "from space_server.machine.memory import FreeMemory\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n"
        "found = FreeMemory.on(torch.device('cpu'))\n"
        'assert found.bound == "this process\'s limit (ulimit -d)", found\n'
        "assert 0 < found.num_bytes < 1 << 30\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_one_window_is_given_where_it_fits_though_it_is_more_than_half() -> None:
    assert choose_num_blocks(FACTS, block_size=16, amount=None, available=120_000) == 7
