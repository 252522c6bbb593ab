"""The report of a run (`run.json`, `run.md`, `run.png`), and the model card of the embedded model."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from space_train.networks.network import NetworkShape
from space_train.progress import Counters
from space_train.run_folder import Measures
from space_train.train_plan import TrainPlan
from space_train.training.trainer import TrainResult

GIGABYTE = 1e9

FIGURES = """\
`loss` is the next-token loss in nats. `mask_j` and `head_j` are the share of places at which draft j, without and with
the draft head, is the model's own most likely token, given that the drafts before it are right. `tokens_per_step` is
what these shares amount to in greedy decoding: 1 + head_1 + head_1·head_2 + …"""

RECURRENT_FIGURES = """\
`recurrent_j` and `recurrent_tokens_per_step` are the same of the recurrent head, which drafts without masks."""


def write_report(out: Path, plan: TrainPlan, result: TrainResult) -> None:
    """Write the report of a finished run to its folder."""
    counters = result.counters
    machine = {"num_processes": result.num_processes, "peak_bytes": result.peak_bytes}
    record = {"plan": plan.as_json(), **machine, **asdict(counters)}
    (out / "run.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "run.md").write_text(as_markdown(plan, result), encoding="utf-8")
    plot(out / "run.png", plan, counters)


def as_markdown(plan: TrainPlan, result: TrainResult) -> str:
    """Return the compute and the held-out figures before and after, as Markdown."""
    counters = result.counters
    lines = [
        f"# {plan.method.value}, {counters.step} updates",
        "",
        f"{counters.num_tokens:,} tokens, {counters.num_masks:,} masks, {counters.flops:.3g} operations, "
        f"{counters.seconds / 60:.1f} minutes, at most {result.peak_bytes / GIGABYTE:.2f} GB.",
        "",
    ]
    if counters.curve:
        first, last = counters.curve[0], counters.curve[-1]
        places = {"progress", "step", "tokens", "flops", "seconds"}
        lines += ["| held out | before | after |", "|---|---|---|"]
        names = sorted((name for name in last if name not in places), key=lambda name: name != "tokens_per_step")
        lines += [f"| {name} | {first[name]:.3f} | {last[name]:.3f} |" for name in names if name in first]
        lines += ["", FIGURES]
        if plan.has_recurrent_head:
            lines.append(RECURRENT_FIGURES)
    return "\n".join(lines) + "\n"


def plot(file: Path, plan: TrainPlan, counters: Counters) -> bool:
    """Plot training loss and held-out acceptance over the run. Return False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(range(1, len(counters.losses) + 1), counters.losses, linewidth=0.8, color="tab:gray", label="training")
    left.set(xlabel="update", ylabel="weighted sum of the losses (nats)", title=plan.method.value)
    steps = [entry["step"] for entry in counters.curve]
    if plan.teaches_drafts and counters.curve:
        beside = left.twinx()
        names = ["tokens_per_step"] * plan.has_masks + ["recurrent_tokens_per_step"] * plan.has_recurrent_head
        for name, line in zip(names, ("-", "--"), strict=False):
            beside.plot(steps, [entry[name] for entry in counters.curve], line, color="tab:blue", label=name)
        if len(names) > 1:
            beside.legend()
        beside.set_ylabel("expected tokens per step, held out", color="tab:blue")
    elif counters.curve:
        left.plot(steps, [entry["loss"] for entry in counters.curve], color="tab:blue", label="held out, next token")
    left.legend()
    for name in _drafts(counters.curve):
        right.plot(steps, [entry[name] for entry in counters.curve], label=name.replace("_", " "))
    right.set(xlabel="update", ylabel="agreement with the model's own token", ylim=(0, 1), title="held out, by draft")
    if right.lines:
        right.legend(ncols=2, fontsize="small")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True


def _drafts(curve: list[dict[str, Any]]) -> list[str]:
    return [name for name in (curve[-1] if curve else {}) if name.rpartition("_")[0] in {"mask", "head", "recurrent"}]


@dataclass(frozen=True)
class StageRecord:
    """One training stage, read from its checkpoint."""

    name: str
    minutes: float
    num_tokens: int
    history: Sequence[Measures]


@dataclass(frozen=True)
class CardFacts:
    """Everything the card states."""

    command: str
    commit: str
    seed: int
    threads: int
    shape: NetworkShape
    num_masks: int
    characters_per_token: float
    num_own_texts: int
    remark: str  # free text about this run
    stages: Sequence[StageRecord]
    final: Measures  # of the weights as shipped: loss, bits_per_byte, mask_j, head_j
    corpus: Sequence[Mapping[str, Any]]  # `corpus.json`


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def paragraph(text: str) -> str:
    """Return the text as one paragraph, wrapped."""
    return textwrap.fill(" ".join(text.split()), 118, break_long_words=False, break_on_hyphens=False)


