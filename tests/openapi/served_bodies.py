"""Loaded by schemathesis: right bodies are made ones that this server can answer, and soon.

A document cannot say which model is served, which ids it has, and how many tokens fit its window: random values are
refused with 400 or 404, and no answer would be seen. Wrong bodies stay as they are.
"""

from typing import Any

import schemathesis
from schemathesis import Case, HookContext

NUM_IDS = 4096  # Ids from here on may not exist; those below 16 are special

MOST = 12  # Tokens of an answer

FREE = ("model", "adapter_id", "truncate_prompt_tokens", "truncate", "best_of", "suffix", "min_tokens", "timeout")
"""Fields that are left out: what they may be depends on the server or on other fields."""


def _id(value: Any) -> Any:
    return 16 + value % (NUM_IDS - 16) if isinstance(value, int) else value


def _ids(value: Any) -> Any:
    return [_ids(one) for one in value] if isinstance(value, list) else _id(value)


def _answerable(body: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in body.items() if name not in FREE}
    for name in ("allowed_token_ids", "stop_token_ids", "tokens", "prompt"):
        if isinstance(body.get(name), list):
            body[name] = _ids(body[name])[:2]
    if isinstance(body.get("logit_bias"), dict):
        body["logit_bias"] = {str(_id(int(key))): value for key, value in body["logit_bias"].items() if key.isdigit()}
    for name in ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int):
            body[name] = 1 + body[name] % MOST
    if "max_tokens" in body:
        body.pop("max_completion_tokens", None)
    elif "messages" in body:
        body["max_completion_tokens"] = MOST
    if isinstance(body.get("n"), int):
        body["n"] = 1
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if isinstance(body.get("parameters"), dict):
        body["parameters"] = {"max_new_tokens": MOST, **_answerable(body["parameters"])}
    if isinstance(body.get("messages"), list):
        body["messages"] = [{"role": "user", "content": "Say something."}]
    return body


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    if case.meta is not None and case.meta.generation.mode.is_positive and isinstance(case.body, dict):
        case.body = _answerable(case.body)
