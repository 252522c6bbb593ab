"""The output items of a response, and the events for them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from space_router.api.openai.tools import ToolUse
from space_router.api.plan import GenerationPlan
from space_router.text.tool_calls.parser import CallPiece

Event: TypeAlias = dict[str, Any]
"""An event without its sequence number."""


@dataclass
class OutputItems:
    """The items so far; the last one may be open. Each method yields the events for its changes."""

    plan: GenerationPlan
    tools: ToolUse
    items: list[dict[str, Any]] = field(default_factory=list)
    _open: bool = False

    def text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Add text to the open message, or begin one."""
        if not (self._open and self.items[-1]["type"] == "message"):
            yield from self.close()
            item = {"type": "message", "id": self._id("msg"), "status": "in_progress", "role": "assistant"}
            yield from self._add({**item, "content": []})
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._part_event("response.content_part.added", part=part)
            self.items[-1]["content"].append(part)
        part = self.items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def call(self, piece: CallPiece) -> Iterator[Event]:
        """Add a piece of a call."""
        if piece.name is not None:
            yield from self.close()
            item = {"type": "function_call", "id": self._id("fc"), "status": "in_progress", "name": piece.name}
            call_id = self.tools.call_id(self.plan.seed, self.plan.choices[0], piece.index)
            yield from self._add({**item, "call_id": call_id, "arguments": ""})
        if piece.arguments:
            self.items[-1]["arguments"] += piece.arguments
            yield self._event("response.function_call_arguments.delta", delta=piece.arguments)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Close the last item, if it is open."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        if item["type"] == "message":
            part = item["content"][0]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._part_event("response.output_text.done", **done)
            yield self._part_event("response.content_part.done", part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **done)
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _add(self, item: dict[str, Any]) -> Iterator[Event]:
        self.items.append(item)
        self._open = True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": {**item}}

    def _event(self, kind: str, **values: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **values}

    def _part_event(self, kind: str, **values: Any) -> Event:
        return self._event(kind, content_index=0, **values)

    def _id(self, prefix: str) -> str:
        digest = hashlib.blake2b(f"{self.plan.request_id}/{len(self.items)}".encode(), digest_size=16).hexdigest()
        return f"{prefix}_{digest}"
