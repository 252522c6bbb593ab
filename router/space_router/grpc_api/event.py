"""The deltas of a generation that are sent, and their conversion to GenerateEvent messages."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from space_proto import generate_pb2

from space_router.api.generation import ChoiceState, Generation, mean_logprob
from space_router.api.openai.logprobs import finite
from space_router.api.plan import GenerationPlan, Prompt
from space_router.api.usage import statistics, usage
from space_router.engine.request.request import TokenLogprobs
from space_router.grpc_api.request import Asked
from space_router.text.text_stream import FinishReason, TextDelta, TextToken
from space_router.text.tokenizer import Tokenizer


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
        ranked = sorted(group, key=lambda one: _score(kept[one]), reverse=True)[: running.plan.num_shown]
        kept[ranked[0]][0] = kept[ranked[0]][0]._replace(prompt_logprobs=tuple(prompt))
        for rank, one in enumerate(ranked, start=place * running.plan.num_shown):
            found += [Shown(rank, running.choices[one], delta, False) for delta in kept[one]]
    return [*found[:-1], replace(found[-1], last=True)]


def _score(deltas: list[TextDelta]) -> float:
    return mean_logprob(token for delta in deltas for token in delta.tokens)


PROMPT_IDS_PER_EVENT = 256
"""About half a MiB with 20 alternatives each; gRPC clients accept 4 MiB by default."""

_REASONS = {
    None: generate_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.EOS: generate_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: generate_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generate_pb2.FINISH_REASON_LENGTH,
}


@dataclass
class Events:
    """Builds the events of one call."""

    asked: Asked
    model: str
    tokenizer: Tokenizer
    _begun: set[int] = field(default_factory=set)  # choices that have had an event

    @property
    def plan(self) -> GenerationPlan:
        return self.asked.plan

    @property
    def request(self) -> generate_pb2.GenerateRequest:
        return self.asked.request

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
        """Add the delta's text and tokens, and the finish reason."""
        delta = one.delta
        event.finish_reason = _REASONS[delta.finish]
        if self.asked.shape is None:
            event.text += delta.text
        else:
            self._add_chat_piece(event, self.asked.shape.piece(one.progress, delta, first=first))
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
    )
