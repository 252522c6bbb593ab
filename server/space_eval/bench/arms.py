"""One arm of a comparison: a server, its API, the request fields besides the prompt, and the streamed answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from space_common.http_client import Endpoint, HttpError, get_json, parsed, post_json, stream_events

from space_eval.bench.meters import joules


@dataclass(frozen=True)
class LoadRequest:
    """One request of the load."""

    number: int  # within its round
    prompt: str | tuple[int, ...]  # text or token ids
    max_tokens: int
    arrival: float = 0.0  # seconds after the round's start; open loop only


@dataclass(frozen=True)
class TokenEvent:
    """One stream event that has tokens."""

    seconds: float  # since the request began
    num_tokens: int
    token_ids: tuple[int, ...] = ()  # empty if the server sends none
    num_characters: int = 0


@dataclass
class Exchange:
    """One request and its complete or partial answer.

    A request begins when it is sent; in open loop when it was due, so that client delay counts as latency.
    """

    started: float = 0.0  # seconds after the round's start
    late: float = 0.0  # seconds from the request's beginning to its sending
    events: list[TokenEvent] = field(default_factory=list)
    text: str = ""
    statistics: Mapping[str, Any] = field(default_factory=dict)  # the `spaceserve` object
    num_prompt_tokens: int | None = None  # as counted by the server
    num_counted: int | None = None  # tokens of the answer, as counted by the server
    seconds: float = 0.0  # from the beginning to the end of the stream
    finished: bool = False  # the stream ended normally
    error: str | None = None  # HTTP status of an error, or "broken"

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(id_ for event in self.events for id_ in event.token_ids)

    @property
    def num_tokens(self) -> int:
        return sum(event.num_tokens for event in self.events)

    @property
    def first_token_seconds(self) -> float:
        return self.events[0].seconds

    @property
    def event_gaps(self) -> list[float]:
        """Seconds between consecutive events."""
        return [after.seconds - before.seconds for before, after in itertools.pairwise(self.events)]

    @property
    def token_gaps(self) -> list[float]:
        """Seconds per token after the first event: an event's gap is divided by its tokens, one entry per token."""
        gaps: list[float] = []
        for gap, event in zip(self.event_gaps, self.events[1:], strict=True):
            gaps += [gap / event.num_tokens] * event.num_tokens
        return gaps

    @property
    def seconds_per_token(self) -> float:
        """Mean seconds per token after the first event; 0 if there is no later event."""
        num_tokens = self.num_tokens - self.events[0].num_tokens
        return (self.events[-1].seconds - self.events[0].seconds) / num_tokens if num_tokens else 0.0

    def share_counted_tokens(self) -> None:
        """Distribute the server's token count over events that have no token ids."""
        if self.num_counted is None or self.token_ids or not self.events:
            return
        counts = shared(self.num_counted, [event.num_characters for event in self.events])
        pairs = zip(self.events, counts, strict=True)
        self.events = [replace(event, num_tokens=count) for event, count in pairs if count]


