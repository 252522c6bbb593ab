"""`spaceserve bench make-model`: a checkpoint with random weights, for measuring speed at a size one has no model of.

Its text means nothing and its masks predict nothing: ask for synthetic acceptance, and ignore EOS.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging as transformers_logging

from space_model.random_checkpoint import write_random_llama

NUM_MASKS = 5


@dataclass(frozen=True)
class Size:
    """A Llama's shape; embedding and output head share their weights."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    window: int
    draft_head_width: int
    kv_heads: int | None = None  # None: as many as heads

    @property
    def num_weights(self) -> int:
        """Number of weights without norms and draft head."""
        kv_size = self.hidden_size * (self.kv_heads or self.num_heads) // self.num_heads
        per_layer = 2 * self.hidden_size * (self.hidden_size + kv_size)
        per_layer += 3 * self.hidden_size * self.intermediate_size
        return self.vocab_size * self.hidden_size + self.num_layers * per_layer


SIZES: Mapping[str, Size] = {
    "15m": Size(288, 6, 6, 768, 32000, 2048, 96),
    "125m": Size(768, 12, 12, 2560, 32000, 8192, 256),
    "1.1b": Size(2048, 22, 32, 5632, 32000, 2048, 512, kv_heads=4),
}
"""Sizes by their name in the command."""

_EPILOG = """\
examples:
  spaceserve bench make-model --size 125m llama-125m
  spaceserve bench overhead --model llama-125m --synthetic-acceptance .78
  spaceserve serve --model llama-125m --synthetic-acceptance .78
"""


def random_llama(
    folder: Path, size: Size, *, num_masks: int = NUM_MASKS, draft_head: bool = True, seed: int = 0
) -> Path:
    """Write a random bfloat16 Llama of this size to `folder`, with mask ids and a byte-level tokenizer."""
    return write_random_llama(
        folder,
        vocab_size=size.vocab_size,
        num_masks=num_masks,
        draft_head_width=size.draft_head_width if draft_head else None,
        seed=seed,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.kv_heads or size.num_heads,
        head_dim=size.hidden_size // size.num_heads,
        max_position_embeddings=size.window,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 2 if the folder cannot be written."""
    parser = argparse.ArgumentParser(
        prog="spaceserve bench make-model",
        description="Write a Llama with random weights, five mask ids and a byte-level tokenizer, ready to be served.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shapes = ", ".join(f"{name} ({size.num_weights / 1e6:.0f} million weights)" for name, size in SIZES.items())
    parser.add_argument("--size", choices=SIZES, default="125m", help=f"{shapes} [125m]")
    parser.add_argument("--no-draft-head", action="store_true", help="masks alone, as the paper has them [with one]")
    parser.add_argument("--seed", type=int, default=0, help="of the weights [0]")
    parser.add_argument("folder", type=Path, metavar="OUT", help="folder to make; it must not hold a checkpoint yet")
    options = parser.parse_args(argv)
    if (options.folder / "config.json").exists() or options.folder.is_file():
        return _fail(f"{options.folder} exists already; name a new folder.")
    transformers_logging.disable_progress_bar()
    try:
        random_llama(options.folder, SIZES[options.size], draft_head=not options.no_draft_head, seed=options.seed)
    except OSError as error:
        return _fail(f"{options.folder} cannot be written: {error.strerror or error}.")
    sys.stdout.write(f"{options.folder}\n")
    return 0


def _fail(reason: str) -> int:
    sys.stderr.write(f"spaceserve bench make-model: {reason}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
