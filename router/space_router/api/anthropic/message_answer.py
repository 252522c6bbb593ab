"""A message as the answer, whole or as events in Anthropic's order."""

import base64
import hashlib
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson
from pydantic import TypeAdapter

from space_router.api.anthropic.fields import ShownThinking
from space_router.api.generation import Generation, statistics, usage
from space_router.api.openai.chat import ToolUse
from space_router.api.request_builder import GenerationPlan
from space_router.http_server.responses import anthropic_error, as_api_error, event_json
from space_router.text.text_stream import FinishReason
from space_router.text.tool_calls import CallPiece, Thought

Event: TypeAlias = dict[str, Any]

_OBJECT = TypeAdapter(dict[str, Any])

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def input_of(arguments: str) -> Any:
    """Return a call's arguments as JSON that is written as it is, with its numbers; of a call that was cut, what there
    is of it."""
    try:
        if isinstance(json.loads(arguments, parse_constant=_no_constant), dict):
            return orjson.Fragment(arguments)
    except (ValueError, RecursionError):
        pass
    try:
        known = _OBJECT.validate_json(arguments, experimental_allow_partial="trailing-strings")
        return orjson.Fragment(json.dumps(known, allow_nan=False))
    except (ValueError, RecursionError):
        return {}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def signature_of(thinking: str) -> str:
    """Return what stands for reasoning in an answer: a digest of it. It comes back with the text and is not checked,
    for the text is the client's in any case."""
    return base64.b64encode(hashlib.sha256(thinking.encode(errors="surrogatepass")).digest()).decode()


@dataclass
class ContentBlocks:
    """The blocks so far; the last one may be open. Each method yields the events for its changes."""

    plan: GenerationPlan
    tools: ToolUse
    shown_thinking: ShownThinking = "all"
    blocks: list[dict[str, Any]] = field(default_factory=list)
    _texts: list[list[str]] = field(default_factory=list)  # pieces of each block
    _is_open: bool = False

    def text(self, text: str) -> Iterator[Event]:
        """Add text to the open block of text, or begin one."""
        if not (self._is_open and self.blocks[-1]["type"] == "text"):
            yield from self.close()
            yield self._begin({"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text}, text)

    def part(self, part: str | Thought | CallPiece) -> Iterator[Event]:
        """Add a piece of the output."""
        match part:
            case str():
                return self.text(part)
            case Thought():
                return self.thought(part.text)
            case _:
                return self.call(part)

    def thought(self, text: str) -> Iterator[Event]:
        """Add text to the open block of reasoning, or begin one, where reasoning is shown."""
        if not text or self.shown_thinking == "nothing":
            return
        if not (self._is_open and self.blocks[-1]["type"] == "thinking"):
            yield from self.close()
            yield self._begin({"type": "thinking", "thinking": "", "signature": ""})
        if self.shown_thinking == "all":
            yield self._delta({"type": "thinking_delta", "thinking": text}, text)
        else:
            self._texts[-1].append(text)

    def call(self, piece: CallPiece) -> Iterator[Event]:
        """Add a piece of a call."""
        if piece.name is not None:
            yield from self.close()
            id_ = self.tools.call_id(self.plan.seed, self.plan.choices[0], piece.index).removeprefix("call_")
            yield self._begin({"type": "tool_use", "id": f"toolu_{id_}", "name": piece.name, "input": {}})
        if piece.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments}, piece.arguments)

    def close(self) -> Iterator[Event]:
        """Close the last block, if it is open; reasoning after its signature."""
        if self._is_open:
            self._is_open = False
            if self.blocks[-1]["type"] == "thinking":
                signature = signature_of("".join(self._texts[-1]))
                delta = {"type": "signature_delta", "signature": signature}
                yield {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}
            yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def whole(self) -> list[dict[str, Any]]:
        """Return the blocks with their content."""
        return [self._whole(block, "".join(texts)) for block, texts in zip(self.blocks, self._texts, strict=True)]

    def _whole(self, block: dict[str, Any], text: str) -> dict[str, Any]:
        match block["type"]:
            case "text":
                return {**block, "text": text}
            case "thinking":
                shown = text if self.shown_thinking == "all" else ""
                return {**block, "thinking": shown, "signature": signature_of(text)}
            case _:
                return {**block, "input": input_of(text)}

    def _begin(self, block: dict[str, Any]) -> Event:
        self._is_open = True
        self.blocks.append(block)
        self._texts.append([])
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any], text: str) -> Event:
        self._texts[-1].append(text)
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


@dataclass
class MessageAnswer:
    """One message, whole or as events."""

    plan: GenerationPlan
    tools: ToolUse
    model: str
    max_tokens: int  # as it was asked for; the plan's may be cut to the window
    shown_thinking: ShownThinking = "all"

    async def whole(self, running: Generation) -> dict[str, Any]:
        blocks = ContentBlocks(self.plan, self.tools, self.shown_thinking)
        last: Event = {}
        async with aclosing(self._events(running, blocks)) as events:
            async for event in events:
                last = event if event["type"] == "message_delta" else last
        message: dict[str, Any] = self._message(running, blocks.whole()) | last["delta"]
        return message | {"usage": last["usage"], "spaceserve": last["spaceserve"]}

    async def events(self, running: Generation) -> AsyncGenerator[bytes]:
        """Yield the events. A failure is an `error` event and the last one."""
        pinged = False
        try:
            blocks = ContentBlocks(self.plan, self.tools, self.shown_thinking)
            async with aclosing(self._events(running, blocks)) as events:
                async for event in events:
                    yield b"event: %b\ndata: %b\n\n" % (event["type"].encode(), event_json(event))
                    if not pinged and event["type"] == "content_block_start":
                        pinged = True
                        yield PING
        except Exception as error:
            yield b"event: error\ndata: " + event_json(anthropic_error(as_api_error(error))) + b"\n\n"

    async def _events(self, running: Generation, blocks: ContentBlocks) -> AsyncGenerator[Event]:
        reader = self.tools.reader(self.plan.choices[0].rules.thinking)
        finish: FinishReason | None = None
        stop: str | int | None = None
        begun = False
        async with aclosing(running.steps()) as steps:  # type: ignore[type-var]  # an async generator
            async for step in steps:
                if not begun:  # now the prefix cache has been read
                    begun = True
                    yield {"type": "message_start", "message": self._message(running, [])}
                for _, delta in step:
                    finish, stop = delta.finish, delta.stop_reason
                    ended = finish is not None
                    parts = (delta.text,) if reader is None else reader.push(delta.text, ended=ended).parts
                    for part in parts:
                        for event in blocks.part(part) if part else ():
                            yield event
        for event in blocks.close():
            yield event
        called = reader is not None and reader.output.num_calls > 0 and reader.output.is_whole
        yield {
            "type": "message_delta",
            "delta": self._end(finish, stop, called=called),
            "usage": self._usage(running),
            "spaceserve": statistics(self.plan, running.choices),
        }
        yield {"type": "message_stop"}

    def _end(self, finish: FinishReason | None, stop: str | int | None, *, called: bool) -> dict[str, Any]:
        limit = self.plan.choices[0].request.max_tokens
        if finish is FinishReason.LENGTH:
            cut = limit is not None and limit < self.max_tokens
            return {"stop_reason": "model_context_window_exceeded" if cut else "max_tokens", "stop_sequence": None}
        if called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if finish is FinishReason.STOP and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self, running: Generation) -> dict[str, int]:
        figures = usage(self.plan, running.choices)
        num_cached: int = figures["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": figures["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": figures["completion_tokens"],
        }

    def _message(self, running: Generation, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.plan.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(running),
        }
