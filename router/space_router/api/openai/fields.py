"""Fields of the OpenAI requests; limits that depend on the model or flags are checked in `request_builder`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from space_router.api.grammar_fields import GrammarFields
from space_router.http_server.body import Body

# Known fields of OpenAI and of other servers that this server does not support, with the values that mean "off".
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1, 1.0),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
}

MAX_BIASED = 4096
"""Maximum entries of `logit_bias`."""


def _few_entries(value: Any) -> Any:
    """Limit the number of entries before validation, because pydantic reports each invalid one."""
    if isinstance(value, dict) and len(value) > MAX_BIASED:
        raise ValueError(f"must have at most {MAX_BIASED} entries, and has {len(value)}")
    return value


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for as many as there is room for")
    return value


_STOP = {"type": "string", "minLength": 1, "maxLength": 1024}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

# Validated in `request_builder`, so that an error names only one of many invalid parts.
Stop = Annotated[Any, WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP}, {"type": "null"}]})]
PromptValue = Annotated[
    Any,
    Field(description="a text, several, token ids, or several lists of them"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count20 = Annotated[int, Field(ge=0, le=20)]
TEXT_OR_PARTS = Discriminator(lambda value: "text" if isinstance(value, str) else "parts")
"""Discriminates the union, so that an error is about one branch instead of both."""


class StreamOptions(Body):
    """What else a stream carries."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_steps: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(Body):
    """A part of a message, or of a prediction; only text is taken."""

    type: Literal["text"]
    text: str


class PredictedOutput(Body):
    """What the client expects most of the answer to be: drafted from where the answer agrees."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[TextPart], Field(fail_fast=True, max_length=4096), Tag("parts")],
        TEXT_OR_PARTS,
    ]

    @property
    def text(self) -> str:
        """The whole predicted text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class GenerationFields(GrammarFields):
    """What /v1/completions and /v1/chat/completions have in common."""

    model: Annotated[str, Field(max_length=512)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    stop: Stop = None
    include_stop_str_in_output: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few_entries)
    ] | None = None  # fmt: skip
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(fail_fast=True, max_length=1024)
    ] | None = None  # fmt: skip
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=2**20)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Count20 | None = None
    prediction: PredictedOutput | None = None
    speculation: Literal["auto", "off"] | Annotated[int, Field(ge=0)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\-]{1,128}$")] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[
        int, Field(ge=-1, lt=2**31, json_schema_extra={"not": {"const": 0}}), AfterValidator(_not_zero)
    ] | None = None  # fmt: skip


class CompletionBody(GenerationFields):
    """`POST /v1/completions`."""

    prompt: PromptValue
    suffix: str | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Count20 | None = None
