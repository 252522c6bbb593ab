"""Request fields of the OpenAI routes; `request_builder` checks limits that depend on the model."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from space_router.api.bad_words import without_bad_words
from space_router.api.grammar_fields import GrammarFields
from space_router.engine.request.request import Grammar
from space_router.http_server.body import Body
from space_router.http_server.warnings import warn

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

MAX_BIASED = 4096  # Maximum entries of `logit_bias`


def _few_entries(value: Any) -> Any:
    """Limit the number of entries before validation, because pydantic reports each invalid one."""
    if isinstance(value, dict) and len(value) > MAX_BIASED:
        raise ValueError(f"must have at most {MAX_BIASED} entries, and has {len(value)}")
    return value


def _is_not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for as many as there is room for")
    return value


def _is_speculation(value: Any) -> Any:
    """Say in one sentence what the field takes, where the union would name one of its branches."""
    if value is None or value in ("auto", "off") or (type(value) is int and value >= 0):
        return value
    raise ValueError('must be "auto", "off", or a number of drafts for each step, 0 or more')


_STOP = {"type": "string", "minLength": 1, "maxLength": 1024}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

# Validated in `request_builder`, so that an error names only one of many invalid parts.
Stop = Annotated[Any, WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP}, {"type": "null"}]})]
_PROMPTS = [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
_PROMPTS += [_IDS, {"type": "array", "items": _IDS, "minItems": 1}]
PromptValue = Annotated[
    Any, Field(description="a text, several, token ids, or several lists of them"), WithJsonSchema({"anyOf": _PROMPTS})
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


class CacheMarked(Body):
    """An object that may carry Anthropic's `cache_control`; the prefix cache needs no marks."""

    cache_control: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _without_marks(self) -> "CacheMarked":
        if self.cache_control is not None:
            warn("`cache_control` has no effect: prefixes are cached without it.")
        return self


class TextPart(CacheMarked):
    """A part of a message, or of a prediction; only text is taken."""

    type: Literal["text"]
    text: str


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Verbosity = Literal["low", "medium", "high"]


def warn_of_verbosity(verbosity: Verbosity | None, name: str) -> None:
    """Warn that a field of this name does nothing, unless it asks for what every model does."""
    if verbosity not in (None, "medium"):
        warn(f"`{name}` has no effect: no model here knows it.")


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


class SamplingFields(Body):
    """What all OpenAI routes have in common."""

    model: Annotated[str, Field(max_length=512)] | None = None
    stream: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop: Stop = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    speculation: Annotated[
        Literal["auto", "off"] | Annotated[int, Field(ge=0)] | None, BeforeValidator(_is_speculation)
    ] = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\-]{1,128}$")] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None


class GenerationFields(SamplingFields, GrammarFields):
    """What /v1/completions and /v1/chat/completions have in common."""

    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few_entries)] | None = (
        None
    )
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(fail_fast=True, max_length=1024)]
        | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=2**20)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Count20 | None = None
    prediction: PredictedOutput | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: (
        Annotated[int, Field(ge=-1, lt=2**31, json_schema_extra={"not": {"const": 0}}), AfterValidator(_is_not_zero)]
        | None
    ) = None

    def wanted_grammar(self) -> Grammar | None:
        """Return the grammar of the output, without what has a word of `bad_words`, or None. Raises InvalidRequest."""
        return without_bad_words(super().wanted_grammar(), self.bad_words)


class CompletionBody(GenerationFields):
    """`POST /v1/completions`."""

    prompt: PromptValue
    suffix: str | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Count20 | None = None


# Known fields that this server does not support, with the values that mean "off".
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **COMPLETION_NEUTRAL,
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "modalities": (["text"], []),
    "audio": (),
}

MAX_TOOLS = 128  # Maximum tools in a request, as in OpenAI's API

MAX_MESSAGES = 4096
MAX_PARTS = 2 * MAX_MESSAGES  # Maximum parts of all messages together, calls included

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ToolCallId = Annotated[str, Field(min_length=1, max_length=256)]


class RefusalPart(CacheMarked):
    """A part of an assistant's message that says why it did not answer."""

    type: Literal["refusal"]
    refusal: str


