"""`spaceserve eval speed`: plain decoding against SPACE in seconds, beside transformers' assisted generation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from tqdm import tqdm

from space_eval.acceptance.generation import (
    AssistedAnswer,
    AssistedDecoder,
    DraftMethod,
    describe_prompts,
    encode_prompts,
    environment_facts,
    load_tokenizer,
)
from space_eval.acceptance.paired_decoding import (
    PLAIN,
    PairedDecoder,
    PairedFigures,
    TextsDiffer,
    TimedAnswer,
    check_same_text,
    rates,
    space_files,
)
from space_eval.data import built_in, load_prompts
from space_eval.flags import FlagError, given
from space_eval.plots import Bar, bar_plot
from space_eval.report import Spread, columns_table, markdown_facts, publish, ratio


def run(options: argparse.Namespace) -> int:
    """Print the tables. Return exit status 0, or 1 if speculation changed a text."""
    for flag, value in (("--rounds", options.rounds), ("--max-tokens", options.max_tokens)):
        if value < 1:
            raise FlagError(f"{flag} is {value}; it must be at least 1.")
    methods = [DraftMethod.parse(text) for text in options.against]
    if methods and 0.0 not in options.temperature:
        raise FlagError("--against compares greedy decoding; add 0 to --temperature.")
    try:
        rows, others, facts = measure(options, methods)
    except TextsDiffer as error:
        print(f"spaceserve eval speed: {error}", file=sys.stderr)
        return 1
    page = to_markdown(rows, others, facts)
    record = {"facts": facts, "rows": list(map(asdict, rows)), "rivals": list(map(asdict, others))}
    publish("speed", options.out, page, record, lambda: [draw(options.out / "speed.png", rows, others, facts)])
    return 0


def measure(
    options: argparse.Namespace, methods: Sequence[DraftMethod]
) -> tuple[list[SpeedRow], list[MethodRow], dict[str, object]]:
    """Measure all temperatures, ks and methods over all prompts."""
    chosen = given(options, "dtype", "device", "mask_ids", "num_masks", "num_threads")
    model = load_model(options.model, weights="auto", **chosen)
    ks = sorted({min(k, model.facts.num_masks) for k in options.k} - {PLAIN})
    if not ks:
        raise FlagError(
            f"{options.model} has {model.facts.num_masks} masks and --k is {options.k}: there is nothing to compare. "
            "spaceserve train makes a checkpoint with masks; --mask-ids and --num-masks declare a published one's."
        )
    name = "built-in function heads" if options.prompts is None else options.prompts.name
    texts = built_in()[: options.limit] if options.prompts is None else load_prompts(options.prompts, options.limit)
    tokenizer = load_tokenizer(options.model)
    prompts = encode_prompts(tokenizer, texts, window=model.facts.window, max_tokens=options.max_tokens)
    decoder = PairedDecoder(model, ks, layout=options.layout)
    decoder.warm_up(prompts[0])
    base = Checkpoint.open(options.model)
    theirs = [AssistedDecoder(base, model.facts, r, num_draft_tokens=options.draft_tokens) for r in methods]
    for other in theirs:
        other.plain(prompts[0], 4)
        other.assisted(prompts[0], 4)

    rows: list[SpeedRow] = []
    others: list[MethodRow] = []
    for temperature in options.temperature:
        answers: list[dict[int, TimedAnswer]] = []
        pairs: list[list[list[tuple[AssistedAnswer, AssistedAnswer]]]] = []  # by prompt, method, round
        bar = tqdm(prompts, desc=f"temperature {temperature:g}", unit="prompt", file=sys.stderr, disable=None)
        for number, prompt in enumerate(bar):
            sampling = pb.Sampling(seed=options.seed + number, temperature=temperature)
            made = decoder.run(prompt, sampling=sampling, max_tokens=options.max_tokens, rounds=options.rounds)
            if not options.allow_ties:
                check_same_text(made, f"Prompt {number + 1}")
            answers.append(made)
            if temperature == 0:
                pairs.append([_paired(other, prompt, options) for other in theirs])
        rows += [SpeedRow.of(temperature, k, answers) for k in ks]
        if temperature == 0 and theirs:
            others.append(_ours(model, ks[-1], answers))
            longest = max(map(len, prompts)) + options.max_tokens
            others += [_row_of(one, [of[n] for of in pairs], longest) for n, one in enumerate(theirs)]
    facts = {"model": options.model, "prompts": describe_prompts(name, prompts), "new tokens": options.max_tokens}
    facts |= {"batch": 1, "rounds": options.rounds, "layout": options.layout}
    return rows, others, facts | environment_facts(model)


def _paired(
    other: AssistedDecoder, prompt: Sequence[int], options: argparse.Namespace
) -> list[tuple[AssistedAnswer, AssistedAnswer]]:
    """Return (plain, assisted) of each round; they alternate in running first."""
    made = []
    for number in range(options.rounds):
        if number % 2:
            assisted, plain = other.assisted(prompt, options.max_tokens), other.plain(prompt, options.max_tokens)
        else:
            plain, assisted = other.plain(prompt, options.max_tokens), other.assisted(prompt, options.max_tokens)
        made.append((plain, assisted))
    return made


def _ours(model: SpaceModel, k: int, answers: Sequence[Mapping[int, TimedAnswer]]) -> MethodRow:
    row = SpeedRow.of(0.0, k, answers)
    return MethodRow(
        name=f"SPACE, k={k}, {row.rows_per_step:.0f} rows per step",
        runtime=OURS,
        num_prompts=len(answers),
        tokens_per_pass=row.tokens_per_forward,
        num_passes=sum(by_k[k].num_steps + 1 for by_k in answers),
        num_other_passes=0,
        accepted_share=row.accepted_share,
        speedup=row.speedup,
        ms_per_token=row.space_ms_per_token,
        plain_ms_per_token=row.plain_ms_per_token,
        extra_weight_bytes=extra_weight_bytes(model),
        extra_kv_bytes=(k + 1) * model.facts.kv_bytes_per_token,
        num_identical=row.num_identical,
    )


def extra_weight_bytes(model: SpaceModel) -> int:
    """Return the bytes SPACE adds to the base: the files named in config.json's `space`, and a row per mask id."""
    checkpoint = Checkpoint.open(model.facts.name)
    section = checkpoint.config.get("space") or {}
    in_files: int = sum(file.stat().st_size for file in space_files(checkpoint))
    rows = len(set(section.get("mask_token_ids") or model.facts.mask_ids)) if not section.get("adapter") else 0
    return in_files + rows * model.facts.hidden_size * model.facts.dtype.itemsize


