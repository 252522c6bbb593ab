"""Turn Anthropic's messages, system prompt and tools into a chat, and a chat into its prompt."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from space_router.api.anthropic import fields
from space_router.api.anthropic.fields import ConversationFields, InputTurn, ToolResultBlock
from space_router.api.grammar_fields import json_schema_grammar
from space_router.api.openai.chat import TemplateOptions, ToolUse, prompt_text, template_for, tool_use
from space_router.api.openai.fields import (
    CalledFunction,
    FunctionDefinition,
    FunctionReference,
    Message,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
)
from space_router.api.openai.thinking import SWITCHES, behind_thinking, format_of, thinking_of
from space_router.api.request_builder import Parameters, Prompt, PromptOptions, RequestBuilder
from space_router.engine.request.request import Grammar
from space_router.errors import InvalidRequest
from space_router.http_server.body import short_repr
from space_router.http_server.warnings import warn
from space_router.text import written_numbers
from space_router.text.reasoning import AnswerReasoning

BILLING_HEADER = "x-anthropic-billing-header:"
"""Begins a system block that differs in every request of a coding agent, so that no prefix would ever be cached."""

EFFORTS: Mapping[str, str] = {"xhigh": "high", "max": "high"}  # what templates know


class LongNamedFunction(FunctionDefinition):
    """A function with a name as long as Anthropic takes."""

    name: fields.ToolName


class LongNamedReference(FunctionReference):
    """Its name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


def chat_messages(body: ConversationFields) -> list[Message]:
    """Return system prompt and messages as chat messages. Messages of one role in a row become one."""
    turns = list(body.messages)
    num_first = next((place for place, turn in enumerate(turns) if turn.role != "system"), len(turns))
    system = _system(body.system, turns[:num_first])
    messages = [Message(role="system", content=system)] if system else []
    for turn in turns[num_first:]:
        if turn.role == "assistant":
            _add_assistant(messages, turn)
        else:
            _add_user(messages, turn)
    return messages


def _system(system: str | Sequence[fields.TextBlock] | None, turns: Sequence[InputTurn]) -> str:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    texts += [block.text for turn in turns for block in turn.blocks if isinstance(block, fields.TextBlock)]
    return "\n\n".join(text for text in texts if text and not text.lstrip().startswith(BILLING_HEADER))


def _add_user(messages: list[Message], turn: InputTurn) -> None:
    """Add the results of tools as messages of their own, and the texts between them."""
    texts: list[str] = []
    for block in turn.blocks:
        if isinstance(block, ToolResultBlock):
            _add_text(messages, texts)
            texts = []
            messages.append(Message(role="tool", tool_call_id=block.tool_use_id, content=block.text))
        elif isinstance(block, fields.TextBlock):
            texts.append(block.text)
    if turn.role == "system":  # most templates know system messages at the beginning only
        texts = ["<system-reminder>", *texts, "</system-reminder>"]
    _add_text(messages, texts)


def _add_text(messages: list[Message], texts: Sequence[str]) -> None:
    if not texts:
        return
    text = "\n".join(texts)
    if messages and messages[-1].role == "user" and isinstance(messages[-1].content, str):
        text = f"{messages.pop().content}\n\n{text}"
    messages.append(Message(role="user", content=text))


def _add_assistant(messages: list[Message], turn: InputTurn) -> None:
    text, thought, calls = "", "", list[ToolCall]()
    if messages and messages[-1].role == "assistant":
        earlier = messages.pop()
        text, thought, calls = str(earlier.content or ""), earlier.thought or "", list(earlier.tool_calls or ())
    for block in turn.blocks:
        match block:
            case fields.TextBlock():
                text += block.text
            case fields.ToolUseBlock():
                written = written_numbers.dumps(block.input, ensure_ascii=False)
                calls.append(ToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=written)))
            case fields.ThinkingBlock():
                thought += block.thinking
            case _:
                pass
    messages.append(
        Message(role="assistant", content=text, tool_calls=calls or None, reasoning_content=thought or None)
    )


