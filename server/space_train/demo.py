"""Train the embedded model: `python -m space_train.demo --out runs/demo`. One command; killed at any point, it resumes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from space_train.corpus import build_corpus, read_texts
from space_train.network import Network, NetworkShape
from space_train.packed_tokens import PackedTokens, write_packed
from space_train.pretrain import PretrainPlan, bits_per_byte, pretrain
from space_train.schedule import Budget
from space_train.sources import all_sources
from space_train.stage import Measures
from space_train.tokenizer import SPECIAL_TOKENS, train_tokenizer, write_tokenizer

STAGES = ("corpus", "tokenizer", "tokens", "next-token", "space", "head", "export")
STREAMS = ("files", "functions")
# Every sixth file and every second function: enough text that more would not move the merges.
TOKENIZER_SAMPLE = {"files": 6, "functions": 2}
NUM_HELD_OUT_WINDOWS, HELD_OUT_LENGTH = 96, 256

DESCRIPTION = """\
Train the embedded model from nothing: gather permissively licensed Python, train a tokenizer, a small Llama, its mask
tokens and its draft head, and export a checkpoint with its card.

Stages, in order: corpus, tokenizer, tokens, next-token, space, head, export. Each leaves its result under --out; a stage
whose result is there is not run again, and a training stage that was killed continues from its last checkpoint (at most
90 seconds old). To repeat a stage, delete its result and those after it.

Budgets are minutes of work, not of the clock on the wall between a kill and a restart. The learning rate follows the
share of the budget that is used, so shorter budgets give smaller but finished models.
"""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of the recipe."""
    parser = argparse.ArgumentParser(
        prog="python -m space_train.demo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the run (default: runs/demo)")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="stop after this stage (default: export)")
    parser.add_argument("--seed", type=int, default=0, help="initial weights and order of the data (default: 0)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all)")
    parser.add_argument("--vocabulary", type=int, default=6144, help="token ids (default: 6144, 3.7 characters a token)")
    parser.add_argument("--minutes", type=float, default=55, help="next-token training, minutes (default: 55)")
    parser.add_argument("--space-minutes", type=float, default=30, help="mask training, minutes (default: 30)")
    parser.add_argument("--head-minutes", type=float, default=8, help="draft head alone, minutes (default: 8)")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile, which doubles the rate")
    return parser.parse_args(argv)


def held_out_windows(tokenizer: Tokenizer, path: Path, count: int, length: int) -> Tensor:
    """Fixed windows [count, length] from the starts of held-out files, spread over them."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(read_texts(path)), add_special_tokens=False):
        ids.extend([*encoding.ids, 0])
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return torch.tensor([ids[start : start + length] for start in starts.tolist()])


def bytes_of_ids(tokenizer: Tokenizer) -> Tensor:
    """UTF-8 bytes each id stands for, [V]; special tokens stand for none. (In byte-level BPE a character is a byte.)"""
    lengths = [len(tokenizer.id_to_token(index)) for index in range(tokenizer.get_vocab_size())]
    lengths[: len(SPECIAL_TOKENS)] = [0] * len(SPECIAL_TOKENS)
    return torch.tensor(lengths)


def prepare(options: argparse.Namespace) -> None:
    """The stages before training: corpus, tokenizer, token streams."""
    corpus, tokenizer_folder, tokens = (options.out / name for name in ("corpus", "tokenizer", "tokens"))
    if not (corpus / "corpus.json").exists():
        build_corpus(all_sources(options.out / "downloads"), corpus)
    if options.until == "corpus":
        return
    if not (tokenizer_folder / "tokenizer_config.json").exists():
        sample = [
            text
            for name, stride in TOKENIZER_SAMPLE.items()
            for index, text in enumerate(read_texts(corpus / f"{name}.jsonl"))
            if index % stride == 0
        ]
        print(f"tokenizer: training on {sum(map(len, sample)) / 1e6:.1f} MB", flush=True)
        write_tokenizer(train_tokenizer(sample, options.vocabulary), tokenizer_folder, NetworkShape(0).window)
    if options.until == "tokenizer":
        return
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokens.mkdir(parents=True, exist_ok=True)
    for name in STREAMS:
        if not (tokens / f"{name}.bin").exists():
            count = write_packed(tokenizer, read_texts(corpus / f"{name}.jsonl"), tokens / f"{name}.bin")
            print(f"tokens: {name} {count / 1e6:.2f} M", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe up to `--until`."""
    options = arguments(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    prepare(options)
    if STAGES.index(options.until) <= STAGES.index("tokens"):
        return 0
    tokenizer = Tokenizer.from_file(str(options.out / "tokenizer" / "tokenizer.json"))
    streams = {name: PackedTokens.open(options.out / "tokens" / f"{name}.bin", options.seed) for name in STREAMS}
    held_out = held_out_windows(tokenizer, options.out / "corpus" / "held_out.jsonl", NUM_HELD_OUT_WINDOWS, HELD_OUT_LENGTH)
    bytes_of_id = bytes_of_ids(tokenizer)
    shape = NetworkShape(tokenizer.get_vocab_size(), num_layers=5)
    network = Network(shape)
    print(f"network: {shape.num_parameters / 1e6:.2f} M parameters", flush=True)

    def evaluate() -> Measures:
        return bits_per_byte(network, held_out, bytes_of_id, use_autocast=True)

    plan = PretrainPlan(seed=options.seed, compile=not options.no_compile)
    pretrain(network, streams, evaluate, plan, Budget(minutes=options.minutes), options.out / "next_token.pt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
