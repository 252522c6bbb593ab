"""Request fields of `/v1/responses`."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from space_router.api.grammar_fields import JsonSchemaFormat, ResponseFormat
from space_router.api.openai.fields import (
    FEW_PARTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    TEXT_OR_PARTS,
    CacheMarked,
    CalledFunction,
    Count20,
    Effort,
    Message,
    RefusalPart,
    SamplingFields,
    ToolCall,
    ToolCallId,
    Verbosity,
    warn_of_verbosity,
)
from space_router.api.openai.response_tools import AnyTool, AnyToolChoice, custom_arguments, full_name
from space_router.http_server.body import Body
from space_router.http_server.warnings import warn

# Known fields that this server does not support, with the values that mean "off".
RESPONSE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "moderation": (),
}


class InputTextPart(CacheMarked):
    """Text, as it goes in or as it came out."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None  # returned with it earlier; has no effect


class ReasoningTextPart(Body):
    """Reasoning, or a summary of it."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class InputRefusalPart(RefusalPart):
    """Why an earlier message did not answer."""


Status = Literal["in_progress", "completed", "incomplete"] | None
InputPart = Annotated[InputTextPart | InputRefusalPart, Field(discriminator="type")]
InputParts = Annotated[list[InputPart], Field(fail_fast=True)]


class InputMessage(CacheMarked):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Annotated[str, Tag("text")] | Annotated[InputParts, Tag("parts")], TEXT_OR_PARTS]
    id: str | None = None
    status: Status = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text if isinstance(part, InputTextPart) else part.refusal for part in self.content)


class CalledItem(Body):
    """What calls have in common."""

    call_id: ToolCallId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    namespace: Annotated[str, Field(max_length=64)] | None = None
    id: str | None = None
    status: Status = None


class FunctionCallItem(CalledItem):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    arguments: str


class CustomCallItem(CalledItem):
    """A call of a custom tool that the model made earlier."""

    type: Literal["custom_tool_call"]
    input: str


class ReasoningItem(Body):
    """How the model reasoned earlier: goes with the message or the calls behind it."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[ReasoningTextPart], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningTextPart], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None
    status: Status = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or ())


HOSTED = "that of a hosted tool"  # for error messages, which list the kinds
HOSTED_ITEMS = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "computer_call",
        "computer_call_output",
        "image_generation_call",
        "code_interpreter_call",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "tool_search_call",
        "tool_search_output",
        "compaction",
    }
)
"""Items of tools that OpenAI's servers run."""


class HostedItem(Body):
    """An item of a tool that OpenAI's servers run: left out."""

    type: str

    @model_validator(mode="before")
    @classmethod
    def _is_left_out(cls, value: Any) -> Any:
        if isinstance(value, dict) and "type" in value:
            warn(f"An item of the type {value['type']} was left out: nothing here runs hosted tools.")
            return {"type": value["type"]}
        return value


class FunctionCallOutput(Body):
    """What came of it."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: ToolCallId
    output: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[InputTextPart], Field(fail_fast=True), Tag("parts")], TEXT_OR_PARTS
    ]
    id: str | None = None
    status: Status = None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[FunctionCallOutput, Tag("custom_tool_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[HostedItem, Tag(HOSTED)],
    Discriminator(lambda value: _item_kind(value)),
]


def _item_kind(value: Any) -> str:
    kind = str(value.get("type") or "message") if isinstance(value, dict) else "message"
    return HOSTED if kind in HOSTED_ITEMS else kind


class TextFormat(JsonSchemaFormat):
    """What the text of the answer must be."""

    type: Literal["text", "json_object", "json_schema"]

    def chat_format(self) -> ResponseFormat:
        """The same as `response_format` says it."""
        return ResponseFormat(type=self.type, json_schema=self if self.type == "json_schema" else None)


class TextOptions(Body):
    """About the text of the answer."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None

    @model_validator(mode="after")
    def _without_effect(self) -> "TextOptions":
        warn_of_verbosity(self.verbosity, "text.verbosity")
        return self


class Reasoning(Body):
    """How much to think, for templates that know."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: str | None = None

    @model_validator(mode="after")
    def _without_effect(self) -> "Reasoning":
        for name in ("summary", "generate_summary", "context"):
            if getattr(self, name) is not None:
                warn(f"`reasoning.{name}` has no effect: nothing is summarised.")
        return self


Truncation = Literal["auto", "disabled"]


class ResponseStreamOptions(Body):
    """What else a stream carries: nothing yet."""

    include_obfuscation: Literal[False] | None = None


InputItems = Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), FEW_PARTS]


Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


class ResponseConversation(Body):
    """What makes the prompt."""

    model: Annotated[str, Field(max_length=512)] | None = None
    input: Annotated[Annotated[str, Tag("text")] | Annotated[InputItems, Tag("parts")], TEXT_OR_PARTS]
    instructions: str | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: AnyToolChoice | None = None
    truncation: Truncation | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None

    def messages(self) -> list[Message]:
        """Return instructions and input as chat messages; calls are part of the preceding assistant message."""
        items: list[Any]
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else list(self.input)
        system = [self.instructions] if self.instructions else []
        while system and items and isinstance(items[0], InputMessage) and items[0].role in ("system", "developer"):
            system.append(items[0].text)
            del items[0]
        messages = [Message(role="system", content="\n\n".join(system))] if system else []
        thought: str | None = None  # of the answer that follows
        for item in items:
            match item:
                case ReasoningItem():
                    thought = (thought or "") + item.text
                case InputMessage() if item.role == "assistant":
                    messages.append(Message(role=item.role, content=item.text, reasoning_content=thought))
                    thought = None
                case InputMessage():
                    messages.append(Message(role=item.role, content=item.text))
                case FunctionCallOutput():
                    output = item.output if isinstance(item.output, str) else "".join(one.text for one in item.output)
                    messages.append(Message(role="tool", tool_call_id=item.call_id, content=output))
                case FunctionCallItem() | CustomCallItem():
                    arguments = custom_arguments(item.input) if isinstance(item, CustomCallItem) else item.arguments
                    called = CalledFunction(name=full_name(item.name, item.namespace), arguments=arguments)
                    call = ToolCall(id=item.call_id, function=called)
                    if messages and messages[-1].role == "assistant" and thought is None:
                        assistant = messages.pop()
                    else:
                        assistant = Message(role="assistant", content="", reasoning_content=thought)
                        thought = None
                    calls = [*(assistant.tool_calls or ()), call]
                    messages.append(assistant.model_copy(update={"tool_calls": calls}))
        return messages


class InputTokensBody(ResponseConversation):
    """`POST /v1/responses/input_tokens`."""


class ResponseBody(SamplingFields, ResponseConversation):
    """`POST /v1/responses`; sampling and scheduling as chat completions have them."""

    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top_logprobs: Count20 | None = None
    include: (
        Annotated[
            list[Includable],
            Field(fail_fast=True, max_length=16, description="of hosted tools there is nothing to include"),
        ]
        | None
    ) = None
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: Annotated[int, Field(ge=1, lt=2**31, description="of hosted tools, which are left out")] | None = (
        None
    )
    store: bool | None = None
    client_metadata: Annotated[dict[str, Any] | None, Field(description="the client's own note: changes nothing")] = (
        None
    )
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())