def client_tools(
    tools: Iterable[fields.AnthropicTool], choice: fields.AnthropicToolChoice | None, *, refuse_hosted: bool
) -> list[Tool]:
    """Return the tools that the client runs; those of Anthropic's own are left out with a warning.

    Raises InvalidRequest if `choice` names one of these, and with `refuse_hosted` in any case.
    """
    kept: list[Tool] = []
    for tool in tools:
        if tool.is_hosted:
            if choice is not None and choice.name is not None and choice.name == tool.name:
                raise InvalidRequest(
                    f"`tool_choice` names {short_repr(tool.name)}, a tool of the type {short_repr(tool.type)}, which "
                    "this server does not have.",
                    param="tool_choice",
                    code="unsupported_parameter",
                )
            if refuse_hosted:
                raise InvalidRequest(
                    f"The tool {short_repr(tool.name or tool.type)} has the type {short_repr(tool.type)}, of which "
                    "this server has none (`--compat strict`). Leave it out.",
                    param="tools",
                    code="unsupported_parameter",
                )
            warn(f"The tool {tool.name or tool.type} was left out: this server has none of the type {tool.type}.")
            continue
        function = LongNamedFunction(
            name=tool.name or "", description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        kept.append(Tool(type="function", function=function))
    return kept


def _choice(choice: fields.AnthropicToolChoice | None) -> ToolChoice | None:
    match choice:
        case None:
            return None
        case fields.AnthropicToolChoice(type="tool"):
            return NamedTool(function=LongNamedReference(name=choice.name or ""))
        case fields.AnthropicToolChoice(type="any"):
            return "required"
        case _:
            return choice.type


def tools_of(builder: RequestBuilder, body: ConversationFields) -> ToolUse:
    """Return the request's tool use and the grammar of its output. Raises InvalidRequest."""
    choice = body.tool_choice
    tools = client_tools(body.tools or (), choice, refuse_hosted=builder.config.is_strict)
    parallel = choice is None or not choice.disable_parallel_tool_use
    wanted = _choice(choice)
    return tool_use(builder, tools, wanted, parallel=parallel, answer=_form(body))


def _form(body: ConversationFields) -> Grammar | None:
    config = body.output_config
    form = body.output_format if config is None or config.format is None else config.format
    return None if form is None else json_schema_grammar(form.schema_, "output_config")


def conversation_prompt(
    builder: RequestBuilder, body: ConversationFields, tools: ToolUse
) -> tuple[Prompt, AnswerReasoning | None]:
    """Return the prompt, and the reasoning that its answer may begin with. An assistant's message at the end is
    continued. Raises InvalidRequest."""
    messages = chat_messages(body)
    if not messages:
        raise InvalidRequest("`messages` must have a message with content; all of them are empty.", param="messages")
    last = messages[-1]
    if last.role == "assistant" and last.tool_calls:
        raise InvalidRequest(
            f"messages.{len(body.messages) - 1}: `tool_use` ids were found without `tool_result` blocks immediately "
            f"after: {short_repr(last.tool_calls[-1].id)}. Each `tool_use` block must have a `tool_result` block in "
            "the next message.",
            param="messages",
        )
    continued = last.role == "assistant"
    options = TemplateOptions(
        tools.shown,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        variables=_variables(builder, body, tools),
    )
    rendered = prompt_text(builder, messages, options)
    template = template_for(builder, tools.shown)
    thinking = thinking_of(builder, template, rendered.text, last if continued else None)
    return builder.prompt(rendered, PromptOptions("messages")), thinking


def with_reasoning(
    builder: RequestBuilder, wanted: Parameters, thinking: AnswerReasoning | None, asked: fields.Thinking | None
) -> Parameters:
    """Return the parameters for an answer that may begin with reasoning, within the budget asked for. A budget that
    cannot be held is named in a warning, for clients of this API always send one."""
    budget = None if asked is None or asked.type != "enabled" else asked.budget_tokens
    if thinking is None:
        if budget is not None:
            warn("`thinking.budget_tokens` has no effect: the answer begins without reasoning.")
        return wanted
    try:
        return behind_thinking(builder, wanted, thinking, budget)
    except InvalidRequest as error:
        if budget is None or error.param != "thinking_token_budget":
            raise
        warn("`thinking.budget_tokens` has no effect: the markers of this model's reasoning are no single tokens.")
        return behind_thinking(builder, wanted, thinking, None)


def _variables(builder: RequestBuilder, body: ConversationFields, tools: ToolUse) -> dict[str, Any]:
    """Return the template's variables; a warning names what the template does not know."""
    template = template_for(builder, tools.shown)
    variables = dict(body.chat_template_kwargs or {})
    wanted: dict[str, Any] = {}
    if body.thinking is not None:
        is_on = body.thinking.type != "disabled"
        switch = next((name for name in SWITCHES if name in template.variables), None)
        if switch is not None:
            variables.setdefault(switch, is_on)
        elif is_on is not (format_of(builder, template) is not None):
            warn("`thinking` has no effect: this model's chat template has nothing that turns it on or off.")
    if body.output_config is not None and body.output_config.effort is not None:
        effort = body.output_config.effort
        wanted["reasoning_effort"] = EFFORTS.get(effort, effort)
    for name, value in wanted.items():
        if name in template.variables:
            variables.setdefault(name, value)
        else:
            warn(f"`output_config.effort` has no effect: this model's chat template has no `{name}`.")
    return variables
