"""`spaceserve eval acceptance`: tokens per step by k and temperature, repetition, and speed-up over plain decoding."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from space_common.repetition import is_looping, repeated_share
from space_common.worker.completion import CompletionOutput
from space_model.loading.load import load_model
from space_proto import worker_pb2 as pb
from tqdm import tqdm

from space_eval.acceptance import served
from space_eval.acceptance.generation import (
    describe_prompts,
    encode_conversations,
    is_blank,
    is_filler,
    load_tokenizer,
    torch_facts,
)
from space_eval.acceptance.options import add_acceptance
from space_eval.acceptance.paired_decoding import PairedDecoder, TextsDiffer
from space_eval.data import load_conversations
from space_eval.flags import FlagError, given
from space_eval.report import columns_table, figure, markdown_facts, publish, ratio


@dataclass(frozen=True)
class AcceptanceRow:
    """One setting over all prompts. Shares are in 0..1; means are over steps, not over prompts."""

    temperature: float
    max_drafts: int  # k
    num_outputs: int
    num_tokens: int  # emitted after the prefill's token
    tokens_per_step: float
    tokens_per_step_not_looping: float  # over outputs that do not loop; nan if all loop
    tokens_per_step_no_blanks: float  # whitespace-only tokens are not counted, their steps are
    accepted_by_position: tuple[float, ...]  # accepted share of the drafts at position 1, 2, …
    repeated_4grams: float  # mean share of 4-grams that occurred before in the output
    looping: float  # share of outputs that loop
    characters_per_step: float
    accepted_filler: float  # share of accepted tokens that are only whitespace or punctuation
    speedup: float  # plain decoding's seconds per token / this one's, same prompts, same run

    @classmethod
    def of(
        cls,
        generations: Sequence[CompletionOutput],
        plain: Sequence[CompletionOutput],
        decode: Callable[[Sequence[int]], str],
        *,
        temperature: float,
        max_drafts: int,
    ) -> AcceptanceRow:
        """Build the row from one setting's generations and plain decoding's on the same prompts."""
        steps = [step for g in generations for step in g.steps]
        steady = [g for g in generations if not is_looping(g.tokens)]
        accepted = [token for step in steps for token in step.tokens[: step.num_accepted]]
        num_tokens = sum(g.num_decoded for g in generations)
        blanks = sum(is_blank(decode([token])) for step in steps for token in step.tokens)
        by_position = []
        for position in range(1, max_drafts + 1):
            laid_out = [step.num_accepted >= position for step in steps if step.num_drafted >= position]
            by_position.append(ratio(sum(laid_out), len(laid_out)))
        return cls(
            temperature=temperature,
            max_drafts=max_drafts,
            num_outputs=len(generations),
            num_tokens=num_tokens,
            tokens_per_step=ratio(num_tokens, len(steps)),
            tokens_per_step_not_looping=ratio(sum(g.num_decoded for g in steady), sum(len(g.steps) for g in steady)),
            tokens_per_step_no_blanks=ratio(num_tokens - blanks, len(steps)),
            accepted_by_position=tuple(by_position),
            repeated_4grams=statistics.fmean(repeated_share(g.tokens) for g in generations),
            looping=1.0 - ratio(len(steady), len(generations)),
            characters_per_step=ratio(sum(len(decode(g.tokens[len(g.first) :])) for g in generations), len(steps)),
            accepted_filler=ratio(sum(is_filler(decode([token])) for token in accepted), len(accepted)),
            speedup=ratio(_seconds_per_token(plain), _seconds_per_token(generations)),
        )


def _seconds_per_token(generations: Sequence[CompletionOutput]) -> float:
    return ratio(sum(g.decode_seconds for g in generations), sum(g.num_decoded for g in generations))


def run(options: argparse.Namespace) -> int:
    """Print the table. Return exit status 0, or 1 if drafts change a text of the server at --url."""
    if options.url is not None:
        _check_flags(options)
        return served.run(options)
    rows, facts = measure(options)
    page = markdown_facts(facts) + "\n" + columns_table(COLUMNS, rows)
    publish("acceptance", options.out, page, {"facts": facts, "rows": [asdict(row) for row in rows]})
    return 0


def _check_flags(options: argparse.Namespace) -> None:
    """Raise FlagError for flags that are about a model that this process would load, beside --url."""
    parser = argparse.ArgumentParser()
    add_acceptance(parser)
    for name in ("model", "layout", "dtype", "weights", "kv_dtype", "num_threads"):
        if getattr(options, name) != parser.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            raise FlagError(
                f"{flag} goes with a model that is loaded here; the server at --url has its own. Leave it out."
            )


def measure(options: argparse.Namespace) -> tuple[list[AcceptanceRow], dict[str, object]]:
    """Measure all settings of the options over all prompts."""
    model = load_model(options.model, **given(options, "dtype", "weights", "kv_dtype", "num_threads"))
    if not model.facts.num_masks:
        raise FlagError(
            f"{options.model} has no masks, so it drafts nothing whose acceptance could be measured. spaceserve train "
            "gives it masks; spaceserve eval speed measures what drafts from the text so far gain."
        )
    tokenizer = load_tokenizer(options.model)
    loaded = load_conversations(options.prompts, options.limit)
    prompts = encode_conversations(
        options.model, tokenizer, loaded, options.chat, window=model.facts.window, max_tokens=options.max_tokens
    )
    decoder = PairedDecoder(
        model, sorted({min(k, model.facts.num_masks) for k in options.k} - {0}), layout=options.layout
    )

    rows: list[AcceptanceRow] = []
    for temperature in options.temperature:
        outputs: dict[int, list[CompletionOutput]] = {k: [] for k in decoder.ks}
        bar = tqdm(prompts, desc=f"temperature {temperature:g}", unit="prompt", file=sys.stderr, disable=None)
        for number, prompt in enumerate(bar):
            sampling = pb.Sampling(seed=options.seed + number, temperature=temperature)
            for k in decoder.ks:
                outputs[k].append(decoder.once(k, prompt, sampling=sampling, max_tokens=options.max_tokens))
                if outputs[k][-1].tokens != outputs[0][-1].tokens:
                    raise TextsDiffer(f"Prompt {number + 1} gives another text with k={k} than without drafts.")
        rows += [
            AcceptanceRow.of(
                outputs[k],
                outputs[0],
                lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
                temperature=temperature,
                max_drafts=k,
            )
            for k in decoder.ks
        ]
    known = model.facts
    facts: dict[str, object] = {"model": known.name, "model hash": known.model_hash[:12], "dtype": known.number_format}
    facts |= {"prompts": describe_prompts(options.prompts.name, prompts), "new tokens": options.max_tokens}
    facts |= {"batch": 1, "layout": options.layout, "machine": torch_facts()}
    return rows, facts


COLUMNS: Sequence[tuple[str, Callable[[AcceptanceRow], str]]] = (
    ("T", lambda row: f"{row.temperature:g}"),
    ("k", lambda row: str(row.max_drafts)),
    ("tokens/step", lambda row: f"{row.tokens_per_step:.2f}"),
    ("not looping", lambda row: figure(row.tokens_per_step_not_looping)),
    ("no blanks", lambda row: f"{row.tokens_per_step_no_blanks:.2f}"),
    ("accepted at 1, 2, …", lambda row: " ".join(map(figure, row.accepted_by_position))),
    ("repeated 4-grams", lambda row: f"{row.repeated_4grams:.2f}"),
    ("looping", lambda row: f"{row.looping:.0%}"),
    ("chars/step", lambda row: f"{row.characters_per_step:.1f}"),
    ("accepted filler", lambda row: f"{row.accepted_filler:.2f}"),
    ("speed-up", lambda row: f"{row.speedup:.2f}"),
)
