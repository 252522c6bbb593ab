"""`/v1/responses`: OpenAI's Responses API, for text and tools; stored if the server has a store."""

import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fastapi import APIRouter, Request
from starlette.responses import Response

from space_router.api.generation import Generation, statistics, usage
from space_router.api.openai.answers import InputTokens, ResponseEvent, ResponseObject
from space_router.api.openai.chat import TemplateOptions, ToolUse, prompt_text, template_for, tool_use
from space_router.api.openai.fields import Message
from space_router.api.openai.response_fields import (
    RESPONSE_NEUTRAL,
    InputTokensBody,
    ResponseBody,
    ResponseConversation,
)
from space_router.api.openai.response_tools import CustomInput, ResponseTools, shown_tools
from space_router.api.openai.stored_responses import input_items, no_such_response
from space_router.api.openai.stream import chat_logprobs
from space_router.api.openai.thinking import behind_thinking, thinking_of
from space_router.api.request_builder import GenerationPlan, Parameters, Prompt, PromptOptions, RequestBuilder
from space_router.api.schema import STATUSES, OpenAIError, describe_responses, json_body
from space_router.api.service import Service
from space_router.errors import InvalidRequest, TooManyTokens
from space_router.http_server.body import read_object, short_repr, validate
from space_router.http_server.responses import as_api_error, event_json, json_response, key_of
from space_router.http_server.warnings import warn
from space_router.response_store import StoredResponse
from space_router.text.text_stream import FinishReason, TextToken
from space_router.text.tokenizer import Tokenizer
from space_router.text.tool_calls import CallPiece, Thought

Event: TypeAlias = dict[str, Any]  # An event without its sequence number


@dataclass
class OutputItems:
    """The items so far; the last one may be open. Each method yields the events for its changes."""

    plan: GenerationPlan
    tools: ToolUse
    known: ResponseTools
    items: list[dict[str, Any]] = field(default_factory=list)
    _open: bool = False
    _custom: CustomInput | None = None  # of the open call, if it is one of a custom tool

    def text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Add text to the open message, or begin one."""
        if not (self._open and self.items[-1]["type"] == "message"):
            yield from self.close()
            yield from self._add("message", "msg", role="assistant", content=[])
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._event("response.content_part.added", content_index=0, part=part)
            self.items[-1]["content"].append(part)
        part = self.items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def thought(self, text: str) -> Iterator[Event]:
        """Add text to the open reasoning, or begin one."""
        if not (self._open and self.items[-1]["type"] == "reasoning"):
            yield from self.close()
            yield from self._add("reasoning", "rs", summary=[], content=[], encrypted_content=None)
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            yield self._event("response.content_part.added", content_index=0, part={**part})
            self.items[-1]["content"].append(part)
        self.items[-1]["content"][0]["text"] += text
        yield self._event("response.reasoning_text.delta", content_index=0, delta=text)

    def call(self, piece: CallPiece) -> Iterator[Event]:
        """Add a piece of a call."""
        if piece.name is not None:
            yield from self.close()
            call_id = self.tools.call_id(self.plan.seed, self.plan.choices[0], piece.index)
            tool = self.known.known[piece.name]
            named = {"name": tool.name} | ({} if tool.namespace is None else {"namespace": tool.namespace})
            self._custom = CustomInput() if tool.is_custom else None
            if tool.is_custom:
                yield from self._add("custom_tool_call", "ctc", **named, call_id=call_id, input="")
            else:
                yield from self._add("function_call", "fc", **named, call_id=call_id, arguments="")
        if self._custom is not None:
            yield from self._input(self._custom.push(piece.arguments))
        elif piece.arguments:
            self.items[-1]["arguments"] += piece.arguments
            yield self._event("response.function_call_arguments.delta", delta=piece.arguments)

    def _input(self, text: str) -> Iterator[Event]:
        """Add to the text for a custom tool."""
        if text:
            self.items[-1]["input"] += text
            yield self._event("response.custom_tool_call_input.delta", delta=text)

    def part(self, part: str | Thought | CallPiece, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Add a piece of the output."""
        match part:
            case str():
                return self.text(part, logprobs)
            case Thought():
                return self.thought(part.text)
            case _:
                return self.call(part)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Close the last item, if it is open."""
        if not self._open:
            return
        item = self.items[-1]
        if self._custom is not None and item["type"] == "custom_tool_call":
            yield from self._input(self._custom.finish())
        self._open = False
        if item["type"] == "message":
            part = item["content"][0]
            done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **done)
            yield self._event("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "custom_tool_call":
            yield self._event("response.custom_tool_call_input.done", input=item["input"])
        elif item["type"] == "reasoning":
            part = item["content"][0]
            yield self._event("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._event("response.content_part.done", content_index=0, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **done)
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _add(self, kind: str, prefix: str, **values: Any) -> Iterator[Event]:
        digest = hashlib.blake2b(f"{self.plan.request_id}/{len(self.items)}".encode(), digest_size=16).hexdigest()
        self.items.append({"type": kind, "id": f"{prefix}_{digest}", "status": "in_progress", **values})
        self._open = True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": {**self.items[-1]}}

    def _event(self, kind: str, **values: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **values}


_PARAMS = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
}
"""Names of chat completion fields in this API."""


@contextmanager
def _own_names() -> Iterator[None]:
    """Name in refusals the fields of this API."""
    try:
        yield
    except InvalidRequest as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise


def metadata_of(values: Mapping[str, Any]) -> Mapping[str, str]:
    """Return a body's `metadata`: returned unchanged with the response, without any other effect."""
    metadata = values.get("metadata") or {}
    fits = isinstance(metadata, dict) and len(metadata) <= 16
    if not fits or not all(
        isinstance(value, str) and len(key) <= 64 and len(value) <= 512 for key, value in metadata.items()
    ):
        raise InvalidRequest(
            "`metadata` must have at most 16 texts of at most 512 characters, by names of at most 64; got "
            f"{short_repr(metadata)}.",
            param="metadata",
        )
    return dict(metadata)


