"""`POST /v1/chat/completions`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from fastapi import APIRouter, Request
from starlette.responses import Response

from space_router.api.generation import ChoiceState, CompletedChoice
from space_router.api.json_schema import enforceable, name_what_is_left_open
from space_router.api.openai import fields
from space_router.api.openai.answers import ChatCompletion, ChatEvent
from space_router.api.openai.completions import common_parameters
from space_router.api.openai.fields import CHAT_NEUTRAL, ChatBody, Message, Tool, ToolChoice
from space_router.api.openai.response_tools import leave_out_hosted
from space_router.api.openai.stream import OpenAIAnswer, chat_logprobs
from space_router.api.openai.thinking import behind_thinking, template_variables, thinking_of
from space_router.api.request_builder import GenerationPlan, PlannedChoice, PromptOptions, RequestBuilder
from space_router.api.schema import STATUSES, OpenAIError, describe_responses, json_body
from space_router.api.service import Service
from space_router.engine.request.request import Grammar
from space_router.errors import InvalidRequest
from space_router.http_server.body import short_repr
from space_router.http_server.responses import key_of
from space_router.text import tool_calls
from space_router.text.chat_template import ChatTemplate, Habits, present
from space_router.text.control_tokens import RenderedPrompt, render_as_data
from space_router.text.json_places import places_of_calls, places_of_calls_or
from space_router.text.reasoning import AnswerReasoning, form_with
from space_router.text.text_stream import FinishReason, TextDelta
from space_router.text.tool_calls import CallPiece, ParsedText, ToolCallLayout, ToolCallReader
from space_router.text.tool_parsers import formats
from space_router.text.tool_parsers.formats import ToolFormat
from space_router.text.written_numbers import WrittenNumber

# What is enforced for a tool without `parameters`, which is OpenAI's function with an empty parameter list.
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class TemplateOptions:
    """Options of a request for its prompt, besides the messages."""

    tools: Sequence[Mapping[str, Any]] = ()  # in the form that templates expect
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # template variables by name
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None

    @classmethod
    def of(cls, body: ChatBody, tools: Sequence[Mapping[str, Any]]) -> "TemplateOptions":
        """Read the options of a body. Raises InvalidRequest if they contradict each other."""
        if body.continue_final_message and body.add_generation_prompt:
            raise InvalidRequest(
                "`continue_final_message` and `add_generation_prompt` are both true: the prompt ends with the last "
                "message or with the beginning of a new one. Set one of them.",
                param="continue_final_message",
            )
        return cls(
            tools,
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
            variables=body.chat_template_kwargs or {},
            reasoning_effort=body.reasoning_effort,
            enable_thinking=body.enable_thinking,
        )


def template_for(builder: RequestBuilder, tools: Sequence[object]) -> ChatTemplate:
    """Return the chat template for a request with these tools. Raises InvalidRequest if there is none."""
    template = builder.text.chat_template
    if template is None:
        raise InvalidRequest(
            f"`{builder.text.name}` has no chat template. Use /v1/completions, or start the server with "
            "`--chat-template` (vicuna, llama-2, chatml, alpaca or a file).",
            param="messages",
            code="no_chat_template",
        )
    return template.of(tools)


def prompt_text(builder: RequestBuilder, messages: Sequence[Message], options: TemplateOptions) -> RenderedPrompt:
    """Return the messages as rendered by the chat template. Control tokens that they spell are text.

    Raises InvalidRequest.
    """
    template = template_for(builder, options.tools)
    defaults = json.loads(builder.config.default_chat_template_kwargs or "{}")
    variables = template_variables(
        template, options.variables, options.reasoning_effort, options.enable_thinking, defaults
    )
    if options.continue_final_message and not messages[-1].content:
        raise InvalidRequest(
            "`continue_final_message` needs a last message with `content` to continue.", param="continue_final_message"
        )
    now = present()  # one time for all renderings

    def render(data: Mapping[str, Any]) -> str:
        return template.render(
            data["messages"],
            tools=data["tools"],
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            variables=data["variables"],
            now=now,
        )

    data = {"messages": _plain(messages, template), "tools": options.tools, "variables": variables}
    return render_as_data(render, data, builder.text.tokenizer, builder.control_ids)


def _plain(messages: Sequence[Message], template: ChatTemplate) -> list[dict[str, Any]]:
    """Return messages in the form that the template expects, without absent fields."""
    habits = template.habits
    names: dict[str, str] = {}  # function name by call id
    plain: list[dict[str, Any]] = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        one: dict[str, Any] = {"role": role, "content": _content(message, habits)}
        if message.tool_calls:
            one["tool_calls"] = [_call(call, habits) for call in message.tool_calls]
            names |= {call.id: call.function.name for call in message.tool_calls}
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        if message.thought:
            template.add_reasoning(one, message.thought)
        if (name := message.name or names.get(message.tool_call_id or "")) is not None:
            one["name"] = name
        plain.append(one)
    return plain


def _content(message: Message, habits: Habits) -> Any:
    """Return the content as text, or as a list of parts if the template requires it."""
    content = message.refusal or "" if message.content is None else message.content
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [part.refusal if isinstance(part, fields.RefusalPart) else part.text for part in content]
    if habits.takes_text and (isinstance(content, str) or not habits.takes_parts):
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts if text or len(texts) > 1]


def _call(call: fields.ToolCall, habits: Habits) -> dict[str, Any]:
    text = call.function.arguments or "{}"
    arguments = text if habits.arguments_as_text else _parsed(text)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _parsed(text: str) -> Any:
    """Return call arguments as an object, or unchanged if they are invalid, as in a truncated call."""
    try:
        arguments = json.loads(
            text, parse_constant=_no_constant, parse_float=WrittenNumber.parsed, parse_int=WrittenNumber.parsed
        )
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True)
class ToolUse:
    """Validated tool use: the tools that the model sees and may call, and the grammar that enforces it."""

    shown: tuple[Mapping[str, Any], ...] = ()  # tools passed to the chat template
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of tools that the model may call, by name
    format: ToolFormat | None = None  # None: calls are not parsed
    grammar: Grammar | None = None
    markers: frozenset[int] = frozenset()  # special ids that the parser needs in the text
    forced: bool = False  # the answer is a call: `tool_choice` is required or names a tool

    def reader(self, thinking: AnswerReasoning | None = None) -> ToolCallReader | None:
        """Return a parser for one text, or None if neither calls nor reasoning are parsed."""
        form = None if self.format is None else self.format.form
        if thinking is not None:
            form = form_with(thinking, form)
        return None if form is None else ToolCallReader(form, self.schemas, forced=self.forced)

    def call_id(self, seed: int, choice: PlannedChoice, index: int) -> str:
        """Return a call's id: reproducible for a request and seed, and unique within a conversation."""
        place = f"{seed}/{choice.index}/{index}/".encode() + str(choice.prompt.ids).encode()
        digest = hashlib.blake2b(place, digest_size=12).hexdigest()
        return digest[:9] if self.format is not None and self.format.short_ids else f"call_{digest}"


