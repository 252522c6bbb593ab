"""What `/v1/messages` answers, for `/openapi.json`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from space_router.api.openai.answers import Spaceserve
from space_router.api.schema import Count, ResponseModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnthropicErrorDetails(ResponseModel):
    """What was wrong."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "timeout_error",
        "overloaded_error",
        "api_error",
    ]
    message: str


class AnthropicError(ResponseModel):
    """An error; in a stream, too."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str | None


class TextContent(ResponseModel):
    """Text."""

    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingContent(ResponseModel):
    """Reasoning; the client sends it back as it is."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(ResponseModel):
    """A call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]


class MessagesUsage(ResponseModel):
    """Tokens. The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: Count
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: Count
    output_tokens: Count


class AnthropicMessage(ResponseModel):
    """`POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    spaceserve: Spaceserve | None = None


class BlockDelta(ResponseModel):
    """More of a block; of the message, why it ended."""

    type: Literal["text_delta", "input_json_delta", "thinking_delta", "signature_delta"] | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class MessageEvent(ResponseModel):
    """One event of a stream, `event: TYPE` and `data: {...}`; which fields it has follows from its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: AnthropicMessage | None = None
    index: Count | None = None
    content_block: Content | None = None
    delta: BlockDelta | None = None
    usage: MessagesUsage | None = None
    spaceserve: Spaceserve | None = None


class TokenCount(ResponseModel):
    """`POST /v1/messages/count_tokens`."""

    input_tokens: Count
