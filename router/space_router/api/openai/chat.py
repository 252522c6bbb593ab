"""`POST /v1/chat/completions`."""

from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from space_router.api.generation import ChoiceState, CompletedChoice
from space_router.api.openai.answers import ChatCompletion, ChatEvent
from space_router.api.openai.completions import common_parameters
from space_router.api.openai.conversation import PromptOptions
from space_router.api.openai.conversation import prompt_text as prompt_text
from space_router.api.openai.fields import CHAT_NEUTRAL, ChatBody
from space_router.api.openai.logprobs import chat_logprobs
from space_router.api.openai.stream import OpenAIAnswer
from space_router.api.openai.tools import ToolUse, tool_use
from space_router.api.plan import GenerationPlan, PlannedChoice
from space_router.api.request_builder import RequestBuilder
from space_router.api.schema import OPENAI_STATUSES, OpenAIError, describe_responses, json_body
from space_router.api.service import Service
from space_router.errors import InvalidRequest
from space_router.http_server.responses import in_thread_if_long, key_of
from space_router.text.text_stream import FinishReason, TextDelta
from space_router.text.tokenizer import Tokenizer
from space_router.text.tool_calls.parser import CallPiece, ToolCallReader


def tools_of(builder: RequestBuilder, body: ChatBody) -> ToolUse:
    """Return the request's tool use. Raises InvalidRequest."""
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, old) not in (None, [], "none", "auto"):
            raise InvalidRequest(
                f"`{old}` is OpenAI's old name and not supported; send `{new}`, with "
                '{"type": "function", "function": ...} around each function.',
                param=old,
                code="unsupported_parameter",
            )
    return tool_use(builder, body.tools or (), body.tool_choice, parallel=body.parallel_tool_calls is not False,
                    answer=body.wanted_grammar())  # fmt: skip


def conversation_text(builder: RequestBuilder, body: ChatBody) -> str:
    """Return the request's messages and tools as rendered by the chat template. Raises InvalidRequest."""
    return prompt_text(builder, body.messages, PromptOptions.of(body, tools_of(builder, body).shown))


def plan(builder: RequestBuilder, body: ChatBody, tools: ToolUse | None = None) -> GenerationPlan:
    """Build the plan. `tools`: the body's tool use, if already computed. Raises InvalidRequest."""
    adapter = builder.adapter(body.model)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("`top_logprobs` goes with `logprobs: true` only.", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest(
            f"`max_tokens` is {body.max_tokens} and `max_completion_tokens` {body.max_completion_tokens}; give one.",
            param="max_completion_tokens",
        )
    limit_param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(body, limit_param)
    if max_tokens == 0:
        raise InvalidRequest(f"`{limit_param}` must be at least 1; got 0.", param=limit_param)
    tools = tools_of(builder, body) if tools is None else tools
    prompt = builder.prompt(
        prompt_text(builder, body.messages, PromptOptions.of(body, tools.shown)),
        add_special_tokens=bool(body.add_special_tokens),  # the template already writes special tokens
        truncate=body.truncate_prompt_tokens,
        param="messages",
        max_tokens=max_tokens or 1,
    )
    shown = body.n or 1
    wanted = common_parameters(
        body,
        max_tokens=max_tokens,
        limit_param=limit_param,
        num_choices=shown,
        num_shown=shown,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        num_prompt_logprobs=body.prompt_logprobs,
        adapter=adapter,
        end_ids=builder.text.turn_end_ids,
        grammar=tools.grammar,
        shown_ids=tools.markers,
    )
    return builder.plan([prompt], wanted, prefix="chatcmpl")


@dataclass
class ChatShape:
    """Builds the choices of a chat completion."""

    tokenizer: Tokenizer
    body: ChatBody
    plan: GenerationPlan
    tools: ToolUse
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    _readers: dict[int, ToolCallReader | None] = field(default_factory=dict)  # by index of streamed choice

    def whole(self, written: CompletedChoice, prompt: CompletedChoice) -> dict[str, Any]:
        progress = written.progress
        message: dict[str, Any] = {"role": "assistant", "content": written.text, "refusal": None}
        body: dict[str, Any] = {"message": message, "logprobs": self._logprobs(written.tokens)}
        if (reader := self.tools.reader()) is not None:
            parsed = reader.push(written.text, ended=True)
            if parsed.calls:
                message["content"] = parsed.content or None
                message["tool_calls"] = [self._call(progress.choice, piece) for piece in parsed.calls]
                body |= self._reason(reader, progress.finish)
        return body

    def piece(self, progress: ChoiceState, delta: TextDelta, *, first: bool) -> dict[str, Any]:
        change: dict[str, Any] = {"role": "assistant"} if first else {}
        body: dict[str, Any] = {"delta": change, "logprobs": self._logprobs(delta.tokens)}
        if first:
            self._readers[progress.choice.index] = self.tools.reader()
        reader = self._readers[progress.choice.index]
        if reader is None:
            change |= {"content": delta.text} if delta.text or first else {}
            return body
        parsed = reader.push(delta.text, ended=delta.finish is not None)
        if parsed.content or first:
            change["content"] = parsed.content or None
        if parsed.calls:
            change["tool_calls"] = [
                {"index": piece.index, **self._call(progress.choice, piece)} for piece in parsed.calls
            ]
        return body | self._reason(reader, delta.finish)

    def _call(self, choice: PlannedChoice, piece: CallPiece) -> dict[str, Any]:
        """Return a tool call piece: a new call, or more arguments of one."""
        if piece.name is None:
            return {"function": {"arguments": piece.arguments}}
        return {
            "id": self.tools.call_id(self.plan.seed, choice, piece.index),
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }

    def _reason(self, reader: ToolCallReader, finish: FinishReason | None) -> dict[str, Any]:
        ended = finish in (FinishReason.EOS, FinishReason.STOP)
        called = ended and reader.num_calls and reader.is_whole  # an incomplete call must not be executed
        return {"finish_reason": "tool_calls"} if called else {}

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        return chat_logprobs(self.tokenizer, tokens) if self.body.logprobs else None


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    @router.post(
        "/v1/chat/completions",
        openapi_extra=json_body(ChatBody, CHAT_NEUTRAL),
        responses=describe_responses(
            ChatCompletion, errors=OpenAIError, statuses=OPENAI_STATUSES, event=ChatEvent, done=True
        ),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body, size = await service.read(request, ChatBody, CHAT_NEUTRAL)
        builder = service.builder(key_of(request))
        tools = tools_of(builder, body)
        await service.checked(tools.grammar, "tools" if tools.shown else body.grammar_field)
        made = await in_thread_if_long(size, plan, builder, body, tools)
        shape = ChatShape(service.text.tokenizer, body, made, tools)
        reply = OpenAIAnswer(shape, made, service.name_of(made), body)
        return await service.respond(request, reply, stream=bool(body.stream))

    return router
