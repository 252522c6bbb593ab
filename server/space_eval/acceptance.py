"""How many tokens a step yields, on which text, and what that is worth in seconds."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from space_eval.generation import Generation
from space_eval.text_statistics import is_blank, is_filler, is_looping, repeated_share


@dataclass(frozen=True)
class AcceptanceRow:
    """One setting over all prompts. Shares are of 1; means are over steps, not over prompts."""

    temperature: float
    max_drafts: int  # k
    num_outputs: int
    num_tokens: int  # emitted after the prefill's own
    tokens_per_step: float
    tokens_per_step_not_looping: float  # over the outputs that do not loop; nan where all do
    tokens_per_step_no_blanks: float  # whitespace-only tokens left out of the count, their steps kept
    accepted_by_position: tuple[float, ...]  # share of the drafts laid out at position 1, 2, … that were accepted
    repeated_4grams: float  # mean share of 4-grams that occurred earlier in the output
    looping: float  # share of outputs that loop
    characters_per_step: float
    accepted_filler: float  # share of accepted tokens that are only whitespace or punctuation
    speedup: float  # seconds per token of plain decoding / of this, same prompts, same run

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def summarise(
    generations: Sequence[Generation],
    plain: Sequence[Generation],
    decode: Callable[[Sequence[int]], str],
    *,
    temperature: float,
    max_drafts: int,
) -> AcceptanceRow:
    """One row from the generations of one setting and those of plain decoding on the same prompts."""
    steady = [g for g in generations if not is_looping(g.tokens)]
    accepted = [token for g in generations for step in g.steps for token in step.tokens[: step.num_accepted]]
    num_steps = sum(len(g.steps) for g in generations)
    num_tokens = sum(g.num_decoded for g in generations)
    blanks = sum(is_blank(decode([token])) for g in generations for step in g.steps for token in step.tokens)
    return AcceptanceRow(
        temperature=temperature,
        max_drafts=max_drafts,
        num_outputs=len(generations),
        num_tokens=num_tokens,
        tokens_per_step=_ratio(num_tokens, num_steps),
        tokens_per_step_not_looping=_tokens_per_step(steady),
        tokens_per_step_no_blanks=_ratio(num_tokens - blanks, num_steps),
        accepted_by_position=_accepted_by_position(generations, max_drafts),
        repeated_4grams=statistics.fmean(repeated_share(g.tokens) for g in generations),
        looping=1.0 - _ratio(len(steady), len(generations)),
        characters_per_step=_ratio(sum(len(decode(g.tokens[len(g.first) :])) for g in generations), num_steps),
        accepted_filler=_ratio(sum(is_filler(decode([token])) for token in accepted), len(accepted)),
        speedup=_ratio(_seconds_per_token(plain), _seconds_per_token(generations)),
    )


def _tokens_per_step(generations: Sequence[Generation]) -> float:
    return _ratio(sum(g.num_decoded for g in generations), sum(len(g.steps) for g in generations))


def _accepted_by_position(generations: Sequence[Generation], max_drafts: int) -> tuple[float, ...]:
    shares = []
    for position in range(1, max_drafts + 1):
        laid_out = [step for g in generations for step in g.steps if step.num_drafted >= position]
        shares.append(_ratio(sum(step.num_accepted >= position for step in laid_out), len(laid_out)))
    return tuple(shares)


def _seconds_per_token(generations: Sequence[Generation]) -> float:
    return _ratio(sum(g.decode_seconds for g in generations), sum(g.num_decoded for g in generations))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")