def card(facts: CardFacts) -> str:
    """Return the text of `README.md`."""
    shape, final = facts.shape, facts.final
    trained = [entry for entry in facts.corpus if not entry["held_out"] and entry["num_files"]]
    held_out = [entry for entry in facts.corpus if entry["held_out"]]
    own_text = f"{facts.num_own_texts} texts written by the model itself; " if facts.num_own_texts else ""
    architecture = paragraph(
        f"""Llama architecture, {shape.num_parameters / 1e6:.2f} M parameters ({shape.num_layers} layers, hidden size
        {shape.hidden_size}, {shape.num_heads} heads of {shape.head_dim}, {shape.num_kv_heads} key/value heads, tied
        embeddings), bf16, window {shape.window}; byte-level BPE of {shape.vocab_size} ids,
        {facts.characters_per_token:.2f} characters per token on held-out code; {facts.num_masks} mask tokens, one id
        each. Code is completed as it is; a chat turn in words becomes the docstring of a function whose body is the
        answer."""
    )
    recipe = paragraph(
        f"""Commit `{facts.commit}`, seed {facts.seed}, {facts.threads} CPU threads. Next-token training by Muon and
        AdamW on windows of 256 to {shape.window} ids; {own_text}SAR-SFT with many anchors per sequence, soft labels
        from the model's own next-token distribution, the next-token loss kept, masks and draft head together. Budgets
        are minutes on the clock of a machine that other work may share: another run sees more or fewer tokens.
        {facts.remark}"""
    )
    num_functions = sum(entry["num_functions"] for entry in trained)
    depths = range(1, facts.num_masks + 1)
    acceptance = table(
        ["greedy agreement of draft", *map(str, depths)],
        [
            ["masks alone", *(f"{final[f'mask_{depth}']:.2f}" for depth in depths)],
            ["with the draft head", *(f"{final[f'head_{depth}']:.2f}" for depth in depths)],
        ],
    )

    def last(stage: StageRecord, *keys: str) -> list[str]:
        return [f"{stage.history[-1][key]:.3f}" for key in keys]

    stages = table(
        ["stage", "minutes", "tokens", "held-out loss", "bits per byte"],
        [
            [one.name, f"{one.minutes:.0f}", f"{one.num_tokens / 1e6:.1f} M", *last(one, "loss", "bits_per_byte")]
            for one in facts.stages
        ],
    )
    curves = "\n".join(
        f"- {stage.name}: " + ", ".join(f"{entry['tokens'] / 1e6:.1f} M {entry['loss']:.2f}" for entry in stage.history)
        for stage in facts.stages
    )

    def sources(entries: Sequence[Mapping[str, Any]]) -> str:
        keys = ("name", "version", "licence", "num_files")
        rows = [[*(str(entry[key]) for key in keys), f"{entry['num_bytes']:,}"] for entry in entries]
        return table(["source", "version", "licence (SPDX, from its metadata)", "files", "bytes"], rows)

    return f"""\
---
license: apache-2.0
language: [code]
tags: [python, space, speculative-decoding]
---
# The embedded model

A very small Python-code model with SPACE masks and a draft head, trained from nothing by this repository. It exists so
that the server can be tried, tested and measured anywhere, offline. **It is not a useful programmer**: it knows the
look of Python, not what a program means, and it repeats itself when decoded greedily.

{architecture}

## Recipe

    {facts.command}

{recipe}

{stages}

Held-out loss (nats per token) by tokens seen:

{curves}

## Figures of the shipped weights (held-out packages, float32 arithmetic)

Next-token loss {final["loss"]:.3f} nats, {final["bits_per_byte"]:.3f} bits per byte.

{acceptance}

Teacher-forced: the share of places at which draft j equals the model's own most likely token, given that everything
before it is right; the head's input has the token before its target. Real decoding differs: it accepts more where text
repeats and less where the model's own text leaves what it was trained on.

## Data

Python files as published; tests, vendored copies, generated files, tables, over-long lines and near-duplicates (by
lines) dropped; at most a few MB of one source. {num_functions:,} short documented functions appear a second time, as
documents of their own. No evaluation set is part of it.

{sources(trained)}

Held out as whole packages, with everything in the other sources that repeats one of their files, exactly or nearly:

{sources(held_out)}
"""
