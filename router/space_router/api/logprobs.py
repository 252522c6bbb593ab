"""Log-probabilities as OpenAI writes them."""

from collections.abc import Sequence
from typing import Any

from space_router.engine.request import TokenLogprobs
from space_router.text.detokenizer import Detokenizer
from space_router.text.text_stream import TextToken
from space_router.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


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

    def add_prompt(self, ids: Sequence[int], text: str, known: Sequence[TokenLogprobs]) -> None:
        """An echoed prompt: its first token has no log-probability. `text`: as it is echoed."""
        detokenizer = Detokenizer(self._tokenizer)
        values = [None] * (len(ids) - len(known)) + list(known)
        num_written = 0  # characters of special tokens that the client itself has written out
        for id_, logprobs in zip(ids, values, strict=True):
            offset = num_written + detokenizer.push(id_)[1].start
            self._add(id_, logprobs, offset)
            if id_ in self._tokenizer.special_ids:
                name = self._tokenizer.token_text(id_)
                num_written += len(name) if text.startswith(name, offset) else 0

    def add(self, tokens: Sequence[TextToken], offset: int) -> None:
        """Generated tokens; `offset`: where the generated text begins."""
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
    """`logprobs` of a chat choice."""

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
    tokenizer: Tokenizer, ids: Sequence[int], known: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` of a choice: for each prompt id, id -> log-probability, rank and text; null for the first."""
    found: list[dict[str, Any] | None] = [None] * (len(ids) - len(known))
    for logprobs in known:
        entries: dict[str, dict[str, Any]] = {
            str(id_): {"logprob": finite(value), "rank": rank, "decoded_token": tokenizer.token_text(id_)}
            for rank, (id_, value) in enumerate(logprobs.top, start=1)
        }
        own = {"logprob": finite(logprobs.logprob), "rank": None, "decoded_token": tokenizer.token_text(logprobs.id)}
        entries.setdefault(str(logprobs.id), own)
        found.append(entries)
    return found
