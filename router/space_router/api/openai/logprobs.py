"""Log-probabilities in OpenAI's formats."""

from collections.abc import Sequence
from typing import Any

from space_router.engine.request.request import TokenLogprobs
from space_router.text.text_stream import TextToken
from space_router.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


class CompletionLogprobs:
    """Four parallel lists: tokens, token_logprobs, top_logprobs, text_offset (in characters of the choice's text)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def add_prompt(self, ids: Sequence[int], offsets: Sequence[int], known: Sequence[TokenLogprobs | None]) -> None:
        """Add tokens of an echoed prompt; the first one has no log-probability."""
        for id_, offset, logprobs in zip(ids, offsets, known, strict=True):
            self._add(id_, logprobs, offset)

    def add(self, tokens: Sequence[TextToken], offset: int) -> None:
        """Add generated tokens. `offset`: the start of the generated text, in characters."""
        for token in tokens:
            self._add(token.span.id, token.logprobs, offset + token.span.start)

    def _add(self, id_: int, logprobs: TokenLogprobs | None, offset: int) -> None:
        text = self._tokenizer.token_text
        self.lists["tokens"].append(text(id_))
        self.lists["text_offset"].append(offset)
        if logprobs is None:
            self.lists["token_logprobs"].append(None)
            self.lists["top_logprobs"].append(None)
            return
        top = {text(other): finite(value) for other, value in logprobs.top}
        top.setdefault(text(id_), finite(logprobs.logprob))
        self.lists["token_logprobs"].append(finite(logprobs.logprob))
        self.lists["top_logprobs"].append(top)


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TextToken]) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice."""

    def one(id_: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(id_),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.bytes_of[id_]),
        }

    content = [
        {**one(token.span.id, token.logprobs.logprob), "top_logprobs": [one(*entry) for entry in token.logprobs.top]}
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, known: Sequence[TokenLogprobs], count: int, *, first: bool
) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs`, or its next piece: for each prompt id, a map from id to log-probability, rank and text.

    Each map has the prompt id and the `count` most probable ids; with `first`, the first entry is null.
    """
    found: list[dict[str, Any] | None] = [None] if first else []
    for logprobs in known:
        entries: dict[str, dict[str, Any]] = {
            str(id_): {"logprob": finite(value), "rank": rank, "decoded_token": tokenizer.token_text(id_)}
            for rank, (id_, value) in enumerate(logprobs.top[:count], start=1)
        }
        own = {"logprob": finite(logprobs.logprob), "rank": None, "decoded_token": tokenizer.token_text(logprobs.id)}
        entries.setdefault(str(logprobs.id), own)
        found.append(entries)
    return found
