"""The deltas of a generation that are sent, and their order."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from space_router.api.generation import ChoiceState, Generation
from space_router.api.ranking import mean_logprob
from space_router.engine.request.request import TokenLogprobs
from space_router.text.text_stream import TextDelta


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
