"""`POST /v1/responses`: OpenAI's Responses API, for text and function tools. Responses are not stored."""

import hashlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fastapi import APIRouter, Request
from starlette.responses import Response

from space_router.api.generation import Generation, statistics, usage
from space_router.api.openai.answers import ResponseEvent, ResponseObject
from space_router.api.openai.chat import TemplateOptions, ToolUse, prompt_text, tool_use
from space_router.api.openai.fields import RESPONSE_NEUTRAL, ResponseBody
from space_router.api.openai.stream import chat_logprobs
from space_router.api.request_builder import GenerationPlan, Parameters, PromptOptions, RequestBuilder
from space_router.api.schema import STATUSES, OpenAIError, describe_responses, json_body
from space_router.api.service import Service
from space_router.errors import InvalidRequest
from space_router.http_server.body import read_object, short_repr, validate
from space_router.http_server.responses import as_api_error, event_json, key_of
from space_router.text.text_stream import FinishReason
from space_router.text.tokenizer import Tokenizer
from space_router.text.tool_calls import CallPiece

Event: TypeAlias = dict[str, Any]  # An event without its sequence number


@dataclass
class OutputItems:
    """The items so far; the last one may be open. Each method yields the events for its changes."""

    plan: GenerationPlan
    tools: ToolUse
    items: list[dict[str, Any]] = field(default_factory=list)
    _open: bool = False

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

    def call(self, piece: CallPiece) -> Iterator[Event]:
        """Add a piece of a call."""
        if piece.name is not None:
            yield from self.close()
            call_id = self.tools.call_id(self.plan.seed, self.plan.choices[0], piece.index)
            yield from self._add("function_call", "fc", name=piece.name, call_id=call_id, arguments="")
        if piece.arguments:
            self.items[-1]["arguments"] += piece.arguments
            yield self._event("response.function_call_arguments.delta", delta=piece.arguments)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Close the last item, if it is open."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        if item["type"] == "message":
            part = item["content"][0]
            done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **done)
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


def tools_of(builder: RequestBuilder, body: ResponseBody) -> ToolUse:
    """Return the request's tool use and the grammar of its output. Raises InvalidRequest."""
    form = None if body.text is None or body.text.format is None else body.text.format.chat_format().grammar()
    parallel = body.parallel_tool_calls is not False
    return tool_use(builder, body.chat_tools, body.chat_choice, parallel=parallel, answer=form)


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
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        variables["reasoning_effort"] = body.reasoning.effort
    text = prompt_text(builder, body.messages(), TemplateOptions(tools.shown, variables=variables))
    prompt = builder.prompt(text, PromptOptions("input"))
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
    return builder.plan([prompt], wanted, prefix="resp")


@dataclass
class ResponseAnswer:
    """One response, whole or as events."""

    tokenizer: Tokenizer
    body: ResponseBody
    metadata: Mapping[str, str]
    plan: GenerationPlan
    tools: ToolUse
    model: str
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
        output = OutputItems(self.plan, self.tools)
        reader = self.tools.reader()
        finish: FinishReason | None = None
        logprobs: list[dict[str, Any]] = []
        yield {"type": "response.created", "response": self._response("in_progress", [])}
        yield {"type": "response.in_progress", "response": self._response("in_progress", [])}
        deltas = (delta async for step in running.steps() for _, delta in step)  # of the only choice
        async for delta in deltas:
            finish = delta.finish
            if self.body.wants_logprobs:
                logprobs += chat_logprobs(self.tokenizer, delta.tokens)["content"]
            parts = (delta.text,) if reader is None else reader.push(delta.text, ended=finish is not None).parts
            for part in parts:
                if part:
                    for event in output.text(part, logprobs) if isinstance(part, str) else output.call(part):
                        yield event
                if part and isinstance(part, str):
                    logprobs = []
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
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": figures["total_tokens"],
        }
        response["spaceserve"] = statistics(self.plan, running.choices)
        if finish is FinishReason.LENGTH:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if whole:
            response["completed_at"] = int(time.time())
        yield {"type": f"response.{status}", "response": response}

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
            "max_tool_calls": None,
            "model": self.model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{"parameters": None, "strict": None, **tool.model_dump()} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": self.metadata,
        }


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])

    answers = describe_responses(ResponseObject, errors=OpenAIError, event=ResponseEvent, statuses=STATUSES)

    @router.post("/v1/responses", openapi_extra=json_body(ResponseBody, RESPONSE_NEUTRAL), responses=answers)
    async def responses(request: Request) -> Response:
        """Answer an input, in OpenAI's newer API."""
        received = await read_object(request, service.config)
        metadata = metadata_of(received.values)
        body = validate(ResponseBody, received.values, RESPONSE_NEUTRAL)
        builder = service.builder(key_of(request))
        try:
            tools = tools_of(builder, body)
            await service.checked(tools.grammar, "tools" if tools.shown else "text")
            made = await service.text_work(request, received.size, plan, builder, body, tools)
        except InvalidRequest as error:
            error.param = _PARAMS.get(error.param or "", error.param)
            raise
        reply = ResponseAnswer(service.text.tokenizer, body, metadata, made, tools, service.name_of(made, body.model))
        return await service.respond(request, reply, stream=bool(body.stream))

    return router
