"""Which of several choices are the best."""

from collections.abc import Iterable, Sequence

from space_router.api.generation import CompletedChoice
from space_router.text.text_stream import TextToken


def mean_logprob(tokens: Iterable[TextToken]) -> float:
    """By what `best_of` ranks: the mean log-probability of a choice's tokens; minus infinity where none is known."""
    values = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
    return sum(values) / len(values) if values else float("-inf")


def most_probable(choices: Sequence[CompletedChoice]) -> list[CompletedChoice]:
    """The best first; of equals the one that came first."""
    return sorted(choices, key=lambda one: mean_logprob(one.tokens), reverse=True)
