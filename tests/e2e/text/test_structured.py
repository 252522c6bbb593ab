"""Structured outputs of a whole server: valid, the same with speculation and without, through losses and preemption."""

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jsonschema import Draft202012Validator

SCHEMA = {
    "type": "object",
    "properties": {
        "function": {"type": "string", "maxLength": 24},
        "arguments": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
        "pure": {"type": "boolean"},
        "complexity": {"enum": ["constant", "linear", "quadratic"]},
    },
    "required": ["function", "arguments", "pure", "complexity"],
    "additionalProperties": False,
}
AS_FORMAT = {"type": "json_schema", "json_schema": {"name": "described", "schema": SCHEMA, "strict": True}}
PROMPT = 'def describe():\n    """Describes add(a, b) as JSON."""\n    return '
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 5},
    "penalised": {"temperature": 1.0, "seed": 6, "frequency_penalty": 0.5, "top_p": 0.95},
}


def described(text: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    Draft202012Validator(SCHEMA).validate(value)
    assert list(value) == list(SCHEMA["properties"])  # type: ignore[call-overload]
    return value


@pytest.mark.parametrize("sampling_params", LAWS)
def test_the_json_is_valid_and_the_same_with_speculation_off_auto_and_each_k(
    live: Any, drafting: Any, sampling_params: str
) -> None:
    most = live.get("/info")["speculation"]["max_request"]
    fields = {"max_tokens": 300, "ignore_eos": False, "response_format": AS_FORMAT, "return_token_ids": True}
    answers = {
        bound: (drafting if isinstance(bound, int) else live).complete(
            PROMPT, speculation=bound, **fields, **LAWS[sampling_params]
        )
        for bound in ("off", "auto", 1, 3, min(5, most))
    }
    plain = answers["off"]["choices"][0]
    described(plain["text"])
    assert plain["finish_reason"] == "stop"
    assert [bound for bound, one in answers.items() if one["choices"][0]["token_ids"] != plain["token_ids"]] == []
    figures = answers[min(5, most)]["spaceserve"]
    assert 0 < figures["accepted"] < figures["drafted"]


def test_what_the_grammar_forces_is_drafted_and_counted(live: Any) -> None:
    # Masks of a model of code know little of this text; the end of it, at least, is certain.
    fields = {"max_tokens": 60, "structured_outputs": {"choice": ["this and nothing else whatsoever"]}}
    name = "spaceserve_accepted_tokens_by_source_total{source=grammar}"
    before = live.metrics()[name]
    for prompt in ("x", "def f():", "# this and nothing else whatsoever\n", "a = 5"):
        text = live.complete(prompt, **fields)
        assert text["choices"][0]["text"] == "this and nothing else whatsoever"
        assert text["choices"][0]["finish_reason"] == "stop"
        assert text["spaceserve"]["accepted"] > 0
    assert live.metrics()[name] > before


@pytest.mark.parametrize("stream", [False, True])
def test_chat_answers_in_each_kind_of_grammar(live: Any, stream: bool) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Describe add(a, b)."}],
        "max_tokens": 300,
        "seed": 8,
        "stream": stream,
    }
    ways: list[tuple[dict[str, Any], Any]] = [
        ({"response_format": AS_FORMAT}, described),
        ({"structured_outputs": {"json": SCHEMA}}, described),
        ({"structured_outputs": {"regex": r"[a-z]{3,8}\(\d{1,2}\)"}}, re.compile(r"[a-z]{3,8}\(\d{1,2}\)").fullmatch),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}.__contains__),
        (
            {"structured_outputs": {"grammar": 'root ::= "(" [0-9]+ ")" | "none"'}},
            re.compile(r"\(\d+\)|none").fullmatch,
        ),
    ]
    for fields, accepts in ways:
        choice = live.answer("/v1/chat/completions", {**asked, **fields})["choices"][0]
        assert accepts(choice["text"]), (fields, choice["text"])
        assert choice["finish_reason"] == "stop"


def test_json_goes_on_with_the_same_text_when_its_worker_is_killed(live: Any) -> None:
    wanted = [
        {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": False, "response_format": AS_FORMAT, **sampling_params}
        for sampling_params in LAWS.values()
    ]
    undisturbed = [live.complete(**one)["choices"][0]["text"] for one in wanted]
    live.wait_idle()
    meeting = threading.Barrier(len(wanted) + 1, timeout=60)

    def read(one: dict[str, Any]) -> str:
        pieces = []
        for number, event in enumerate(live.stream(**one, return_token_ids=True), start=1):
            pieces.append(event["choices"][0]["text"])
            if number == 3:
                meeting.wait()
                meeting.wait()
        return "".join(pieces)

    with ThreadPoolExecutor(len(wanted)) as pool:
        streams = [pool.submit(read, one) for one in wanted]
        meeting.wait()
        os.kill(live.wait_worker(), signal.SIGKILL)
        meeting.wait()
        texts = [stream.result() for stream in streams]
    assert texts == undisturbed
    for text in texts:
        described(text)


def test_preempted_in_the_middle_a_text_stays_the_grammars(small: Any) -> None:
    regex = r"([a-f]{4}-){16}(end)"
    prompts = [f"{n} says: " for n in range(3)]
    wanted = [
        {"prompt": prompt, "max_tokens": 100, "ignore_eos": False, "temperature": 1.0, "seed": n,
         "structured_outputs": {"regex": regex}}
        for n, prompt in enumerate(prompts)
    ]  # fmt: skip
    alone = [small.complete(**one)["choices"][0]["text"] for one in wanted]
    before = small.wait_idle()["spaceserve_preemptions_total"]
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(lambda one: small.complete(**one)["choices"][0]["text"], wanted))
    assert texts == alone
    assert all(re.fullmatch(regex, text) for text in texts)
    assert small.wait_idle()["spaceserve_preemptions_total"] > before


def test_a_grammar_that_would_kill_a_process_is_refused_and_nobody_dies(live: Any) -> None:
    worker = live.wait_worker()
    deep = "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(9000)) + '\nr9000: "a"'
    answer = live.http.post("/v1/completions", json={"prompt": "x", "structured_outputs": {"grammar": deep}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs"
    assert live.complete("x", max_tokens=9, structured_outputs={"regex": "a{3}"})["choices"][0]["text"] == "aaa"
    assert live.wait_worker() == worker
