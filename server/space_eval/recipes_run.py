"""One run of a comparison, in a process and a folder of its own: train a recipe, decode with it, write the figures."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from space_model.checkpoint import Checkpoint
from space_model.load import load_model
from space_train.interruption import Interrupted
from space_train.mixed_rows import MixedRows, Stream
from space_train.schedule import Budget
from space_train.self_generate import own_examples, prompts_of, write_own_texts
from space_train.session import held_out_rows, load_base, packed
from space_train.train_batch import Texts
from space_train.train_plan import HeadForm, Method, TrainPlan
from space_train.train_result import TrainResult
from space_train.trainer import train
from tokenizers import Tokenizer
from transformers.utils import logging as transformers_logging

from space_eval.recipes_data import Ingredients
from space_eval.recipes_decoding import Decoding, decoding_figures
from space_eval.recipes_named import Recipe

RESULT_FILE = "result.json"
JOB_FILE = "job.json"
OWN_PROMPT = 64


@dataclass(frozen=True)
class Job:
    """What a run depends on. Two jobs with the same digest are one run."""

    name: str
    base: str  # folder
    data: str  # file of the ingredients
    fingerprints: tuple[str, str]  # of base and ingredients
    recipe: dict[str, Any]
    flops: float | None  # the budget: model operations over all rows, or
    tokens: int | None  # real tokens
    seed: int
    held_out_rows: int
    decoding: dict[str, Any]
    mask_ids: list[int] | None = None
    threads: int = 1
    keep_model: bool = False

    @property
    def digest(self) -> str:
        """12 hexadecimal digits."""
        told = asdict(self)
        for name in ("name", "base", "data", "threads", "keep_model"):
            del told[name]
        # How often a run looks and saves does not change where it goes.
        told["recipe"] = told["recipe"] | {"plan": told["recipe"]["plan"] | {"checkpoint_seconds": None}}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def folder_name(self) -> str:
        """Readable, and one for each digest."""
        return f"{self.recipe['plan']['method']}-s{self.seed}-{self.digest}"

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JOB_FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Job:
        return cls(**json.loads((folder / JOB_FILE).read_text(encoding="utf-8")))

    def plan(self) -> TrainPlan:
        """The recipe's, with this run's seed and budget."""
        plan = TrainPlan.from_json(self.recipe["plan"])
        budget = Budget(flops=self.flops, tokens=self.tokens)
        return replace(plan, seed=self.seed, budget=budget)


def run_job(folder: Path) -> dict[str, Any]:
    """Train and measure what `folder/job.json` says; a run that was cut off goes on. Returns the result."""
    if (folder / RESULT_FILE).is_file():
        return read_result(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # an orphan of a killed comparison may still be at it
        if (folder / RESULT_FILE).is_file():
            return read_result(folder)
        job, started = Job.read(folder), time.monotonic()
        torch.set_num_threads(job.threads)
        transformers_logging.disable_progress_bar()
        result = _trained(job, folder)
        decoded = _decoded(job, folder)
        result |= decoded | {"whole_seconds": time.monotonic() - started}
        write_json(folder / RESULT_FILE, result)
    for name in ("train", "head") if not job.keep_model else ():
        shutil.rmtree(folder / name, ignore_errors=True)
    return result


def process_main(folder: Path) -> None:
    """The run as the target of a process: what it says goes to `folder/log.txt`."""
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        run_job(folder)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr, flush=True)
        sys.exit(130)


def read_result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    return found


def write_json(file: Path, record: object) -> None:
    """Whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def _trained(job: Job, folder: Path) -> dict[str, Any]:
    """Train, in one phase or two; the compute of all, and the curve over it."""
    plan, base = job.plan(), Path(job.base)
    ingredients = Ingredients.load(Path(job.data))
    held_out = held_out_rows(ingredients.held_out, plan, ingredients.pad).part(slice(0, job.held_out_rows))
    spent = {"flops": 0.0, "seconds": 0.0}
    own: list[Any] = []
    if job.recipe["own_texts"]:
        own, spent = _own_texts(job, folder, ingredients, plan)
    later = job.recipe["head_after"]
    first = plan
    if later:
        whole = plan.budget.flops or 0.0
        first = replace(plan, head=HeadForm.NONE, budget=Budget(flops=whole * (1 - later)))
    share = job.recipe["own_share"]
    result, peak = _phase(job, base, ingredients, own, share, _less(first, spent["flops"]), folder / "train", held_out)
    phases = [(dict(spent), result)]
    if later:
        done = {name: spent[name] + getattr(result.counters, name) for name in spent}
        plan = replace(plan, method=Method.HEAD)
        on = folder / "train" / "model"
        result, second = _phase(job, on, ingredients, own, share, _less(plan, done["flops"]), folder / "head", held_out)
        phases.append((done, result))
        peak = max(peak, second)
    curve = [
        entry | {name: entry[name] + before[name] for name in before}
        for before, part in phases
        for entry in part.counters.curve
    ]
    before, last = phases[-1]
    return {
        "name": job.name,
        "seed": job.seed,
        "plan": job.plan().as_json(),
        "flops": before["flops"] + last.counters.flops,
        "seconds": before["seconds"] + last.counters.seconds,
        "updates": sum(part.counters.step for _, part in phases),
        "tokens": sum(part.counters.num_tokens for _, part in phases),
        "masks": sum(part.counters.num_masks for _, part in phases),
        "last_update_flops": last.counters.flops / max(last.counters.step, 1),
        "peak_bytes": peak,
        "own_text_flops": spent["flops"],
        "curve": curve,
    }


