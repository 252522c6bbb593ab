"""One arm of a comparison: a server, its API, and the request fields besides the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from space_eval.bench.client import Endpoint, LoadError, get_json, parsed, post_json, stream_events
from space_eval.bench.exchange import Exchange, LoadRequest, TokenEvent
from space_eval.bench.polling import joules


@dataclass(frozen=True)
class Arm:
    """A measured server with its settings. Two arms may share a server, with and without drafts."""

    name: str
    endpoint: Endpoint
    api: LoadApi
    temperature: float = 0.0  # 0: greedy
    seed: int = 1  # of request 0; request n uses seed + n
    is_spaceserve: bool = False  # it accepts our fields and reports tokens and steps
    counts_energy: bool = False  # its /metrics count joules
    has_synthetic_acceptance: bool = False  # drafts are accepted at a given rate, regardless of their ids
    speculation: str | int | None = None  # of each request; None: the server's default
    model: str | None = None  # of each request
    window: int | None = None  # prompt and answer together, in tokens
    usage: bool = True  # it reports token usage at the end of a stream on request
    ignore_eos: bool = True  # every answer has full length; spaceserve only
    fields: Mapping[str, Any] = field(default_factory=dict)  # added by the user to every body
    is_baseline: bool = False  # later arms are compared with it

    def body(self, request: LoadRequest, salt: str | None) -> dict[str, Any]:
        """Return the body of `request`. Different `salt`s share no cached prefix, so every prompt is computed."""
        body = self.api.body(request, self)
        if self.is_spaceserve:
            max_prompt = None if self.window is None else self.window - request.max_tokens
            body = merged(body, self.api.spaceserve_fields(self, salt, max_prompt))
        return merged(body, self.fields)

    async def answer(self, request: LoadRequest, salt: str | None, exchange: Exchange, begun: float) -> None:
        """Fill `exchange` from the stream; `begun`: event-loop time at which the request began. Raises LoadError."""
        clock = asyncio.get_running_loop().time
        exchange.late = clock() - begun
        try:
            async with aclosing(stream_events(self.endpoint, self.api.path, self.body(request, salt))) as stream:
                async for events in stream:
                    now = clock() - begun
                    for event in events:
                        last = event == b"[DONE]" or self.api.read(parsed(event), exchange, now)
                        exchange.finished = exchange.finished or last
            if not exchange.finished or not exchange.events:
                raise LoadError("The stream ended without its last event.")
        except LoadError as error:
            exchange.finished = False
            exchange.error = "broken" if error.status is None else str(error.status)
            raise
        finally:
            exchange.seconds = clock() - begun
            exchange.share_counted_tokens()


class LoadApi(Protocol):
    """An HTTP API: its path, its request body, its events."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...

    def body(self, request: LoadRequest, arm: Arm) -> dict[str, Any]:
        """Return the fields that every server of this API accepts."""

    def spaceserve_fields(self, arm: Arm, salt: str | None, max_prompt_tokens: int | None) -> dict[str, Any]:
        """Return the extra fields that only spaceserve accepts."""

    def read(self, value: Mapping[str, Any], exchange: Exchange, seconds: float) -> bool:
        """Record an event `seconds` after the start. Return True if it is the last one. Raises LoadError."""


@dataclass(frozen=True)
class OpenAI:
    """`/v1/completions` or `/v1/chat/completions`."""

    name: str = "openai"
    path: str = "/v1/completions"
    chat: bool = False

    def body(self, request: LoadRequest, arm: Arm) -> dict[str, Any]:
        messages = {"messages": [{"role": "user", "content": request.prompt}]}
        return {
            **(messages if self.chat else {"prompt": request.prompt}),
            "max_tokens": request.max_tokens,
            "temperature": arm.temperature,
            "seed": arm.seed + request.number,
            "stream": True,
            **({} if arm.model is None else {"model": arm.model}),
            **({"stream_options": {"include_usage": True}} if arm.usage else {}),
        }

    def spaceserve_fields(self, arm: Arm, salt: str | None, max_prompt_tokens: int | None) -> dict[str, Any]:
        optional = {
            "speculation": arm.speculation,
            "cache_salt": salt,
            "truncate_prompt_tokens": max_prompt_tokens,
        }
        return {"return_token_ids": True, "ignore_eos": arm.ignore_eos, **_given(optional)}

    def read(self, value: Mapping[str, Any], exchange: Exchange, seconds: float) -> bool:
        _raise_error(value)
        for choice in value.get("choices") or ():
            text = (choice.get("delta") or {}).get("content") if self.chat else choice.get("text")
            ids = tuple(choice.get("token_ids") or ())
            exchange.text += text or ""
            if ids or (text and choice.get("token_ids") is None):
                exchange.events.append(TokenEvent(seconds, len(ids) or 1, ids, len(text or "")))
        if usage := value.get("usage"):
            exchange.num_prompt_tokens = usage.get("prompt_tokens")
            exchange.num_counted = usage.get("completion_tokens")
        exchange.statistics = value.get("spaceserve") or exchange.statistics
        return False  # [DONE] is the end


