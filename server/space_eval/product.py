"""`spaceserve bench product`: the compiled product of few rows beside what the processor can and what torch does.

Each shape has so many copies of its weights that none stays in the cache: what is measured is reading them. The arms
take turns, copy by copy of the table, so that a machine that gets slower slows all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from space_kernels.build.cpu_library import KINDS, CpuLibrary, cpu_library, library_for, own_kinds
from space_kernels.linear.cpu_linear import CompiledLinear
from space_kernels.linear.packed_linear import PackedLinear, can_pack, pad_rows
from torch import Tensor
from torch.nn import functional as F

from space_eval.bench.facts import commit, machine

SHAPES = ((768, 768), (2048, 2048), (5632, 2048))
ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64)
_WORKING_SET = 320 << 20
"""Bytes of weights gone through before the first ones come again: more than caches hold."""
_PAIRS = 16
"""Of bfloat16, that one instruction multiplies and adds up."""

Arm = Callable[[Tensor, int], object]


@dataclass(frozen=True)
class Row:
    """One shape with one number of rows: medians over the rounds."""

    outputs: int
    inputs: int
    rows: int
    seconds: float
    bandwidth: float  # bytes per second that nothing but reading reached in between
    arithmetic: float  # multiplications and additions per second of nothing but these
    share_of_bandwidth: float
    share_of_ceiling: float  # of whichever of the two is the limit
    over_plain: float  # F.linear's time over ours
    over_float32: float  # the time of F.linear on the same numbers, held in float32, over ours
    over_packed: float | None  # the library's prepacked product's; None: this torch has none
    error: float  # greatest, against float64 of the same bfloat16 numbers, over the greatest result
    int8_seconds: float  # the same weights in eight bits
    int8_share_of_bandwidth: float  # of half the bytes
    int8_share_of_ceiling: float
    int8_over_bfloat16: float  # the bfloat16 product's time over this one's
    int8_error: float  # as `error`, against the same: that of the weights is in it


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a measurement, 2 where there is nothing to measure."""
    options = _parser().parse_args(argv)
    if options.kind is not None and options.kind not in own_kinds():
        print(f"spaceserve bench product: this processor is no {options.kind}.", file=sys.stderr)
        return 2
    library = cpu_library() if options.kind is None else library_for(options.kind)
    if library is None:
        print("spaceserve bench product: this machine has no compiled operations; the log says why.", file=sys.stderr)
        return 2
    torch.set_num_threads(options.num_threads)
    found = []
    for outputs, inputs in options.shapes:
        print(f"{outputs} x {inputs}", file=sys.stderr)
        found += measure(library, outputs, inputs, options.rows, options.rounds)
    record = {
        "machine": machine(),
        "commit": commit(),
        "torch": torch.__version__,
        "kind": library.kind,
        "threads": options.num_threads,
        "rounds": options.rounds,
        "rows": [asdict(row) for row in found],
    }
    print(markdown(record))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "product.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        (options.out / "product.md").write_text(markdown(record), encoding="utf-8")
    return 0


