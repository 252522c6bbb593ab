"""How the three kinds of endpoint are asked and how their events are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from space_eval.load_client import LoadError
from space_eval.load_exchange import Exchange, Piece


@dataclass(frozen=True)
class Ask:
    """One request of the load."""

    number: int  # within its round
    prompt: str | tuple[int, ...]  # text or token ids
    max_tokens: int
    arrival: float = 0.0  # seconds after the round's begin; open loop only


@dataclass(frozen=True)
class Sampling:
    """How every answer is drawn."""

    temperature: float  # 0: greedy
    seed: int  # of request 0; the others count up from it


class Dialect(Protocol):
    """An API: where it is, what it is asked, what its events say."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...

    def body(self, ask: Ask, sampling: Sampling, model: str | None, *, usage: bool) -> dict[str, Any]:
        """What every server of this API takes; `usage`: it is asked to count the tokens at the end."""

    def ours(
        self, speculation: str | int | None, salt: str | None, max_prompt_tokens: int | None, *, ignore_eos: bool
    ) -> dict[str, Any]:
        """What only spaceserve takes besides, as fields of the body or of `parameters`."""

    def read(self, value: Mapping[str, Any], exchange: Exchange, seconds: float) -> bool:
        """Note an event that came `seconds` after the begin; True where no other can follow. Raises LoadError."""


@dataclass(frozen=True)
class OpenAI:
    """`/v1/completions` or `/v1/chat/completions`."""

    chat: bool = False

    @property
    def name(self) -> str:
        return "chat" if self.chat else "openai"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, ask: Ask, sampling: Sampling, model: str | None, *, usage: bool) -> dict[str, Any]:
        prompt = {"messages": [{"role": "user", "content": ask.prompt}]} if self.chat else {"prompt": ask.prompt}
        asked: dict[str, Any] = {
            **prompt,
            "max_tokens": ask.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed + ask.number,
            "stream": True,
        }
        if model is not None:
            asked["model"] = model
        if usage:
            asked["stream_options"] = {"include_usage": True}
        return asked

    def ours(
        self, speculation: str | int | None, salt: str | None, max_prompt_tokens: int | None, *, ignore_eos: bool
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {"return_token_ids": True, "ignore_eos": ignore_eos}
        if speculation is not None:
            fields["speculation"] = speculation
        if salt is not None:
            fields["cache_salt"] = salt
        if max_prompt_tokens is not None:
            fields["truncate_prompt_tokens"] = max_prompt_tokens
        return fields

    def read(self, value: Mapping[str, Any], exchange: Exchange, seconds: float) -> bool:
        if value.get("error"):
            raise LoadError(f"The stream ended with an error: {_words(value['error'])}")
        for choice in value.get("choices") or ():
            text = (choice.get("delta") or {}).get("content") if self.chat else choice.get("text")
            ids = tuple(choice.get("token_ids") or ())
            if text:
                exchange.text += text
            if ids or (text and choice.get("token_ids") is None):
                exchange.pieces.append(Piece(seconds, len(ids) or 1, ids, len(text or "")))
        usage = value.get("usage")
        if usage:
            exchange.num_prompt_tokens = usage.get("prompt_tokens")
            exchange.num_counted = usage.get("completion_tokens")
        exchange.statistics = value.get("spaceserve") or exchange.statistics
        return False  # [DONE] is the end


@dataclass(frozen=True)
class Tgi:
    """`/generate_stream`: one event per token."""

    name: str = "tgi"
    path: str = "/generate_stream"

    def body(self, ask: Ask, sampling: Sampling, model: str | None, *, usage: bool) -> dict[str, Any]:
        parameters: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "details": True}
        if sampling.temperature > 0:
            parameters |= {"do_sample": True, "temperature": sampling.temperature, "seed": sampling.seed + ask.number}
        return {"inputs": ask.prompt, "parameters": parameters}

    def ours(
        self, speculation: str | int | None, salt: str | None, max_prompt_tokens: int | None, *, ignore_eos: bool
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {}  # it has no field for a salt, nor for EOS
        if speculation is not None:
            fields["speculation"] = speculation
        if max_prompt_tokens is not None:
            fields["truncate"] = max_prompt_tokens
        return {"parameters": fields}

    def read(self, value: Mapping[str, Any], exchange: Exchange, seconds: float) -> bool:
        if value.get("error"):
            raise LoadError(f"The stream ended with an error: {_words(value['error'])}")
        token = value.get("token")
        if token:
            text, id_ = token.get("text") or "", token.get("id")
            exchange.text += text
            ids = () if id_ is None else (id_,)
            last = exchange.pieces[-1] if exchange.pieces else None
            if last is not None and last.seconds == seconds:  # events that came together are one burst
                exchange.pieces[-1] = Piece(
                    seconds, last.num_tokens + 1, last.token_ids + ids, last.num_characters + len(text)
                )
            else:
                exchange.pieces.append(Piece(seconds, 1, ids, len(text)))
        details = value.get("details") or {}
        exchange.num_prompt_tokens = details.get("input_length", exchange.num_prompt_tokens)
        exchange.num_counted = details.get("generated_tokens", exchange.num_counted)
        return value.get("generated_text") is not None


DIALECTS: Mapping[str, Dialect] = {"openai": OpenAI(), "chat": OpenAI(chat=True), "tgi": Tgi()}
"""By the name that `--api` takes."""


def merged(body: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with the fields of `more`, objects joined field by field."""
    made = dict(body)
    for name, value in more.items():
        held = made.get(name)
        made[name] = merged(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return made


def parsed(event: bytes) -> Mapping[str, Any]:
    """An event's object. Raises LoadError."""
    try:
        value = json.loads(event)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise LoadError(f"An event is no JSON object: {event[:80].decode(errors='replace')!r}")
    return value


def _words(error: Any) -> str:
    return str(error.get("message") if isinstance(error, dict) else error)
