"""`POST /v1/chat/completions`."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from space_router.api.access import key_of
from space_router.api.body import read_object, validate
from space_router.api.completions import common_parameters
from space_router.api.connection import beside
from space_router.api.door import Door
from space_router.api.fields import CHAT_NEUTRAL, ChatBody, Message
from space_router.api.logprobs import chat_logprobs, prompt_logprobs
from space_router.api.openai_stream import OpenAIAnswer, respond
from space_router.api.plan import Plan
from space_router.api.running import Progress, Written
from space_router.api.schema import json_body
from space_router.api.service import Service
from space_router.errors import InvalidRequest
from space_router.text.text_stream import TextDelta
from space_router.text.tokenizer import Tokenizer


def prompt_text(door: Door, messages: list[Message]) -> str:
    """The messages through the chat template. Raises InvalidRequest."""
    template = door.text.chat_template
    if template is None:
        raise InvalidRequest(
            f"`{door.text.name}` has no chat template. Use /v1/completions, or start the server with `--chat-template` "
            "(vicuna, llama-2, chatml, alpaca or a file).",
            param="messages",
            code="no_chat_template",
        )
    return template.render([_plain(message, place) for place, message in enumerate(messages)])


def _plain(message: Message, place: int) -> dict[str, Any]:
    """A message as templates know it: content as one string."""
    content = message.content
    if content is None and message.role != "assistant":
        raise InvalidRequest(f"`messages.{place}.content` is required for the role {message.role}.", param="messages")
    text = content or "" if not isinstance(content, list) else "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    rest = {"name": message.name, "tool_call_id": message.tool_call_id}
    return {"role": role, "content": text, **{key: value for key, value in rest.items() if value is not None}}


def plan(door: Door, body: ChatBody) -> Plan:
    adapter = door.adapter(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("`top_logprobs` goes with `logprobs: true` only.", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest(
            f"`max_tokens` is {body.max_tokens} and `max_completion_tokens` {body.max_completion_tokens}; give one.",
            param="max_completion_tokens",
        )
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens == 0:
        raise InvalidRequest("`max_completion_tokens` must be at least 1; got 0.", param="max_completion_tokens")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest(
            "Log-probabilities of the prompt cannot be streamed; leave `stream` out.", param="prompt_logprobs"
        )
    prompt = door.prompt(
        prompt_text(door, body.messages),
        add_special_tokens=bool(body.add_special_tokens),  # the template writes its special tokens itself
        truncate=body.truncate_prompt_tokens,
        param="messages",
    )
    shown = body.n or 1
    wanted = common_parameters(
        body,
        max_tokens=max_tokens,
        num_choices=shown,
        num_shown=shown,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        num_prompt_logprobs=body.prompt_logprobs,
        adapter=adapter,
    )
    return door.plan([prompt], wanted, prefix="chatcmpl")


@dataclass
class ChatShape:
    """How an answer in a conversation is written."""

    tokenizer: Tokenizer
    body: ChatBody
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def whole(self, written: Written, prompt: Written) -> dict[str, Any]:
        message = {"role": "assistant", "content": written.text, "refusal": None}
        body: dict[str, Any] = {
            "message": message,
            "logprobs": chat_logprobs(self.tokenizer, written.tokens) if self.body.logprobs else None,
        }
        if self.body.prompt_logprobs is not None:
            ids = written.progress.choice.prompt.ids
            body["prompt_logprobs"] = prompt_logprobs(self.tokenizer, ids, prompt.prompt_logprobs)
        return body

    def piece(self, progress: Progress, delta: TextDelta, *, first: bool) -> dict[str, Any]:
        change = {"content": delta.text} if delta.text or first else {}
        return {
            "delta": {"role": "assistant", **change} if first else change,
            "logprobs": chat_logprobs(self.tokenizer, delta.tokens) if self.body.logprobs else None,
        }


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/chat/completions", openapi_extra=json_body(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        received = await read_object(request, service.config.max_body)
        body = validate(ChatBody, received.values, CHAT_NEUTRAL)
        made = await beside(received.size, plan, service.door(key_of(request)), body)
        shape = ChatShape(service.text.tokenizer, body)
        return await respond(service, request, OpenAIAnswer.to(shape, made, service.name_of(made), body))

    return router
