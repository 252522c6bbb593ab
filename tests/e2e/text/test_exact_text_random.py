"""Random requests with random sets of all OpenAI fields, at once: what is told does not depend on speculation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

NUM_AT_ONCE = 10
PROMPTS = (
    "def area(width, height):\n    return ",
    "import os\n\n\ndef main():\n    for name in os.listdir('.'):\n        print(name)\n        print(name)\n",
    "# 中文注释 😀 é\nx = 1\n# 中文注释 😀 é\ny = 2\n# 中文",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "a",
)
STOPS = ("\n\n", "return", "(", "self", ":\n", "e", "  ", "文")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "tags": {"enum": ["a", "é"]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": r"[a-f]{3}(-\d+){2,9}"}},
    {"structured_outputs": {"choice": ["left", "right", "straight on, and then left"]}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"grammar": 'start: term (("+"|"-") term){3,}\nterm: /[0-9]{1,3}/ | "(" start ")"'}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
)
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}},
]
WORDS = ("self", "return", "name", "print", "é", "\n")


def random_body(dice: Random) -> tuple[str, dict[str, Any]]:
    """A route and what is asked of it: any fields beside each other, in any number."""
    chat = dice.random() < 0.35
    body: dict[str, Any] = {"seed": dice.getrandbits(dice.choice((8, 53, 64))), "return_token_ids": True}
    most = dice.randint(1, 40)
    fields: dict[str, Any] = {
        "temperature": dice.choice((0, 0, 0.3, 0.8, 1, 1.4, 2)),
        "top_p": dice.choice((0.1, 0.5, 0.9, 0.95, 1)),
        "top_k": dice.choice((-1, 0, 1, 5, 40)),
        "min_p": dice.choice((0, 0.02, 0.2, 1)),
        "typical_p": dice.choice((0.2, 0.6, 0.95, 1)),
        "presence_penalty": dice.choice((-2, -0.5, 0.5, 2)),
        "frequency_penalty": dice.choice((-2, -0.5, 0.5, 2)),
        "repetition_penalty": dice.choice((0.8, 1.1, 1.5)),
        "logit_bias": {"0": dice.choice((0, 4))}
        | {str(dice.randrange(9, 6000)): dice.uniform(-5, 5) for _ in range(9)},
        "bad_words": dice.sample(WORDS, dice.randint(1, 3)),
        "allowed_token_ids": dice.sample(range(9, 6000), dice.choice((3, 300))),
        "min_tokens": dice.randint(0, most),
        "ignore_eos": dice.random() < 0.5,
        "stop_token_ids": dice.sample(range(9, 500), dice.randint(1, 30)),
        "stop": dice.choice((dice.choice(STOPS), dice.sample(STOPS, dice.randint(1, 4)))),
        "include_stop_str_in_output": dice.random() < 0.5,
        "skip_special_tokens": dice.random() < 0.5,
        "add_special_tokens": dice.random() < 0.5,
        "truncate_prompt_tokens": dice.randint(1, 20),
        "n": dice.randint(1, 3),
        "prediction": {"type": "content", "content": dice.choice(PROMPTS) + dice.choice(PROMPTS)},
        "prompt_logprobs": dice.randint(0, 3),
        "priority": dice.randint(-3, 3),
        "timeout": 300,
        "cache_salt": dice.choice(("", "a", "b")),
        "user": "somebody",
    }
    if chat:
        fields |= {"top_logprobs": dice.randint(0, 5), "max_completion_tokens": most}
        turns: list[dict[str, Any]] = [{"role": "user", "content": dice.choice(PROMPTS)}]
        if dice.random() < 0.4:
            turns = [{"role": "system", "content": "Be brief."}, *turns, {"role": "assistant", "content": "Yes."},
                     {"role": "user", "content": [{"type": "text", "text": dice.choice(PROMPTS)}]}]  # fmt: skip
        body |= {"messages": turns, "max_completion_tokens": most}
    else:
        fields |= {"logprobs": dice.randint(0, 5), "echo": dice.random() < 0.7, "best_of": 3}
        ids = [dice.randrange(9, 6000) for _ in range(dice.randint(1, 30))]
        body |= {"prompt": dice.choice((*PROMPTS, list(PROMPTS[:2]), ids, [ids, ids[:1]])), "max_tokens": most}
    chosen = dice.sample(sorted(fields), dice.randint(0, min(9, len(fields))))
    body |= {name: fields[name] for name in chosen}
    if dice.random() < 0.25:
        body |= dice.choice(STRUCTURES) | {"max_completion_tokens" if chat else "max_tokens": dice.randint(20, 60)}
        if chat and dice.random() < 0.4:
            choice = dice.choice(("required", {"type": "function", "function": {"name": "add"}}))
            body |= {"tools": TOOLS, "tool_choice": choice, "response_format": None, "structured_outputs": None}
        for name in ("allowed_token_ids", "bad_words", "min_tokens"):  # they could forbid all that a grammar allows
            body.pop(name, None)
    if "top_logprobs" in body:
        body["logprobs"] = True
    if "allowed_token_ids" in body and len(body["allowed_token_ids"]) < 99:
        body.pop("bad_words", None)  # something is left to say
        body.pop("min_tokens", None)
    return ("/v1/chat/completions" if chat else "/v1/completions"), body


def can_be_streamed(body: dict[str, Any]) -> bool:
    return bool(body.get("best_of", 0) <= body.get("n", 1))


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on speculation, on other requests or on how it was sent."""
    usage = {name: value for name, value in answer["usage"].items() if name != "prompt_tokens_details"}
    return {"choices": answer["choices"], "usage": usage, "seed": answer["spaceserve"]["seed"]}


