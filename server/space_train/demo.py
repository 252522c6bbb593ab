"""Train the embedded model: `python -m space_train.demo --out runs/demo`. Killed at any point, it resumes."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from space_train.card import CardFacts, StageRecord, card, current_commit, read_corpus
from space_train.corpus import build_corpus, read_texts
from space_train.draft_head import DraftHead
from space_train.export import export, load_llama
from space_train.held_out import bytes_of_ids, characters_per_token, held_out_windows
from space_train.network import Network, NetworkShape
from space_train.own_text import OwnTextPlan, write_own_text
from space_train.packed_tokens import PackedTokens, write_packed
from space_train.pretrain import PretrainPlan, bits_per_byte, pretrain
from space_train.sar_sft import SpacePlan, start_masks, teacher_forced_acceptance, train_space
from space_train.schedule import Budget, LearningRate
from space_train.sources import all_sources
from space_train.stage import Counters, Measures
from space_train.tokenizer import train_tokenizer, write_tokenizer

STAGES = ("corpus", "tokenizer", "tokens", "next-token", "own-text", "space", "head", "export")
STREAMS = ("files", "functions")
# Every sixth file and every second function: enough text that more would not move the merges.
TOKENIZER_SAMPLE = {"files": 6, "functions": 2}

DESCRIPTION = """\
Train the embedded model from nothing: gather permissively licensed Python, train a tokenizer, a small Llama, its mask
tokens and its draft head, and export a checkpoint with its card.

Stages, in order: corpus, tokenizer, tokens, next-token, own-text, space, head, export. Each leaves its result under
--out; a stage whose result is there is not run again, and a stage that was killed continues from its last checkpoint
(at most 90 seconds old). To repeat a stage, delete its result and those after it.

Budgets are minutes of work: time between a kill and a restart does not count. The learning rate follows the share of
the budget that is used, so a shorter budget gives a smaller but finished model.

  python -m space_train.demo --out runs/demo                          about two hours on two cores
  python -m space_train.demo --out runs/quick --minutes 5 --space-minutes 3 --head-minutes 1 --own-batches 2
  python -m space_train.demo --out runs/demo --install server/space_demo
"""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of the recipe."""
    parser = argparse.ArgumentParser(
        prog="python -m space_train.demo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    run = parser.add_argument_group("run")
    run.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the run (default: runs/demo)")
    run.add_argument("--until", choices=STAGES, default=STAGES[-1], help="stop after this stage (default: export)")
    run.add_argument("--install", type=Path, help="copy the finished checkpoint and its card into this folder")
    run.add_argument(
        "--start-from", type=Path, help="checkpoint of the same shape to train on from (default: random weights)"
    )
    run.add_argument("--remark", default="", help="a sentence for the card: what was special about this run")
    run.add_argument("--seed", type=int, default=0, help="initial weights and order of the data (default: 0)")
    run.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all)")
    run.add_argument("--no-compile", action="store_true", help="do without torch.compile, which doubles the rate")
    budget = parser.add_argument_group("budgets")
    budget.add_argument("--minutes", type=float, default=55, help="next-token training, minutes (default: 55)")
    budget.add_argument("--own-batches", type=int, default=8, help="batches of 128 own texts (default: 8)")
    budget.add_argument("--space-minutes", type=float, default=30, help="masks and head, minutes (default: 30)")
    budget.add_argument(
        "--head-minutes", type=float, default=0, help="draft head alone, minutes; 0: never (default: 0)"
    )
    budget.add_argument("--tokens-per-step", type=int, default=8192, help="next-token batch (default: 8192)")
    shape = parser.add_argument_group("shape")
    shape.add_argument("--vocabulary", type=int, default=6144, help="token ids (default: 6144: 3.7 characters a token)")
    shape.add_argument("--hidden", type=int, default=256, help="hidden size (default: 256)")
    shape.add_argument("--layers", type=int, default=5, help="layers (default: 5)")
    shape.add_argument("--heads", type=int, default=4, help="attention heads of 64 (default: 4)")
    shape.add_argument("--intermediate", type=int, default=704, help="width of the MLP (default: 704)")
    shape.add_argument("--masks", type=int, default=5, help="mask tokens, at most 8 (default: 5)")
    return parser.parse_args(argv)


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