def tool_use(
    builder: RequestBuilder, tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool, answer: Grammar | None
) -> ToolUse:
    """Validate tools and tool_choice. `answer`: grammar of an answer without a call. Raises InvalidRequest."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("`tool_choice` asks for a call, and there are no `tools`.", param="tool_choice")
        return _without_calls(builder, answer)
    functions = _functions(tools)
    mode, callable_ = _chosen(choice, list(functions))
    if mode == "none":
        return _without_calls(builder, answer)
    template = template_for(builder, tools)
    if not template.habits.takes_tools:
        raise InvalidRequest(
            f"The chat template ({template.name}) does not show tools to the model. Start the server with "
            "`--chat-template chatml` or a file with a template that does, or leave `tools` out.",
            param="tools",
            code="unsupported_parameter",
        )
    known = _format(builder, template.source)
    called = [functions[name] for name in callable_]
    ids = builder.text.tokenizer.special_tokens.ids
    return ToolUse(
        shown=tuple(_shown(tool) for tool in tools),
        schemas={tool.function.name: _schema(tool) for tool in called},
        format=known,
        grammar=_grammar(builder, known, called, mode, parallel=parallel, answer=answer),
        markers=frozenset(ids[text] for text in (known.markers if known else ()) if text in ids),
        forced=mode != "auto",
    )


def _without_calls(builder: RequestBuilder, answer: Grammar | None) -> ToolUse:
    """Return how an answer without calls is read: by the format of calls if that marks answers, too."""
    template = builder.text.chat_template
    if answer is not None or template is None or (known := _known_format(builder, template.source)) is None:
        return ToolUse(grammar=answer)
    if not known.marks_answers:
        return ToolUse()
    ids = builder.text.tokenizer.special_tokens.ids
    return ToolUse(format=known, markers=frozenset(ids[text] for text in known.markers if text in ids))


def _functions(tools: Sequence[Tool]) -> dict[str, Tool]:
    functions = {tool.function.name: tool for tool in tools}
    if len(functions) < len(tools):
        raise InvalidRequest("`tools` has two functions of one name; names must differ.", param="tools")
    for place, tool in enumerate(tools):
        if ((tool.function.parameters or {}).get("type") or "object") != "object":
            raise InvalidRequest(
                f"`tools.{place}.function.parameters` must be a JSON schema of the type object; got the type "
                f"{short_repr((tool.function.parameters or {})['type'])}.",
                param="tools",
            )
    return functions


def _chosen(choice: ToolChoice | None, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the mode (none, auto, required or named) and the tools that may be called."""
    match choice:
        case fields.NamedTool():
            mode, wanted = "named", [choice.function.name]
        case fields.AllowedToolChoice():
            allowed = choice.allowed_tools
            mode, wanted = allowed.mode, list(dict.fromkeys(tool.function.name for tool in allowed.tools))
        case _:
            return choice or "auto", list(names)
    if unknown := [name for name in wanted if name not in names]:
        raise InvalidRequest(
            f"`tool_choice` names {short_repr(unknown[0])}, which is none of `tools`: {short_repr(', '.join(names))}.",
            param="tool_choice",
        )
    return mode, wanted


