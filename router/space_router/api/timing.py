"""Timing headers of generation routes: TGI's names, in milliseconds."""

import time

from starlette.requests import Request

from space_router.api.generation import Generation

RECEIVED = "spaceserve.received"
"""Scope key of a request's arrival time, in monotonic seconds."""


def begun(request: Request, running: Generation) -> dict[str, str]:
    """Return the headers known before the first token; streams send only these."""
    prompts = running.plan.prompts
    return {
        "x-request-id": running.plan.request_id,
        "x-compute-type": running.device,
        "x-compute-characters": str(sum(len(prompt.text) for prompt in prompts)),
        "x-prompt-tokens": str(sum(len(prompt.ids) for prompt in prompts)),
        "x-validation-time": _milliseconds(running.since - request.scope[RECEIVED]),
    }


def ended(request: Request, running: Generation) -> dict[str, str]:
    """Return all headers. With several choices: the longest wait, and the longest answer's time per token."""
    lengths = [choice.statistics.num_tokens if running.plan.answered else 0 for choice in running.choices]
    now = time.monotonic()
    total = now - request.scope[RECEIVED]
    queued = max(choice.stream.statistics.queue_seconds or 0.0 for choice in running.choices)
    inference = now - running.since - queued
    return begun(request, running) | {
        "x-compute-time": f"{total:.6f}",
        "x-total-time": _milliseconds(total),
        "x-queue-time": _milliseconds(queued),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(1, *lengths)),
        "x-generated-tokens": str(sum(lengths)),
    }


def _milliseconds(seconds: float) -> str:
    return str(round(1000 * seconds))