def known_tools(builder: RequestBuilder, body: ResponseConversation) -> ResponseTools:
    """Return the request's tools. Raises InvalidRequest for hosted ones that must not be left out."""
    return ResponseTools.of(body.tools or (), refuse_hosted=builder.config.is_strict)


def tools_of(builder: RequestBuilder, body: ResponseConversation, known: ResponseTools | None = None) -> ToolUse:
    """Return the request's tool use and the grammar of its output. Raises InvalidRequest."""
    known = known_tools(builder, body) if known is None else known
    form = None if body.text is None or body.text.format is None else body.text.format.chat_format().grammar()
    parallel = body.parallel_tool_calls is not False
    return tool_use(builder, known.chat, known.choice(body.tool_choice), parallel=parallel, answer=form)


def _prompt(builder: RequestBuilder, body: ResponseConversation, tools: ToolUse, max_tokens: int | None) -> Prompt:
    """Return the prompt. With `truncation: auto` the oldest turns are left out where all do not fit the window."""
    messages = body.messages()
    options = TemplateOptions(
        tools.shown,
        variables=body.chat_template_kwargs or {},
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        enable_thinking=body.enable_thinking,
    )

    def prompt(some: Sequence[Message]) -> Prompt:
        return builder.prompt(prompt_text(builder, some, options), PromptOptions("input"))

    if body.truncation != "auto":
        return prompt(messages)
    num_first = 1 if messages and messages[0].role == "system" else 0
    turns = [place for place in range(num_first, len(messages)) if messages[place].role == "user"]
    starts = [num_first, *(place for place in turns if place > num_first)]

    def fitting(start: int) -> Prompt | None:
        try:
            made = prompt([*messages[:num_first], *messages[start:]])
        except TooManyTokens:
            return None
        return made if len(made.ids) + (max_tokens or 1) <= builder.longest else None

    low, high = 0, len(starts) - 1  # of the places to begin at, the first one that fits
    if (whole := fitting(starts[0])) is not None:
        return whole
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fitting(starts[middle]) is not None else (middle + 1, high)
    warn(f"`truncation` left out the first {starts[low] - num_first} of {len(messages)} messages.")
    return prompt([*messages[:num_first], *messages[starts[low] :]])


