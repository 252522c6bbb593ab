"""The compiled operations: the kind chosen for a processor, the build, and the fallback to torch."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from space_kernels import dispatch
from space_kernels.build import compiler, cpu_library
from space_kernels.linear.cpu_linear import CompiledLinear

AVX512 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "sse4_2"}
XEON = AVX512 | {"avx512_bf16", "avx512vbmi", "avx512_vnni"}
TILES = {"amx_tile", "amx_bf16", "amx_int8"}
COVERED = "avx512_vnni"
"""A kind without code of its own: amx_bf16 compiles its integer products, avx512 the rest."""


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear cached results before and after each test."""
    monkeypatch.delenv(cpu_library.SWITCH, raising=False)
    cpu_library.cpu_library.cache_clear()
    dispatch._ops.cache_clear()
    yield
    cpu_library.cpu_library.cache_clear()
    dispatch._ops.cache_clear()


@pytest.mark.parametrize(
    ("machine", "flags", "maker", "kinds"),
    [
        ("x86_64", XEON, "GenuineIntel", ["avx512_vnni", "avx512", "avx512_bf16", "avx2"]),
        ("x86_64", XEON, "AuthenticAMD", ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
        ("x86_64", XEON - {"avx512_bf16"}, "GenuineIntel", ["avx512_vnni", "avx512", "avx2"]),
        ("x86_64", XEON - {"avx512vbmi"}, "AuthenticAMD", ["avx512_vnni", "avx512", "avx2"]),
        ("x86_64", XEON - {"avx512f"}, "GenuineIntel", ["avx2"]),
        ("x86_64", {"sse4_2"}, "GenuineIntel", []),
        ("aarch64", {"asimd", "bf16", "fp"}, "", ["neon_bf16"]),
        ("aarch64", {"asimd", "fp"}, "", []),
        ("arm64", set(), "", []),  # macOS
        ("x86_64", XEON | TILES, "GenuineIntel", ["amx_bf16", "avx512_vnni", "avx512", "avx512_bf16", "avx2"]),
        ("x86_64", XEON | {"amx_tile"}, "GenuineIntel", ["avx512_vnni", "avx512", "avx512_bf16", "avx2"]),
        ("x86_64", AVX512, "GenuineIntel", ["avx512", "avx2"]),
    ],
)
def test_a_processor_is_of_the_kinds_whose_instructions_it_has(
    machine: str, flags: set[str], maker: str, kinds: list[str]
) -> None:
    assert cpu_library.kinds_of(machine, flags, maker) == kinds


def test_a_kind_is_taken_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    least = cpu_library.own_kinds()[-1]
    monkeypatch.setenv(cpu_library.SWITCH, least)
    library = cpu_library.cpu_library()
    assert library is not None
    assert library.kind == least
    other = next(k for kinds in cpu_library.KINDS.values() for k in kinds if k not in cpu_library.own_kinds())
    cpu_library.cpu_library.cache_clear()
    monkeypatch.setenv(cpu_library.SWITCH, other)
    with pytest.raises(ValueError, match=f"this processor is no {other}, but"):
        cpu_library.cpu_library()


def test_tiles_are_used_where_the_system_permits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"flags": " ".join(XEON | TILES), "vendor_id": "GenuineIntel"}
    monkeypatch.setattr(cpu_library, "cpu_fact", lambda *names: flags[names[0]])
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for permitted, best in ((True, "amx_bf16"), (False, "avx512_vnni")):
        monkeypatch.setattr(cpu_library, "_may_use_tiles", lambda permitted=permitted: permitted)
        assert cpu_library.own_kinds()[0] == best


def test_a_compiler_that_does_not_know_the_best_kind_takes_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_file = cpu_library.library_file

    def older(kind: str) -> Path:
        if kind == "new":
            raise OSError("unrecognized option -mnew")
        return compile_file(kind)

    monkeypatch.setattr(cpu_library, "library_file", older)
    kind = cpu_library.own_kinds()[-1]
    assert cpu_library.best_library(["new", kind]).kind == kind
    assert "the operations for new cannot be had (unrecognized option -mnew)" in caplog.text


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = cpu_library.own_kinds()[-1]
    built = cpu_library.library_for(kind)
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cpu_library.library_for(kind).path == built.path


def test_libraries_of_older_and_newer_sources_are_left_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The name has a digest of the sources; a library of others is neither loaded nor replaced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kind, of_these = cpu_library.own_kinds()[-1], "2" * 16

    def compiled(_compiler: object, _kind: str, _machine: str, folder: Path) -> Path:
        (folder / "made.so").write_text("of these sources")
        return folder / "made.so"

    monkeypatch.setattr(cpu_library, "find_compiler", lambda: "c++")
    monkeypatch.setattr(cpu_library, "build", compiled)
    monkeypatch.setattr(cpu_library, "library_name", lambda kind, _machine: f"cpu-kernels-{kind}-{of_these}.so")
    others = [tmp_path / "spaceserve" / f"cpu-kernels-{kind}-{digest * 16}.so" for digest in "13"]
    others[0].parent.mkdir()
    for other in others:
        other.write_text("of other sources")
    with caplog.at_level("INFO"):
        assert cpu_library.library_file(kind).read_text() == "of these sources"
    assert f"2 compiled of other sources in {others[0].parent} are not used" in caplog.text
    assert [other.read_text() for other in others] == ["of other sources"] * 2
    caplog.clear()
    with caplog.at_level("INFO"):
        assert cpu_library.library_file(kind).is_file()
    assert caplog.text == "", "once it is there, nothing is said"


