"""`spaceserve convert`: its flags and messages; torch is imported when the flags have been parsed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from space_model.model_error import ModelError


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no token id (several: 32002,32003 or 32002 32003)") from None


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _size(text: str) -> int:
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2)):
        if text.endswith(unit) and text.removesuffix(unit).isdigit() and int(text.removesuffix(unit)):
            return int(text.removesuffix(unit)) * factor
    raise argparse.ArgumentTypeError(f"{text!r} is no size such as 512MiB or 1GiB")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spaceserve convert",
        description="Turn a downloaded checkpoint into one that spaceserve serves: safetensors, tokenizer.json, and a "
        "`space` section in config.json. SRC is only read.",
        epilog="example, a SPACE checkpoint of 5 masks that share one id:\n"
        "  spaceserve convert vicuna-v1.3-7b-space vicuna-space --mask-ids 32002 --num-masks 5",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="folder with config.json and weights, or a GGUF file")
    parser.add_argument("target", metavar="DST", type=Path, help="folder to write")
    parser.add_argument(
        "--mask-ids",
        nargs="+",
        action="extend",
        type=_ids,
        default=[],
        metavar="ID",
        help="token id that all masks share, or one each",
    )
    parser.add_argument("--num-masks", type=_positive, metavar="K", help="masks in a group [default: number of ids]")
    parser.add_argument(
        "--add-masks",
        type=_positive,
        default=0,
        metavar="N",
        help="append N new mask rows to the vocabulary, each the mean of the others, to be trained",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="[default: as it is; GGUF: bfloat16, but float32 or float16 where that is what most weights are]",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default=1024**3,
        metavar="SIZE",
        help="largest weight file, and about half the memory needed [default: 1GiB]",
    )
    parser.add_argument(
        "--adapter-dtype", choices=("int8",), help="eight bits for the gated adapter's matrices [default: as it is]"
    )
    parser.add_argument("--force", action="store_true", help="replace DST if it exists")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 1 after an error of one line on stderr."""
    options = parser().parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch  # seconds, which help and a wrong flag need not wait for

    from space_model.convert.convert import Wish, convert, what_is_missing

    ids = tuple(id for group in options.mask_ids for id in group)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    wish = Wish(
        ids,
        options.num_masks,
        options.add_masks,
        dtype,
        options.max_shard_size,
        options.force,
        options.adapter_dtype == "int8",
    )
    try:
        convert(options.source, options.target, wish, progress=True)
    except (ModelError, OSError) as error:
        print(f"spaceserve convert: {error}", file=sys.stderr)
        return 1
    lacks = what_is_missing(options.target)
    if lacks:
        print(f"spaceserve convert: {options.target} is written, and is not ready: {lacks}", file=sys.stderr)
        return 1
    print(f"{options.target} is ready: spaceserve serve --model {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
