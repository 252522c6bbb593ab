"""Train the embedded model: `python -m space_train.demo --out runs/demo`. Killed at any point, it resumes."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from space_common.version import commit
from space_model.checkpoint.checkpoint import Checkpoint
from tokenizers import Tokenizer

from space_train.data.corpus import (
    END_OF_TEXT_ID,
    FIRST_MASK_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    all_sources,
    build_corpus,
    bytes_of_ids,
    characters_per_token,
    held_out_windows,
    read_texts,
    train_tokenizer,
    write_tokenizer,
)
from space_train.data.rows import MixedRows, PackedExamples, PackedTokens, RowStream, TokenRows, write_packed
from space_train.data.train_batch import Texts
from space_train.networks.network import NetworkShape, TrainNetwork, export, load_llama
from space_train.networks.trainee import Trainee
from space_train.reports import CardFacts, StageRecord, card
from space_train.run_folder import Measures
from space_train.self_generation.loops import LoopsToUnlearn, line_ends
from space_train.self_generation.self_generate import own_examples, write_own_texts
from space_train.session import load_base
from space_train.train_plan import Budget, LearningRate, Method, TrainPlan
from space_train.training.checkpoint import HEAD_FILE, read_head
from space_train.training.pretrain import PretrainPlan, bits_per_byte, can_compile, pretrain
from space_train.training.trainer import held_out_figures, train

STAGES = ("corpus", "tokenizer", "tokens", "next-token", "own-text", "space", "head", "export")
STREAMS = ("files", "functions")
FUNCTION_SHARE = 0.4
OWN_SHARE = 1 / 3
OWN_PROMPT, OWN_LENGTH = 64, 256
# Every sixth file and every second function: more text would not change the merges.
TOKENIZER_SAMPLE = {"files": 6, "functions": 2}

DESCRIPTION = """\
Train the embedded model from nothing: gather permissively licensed Python, train a tokenizer, a small Llama, its mask
tokens and its draft head, and export a checkpoint with its card.

Stages, in order: corpus, tokenizer, tokens, next-token, own-text, space, head, export. Each leaves its
result under --out; a stage whose result is there is not run again, and a stage that was killed continues from its last
checkpoint (at most 90 seconds old). To repeat a stage, delete its result and those after it.

Budgets are minutes of work: time between a kill and a restart does not count. The learning rate follows the share of
the budget that is used, so a shorter budget gives a smaller but finished model.

  python -m space_train.demo --out runs/demo                          about two hours on two cores
  python -m space_train.demo --out runs/quick --minutes 5 --space-minutes 3 --head-minutes 1 --own-texts 256
  python -m space_train.demo --out runs/demo --install server/space_demo
"""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of the recipe."""
    parser = argparse.ArgumentParser(
        prog="python -m space_train.demo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group("run").add_argument
    add("--out", type=Path, default=Path("runs/demo"), help="folder of the run (default: runs/demo)")
    add("--until", choices=STAGES, default=STAGES[-1], help="stop after this stage (default: export)")
    add("--install", type=Path, help="copy the finished checkpoint and its card into this folder")
    add("--start-from", type=Path, help="checkpoint of the same shape to train on from (default: random weights)")
    add("--remark", default="", help="a sentence for the card: what was special about this run")
    add("--seed", type=int, default=0, help="initial weights and order of the data (default: 0)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all)")
    add("--no-compile", action="store_true", help="do without torch.compile, which doubles the rate")
    add = parser.add_argument_group("budgets").add_argument
    add("--minutes", type=float, default=55, help="next-token training, minutes (default: 55)")
    add(
        "--loops-every",
        type=int,
        default=0,
        help="of so many updates, one unlearns made-up loops; 0: none (default: 0)",
    )
    add(
        "--unlearn-weight",
        type=float,
        default=0.0,
        help="weight of unlearning the model's own loops beside masks and head; 0: none (default: 0)",
    )
    add("--own-texts", type=int, default=1024, help="texts the base writes itself (default: 1024)")
    add("--space-minutes", type=float, default=30, help="masks and head, minutes (default: 30)")
    add("--head-minutes", type=float, default=0, help="draft head alone, minutes; 0: never (default: 0)")
    add(
        "--space-rate",
        type=float,
        default=1.0,
        help="factor of the learning rates of masks and head; what has settled wants less (default: 1)",
    )
    add("--tokens-per-step", type=int, default=8192, help="next-token batch (default: 8192)")
    add("--rows-per-step", type=int, default=8, help="rows of 256 in a mask batch (default: 8)")
    add = parser.add_argument_group("shape").add_argument
    add("--vocabulary", type=int, default=6144, help="token ids (default: 6144: 3.7 characters a token)")
    add("--hidden", type=int, default=256, help="hidden size (default: 256)")
    add("--layers", type=int, default=5, help="layers (default: 5)")
    add("--heads", type=int, default=4, help="attention heads of 64 (default: 4)")
    add("--intermediate", type=int, default=704, help="width of the MLP (default: 704)")
    add("--masks", type=int, default=5, help="mask tokens, at most 8 (default: 5)")
    return parser.parse_args(argv)


def prepare(options: argparse.Namespace) -> None:
    """Run the stages before training: corpus, tokenizer, token streams."""
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
    """Return the network sizes from the options."""
    heads = options.heads, max(1, options.heads // 2)
    shape = NetworkShape(vocab_size, options.hidden, options.layers, *heads)
    return replace(shape, intermediate_size=options.intermediate)


def keep_masks(source: Path, base: Path) -> None:
    """Give `base` the masks and the draft head of `source`, to continue training them; mask rows are in its weights."""
    section = json.loads((source / "config.json").read_text()).get("space")
    if section is None:
        return
    if section["draft_head"] is not None:
        shutil.copyfile(source / section["draft_head"]["file"], base / section["draft_head"]["file"])
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"space": section}, indent=1) + "\n")


