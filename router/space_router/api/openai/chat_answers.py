"""Response models of chat completions, for the OpenAPI document and tests; the route builds its JSON directly."""

from typing import Annotated, Literal

from pydantic import Field

from space_router.api.openai.answers import (
    Answer,
    Count,
    PromptLogprobs,
    Spaceserve,
    SpaceserveEvent,
    StopReason,
    TokenIds,
    Usage,
)

Byte = Annotated[int, Field(ge=0, le=255)]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class TokenAlternative(Answer):
    """A token that could have stood here."""

    token: str
    logprob: float
    bytes: list[Byte]


class ChatTokenLogprob(TokenAlternative):
    """A token with the most probable ones in its place."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(Answer):
    """One entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None


class FunctionCall(Answer):
    """What is called, and with what: JSON as text."""

    name: str
    arguments: str


class MessageToolCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(Answer):
    """One answer."""

    index: Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: TokenIds | None = None
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletion(Answer):
    """`POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    spaceserve: Spaceserve


class FunctionCallPiece(Answer):
    """The name comes with the first piece of a call; arguments join to one text."""

    name: str | None = None
    arguments: str


class ToolCallPiece(Answer):
    """A piece of the call with this index."""

    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallPiece


class MessagePiece(Answer):
    """What a step adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallPiece] | None = None


class ChatPiece(Answer):
    """A piece of one answer."""

    index: Count
    delta: MessagePiece
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReason
    token_ids: TokenIds | None = None
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatEvent(Answer):
    """One event of a stream: `data: {...}`; the last is `data: [DONE]`. An error is an event, and the last, too."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatPiece]
    usage: Usage | None = None
    spaceserve: SpaceserveEvent | None = None
    obfuscation: str | None = None
