"""Response models of `/v1/responses`, for the OpenAPI document and tests; the route builds its JSON directly."""

from typing import Annotated, Any, Literal

from pydantic import Field

from space_router.api.openai.answers import Answer, Count, Spaceserve
from space_router.api.openai.chat_answers import ChatTokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(Answer):
    """What the model says."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(Answer):
    """A function that the model calls, and with what: JSON as text."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[OutputMessage | OutputCall, Field(discriminator="type")]


class IncompleteDetails(Answer):
    """Why there is no more."""

    reason: Literal["max_output_tokens"]


class ResponseError(Answer):
    """Why it failed."""

    code: str
    message: str


class ReasoningAnswer(Answer):
    """As it was asked for."""

    effort: str | None
    summary: None


class TextAnswer(Answer):
    """As it was asked for."""

    format: dict[str, Any]


class InputDetails(Answer):
    """Of the input's tokens."""

    cached_tokens: Count
    cache_write_tokens: Count


class OutputDetails(Answer):
    """Of the output's tokens."""

    reasoning_tokens: Count


class ResponseUsage(Answer):
    """Tokens."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class ResponseObject(Answer):
    """`POST /v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: Count | None
    max_tool_calls: None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ReasoningAnswer
    store: Literal[False]
    temperature: float
    text: TextAnswer
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]
    spaceserve: Spaceserve | None = None


class ResponseEvent(Answer):
    """One event of a stream, `event: TYPE` and `data: {...}`; which fields it has follows from its type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: Count
    response: ResponseObject | None = None
    item: OutputItem | None = None
    part: OutputText | None = None
    item_id: str | None = None
    output_index: Count | None = None
    content_index: Count | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ChatTokenLogprob] | None = None
    name: str | None = None
    arguments: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