def _row_of(
    other: AssistedDecoder, pairs: Sequence[Sequence[tuple[AssistedAnswer, AssistedAnswer]]], longest: int
) -> MethodRow:
    """`pairs`: by prompt and round."""
    firsts = [rounds[0] for rounds in pairs]
    num_tokens = sum(len(assisted.ids) for _, assisted in firsts)
    num_passes = sum(assisted.num_forwards for _, assisted in firsts)
    num_drafts = sum(assisted.num_draft_forwards for _, assisted in firsts)
    plain_ms, ms = [], []
    for rounds in zip(*pairs, strict=True):
        plain_ms.append(1000 * sum(p.seconds for p, _ in rounds) / sum(len(p.ids) for p, _ in rounds))
        ms.append(1000 * sum(a.seconds for _, a in rounds) / sum(len(a.ids) for _, a in rounds))
    return MethodRow(
        name=other.method.name,
        runtime="transformers",
        num_prompts=len(pairs),
        tokens_per_pass=num_tokens / num_passes,
        num_passes=num_passes,
        num_other_passes=num_drafts,
        accepted_share=ratio(num_tokens - num_passes, num_drafts),
        speedup=Spread.of([plain / fast for plain, fast in zip(plain_ms, ms, strict=True)]),
        ms_per_token=Spread.of(ms),
        plain_ms_per_token=Spread.of(plain_ms),
        extra_weight_bytes=other.draft_weight_bytes,
        extra_kv_bytes=longest * other.draft_kv_bytes_per_token,
        num_identical=sum(plain.ids == assisted.ids for plain, assisted in firsts),
    )


OURS = "ours"  # name of our own runtime


@dataclass(frozen=True, kw_only=True)
class SpeedRow(PairedFigures):
    """One temperature and k over all prompts, each paired with plain decoding."""

    temperature: float
    k: int
    num_prompts: int
    num_tokens: int  # emitted, in one round
    plain_ms_per_token: Spread
    space_ms_per_token: Spread

    @classmethod
    def of(cls, temperature: float, k: int, pairs: Sequence[Mapping[int, TimedAnswer]]) -> SpeedRow:
        """Build from each prompt's answers by k, including plain decoding's."""
        space, plain = [pair[k] for pair in pairs], [pair[PLAIN] for pair in pairs]
        return cls(
            temperature=temperature,
            k=k,
            num_prompts=len(pairs),
            num_tokens=sum(len(answer.ids) for answer in space),
            plain_ms_per_token=Spread.of([1000 / rate for rate in rates(plain)]),
            space_ms_per_token=Spread.of([1000 / rate for rate in rates(space)]),
            **cls.figures(space, plain),
        )


