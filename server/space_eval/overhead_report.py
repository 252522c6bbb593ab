"""Turns as figures: a row for each batch and layout, the batch at which each stops paying, tables and a plot."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from space_server.speculation.synthetic_acceptance import label

from space_eval.bench.estimates import Ratio
from space_eval.overhead_arms import AUTO, PLAIN
from space_eval.overhead_curve import PassCost, crossing
from space_eval.overhead_turns import Parts, Turn
from space_eval.plots import line_plot

PARTS = ("chain", "masks", "head", "drafting", "host")
"""Of a step, in this order."""
TRAINED = "embedded model, its own drafts"


@dataclass(frozen=True)
class Subject:
    """A model, and where its drafts come from."""

    model: str  # as given
    chances: tuple[float, ...] | None  # None: its own masks'

    @property
    def title(self) -> str:
        """For every table and figure."""
        name = Path(self.model).name
        return f"{name}, its own drafts" if self.chances is None else f"{name}, {label(self.chances)}"


@dataclass(frozen=True)
class Row:
    """One layout at one batch: medians over the rounds."""

    num_sequences: int
    arm: str
    chain_rows: float  # per step, over all sequences
    mask_rows: float
    tokens_per_step: float  # E, of one sequence
    accepted_share: tuple[float, ...]  # by place in the chain, of those judged
    step_ms: float
    parts_ms: Mapping[str, float]
    tokens_per_second: float
    ratio: Ratio  # to plain decoding, each of one round
    predicted: float  # SPACE §5
    limit: float  # E/T: what is left above the ridge


def row(turns: Sequence[Turn], plains: Sequence[Turn], cost: PassCost) -> Row:
    """From the rounds of one arm and one batch, and those of plain decoding beside them."""
    first = turns[0]
    steps = sum(turn.num_steps for turn in turns)
    chain = sum(turn.num_chain_rows for turn in turns) / steps
    masks = sum(turn.num_mask_rows for turn in turns) / steps
    tokens = sum(turn.num_tokens for turn in turns) / (steps * first.num_sequences)
    return Row(
        num_sequences=first.num_sequences,
        arm=first.arm,
        chain_rows=chain,
        mask_rows=masks,
        tokens_per_step=tokens,
        accepted_share=_accepted(turns),
        step_ms=statistics.median(1000 * turn.parts.total / turn.num_steps for turn in turns),
        parts_ms=_parts_ms(turns),
        tokens_per_second=statistics.median(turn.tokens_per_second for turn in turns),
        ratio=Ratio.of([t.tokens_per_second / plain.tokens_per_second for t, plain in zip(turns, plains, strict=True)]),
        predicted=cost.speed_up(
            tokens_per_step=tokens,
            num_sequences=first.num_sequences,
            num_rows=chain + masks,
            num_chain_rows=chain,
        ),
        limit=tokens * first.num_sequences / (chain + masks),
    )


def _parts_ms(turns: Sequence[Turn]) -> dict[str, float]:
    """Medians over the turns; the network's is shared out by the median of what its chain alone took."""

    def ms(seconds: Callable[[Parts], float]) -> float:
        return statistics.median(1000 * seconds(turn.parts) / turn.num_steps for turn in turns)

    shares = [share for turn in turns for share in turn.chain_shares]
    chain = min(1.0, statistics.median(shares)) if shares else 1.0
    network = ms(lambda parts: parts.network)
    return {
        "chain": network * chain,
        "masks": network * (1.0 - chain),
        "head": ms(lambda parts: parts.head),
        "drafting": ms(lambda parts: parts.drafting),
        "host": ms(lambda parts: parts.host),
    }


def _accepted(turns: Sequence[Turn]) -> tuple[float, ...]:
    stood: Counter[int] = Counter()
    judged: Counter[int] = Counter()
    for turn in turns:
        for drafted, accepted in turn.verifications:
            stood.update(range(1, accepted + 1))
            judged.update(range(1, min(accepted + 1, drafted) + 1))
    return tuple(stood[place] / judged[place] for place in sorted(judged))


@dataclass(frozen=True)
class Measured:
    """All of one subject."""

    subject: Subject
    facts: Mapping[str, Any]
    cost: PassCost
    rows: Sequence[Row]

    def at(self, arm: str, num_sequences: int) -> Row | None:
        """This row, if it was measured."""
        return next((r for r in self.rows if (r.arm, r.num_sequences) == (arm, num_sequences)), None)

    @property
    def arms(self) -> list[str]:
        """Those compared with plain decoding, in order."""
        return list(dict.fromkeys(r.arm for r in self.rows if r.arm != PLAIN))

    def ratios(self, arm: str) -> list[tuple[int, float]]:
        """Measured, by batch."""
        return [(r.num_sequences, r.ratio.median) for r in self.rows if r.arm == arm]

    def predicted(self, arm: str) -> list[tuple[int, float]]:
        """By SPACE §5."""
        return [(r.num_sequences, r.predicted) for r in self.rows if r.arm == arm]