def test_without_a_compiler_torch_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert cpu_library.cpu_library() is None
    assert "no C++ compiler is installed" in caplog.text
    assert dispatch.ops_for("cpu", dtype=torch.bfloat16).attention == "torch"
    cpu_library.cpu_library.cache_clear()
    monkeypatch.setenv(cpu_library.SWITCH, "compiled")
    with pytest.raises(ValueError, match="cannot be had: no C\\+\\+ compiler is installed"):
        cpu_library.cpu_library()


def test_what_the_compiler_says_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho no such standard >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    assert cpu_library.cpu_library() is None
    assert "no such standard" in caplog.text
    assert list((tmp_path / "spaceserve").iterdir()) == []


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.ops_for("cpu", dtype=torch.bfloat16).attention == "compiled"
    assert dispatch.ops_for("cpu").attention == "torch"
    assert dispatch.ops_for("cpu", attention="torch", dtype=torch.bfloat16).attention == "torch"
    afresh_again = (cpu_library.cpu_library.cache_clear, dispatch._ops.cache_clear)
    for clear in afresh_again:
        clear()
    monkeypatch.setenv(cpu_library.SWITCH, "torch")
    assert dispatch.ops_for("cpu", dtype=torch.bfloat16).attention == "torch"
    cpu_library.cpu_library.cache_clear()
    monkeypatch.setenv(cpu_library.SWITCH, "fast")
    with pytest.raises(ValueError, match="it must be auto, compiled, torch,"):
        cpu_library.cpu_library()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind == COVERED))
        for kind in cpu_library.KINDS.get(platform.machine(), {})
    ],
)
def test_every_kind_of_this_machine_compiles(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind in cpu_library.own_kinds():
        assert cpu_library.library_file(kind).is_file()
        return
    # This processor runs none of it, and optimising it takes minutes. The compiler still refuses what the kind lacks.
    flags = tuple("-O0" if flag == "-O3" else flag for flag in compiler._FLAGS)
    assert "-O0" in flags
    # Every source includes isa.h, and the intrinsics take half of the time: they are read once, into pre.h.gch.
    before = tmp_path / "pre.h"
    before.write_text(f'#include "{cpu_library._SOURCES / "isa.h"}"\n', encoding="utf-8")
    found, machine = compiler.find_compiler(), platform.machine()
    of_kind = cpu_library.KINDS[machine][kind].split()
    found._run(tmp_path, *flags, *of_kind, "-x", "c++-header", str(before), "-o", f"{before}.gch")
    monkeypatch.setattr(compiler, "_FLAGS", (*flags, "-include", str(before)))
    assert cpu_library.build(found, kind, machine, tmp_path).is_file()


def test_without_a_compiler_zig_is_taken_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = compiler.find_compiler()
    assert found == compiler.zig(platform.machine())
    assert found.command[1:] == ("-P", "-m", "ziglang", "c++", "-target", f"{platform.machine()}-linux-gnu.2.28")
    (tmp_path / "g++").touch(mode=0o755)
    assert compiler.find_compiler() == compiler.Compiler((str(tmp_path / "g++"),))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_wheel_carries_the_operations_of_every_kind(tmp_path: Path) -> None:
    """Needs a package index: hatch installs zig, auditwheel comes by uvx."""
    environment = {**os.environ, "SPACESERVE_WHEEL_KERNELS": "1"}
    environment.pop("PIP_NO_INDEX", None)
    uv = [sys.executable, "-P", "-m", "uv"]
    subprocess.run([*uv, "build", "--wheel", "-o", tmp_path, Path(__file__).parents[3]], env=environment, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    machine = platform.machine()
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{machine}.whl")
    audit = [*uv, "tool", "run", "auditwheel", "show", wheel]
    shown = subprocess.run(audit, env=environment, check=True, capture_output=True, text=True).stdout
    tag = re.search(rf'following platform tag: "manylinux_2_(\d+)_{machine}"', " ".join(shown.split()))
    assert tag is not None, shown
    assert int(tag[1]) <= 28
    names = {f"space_kernels/built/{cpu_library.library_name(kind, machine)}" for kind in cpu_library.KINDS[machine]}
    with zipfile.ZipFile(wheel) as archive:
        assert names <= set(archive.namelist())
        for kind in cpu_library.own_kinds():
            file = archive.extract(f"space_kernels/built/{cpu_library.library_name(kind, machine)}", tmp_path)
            library = cpu_library.CpuLibrary(Path(file), kind)
            weight, x = torch.randn(64, 32).bfloat16(), torch.randn(3, 32).bfloat16()
            compiled_here = CompiledLinear(cpu_library.library_for(kind), weight, None)(x)
            assert torch.equal(CompiledLinear(library, weight, None)(x), compiled_here)