class Recipe:
    """The training stages of one run: next tokens with this package's network, then masks and head as for any model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, options.out
        self.tokenizer_folder = self.out / "tokenizer"
        self.tokenizer = Tokenizer.from_file(str(self.tokenizer_folder / "tokenizer.json"))
        self.streams = {name: PackedTokens.open(self.out / "tokens" / f"{name}.bin", options.seed) for name in STREAMS}
        self.held_out_path = self.out / "corpus" / "held_out.jsonl"
        self.held_out = held_out_windows(self.tokenizer, self.held_out_path)
        self.bytes_of_id = bytes_of_ids(self.tokenizer)
        self.shape = network_shape(options, self.tokenizer.get_vocab_size())
        self.compile = not options.no_compile
        self.mask_ids = list(range(FIRST_MASK_ID, FIRST_MASK_ID + options.masks))
        self.stages: list[StageRecord] = []
        print(f"network: {self.shape.num_parameters / 1e6:.2f} M parameters", flush=True)

    def next_token(self) -> None:
        """Train the network and write it to `base`, a plain checkpoint."""
        options, network = self.options, TrainNetwork(self.shape)
        per_step, every = options.tokens_per_step, options.loops_every
        plan = PretrainPlan(seed=options.seed, tokens_per_step=per_step, loops_every=every, compile=self.compile)
        if options.start_from is not None:
            # Trained weights get a lower rate (measured: at half the rate two million tokens raised the held-out loss
            # from 2.78 to 3.15).
            rate = LearningRate(warmup=0.03, decay_from=0.1)
            plan = replace(plan, muon_rate=plan.muon_rate / 6, adam_rate=plan.adam_rate / 6, learning_rate=rate)
        budget, checkpoint = Budget(minutes=options.minutes), self.out / "next_token.pt"
        network.initialise(torch.Generator().manual_seed(options.seed))
        if options.start_from is not None:
            load_llama(network, options.start_from)

        def losses() -> Measures:
            return bits_per_byte(network, self.held_out, self.bytes_of_id)

        ends_line = line_ends(self.tokenizer)
        counters = pretrain(network, self.streams, losses, plan, budget, checkpoint, ends_line=ends_line)
        record = StageRecord("next token", counters.elapsed_seconds / 60, counters.num_tokens, counters.history)
        self.stages.append(record)
        if not (self.out / "base" / "config.json").exists():
            export(network, self.tokenizer_folder, self.out / "base", dtype=torch.float32)
            if options.start_from is not None:
                keep_masks(options.start_from, self.out / "base")

    def own_text(self) -> None:
        """Generate texts with the base for the masks to learn from."""
        options, file = self.options, self.out / "own_texts.jsonl"
        if not options.own_texts:
            return
        starts = self.streams["functions"].windows(0, options.own_texts, OWN_PROMPT)
        write_own_texts(
            self.out / "base",
            starts.tolist(),
            max_tokens=OWN_LENGTH - OWN_PROMPT,
            seed=options.seed,
            eos_stops=False,
            banned_ids=range(1, len(SPECIAL_TOKENS)),
            file=file,
        )

    def space(self, *, head_alone: bool) -> Path:
        """Train masks and head on the base, or then the head alone. Return the checkpoint's folder."""
        options = self.options
        share = options.space_rate  # of the rates
        plan = TrainPlan(
            method=Method.HEAD if head_alone else Method.FULL,
            budget=Budget(minutes=options.head_minutes if head_alone else options.space_minutes),
            num_masks=options.masks,
            length=OWN_LENGTH,
            rows_per_step=options.rows_per_step,
            ar_share=0.0 if head_alone else 0.25,
            mask_loss_weight=0.5,
            weight_decay=0.1,
            optimiser="muon",
            muon_rate=0.005 if head_alone else 0.01 * share,
            learning_rate=2e-3 * share,
            seed=options.seed + head_alone,
            compile=self.compile and not head_alone and can_compile(),
            checkpoint_seconds=90,
        )
        out: Path = self.out / ("head" if head_alone else "space")
        source = self.out / "space" / "model" if head_alone else self.out / "base"
        result = train(
            load_base(Checkpoint.open(source), plan),
            source,
            self.rows(plan),
            plan,
            out,
            tokenizer_size=self.shape.vocab_size,
            given_mask_ids=self.mask_ids,
            held_out=self.held_out_texts(),
            beside=None if head_alone else self.loops(),
            dtype=torch.bfloat16,
        )
        counters = result.counters
        history = [entry | {"bits_per_byte": entry["loss"] * self.bits_per_nat} for entry in counters.curve]
        name = "draft head alone" if head_alone else "masks and head"
        self.stages.append(StageRecord(name, counters.seconds / 60, counters.num_tokens, history))
        return out / "model"

    def loops(self) -> LoopsToUnlearn | None:
        """Return the loop unlearning, if enabled; its prompts are mostly starts of functions, as in use."""
        weight = self.options.unlearn_weight
        if not weight:
            return None
        streams = [(self.streams["functions"], 22), (self.streams["files"], 10)]
        return LoopsToUnlearn(streams, END_OF_TEXT_ID, PAD_ID, range(1, len(SPECIAL_TOKENS)), weight=weight)

    def rows(self, plan: TrainPlan) -> MixedRows:
        """Return rows of files and functions, with a third of own text if there is any."""
        own_share = OWN_SHARE if self.options.own_texts else 0.0
        shares = {"files": 1.0 - FUNCTION_SHARE, "functions": FUNCTION_SHARE}
        streams = [
            RowStream(TokenRows(self.streams[name], plan.length), share * (1.0 - own_share))
            for name, share in shares.items()
            if self.streams[name].holds(plan.length)
        ]
        if own_share:
            own = PackedExamples(
                own_examples(self.out / "own_texts.jsonl"), length=plan.length, seed=plan.seed, pad_id=PAD_ID
            )
            streams.append(RowStream(own, own_share, teaches=False))
        return MixedRows(streams, plan.seed)

    def held_out_texts(self) -> Texts:
        """Return the held-out windows as rows."""
        ids = self.held_out
        everywhere = torch.ones_like(ids, dtype=torch.bool)
        return Texts(ids, everywhere, torch.zeros_like(ids), torch.ones(len(ids), dtype=torch.bool))

    @property
    def bits_per_nat(self) -> float:
        """Return the bits per byte of held-out text that one nat per token amounts to."""
        targets = self.held_out[:, 1:]
        return targets.numel() / float(self.bytes_of_id[targets].sum()) / math.log(2)

    def finish(self, folder: Path, command: str) -> None:
        """Write the model card beside the checkpoint, with figures of the exported weights."""
        options = self.options
        plan = TrainPlan(method=Method.HEAD, num_masks=options.masks, precision="no")
        shipped = load_base(Checkpoint.open(folder), plan)
        trainee = Trainee(shipped, plan, self.mask_ids)
        assert trainee.head is not None
        read_head(trainee.head, folder / HEAD_FILE)
        figures = held_out_figures(trainee, self.held_out_texts())
        facts = CardFacts(
            command=command,
            commit=commit() or "unknown",
            seed=options.seed,
            threads=options.threads,
            shape=self.shape,
            num_masks=options.masks,
            characters_per_token=characters_per_token(self.tokenizer, self.held_out_path),
            num_own_texts=options.own_texts,
            remark=options.remark,
            stages=self.stages,
            final=figures | {"bits_per_byte": figures["loss"] * self.bits_per_nat},
            corpus=json.loads((self.out / "corpus" / "corpus.json").read_text()),
        )
        (folder / "README.md").write_text(card(facts))


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
    if last < STAGES.index("space"):
        return 0
    folder = recipe.space(head_alone=False)
    if last >= STAGES.index("head") and options.head_minutes:
        folder = recipe.space(head_alone=True)
    if last >= STAGES.index("export"):
        words = [word for word in (sys.argv[1:] if argv is None else argv) if word not in ("--remark", options.remark)]
        recipe.finish(folder, shlex.join(["python", "-m", "space_train.demo", *words]))
        print(f"exported to {folder}", flush=True)
        if options.install:
            for path in folder.iterdir():
                shutil.copyfile(path, options.install / path.name)
            print(f"installed in {options.install}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