@dataclass(frozen=True)
class MethodRow:
    """One drafting method, ours or transformers': its extra memory and its speed-up."""

    name: str
    runtime: str
    num_prompts: int
    tokens_per_pass: float  # emitted ids per forward pass of the base, both including prefill
    num_passes: int  # of the base, in one round
    num_other_passes: int  # of a draft model, in one round
    accepted_share: float  # of drafts; nan if their number is unknown
    speedup: Spread  # over plain decoding of the same runtime, with prefill
    ms_per_token: Spread
    plain_ms_per_token: Spread
    extra_weight_bytes: int
    extra_kv_bytes: int  # at the longest prompt plus answer
    num_identical: int  # texts equal to plain decoding's of the same runtime


COLUMNS: Sequence[tuple[str, Callable[[SpeedRow], str]]] = (
    ("T", lambda row: f"{row.temperature:g}"),
    ("k", lambda row: str(row.k)),
    ("tokens/step", lambda row: f"{row.tokens_per_step:.2f}"),
    ("rows/step", lambda row: f"{row.rows_per_step:.1f}"),
    ("speed-up", lambda row: row.speedup.shown(2)),
    ("decode only", lambda row: row.decode_speedup.shown(2)),
    ("not looping", lambda row: "–" if row.speedup_not_looping is None else f"{row.speedup_not_looping.median:.2f}"),
    ("ms/token plain", lambda row: row.plain_ms_per_token.shown(2)),
    ("ms/token SPACE", lambda row: row.space_ms_per_token.shown(2)),
    ("looping", lambda row: f"{row.looping:.0%}"),
    ("same text", lambda row: f"{row.num_identical}/{row.num_prompts}"),
)
METHOD_COLUMNS: Sequence[tuple[str, Callable[[MethodRow], str]]] = (
    ("how", lambda row: row.name),
    ("runtime", lambda row: row.runtime),
    ("tokens per pass of the base", lambda row: f"{row.tokens_per_pass:.2f}"),
    ("passes of the base", lambda row: str(row.num_passes)),
    ("other passes", lambda row: str(row.num_other_passes)),
    ("over its own plain decoding", lambda row: row.speedup.shown(2)),
    ("ms/token", lambda row: row.ms_per_token.shown(2)),
    ("ms/token, its plain", lambda row: row.plain_ms_per_token.shown(2)),
    ("extra weights", lambda row: size(row.extra_weight_bytes)),
    ("extra KV", lambda row: size(row.extra_kv_bytes)),
    ("same text", lambda row: f"{row.num_identical}/{row.num_prompts}"),
)


def to_markdown(rows: Sequence[SpeedRow], others: Sequence[MethodRow], facts: Mapping[str, object]) -> str:
    """Return the facts of the run, the tables and their column descriptions as Markdown."""
    text = f"# Plain decoding against SPACE\n\n{markdown_facts(facts)}\n{columns_table(COLUMNS, rows)}{NOTES}"
    if not others:
        return text
    return f"{text}\n## Other ways of drafting\n\n{columns_table(METHOD_COLUMNS, others)}{NOTES_ON_OTHERS}"


NOTES = """
- speed-up: tokens per second over plain decoding in the same round, prompt included: median (low–high).
- tokens/step and rows/step: of decode steps; the prompt's own pass does not count.
- not looping: the speed-up without outputs of which at least half of the 4-grams occurred earlier in them.
"""

NOTES_ON_OTHERS = """
- The runtimes differ: transformers' generation loop and our worker spend different time beside the model. So each ratio
  is over the plain decoding of its own runtime, and the absolute times stand beside it.
- tokens per pass: here the prompt's pass counts, for both. Greedy.
- extra KV: of the draft model at the longest prompt and answer; of SPACE the k+1 slots that a step writes ahead.
"""


def size(num_bytes: int) -> str:
    """Format bytes, such as `10.0 MiB`."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"


def draw(path: Path, rows: Sequence[SpeedRow], others: Sequence[MethodRow], facts: Mapping[str, object]) -> Path:
    """Draw the speed-ups as bars. Raises PlotError without matplotlib."""
    series: dict[str, dict[str, float | Bar]] = {}
    for row in rows:
        bar = Bar(row.speedup.median, row.speedup.low, row.speedup.high)
        series.setdefault(f"SPACE, temperature {row.temperature:g}", {})[f"k={row.k}"] = bar
    for other in others:
        if other.runtime != OURS:
            bar = Bar(other.speedup.median, other.speedup.low, other.speedup.high)
            kind, _, draft = other.name.partition(":")
            series.setdefault("transformers", {})[f"{kind}\n{Path(draft).name}" if draft else kind] = bar
    note = f"{facts.get('model', '')}: {facts.get('machine', '')}"
    return bar_plot(path, series, title="Over plain decoding", y="times as fast", level=1.0, note=note)
