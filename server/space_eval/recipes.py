"""Training recipes at equal compute: the paper's, ours, and every lever of ours alone."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from space_model.checkpoint import Checkpoint
from space_train.data_error import DataError
from space_train.train_plan import InvalidPlan, TrainPlan

from space_eval.measured import temperature
from space_eval.prompts import PromptError
from space_eval.recipes_data import Ingredients, base_fingerprint
from space_eval.recipes_figures import Result, best_rate
from space_eval.recipes_named import (
    PARTS,
    REFERENCE,
    SWEPT,
    Kitchen,
    Recipe,
    balance,
    cost,
    levers,
    main_recipes,
    start,
    sweep,
)
from space_eval.recipes_plots import write_plots
from space_eval.recipes_queue import Queue, Stopped
from space_eval.recipes_report import Found, write_report
from space_eval.recipes_run import Job, job_of

DESCRIPTION = """\
Trains one and the same base by many recipes, each with the same compute, and measures what every result drafts.

Compute is model operations over all rows, the teacher's passes and text of the model's own included; seconds are
reported beside it. Parts, in this order:

  sweep     learning rates of the paper's recipe and of ours, as many for each; the best of each is used from here on
  main      the paper's recipe (fresh cuts, and fixed as published), ours with all weights, ours with gated adapters,
            each with and without the draft head
  levers    from ours with all weights and draft head: each switch alone
  balance   the share of rows without masks, and the weight of the masks' loss
  cost      seconds, rows, memory and loss at equal real tokens

