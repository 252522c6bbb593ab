"""Conversion between protobuf messages and the API's plans and deltas, with the validation of HTTP requests."""

import dataclasses
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from space_proto import generate_pb2

from space_router.api.generation import ChoiceState, Generation, mean_logprob, statistics, usage
from space_router.api.openai import chat, completions
from space_router.api.openai.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, ChatBody, CompletionBody, Count20
from space_router.api.openai.stream import finite
from space_router.api.pooling.embeddings import EmbeddingBody
from space_router.api.request_builder import GenerationPlan, Prompt, RequestBuilder
from space_router.api.service import Service
from space_router.engine.request.request import TokenLogprobs
from space_router.errors import InvalidRequest, TimedOut
from space_router.http_server.body import Body, short_repr, validate
from space_router.text import written_numbers
from space_router.text.text_stream import FinishReason, TextDelta, TextToken
from space_router.text.tokenizer import Tokenizer

PROMPTS = ("prompt", "prompt_token_ids", "prompts", "messages")  # fields that give the prompt; exactly one must be set

OURS = frozenset({*PROMPTS, "return_prompt_token_ids", "continuous_usage_stats"})
"""Fields that have no counterpart of the same name and type in the JSON body."""

_MODES = {
    generate_pb2.TOOL_MODE_AUTO: "auto",
    generate_pb2.TOOL_MODE_NONE: "none",
    generate_pb2.TOOL_MODE_REQUIRED: "required",
}


def values_of(request: generate_pb2.GenerateRequest) -> dict[str, Any]:
    """Return the JSON body's fields. Raises InvalidRequest for invalid JSON, or not exactly one kind of prompt."""
    values: dict[str, Any] = {}
    for field, value in request.ListFields():
        if field.name not in OURS:
            values[field.name] = list(value) if field.is_repeated else value
    if request.logit_bias:
        values["logit_bias"] = {str(id_): bias for id_, bias in request.logit_bias.items()}
    if request.HasField("prediction"):
        values["prediction"] = {"type": "content", "content": request.prediction}
    if request.HasField("structured_outputs"):
        wanted = request.structured_outputs
        kind = wanted.WhichOneof("kind")
        value = list(wanted.choice.texts) if kind == "choice" else getattr(wanted, kind or "", None)
        values["structured_outputs"] = {} if kind is None else {kind: value}
    if request.tools:
        values["tools"] = [_tool(tool, f"tools.{place}") for place, tool in enumerate(request.tools)]
    if request.HasField("tool_choice"):
        values["tool_choice"] = _choice(request.tool_choice)
    if request.HasField("chat_template_kwargs"):
        values["chat_template_kwargs"] = _object(request.chat_template_kwargs, "chat_template_kwargs")
    return values | _prompt(request)


def embedding_body(request: generate_pb2.EmbedRequest) -> EmbeddingBody:
    """Return a call for vectors as HTTP's body. Raises InvalidRequest."""
    refuse_unknown(request)
    values: dict[str, Any] = {field.name: value for field, value in request.ListFields()}
    texts = [one.text if one.HasField("text") else list(one.ids.ids) for one in request.input]
    return validate(EmbeddingBody, values | {"input": texts})


def conversation(messages: Iterable[generate_pb2.ChatMessage]) -> list[dict[str, Any]]:
    found = []
    for message in messages:
        values = {field.name: value for field, value in message.ListFields()}
        if message.tool_calls:
            calls = [(call, {"name": call.name, "arguments": call.arguments}) for call in message.tool_calls]
            values["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function, "index": call.index}
                for call, function in calls
            ]
        found.append(values)
    return found


def _prompt(request: generate_pb2.GenerateRequest) -> dict[str, Any]:
    """Return `prompt` or `messages` of the body. Raises InvalidRequest."""
    given = [field.name for field, _ in request.ListFields() if field.name in PROMPTS]
    if len(given) != 1:
        names = "`prompt`, `prompt_token_ids`, `prompts` and `messages`"
        got = " and ".join(f"`{name}`" for name in given) or "none"
        raise InvalidRequest(f"Give exactly one of {names}; got {got}.", param="prompt", code="missing_parameter")
    match given[0]:
        case "messages":
            return {"messages": conversation(request.messages)}
        case "prompts":
            return {"prompt": [one.text if one.HasField("text") else list(one.ids.ids) for one in request.prompts]}
        case "prompt_token_ids":
            return {"prompt": list(request.prompt_token_ids)}
        case _:
            return {"prompt": request.prompt}


