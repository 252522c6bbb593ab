"""`python -m space_train.estimate`: memory and time of a training run, computed before it is begun.

python -m space_train.estimate --model 7b --method gated-lora --tokens 10M --gpu h100
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from space_model.model_error import ModelError

from space_train.costs import (
    GB,
    GPUS,
    SHAPES,
    UTILISATION,
    GpuSpec,
    ModelShape,
    TrainingEstimate,
    UnknownShape,
    estimate,
    fitted,
)
from space_train.train_plan import HeadForm, InvalidPlan, Method, TrainPlan


def to_text(found: TrainingEstimate, num_tokens: float, gpu: GpuSpec, utilisation: float) -> str:
    """Return the estimate as a table for a terminal."""
    plan, fits = found.plan, found.fits(gpu.memory)
    lines = [
        f"{found.shape.name}, {plan.method}: computed, not measured",
        f"  weights            {_count(found.shape.num_parameters)}, of which {_count(found.num_trained)} learn"
        if plan.trains_base
        else f"  weights            {_count(found.shape.num_parameters)} frozen, {_count(found.num_trained)} learn",
        f"  rows per token     1 real, {found.masks_per_token:.2f} masks",
        f"  at once            {plan.rows_per_step // plan.accumulate} texts of {plan.length} ids"
        + (", layers computed twice" if plan.activation_checkpointing and plan.trains_base else ""),
        "",
        f"  {'memory':<24}{'GB':>8}        {'operations per token':<24}{'GFLOP':>8}",
    ]
    left = [(part, f"{size / GB:8.1f}") for part, size in found.memory.items()]
    right = [(part, f"{value / 1e9:8.2f}") for part, value in found.flops.items()]
    if found.recomputed:
        right.append(("(done twice)", f"{found.recomputed / 1e9:8.2f}"))
    for index in range(max(len(left), len(right))):
        one, other = (side[index] if index < len(side) else ("", " " * 8) for side in (left, right))
        lines.append(f"  {one[0]:<24}{one[1]}        {other[0]:<24}{other[1]}".rstrip())
    total = (found.flops_per_token + found.recomputed) / 1e9
    lines.append(f"  {'in all':<24}{found.bytes / GB:8.1f}        {'in all':<24}{total:8.2f}")
    hours = found.seconds(num_tokens, gpu, utilisation) / 3600
    verification = "fits" if fits else f"does not fit ({found.bytes / GB:.0f} of {gpu.memory / GB:.0f} GB)"
    lines += [
        "",
        f"  {gpu.name}: {verification}; {_count(num_tokens)} tokens take {_hours(hours)} at {utilisation:.0%} of "
        f"{gpu.flops / 1e12:.0f} TFLOP/s",
    ]
    if not fits:
        lines.append(f"  {_cure(found, gpu)}")
    return "\n".join(lines) + "\n"


def _cure(found: TrainingEstimate, gpu: GpuSpec) -> str:
    plan = fitted(found.shape, found.plan, gpu.memory)
    if plan is None:
        return "Nothing makes it fit on one: use --method gated-lora, a GPU with more memory, or several (FSDP)."
    flags = [f"--accumulate {plan.accumulate}"] if plan.accumulate != found.plan.accumulate else []
    flags += ["--activation-checkpointing"] if plan.activation_checkpointing else []
    return f"With {' '.join(flags)} it fits: {estimate(found.shape, plan).bytes / GB:.0f} GB."


def to_markdown(shapes: Sequence[ModelShape], num_tokens: float, utilisation: float = UTILISATION) -> str:
    """Return the guide's table: every model with every method, on the smallest GPU it fits.

    Uses the least memory: one text at a time (`--accumulate`), and recomputed layers if the base is trained.
    """
    gpus = sorted(GPUS.values(), key=lambda gpu: (gpu.memory, gpu.flops))
    rates = {gpu.flops: " / ".join(g.name for g in gpus if g.flops == gpu.flops) for gpu in gpus}
    times = " | ".join(f"{_count(num_tokens)} tokens, {names}" for names in rates.values())
    lines = [
        f"| model | method | weights that learn | GPU memory, at the least | as planned | needs | {times} |",
        "|---" * (6 + len(rates)) + "|",
    ]
    for shape in shapes:
        for method in Method:
            head = HeadForm.NONE if method is Method.SFT else HeadForm.MLP
            plan = TrainPlan(method=method, head=head)
            sizes = sorted({gpu.memory for gpu in gpus})
            fit = next((fit for size in sizes if (fit := fitted(shape, plan, size))), None)
            least = replace(plan, accumulate=plan.rows_per_step, activation_checkpointing=plan.trains_base)
            found = estimate(shape, fit or least)
            if fit is None:
                needs = "several GPUs"
            else:
                needs = next(f"{size / GB:.0f} GB" for size in sizes if found.fits(size))
                needs += f", `--accumulate {fit.accumulate}`" if fit.accumulate > 1 else ""
                needs += ", `--activation-checkpointing`" if fit.activation_checkpointing else ""
            hours = [
                _hours(found.seconds(num_tokens, gpu, utilisation) / 3600) if fit else "–"
                for gpu in {gpu.flops: gpu for gpu in gpus}.values()
            ]
            lines.append(
                f"| {shape.name} | {method} | {_count(found.num_trained)} | {estimate(shape, least).bytes / GB:.0f} GB "
                f"| {found.bytes / GB:.0f} GB | {needs} "
                f"| {' | '.join(hours)} |"
            )
    return "\n".join(lines) + "\n"


def _count(number: float) -> str:
    """1234567 -> 1.2 M"""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def _hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"


def number(text: str) -> float:
    """Parse a number above 0, such as `10M`, `1.5G` or `1e7`."""
    units = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
    factor = units.get(text[-1:].lower(), 1.0)
    try:
        value = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0 such as 10M; got {text!r}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 for a model or plan that cannot be estimated."""
    own = TrainPlan()
    parser = argparse.ArgumentParser(
        prog="python -m space_train.estimate",
        description="Memory and time of a training run on one GPU, computed and not measured.",
        epilog="Example: python -m space_train.estimate --model 7b --method gated-lora --tokens 10M --gpu h100",
    )
    add = parser.add_argument
    add("--model", default="7b", help=f"{', '.join(SHAPES)}, or a checkpoint: folder or hub id (default: %(default)s)")
    add("--method", choices=[m.value for m in Method], default=own.method.value, help="(default: %(default)s)")
    add("--tokens", type=number, default=10e6, help="real tokens to read, masks not counted (default: 10M)")
    add("--gpu", choices=list(GPUS), default="h100", help="(default: %(default)s)")
    add("--utilisation", type=number, default=UTILISATION, help="share of its datasheet rate (default: %(default)s)")
    add("--length", type=int, default=own.length, help="ids of one row (default: %(default)s)")
    add("--rows-per-step", type=int, default=own.rows_per_step, help="rows of an update (default: %(default)s)")
    add("--accumulate", type=int, default=own.accumulate, help="parts an update comes in (default: %(default)s)")
    add("--num-masks", type=int, default=own.num_masks, help="(default: %(default)s)")
    add("--anchors-per-token", type=float, default=own.anchors_per_token, help="(default: %(default)s)")
    add("--lora-rank", type=int, default=own.lora_rank, help="(default: %(default)s)")
    add("--head", choices=[h.value for h in HeadForm], help="draft head (default: the method's own)")
    add("--optimiser", choices=["adamw", "muon"], default=own.optimiser, help="(default: %(default)s)")
    add("--activation-checkpointing", action="store_true", help="compute layers twice, keep less (full, sft)")
    add("--table", action="store_true", help="instead: 1b, 7b and 13b with every method, as Markdown")
    options = parser.parse_args(argv)
    gpu = GPUS[options.gpu]
    if options.table:
        print(to_markdown(list(SHAPES.values()), options.tokens, options.utilisation), end="")
        return 0
    try:
        method = Method(options.method)
        head = HeadForm(options.head) if options.head else HeadForm.NONE if method is Method.SFT else own.head
        same = ("length", "rows_per_step", "accumulate", "num_masks", "anchors_per_token", "lora_rank", "optimiser")
        plan = TrainPlan(
            method=method,
            head=head,
            activation_checkpointing=options.activation_checkpointing,
            **{name: getattr(options, name) for name in same},
        )
        found = estimate(ModelShape.of(options.model), plan)
    except (InvalidPlan, ModelError, UnknownShape) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(to_text(found, options.tokens, gpu, options.utilisation), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