@dataclass(frozen=True)
class Tgi:
    """`/generate_stream`: one event per token."""

    name: str = "tgi"
    path: str = "/generate_stream"

    def body(self, request: LoadRequest, arm: Arm) -> dict[str, Any]:
        parameters: dict[str, Any] = {"max_new_tokens": request.max_tokens, "details": True}
        if arm.temperature > 0:
            parameters |= {"do_sample": True, "temperature": arm.temperature, "seed": arm.seed + request.number}
        return {"inputs": request.prompt, "parameters": parameters}

    def spaceserve_fields(self, arm: Arm, salt: str | None, max_prompt_tokens: int | None) -> dict[str, Any]:
        # This API has no fields for the salt and for ignoring EOS.
        return {"parameters": _given({"speculation": arm.speculation, "truncate": max_prompt_tokens})}

    def read(self, value: Mapping[str, Any], exchange: Exchange, seconds: float) -> bool:
        _raise_error(value)
        if token := value.get("token"):
            text, id_ = token.get("text") or "", token.get("id")
            exchange.text += text
            event = TokenEvent(seconds, 1, () if id_ is None else (id_,), len(text))
            if exchange.events and exchange.events[-1].seconds == seconds:  # events that arrived together are one burst
                last = exchange.events.pop()
                num_characters = last.num_characters + len(text)
                event = TokenEvent(seconds, last.num_tokens + 1, last.token_ids + event.token_ids, num_characters)
            exchange.events.append(event)
        details = value.get("details") or {}
        exchange.num_prompt_tokens = details.get("input_length", exchange.num_prompt_tokens)
        exchange.num_counted = details.get("generated_tokens", exchange.num_counted)
        return value.get("generated_text") is not None


APIS: Mapping[str, LoadApi] = {
    "openai": OpenAI(),
    "chat": OpenAI("chat", "/v1/chat/completions", chat=True),
    "tgi": Tgi(),
}
"""APIs by their `--api` name."""


async def find(arm: Arm) -> tuple[Arm, dict[str, Any]]:
    """Return the arm completed from its server's reports, and its /info (empty if none). Raises LoadError."""
    try:
        info = await get_json(arm.endpoint, "/info")
    except LoadError as error:
        if error.status is None:
            raise
        info = {}
    if info.get("router") == "spaceserve":
        window = info.get("max_total_tokens")
        if window is None:
            raise LoadError(f"{arm.name} is not ready: it does not know its model yet.")
        counts_energy = await joules(arm.endpoint) is not None
        synthetic = bool(info.get("synthetic_acceptance"))
        arm = replace(arm, window=window, counts_energy=counts_energy, has_synthetic_acceptance=synthetic)
        return replace(arm, is_spaceserve=True), info
    model = arm.model
    if model is None and arm.api.name != "tgi":
        model = await _first_model(arm.endpoint)
    return await _with_usage(replace(arm, model=model, speculation=None)), info or {"model_id": model}


async def _first_model(endpoint: Endpoint) -> str:
    """Return the server's model name for requests."""
    listed = (await get_json(endpoint, "/v1/models")).get("data") or []
    if not listed:
        raise LoadError("/v1/models lists no model. Give its name with --served-model.")
    return str(listed[0]["id"])


async def _with_usage(arm: Arm) -> Arm:
    """Probe with one short request; disable `usage` if the server rejects `stream_options`."""
    begun = asyncio.get_running_loop().time()
    try:
        await arm.answer(LoadRequest(0, "Hello", 1), None, Exchange(), begun)
    except LoadError as error:
        if error.status not in (400, 422) or not arm.usage:
            raise
        return await _with_usage(replace(arm, usage=False))
    return arm


async def token_ids(endpoint: Endpoint, text: str) -> list[int] | None:
    """Tokenize the text on the server. Return None if it has no /tokenize that returns ids."""
    for body in ({"prompt": text, "add_special_tokens": False}, {"inputs": text}):
        try:
            answer = await post_json(endpoint, "/tokenize", body)
        except LoadError as error:
            if error.status is None:
                raise
            continue
        if isinstance(answer, dict) and answer.get("tokens"):
            return [int(id_) for id_ in answer["tokens"]]
        if isinstance(answer, list) and answer:
            return [int(token["id"]) for token in answer]
    return None


def merged(body: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `body` updated with `more`; nested objects are merged."""
    result = dict(body)
    for name, value in more.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _raise_error(value: Mapping[str, Any]) -> None:
    if error := value.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise LoadError(f"The stream ended with an error: {message}")
