"""Flags of `spaceserve eval paper`; nothing here imports torch, so that help is immediate."""

import argparse
from pathlib import Path

from space_train.training.published_options import EVALUATION_OPTIONS, TRAINING_OPTIONS, options_table

from space_eval.paper.tasks import FAMILIES, PUBLISHED, TASKS, TEMPLATE
from space_eval.quality.humaneval import FLAG

PAPER = """\
Measures a SPACE model by the protocol of arXiv 2402.11809: the paper's prompts for the model's family, 1,024 new
tokens, greedy, k=5, one sequence at a time. Plain decoding and SPACE take turns on every prompt, on the same weights
and the same machine; a speed-up is a ratio within one round. Every finished question is a line of OUT/answers.jsonl:
a run that was stopped or killed goes on where it was when the same command is given again.
"""

PAPER_EPILOG = f"""\
examples:
  spaceserve eval paper --tasks human_eval --data human_eval=humaneval-x-python.jsonl --max-tokens 128 --limit 16 \\
      --allow-code-execution
      the embedded model on 16 problems: minutes on a CPU
  spaceserve eval paper --model ./vicuna-7b-space --mask-ids 32002 --num-masks 5 --family vicuna \\
      --tasks xsum,human_eval,cip --limit cip=100 --max-tokens 1024,cip=512 --allow-code-execution
      a published SPACE checkpoint, data from the hub, with the amounts of the published script
  spaceserve eval paper --model ./my-space-model --base ./my-base --pass-at 10 --allow-code-execution

the published evaluation script's options (tests/eval_infer.py), and ours:
{options_table(EVALUATION_OPTIONS)}

the published training script's options (run_sft_multi_node.sh), and those of `spaceserve train`:
{options_table(TRAINING_OPTIONS)}

data, where --data does not say: {", ".join(f"{task.name} {task.hub_id or 'none'}" for task in TASKS.values())}
"""


def add_paper(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `spaceserve eval paper`."""
    parser.description, parser.epilog = PAPER, PAPER_EPILOG
    add = parser.add_argument
    add("--model", default="demo", help="folder of a SPACE checkpoint, hub id, or demo [demo]")
    add("--base", help="what --model was trained from: its quality and speed go beside [the model itself]")
    tasks = f"of {', '.join(TASKS)} [the paper's three]"
    add("--tasks", default="xsum,human_eval,cip", metavar="T[,T...]", help=tasks)
    data = "JSONL, or hub id[:config][@split]"
    add("--data", action="append", default=[], metavar="T=SOURCE[,T=SOURCE]", help=data)
    how = "how it is prompted [by its name, else its chat template, else as plain text]"
    add("--family", choices=["auto", TEMPLATE, *FAMILIES], default="auto", help=how)
    add("--published", choices=list(PUBLISHED), help="row of Table 1 to show beside [by family and size]")
    add("--k", type=int, default=5, help="most drafts per step [5, as published]")
    add("--layout", choices=["full", "auto"], default="full", help="(k+1)² rows, or as served [full]")
    add("--max-tokens", default="1024", metavar="N[,T=N...]", help="new tokens per answer [1024]")
    add("--limit", metavar="N[,T=N...]", help="first questions of each task only [all]")
    add("--rounds", type=int, default=3, help="times each prompt is timed; medians are shown [3]")
    add("--temperature", type=float, default=0.0, help="0 is greedy [0, as published]")
    add("--seed", type=int, default=0, help="of the first question; each has its own [0]")
    samples = "pass@K: K > 1 samples K answers at temperature 0.8 [1: greedy]"
    add("--pass-at", type=int, default=1, metavar="K", help=samples)
    add("--no-execution", action="store_true", help="leave out pass@K: run no generated code")
    add(FLAG, action="store_true", help="run generated code for pass@K, with your rights; no sandbox")
    add("--mask-ids", type=int, nargs="+", action="extend", help="of a checkpoint that does not say: one, or one each")
    add("--num-masks", type=int, help="how many masks it was trained with, for --mask-ids")
    add("--dtype", default="auto", help="auto (as served), float32 or bfloat16 [auto]")
    add("--device", default="auto", help="auto, cpu, cuda, … [auto]")
    add("--num-threads", type=int, help="of a product [as torch has it]")
    add("--stop-after", type=int, metavar="N", help="end after N new questions per task; go on later")
    add("--out", type=Path, default=Path("paper"), help="folder of journal and report [paper]")