HOW = """\
Rows, milliseconds: of one step of the whole batch. E: tokens of one sequence per step, after the prompt. Sequences
that all run; EOS is ignored; every text was the same as plain decoding's, token for token.

Chain and masks: the network's time in a step, shared out. After one step in four its rows were run twice more, with
their mask rows and without, one right after the other and in turns first; the median ratio is the chain's share.
Head: the output head, over chain rows and accepted groups. Drafting: draft head and choice of drafts. Host: the rest
of the step.

Against plain: each of one round, in which plain decoding and all layouts took turns in the same process on the same
pages; median, 95 % bootstrap bounds. Predicted: SPACE §5, E·t(B)/t(B·T), with E from this table and t measured as one
pass of so many plain rows plus the head over those sampled: without host, drafting and context. E/T: what it tends to
where rows are no longer free."""


def to_markdown(measured: Sequence[Measured]) -> str:
    """Every subject's tables. Where drafts came true by decree, the trained embedded model's row stands beside."""
    trained = next((one for one in measured if one.subject.chances is None), None)
    lines = ["# What masks cost", "", HOW, ""]
    for one in measured:
        beside = trained if one.subject.chances is not None else None
        lines += [f"## {one.subject.title}", "", *(f"{name}: {value}  " for name, value in one.facts.items()), ""]
        lines += [*_rows_table(one, beside), "", *_crossing_table(one, beside), ""]
    return "\n".join(lines)


def _rows_table(one: Measured, beside: Measured | None) -> list[str]:
    head = ["batch", "layout", "rows: chain + masks", "E", "step ms", *PARTS, "tokens/s", "against plain", "predicted"]
    head += ["E/T", *([f"{TRAINED}: E", f"{TRAINED}: against plain"] if beside is not None else [])]
    lines = [f"Steps of {one.subject.title}", "", _line(head), "|" + "---|" * len(head)]
    for r in one.rows:
        cells = [str(r.num_sequences), r.arm, f"{r.chain_rows:.1f} + {r.mask_rows:.1f}", f"{r.tokens_per_step:.2f}"]
        cells += [f"{r.step_ms:.2f}", *(f"{r.parts_ms[name]:.2f}" for name in PARTS), f"{r.tokens_per_second:.0f}"]
        cells += ["1" if r.arm == PLAIN else r.ratio.shown(), f"{r.predicted:.2f}", f"{r.limit:.2f}"]
        if beside is not None:
            same = beside.at(r.arm, r.num_sequences)
            cells += ["–", "–"] if same is None else [f"{same.tokens_per_step:.2f}", same.ratio.shown()]
        lines.append(_line(cells))
    return lines


def _crossing_table(one: Measured, beside: Measured | None) -> list[str]:
    head = ["layout", "measured", "predicted", *([f"{TRAINED}: measured"] if beside is not None else [])]
    title = f"Batch at which {one.subject.title} falls below plain decoding"
    lines = [title, "", _line(head), "|" + "---|" * len(head)]
    for arm in one.arms:
        cells = [arm, crossing(one.ratios(arm)), crossing(one.predicted(arm))]
        lines.append(_line([*cells, crossing(beside.ratios(arm))] if beside is not None else cells))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def record(measured: Sequence[Measured]) -> dict[str, Any]:
    """Everything, for the JSON file."""
    return {
        "subjects": [
            {
                "title": one.subject.title,
                "synthetic_acceptance": one.subject.chances,
                "facts": dict(one.facts),
                "pass_seconds": {"network": one.cost.network.points, "head": one.cost.head.points},
                "rows": [asdict(r) for r in one.rows],
                "crossing": {
                    arm: {"measured": crossing(one.ratios(arm)), "predicted": crossing(one.predicted(arm))}
                    for arm in one.arms
                },
            }
            for one in measured
        ]
    }


def write(folder: Path, measured: Sequence[Measured]) -> list[Path]:
    """overhead.json and overhead.md in `folder`. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "overhead.json", folder / "overhead.md"]
    files[0].write_text(json.dumps(record(measured), indent=1), encoding="utf-8")
    files[1].write_text(to_markdown(measured), encoding="utf-8")
    return files


def draw(folder: Path, measured: Sequence[Measured]) -> list[Path]:
    """A PNG for each subject. Raises PlotError without matplotlib."""
    files = []
    for number, one in enumerate(measured, start=1):
        arms = [arm for arm in one.arms if arm == AUTO or arm.startswith("k=")]
        bounds = {
            arm: [(r.ratio.low, r.ratio.high) for r in one.rows if r.arm == arm] for arm in arms if len(one.rows) > 1
        }
        series = {arm: one.ratios(arm) for arm in arms}
        batches = sorted({r.num_sequences for r in one.rows})
        files.append(
            line_plot(
                folder / f"overhead-{number}.png",
                {**series, PLAIN: [(batch, 1.0) for batch in batches]},
                title="Against plain decoding: " + one.subject.title.replace(", ", ",\n", 1),
                x="sequences in the batch",
                y="tokens per second, plain decoding = 1",
                ranges=bounds,
                log_x=True,
                note=f"{one.facts.get('machine')}; commit {one.facts.get('commit')}; medians, 95 % bootstrap bounds",
            )
        )
    return files