def shared(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` into integers in proportion to `weights`, each at least 1 if possible."""
    if total < len(weights):
        return [1] * total + [0] * (len(weights) - total)
    if not any(weights):
        weights = [1] * len(weights)
    ends, so_far = [0], 0
    for place, weight in enumerate(weights, start=1):
        so_far += weight
        fair = total * so_far // sum(weights)
        ends.append(min(max(fair, ends[-1] + 1), total - (len(weights) - place)))
    return [after - before for before, after in itertools.pairwise(ends)]


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
        """Fill `exchange` from the stream; `begun`: event-loop time at which the request began. Raises HttpError."""
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
                raise HttpError("The stream ended without its last event.")
        except HttpError as error:
            exchange.finished = False
            exchange.error = "broken" if error.status is None else str(error.status)
            raise
        finally:
            exchange.seconds = clock() - begun
            exchange.share_counted_tokens()


@dataclass(frozen=True)
class OpenAI:
    """`/v1/completions` or `/v1/chat/completions`."""

    name: str
    path: str
    chat: bool = False

    def body(self, request: LoadRequest, arm: Arm) -> dict[str, Any]:
        """Return the fields that every server of this API accepts."""
        messages: dict[str, Any] = {"messages": [{"role": "user", "content": request.prompt}]}
        body = messages if self.chat else {"prompt": request.prompt}
        body |= {"max_tokens": request.max_tokens, "temperature": arm.temperature, "seed": arm.seed + request.number}
        options = {"include_usage": True} if arm.usage else None
        return {**body, "stream": True, **_without_none({"model": arm.model, "stream_options": options})}

    def spaceserve_fields(self, arm: Arm, salt: str | None, max_prompt_tokens: int | None) -> dict[str, Any]:
        """Return the extra fields that only spaceserve accepts."""
        given = {"speculation": arm.speculation, "cache_salt": salt, "truncate_prompt_tokens": max_prompt_tokens}
        return {"return_token_ids": True, "ignore_eos": arm.ignore_eos, **_without_none(given)}

    def read(self, value: Mapping[str, Any], exchange: Exchange, seconds: float) -> bool:
        """Record an event `seconds` after the start. Return True if it is the last one. Raises HttpError."""
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

    name: str
    path: str

    def body(self, request: LoadRequest, arm: Arm) -> dict[str, Any]:
        parameters: dict[str, Any] = {"max_new_tokens": request.max_tokens, "details": True}
        if arm.temperature > 0:
            parameters |= {"do_sample": True, "temperature": arm.temperature, "seed": arm.seed + request.number}
        return {"inputs": request.prompt, "parameters": parameters}

    def spaceserve_fields(self, arm: Arm, salt: str | None, max_prompt_tokens: int | None) -> dict[str, Any]:
        # This API has no fields for the salt and for ignoring EOS.
        return {"parameters": _without_none({"speculation": arm.speculation, "truncate": max_prompt_tokens})}

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


LoadApi = OpenAI | Tgi
APIS: Mapping[str, LoadApi] = {
    "openai": OpenAI("openai", "/v1/completions"),
    "chat": OpenAI("chat", "/v1/chat/completions", chat=True),
    "tgi": Tgi("tgi", "/generate_stream"),
}
"""APIs by their `--api` name."""


async def find(arm: Arm) -> tuple[Arm, dict[str, Any]]:
    """Return the arm completed from its server's reports, and its /info (empty if none). Raises HttpError."""
    try:
        info = await get_json(arm.endpoint, "/info")
    except HttpError as error:
        if error.status is None:
            raise
        info = {}
    if info.get("router") == "spaceserve":
        if (window := info.get("max_total_tokens")) is None:
            raise HttpError(f"{arm.name} is not ready: it does not know its model yet.")
        found = replace(
            arm,
            is_spaceserve=True,
            window=window,
            counts_energy=await joules(arm.endpoint) is not None,
            has_synthetic_acceptance=bool(info.get("synthetic_acceptance")),
        )
        return found, info
    model = arm.model
    if model is None and arm.api.name != "tgi":
        listed = (await get_json(arm.endpoint, "/v1/models")).get("data") or []
        if not listed:
            raise HttpError("/v1/models lists no model. Give its name with --served-model.")
        model = str(listed[0]["id"])
    arm = replace(arm, model=model, speculation=None)
    for probed in (arm, replace(arm, usage=False)):  # some servers reject `stream_options`
        try:
            await probed.answer(LoadRequest(0, "Hello", 1), None, Exchange(), asyncio.get_running_loop().time())
            break
        except HttpError as error:
            if error.status not in (400, 422) or not probed.usage:
                raise
    return probed, info or {"model_id": model}


async def token_ids(endpoint: Endpoint, text: str) -> list[int] | None:
    """Tokenize the text on the server. Return None if it has no /tokenize that returns ids."""
    for body in ({"prompt": text, "add_special_tokens": False}, {"inputs": text}):
        try:
            answer = await post_json(endpoint, "/tokenize", body)
        except HttpError as error:
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


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _raise_error(value: Mapping[str, Any]) -> None:
    if error := value.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise HttpError(f"The stream ended with an error: {message}")
