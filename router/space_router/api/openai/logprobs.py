"""Log-probabilities in OpenAI's formats, and echoed prompts with theirs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from space_router.api.plan import Prompt
from space_router.engine.request.request import TokenLogprobs
from space_router.text.text_stream import Detokenizer, TextToken
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


class Echo:
    """Echoes the prompt of one choice incrementally."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, num_top: int) -> None:
        """`num_top`: alternatives to return for each token."""
        self._prompt = prompt
        self._num_top = num_top
        self._offsets = _offsets(tokenizer, prompt)
        self._num_written = 0  # ids echoed so far

    def add(self, known: Sequence[TokenLogprobs], lists: CompletionLogprobs) -> str:
        """Add the next tokens, with the log-probabilities `known`, to the lists; return their text."""
        start = self._num_written
        first: list[TokenLogprobs | None] = [] if start else [None]  # the first id has no log-probability
        values = first + [replace(one, top=one.top[: self._num_top]) for one in known]
        self._num_written = end = start + len(values)
        lists.add_prompt(self._prompt.ids[start:end], self._offsets[start:end], values)
        ends_at = self._offsets[end] if end < len(self._offsets) else len(self._prompt.text)
        return self._prompt.text[self._offsets[start] if start else 0 : ends_at] if values else ""


def _offsets(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Return the start of each id, in characters of the echoed text."""
    detokenizer = Detokenizer(tokenizer)
    num_written = 0  # characters of special tokens that are spelled out in the prompt text
    offsets = []
    for id_ in prompt.ids:
        offset = num_written + detokenizer.push(id_)[1].start
        offsets.append(offset)
        if id_ in tokenizer.special_ids:
            name = tokenizer.token_text(id_)
            num_written += len(name) if prompt.text.startswith(name, offset) else 0
    return offsets
