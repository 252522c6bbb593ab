"""Log-probabilities of prompts in streams: computed for the first choice of a prompt, and told with each."""

from collections.abc import AsyncIterator

from space_router.api.generation import ChoiceState
from space_router.api.plan import GenerationPlan
from space_router.engine.request.request import TokenLogprobs
from space_router.text.text_stream import TextDelta

Step = list[tuple[ChoiceState, TextDelta]]


async def with_prompts(steps: AsyncIterator[Step], plan: GenerationPlan) -> AsyncIterator[Step]:
    """The same steps, but every choice's deltas begin with its prompt's log-probabilities.

    The first choice has them as they come; the others wait until they are complete, and have them in one piece.
    """
    known: list[list[TokenLogprobs]] = [[] for _ in plan.prompts]
    waiting: list[Step] = [[] for _ in plan.prompts]
    told: set[int] = set()  # choices beside the first that have them
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