def plan(builder: RequestBuilder, body: ResponseBody, tools: ToolUse) -> GenerationPlan:
    """Build the plan. Raises InvalidRequest."""
    if body.wants_logprobs and tools.format is not None:
        raise InvalidRequest(
            "Log-probabilities of the text cannot be separated from those of calls; leave `include` or `tools` out.",
            param="include",
        )
    if body.top_logprobs and not body.wants_logprobs:
        raise InvalidRequest(
            '`top_logprobs` goes with `include: ["message.output_text.logprobs"]` only.', param="top_logprobs"
        )
    prompt = _prompt(builder, body, tools, body.max_output_tokens)
    thinking = thinking_of(builder, template_for(builder, tools.shown), prompt.text, None)
    same = Parameters.__dataclass_fields__.keys() & ResponseBody.model_fields.keys()
    wanted = Parameters(
        **{name: getattr(body, name) for name in same},
        max_tokens=body.max_output_tokens,
        limit_param="max_output_tokens",
        num_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
        adapter=builder.adapter(body.model),
        end_ids=builder.text.turn_end_ids,
        grammar=tools.grammar,
        shown_ids=tools.markers,
    )
    wanted = behind_thinking(builder, wanted, thinking, body.thinking_token_budget)
    return builder.plan([prompt], wanted, prefix="resp_")


def count(builder: RequestBuilder, body: InputTokensBody) -> int:
    """Return the number of the prompt's tokens. Raises InvalidRequest."""
    builder.adapter(body.model)
    return len(_prompt(builder, body, tools_of(builder, body), None).ids)