def _less(plan: TrainPlan, flops: float) -> TrainPlan:
    """What is left of the budget."""
    if plan.budget.flops is None or not flops:
        return plan
    return replace(plan, budget=Budget(flops=max(0.0, plan.budget.flops - flops)))


def _phase(
    job: Job,
    source: Path,
    ingredients: Ingredients,
    own: list[Any],
    own_share: float,
    plan: TrainPlan,
    out: Path,
    held_out: Texts,
) -> tuple[TrainResult, int]:
    """One call of the trainer, and how many bytes it took beyond those that the process had with its model loaded."""
    streams = [Stream(packed(ingredients.examples, plan, ingredients.pad), 1.0)]
    if own:
        streams = [
            replace(streams[0], share=1.0 - own_share),
            Stream(packed(own, plan, ingredients.pad), own_share, teaches=False),
        ]
    given = job.mask_ids[:1] if job.mask_ids and plan.shared_mask_id else job.mask_ids
    model = load_base(Checkpoint.open(source), plan)
    before = resident_bytes()
    result = train(
        model,
        source,
        MixedRows(streams, plan.seed),
        plan,
        out,
        tokenizer_size=ingredients.tokenizer_size,
        given_mask_ids=given,
        held_out=held_out,
        dtype=torch.float32,
        progress=False,
    )
    return result, max(0, result.peak_bytes - before)


def resident_bytes() -> int:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _own_texts(job: Job, folder: Path, ingredients: Ingredients, plan: TrainPlan) -> tuple[list[Any], dict[str, float]]:
    """Texts of the base, written once for this run, and the compute and time they took."""
    file, ledger = folder / "own_texts.jsonl", folder / "own_texts.cost.json"
    longest = plan.length // 2  # of a prompt: at least as many ids are left to write
    prompts = prompts_of(
        ingredients.examples,
        job.recipe["own_texts"],
        length=min(OWN_PROMPT, longest),
        longest=longest,
        seed=plan.seed,
    )
    written = write_own_texts(
        job.base,
        prompts,
        max_tokens=plan.length - longest,
        seed=plan.seed,
        dtype="float32",
        num_threads=job.threads,
        speculation="off",
        progress=False,
        file=file,
    )
    spent = json.loads(ledger.read_text()) if ledger.exists() else {"flops": 0.0, "seconds": 0.0}
    weights = load_base(Checkpoint.open(job.base), plan).num_parameters()
    spent = {
        "flops": spent["flops"] + 2.0 * weights * written.num_rows,
        "seconds": spent["seconds"] + (written.seconds if written.num_rows else 0.0),
    }
    write_json(ledger, spent)
    return list(own_examples(file)), spent


def _decoded(job: Job, folder: Path) -> dict[str, Any]:
    """The figures of real decoding; none without masks."""
    if not job.plan().has_masks:
        return {"decoding": [], "rescored": {}, "decode_seconds": 0.0}
    started = time.monotonic()
    where = folder / ("head" if job.recipe["head_after"] else "train") / "model"
    model = load_model(where, num_threads=job.threads, dtype="float32")
    tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
    settings = job.decoding | {"temperatures": tuple(job.decoding["temperatures"])}
    wanted, prompts = Decoding(**settings), Ingredients.load(Path(job.data)).prompts

    def decode(ids: Any) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    figures = decoding_figures(model, prompts, decode, wanted)
    rescored = {
        str(count): decoding_figures(model, prompts, decode, wanted, rescored=count) for count in job.recipe["rescored"]
    }
    return {"decoding": figures, "rescored": rescored, "decode_seconds": time.monotonic() - started}


def job_of(recipe: Recipe, **fields: Any) -> Job:
    """The job of a recipe."""
    return Job(name=recipe.name, recipe=recipe.as_json(), **fields)
