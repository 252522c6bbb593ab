"""Token counts of one request: OpenAI's `usage` and the `spaceserve` object."""

from collections.abc import Sequence
from typing import Any

from space_router.api.generation import ChoiceState
from space_router.api.plan import GenerationPlan


def usage(plan: GenerationPlan, choices: Sequence[ChoiceState]) -> dict[str, Any]:
    """Return OpenAI's `usage` so far, over all choices; each prompt counts once."""
    num_prompt = sum(len(prompt.ids) for prompt in plan.prompts)
    num_generated = sum(choice.statistics.num_tokens for choice in choices) if plan.answered else 0
    leaders = choices[:: plan.per_prompt]
    # Each prediction token counts once for each choice, as accepted or rejected (so far).
    num_predicted = sum(len(choice.choice.request.prediction or ()) for choice in choices)
    num_found = 0
    if num_predicted and plan.answered:
        num_found = sum(min(one.statistics.num_predicted, one.statistics.num_tokens) for one in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(leader.stream.statistics.num_cached for leader in leaders)},
        "completion_tokens_details": {
            "reasoning_tokens": 0,  # no hidden reasoning
            "accepted_prediction_tokens": num_found,
            "rejected_prediction_tokens": num_predicted - num_found,
        },
    }


def statistics(plan: GenerationPlan, choices: Sequence[ChoiceState]) -> dict[str, Any]:
    """Return the `spaceserve` object: the request's speculation statistics over all choices."""
    figures = [choice.statistics for choice in choices]
    steps = sum(one.num_steps for one in figures)
    decoded = sum(one.num_decoded for one in figures)
    return {
        "seed": plan.seed,
        "steps": steps,
        "drafted": sum(one.num_drafted for one in figures),
        "accepted": sum(one.num_accepted for one in figures),
        "tokens_per_step": round(decoded / steps, 4) if steps else None,
    }