class Tally:
    """Sends every request twice, without and with speculation, all at once; counts what came back."""

    def __init__(self, live: Any) -> None:
        self.live = live
        self.counts: Counter[str] = Counter()

    def run(self, seeds: range) -> list[str]:
        """The requests whose two answers differ."""
        asked = [(seed, *random_body(Random(f"request {seed}"))) for seed in seeds]
        jobs = list(self._jobs(asked))
        Random(0).shuffle(jobs)
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            answers = dict(threads.map(self._send, jobs))
        different = []
        for seed, route, body in asked:
            plain, drafted = answers[seed, False], answers[seed, True]
            self._count(drafted)
            if comparable(plain) != comparable(drafted):
                different.append(f"{seed}: {route} {json.dumps(body)}\n{comparable(plain)}\n{comparable(drafted)}")
        return different

    def _jobs(self, asked: list[tuple[int, str, dict[str, Any]]]) -> Iterator[tuple[int, bool, str, dict[str, Any]]]:
        for seed, route, body in asked:
            dice = Random(f"ways {seed}")
            for drafts in (False, True):
                how = {"speculation": dice.choice(("auto", "auto", 1, 3, 5)) if drafts else "off"}
                stream = can_be_streamed(body) and dice.random() < 0.5
                yield seed, drafts, route, body | how | {"stream": stream}

    def _send(self, job: tuple[int, bool, str, dict[str, Any]]) -> tuple[tuple[int, bool], dict[str, Any]]:
        seed, drafts, route, body = job
        return (seed, drafts), self.live.answer(route, body)

    def _count(self, answer: dict[str, Any]) -> None:
        figures = answer["spaceserve"]
        self.counts["requests"] += 1
        self.counts["choices"] += len(answer["choices"])
        self.counts["tokens"] += answer["usage"]["completion_tokens"]
        self.counts["drafted"] += figures["drafted"]
        self.counts["accepted"] += figures["accepted"]
        self.counts["rejected"] += figures["drafted"] - figures["accepted"]
        self.counts.update(choice["finish_reason"] for choice in answer["choices"])


def check(tally: Tally, seeds: range, capsys: pytest.CaptureFixture[str]) -> None:
    different = tally.run(seeds)
    with capsys.disabled():
        print(f"\n{dict(tally.counts)}")  # noqa: T201
    assert not different, f"{len(different)} of {len(seeds)} differ, first\n{different[0]}"
    assert tally.counts["accepted"] > len(seeds)
    assert tally.counts["rejected"] > len(seeds)
    assert tally.counts["stop"] > 0 < tally.counts["length"]


def test_forty_random_requests_are_told_the_same(drafting: Any, capsys: pytest.CaptureFixture[str]) -> None:
    check(Tally(drafting), range(40), capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_hundred_random_requests_are_told_the_same(drafting: Any, capsys: pytest.CaptureFixture[str]) -> None:
    check(Tally(drafting), range(1000, 1500), capsys)
