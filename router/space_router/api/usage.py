"""Figures of one request: OpenAI's `usage`, the `spaceserve` object, and TGI's timing headers."""

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from space_router.api.generation import ChoiceState, Generation
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


RECEIVED = "spaceserve.received"
"""Scope key of a request's arrival time, in monotonic seconds."""


def start_headers(request: Request, running: Generation) -> dict[str, str]:
    """Return the headers known before the first token; streams send only these."""
    prompts = running.plan.prompts
    return {
        "x-request-id": running.plan.request_id,
        "x-compute-type": running.device,
        "x-compute-characters": str(sum(len(prompt.text) for prompt in prompts)),
        "x-prompt-tokens": str(sum(len(prompt.ids) for prompt in prompts)),
        "x-validation-time": _milliseconds(running.since - request.scope[RECEIVED]),
    }


def end_headers(request: Request, running: Generation) -> dict[str, str]:
    """Return all headers. With several choices: the longest wait, and the longest answer's time per token."""
    lengths = [choice.statistics.num_tokens if running.plan.answered else 0 for choice in running.choices]
    now = time.monotonic()
    total = now - request.scope[RECEIVED]
    queued = max(choice.stream.statistics.queue_seconds or 0.0 for choice in running.choices)
    inference = now - running.since - queued
    return start_headers(request, running) | {
        "x-compute-time": f"{total:.6f}",
        "x-total-time": _milliseconds(total),
        "x-queue-time": _milliseconds(queued),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(1, *lengths)),
        "x-generated-tokens": str(sum(lengths)),
    }


def _milliseconds(seconds: float) -> str:
    return str(round(1000 * seconds))
