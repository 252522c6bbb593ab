"""Flags of the evaluations of drafts, speed and exactness; nothing here imports torch, so that help is immediate."""

import argparse
from pathlib import Path

from space_common.worker.choices import ASKED_WEIGHTS, KV_DTYPES

from space_eval.flags import number_in, whole, whole_from

ACCEPTANCE = """\
Runs every prompt alone through the worker's own step, plain and with k drafts in turn, so that the speed-up is a ratio
within one run. Outputs that loop are reported apart: a loop flatters acceptance. An output loops if at least half of
its 4-grams have occurred earlier in it.

With --url a running server is measured instead, with all turns of a conversation: no drafts, then exactly k of them in
each step (`speculation: k`), the same text required. Means have the 95 % bootstrap's bounds over conversations.
A run that was stopped goes on from its --out.
"""


def add_acceptance(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `spaceserve eval acceptance`."""
    parser.description = ACCEPTANCE
    add = parser.add_argument
    add("--model", default="demo", help="folder of a checkpoint, or demo (default: demo)")
    add("--url", help="a running server instead of --model, such as http://127.0.0.1:8080")
    add("--prompts", type=Path, required=True, help="JSONL (prompt, question, turns, …) or text")
    add("--limit", type=int, help="only so many prompts (default: all)")
    add(
        "--chat",
        choices=["auto", "always", "never"],
        default="auto",
        help="prompts through the chat template; auto: those of the fields turns and question (default: auto)",
    )
    add("--max-tokens", type=int, default=128, help="new tokens per prompt (default: 128)")
    add("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="most drafts per step (default: 1–5)")
    add("--temperature", type=float, nargs="+", default=[0.0, 0.8], help="0 is greedy (default: 0 and 0.8)")
    add("--seed", type=int, default=0, help="of the first prompt; each has its own (default: 0)")
    add("--api-key-file", type=Path, help="its first line is sent as the key, with --url")
    add("--at-once", type=whole, default=1, help="conversations at a time, with --url (default: 1)")
    add("--layout", choices=["full", "auto"], default="full", help="(k+1)² rows, or as served (default: full)")
    add("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    add("--weights", choices=ASKED_WEIGHTS, default="auto", help="as `spaceserve` has them (default: auto)")
    add("--kv-dtype", choices=KV_DTYPES, default="auto", help="of keys and values (default: auto)")
    add("--num-threads", type=int, help="of a product (default: as torch has it)")
    add("--out", type=Path, help="folder for acceptance.md and acceptance.json")


DRAFTS = """\
Computes the drafts of a step at every eighth token of the texts and counts those that the model itself chooses there
with the same noise: what a checkpoint's drafts are worth, in a minute, without decoding. Only answers count, as in
training. The draft heads get the text's token before their target.

E-1 is the mean number of accepted drafts of a step, with the 95 % bootstrap's bounds over rows of text. Of several
checkpoints on the same base each further one is compared with the first step by step.

  spaceserve eval drafts --model smollm2 --texts held_out.jsonl
  spaceserve eval drafts --model runs/one/model runs/two/model --texts held_out.jsonl --temperature 0 1

Texts that the drafts were trained on flatter them. The texts of a model's own greedy answers say most about how it
decodes; spaceserve eval acceptance decodes.
"""


def add_drafts(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `spaceserve eval drafts`."""
    parser.description = DRAFTS
    add = parser.add_argument
    add("--model", nargs="+", default=["demo"], help="folders of checkpoints, or names (default: demo)")
    add("--texts", nargs="+", action="extend", required=True, help="as train --data: file, folder or dataset id")
    add("--limit", type=whole, help="only so many records (default: all)")
    add("--length", type=whole_from(16), default=512, help="ids of one row of text (default: 512)")
    add("--rows", type=whole, help="only so many rows (default: all)")
    add("--k", type=whole, help="drafts of a step (default: as many as all checkpoints have)")
    temperature = number_in(0, 100, "a temperature")
    add("--temperature", type=temperature, nargs="+", default=[0.0, 0.7, 1.0], help="0: greedy (default: 0, 0.7, 1)")
    add("--seed", type=whole_from(0), default=0, help="of the noise (default: 0)")
    add("--out", type=Path, help="folder for drafts.md and drafts.json")


SPEED = """\
Times plain decoding and SPACE on the same weights, machine and prompts: on each prompt they take turns, --rounds times,
every other time in reverse order, so that a machine that gets slower in between slows both. The texts must be the same,
id by id; where they are not, the run fails.
"""

SPEED_EPILOG = """\
examples:
  spaceserve eval speed                                              the embedded model, built-in function heads
  spaceserve eval speed --model PATH --prompts humaneval.jsonl --limit 16 --k 1 3 5 --temperature 0 0.8 --out speed
  spaceserve eval speed --model PATH --against prompt-lookup         and transformers' lookup of n-grams in the prompt
  spaceserve eval speed --model PATH --against assisted:DRAFT_FOLDER and transformers with a draft model

--against runs transformers' own generation loop on the base's weights, greedy, in the same run. Its ratio is over its
own plain decoding, ours over ours; the absolute times, passes of both models, and the extra bytes stand beside.
"""


def add_speed(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `spaceserve eval speed`."""
    parser.epilog = SPEED_EPILOG
    parser.description = SPEED
    add = parser.add_argument
    add("--model", default="demo", help="folder of a checkpoint, hub id, or demo [demo]")
    add("--prompts", type=Path, help="JSONL (prompt, question, turns, …) or text [function heads]")
    add("--limit", type=int, help="only so many prompts [all]")
    add("--max-tokens", type=int, default=128, help="new tokens per prompt [128]")
    add("--k", type=int, nargs="+", default=[1, 3, 5], help="most drafts per step [1 3 5]")
    add("--temperature", type=float, nargs="+", default=[0.0], help="0 is greedy [0]")
    add("--seed", type=int, default=0, help="of the first prompt; each has its own [0]")
    add("--rounds", type=int, default=3, help="times each prompt is timed; medians are shown [3]")
    add("--layout", choices=["auto", "full"], default="auto", help="as served, or (k+1)² rows [auto]")
    add("--against", action="append", default=[], metavar="HOW", help="assisted:DRAFT or prompt-lookup")
    add("--draft-tokens", type=int, help="drafts per pass of --against [transformers'; 10 for lookup]")
    add("--allow-ties", action="store_true", help="count texts that differ and go on: a GPU's products may tie")
    add("--mask-ids", type=int, nargs="+", help="of a checkpoint that does not say: one, or one each")
    add("--num-masks", type=int, help="how many masks it was trained with, for --mask-ids")
    add("--dtype", default="auto", help="auto (as served), float32 or bfloat16 [auto]")
    add("--device", default="auto", help="auto, cpu, cuda, … [auto]")
    add("--num-threads", type=int, help="of a product [as torch has it]")
    add("--out", type=Path, help="folder for speed.json, speed.md and speed.png [table only]")


EQUIVALENCE = """\
Decodes every prompt without drafts, alone, then with k drafts per step, alone and in a batch that sequences join one
after another. Drafts come from the checkpoint's masks, or are given, right and wrong on purpose; a comparison without
accepted or without rejected drafts fails.

  own     the masks' (a checkpoint without masks has none)      half    1 to k-1 right, then wrong
  oracle  the plain text itself                                 wrong   the first is wrong

On the CPU ids, ends and log-probabilities must agree to the last bit, in every dtype; elsewhere ids and ends. Exit
status 1 names the first token that differs.
"""


def add_equivalence(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `spaceserve eval equivalence`."""
    parser.description = EQUIVALENCE
    add = parser.add_argument
    add("--model", default="demo", help="folder of a checkpoint, a hub id, or demo (default: demo)")
    add("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    add("--device", default="auto", help="auto, cpu, cuda, … (default: auto)")
    add("--num-threads", type=int, help="of a product on the CPU (default: as torch has it)")
    add("--prompts", type=Path, required=True, help="JSONL (prompt, question, turns, …) or text")
    add("--limit", type=whole, default=4, help="prompts, and sequences of a batch (default: 4)")
    add("--max-tokens", type=whole, default=48, help="new tokens per prompt (default: 48)")
    add(
        "--k", type=int, nargs="+", default=[1, 3, 5], help="drafts per step; own ones up to the masks (default: 1 3 5)"
    )
    add(
        "--temperature",
        type=number_in(0.0, 2.0),
        nargs="+",
        default=[0.0, 0.8],
        help="0 is greedy (default: 0 and 0.8)",
    )
    add("--seed", type=int, nargs="+", default=[0], help="of sampled texts (default: 0)")
    add("--out", type=Path, help="folder for equivalence.md and equivalence.json")