def _tool(tool: generate_pb2.Tool, place: str) -> dict[str, Any]:
    function: dict[str, Any] = {field.name: value for field, value in tool.ListFields()}
    if tool.HasField("parameters"):
        function["parameters"] = _object(tool.parameters, f"{place}.parameters")
    return {"type": "function", "function": function}


def _choice(choice: generate_pb2.ToolChoice) -> str | dict[str, Any]:
    mode = _MODES.get(choice.mode)
    if mode is None:
        names = ", ".join(generate_pb2.ToolMode.Name(known) for known in _MODES)
        raise InvalidRequest(
            f"`tool_choice.mode` must be one of {names}; got {choice.mode}.", param="tool_choice", code="invalid_value"
        )
    if not choice.names:
        return mode
    named = [{"type": "function", "function": {"name": name}} for name in choice.names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def _object(text: str, place: str) -> dict[str, Any]:
    """Parse a field that is a JSON object as text. Raises InvalidRequest."""
    try:
        value = written_numbers.loads(text)
    except orjson.JSONDecodeError as error:
        reason = f"is not valid JSON: {error.msg[:100]} (at character {error.pos})"
    else:
        if isinstance(value, dict):
            return value
        reason = f"must be a JSON object as text; got {short_repr(value)}"
    raise InvalidRequest(f"`{place}` {reason}.", param=place.partition(".")[0], code="invalid_value")


MAX_TIMEOUT = 1e9  # seconds; a longer deadline counts as none


@dataclass(frozen=True)
class Asked:
    """One validated call."""

    request: generate_pb2.GenerateRequest
    plan: GenerationPlan
    answer: chat.ChatAnswer | None  # separates tool calls from text in chats; None: no chat


class Scores(Body):
    """`logprobs` as a number, also for chats."""

    logprobs: Count20 | None = None


async def read(
    service: Service, builder: RequestBuilder, request: generate_pb2.GenerateRequest, time_left: float | None
) -> Asked:
    """Validate a call. `time_left`: seconds until its deadline, None: no deadline. Raises ApiError."""
    if time_left == 0:
        raise TimedOut("The call's deadline had passed before it was read. Give it more time.")
    refuse_unknown(request)
    values, size = values_of(request), request.ByteSize()
    given = values.get("timeout", MAX_TIMEOUT)
    if time_left is not None and 0 < given <= MAX_TIMEOUT:  # others, such as NaN, are refused below
        values["timeout"] = min(time_left, given)
    if request.messages:
        num_top = validate(Scores, {"logprobs": values.pop("logprobs", None)}).logprobs
        if num_top is not None:  # two fields in a chat body
            values |= {"logprobs": True, "top_logprobs": num_top}
        talk = await service.validated(ChatBody, values, CHAT_NEUTRAL)
        tools = await service.text_pool.run(builder.key, size, chat.tools_of, builder, talk)
        await service.checked(tools.grammar, "tools" if tools.shown else talk.grammar_field)
        made = await service.text_pool.run(builder.key, size, chat.plan, builder, talk, tools)
        unscored = talk.model_copy(update={"logprobs": None})  # events have their own form of logprobs
        model = service.name_of(made, talk.model)
        return Asked(request, made, chat.ChatAnswer(service.text.tokenizer, unscored, made, model, tools))
    body = await service.validated(CompletionBody, values, COMPLETION_NEUTRAL)
    wanted = await service.text_pool.run(builder.key, size, body.wanted_grammar)
    grammar = await service.checked(wanted, body.grammar_field)
    made = await service.text_pool.run(builder.key, size, completions.plan, builder, body, grammar)
    return Asked(request, made, None)


def refuse_unknown(message: Message, place: str = "") -> None:
    """Raise InvalidRequest for an unknown field at any depth, because ignoring it would change the result."""
    if unknown := UnknownFieldSet(message):
        raise InvalidRequest(
            f"{message.DESCRIPTOR.name}{place} has a field numbered {unknown[0].field_number}, which this server does "
            "not know. Nothing is accepted and ignored: leave it out, or ask a newer server.",
            code="unknown_parameter",
        )
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for number, part in enumerate(value if field.is_repeated else [value]):
                refuse_unknown(part, f"{place}.{field.name}" + f".{number}" * field.is_repeated)


@dataclass(frozen=True)
class Shown:
    """A delta of a returned choice."""

    index: int  # of the choice in the response
    progress: ChoiceState
    delta: TextDelta
    last: bool  # no other delta of any choice follows


async def shown(running: Generation) -> AsyncGenerator[Shown]:
    """Yield every delta as it arrives; with `best_of`, those of the most probable choices once all have ended."""
    if running.plan.per_prompt > running.plan.num_shown:
        for one in await _best(running):
            yield one
        return
    num_open = len(running.choices)
    async for step in running.steps():
        for progress, delta in step:
            num_open -= delta.finish is not None
            yield Shown(progress.choice.index, progress, delta, not num_open)


async def _best(running: Generation) -> list[Shown]:
    """Return the deltas of the best choices, most probable first. The first choice of each prompt gets the prompt's
    logprobs, whichever choice computed them.
    """
    kept: list[list[TextDelta]] = [[] for _ in running.choices]
    known: list[list[TokenLogprobs]] = [[] for _ in running.plan.prompts]
    async for step in running.steps():
        for progress, delta in step:
            index = progress.choice.index
            known[index // running.plan.per_prompt] += delta.prompt_logprobs
            kept[index].append(delta._replace(prompt_logprobs=()))
    found: list[Shown] = []
    for place, prompt in enumerate(known):
        start = place * running.plan.per_prompt
        group = range(start, start + running.plan.per_prompt)
        scores = {one: mean_logprob(token for delta in kept[one] for token in delta.tokens) for one in group}
        ranked = sorted(group, key=scores.__getitem__, reverse=True)[: running.plan.num_shown]
        kept[ranked[0]][0] = kept[ranked[0]][0]._replace(prompt_logprobs=tuple(prompt))
        for rank, one in enumerate(ranked, start=place * running.plan.num_shown):
            found += [Shown(rank, running.choices[one], delta, False) for delta in kept[one]]
    return [*found[:-1], dataclasses.replace(found[-1], last=True)]


PROMPT_IDS_PER_EVENT = 256  # about half a MiB with 20 alternatives each; gRPC clients accept 4 MiB by default

_REASONS = {reason: generate_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}


class Events:
    """Builds the events of one call."""

    def __init__(self, asked: Asked, model: str, tokenizer: Tokenizer) -> None:
        self.request, self.plan, self.answer = asked.request, asked.plan, asked.answer
        self.model, self.tokenizer = model, tokenizer
        self._begun: set[int] = set()  # choices that have had an event

    def of(self, one: Shown, running: Generation) -> Iterator[generate_pb2.GenerateEvent]:
        """Yield the events of one delta: more than one if it has many prompt logprobs."""
        known = one.delta.prompt_logprobs
        while len(known) > PROMPT_IDS_PER_EVENT:
            yield self._event(one.index, known[:PROMPT_IDS_PER_EVENT])
            known = known[PROMPT_IDS_PER_EVENT:]
        event = self._event(one.index, known)
        first = one.index not in self._begun
        if first:
            self._begin(event, one.progress.choice.prompt)
        if self.plan.answered:
            self._add(event, one, first=first)
        elif one.delta.finish is not None:  # max_tokens is 0: the engine's one token is dropped
            event.finish_reason = generate_pb2.FINISH_REASON_LENGTH
        if one.last or self.request.continuous_usage_stats:
            event.usage.CopyFrom(_usage(self.plan, running.choices))
        if one.last:
            figures = statistics(self.plan, running.choices)
            event.spaceserve.CopyFrom(generate_pb2.Statistics(**figures, system_fingerprint=running.fingerprint))
        yield event

    def _event(self, index: int, prompt: Sequence[TokenLogprobs]) -> generate_pb2.GenerateEvent:
        count = self.request.prompt_logprobs if self.request.HasField("prompt_logprobs") else self.request.logprobs
        return generate_pb2.GenerateEvent(
            request_id=self.plan.request_id,
            model=self.model,
            index=index,
            prompt_logprobs=[self._scored(known, 0, count) for known in prompt],
        )

    def _begin(self, event: generate_pb2.GenerateEvent, prompt: Prompt) -> None:
        """Add the fields that only the first event of a choice has."""
        self._begun.add(event.index)
        if self.request.echo:
            event.text = prompt.text
        if self.request.return_prompt_token_ids:
            event.prompt_token_ids.extend(prompt.ids)

    def _add(self, event: generate_pb2.GenerateEvent, one: Shown, *, first: bool) -> None:
        delta = one.delta
        if delta.finish is not None:
            event.finish_reason = _REASONS[delta.finish]
        if self.answer is None:
            event.text += delta.text
        else:
            self._add_chat_piece(event, self.answer.piece(one.progress, delta, first=first))
        event.token_ids.extend(token.span.id for token in delta.tokens)
        event.token_steps.extend(token.step for token in delta.tokens)
        event.token_drafts.extend(token.draft for token in delta.tokens)
        if self.request.HasField("logprobs"):
            begin = len(one.progress.choice.prompt.text) if self.request.echo else 0
            event.logprobs.extend(self._logprobs(delta.tokens, begin))
        if isinstance(delta.stop_reason, str):
            event.stop_string = delta.stop_reason
        elif delta.stop_reason is not None:
            event.stop_token_id = delta.stop_reason

    def _add_chat_piece(self, event: generate_pb2.GenerateEvent, piece: dict[str, Any]) -> None:
        """Add a chunk of a chat completion, in the form that HTTP streams."""
        event.text += piece["delta"].get("content") or ""
        event.reasoning_content = piece["delta"].get("reasoning_content", "")
        for call in piece["delta"].get("tool_calls", ()):
            event.tool_calls.add(index=call["index"], id=call.get("id", ""), **call["function"])
        if piece.get("finish_reason") == "tool_calls":
            event.finish_reason = generate_pb2.FINISH_REASON_TOOL_CALLS

    def _logprobs(self, tokens: Sequence[TextToken], begin: int) -> Iterator[generate_pb2.TokenLogprob]:
        for token in tokens:
            if token.logprobs is not None:
                yield self._scored(token.logprobs, begin + token.span.start, self.request.logprobs)

    def _scored(self, known: TokenLogprobs, offset: int, count: int) -> generate_pb2.TokenLogprob:
        text, content = self.tokenizer.token_text, self.tokenizer.bytes_of
        return generate_pb2.TokenLogprob(
            id=known.id,
            token=text(known.id),
            bytes=content[known.id],
            logprob=finite(known.logprob),
            text_offset=offset,
            top=[
                generate_pb2.Alternative(id=id_, token=text(id_), bytes=content[id_], logprob=finite(value))
                for id_, value in known.top[:count]
            ],
        )


def _usage(plan: GenerationPlan, choices: Sequence[ChoiceState]) -> generate_pb2.Usage:
    counts = usage(plan, choices)
    details = counts.get("completion_tokens_details", {})
    return generate_pb2.Usage(
        prompt_tokens=counts["prompt_tokens"],
        completion_tokens=counts["completion_tokens"],
        total_tokens=counts["total_tokens"],
        cached_tokens=counts["prompt_tokens_details"]["cached_tokens"],
        accepted_prediction_tokens=details.get("accepted_prediction_tokens"),
        rejected_prediction_tokens=details.get("rejected_prediction_tokens"),
        reasoning_tokens=details.get("reasoning_tokens"),
    )