Parts = Annotated[list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]], Field(fail_fast=True)]


def _few_parts(value: Any) -> Any:
    """Limit the number of parts before validation, because validating one takes longer than sending it."""
    if isinstance(value, list):
        messages = (message for message in value[: MAX_MESSAGES + 1] if isinstance(message, dict))
        num_parts = sum(len(field) for message in messages for field in message.values() if isinstance(field, list))
        if num_parts > MAX_PARTS:
            raise ValueError(f"must have at most {MAX_PARTS} parts and calls in all, and has {num_parts}")
    return value


FEW_PARTS = BeforeValidator(_few_parts)  # Applied to a list of messages


class CalledFunction(Body):
    """The function of an earlier call, and what it was called with: JSON as text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class ToolCall(CacheMarked):
    """A call in an assistant's earlier message."""

    id: ToolCallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # left over by clients that join streamed pieces


class Message(CacheMarked):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")], TEXT_OR_PARTS] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: ToolCallId | None = None
    reasoning_content: Annotated[str | None, Field(description="an earlier answer's reasoning")] = None
    reasoning: Annotated[str | None, Field(description="another name of `reasoning_content`")] = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None

    @property
    def thought(self) -> str | None:
        """The reasoning of an earlier answer."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def text(self) -> str:
        """The texts of all parts."""
        content = self.refusal or "" if self.content is None else self.content
        if isinstance(content, str):
            return content
        return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)

    @field_validator("role", mode="before")
    @classmethod
    def _not_the_old_role(cls, value: Any) -> Any:
        if value == "function":
            raise ValueError("must be `tool`, with the `tool_call_id` that is answered, where it once was `function`")
        return value

    @model_validator(mode="after")
    def _of_its_role(self) -> "Message":
        if self.role == "tool":
            if self.tool_call_id is None:
                raise ValueError("must say with `tool_call_id` which call a message of the role tool answers")
        elif self.tool_call_id is not None:
            raise ValueError(f"must have no `tool_call_id` with the role {self.role}")
        if self.role == "assistant":
            if self.content is None and self.refusal is None and not self.tool_calls and self.thought is None:
                raise ValueError("must have `content` or `tool_calls` with the role assistant")
            return self
        if self.thought is not None:
            raise ValueError(f"must have no `reasoning_content` with the role {self.role}")
        if self.tool_calls or self.refusal is not None:
            raise ValueError(f"must have no `tool_calls` and no `refusal` with the role {self.role}")
        if self.content is None:
            raise ValueError(f"must have `content` with the role {self.role}")
        if isinstance(self.content, list) and not all(isinstance(part, TextPart) for part in self.content):
            raise ValueError(f"must have parts of the type text only with the role {self.role}")
        return self


class FunctionDefinition(CacheMarked):
    """A function the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments")
    strict: bool | None = None


class Tool(CacheMarked):
    """A tool the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(Body):
    """A function by its name."""

    name: FunctionName


def _typed(value: Any) -> Any:
    """Add `type: function`, which Hugging Face's client omits."""
    return {"type": "function", **value} if isinstance(value, dict) and "function" in value else value


class NamedTool(Body):
    """One of the tools."""

    type: Literal["function"] = "function"
    function: FunctionReference


class AllowedTools(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(Body):
    """A choice among some of the tools, all of which the model sees."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = str | NamedTool | AllowedToolChoice  # none, auto, required, one tool, or some of them


class ChatBody(GenerationFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), FEW_PARTS]
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count20 | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | AllowedToolChoice, Field(discriminator="type"), BeforeValidator(_typed)]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    functions: Any = Field(default=None, description="OpenAI's old name: send `tools`")
    function_call: Any = Field(default=None, description="OpenAI's old name: send `tool_choice`")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    verbosity: Verbosity | None = None
    web_search_options: dict[str, Any] | None = Field(default=None, description="of a hosted tool: left out")

    @model_validator(mode="after")
    def _without_effect(self) -> "ChatBody":
        warn_of_verbosity(self.verbosity, "verbosity")
        return self
