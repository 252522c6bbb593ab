"""The products of the kinds for ARM and for AMX, emulated: what a row's bits depend on, and which are those of x86."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from space_kernels.build import cpu_library

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
INTEGER = {"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "int8"}


def printed(
    compiler: str, machine: str, kind: str, folder: Path, run: list[str], flags: str | None = None
) -> dict[str, list[str]]:
    """What products.cpp prints: by the name of a product, whether rows are invariant, and the hash of its results.
    `flags`: instead of the kind's own."""
    sources = [cpu_library._SOURCES / file for file in cpu_library._SOURCE_FILES if file != "probe.cpp"]
    own = flags or cpu_library.KINDS[machine][kind]
    words = ["-static", "-std=c++17", "-O1", "-pthread", "-ffp-contract=off", *own.split()]
    program = folder / kind
    main = Path(__file__).with_name("products.cpp")
    subprocess.run([compiler, *words, f"-I{cpu_library._SOURCES}", main, *sources, "-o", program], check=True)
    lines = subprocess.run([*run, program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: rest for name, *rest in map(str.split, lines)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    COMPILER is None or EMULATOR is None, reason="Debian: apt-get install g++-aarch64-linux-gnu qemu-user"
)
@pytest.mark.skipif("avx512_vnni" not in cpu_library.own_kinds(), reason="the other side is of avx512_vnni")
def test_products_in_groups_have_the_bits_of_x86_and_all_rows_are_invariant(tmp_path: Path) -> None:
    assert COMPILER is not None
    assert EMULATOR is not None
    arm = printed(COMPILER, "aarch64", "neon_bf16", tmp_path, [EMULATOR, "-cpu", "max"])
    x86 = printed("g++", "x86_64", "avx512_vnni", tmp_path, [])
    assert {rows for rows, _ in [*arm.values(), *x86.values()]} == {"invariant"}
    assert {name for name in arm if arm[name] == x86[name]} >= {*INTEGER, "norm"}
    assert len(arm) == 9


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif("avx512_vnni" not in cpu_library.own_kinds(), reason="the other side is of avx512_vnni")
def test_integer_products_by_the_tiles_of_amx_have_the_bits_of_avx512_vnni(tmp_path: Path) -> None:
    vnni = cpu_library.KINDS["x86_64"]["avx512_vnni"]
    tiles = Path(__file__).with_name("emulated_tiles.h")
    flags = f"-D__AMX_BF16__ -include {tiles} {vnni}"
    amx, x86 = (
        printed("g++", "x86_64", kind, tmp_path, [], own) for kind, own in (("amx_bf16", flags), ("avx512_vnni", vnni))
    )
    assert {rows for rows, _ in [*amx.values(), *x86.values()]} == {"invariant"}
    assert {name for name in amx if amx[name] == x86[name]} == {*INTEGER, "norm"}
