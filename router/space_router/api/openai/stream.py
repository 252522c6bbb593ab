"""Whole and streamed responses of completions and chat completions."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from space_router.api.generation import (
    ChoiceState,
    CompletedChoice,
    Generation,
    most_probable,
    statistics,
    usage,
    with_prompts,
)
from space_router.api.openai.fields import GenerationFields, StreamOptions
from space_router.api.request_builder import GenerationPlan, Prompt
from space_router.engine.request.request import TokenLogprobs
from space_router.http_server.responses import as_api_error, event_json, openai_error
from space_router.text.text_stream import Detokenizer, FinishReason, TextDelta, TextToken
from space_router.text.tokenizer import Tokenizer


def finite(logprob: float) -> float:
    """Return the log-probability; JSON cannot represent minus infinity."""
    return max(logprob, -9999.0)


class CompletionLogprobs:
    """Four parallel lists: tokens, token_logprobs, top_logprobs, text_offset (in characters of the choice's text)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, tokens: Sequence[TextToken], offset: int, *, keeps_end: bool = False) -> None:
        """Add generated tokens. `offset`: the start of the generated text, in characters. `keeps_end`: also the token
        that ends the text, which has none."""
        for token in tokens:
            if keeps_end or not token.ends_text:
                self.add_one(token.span.id, token.logprobs, offset + token.span.start)

    def add_one(self, id_: int, logprobs: TokenLogprobs | None, offset: int) -> None:
        text = self._tokenizer.token_text
        self.lists["tokens"].append(text(id_))
        self.lists["text_offset"].append(offset)
        if logprobs is None:
            self.lists["token_logprobs"].append(None)
            self.lists["top_logprobs"].append(None)
            return
        top = {text(other): finite(value) for other, value in logprobs.top}
        top.setdefault(text(id_), finite(logprobs.logprob))
        self.lists["token_logprobs"].append(finite(logprobs.logprob))
        self.lists["top_logprobs"].append(top)


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TextToken]) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice: an entry for each token but the one that ends the text."""

    def one(id_: int, logprob: float) -> dict[str, Any]:
        return {"token": tokenizer.token_text(id_), "logprob": finite(logprob), "bytes": list(tokenizer.bytes_of[id_])}

    content = [
        {**one(token.span.id, token.logprobs.logprob), "top_logprobs": [one(*entry) for entry in token.logprobs.top]}
        for token in tokens
        if token.logprobs is not None and not token.ends_text
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, known: Sequence[TokenLogprobs], count: int, *, first: bool) -> list[Any]:
    """Return `prompt_logprobs`, or its next piece: for each prompt id, a map from id to log-probability, rank and text.

    Each map has the prompt id and the `count` most probable ids; with `first`, the first entry is null.
    """

    def one(id_: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(id_)}

    found: list[dict[str, Any] | None] = [None] if first else []
    for logprobs in known:
        ranked = enumerate(logprobs.top[:count], start=1)
        entries = {str(id_): one(id_, value, rank) for rank, (id_, value) in ranked}
        entries.setdefault(str(logprobs.id), one(logprobs.id, logprobs.logprob, None))
        found.append(entries)
    return found


class Echo:
    """Echoes the prompt of one choice incrementally."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, num_top: int) -> None:
        """`num_top`: alternatives to return for each token."""
        self._prompt = prompt
        self._num_top = num_top
        self._offsets = _offsets(tokenizer, prompt)
        self._num_written = 0  # ids echoed so far

    def add(self, known: Sequence[TokenLogprobs], lists: CompletionLogprobs) -> str:
        """Add the next tokens, with the log-probabilities `known`, to the lists; return their text."""
        start = self._num_written
        first: list[TokenLogprobs | None] = [] if start else [None]  # the first id has no log-probability
        values = first + [replace(one, top=one.top[: self._num_top]) for one in known]
        self._num_written = end = start + len(values)
        for place, value in enumerate(values, start):
            lists.add_one(self._prompt.ids[place], value, self._offsets[place])
        ends_at = self._offsets[end] if end < len(self._offsets) else len(self._prompt.text)
        return self._prompt.text[self._offsets[start] if start else 0 : ends_at] if values else ""


