"""Response models of the OpenAI routes, for the OpenAPI document and tests; the routes build their JSON directly."""

from typing import Annotated, Any, Literal

from pydantic import Field

from space_router.api.schema import Count, ResponseModel


class PromptTokensDetails(ResponseModel):
    """Of the prompts' tokens."""

    cached_tokens: Count


class CompletionTokensDetails(ResponseModel):
    """Of the generated tokens."""

    reasoning_tokens: Count
    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class Usage(ResponseModel):
    """Tokens, over all choices."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SteppedToken(ResponseModel):
    """A token of an event, with `stream_options.include_steps`."""

    text: str
    step: Count
    draft: bool


class Spaceserve(ResponseModel):
    """What speculation did for a request, over all its choices."""

    seed: Annotated[int, Field(description="the request's own, or the one that was drawn: the same text again")]
    steps: Annotated[Count, Field(description="decode steps; the prefill, which gives the first token, is none")]
    drafted: Annotated[Count, Field(description="tokens that were drafted and verified")]
    accepted: Annotated[Count, Field(description="of these, the accepted ones")]
    tokens_per_step: Annotated[float | None, Field(description="mean over the decode steps; null where there was none")]


class SpaceserveEvent(ResponseModel):
    """The figures in a stream's last event of tokens, and with `include_steps` the tokens of each event."""

    seed: int | None = None
    steps: Count | None = None
    drafted: Count | None = None
    accepted: Count | None = None
    tokens_per_step: float | None = None
    tokens: list[SteppedToken] | None = None
    verified: Annotated[Count, Field(description="drafts tried since the choice's event before")] | None = None


class CompletionLogprobLists(ResponseModel):
    """One entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class PromptLogprob(ResponseModel):
    """One alternative of a prompt's token."""

    logprob: float
    rank: Count | None
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    Field(description="for each token of the prompt, by id, itself and the most probable; null for the first"),
]
FinishReason = Literal["stop", "length"]
StopReason = Annotated[
    str | int | None, Field(description="the stop string or stop token that ended it; null for EOS and limits")
]
TokenIds = list[Count]


class _Choice(ResponseModel):
    index: Count
    token_ids: TokenIds | None = None
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChoice(_Choice):
    """One completion."""

    text: str
    logprobs: CompletionLogprobLists | None
    finish_reason: FinishReason | None
    stop_reason: StopReason


class _Response(ResponseModel):
    """What whole responses and events have in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]


class _WholeResponse(_Response):
    usage: Usage
    spaceserve: Spaceserve


class _Event(_Response):
    """One event of a stream: `data: {...}`; the last is `data: [DONE]`. An error is an event, and the last, too."""

    usage: Usage | None = None
    spaceserve: SpaceserveEvent | None = None
    obfuscation: str | None = None


class Completion(_WholeResponse):
    """`POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionEvent(_Event):
    __doc__ = _Event.__doc__
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


Byte = Annotated[int, Field(ge=0, le=255)]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class TokenAlternative(ResponseModel):
    """A token that could have stood here."""

    token: str
    logprob: float
    bytes: list[Byte]


class ChatTokenLogprob(TokenAlternative):
    """A token with the most probable ones in its place."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(ResponseModel):
    """One entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None


class FunctionCall(ResponseModel):
    """What is called, and with what: JSON as text."""

    name: str
    arguments: str


class MessageToolCall(ResponseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(ResponseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, Field(description="the same as `reasoning_content`")] = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(_Choice):
    """One answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason


class ChatCompletion(_WholeResponse):
    """`POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class FunctionCallPiece(ResponseModel):
    """The name comes with the first piece of a call; arguments join to one text."""

    name: str | None = None
    arguments: str


class ToolCallPiece(ResponseModel):
    """A piece of the call with this index."""

    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallPiece


class MessagePiece(ResponseModel):
    """What a step adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, Field(description="the same as `reasoning_content`")] = None
    tool_calls: list[ToolCallPiece] | None = None


class ChatPiece(_Choice):
    """A piece of one answer."""

    delta: MessagePiece
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReason


class ChatEvent(_Event):
    __doc__ = _Event.__doc__
    object: Literal["chat.completion.chunk"]
    choices: list[ChatPiece]


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseModel):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(ResponseModel):
    """What the model says."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(ResponseModel):
    """A function that the model calls, and with what: JSON as text."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class OutputCustomCall(ResponseModel):
    """A custom tool that the model calls, and the text for it."""

    type: Literal["custom_tool_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class OutputReasoningText(ResponseModel):
    """A part of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(ResponseModel):
    """What the model thinks before it answers."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: Annotated[list[Any], Field(max_length=0)]
    content: list[OutputReasoningText]
    encrypted_content: None


OutputItem = Annotated[OutputMessage | OutputReasoning | OutputCall | OutputCustomCall, Field(discriminator="type")]


class IncompleteDetails(ResponseModel):
    """Why there is no more."""

    reason: Literal["max_output_tokens"]


class ResponseError(ResponseModel):
    """Why it failed."""

    code: str
    message: str


class ReasoningAnswer(ResponseModel):
    """As it was asked for."""

    effort: str | None
    summary: None


class TextAnswer(ResponseModel):
    """As it was asked for."""

    format: dict[str, Any]


class InputDetails(ResponseModel):
    """Of the input's tokens."""

    cached_tokens: Count
    cache_write_tokens: Count


class OutputDetails(ResponseModel):
    """Of the output's tokens."""

    reasoning_tokens: Count


class ResponseUsage(ResponseModel):
    """Tokens."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class ResponseObject(ResponseModel):
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
    max_tool_calls: Count | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningAnswer
    store: bool
    temperature: float
    text: TextAnswer
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Count
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]
    spaceserve: Spaceserve | None = None


class DeletedResponse(ResponseModel):
    """A stored response that is deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseInputItems(ResponseModel):
    """What a stored response answered: a page of items, as they would be sent again."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(ResponseModel):
    """`POST /v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: Count


class ResponseEvent(ResponseModel):
    """One event of a stream, `event: TYPE` and `data: {...}`; which fields it has follows from its type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: Count
    response: ResponseObject | None = None
    item: OutputItem | None = None
    part: Annotated[OutputText | OutputReasoningText, Field(discriminator="type")] | None = None
    item_id: str | None = None
    output_index: Count | None = None
    content_index: Count | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ChatTokenLogprob] | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