@dataclass
class ResponseAnswer:
    """One response, whole or as events."""

    tokenizer: Tokenizer
    body: ResponseBody
    metadata: Mapping[str, str]
    plan: GenerationPlan
    tools: ToolUse
    known: ResponseTools
    model: str
    keep: Callable[[dict[str, Any]], Awaitable[bool]] | None = None  # stores the response; False: it could not
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, running: Generation) -> dict[str, Any]:
        response: dict[str, Any] = {}
        async for event in self._events(running):
            response = event.get("response", response)
        return response

    async def events(self, running: Generation) -> AsyncGenerator[bytes]:
        """Yield typed events, those of one step as one chunk. A failure sends `error` and `response.failed`."""
        number = 0

        def written(event: Event) -> bytes:
            nonlocal number
            data = event_json({**event, "sequence_number": number})
            number += 1
            return f"event: {event['type']}\ndata: ".encode() + data + b"\n\n"

        try:
            async with aclosing(self._events(running)) as events:
                async for event in events:
                    yield written(event)
        except Exception as error:
            known = as_api_error(error)
            details = {"code": known.code or known.kind, "message": known.message}
            failed = self._response("failed", []) | {"error": {**details, "code": "server_error"}}
            yield written({"type": "error", **details, "param": known.param}) + written(
                {"type": "response.failed", "response": failed}
            )

    async def _events(self, running: Generation) -> AsyncGenerator[Event]:
        """Yield the events; the last one has the whole response."""
        output = OutputItems(self.plan, self.tools, self.known)
        reader = self.tools.reader(self.plan.choices[0].rules.thinking)
        finish: FinishReason | None = None
        unscored: list[TextToken] = []  # tokens with log-probabilities still to be sent
        yield {"type": "response.created", "response": self._response("in_progress", [])}
        yield {"type": "response.in_progress", "response": self._response("in_progress", [])}
        parts: tuple[str | Thought | CallPiece, ...]
        deltas = (delta async for step in running.steps() for _, delta in step)  # of the only choice
        async for delta in deltas:
            finish = delta.finish
            unscored += delta.tokens if self.body.wants_logprobs else ()
            parts = (delta.text,) if delta.text else ()
            if reader is not None:
                parts = reader.push(delta.text, ended=finish is not None).parts
            for part in parts:
                for event in output.part(part, self._logprobs(running, unscored) if isinstance(part, str) else []):
                    yield event
        logprobs = self._logprobs(running, unscored)
        if not output.items or logprobs:
            for event in output.text("", logprobs):
                yield event
        whole = finish is not FinishReason.LENGTH and (reader is None or reader.output.is_whole)
        status = "completed" if whole else "incomplete"
        for event in output.close(status):
            yield event
        response = self._response(status, output.items)
        figures = usage(self.plan, running.choices)
        response["usage"] = {
            "input_tokens": figures["prompt_tokens"],
            "input_tokens_details": {**figures["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": figures["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": figures["completion_tokens_details"]["reasoning_tokens"],
            },
            "total_tokens": figures["total_tokens"],
        }
        response["spaceserve"] = statistics(self.plan, running.choices)
        if finish is FinishReason.LENGTH:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if whole:
            response["completed_at"] = int(time.time())
        if self.keep is not None:
            response["store"] = await self.keep(response)
        yield {"type": f"response.{status}", "response": response}

    def _logprobs(self, running: Generation, tokens: list[TextToken]) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens that are no reasoning, and clear the list."""
        is_reasoning = running.choices[0].text_stream.is_reasoning
        entries: list[dict[str, Any]]
        entries = chat_logprobs(self.tokenizer, [token for token in tokens if not is_reasoning(token)])["content"]
        tokens.clear()
        return entries

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        sampling, body = self.plan.choices[0].request.sampling, self.body
        form = None if body.text is None or body.text.format is None else body.text.format
        choice = body.tool_choice or "auto"
        return {
            "id": self.plan.request_id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self.model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": self.keep is not None,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": list(shown_tools(self.known.kept)),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "metadata": self.metadata,
        }


async def _conversation(service: Service, values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the body with the conversation that it continues in its `input`. Raises InvalidRequest, NotFound."""
    previous, given = values.get("previous_response_id"), values.get("input")
    if previous is None:
        return dict(values)
    if service.responses is None:
        raise InvalidRequest(
            "`previous_response_id` needs stored responses, and this server stores none. Send the whole conversation "
            "in `input`, or start the server with `--response-store memory`.",
            param="previous_response_id",
            code="unsupported_parameter",
        )
    if not isinstance(previous, str):
        raise InvalidRequest(
            f"`previous_response_id` must be a string; got {short_repr(previous)}.", param="previous_response_id"
        )
    stored = await service.responses.get(previous, owner)
    if stored is None:
        raise no_such_response(previous, "previous_response_id")
    if not isinstance(given, str | list):
        return dict(values)
    return {**values, "input": [*stored.items, *input_items(given)]}


def _keeper(
    service: Service, values: Mapping[str, Any], owner: str
) -> Callable[[dict[str, Any]], Awaitable[bool]] | None:
    """Return what stores the response, or None if it is not to be stored. `values`: the body with all its input."""
    store, wanted = service.responses, values.get("store")
    if not isinstance(wanted, bool | None):
        raise InvalidRequest(f"`store` must be a boolean; got {short_repr(wanted)}.", param="store")
    if store is None or wanted is False:
        return None

    async def keep(response: dict[str, Any]) -> bool:
        items = [*input_items(values["input"]), *response["output"]]
        return await store.put(response["id"], owner, StoredResponse(response, items))

    return keep


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    answers = describe_responses(ResponseObject, errors=OpenAIError, event=ResponseEvent, statuses=STATUSES)

    @router.post("/v1/responses", openapi_extra=json_body(ResponseBody, RESPONSE_NEUTRAL), responses=answers)
    async def responses(request: Request) -> Response:
        """Answer an input, in OpenAI's newer API."""
        received = await read_object(request, service.config)
        key = key_of(request)
        metadata = metadata_of(received.values)
        values = await _conversation(service, received.values, key)
        keep = _keeper(service, values, key)
        body = validate(ResponseBody, values, RESPONSE_NEUTRAL)
        builder = service.builder(key)
        with _own_names():
            known = known_tools(builder, body)
            tools = await service.text_work(request, received.size, tools_of, builder, body, known)
            await service.checked(tools.grammar, "tools" if tools.shown else "text")
            made = await service.text_work(request, received.size, plan, builder, body, tools)
        name = service.name_of(made, body.model)
        reply = ResponseAnswer(service.text.tokenizer, body, metadata, made, tools, known, name, keep)
        return await service.respond(request, reply, stream=bool(body.stream))

    counted = describe_responses(InputTokens, errors=OpenAIError, statuses=(*STATUSES, 404))

    @router.post(
        "/v1/responses/input_tokens", openapi_extra=json_body(InputTokensBody, RESPONSE_NEUTRAL), responses=counted
    )
    async def input_tokens(request: Request) -> Response:
        """Count the tokens that input, instructions and tools have as a prompt."""
        received = await read_object(request, service.config)
        key = key_of(request)
        service.rate_limits[key].charge_bytes(received.size)
        body = validate(InputTokensBody, await _conversation(service, received.values, key), RESPONSE_NEUTRAL)
        with _own_names():
            number = await service.text_work(request, received.size, count, service.builder(key), body)
        return json_response({"object": "response.input_tokens", "input_tokens": number})

    return router
