"""Response models of TGI's routes, for the OpenAPI document and tests; the routes build their JSON directly."""

from typing import Annotated, Literal

from pydantic import Field

from space_router.api.openai.answers import Answer

Count = Annotated[int, Field(ge=0)]
FinishName = Literal["length", "eos_token", "stop_sequence"]


class TgiError(Answer):
    """An error; in a stream, too."""

    error: str
    error_type: str


class PrefillToken(Answer):
    """A token of the prompt; the first has no log-probability."""

    id: Count
    text: str
    logprob: float | None


class GeneratedToken(Answer):
    """A token with its part of the text."""

    id: Count
    text: str
    logprob: float
    special: bool


class Sequence(Answer):
    """How one generated text came about."""

    finish_reason: FinishName
    generated_tokens: Count
    seed: Count | None
    prefill: list[PrefillToken]
    tokens: list[GeneratedToken]
    top_tokens: list[list[GeneratedToken]] | None = None


class BestOfSequence(Sequence):
    """One of the texts that were not the best."""

    generated_text: str


class Details(Sequence):
    """How the answer came about."""

    best_of_sequences: list[BestOfSequence] | None = None


class Generated(Answer):
    """The answer of `/generate`."""

    generated_text: str
    details: Details | None = None


class StreamDetails(Answer):
    """How the stream ended."""

    finish_reason: FinishName
    generated_tokens: Count
    seed: Count | None
    input_length: Count


class GeneratedEvent(Answer):
    """One token of a stream; the last one carries the whole text."""

    index: Annotated[int, Field(ge=1)]
    token: GeneratedToken
    top_tokens: list[GeneratedToken] | None = None
    generated_text: str | None
    details: StreamDetails | None


class PlacedToken(Answer):
    """A token and the characters of the text that it stands for."""

    id: Count
    text: str
    start: Count
    stop: Count


class TokenIds(Answer):
    """The ids of a text."""

    tokens: list[Count]
    count: Count
    max_model_len: Count


class ConversationTokens(Answer):
    """A conversation as the prompt it becomes."""

    tokenize_response: list[PlacedToken]
    templated_text: str


class TokenizerInfo(Answer):
    """What a client needs to know of the tokenizer."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class Detokenized(Answer):
    """The text of ids."""

    prompt: str
