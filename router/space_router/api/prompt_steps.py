"""Prompt log-probabilities in streams: computed for the first choice of a prompt, returned with every choice."""

from collections.abc import AsyncIterator

from space_router.api.generation import ChoiceState
from space_router.api.plan import GenerationPlan
from space_router.engine.request.request import TokenLogprobs
from space_router.text.text_stream import TextDelta

Step = list[tuple[ChoiceState, TextDelta]]


async def with_prompts(steps: AsyncIterator[Step], plan: GenerationPlan) -> AsyncIterator[Step]:
    """Yield the same steps, with the prompt's log-probabilities before each choice's tokens.

    The first choice gets them as they are computed. The deltas of the others are held until they are complete.
    """
    known: list[list[TokenLogprobs]] = [[] for _ in plan.prompts]
    waiting: list[Step] = [[] for _ in plan.prompts]
    told: set[int] = set()  # other choices that already have them
    async for step in steps:
        ready: Step = []
        for progress, delta in step:
            place, choice = divmod(progress.choice.index, plan.per_prompt)
            complete = len(progress.choice.prompt.ids) - 1
            if choice == 0:
                ready.append((progress, delta))
                known[place] += delta.prompt_logprobs
                given = waiting[place] if len(known[place]) == complete else []
            elif len(known[place]) < complete:
                waiting[place].append((progress, delta))
                given = []
            else:
                given = [(progress, delta)]
            for other, held in given:
                values = () if other.choice.index in told else tuple(known[place])
                told.add(other.choice.index)
                ready.append((other, held._replace(prompt_logprobs=values)))
            if given is waiting[place]:
                waiting[place] = []
        if ready:
            yield ready
