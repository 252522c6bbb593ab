"""Flags of `spaceserve eval quality`; nothing here imports torch, so that help is immediate."""

import argparse
from pathlib import Path

from space_common.worker.choices import ASKED_WEIGHTS, KV_DTYPES

from space_eval.flags import number_in, whole
from space_eval.quality.humaneval import FLAG

TASKS = ("humaneval", "summarise", "perplexity")

QUALITY = """\
Generates through the worker's own step, with SPACE (the base: plain decoding), and scores what was written:

  humaneval=DATA    records with prompt and test (HumanEval, HumanEval-X): pass@1, and pass@10 with 10 samples or more.
                    Every program runs in a process of its own with bounded time and memory, with your rights:
                    it needs --allow-code-execution.
  summarise=DATA    records with document+summary, article+highlights, text+summary or dialogue+summary: ROUGE-L
  perplexity=DATA   a text file, a folder of them, or records with text, content or code: bits per byte, perplexity

DATA is a path (JSONL) or a hub id (owner/name, or owner/name:configuration; its test split).
With --base the same records are given to both, and differences have 95 % intervals. A task on which both score 0 is
'no signal': it says nothing about either.

examples:
  spaceserve eval quality --tasks humaneval=humaneval.jsonl --limit 20 --allow-code-execution --out quality
  spaceserve eval quality --model out/model --base BASE --tasks humaneval=humaneval.jsonl,perplexity=held_out.jsonl \\
      --samples 10 --temperature 0.8 --allow-code-execution --out quality
      killed? The same command goes on where it was.
  spaceserve eval quality --self-check --data humaneval.jsonl --allow-code-execution
      no model: canonical solutions must all pass, broken ones (early exits too) must all fail
"""


def add_quality(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `spaceserve eval quality`."""
    parser.description = QUALITY
    add = parser.add_argument_group("what is measured").add_argument
    add("--model", default="demo", help="folder of a checkpoint, hub id, or demo (default: demo)")
    add("--base", help="the model to compare with, decoded plainly (default: none)")
    add("--tasks", type=_tasks, metavar="NAME=DATA[,…]", help="humaneval, summarise, perplexity")
    add("--limit", type=whole, help="only the first records of each task (default: all)")
    add("--out", type=Path, help="folder for answers and report; a killed run goes on from it")
    add = parser.add_argument_group("how texts are written").add_argument
    add("--samples", type=whole, default=1, help="texts per record; pass@10 needs 10 (default: 1)")
    heat = "0 is greedy (default: 0, or 0.8 with more than one sample)"
    add("--temperature", type=number_in(0.0, 2.0), help=heat)
    add("--top-p", type=number_in(0.01, 1.0), default=1.0, help="(default: 1, off)")
    add("--max-tokens", type=whole, default=512, help="new tokens per text (default: 512)")
    add("--chat", action="store_true", help="ask through the chat template, and read code blocks")
    add("--seed", type=int, default=0, help="of the first record; each has its own (default: 0)")
    full = "all (k+1)² rows in every step, or as served, where large batches are not drafted (default: full)"
    add("--layout", choices=["full", "auto"], default="full", help=full)
    batch = "texts at once; never changes a text (default: 8, or 1 with the full layout on a CPU, which it fills)"
    add("--batch", type=whole, help=batch)
    add = parser.add_argument_group("how texts are read (perplexity)").add_argument
    add("--window", type=whole, default=1024, help="most tokens at once, within the model's own (default: 1024)")
    add("--stride", type=whole, help="tokens between windows (default: half a window)")
    add = parser.add_argument_group("programs (humaneval)").add_argument
    add(FLAG, action="store_true", help="run the programs that the model writes, with your rights; no sandbox")
    seconds = "per program: tests take milliseconds (default: 10)"
    add("--seconds", type=number_in(0.1, 3600.0), default=10.0, help=seconds)
    add("--memory", type=whole, default=1024, help="MiB per program (default: 1024)")
    add("--self-check", action="store_true", help="prove the harness on --data, without a model")
    add("--data", help="for --self-check: HumanEval records with canonical_solution")
    add = parser.add_argument_group("machine").add_argument
    add("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    add("--weights", choices=ASKED_WEIGHTS, default="auto", help="as `spaceserve` has them (default: auto)")
    add("--kv-dtype", choices=KV_DTYPES, default="auto", help="the same (default: auto)")
    add("--base-kv-dtype", choices=KV_DTYPES, help="of --base (default: as --kv-dtype)")
    add("--base-weights", choices=ASKED_WEIGHTS, help="of --base (default: as --weights)")
    add("--device", default="auto", help="auto, cpu, cuda, … (default: auto)")
    add("--num-threads", type=whole, help="of a product (default: as torch has it)")


def _tasks(text: str) -> dict[str, str]:
    tasks: dict[str, str] = {}
    for part in text.split(","):
        name, equals, source = part.partition("=")
        if name not in TASKS or not equals or not source:
            raise argparse.ArgumentTypeError(f"wants NAME=DATA with NAME one of {', '.join(TASKS)}; got {part!r}")
        if name in tasks:
            raise argparse.ArgumentTypeError(f"has {name} twice; give it one source")
        tasks[name] = source
    return tasks
