"""`spaceserve train`: turn a causal language model into a SPACE model, or train its draft head."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from space_common.process import WorkerError, sleep_soon
from space_model.model_error import ModelError

from space_train.data.records import DataError
from space_train.train_plan import (
    MOST_OWN_TOKENS,
    PUBLISHED_SIZES,
    Anchors,
    Budget,
    DraftObjective,
    HeadForm,
    InvalidPlan,
    Method,
    OwnTextError,
    TrainPlan,
    paper,
)
from space_train.training.published_options import options_table

BY_BUDGET = -1  # --own-data without a number

DESCRIPTION = """\
Turn a causal language model into a SPACE model: one that drafts for itself. The result is a folder that
`spaceserve serve --model OUT/model` loads as it is.

  --method gated-lora   the base is frozen; low-rank adapters and mask inputs act on mask rows alone, so the model's
                        own text stays exactly what it was (default)
  --method full         all weights learn masks; the ordinary loss is kept, so the model learns the data too
  --method sft          ordinary fine-tuning without masks: the control
  --method head         only a draft head, for a checkpoint that has masks already; or only a recurrent head

Examples

  spaceserve train --model Qwen/Qwen3-0.6B --own-data --minutes 60 --out runs/qwen
  spaceserve train --model Qwen/Qwen3-0.6B --data chats.jsonl --out runs/chats
  spaceserve train --model BASE --data chats.jsonl --self-generate 2000 --out runs/own
  spaceserve train --model BASE --data alpaca.json --preset paper --out runs/paper
  spaceserve train --model published-space --data chats.jsonl --method head --minutes 30 --out runs/head
  spaceserve train --model runs/chats/model --data chats.jsonl --method head --head none --recurrent-head 1536 --out r
  accelerate launch --num_processes 8 -m space_train --model BASE --data chats.jsonl --out runs/many
  accelerate launch --num_processes 8 --use_fsdp -m space_train --method full --model BASE --data ... --out runs/large

Data: JSON lines or JSON in the forms of alpaca, ShareGPT, OpenAI messages, prompt/completion or text; a text file, a
folder of them, or the id of a dataset on the Hugging Face hub. Only answers are learnt, plain text whole.

Without data: with --own-data the model writes all texts, over a frozen base (gated-lora, head). It writes user turns
behind its chat template's header and answers them; other prompts are topics of ours, and signatures and docstrings of
the installed Python packages. A model without a chat template goes on with code, with docstrings, and from the start
of a text. Left out are duplicates, loops, empty answers and user turns without an end; answers that are cut at
--self-generate-tokens are kept. OUT keeps prompts and texts: a run that was killed goes on with the same ones. With
--minutes, writing ends when half of them are used: texts that have begun are then kept as far as they go.

Figures, on held-out records: mask_1 … mask_k, head_1 … head_k are the share of places at which draft 1 … k, without
and with the draft head, is the model's own most likely token, given that the drafts before it are right;
tokens_per_step is what these shares amount to in greedy decoding: 1 + head_1 + head_1·head_2 + … Those of a recurrent
head are recurrent_1 … recurrent_K and recurrent_tokens_per_step.

A run that is stopped or killed goes on where it was when the same command is given again, without --restart. Ctrl-C
ends it after the current update, a second one at once. A command that is refused changes nothing. A run on the folder
that another left starts from its adapter (or masks) and draft head, where they are of this run's kind, and has their
sizes where no flag gives another.
"""

EPILOG = f"""\
The published training script's options, and ours:

{options_table()}
"""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    own = TrainPlan()
    parser = argparse.ArgumentParser(
        prog="spaceserve train",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("what").add_argument
    add("--model", required=True, help="folder, GGUF file or hub id of the model; smollm2 or demo")
    add("--data", nargs="+", action="extend", help="file, folder or dataset id; several are put together")
    add(
        "--own-data",
        nargs="?",
        type=int,
        const=BY_BUDGET,
        metavar="N",
        help="instead of --data: N prompts that the model answers itself (default: a third of --minutes or --flops, "
        "what --steps or --tokens read four times, else 2000)",
    )
    add(
        "--decontaminate",
        type=Path,
        nargs="+",
        action="extend",
        metavar="FILE",
        help="prompts of an evaluation, JSON lines or text: no text that shares 13 words in a row with them is trained "
        "on",
    )
    add("--out", type=Path, required=True, help="folder of the run; the checkpoint is written to OUT/model")
    add("--method", choices=[m.value for m in Method], help=f"what is trained (default: {own.method.value})")
    add("--preset", choices=["paper"], help="the published recipe; other flags may change parts of it")
    add("--split", default="train", help="of a dataset (default: train)")
    add("--template", help="chat template: a name or a .jinja file (default: the tokenizer's own); OUT/model keeps it")
    add("--limit", type=int, help="only so many records (default: all)")
    add(
        "--held-out-share",
        type=float,
        default=0.02,
        help="of the records, or of its own texts, for the figures (default: 0.02)",
    )
    add("--restart", action="store_true", help="forget the run that OUT holds, but not own texts that fit")

    add = parser.add_argument_group("how long (the first that is used up; default: 2 epochs)").add_argument
    add("--epochs", type=float, help="rounds through the data; its own texts beside it do not count")
    add("--steps", type=int, help="updates")
    add("--minutes", type=float, help="of this command: start, own texts (at most half), evaluations and saves count")
    add("--tokens", type=float, help="real tokens read, masks not counted (1e7 is fine)")
    add("--flops", type=float, help="operations of the model, over all rows; its own texts count")

    add = parser.add_argument_group("rows").add_argument
    add("--num-masks", type=int, help=f"mask tokens k: most drafts a step can have (default: {own.num_masks})")
    add(
        "--mask-ids",
        type=int,
        nargs="+",
        action="extend",
        help="ids for them, one or k (default: spare ids, else new ones)",
    )
    add("--shared-mask-id", action="store_true", default=None, help="one id for all masks, as published")
    add("--length", type=int, help=f"ids of one row (default: {own.length})")
    add(
        "--rows-per-step",
        type=int,
        help=f"rows of one update, over all processes (default: {own.rows_per_step}, fewer where --minutes would hold "
        "few updates)",
    )
    add("--accumulate", type=int, help="parts an update is computed in, to save memory (default: by this machine's)")
    add("--no-pack", action="store_true", help="one text a row")
    add(
        "--anchors",
        choices=[a.value for a in Anchors],
        help="masks stand behind many tokens of a text, the anchors, or behind one (default: many)",
    )
    add("--anchors-per-token", type=float, help=f"anchors per token of a text (default: {own.anchors_per_token})")
    add(
        "--keep",
        type=float,
        help="a mask stands at this share of the anchors that have the one before it; 1: all masks at each "
        f"(default: {own.keep})",
    )
    add("--least", type=float, help=f"but each mask at no less than this share of all anchors (default: {own.least})")
    add("--fixed-cuts", action="store_true", default=None, help="the same anchors in every epoch (default: new ones)")

    add = parser.add_argument_group("losses").add_argument
    add("--ar-share", type=float, help=f"share of rows without masks (default: {own.ar_share})")
    add("--mask-loss-weight", type=float, help=f"against the ordinary loss's 1 (default: {own.mask_loss_weight})")
    add("--head-loss-weight", type=float, help=f"of the draft head's loss (default: {own.head_loss_weight})")
    add("--no-distill", action="store_true", help="learn the text's token, not the model's own distribution")
    add(
        "--loss",
        choices=[o.value for o in DraftObjective],
        help="against the model's own distribution: cross-entropy, the chance that a sampled draft is rejected, minus "
        "the log of its acceptance, or minus a step's expected accepted drafts (default: cross-entropy)",
    )
    add("--focal", action="store_true", default=None, help="weigh a mask by its own chance that it is reached")
    add("--self-generate", type=int, default=0, help="prompts of --data that the model continues itself (default: 0)")
    add(
        "--self-generate-tokens",
        type=int,
        help=f"ids of each, or of each answer (default: {MOST_OWN_TOKENS}, at most half of --length)",
    )
    add(
        "--own-share",
        type=float,
        help="of the rows that are its own texts, beside --data (default: 0.5; less if they are few)",
    )

    add = parser.add_argument_group("draft head").add_argument
    add("--head", choices=[h.value for h in HeadForm], help=f"its form (default: {own.head.value})")
    add("--head-hidden", type=int, help=f"its width, or rank (default: {own.head_hidden})")
    add(
        "--head-scale",
        type=float,
        help="factor of the previous token's embedding, which is small beside the hidden state that the head joins it "
        f"to (default: {own.head_scale:g})",
    )

    group = parser.add_argument_group(
        "recurrent head (gated-lora, head)",
        "drafts token by token from the last accepted token's hidden state, without mask rows: cheap in full batches",
    )
    add = group.add_argument
    add("--recurrent-head", type=int, metavar="N", help="its inner size; 0: none (default: 0)")
    add("--recurrent-drafts", type=int, metavar="K", help="most drafts of a step (default: --num-masks)")
    add(
        "--draft-vocab",
        type=int,
        metavar="D",
        help=f"it drafts the D most frequent ids of the texts (default: {own.draft_vocab}, at most all)",
    )
    add("--recurrent-loss-weight", type=float, help=f"of its loss (default: {own.recurrent_loss_weight})")

    add = parser.add_argument_group("adapters (gated-lora)").add_argument
    add("--lora-rank", type=int, help=f"rank (default: {own.lora_rank})")
    add("--lora-alpha", type=float, help=f"the delta is scaled by alpha/rank (default: {own.lora_alpha:g})")

    add = parser.add_argument_group("optimiser").add_argument
    add("--learning-rate", type=float, help="peak, of AdamW (default: 5e-5 where all weights learn, else 1e-3)")
    add("--optimiser", choices=["adamw", "muon"], help="muon: for matrices of small models (default: adamw)")
    add("--muon-rate", type=float, help=f"peak, of Muon (default: {own.muon_rate})")
    add("--warmup", type=float, help=f"share of the run (default: {own.warmup})")
    add("--decay-from", type=float, help=f"share from which the rate falls to 0 (default: {own.decay_from})")
    add("--cosine", action="store_true", default=None, help="half a cosine behind the warm-up instead, as published")
    add("--clip-norm", type=float, help=f"longest gradient of an update (default: {own.clip_norm:g})")
    add("--weight-decay", type=float, help=f"(default: {own.weight_decay:g})")
    add("--seed", type=int, help=f"initial weights, order and places (default: {own.seed})")

    add = parser.add_argument_group("machine").add_argument
    add(
        "--precision",
        choices=["auto", "bf16", "no"],
        default="auto",
        help="of products; no: float32; auto: bf16, on a CPU only where it has such products (default: auto)",
    )
    add("--weights", choices=["float32", "bfloat16"], default="bfloat16", help="as written (default: bfloat16)")
    add("--activation-checkpointing", action="store_true", default=None, help="compute twice, keep less (full, sft)")
    add("--compile", action="store_true", default=None, help="torch.compile the model: slow start, faster updates")
    add("--checkpoint-seconds", type=float, help=f"between saves (default: {own.checkpoint_seconds:g})")
    add("--checkpoint-steps", type=int, help="updates between saves, instead")
    add(
        "--evaluations",
        type=int,
        help=f"evaluations on held-out records, on fewer of them in short runs (default: {own.evaluations})",
    )
    return parser.parse_args(argv)


def plan_of(options: argparse.Namespace) -> TrainPlan:
    """Return the plan of the options: the preset, overridden by every flag given."""
    plan = paper(TrainPlan(**PUBLISHED_SIZES)) if options.preset == "paper" else TrainPlan()
    names = set(TrainPlan.__dataclass_fields__) - {"budget", "method", "head", "anchors", "loss"}
    if options.precision == "auto":  # chosen at the start of the run, by machine
        names.remove("precision")
    given = {name: getattr(options, name) for name in names if getattr(options, name, None) is not None}
    for name, kind in (("method", Method), ("head", HeadForm), ("anchors", Anchors), ("loss", DraftObjective)):
        value = getattr(options, name)
        if value is not None:
            given[name] = kind(value)
    if options.no_pack:
        given["pack"] = False
    if options.no_distill:
        given["distill"] = False
    if given.get("method") is Method.SFT:
        given |= {"head": HeadForm.NONE}
    limits = {name: getattr(options, name) for name in ("epochs", "steps", "minutes", "tokens", "flops")}
    limits = {name: value for name, value in limits.items() if value is not None}
    check_source(options)
    if options.own_share is not None and not 0 < options.own_share <= 1:
        raise InvalidPlan(
            f"--own-share must be above 0 and at most 1; got {options.own_share:g}. For no texts of its own leave "
            "--self-generate out."
        )
    for name, value in limits.items():
        if value == 0:
            raise InvalidPlan(f"--{name} 0 would train nothing: give a number above 0.")
    if limits:
        try:
            given["budget"] = Budget(**limits)
        except ValueError as error:
            raise InvalidPlan(str(error)) from error
    return replace(plan, **given)


def check_source(options: argparse.Namespace) -> None:
    """Raise InvalidPlan unless the options name one source of texts."""
    if (options.data is None) == (options.own_data is None):
        given = "are both given: leave one out" if options.data else "are both missing: give one"
        raise InvalidPlan(
            f"--data and --own-data {given}. --data FILE trains on texts that you have, --own-data on texts that the "
            "model writes itself."
        )
    if options.own_data is None:
        return
    if options.own_data < 1 and options.own_data != BY_BUDGET:
        raise InvalidPlan(f"--own-data must be at least 1; got {options.own_data}.")
    for name, value in (("--self-generate", options.self_generate), ("--own-share", options.own_share)):
        if value:
            raise InvalidPlan(f"{name} is of --data: with --own-data all texts are the model's own. Leave it out.")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 2 after one line of explanation, or 130 for a stopped run that can be resumed."""
    started = time.monotonic()
    options = arguments(argv)
    try:
        from space_train.run_folder import holds_state
        from space_train.session import run_session
        from space_train.training.optimiser import Diverged
        from space_train.training.trainer import Interrupted, stopped_at_once, what_is_kept
    except ModuleNotFoundError as missing:
        print(f"spaceserve train needs {missing.name}: pip install 'spaceserve[train]'", file=sys.stderr)
        return 2
    try:
        run_session(options, plan_of(options), started=started)
    except (InvalidPlan, DataError, ModelError, OwnTextError, WorkerError) as error:
        print(f"spaceserve train: {error}", file=sys.stderr)
        return 2
    except Diverged as error:
        restart = " To begin anew there, add --restart." if holds_state(options.out) else ""
        print(f"spaceserve train: {error} {what_is_kept(options.out)}{restart}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"spaceserve train: {str(error).rstrip('.')}. {what_is_kept(options.out)}", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        print(f"spaceserve train: {stopped}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print(f"spaceserve train: {stopped_at_once(options.out)}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sleep_soon(os.environ)  # before torch loads OpenMP
    sys.exit(main())
