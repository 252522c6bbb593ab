"""Fields of `POST /v1/responses`, and their conversion to chat messages."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from space_router.api.grammar_fields import JsonSchemaFormat, ResponseFormat
from space_router.api.openai.fields import (
    FEW_PARTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    TEXT_OR_PARTS,
    AllowedToolChoice,
    AllowedTools,
    CalledFunction,
    Count20,
    FunctionDefinition,
    FunctionName,
    FunctionReference,
    Message,
    NamedTool,
    Stop,
    Tool,
    ToolCall,
    ToolCallId,
)
from space_router.api.openai.tools import ToolChoice
from space_router.http_server.body import Body

# Known fields that this server does not support, with the values that mean "off".
RESPONSE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "prompt_cache_retention": (),
    "moderation": (),
}


class InputTextPart(Body):
    """Text, as it goes in or as it came out."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None  # returned with it earlier; has no effect


class InputRefusalPart(Body):
    """Why an earlier message did not answer."""

    type: Literal["refusal"]
    refusal: str


Status = Literal["in_progress", "completed", "incomplete"] | None
Parts = Annotated[list[Annotated[InputTextPart | InputRefusalPart, Field(discriminator="type")]], Field(fail_fast=True)]


class InputMessage(Body):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")], TEXT_OR_PARTS]
    id: str | None = None
    status: Status = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text if isinstance(part, InputTextPart) else part.refusal for part in self.content)


class FunctionCallItem(Body):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: ToolCallId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    id: str | None = None
    status: Status = None


class FunctionCallOutput(Body):
    """What came of it."""

    type: Literal["function_call_output"]
    call_id: ToolCallId
    output: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[InputTextPart], Field(fail_fast=True), Tag("parts")],
        TEXT_OR_PARTS,
    ]
    id: str | None = None
    status: Status = None


def _kind(value: Any) -> str:
    """An item without `type` is a message."""
    return str(value.get("type") or "message") if isinstance(value, dict) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


class TextFormat(Body):
    """What the text of the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=256)] | None = None
    description: Annotated[str, Field(max_length=65536)] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def chat_format(self) -> ResponseFormat:
        """The same as `response_format` says it."""
        schema = None
        if self.type == "json_schema":
            named = {"name": self.name, "description": self.description, "schema": self.schema_}
            schema = JsonSchemaFormat.model_validate(named)
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(Body):
    """About the text of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """How much to think, for templates that know."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponseTool(Body):
    """A function the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments")
    strict: bool | None = None

    def chat_tool(self) -> Tool:
        return Tool(type="function", function=FunctionDefinition(**self.model_dump(exclude={"type"})))


class NamedFunction(Body):
    """One of the functions."""

    type: Literal["function"]
    name: FunctionName

    def chat_tool(self) -> NamedTool:
        return NamedTool(type="function", function=FunctionReference(name=self.name))


class AllowedFunctions(Body):
    """Some of the functions, and whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class ResponseStreamOptions(Body):
    """What else a stream carries: nothing yet."""

    include_obfuscation: Literal[False] | None = None


class ResponseBody(Body):
    """`POST /v1/responses`; sampling and scheduling as chat completions have them."""

    model: Annotated[str, Field(max_length=512)] | None = None
    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[
            list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), FEW_PARTS, Tag("parts")
        ],
        TEXT_OR_PARTS,
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Count20 | None = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Field(fail_fast=True, max_length=16, description="reasoning is never given, so that it has no content"),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedFunction | AllowedFunctions, Field(discriminator="type")]
        | None
    ) = None  # fmt: skip
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop: Stop = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    speculation: Literal["auto", "off"] | Annotated[int, Field(ge=0)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    timeout: Annotated[float, Field(gt=0, le=1e9)] | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\-]{1,128}$")] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def chat_tools(self) -> list[Tool]:
        return [tool.chat_tool() for tool in self.tools or ()]

    @property
    def chat_choice(self) -> ToolChoice | None:
        match self.tool_choice:
            case NamedFunction():
                return self.tool_choice.chat_tool()
            case AllowedFunctions():
                tools = [tool.chat_tool() for tool in self.tool_choice.tools]
                allowed = AllowedTools(mode=self.tool_choice.mode, tools=tools)
                return AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
            case choice:
                return choice

    def messages(self) -> list[Message]:
        """Return instructions and input as chat messages; calls are part of the preceding assistant message."""
        items: list[InputMessage | FunctionCallItem | FunctionCallOutput]
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else list(self.input)
        system = [self.instructions] if self.instructions else []
        while system and items and isinstance(items[0], InputMessage) and items[0].role in ("system", "developer"):
            system.append(items[0].text)
            del items[0]
        messages = [Message(role="system", content="\n\n".join(system))] if system else []
        for item in items:
            match item:
                case InputMessage():
                    messages.append(Message(role=item.role, content=item.text))
                case FunctionCallOutput():
                    output = item.output if isinstance(item.output, str) else "".join(one.text for one in item.output)
                    messages.append(Message(role="tool", tool_call_id=item.call_id, content=output))
                case FunctionCallItem():
                    call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
                    if messages and messages[-1].role == "assistant":
                        assistant = messages.pop()
                    else:
                        assistant = Message(role="assistant", content="")
                    calls = [*(assistant.tool_calls or ()), call]
                    messages.append(Message(role="assistant", content=assistant.content, tool_calls=calls))
        return messages
