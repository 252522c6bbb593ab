"""Request fields of `/v1/messages` and `/v1/messages/count_tokens`."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from space_router.api.openai.fields import FEW_PARTS, MAX_MESSAGES, TEXT_OR_PARTS, CacheMarked, SamplingFields
from space_router.http_server.body import Body
from space_router.http_server.warnings import warn

MAX_TOOLS = 1024

# Known fields that this server does not support, with the values that mean "off".
MESSAGES_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "container": (),
    "fallbacks": ([],),
}

# Known fields that change no text here: taken, and named in a warning.
WITHOUT_EFFECT = ("context_management", "cache_control", "inference_geo", "speed", "diagnostics")

ShownThinking = Literal["all", "signature", "nothing"]
"""What an answer has of its reasoning: blocks, blocks without their text, or none."""

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
ToolUseId = Annotated[str, Field(min_length=1, max_length=256)]


class TextBlock(CacheMarked):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Body):
    """Earlier reasoning, as an answer had it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None  # any is taken: the text is the client's in any case


class RedactedThinkingBlock(Body):
    """Reasoning that another server has encrypted: nothing here can read it."""

    type: Literal["redacted_thinking"]
    data: str

    @model_validator(mode="after")
    def _is_left_out(self) -> "RedactedThinkingBlock":
        warn("A `redacted_thinking` block was left out: only the server that made it can read it.")
        return self


class ToolUseBlock(CacheMarked):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: ToolUseId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]
    caller: dict[str, Any] | None = None  # returned with it by other servers; has no effect


class ToolResultBlock(CacheMarked):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: ToolUseId
    content: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[list[TextBlock], Field(fail_fast=True), Tag("parts")],
            TEXT_OR_PARTS,
        ]
        | None
    ) = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """The text that the model sees: an error is called one."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(block.text for block in content)
        return f"Error: {text}" if self.is_error and not text.lower().startswith("error") else text


UserBlock = TextBlock | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock
Block = Annotated[UserBlock | AssistantBlock, Field(discriminator="type")]
Blocks = Annotated[list[Block], Field(fail_fast=True)]
TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class InputTurn(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag("text")] | Annotated[Blocks, Tag("parts")], TEXT_OR_PARTS]

    @model_validator(mode="after")
    def _of_its_role(self) -> "InputTurn":
        kinds: tuple[type[Body], ...] = (TextBlock,)
        kinds += (ToolResultBlock,) if self.role == "user" else ()
        kinds += (ThinkingBlock, RedactedThinkingBlock, ToolUseBlock) if self.role == "assistant" else ()
        wrong = next((block for block in self.blocks if not isinstance(block, kinds)), None)
        if wrong is not None:
            raise ValueError(f"must have no block of the type {wrong.type} with the role {self.role}")
        return self

    @property
    def blocks(self) -> list[UserBlock | AssistantBlock]:
        """The content as blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else list(self.content)


class AnthropicTool(CacheMarked):
    """A tool: one that the client runs, or (with another `type`) one of Anthropic's own."""

    name: ToolName | None = None
    type: Annotated[str, Field(max_length=128)] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_its_kind(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("type") not in (None, "custom"):  # one of Anthropic's own: its other fields are not read
            return {key: value[key] for key in ("name", "type") if key in value}
        for name in ("name", "input_schema"):
            if value.get(name) is None:
                raise ValueError(f"must have `{name}`")
        return value

    @model_validator(mode="after")
    def _without_hints(self) -> "AnthropicTool":
        for name in ("input_examples", "defer_loading", "eager_input_streaming", "allowed_callers"):
            if getattr(self, name):
                warn(f"`{name}` of a tool has no effect.")
        return self

    @property
    def is_hosted(self) -> bool:
        """Whether it is one of Anthropic's own, which nothing here runs or describes."""
        return self.type not in (None, "custom")


class AnthropicToolChoice(Body):
    """Whether and which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_a_name(self) -> "AnthropicToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("must have `name` with the type tool, and only with it")
        return self


class Thinking(Body):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def shown(self) -> ShownThinking:
        """What the answer has of the reasoning."""
        if self.type == "disabled":
            return "nothing"
        return "signature" if self.display == "omitted" else "all"


class JsonOutput(Body):
    """What the text of the answer must be."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """Of the answer: how much work, and which form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class ConversationFields(Body):
    """What makes the prompt."""

    model: Annotated[str, Field(max_length=512)] | None = None
    messages: Annotated[list[InputTurn], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), FEW_PARTS]
    system: Annotated[Annotated[str, Tag("text")] | Annotated[TextBlocks, Tag("parts")], TEXT_OR_PARTS] | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None  # the beta's name of `output_config.format`
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None
    diagnostics: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _named_if_without_effect(self) -> "ConversationFields":
        for name in WITHOUT_EFFECT:
            if getattr(self, name) is not None:
                warn(f"`{name}` has no effect here.")
        return self


class CountTokensBody(ConversationFields):
    """`POST /v1/messages/count_tokens`."""


class MessagesBody(SamplingFields, ConversationFields):
    """`POST /v1/messages`; sampling and scheduling as chat completions have them."""

    stop: None = Field(default=None, description="send `stop_sequences`")
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
