"""One side of a comparison: a server, how it is spoken to, and what each request says besides its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from space_eval.bench_energy import joules
from space_eval.load_client import Endpoint, LoadError, get_json, post_json, stream_events
from space_eval.load_dialect import Ask, Dialect, Sampling, merged, parsed
from space_eval.load_exchange import Exchange


@dataclass(frozen=True)
class Arm:
    """A server as it is measured. Two arms may be one server, with and without drafts."""

    name: str
    endpoint: Endpoint
    dialect: Dialect
    sampling: Sampling
    is_ours: bool = False  # spaceserve: it takes our fields and tells tokens and steps
    counts_energy: bool = False  # its /metrics tell joules
    is_decreed: bool = False  # its drafts come true by decree
    speculation: str | int | None = None  # as each request says; None: the server's default
    model: str | None = None  # as each request says
    window: int | None = None  # prompt and answer together, in tokens
    usage: bool = True  # it counts the tokens at the end of a stream when asked
    ignore_eos: bool = True  # every answer has its full length; ours only
    fields: Mapping[str, Any] = field(default_factory=dict)  # of every body, given by the user

    def body(self, ask: Ask, salt: str | None) -> dict[str, Any]:
        """What `ask` is sent as. Another `salt` shares no prefix with it, so that every prompt is computed."""
        made = self.dialect.body(ask, self.sampling, self.model, usage=self.usage)
        if self.is_ours:
            room = None if self.window is None else self.window - ask.max_tokens
            made = merged(made, self.dialect.ours(self.speculation, salt, room, ignore_eos=self.ignore_eos))
        return merged(made, self.fields)

    async def answer(self, ask: Ask, salt: str | None, exchange: Exchange, begun: float) -> None:
        """Fill `exchange` from the stream; `begun`: when the request began, in the loop's time. Raises LoadError."""
        clock = asyncio.get_running_loop().time
        exchange.late = clock() - begun
        try:
            async with aclosing(stream_events(self.endpoint, self.dialect.path, self.body(ask, salt))) as stream:
                async for events in stream:
                    now = clock() - begun
                    for event in events:
                        last = event == b"[DONE]" or self.dialect.read(parsed(event), exchange, now)
                        exchange.finished = exchange.finished or last
            if not exchange.finished or not exchange.pieces:
                raise LoadError("The stream ended without its last event.")
        except LoadError as error:
            exchange.finished = False
            exchange.error = "broken" if error.status is None else str(error.status)
            raise
        finally:
            exchange.seconds = clock() - begun
            exchange.settle()


async def find(arm: Arm) -> tuple[Arm, dict[str, Any]]:
    """The arm with what its server says of itself, and its /info (empty where there is none). Raises LoadError."""
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
        counts = await joules(arm.endpoint) is not None
        decreed = bool(info.get("synthetic_acceptance"))
        return replace(arm, is_ours=True, window=window, counts_energy=counts, is_decreed=decreed), info
    model = arm.model
    if model is None and arm.dialect.name != "tgi":
        model = await _only_model(arm.endpoint)
    return await _usage_known(replace(arm, model=model)), info or {"model_id": model}


async def _only_model(endpoint: Endpoint) -> str:
    """The name that requests must give."""
    listed = (await get_json(endpoint, "/v1/models")).get("data") or []
    if not listed:
        raise LoadError("/v1/models lists no model. Give its name with --served-model.")
    return str(listed[0]["id"])


async def _usage_known(arm: Arm) -> Arm:
    """One short request; a server that refuses `stream_options` is not asked to count."""
    ask = Ask(0, "Hello", 1)
    begun = asyncio.get_running_loop().time()
    try:
        await arm.answer(ask, None, Exchange(), begun)
    except LoadError as error:
        if error.status not in (400, 422) or not arm.usage:
            raise
        return await _usage_known(replace(arm, usage=False))
    return arm


async def token_ids(endpoint: Endpoint, text: str) -> list[int] | None:
    """The text as the server's tokens; None where it has no /tokenize that tells."""
    for body in ({"prompt": text, "add_special_tokens": False}, {"inputs": text}):
        try:
            made = await post_json(endpoint, "/tokenize", body)
        except LoadError as error:
            if error.status is None:
                raise
            continue
        if isinstance(made, dict) and made.get("tokens"):
            return [int(id_) for id_ in made["tokens"]]
        if isinstance(made, list) and made:
            return [int(token["id"]) for token in made]
    return None