def _shown(tool: Tool) -> Mapping[str, Any]:
    """Return a tool as models are trained to see it: without OpenAI's `strict`, always with parameters."""
    function = tool.function
    described = {} if function.description is None else {"description": function.description}
    return {"type": "function", "function": {"name": function.name, **described, "parameters": _schema(tool)}}


def _schema(tool: Tool) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's arguments, always an object."""
    schema = {key: value for key, value in (tool.function.parameters or {}).items() if value is not None}
    return {"type": "object", **schema} if schema else {"type": "object", "properties": {}}


def _format(builder: RequestBuilder, template: str) -> ToolFormat | None:
    """Return the tool call format, or None if the server's flags turn parsing off. Raises InvalidRequest."""
    known = _known_format(builder, template)
    if known is None and builder.config.tool_call_parser != "off":
        raise InvalidRequest(
            "The chat template tells of no format of tool calls that is known here. Start the server with "
            f"`--tool-call-parser` ({', '.join(formats.FORMATS)}, or off to leave calls in the text).",
            param="tools",
            code="unsupported_parameter",
        )
    return known


def _known_format(builder: RequestBuilder, template: str) -> ToolFormat | None:
    """Return the tool call format that the flag names, or the template tells of; None: none, or parsing is off."""
    match builder.config.tool_call_parser:
        case "off":
            return None
        case "auto":
            return formats.recognised(template)
        case name:
            return formats.named(name, template)


def _grammar(
    builder: RequestBuilder,
    known: ToolFormat | None,
    tools: Sequence[Tool],
    mode: str,
    *,
    parallel: bool,
    answer: Grammar | None,
) -> Grammar | None:
    """Return the grammar of the output, or None if it is not constrained. Raises InvalidRequest."""
    special = builder.text.tokenizer.special_tokens
    strict = any(tool.function.strict for tool in tools)
    if mode == "auto" and parallel and not strict and (answer is None or known is None):
        return answer
    param = "tool_choice" if mode != "auto" else "tools" if strict else "parallel_tool_calls" if not parallel else ""
    if known is not None and known.layout is not None and known.layout.alone and mode == "auto":
        if answer is None and not strict:
            return None  # an answer has one call at most
        known = replace(known, layout=None)
    if known is not None and known.layout is not None:
        first = next(special.parts(known.layout.trigger), ("", None))[1]
        if first is not None and first in builder.facts.eos_ids:  # the text would end where a call begins
            known = replace(known, layout=None)
    if known is None or known.layout is None:
        what = "`--tool-call-parser off`" if known is None else f"the format of tool calls {known.name}"
        raise InvalidRequest(
            f"With {what} the model cannot be made to call tools in one way or another. Leave out `tool_choice` (or "
            'send "auto"), `strict`, `parallel_tool_calls` and `response_format` beside `tools`.',
            param=param or "response_format",
            code="unsupported_parameter",
        )
    schemas = {
        tool.function.name: _enforced(tool, known.layout)
        if mode != "auto" or tool.function.strict or known.layout.notation is not None
        else {"type": "object"}
        for tool in tools
    }
    if mode != "auto":
        if answer is not None:
            raise InvalidRequest(
                '`tool_choice` asks for a call, and `response_format` for an answer. Send `tool_choice` "auto" or '
                '"none", or leave `response_format` out.',
                param="response_format",
            )
        many = parallel and mode != "named"
        written = tool_calls.calls_only(known.layout, schemas, special, many=many)
        return Grammar("lark", written, places_of_calls(known.layout, schemas, special))
    answer_schema = _schema_of(answer, known)
    written = tool_calls.calls_or(answer_schema, known.layout, schemas, special, many=parallel)
    places = places_of_calls_or(known.layout, schemas, special, has_answer=answer_schema is not None)
    return Grammar("lark", written, places)


