"""Compiles every Triton kernel of the package in every configuration it can be launched in, without a GPU.

    python -m space_kernels.compile_check [--cc 80,90,100] [--module norm] [--out report.json]

What is checked: that it compiles to machine code, and that its shared memory fits the device. Registers and spilled
bytes are printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from space_kernels.build.launch import Tuned

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Maximum shared memory per block, by compute capability (CUDA programming guide, technical specifications)."""

DEFAULT_CAPABILITIES = (80, 90, 100)

_TARGET_WARP = 32


@dataclass(frozen=True)
class Job:
    """One kernel in one configuration, for one compute capability."""

    module: str  # module of the kernel
    number: int  # index in the module's TUNED
    capability: int


@dataclass(frozen=True)
class Compiled:
    """The result of a job."""

    module: str
    kernel: str  # with its constants
    capability: int
    num_warps: int
    num_stages: int
    shared_bytes: int = 0
    registers: int = 0  # per thread
    spilled_bytes: int = 0  # of local memory per thread
    seconds: float = 0.0
    error: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the kernel did not compile, or does not fit the device."""
        return self.error is not None


def triton_modules() -> list[str]:
    """Return the package's modules with kernels: `space_kernels.layers.layers_triton`, …"""
    package = Path(__file__).parent
    found = (path.relative_to(package.parent).with_suffix("") for path in package.rglob("*_triton.py"))
    return sorted(".".join(path.parts) for path in found)


def tuned_in(module: str) -> list[Tuned]:
    """Return a module's configurations. Raises ValueError if it lists none."""
    entries = list(getattr(importlib.import_module(module), "TUNED", ()))
    if not entries:
        raise ValueError(f"{module} lists no configurations; give it a TUNED of space_kernels.build.launch.Tuned.")
    return entries


def compile_one(job: Job) -> Compiled:
    """Compile one kernel and measure the result. A compiler error is returned, not raised."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tuned = tuned_in(job.module)[job.number]
    signature, attributes = _types(tuned)
    begun = time.monotonic()
    blank = Compiled(job.module, tuned.name, job.capability, tuned.num_warps, tuned.num_stages)
    try:
        source = ASTSource(tuned.kernel, signature, dict(tuned.constexprs), attributes)
        options = {"num_warps": tuned.num_warps, "num_stages": tuned.num_stages, "enable_fp_fusion": True}
        made = triton.compile(source, target=GPUTarget("cuda", job.capability, _TARGET_WARP), options=options)
    except Exception as thrown:  # any compiler error is a result of the check
        return replace(blank, error=f"{type(thrown).__name__}: {thrown}")
    registers, spilled = _resources(made.asm["cubin"])
    shared, limit = int(made.metadata.shared), SHARED_KIB[job.capability] * 1024
    error = None
    if shared > limit:
        error = f"{shared} bytes of shared memory; a block may have {limit}. Take smaller tiles or fewer stages."
    seconds = time.monotonic() - begun
    return replace(blank, shared_bytes=shared, registers=registers, spilled_bytes=spilled, seconds=seconds, error=error)


def _types(tuned: Tuned) -> tuple[dict[str, str], dict[tuple[int, ...], list[list[Any]]]]:
    """Return each argument's Triton type, and which arguments are multiples of 16."""
    names: list[str] = tuned.kernel.arg_names
    unknown = set(names) ^ (set(tuned.signature) | set(tuned.constexprs))
    if unknown:
        raise ValueError(f"{tuned.kernel.__name__}: {', '.join(sorted(unknown))} of kernel and TUNED do not match.")
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for number, name in enumerate(names):
        if name in tuned.constexprs:
            signature[name] = "constexpr"
            continue
        kind, _, multiple = tuned.signature[name].partition(":")
        signature[name] = kind
        if multiple and tuned.kernel.params[number].do_not_specialize:
            raise ValueError(f"{tuned.kernel.__name__}: {name} is not specialised, and TUNED says what it divides by.")
        if multiple or kind.startswith("*"):
            attributes[(number,)] = [["tt.divisibility", int(multiple or 16)]]
    return signature, attributes


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory per thread, as cuobjdump reports them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed))
    return int(found["REG"]), int(found.get("STACK", 0)) + int(found.get("LOCAL", 0))


