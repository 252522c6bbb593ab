"""Ranking of choices for `best_of`."""

from collections.abc import Iterable, Sequence

from space_router.api.generation import CompletedChoice
from space_router.text.text_stream import TextToken


def mean_logprob(tokens: Iterable[TextToken]) -> float:
    """Return the mean log-probability of a choice's tokens, the rank in `best_of`; minus infinity if none is known."""
    values = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
    return sum(values) / len(values) if values else float("-inf")


def most_probable(choices: Sequence[CompletedChoice]) -> list[CompletedChoice]:
    """Return the choices sorted best first; the order of equal ones is kept."""
    return sorted(choices, key=lambda one: mean_logprob(one.tokens), reverse=True)