def _enforced(tool: Tool, layout: ToolCallLayout) -> Mapping[str, Any]:
    """Return what of a tool's schema is enforced in this layout. Raises InvalidRequest."""
    strict = bool(tool.function.strict)
    given = _schema(tool) if tool.function.parameters is not None else NO_ARGUMENTS
    schema = enforceable(given, "tools", strict=strict)
    if (writer := layout.notation or layout.parameter) is not None:
        name_what_is_left_open(writer.left_open(schema), "tools", strict=strict)
    return schema


def _schema_of(answer: Grammar | None, known: ToolFormat) -> Mapping[str, Any] | None:
    """Return the JSON schema of an answer without a call, or None."""
    if answer is None:
        return None
    if known.layout is None or not known.layout.trigger or answer.kind not in ("json_schema", "json_object"):
        raise InvalidRequest(
            f"A structured answer beside tools must be JSON, and calls must begin with a marker; got {answer.kind} and "
            f'the format of tool calls {known.name}. Send `tool_choice` "none" or "required".',
            param="response_format",
            code="unsupported_parameter",
        )
    schema: Mapping[str, Any] = {"type": "object"} if answer.kind == "json_object" else json.loads(answer.source)
    return schema


def tools_of(builder: RequestBuilder, body: ChatBody) -> ToolUse:
    """Return the request's tool use. Raises InvalidRequest."""
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, old) not in (None, [], "none", "auto"):
            raise InvalidRequest(
                f"`{old}` is OpenAI's old name and not supported; send `{new}`, with "
                '{"type": "function", "function": ...} around each function.',
                param=old,
                code="unsupported_parameter",
            )
    if body.web_search_options is not None:
        leave_out_hosted("web_search", "web_search_options", refuse=builder.config.is_strict)
    parallel = body.parallel_tool_calls is not False
    return tool_use(builder, body.tools or (), body.tool_choice, parallel=parallel, answer=body.wanted_grammar())


def conversation_text(builder: RequestBuilder, body: ChatBody) -> RenderedPrompt:
    """Return the request's messages and tools as rendered by the chat template. Raises InvalidRequest."""
    return prompt_text(builder, body.messages, TemplateOptions.of(body, tools_of(builder, body).shown))


