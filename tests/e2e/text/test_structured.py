"""Structured outputs of a whole server: valid, the same with speculation and without, through losses and preemption."""

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import jsonschema
import openai
import pytest
from e2e.conftest import Live
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
SAMPLING_PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 5},
    "penalised": {"temperature": 1.0, "seed": 6, "frequency_penalty": 0.5, "top_p": 0.95},
}


def described(text: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)
    Draft202012Validator(SCHEMA).validate(value)
    assert list(value) == list(SCHEMA["properties"])  # type: ignore[call-overload]
    return value


@pytest.mark.parametrize("sampling_params", SAMPLING_PARAMS)
def test_the_json_is_valid_and_the_same_with_speculation_off_auto_and_each_k(
    live: Any, drafting: Any, sampling_params: str
) -> None:
    most = live.get("/info")["speculation"]["max_request"]
    fields = {"max_tokens": 300, "ignore_eos": False, "response_format": AS_FORMAT, "return_token_ids": True}
    answers = {
        bound: (drafting if isinstance(bound, int) else live).complete(
            PROMPT, speculation=bound, **fields, **SAMPLING_PARAMS[sampling_params]
        )
        for bound in ("off", "auto", 1, 3, min(5, most))
    }
    plain = answers["off"]["choices"][0]
    described(plain["text"])
    assert plain["finish_reason"] == "stop"
    assert [bound for bound, one in answers.items() if one["choices"][0]["token_ids"] != plain["token_ids"]] == []
    figures = answers[min(5, most)]["spaceserve"]
    assert 0 < figures["accepted"] < figures["drafted"]


def test_what_the_grammar_forces_is_drafted_and_counted(serve: Any) -> None:
    # Without masks: they draft within the grammar as well, and may draft all that it forces.
    choice, source = "this and nothing else whatsoever", "spaceserve_accepted_tokens_by_source_total{source=grammar}"
    with serve("--lookup", "only") as server, closing(Live(server)) as maskless:
        text = maskless.complete("x", max_tokens=60, temperature=0, structured_outputs={"choice": [choice]})
        assert text["choices"][0]["text"] == choice
        assert text["choices"][0]["finish_reason"] == "stop"
        assert maskless.metrics()[source] == text["spaceserve"]["accepted"] > 0


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
        for sampling_params in SAMPLING_PARAMS.values()
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


PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 3},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": PARAMETERS,
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "mark": {
        "type": "object",
        "properties": {"point": {"$ref": "#/$defs/point"}, "ok": {"type": "boolean"}},
        "required": ["point", "ok"],
        "additionalProperties": False,
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}},
                            "required": ["x"], "additionalProperties": False}},
    },
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How is the weather in Bern?"}],
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_completion_tokens": 120,
}


@pytest.fixture
def client(live: Any) -> Any:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def check(call: Any) -> None:
    """A call of one of the tools, with arguments by its schema."""
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_a_required_call_validates_and_is_the_same_with_drafts_and_in_a_stream(
    live: Any, client: Any, seed: int
) -> None:
    said = []
    for speculation in ("off", "auto", 3):
        extra = {"seed": seed, "temperature": 0.9, "model": live.model, "extra_body": {"speculation": speculation}}
        whole = client.chat.completions.create(**ASKED, **extra).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        (call,) = whole.message.tool_calls
        check(call)
        with client.chat.completions.stream(**ASKED, **extra) as stream:
            stream.until_done()
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        (again,) = streamed.message.tool_calls
        said += [(one.id, one.function.name, one.function.arguments) for one in (call, again)]
    assert len(set(said)) == 1


def test_each_of_several_choices_calls_and_a_named_tool_is_the_one_that_is_called(live: Any, client: Any) -> None:
    named = {**ASKED, "tool_choice": {"type": "function", "function": {"name": "mark"}}}
    whole = client.chat.completions.create(**named, model=live.model, n=3, seed=5, temperature=1)
    calls = [choice.message.tool_calls for choice in whole.choices]
    assert [[call.function.name for call in one] for one in calls] == [["mark"]] * 3
    for (call,) in calls:
        check(call)
    assert len({call.id for (call,) in calls}) == 3


def test_several_calls_are_several_calls(live: Any, client: Any) -> None:
    """Without a limit it calls until it ends or is cut off; all but a last cut one are valid."""
    found = 0
    for seed in range(2):
        asked = {**ASKED, "parallel_tool_calls": True, "max_completion_tokens": 200}
        choice = client.chat.completions.create(**asked, model=live.model, seed=seed, temperature=1).choices[0]
        calls = choice.message.tool_calls
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
            check(call)
        assert [call.id for call in calls] == list(dict.fromkeys(call.id for call in calls))
        found = max(found, len(calls))
    assert found > 1


def test_a_grammar_that_allows_any_text_beside_strict_calls_changes_no_text(live: Any, client: Any) -> None:
    said = set()
    for strict in (False, True):
        tools = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in TOOLS]
        asked = {**ASKED, "tools": tools, "tool_choice": "auto", "parallel_tool_calls": True}
        for speculation in ("off", "auto"):
            extra = {"seed": 2, "temperature": 0.7, "model": live.model, "extra_body": {"speculation": speculation}}
            choice = client.chat.completions.create(**{**asked, "max_completion_tokens": 40}, **extra).choices[0]
            said.add((choice.message.content, choice.finish_reason, str(choice.message.tool_calls)))
    assert len(said) == 1


def test_a_conversation_goes_on_with_what_a_call_brought(live: Any, client: Any) -> None:
    first = client.chat.completions.create(**ASKED, model=live.model, seed=1).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    messages = [*ASKED["messages"], first, result]
    answer = client.chat.completions.create(model=live.model, messages=messages, tools=TOOLS, max_tokens=8, seed=1)
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_responses_call_tools_and_hold_their_text_to_a_schema(live: Any, client: Any) -> None:
    tools = [
        {"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in SCHEMAS.items()
    ]
    asked: dict[str, Any] = {"model": live.model, "input": "How is the weather?", "max_output_tokens": 160}
    made = client.responses.create(
        **asked, tools=tools, tool_choice="required", parallel_tool_calls=False, extra_body={"seed": 3}
    )
    (call,) = made.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    form = {"format": {"type": "json_schema", "name": "weather", "schema": PARAMETERS}}
    with client.responses.stream(**asked, text=form, extra_body={"seed": 3}) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text
    jsonschema.validate(json.loads(text), PARAMETERS)


def test_the_embedded_model_chats_and_calls_by_a_template_of_its_own(steady: Any) -> None:
    with openai.OpenAI(base_url=steady.url + "/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
        answer = client.chat.completions.create(model=steady.model, messages=messages, max_tokens=64, seed=1)
        assert answer.choices[0].message.content
        called = client.chat.completions.create(**ASKED, model=steady.model, seed=1).choices[0]
        assert called.finish_reason == "tool_calls"
        check(called.message.tool_calls[0])