def network_shape(options: argparse.Namespace, vocab_size: int) -> NetworkShape:
    """The sizes the options ask for."""
    return NetworkShape(
        vocab_size,
        hidden_size=options.hidden,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=max(1, options.heads // 2),
        intermediate_size=options.intermediate,
    )


class Recipe:
    """The training stages of one run, one after the other on the same network."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, out = options, options.out
        self.tokenizer_folder = out / "tokenizer"
        self.tokenizer = Tokenizer.from_file(str(self.tokenizer_folder / "tokenizer.json"))
        self.streams = {name: PackedTokens.open(out / "tokens" / f"{name}.bin", options.seed) for name in STREAMS}
        self.held_out_path = out / "corpus" / "held_out.jsonl"
        self.held_out = held_out_windows(self.tokenizer, self.held_out_path)
        self.bytes_of_id = bytes_of_ids(self.tokenizer)
        self.network = Network(network_shape(options, self.tokenizer.get_vocab_size()))
        self.head = DraftHead(options.hidden)
        self.compile = not options.no_compile
        self.stages: list[StageRecord] = []
        print(f"network: {self.network.shape.num_parameters / 1e6:.2f} M parameters", flush=True)

    def losses(self) -> Measures:
        """Held-out next-token figures."""
        return bits_per_byte(self.network, self.held_out, self.bytes_of_id)

    def losses_and_acceptance(self) -> Measures:
        """The same, and the agreement of every draft with and without the head."""
        return self.losses() | teacher_forced_acceptance(self.network, self.head, self.held_out, self.options.masks)

    def record(self, name: str, counters: Counters) -> None:
        """Keep what the card tells of a stage."""
        self.stages.append(StageRecord(name, counters.elapsed_seconds / 60, counters.num_tokens, counters.history))

    def next_token(self) -> None:
        options = self.options
        plan = PretrainPlan(seed=options.seed, tokens_per_step=options.tokens_per_step, compile=self.compile)
        budget, checkpoint = Budget(minutes=options.minutes), options.out / "next_token.pt"
        self.network.initialise(torch.Generator().manual_seed(options.seed))
        if options.start_from is not None:
            load_llama(self.network, options.start_from)
        self.record("next token", pretrain(self.network, self.streams, self.losses, plan, budget, checkpoint))

    def own_text(self) -> None:
        path = self.options.out / "tokens" / "own.bin"
        if self.options.own_batches and not path.exists():
            plan = OwnTextPlan(seed=self.options.seed, num_batches=self.options.own_batches)
            write_own_text(self.network, self.streams["functions"], self.tokenizer_folder, path, plan)
        if path.exists():
            self.streams["own"] = PackedTokens.open(path, self.options.seed, aligned=True)

    def space(self, *, head_alone: bool) -> None:
        options = self.options
        plan = SpacePlan(
            seed=options.seed + head_alone,
            num_masks=options.masks,
            tokens_per_step=options.tokens_per_step // 4,
            train_network=not head_alone,
            muon_rate=0.005 if head_alone else 0.01,
            learning_rate=LearningRate(warmup=0.03, decay_from=0.2),
            compile=self.compile,
        )
        if not head_alone:
            generator = torch.Generator().manual_seed(options.seed)
            start_masks(self.network, options.masks, generator)
            self.head.initialise(generator)
        name = "head" if head_alone else "space"
        budget = Budget(minutes=options.head_minutes if head_alone else options.space_minutes)
        checkpoint, assess = options.out / f"{name}.pt", self.losses_and_acceptance
        counters = train_space(self.network, self.head, self.streams, assess, plan, budget, checkpoint, name=name)
        self.record("draft head alone" if head_alone else "masks and head", counters)

    def export(self, command: str) -> Path:
        """Write the checkpoint and its card; its folder."""
        options = self.options
        folder: Path = options.out / "model"
        with torch.no_grad():
            # The figures of the card are those of the weights as shipped.
            for parameter in (*self.network.parameters(), *self.head.parameters()):
                parameter.copy_(parameter.to(torch.bfloat16).float())
        export(self.network, self.head, self.tokenizer_folder, folder, num_masks=options.masks)
        facts = CardFacts(
            command=command,
            commit=current_commit(),
            seed=options.seed,
            threads=options.threads,
            shape=self.network.shape,
            num_masks=options.masks,
            characters_per_token=characters_per_token(self.tokenizer, self.held_out_path),
            num_own_texts=options.own_batches * OwnTextPlan().batch_size,
            remark=options.remark,
            stages=self.stages,
            final=self.losses_and_acceptance(),
            corpus=read_corpus(options.out / "corpus" / "corpus.json"),
        )
        (folder / "README.md").write_text(card(facts))
        return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe up to `--until`."""
    options = arguments(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    prepare(options)
    last = STAGES.index(options.until)
    if last <= STAGES.index("tokens"):
        return 0
    recipe = Recipe(options)
    recipe.next_token()
    if last >= STAGES.index("own-text"):
        recipe.own_text()
    if last >= STAGES.index("space"):
        recipe.space(head_alone=False)
    if last >= STAGES.index("head") and options.head_minutes:
        recipe.space(head_alone=True)
    if last >= STAGES.index("export"):
        words = [word for word in (sys.argv[1:] if argv is None else argv) if word not in ("--remark", options.remark)]
        command = shlex.join(["python", "-m", "space_train.demo", *words])
        folder = recipe.export(command)
        print(f"exported to {folder}", flush=True)
        if options.install:
            for path in folder.iterdir():
                shutil.copyfile(path, options.install / path.name)
            print(f"installed in {options.install}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
