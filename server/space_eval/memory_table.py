"""`spaceserve bench memory`: what SPACE takes in memory, beside a server that drafts with a second model.

Computed from the models' shapes. With --check a small model of each kind is loaded here, and what memory grows by
stands beside what the same arithmetic says.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from space_model.model_error import ModelError
from space_model.testing import tiny_checkpoint
from space_server.startup.model_need import shown
from space_train.costs.model_shape import SHAPES, ModelShape, UnknownShape

from space_eval.bench.facts import commit, machine
from space_eval.flag_values import whole
from space_eval.make_model import SIZES, Size
from space_eval.memory_measured import measure
from space_eval.memory_sides import DRAFT_MODELS, Serving, Side, with_draft_model, with_space
from space_eval.written import write

_EPILOG = """\
examples:
  spaceserve bench memory
  spaceserve bench memory --models 7b --drafts tinyllama-1.1b --sequences 32 --tokens 4096
  spaceserve bench memory --models runs/mine/model --check --out memory
"""

COMPUTED = "Computed from shapes, not measured: weights, keys and values; activations are left out, for both alike."


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; 1 where --check could not measure; 2 for a model whose sizes cannot be read."""
    options = _parser().parse_args(argv)
    serving = Serving(options.sequences, options.tokens, options.k, options.rank, options.head_hidden)
    try:
        models = [ModelShape.of(name) for name in options.models]
        drafts = [DRAFT_MODELS.get(name) or ModelShape.of(name) for name in options.drafts]
    except (ModelError, UnknownShape) as error:
        print(f"spaceserve bench memory: {error}", file=sys.stderr)
        return 2
    record: dict[str, Any] = {"machine": machine(), "commit": commit(), "serving": asdict(serving), "models": {}}
    for model in models:
        sides = [with_space(model, serving), *(with_draft_model(model, draft, serving) for draft in drafts)]
        record["models"][model.name] = [asdict(side) | {"total": side.total} for side in sides]
    text = markdown(models, drafts, serving)
    if options.check:
        try:
            record["check"] = check()
        except subprocess.CalledProcessError as error:
            print(f"spaceserve bench memory: --check could not measure: {error.stderr.strip()}", file=sys.stderr)
            return 1
        text += "\n" + check_markdown(record["check"])
    print(text, end="")
    if options.out is not None:
        write(options.out, "memory", record, text)
    return 0


def markdown(models: Sequence[ModelShape], drafts: Sequence[ModelShape], serving: Serving) -> str:
    """The table, and what it was computed for."""
    lines = [
        f"{COMPUTED} {serving.num_sequences} sequences of {serving.num_tokens} tokens, k={serving.num_drafts}, numbers "
        f"of {8 * serving.itemsize} bits; SPACE: a gated adapter of rank {serving.rank} and a draft head of width "
        f"{serving.head_hidden}. *For drafts*: what plain decoding would not take.",
        "",
        "| model | drafts by | weights | adapter, draft head / second weights | keys and values | k+1 slots ahead "
        "| second keys and values | total | for drafts |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in models:
        for side in [with_space(model, serving), *(with_draft_model(model, draft, serving) for draft in drafts)]:
            sizes = (
                side.weights,
                side.drafting,
                side.keys_values,
                side.reserved,
                side.drafting_keys_values,
                side.total,
            )
            cells = " | ".join(shown(size) if size else "–" for size in (*sizes, side.for_drafts))
            lines.append(f"| {model.name} | {side.name} | {cells} |")
    return "\n".join(lines) + "\n"


def check(size: str = "125m", draft: str = "15m") -> dict[str, dict[str, dict[str, int]]]:
    """By server, and by part: bytes that the arithmetic says and bytes that memory grew by, with random weights here.

    Raises subprocess.CalledProcessError.
    """
    serving = Serving(4, 1024, 5, 32, SIZES[size].draft_head_width, on_cpu=True)
    num_slots = serving.num_sequences * (serving.num_tokens + serving.num_drafts + 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _random(folder / "space", SIZES[size], serving)
        _random(folder / "plain", SIZES[size], None)
        _random(folder / "draft", SIZES[draft], None)
        shape, small = ModelShape.of(str(folder / "plain")), ModelShape.of(str(folder / "draft"))
        return {
            "SPACE": _beside(with_space(shape, serving), measure([folder / "space"], num_slots)),
            "draft model": _beside(
                with_draft_model(shape, small, serving), measure([folder / "plain", folder / "draft"], num_slots)
            ),
        }


def _random(folder: Path, size: Size, serving: Serving | None) -> None:
    """A random Llama, with an adapter and a draft head where `serving` says of which sizes."""
    tiny_checkpoint(
        folder,
        "llama",
        vocab_size=size.vocab_size,
        num_masks=0 if serving is None else serving.num_drafts,
        draft_head=serving is not None,
        draft_head_width=size.draft_head_width,
        adapter_rank=None if serving is None else serving.rank,
        words=True,
        dtype="bfloat16",
        window=size.window,
        hidden_size=size.hidden_size,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        kv_heads=size.num_heads,
        head_dim=size.hidden_size // size.num_heads,
        intermediate_size=size.intermediate_size,
    )


def _beside(side: Side, found: dict[str, int]) -> dict[str, dict[str, int]]:
    keys_values = side.keys_values + side.reserved + side.drafting_keys_values
    return {
        "weights": {"computed": side.weights + side.drafting, "measured": found["weights"]},
        "keys and values": {"computed": keys_values, "measured": found["keys_values"]},
    }


def check_markdown(found: dict[str, dict[str, dict[str, int]]]) -> str:
    """Computed beside measured."""
    lines = [
        f"Measured here ({machine()}), a random Llama of 125M on the CPU in bfloat16, its output head packed beside "
        "its rows as on every CPU; the draft model has 15M:",
        "",
        "| server | part | computed | measured | measured / computed |",
        "|---|---|---|---|---|",
    ]
    for server, parts in found.items():
        for part, both in parts.items():
            computed, measured = both["computed"], both["measured"]
            lines.append(f"| {server} | {part} | {shown(computed)} | {shown(measured)} | {measured / computed:.3f} |")
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve bench memory",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--models", nargs="+", default=list(SHAPES), metavar="MODEL", help="1b, 7b, 13b, or checkpoints (all three)")
    add(
        "--drafts",
        nargs="+",
        default=["tinyllama-1.1b", "llama-160m"],
        metavar="MODEL",
        help=f"second models: {', '.join(DRAFT_MODELS)}, or checkpoints (tinyllama-1.1b llama-160m)",
    )
    add("--sequences", type=whole, default=8, help="at once (8)")
    add("--tokens", type=whole, default=2048, help="known of each (2048)")
    add("--k", type=whole, default=5, help="drafts per step (5)")
    add("--rank", type=whole, default=32, help="of the adapter (32, as training has it)")
    add("--head-hidden", type=whole, default=384, help="width of the draft head (384, as training has it)")
    add("--check", action="store_true", help="load small models here and put what they take beside what is computed")
    add("--out", type=Path, metavar="FOLDER", help="folder for memory.json and .md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