The sweep is run wherever there is more than one learning rate to choose from. Each run has a process and a folder of
its own under --out; one that was stopped or killed goes on when the same command is given again, and finished ones are
kept. The report is written anew after every part, and keeps the parts that were not asked for.

  spaceserve eval recipes --base BASE --data code.jsonl --held-out apart.jsonl --prompts humaneval.jsonl --out OUT
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `spaceserve eval recipes`."""
    add = parser.add_argument_group("what").add_argument
    add("--base", required=True, help="folder or hub id of the model that every run starts from")
    add("--data", required=True, nargs="+", help="training text: file, folder or dataset id; several are put together")
    add("--held-out", required=True, help="text that no run learns: for the curves, and to cut prompts from")
    add("--prompts", type=Path, required=True, help="JSONL of prompts to decode, such as HumanEval's")
    add("--out", type=Path, required=True, help="folder of the comparison; the report goes to OUT/report")
    add("--part", choices=PARTS, nargs="+", default=list(PARTS), help="only these parts (default: all)")
    add("--only", nargs="+", metavar="NAME", help="only recipes with these names, as the report has them")
    add("--limit", type=int, help="only so many records of the training text (default: all)")

    add = parser.add_argument_group("how much").add_argument
    add("--flops", type=float, default=6e12, help="operations of each run (default: 6e12)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the part main (default: 0 1 2)")
    add("--lever-seeds", type=int, nargs="+", help="of the part levers (default: the first of --seeds)")
    add("--processes", type=int, default=1, help="runs at once (default: 1)")
    add("--threads", type=int, default=1, help="CPU threads of each run (default: 1)")
    add("--keep-models", action="store_true", help="keep the checkpoint of every run (default: figures alone)")

    add = parser.add_argument_group("training").add_argument
    add("--length", type=int, default=256, help="ids of one row (default: 256)")
    add("--rows-per-step", type=int, default=2, help="rows of one update (default: 2: a small budget needs updates)")
    add("--paper-rows", type=int, help="of the paper's recipe (default: twice as many: half of them have no masks)")
    add("--num-masks", type=int, default=5, help="mask tokens k (default: 5)")
    add("--mask-ids", type=int, nargs="+", help="ids for them (default: spare ids, else new ones)")
    add("--optimiser", choices=["adamw", "muon"], default="adamw", help="of ours (default: adamw, as the paper's)")
    rates = "learning rates to try (default: 1.5e-4 5e-4 1.5e-3)"
    add("--paper-rates", type=float, nargs="+", default=[1.5e-4, 5e-4, 1.5e-3], help=rates)
    add("--full-rates", type=float, nargs="+", default=[1.5e-4, 5e-4, 1.5e-3], help=rates)
    add("--gated-rates", type=float, nargs="+", default=[1e-3, 3e-3, 6e-3], help="(default: 1e-3 3e-3 6e-3)")
    add("--own-texts", type=int, default=64, help="texts of the base's own, of that lever (default: 64)")
    add("--precision", choices=["bf16", "no"], default="no", help="of products; no: float32 (default: no)")

    add = parser.add_argument_group("measuring").add_argument
    add("--num-prompts", type=int, default=24, help="prompts of each set (default: 24)")
    add("--max-tokens", type=int, default=64, help="new tokens of each (default: 64)")
    add("--temperature", type=temperature, nargs="+", default=[0.0, 0.8], help="0 is greedy (default: 0 and 0.8)")
    add("--batch", type=int, default=8, help="prompts at once (default: 8)")
    add("--held-out-rows", type=int, default=12, help="rows of the curves (default: 12)")
    add("--evaluations", type=int, default=5, help="points of a curve (default: 5)")


def run(options: argparse.Namespace) -> int:
    """Run what has not been run, and write the report; exit status 0, 2 or, where it was stopped, 130."""
    try:
        comparison = Comparison.prepare(options)
        comparison.run()
    except (InvalidPlan, DataError) as error:
        raise PromptError(str(error)) from error
    except Stopped as stopped:
        print(f"spaceserve eval: {stopped}", file=sys.stderr)
        return 130
    print((options.out / "report" / "recipes.md").read_text(encoding="utf-8"))
    return 0


@dataclass
class Comparison:
    """One base, one set of ingredients, many recipes."""

    options: argparse.Namespace
    queue: Queue
    fields: dict[str, Any]  # of every job
    common: TrainPlan
    found: Found

    @classmethod
    def prepare(cls, options: argparse.Namespace) -> Comparison:
        """Read the data, once for all runs."""
        checkpoint = Checkpoint.open(options.base)
        out: Path = options.out
        out.mkdir(parents=True, exist_ok=True)
        common = TrainPlan(
            num_masks=options.num_masks,
            length=options.length,
            rows_per_step=options.rows_per_step,
            optimiser=options.optimiser,
            precision=options.precision,
            evaluations=options.evaluations,
            checkpoint_seconds=20.0,
        )
        ingredients = Ingredients.read(
            checkpoint.folder,
            int(checkpoint.config["vocab_size"]),
            data=options.data,
            held_out=options.held_out,
            prompts=options.prompts,
            limit=options.limit,
            num_prompts=options.num_prompts,
            length=options.length,
            longest_prompt=int(checkpoint.config["max_position_embeddings"]) - options.max_tokens,
        )
        told = (base_fingerprint(checkpoint.folder), ingredients.fingerprint)
        file = out / f"ingredients-{told[1]}.npz"
        if not file.is_file():
            ingredients.save(file)
        fields: dict[str, Any] = {
            "base": str(checkpoint.folder.resolve()),
            "data": str(file.resolve()),
            "fingerprints": told,
            "held_out_rows": options.held_out_rows,
            "decoding": {
                "k": options.num_masks,
                "temperatures": list(options.temperature),
                "max_tokens": options.max_tokens,
                "batch": options.batch,
            },
            "mask_ids": options.mask_ids,
            "threads": options.threads,
            "keep_model": options.keep_models,
        }
        found = Found.kept(out / "report", _facts(options, checkpoint, told, ingredients))
        return cls(options, Queue(out / "runs", options.processes), fields, common, found)

    def run(self) -> None:
        """The parts asked for, in order, with the report behind each."""
        options, found = self.options, self.found
        seeds, first = options.seeds, options.seeds[:1]
        flops: float = options.flops
        rates = self._rates(flops, first[0])
        kitchen = Kitchen(self.common, self._paper_rows, options.own_texts, rates)
        found.start = self._results(start(kitchen), first, flops=0.0)
        self._report()
        if "main" in options.part:
            found.main = self._results(self._chosen(main_recipes(kitchen)), seeds, flops=flops)
            self._report()
        if "levers" in options.part:
            asked = self._chosen(levers(kitchen), REFERENCE)
            found.levers = self._results(asked, options.lever_seeds or first, flops=flops)
            self._report()
        if "balance" in options.part:
            found.balance = self._results(self._chosen(balance(kitchen)), first, flops=flops)
            self._report()
        if "cost" in options.part:
            # As many as ours, with all weights and draft head, reads with the compute of a run.
            reference = next(recipe for recipe in levers(kitchen) if recipe.name == REFERENCE)
            tokens = int(self._results([reference], first, flops=flops)[0]["tokens"])
            found.cost = self._results(self._chosen(cost(kitchen)), first, tokens=tokens)
            self._report()

    @property
    def _paper_rows(self) -> int:
        return int(self.options.paper_rows or 2 * self.options.rows_per_step)

    def _rates(self, flops: float, seed: int) -> dict[str, float]:
        """The best learning rate of each kind; a kind with one rate given has that."""
        options = self.options
        given = {"paper": options.paper_rates, "full": options.full_rates, "gated-lora": options.gated_rates}
        unswept = Kitchen(self.common, self._paper_rows, options.own_texts, {kind: given[kind][0] for kind in SWEPT})
        rates = {}
        for kind in SWEPT:
            swept = sorted(given[kind])
            if len(swept) == 1:
                rates[kind] = swept[0]
                continue
            results = self._results(sweep(unswept, kind, swept), [seed], flops=flops)
            self.found.sweep[kind] = list(zip(swept, results, strict=True))
            rates[kind] = best_rate(self.found.sweep[kind])
            self._report()
        self.found.facts["learning rates"] = ", ".join(f"{kind} {rate:g}" for kind, rate in rates.items())
        return rates

    def _results(
        self, recipes: Sequence[Recipe], seeds: Sequence[int], *, flops: float | None = None, tokens: int | None = None
    ) -> list[Result]:
        jobs: list[Job] = [
            job_of(recipe, seed=seed, flops=flops, tokens=tokens, **self.fields) for seed in seeds for recipe in recipes
        ]
        return self.queue.results(jobs)

    def _chosen(self, recipes: list[Recipe], *always: str) -> list[Recipe]:
        only = self.options.only
        return recipes if only is None else [recipe for recipe in recipes if recipe.name in {*only, *always}]

    def _report(self) -> None:
        folder = self.options.out / "report"
        write_report(folder, self.found)
        write_plots(folder, self.found)


def _facts(
    options: argparse.Namespace, checkpoint: Checkpoint, told: tuple[str, str], ingredients: Ingredients
) -> dict[str, object]:
    paper_rows = options.paper_rows or 2 * options.rows_per_step
    precision = "float32" if options.precision == "no" else options.precision
    sets = ", ".join(f"{name} ({len(prompts)})" for name, prompts in ingredients.prompts.items())
    return {
        "base": f"{checkpoint.name}, {told[0]}",
        "training text": f"{len(ingredients.examples):,} pieces, {sum(len(e.ids) for e in ingredients.examples):,} "
        f"tokens, {told[1]}",
        "compute of a run": f"{options.flops:g} operations",
        "rows": f"{options.length} ids, {options.rows_per_step} an update; {paper_rows} in the paper's recipe",
        "optimiser": f"{options.optimiser}, linear decay; adamw, cosine in the paper's recipe",
        "prompts": f"{sets}, {options.max_tokens} new tokens each",
        "drafts": f"k = {options.num_masks}, whole layouts",
        "commit": _commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {options.threads} threads a run, "
        f"{options.processes} runs at once, torch {torch.__version__}, {precision}",
    }


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