def measure(library: CpuLibrary, outputs: int, inputs: int, rows: Sequence[int], rounds: int) -> list[Row]:
    """One shape, all arms in turn for every number of rows, `rounds` times."""
    size = outputs * inputs * 2
    copies = max(2, _WORKING_SET // size)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).mul_(inputs**-0.5).bfloat16()
    ours = [CompiledLinear(library, weight, None) for _ in range(copies)]
    eight = [CompiledLinear(library, weight, None, eight_bits=True) for _ in range(2 * copies)]
    packed = [PackedLinear(weight, None) for _ in range(copies)] if can_pack(torch.bfloat16) else []
    plain = [weight.clone() for _ in range(copies)]
    wide = [weight.float() for _ in range(copies)]
    threads = torch.get_num_threads()
    arms: dict[str, Arm] = {
        "ours": lambda x, n: ours[n](x),
        "int8": lambda x, n: [linear(x) for linear in eight[2 * n : 2 * n + 2]],
        "plain": lambda x, n: F.linear(x, plain[n]),
        "float32": lambda x, n: F.linear(x.float(), wide[n]),
        "read": lambda x, n: library.read(plain[n].data_ptr(), size // 4, threads),
        "dots": lambda x, n: library.dots(len(x) * outputs * inputs // (2 * _PAIRS * threads), threads),
    }
    if packed:
        arms["packed"] = lambda x, n: packed[n](pad_rows(x))
    found = []
    for count in rows:
        x = torch.randn(count, inputs, generator=generator).bfloat16()
        times: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(rounds):
            names = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
            for name in names:
                times[name].append(_through_all(arms[name], x, copies))
        times["int8"] = [seconds / 2 for seconds in times["int8"]]  # two products, so many bytes as one of the others
        times["half"] = [seconds / 2 for seconds in times["read"]]
        wanted = x.double() @ weight.double().T

        def error(*, eight_bits: bool, x: Tensor = x, wanted: Tensor = wanted) -> float:
            found = CompiledLinear(library, weight, None, wide=True, eight_bits=eight_bits)(x).double()
            return float((found - wanted).abs().max() / wanted.abs().max())

        seconds = {name: statistics.median(of_arm) for name, of_arm in times.items()}

        def over(arm: str, *names: str, times: dict[str, list[float]] = times) -> float:
            """The median over the rounds: the longest of these arms over that one."""
            least = map(max, zip(*(times[name] for name in names), strict=True))
            return float(statistics.median(other / own for other, own in zip(least, times[arm], strict=True)))

        found.append(
            Row(
                outputs=outputs,
                inputs=inputs,
                rows=count,
                seconds=seconds["ours"],
                bandwidth=size / seconds["read"],
                arithmetic=2.0 * count * outputs * inputs / seconds["dots"],
                share_of_bandwidth=over("ours", "read"),
                share_of_ceiling=over("ours", "read", "dots"),
                over_plain=over("ours", "plain"),
                over_float32=over("ours", "float32"),
                over_packed=over("ours", "packed") if packed else None,
                error=error(eight_bits=False),
                int8_seconds=seconds["int8"],
                int8_share_of_bandwidth=over("int8", "half"),
                int8_share_of_ceiling=over("int8", "half", "dots"),
                int8_over_bfloat16=over("int8", "ours"),
                int8_error=error(eight_bits=True),
            )
        )
    return found


def markdown(record: dict[str, Any]) -> str:
    """The table, with what it must be read with."""
    lines = [
        f"The product of few rows, {record['kind']}, {record['threads']} threads, {record['machine']}, torch "
        f"{record['torch']}, commit {record['commit']}; medians of {record['rounds']} rounds, arms in turn. Two of the "
        "arms do nothing but read as many bytes, and nothing but multiply as often: the ceiling is the longer of them. "
        "int8: the same weights in eight bits, beside reading half the bytes; errors are against float64 of the "
        "bfloat16 weights.",
        "",
        "| weights | rows | µs | GB/s there are | GFLOP/s there are | of bandwidth | of ceiling | F.linear / ours "
        "| in float32 / ours | prepacked / ours | error | int8 µs | of bandwidth | of ceiling | bfloat16 / int8 "
        "| error |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        packed = "–" if row["over_packed"] is None else f"{row['over_packed']:.2f}"
        lines.append(
            f"| {row['outputs']}×{row['inputs']} | {row['rows']} | {row['seconds'] * 1e6:.0f} | "
            f"{row['bandwidth'] / 1e9:.1f} | {row['arithmetic'] / 1e9:.0f} | {row['share_of_bandwidth']:.0%} | "
            f"{row['share_of_ceiling']:.0%} | {row['over_plain']:.2f} | {row['over_float32']:.2f} | {packed} | "
            f"{row['error']:.0e} | {row['int8_seconds'] * 1e6:.0f} | {row['int8_share_of_bandwidth']:.0%} | "
            f"{row['int8_share_of_ceiling']:.0%} | {row['int8_over_bfloat16']:.2f} | {row['int8_error']:.0e} |"
        )
    return "\n".join(lines) + "\n"


def _through_all(arm: Arm, x: Tensor, copies: int) -> float:
    """Seconds a product, over all copies of the weights."""
    return _seconds(lambda: [arm(x, number) for number in range(copies)]) / copies


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _shape(text: str) -> tuple[int, int]:
    outputs, _, inputs = text.partition("x")
    if not (outputs.isdigit() and inputs.isdigit()) or int(outputs) < 1 or int(inputs) < 2 or int(inputs) % 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; one is OUTPUTSxINPUTS, inputs even, like 2048x2048")
    return int(outputs), int(inputs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve bench product",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: spaceserve bench product --rows 1 8 16 --num-threads 2 --out product",
    )
    parser.add_argument("--shapes", type=_shape, nargs="+", default=SHAPES, help="OUTPUTSxINPUTS (768x768 …)")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="numbers of rows (1 … 64)")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each arm (7)")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads(), help="threads (as torch has them)")
    kinds = [kind for kinds in KINDS.values() for kind in kinds]
    parser.add_argument("--kind", choices=kinds, help="of processor that the product is compiled for (this one's best)")
    parser.add_argument("--out", type=Path, help="folder for product.json and .md")
    return parser