def compile_all(jobs: Sequence[Job], processes: int) -> Iterator[Compiled]:
    """Compile in separate processes, without Triton's interpreter; yield results as they finish."""
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            yield from pool.imap_unordered(compile_one, jobs)
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


def table(found: Sequence[Compiled]) -> str:
    """Format the results, one line per kernel, configuration and capability."""
    lines = [f"{'cc':>4} {'warps':>5} {'stages':>6} {'shared':>8} {'regs':>5} {'spilled':>7} {'s':>5}  kernel"]
    for one in found:
        mark = "FAILED  " if one.failed else "spills  " if one.spilled_bytes else ""
        numbers = f"{one.shared_bytes:>8} {one.registers:>5} {one.spilled_bytes:>7} {one.seconds:>5.1f}"
        lines.append(f"{one.capability:>4} {one.num_warps:>5} {one.num_stages:>6} {numbers}  {mark}{one.kernel}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 if any kernel does not compile or does not fit, else 0."""
    parser = argparse.ArgumentParser(prog="python -m space_kernels.compile_check", description=__doc__)
    parser.add_argument("--cc", default=",".join(map(str, DEFAULT_CAPABILITIES)), help="compute capabilities")
    parser.add_argument("--module", action="append", help="only this one (norm, or a.dotted.path)")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N configurations of each kernel")
    parser.add_argument("--processes", type=int, default=2, help="compilers at a time (2: the cores of a CI machine)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as JSON too")
    options = parser.parse_args(arguments)
    capabilities = [int(part) for part in options.cc.split(",")]
    unknown = sorted(set(capabilities) - set(SHARED_KIB))
    if unknown:
        parser.error(f"capability {unknown[0]} is not known here; there are {', '.join(map(str, SHARED_KIB))}.")
    asked = [_module(name) for name in options.module] if options.module else triton_modules()

    os.environ.pop("TRITON_INTERPRET", None)
    jobs = [
        Job(module, number, capability)
        for module in asked
        for number in _chosen(tuned_in(module), options.first)
        for capability in capabilities
        if capability in (tuned_in(module)[number].capabilities or capabilities)
    ]
    found = sorted(compile_all(jobs, options.processes), key=lambda one: (one.module, one.kernel, one.capability))
    print(table(found))  # noqa: T201
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    failed = [one for one in found if one.failed]
    for one in failed:
        print(f"\n{one.kernel} for {one.capability}: {one.error}", file=sys.stderr)  # noqa: T201
    spilling = sum(one.spilled_bytes > 0 for one in found)
    print(f"\n{len(found)} tried, {len(failed)} failed, {spilling} spill registers.")  # noqa: T201
    return 1 if failed else 0


def _module(name: str) -> str:
    """Return the named module, or the first one with such a kernel (norm: `_rms_norm`)."""
    if "." in name:
        return name
    ending, modules = f".{name.removesuffix('_triton')}_triton", triton_modules()
    named = (module for module in modules if module.endswith(ending))
    holding = (module for module in modules if any(name in one.kernel.__name__ for one in tuned_in(module)))
    return next(named, None) or next(holding, f"space_kernels{ending}")


def _chosen(tuned: Sequence[Tuned], first: int | None) -> list[int]:
    """Return the indices of the first `first` configurations of each kernel."""
    seen: dict[str, int] = {}
    chosen = []
    for number, one in enumerate(tuned):
        seen[one.kernel.__name__] = seen.get(one.kernel.__name__, 0) + 1
        if first is None or seen[one.kernel.__name__] <= first:
            chosen.append(number)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