def _offsets(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Return the start of each id, in characters of the echoed text."""
    detokenizer = Detokenizer(tokenizer)
    num_written = 0  # characters of special tokens that are spelled out in the prompt text
    offsets = []
    for id_ in prompt.ids:
        offset = num_written + detokenizer.push(id_)[1].start
        offsets.append(offset)
        if id_ in tokenizer.special_ids:
            name = tokenizer.token_text(id_)
            num_written += len(name) if prompt.text.startswith(name, offset) else 0
    return offsets


STEP = 128  # event sizes are multiples of so many bytes
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_FIELD = b',"obfuscation":"'
_LETTERS = bytes(_ALPHABET[i % 64] for i in range(256))


def obfuscated(event: bytes) -> bytes:
    """Append a field of random letters to a stream event (`data: {...}` and two line ends)."""
    head = event.removesuffix(b"}\n\n")
    num_letters = -(len(head) + len(_FIELD) + len(b'"}\n\n')) % STEP
    return head + _FIELD + secrets.token_bytes(num_letters).translate(_LETTERS) + b'"}\n\n'


class EventSteps:
    """Builds the `spaceserve` object of each event of one response.

    {"tokens": [{"text": " cat", "step": 3, "draft": true}, ...], "verified": 5}

    The texts join to the event's text. A character belongs to the last of its tokens; remaining text of a token in an
    earlier event goes with the next token, or is in an event without tokens. `step` 0 is the prefill; `draft` marks an
    accepted draft; `verified` is the number of drafts verified since the choice's previous event.
    """

    def __init__(self) -> None:
        self._given: dict[int, int] = {}  # characters sent for each choice
        self._drafted: dict[int, int] = {}  # drafts counted for each choice

    def of(self, progress: ChoiceState, delta: TextDelta) -> dict[str, Any]:
        index, drafted = progress.choice.index, progress.statistics.num_drafted
        offset = self._given.get(index, 0)
        verified = drafted - self._drafted.get(index, 0)
        self._given[index], self._drafted[index] = offset + len(delta.text), drafted
        tokens: list[dict[str, Any]] = []
        begin = 0
        for place, token in enumerate(delta.tokens, start=1):
            last = place == len(delta.tokens)
            end = len(delta.text) if last else max(begin, delta.tokens[place].span.start - offset)
            tokens.append({"text": delta.text[begin:end], "step": token.step, "draft": token.draft})
            begin = min(end, len(delta.text))
        return {"tokens": tokens, "verified": verified}


DONE = b"data: [DONE]\n\n"
_GOES_ON = {"finish_reason": None, "stop_reason": None}


@dataclass
class OpenAIAnswer(ABC):
    """The response to one request, whole or as events. Finish fields of its choices take precedence."""

    object: ClassVar[str]  # `object` of a whole response
    chunk_object: ClassVar[str]  # `object` of an event

    tokenizer: Tokenizer
    body: GenerationFields
    plan: GenerationPlan
    model: str
    created: int = field(init=False, default_factory=lambda: int(time.time()))

    @abstractmethod
    def choice(self, written: CompletedChoice, prompt: CompletedChoice) -> dict[str, Any]:
        """Return a finished choice without its index. `prompt`: the one that has the prompt's log-probabilities."""

    @abstractmethod
    def piece(self, progress: ChoiceState, delta: TextDelta, *, first: bool) -> dict[str, Any]:
        """Return a piece of a choice without its index. Its tokens may begin before its text."""

    @abstractmethod
    def says(self, piece: dict[str, Any]) -> bool:
        """Whether a piece has content."""

    async def whole(self, running: Generation) -> dict[str, Any]:
        written = await running.whole()
        choices: list[dict[str, Any]] = []
        for start in range(0, len(written), self.plan.per_prompt):
            group = written[start : start + self.plan.per_prompt]
            ranked = most_probable(group) if len(group) > self.plan.num_shown else group
            for one in ranked[: self.plan.num_shown]:
                body = self.choice(one, group[0])
                self.add_extensions(body, one, group[0].prompt_logprobs, first=True)
                reasons = self.reasons(one.progress.finish, one.progress.stop_reason)
                choices.append({"index": len(choices), **reasons, **body})
        return {
            "id": self.plan.request_id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": running.fingerprint,
            "choices": choices,
            "usage": usage(self.plan, running.choices),
            "spaceserve": statistics(self.plan, running.choices),
        }

    async def events(self, running: Generation) -> AsyncGenerator[bytes]:
        """Yield one event per step and choice, ready ones as one chunk. An error is the last event."""
        steps = running.steps()
        written = _Events(self, running)
        try:
            async for step in with_prompts(steps, self.plan) if self.plan.wants_prompt_logprobs else steps:
                if events := b"".join([written.event(progress, delta) for progress, delta in step]):
                    yield events
            yield written.last()
        except Exception as error:
            yield b"data: " + event_json(openai_error(as_api_error(error))) + b"\n\n"

    def add_extensions(
        self, body: dict[str, Any], written: CompletedChoice, prompt: Sequence[TokenLogprobs], *, first: bool
    ) -> None:
        """Add fields that OpenAI does not have: token ids and prompt log-probabilities. `written` may be a piece."""
        if self.body.return_token_ids:
            body["token_ids"] = [token.span.id for token in written.tokens] if self.plan.answered else []
            if first:
                body["prompt_token_ids"] = written.progress.choice.prompt.ids
        if (count := self.body.prompt_logprobs) is not None and (first or prompt):
            body["prompt_logprobs"] = prompt_logprobs(self.tokenizer, prompt, count, first=first)

    def reasons(self, finish: FinishReason | None, stop_reason: str | int | None) -> dict[str, Any]:
        if finish is not None and not self.plan.answered:  # it is the limit of 0 that ended it, whatever the engine's
            finish, stop_reason = FinishReason.LENGTH, None  # one token was
        name = None if finish is None else "length" if finish is FinishReason.LENGTH else "stop"
        return {"finish_reason": name, "stop_reason": stop_reason}


class _Events:
    """Builds the events of one response, in order."""

    def __init__(self, reply: OpenAIAnswer, running: Generation) -> None:
        self._reply, self._running = reply, running
        self._options = reply.body.stream_options or StreamOptions()
        self._steps = EventSteps() if self._options.include_steps else None
        head = {"id": reply.plan.request_id, "object": reply.chunk_object, "created": reply.created}
        head |= {"model": reply.model, "system_fingerprint": running.fingerprint}
        self._prefix = b"data: " + event_json(head)[:-1] + b","  # the same in all events
        self._begun: set[int] = set()  # indexes of choices that have sent an event
        self._held: dict[int, TextDelta] = {}  # what of each choice goes with its next event
        self._num_open = len(running.choices)

    def event(self, progress: ChoiceState, delta: TextDelta) -> bytes:
        """Return the event for a piece of one choice; b"" if it has no content: its tokens go with the next event."""
        reply, index = self._reply, progress.choice.index
        first = index not in self._begun
        text = delta.text
        if (held := self._held.pop(index, None)) is not None:
            delta = delta._replace(text=held.text + text, tokens=held.tokens + delta.tokens)
        body = reply.piece(progress, delta._replace(text=text), first=first)
        if delta.finish is None and not delta.prompt_logprobs and not reply.says(body):
            self._held[index] = delta
            return b""
        self._begun.add(index)
        if reply.body.return_token_ids or reply.body.prompt_logprobs is not None:
            written = CompletedChoice(progress, tokens=list(delta.tokens))
            reply.add_extensions(body, written, delta.prompt_logprobs, first=first)
        reasons = _GOES_ON if delta.finish is None else reply.reasons(delta.finish, delta.stop_reason)
        event: dict[str, Any] = {"choices": [{"index": index, **reasons, **body}]}
        if self._options.continuous_usage_stats:
            event["usage"] = usage(reply.plan, self._running.choices)
        elif self._options.include_usage:
            event["usage"] = None
        self._num_open -= delta.finish is not None
        if not self._num_open:
            event["spaceserve"] = statistics(reply.plan, self._running.choices)
        if self._steps is not None and reply.plan.answered:
            event["spaceserve"] = event.get("spaceserve", {}) | self._steps.of(progress, delta)
        data = self._line(event)
        return obfuscated(data) if self._options.include_obfuscation else data

    def last(self) -> bytes:
        """Return the usage event, if requested, and the end of the stream."""
        if not self._options.include_usage:
            return DONE
        plan, choices = self._reply.plan, self._running.choices
        tail = {"choices": [], "usage": usage(plan, choices), "spaceserve": statistics(plan, choices)}
        return self._line(tail) + DONE

    def _line(self, event: dict[str, Any]) -> bytes:
        return b"%b%b\n\n" % (self._prefix, event_json(event)[1:])
