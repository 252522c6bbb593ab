"""Response models of the OpenAI routes, for the OpenAPI document and tests; the routes build their JSON directly."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]


class Answer(BaseModel):
    """A JSON object with exactly these fields; those with a default may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True)


class OpenAIErrorDetails(Answer):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: Count | None = None  # only with the code context_length_exceeded
    n_ctx: Count | None = None


class OpenAIError(Answer):
    """An error."""

    error: OpenAIErrorDetails


class PromptTokensDetails(Answer):
    """Of the prompts' tokens."""

    cached_tokens: Count


class CompletionTokensDetails(Answer):
    """Of the generated tokens."""

    reasoning_tokens: Count
    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class Usage(Answer):
    """Tokens, over all choices."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SteppedToken(Answer):
    """A token of an event, with `stream_options.include_steps`."""

    text: str
    step: Count
    draft: bool


class Spaceserve(Answer):
    """What speculation did for a request, over all its choices."""

    seed: Annotated[int, Field(description="the request's own, or the one that was drawn: the same text again")]
    steps: Annotated[Count, Field(description="decode steps; the prefill, which gives the first token, is none")]
    drafted: Annotated[Count, Field(description="tokens that were drafted and verified")]
    accepted: Annotated[Count, Field(description="of these, those that came true")]
    tokens_per_step: Annotated[float | None, Field(description="mean over the decode steps; null where there was none")]


class SpaceserveEvent(Answer):
    """The figures in a stream's last event of tokens, and with `include_steps` the tokens of each event."""

    seed: int | None = None
    steps: Count | None = None
    drafted: Count | None = None
    accepted: Count | None = None
    tokens_per_step: float | None = None
    tokens: list[SteppedToken] | None = None
    verified: Annotated[Count, Field(description="drafts tried since the choice's event before")] | None = None


class CompletionLogprobLists(Answer):
    """One entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class PromptLogprob(Answer):
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


class CompletionChoice(Answer):
    """One completion."""

    index: Count
    text: str
    logprobs: CompletionLogprobLists | None
    finish_reason: FinishReason | None
    stop_reason: StopReason
    token_ids: TokenIds | None = None
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer):
    """`POST /v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    spaceserve: Spaceserve


class CompletionEvent(Answer):
    """One event of a stream: `data: {...}`; the last is `data: [DONE]`. An error is an event, and the last, too."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    spaceserve: SpaceserveEvent | None = None
    obfuscation: str | None = None


class ModelCard(Answer):
    """A model, or an adapter that drafts for it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Count | None


class ModelList(Answer):
    """`GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]
