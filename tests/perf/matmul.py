"""The compiled matmul of few rows beside what the processor can reach and what torch does.

Each shape has so many copies of its weights that none stays in the cache: what is measured is reading them. Two of the
arms only read as many bytes, and only multiply as often: the ceiling is the longer of the two. Ratios are of one round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from space_eval.flags import whole_from
from space_kernels.build.cpu_library import KINDS, CpuLibrary, cpu_library, library_for, own_kinds
from space_kernels.linear.cpu_linear import CompiledLinear
from space_kernels.linear.packed_linear import PackedLinear, can_pack, pad_rows
from torch import Tensor
from torch.nn import functional as F

from perf.harness import Column, PerfError, Report, columns_table, log, take_turns, without_tails

SHAPES = ((768, 768), (2048, 2048), (5632, 2048))
ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64)
WORKING_SET = 320 << 20  # bytes of weights passed through before the first ones come again: more than caches hold
PAIRS = 16  # of bfloat16, that one instruction multiplies and adds up

Arm = Callable[[Tensor, int], object]


Row = dict[str, Any]  # one shape with one number of rows: medians over the rounds

COLUMNS: tuple[Column, ...] = (
    ("weights", "shape", ""),
    ("rows", "rows", ""),
    ("µs", "microseconds", ""),
    ("GB/s there are", "gb_per_second", ".1f"),  # of nothing but reading
    ("GFLOP/s there are", "gflop_per_second", ".0f"),  # of nothing but multiplications and additions
    ("of bandwidth", "share_of_bandwidth", ".0%"),
    ("of ceiling", "share_of_ceiling", ".0%"),  # of whichever of the two is the limit
    ("F.linear / ours", "over_plain", ".2f"),  # its time over ours
    ("in float32 / ours", "over_float32", ".2f"),  # F.linear's on the same numbers, held in float32
    ("prepacked / ours", "over_packed", ".2f"),  # the library's; nan: this torch has none
    ("error", "error", ".0e"),  # greatest, against float64 of the same numbers, over the greatest result
    ("G integer products/s there are", "integer_products", ".0f"),  # of nothing but them, in billions
    ("int8 µs", "int8_microseconds", ".0f"),  # the same weights in eight bits
    ("of bandwidth", "int8_share_of_bandwidth", ".0%"),  # of half the bytes
    ("of ceiling", "int8_share_of_ceiling", ".0%"),  # of reading half the bytes, or of integer products
    ("bfloat16 / int8", "int8_over_bfloat16", ".2f"),
    ("error", "int8_error", ".0e"),  # against the same: that of the weights and of rounding inputs is in it
    ("int4 µs", "int4_microseconds", ".0f"),  # in four bits
    ("of ceiling", "int4_share_of_ceiling", ".0%"),
    ("bfloat16 / int4", "int4_over_bfloat16", ".2f"),
)


def measure(library: CpuLibrary, outputs: int, inputs: int, rows: Sequence[int], rounds: int) -> list[Row]:
    """One shape, all arms in turn for each number of rows."""
    size = outputs * inputs * 2
    copies = max(2, WORKING_SET // size)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).mul_(inputs**-0.5).bfloat16()
    ours = [CompiledLinear(library, weight, None) for _ in range(copies)]
    eight = [CompiledLinear(library, weight, None, weights="int8") for _ in range(2 * copies)]
    four = [CompiledLinear(library, weight, None, weights="int4") for _ in range(3 * copies)]
    packed = [PackedLinear(weight, None) for _ in range(copies)] if can_pack(torch.bfloat16) else []
    plain = [weight.clone() for _ in range(copies)]
    wide = [weight.float() for _ in range(copies)]
    threads = torch.get_num_threads()
    arms: dict[str, Arm] = {
        "ours": lambda x, n: ours[n](x),
        "int8": lambda x, n: [linear(x) for linear in eight[2 * n : 2 * n + 2]],
        "int4": lambda x, n: [linear(x) for linear in four[3 * n : 3 * n + 3]],
        "plain": lambda x, n: F.linear(x, plain[n]),
        "float32": lambda x, n: F.linear(x.float(), wide[n]),
        "read": lambda x, n: library.read(plain[n].data_ptr(), size // 4, threads),
        "dots": lambda x, n: library.dots(len(x) * outputs * inputs // (2 * PAIRS * threads), threads),
        "integers": lambda x, n: library.integer_dots(len(x) * outputs * inputs // (4 * PAIRS * threads), threads),
    }
    if packed:
        arms["packed"] = lambda x, n: packed[n](pad_rows(x))
    return [_row(library, weight, arms, torch.randn(count, inputs, generator=generator).bfloat16(), copies, rounds)
            for count in rows]  # fmt: skip


def _row(library: CpuLibrary, weight: Tensor, arms: dict[str, Arm], x: Tensor, copies: int, rounds: int) -> Row:
    times: dict[str, list[float]] = {name: [] for name in arms}

    def turn(name: str, number: int) -> None:
        begun = time.perf_counter()
        for copy in range(copies):
            arms[name](x, copy)
        times[name].append((time.perf_counter() - begun) / copies)

    take_turns(list(arms), rounds, turn)
    times["int8"] = [seconds / 2 for seconds in times["int8"]]  # two matmuls: as many bytes as one of the others
    times["half"] = [seconds / 2 for seconds in times["read"]]
    times["int4"] = [seconds / 3 for seconds in times["int4"]]
    times["five bits"] = [seconds * 5 / 16 for seconds in times["read"]]
    wanted = x.double() @ weight.double().T

    def error(*, int8: bool) -> float:
        found = CompiledLinear(library, weight, None, wide=True, weights="int8" if int8 else "plain")(x).double()
        return float((found - wanted).abs().max() / wanted.abs().max())

    def over(arm: str, *names: str) -> float:
        """The median over the rounds: the longest of `names` over `arm`."""
        longest = map(max, zip(*(times[name] for name in names), strict=True))
        return float(statistics.median(other / own for other, own in zip(longest, times[arm], strict=True)))

    (outputs, inputs), seconds = weight.shape, {name: statistics.median(of_arm) for name, of_arm in times.items()}
    spread = without_tails([1e6 * of_turn for of_turn in times["ours"]])
    return {
        "outputs": outputs, "inputs": inputs, "shape": f"{outputs}×{inputs}", "rows": len(x),
        "microseconds": spread.shown(0), "seconds": spread.median / 1e6,
        "gb_per_second": outputs * inputs * 2 / seconds["read"] / 1e9,
        "gflop_per_second": 2.0 * len(x) * outputs * inputs / seconds["dots"] / 1e9,
        "share_of_bandwidth": over("ours", "read"), "share_of_ceiling": over("ours", "read", "dots"),
        "over_plain": over("ours", "plain"), "over_float32": over("ours", "float32"),
        "over_packed": over("ours", "packed") if "packed" in arms else float("nan"), "error": error(int8=False),
        "int8_microseconds": 1e6 * seconds["int8"], "int8_share_of_bandwidth": over("int8", "half"),
        "int8_share_of_ceiling": over("int8", "half", "integers"), "int8_over_bfloat16": over("int8", "ours"),
        "int8_error": error(int8=True), "integer_products": len(x) * outputs * inputs / seconds["integers"] / 1e9,
        "int4_microseconds": 1e6 * seconds["int4"], "int4_over_bfloat16": over("int4", "ours"),
        "int4_share_of_ceiling": over("int4", "five bits", "integers"),
    }  # fmt: skip


def run(options: argparse.Namespace) -> Report:
    """Every shape. Raises PerfError where this processor or this machine has nothing to measure."""
    if options.kind is not None and options.kind not in own_kinds():
        raise PerfError(f"this processor is no {options.kind}.")
    library = cpu_library() if options.kind is None else library_for(options.kind)
    if library is None:
        raise PerfError("this machine has no compiled operations; the log says why.")
    torch.set_num_threads(options.num_threads)
    found: list[Row] = []
    for outputs, inputs in options.shapes:
        log(f"{outputs} x {inputs}")
        found += measure(library, outputs, inputs, options.rows, options.rounds)
    notes = (
        f"Medians of {options.rounds} rounds, arms in turn; in brackets where 80 % of the rounds are. int8 and int4: "
        "the same weights in fewer bits, beside reading so many bytes and as many integer products; errors are against "
        "float64 of the bfloat16 weights."
    )
    facts = {"kind": library.kind, "threads": options.num_threads, "torch": torch.__version__}
    return Report("Matmul of few rows", notes, [columns_table(COLUMNS, found)], {"rows": found}, facts)


def _shape(text: str) -> tuple[int, int]:
    outputs, _, inputs = text.partition("x")
    if not (outputs.isdigit() and inputs.isdigit()) or int(outputs) < 1 or int(inputs) < 2 or int(inputs) % 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; one is OUTPUTSxINPUTS, inputs even, like 2048x2048")
    return int(outputs), int(inputs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", type=_shape, nargs="+", default=SHAPES, help="OUTPUTSxINPUTS (768x768 …)")
    add("--rows", type=whole_from(1), nargs="+", default=ROWS, help="numbers of rows (1 … 64)")
    add("--rounds", type=whole_from(1), default=7, help="measurements of each arm (7)")
    add("--num-threads", type=whole_from(1), default=torch.get_num_threads(), help="threads (as torch has them)")
    kinds = [kind for kinds in KINDS.values() for kind in kinds]
    add("--kind", choices=kinds, help="of processor that the matmul is compiled for (this one's best)")