def plan(builder: RequestBuilder, body: ChatBody, tools: ToolUse | None = None) -> GenerationPlan:
    """Build the plan. `tools`: the body's tool use, if already computed. Raises InvalidRequest."""
    adapter = builder.adapter(body.model)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("`top_logprobs` goes with `logprobs: true` only.", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest(
            f"`max_tokens` is {body.max_tokens} and `max_completion_tokens` {body.max_completion_tokens}; give one.",
            param="max_completion_tokens",
        )
    limit_param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(body, limit_param)
    if max_tokens == 0:
        raise InvalidRequest(f"`{limit_param}` must be at least 1; got 0.", param=limit_param)
    tools = tools_of(builder, body) if tools is None else tools
    text = prompt_text(builder, body.messages, TemplateOptions.of(body, tools.shown))
    continued = body.messages[-1] if body.continue_final_message else None
    thinking = thinking_of(builder, template_for(builder, tools.shown), text.text, continued)
    special = bool(body.add_special_tokens)  # the template already writes special tokens
    prompt = builder.prompt(text, PromptOptions("messages", special, body.truncate_prompt_tokens, max_tokens or 1))
    wanted = common_parameters(
        body,
        max_tokens=max_tokens,
        limit_param=limit_param,
        num_choices=body.n or 1,
        num_shown=body.n or 1,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        num_prompt_logprobs=body.prompt_logprobs,
        adapter=adapter,
        end_ids=builder.text.turn_end_ids,
        grammar=tools.grammar,
        shown_ids=tools.markers,
    )
    wanted = behind_thinking(builder, wanted, thinking, body.thinking_token_budget)
    return builder.plan([prompt], wanted, prefix="chatcmpl-")


@dataclass
class ChatAnswer(OpenAIAnswer):
    """The response to a chat completion."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"
    body: ChatBody
    tools: ToolUse
    _readers: dict[int, ToolCallReader | None] = field(default_factory=dict)  # by index of streamed choice

    def choice(self, written: CompletedChoice, prompt: CompletedChoice) -> dict[str, Any]:
        progress = written.progress
        message: dict[str, Any] = {"role": "assistant", "content": written.text, "refusal": None}
        body: dict[str, Any] = {"message": message, "logprobs": self._logprobs(written.tokens)}
        if (reader := self.tools.reader(progress.choice.rules.thinking)) is not None:
            parsed = reader.push(written.text, ended=True)
            message["content"] = parsed.content
            if parsed.calls or self.tools.forced or parsed.reasoning:
                message["content"] = parsed.content or None
            message |= _reasoning(parsed)
            if parsed.calls:
                message["tool_calls"] = [self._call(progress.choice, piece) for piece in parsed.calls]
                body |= self._reason(reader, progress.finish)
        return body

    def piece(self, progress: ChoiceState, delta: TextDelta, *, first: bool) -> dict[str, Any]:
        change: dict[str, Any] = {"role": "assistant"} if first else {}
        body: dict[str, Any] = {"delta": change, "logprobs": self._logprobs(delta.tokens)}
        if first:
            self._readers[progress.choice.index] = self.tools.reader(progress.choice.rules.thinking)
        reader = self._readers[progress.choice.index]
        if reader is None:
            change |= {"content": delta.text} if delta.text or first else {}
            return body
        parsed = reader.push(delta.text, ended=delta.finish is not None)
        if parsed.content or first:
            change["content"] = parsed.content or None
        change |= _reasoning(parsed)
        if parsed.calls:
            change["tool_calls"] = [
                {"index": piece.index, **self._call(progress.choice, piece)} for piece in parsed.calls
            ]
        return body | self._reason(reader, delta.finish)

    def says(self, piece: dict[str, Any]) -> bool:
        return bool(piece["delta"])

    def _call(self, choice: PlannedChoice, piece: CallPiece) -> dict[str, Any]:
        """Return a tool call piece: a new call, or more arguments of one."""
        if piece.name is None:
            return {"function": {"arguments": piece.arguments}}
        return {
            "id": self.tools.call_id(self.plan.seed, choice, piece.index),
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }

    def _reason(self, reader: ToolCallReader, finish: FinishReason | None) -> dict[str, Any]:
        ended = finish in (FinishReason.EOS, FinishReason.STOP)
        called = ended and reader.output.num_calls and reader.output.is_whole  # an incomplete call must not be executed
        return {"finish_reason": "tool_calls"} if called else {}

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        return chat_logprobs(self.tokenizer, tokens) if self.body.logprobs else None


def _reasoning(parsed: ParsedText) -> dict[str, str]:
    """Return reasoning by both of its names in other servers."""
    text = parsed.reasoning
    return {"reasoning_content": text, "reasoning": text} if text else {}


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    answers = describe_responses(ChatCompletion, errors=OpenAIError, event=ChatEvent, done=True, statuses=STATUSES)

    @router.post("/v1/chat/completions", openapi_extra=json_body(ChatBody, CHAT_NEUTRAL), responses=answers)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body, size = await service.read(request, ChatBody, CHAT_NEUTRAL)
        builder = service.builder(key_of(request))
        tools = await service.text_work(request, size, tools_of, builder, body)
        await service.checked(tools.grammar, "tools" if tools.shown else body.grammar_field)
        made = await service.text_work(request, size, plan, builder, body, tools)
        reply = ChatAnswer(service.text.tokenizer, body, made, service.name_of(made, body.model), tools)
        return await service.respond(request, reply, stream=bool(body.stream))

    return router
