"""`spaceserve eval drafts`: accepted drafts per step over given texts, teacher-forced, checkpoints side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint
from space_train.data.examples import pad_id, read_examples
from space_train.data.records import DataError
from space_train.data.train_batch import Texts
from space_train.session import choose_precision, held_out_rows, load_base, load_tokenizer
from space_train.train_plan import InvalidPlan, TrainPlan
from space_train.training.expected_accepted import AcceptedDrafts, accepted_drafts, drafting_model, drafting_plan
from tqdm import tqdm

from space_eval.acceptance.generation import torch_facts
from space_eval.flags import FlagError
from space_eval.report import bootstrap, columns_table, figure, markdown_facts, publish, ratio_of_sums


@dataclass(frozen=True)
class DraftsRow:
    """One checkpoint, kind of drafts and temperature over all texts."""

    model: str
    drafts: str
    temperature: float
    num_steps: int
    accepted_per_step: float  # E-1
    low: float
    high: float
    difference: tuple[float, float, float] | None  # from the first checkpoint: mean, lower and upper bound
    conditional: tuple[float, ...]  # accepted share of draft 1, 2, … where those before it are accepted

    @classmethod
    def of(cls, model: str, found: AcceptedDrafts, first: AcceptedDrafts | None) -> DraftsRow:
        """`first`: the same drafts of the first checkpoint; None: this is the first, or it has none."""
        counts = found.per_step.astype(float)
        low, high = _bounds(counts, found.row)
        difference = None
        if first is not None:
            apart = counts - first.per_step
            difference = (float(apart.mean()), *_bounds(apart, found.row))
        given = tuple(found.conditional)
        return cls(model, found.drafts, found.temperature, len(counts), found.mean, low, high, difference, given)


def _bounds(values: np.ndarray, rows: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap's bounds of the mean over `values`; rows of text are drawn as wholes."""
    sums, counts = np.bincount(rows, values), np.bincount(rows)
    parts = [(float(total), float(count)) for total, count in zip(sums, counts, strict=True) if count]
    return bootstrap(parts, statistic=ratio_of_sums)


COLUMNS: Sequence[tuple[str, Callable[[DraftsRow], str]]] = (
    ("model", lambda row: row.model),
    ("drafts", lambda row: row.drafts),
    ("T", lambda row: f"{row.temperature:g}"),
    ("E-1", lambda row: f"{row.accepted_per_step:.3f} ({row.low:.3f} to {row.high:.3f})"),
    ("over the first", lambda row: _signed(row.difference)),
    ("accepted, of those reached", lambda row: " ".join(figure(share) for share in row.conditional)),
)


def _signed(difference: tuple[float, float, float] | None) -> str:
    if difference is None:
        return "–"
    mean, low, high = difference
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    try:
        rows, facts = measure(options)
    except (InvalidPlan, DataError) as error:
        raise FlagError(str(error)) from error
    page = columns_table(COLUMNS, rows) + "\n" + markdown_facts(facts)
    publish("drafts", options.out, page, {"facts": facts, "rows": [asdict(row) for row in rows]})
    return 0


def measure(options: argparse.Namespace) -> tuple[list[DraftsRow], dict[str, object]]:
    """Measure all checkpoints on the same texts."""
    checkpoints = [Checkpoint.open(name) for name in options.model]
    precision, _ = choose_precision(cpu=not torch.cuda.is_available())
    plans = [drafting_plan(checkpoint, precision=precision, length=options.length) for checkpoint in checkpoints]
    most = min(plan.num_masks if plan.has_masks else plan.num_recurrent_drafts for plan in plans)
    num_drafts = most if options.k is None else options.k
    if num_drafts > most:
        raise FlagError(f"--k {options.k} is more than the {most} drafts that all of these checkpoints make.")
    texts = _texts(checkpoints[0], options)
    for name, checkpoint in zip(options.model[1:], checkpoints[1:], strict=True):
        if not torch.equal(_texts(checkpoint, options, quiet=True).ids, texts.ids):
            raise FlagError(f"{name} encodes these texts otherwise than {options.model[0]}: measure them one by one.")
    first = dict[tuple[str, float], AcceptedDrafts]()
    rows = list[DraftsRow]()
    for number, (name, checkpoint, plan) in enumerate(zip(options.model, checkpoints, plans, strict=True)):
        trainee = drafting_model(load_base(checkpoint, plan), checkpoint, plan)
        trainee.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        with tqdm(total=len(texts.ids), desc=name, unit="row", file=sys.stderr, disable=None) as bar:
            found = accepted_drafts(
                trainee,
                texts,
                num_drafts=num_drafts,
                temperatures=list(dict.fromkeys(options.temperature)),
                seed=options.seed,
                progress=bar.update,
            )
        for drafts in found:
            key = drafts.drafts, drafts.temperature
            rows.append(DraftsRow.of(name, drafts, first.get(key)))
            if not number:
                first[key] = drafts
    answers = int(texts.is_target.sum())
    facts: dict[str, object] = {
        "texts": f"{', '.join(options.texts)}: {len(texts.ids)} rows, {texts.num_real:,} ids, {answers:,} of answers",
        "steps": rows[0].num_steps,
        "k": num_drafts,
        "precision": "float32" if precision == "no" else precision,
        "machine": torch_facts(),
    }
    return rows, facts


def _texts(checkpoint: Checkpoint, options: argparse.Namespace, *, quiet: bool = False) -> Texts:
    """Return the rows of text, encoded and packed as in training."""
    tokenizer = load_tokenizer(checkpoint)
    vocab_size = int(family.read_config(checkpoint).vocab_size)
    loaded = read_examples(
        options.texts, tokenizer, limit=options.limit, max_length=options.length, vocab_size=vocab_size, quiet=quiet
    )
    plan, fill = TrainPlan(length=options.length), pad_id(tokenizer, vocab_size)
    return held_out_rows(loaded.examples, plan, fill, len(loaded.examples) if options.rows is None else options.rows)
