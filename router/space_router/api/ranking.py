"""Which of several choices is the best."""

from collections.abc import Iterable

from space_router.text.text_stream import TextToken


def mean_logprob(tokens: Iterable[TextToken]) -> float:
    """By what `best_of` ranks: the mean log-probability of a choice's tokens; minus infinity where none is known."""
    values = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
    return sum(values) / len(values) if values else float("-inf")
