"""A call is the same request as its twin over HTTP, and its events are the same answer."""

import json
from typing import Any

import grpc
import pytest
from doubles.router import always
from doubles.router.whole_router import Start
from space_proto import generate_pb2
from space_router.engine.request.request import Grammar, ValidRequest
from space_router.grpc_api.messages import PROMPT_IDS_PER_EVENT

PROMPT = "hello world"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
FIELDS: dict[str, Any] = {
    "model": "tiny", "max_tokens": 5, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [70, 71],
    "stop": ["ab", "cd"], "include_stop_str_in_output": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40,
    "min_p": 0.05, "typical_p": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
    "logit_bias": {70: 2.5, 71: -100.0}, "bad_words": ["bad"], "allowed_token_ids": [70, 71, 72], "seed": 2**64 - 1,
    "n": 3, "best_of": 2, "echo": True, "logprobs": 4, "prompt_logprobs": 2, "prediction": "hello there",
    "speculation": 1, "priority": -3, "timeout": 50.0, "request_id": "mine-1", "cache_salt": "salt",
    "add_special_tokens": False, "skip_special_tokens": False, "truncate_prompt_tokens": 2,
    "structured_outputs": {"choice": {"texts": ["yes", "no"]}},
}  # fmt: skip
BESIDE = {"prompt", "prompt_token_ids", "prompts", "messages", "suffix", "return_prompt_token_ids",
          "continuous_usage_stats", "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt",
          "continue_final_message", "chat_template_kwargs", "reasoning_effort", "enable_thinking",
          "thinking_token_budget"}  # fmt: skip
"""Fields that the other tests are about."""

SAME = {"", "model", "echo", "include_stop_str_in_output", "add_special_tokens", "skip_special_tokens"}
"""Fields that change how the answer is written, or nothing here; every other changes what the engine is asked."""


def as_json(field: str, value: Any) -> Any:
    if field == "logit_bias":
        return {str(key): entry for key, entry in value.items()}
    if field == "structured_outputs":
        return {"choice": value["choice"]["texts"]}
    return {"type": "content", "content": value} if field == "prediction" else value


def test_every_field_of_the_contract_is_tried_here() -> None:
    assert FIELDS.keys() | BESIDE == set(generate_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)


async def test_each_field_asks_the_engine_for_what_its_http_twin_asks(router: Any, seen: Any) -> None:
    plain: list[ValidRequest] = []
    for field, value in {"": None, **FIELDS}.items():
        given = {field: value} if field else {}
        await router.events(prompt=PROMPT, **given)
        called = seen.take(field)
        body = {key: as_json(key, entry) for key, entry in given.items()}
        answer = await router.http.post("/v1/completions", json={"prompt": PROMPT, **body})
        assert answer.status_code == 200, answer.text
        posted = seen.take(field)
        assert called == posted, field
        plain = plain or called
        assert (called == plain) == (field in SAME), field


async def test_a_conversation_asks_for_what_its_http_twin_asks(router: Any, seen: Any) -> None:
    fields = {"max_tokens": 7, "n": 2, "logprobs": 3, "temperature": 0.5, "stop": ["x"], "seed": 5}
    await router.events(messages=[generate_pb2.ChatMessage(**one) for one in CHAT], **fields)
    called = seen.take("seed")
    body = {**fields, "logprobs": True, "top_logprobs": 3, "messages": CHAT}
    await router.http.post("/v1/chat/completions", json=body)
    assert called == seen.take("seed")
    assert len(called) == 2


async def test_ids_and_several_prompts_are_taken_as_http_takes_them(router: Any, seen: Any) -> None:
    ids = [70, 71, 72]
    twins: list[tuple[dict[str, Any], Any]] = [
        ({"prompt_token_ids": ids}, ids),
        ({"prompts": [generate_pb2.Prompt(text="a"), generate_pb2.Prompt(text="bc")]}, ["a", "bc"]),
        ({"prompts": [generate_pb2.Prompt(text="a"), generate_pb2.Prompt(ids={"ids": ids})]}, ["a", ids]),
    ]
    for fields, prompt in twins:
        events = await router.events(n=2, max_tokens=3, return_prompt_token_ids=True, **fields)
        called = seen.take()
        await router.http.post("/v1/completions", json={"prompt": prompt, "n": 2, "max_tokens": 3})
        assert called == seen.take()
        reported = {event.index: tuple(event.prompt_token_ids) for event in events if event.prompt_token_ids}
        assert reported == dict(enumerate(request.prompt_ids for request in called))


ANSWERS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": PROMPT, "max_tokens": 30, "temperature": 0.0},
    "a seed": {"prompt": PROMPT, "max_tokens": 30, "seed": 7},
    "choices": {"prompt": PROMPT, "max_tokens": 20, "seed": 3, "n": 3},
    "a stop string": {"prompt": PROMPT, "max_tokens": 200, "seed": 7, "stop": ["a", "e", "!"]},
    "a stop id": {"prompt": PROMPT, "max_tokens": 200, "seed": 7, "stop_token_ids": [70, 80, 90]},
    "log-probabilities": {"prompt": PROMPT, "max_tokens": 20, "seed": 7, "logprobs": 3},
    "an echo": {"prompt": PROMPT, "max_tokens": 5, "seed": 7, "echo": True},
    "only an echo": {"prompt": PROMPT, "max_tokens": 0, "echo": True},
    "a prediction": {"prompt": PROMPT, "max_tokens": 20, "seed": 7, "prediction": "hello"},
    "until EOS": {"prompt": PROMPT, "max_tokens": 400, "seed": 9},
    "a conversation": {"messages": CHAT, "max_tokens": 20, "seed": 7},
    "choices of a conversation": {"messages": CHAT, "max_tokens": 20, "seed": 7, "n": 2, "logprobs": 2},
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_the_events_are_the_answer_that_http_streams(router: Any, name: str) -> None:
    fields = ANSWERS[name]
    await router.events(**fields)  # now the prompt is in the cache for both
    called = by_choice(await router.events(**fields))
    body = {key: as_json(key, value) for key, value in fields.items()}
    path = "/v1/completions"
    if "messages" in fields:
        path = "/v1/chat/completions"
        if "logprobs" in fields:
            body |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    streamed = await router.sse(path, return_token_ids=True, **body)
    for choice in called.values():  # here log-probabilities are one for each id, and there for each that has text
        if isinstance(choice, dict) and choice["finish"] == "stop" and choice["logprobs"]:
            choice["logprobs"].pop()
    assert called == by_choice_of_sse(streamed)


def by_choice(events: list[generate_pb2.GenerateEvent]) -> dict[Any, Any]:
    """What the events of a call say when joined."""
    choices: dict[Any, Any] = {}
    for event in events:
        one = choices.setdefault(event.index, {"text": "", "ids": [], "logprobs": [], "finish": None, "stop": None})
        assert one["finish"] is None, "nothing comes behind the end"
        one["text"] += event.text
        one["ids"] += event.token_ids
        one["logprobs"] += [(known.token, known.logprob) for known in event.logprobs]
        if event.finish_reason:
            name = generate_pb2.FinishReason.Name(event.finish_reason)
            one["finish"] = "length" if name == "FINISH_REASON_LENGTH" else "stop"
        if which := event.WhichOneof("stop_reason"):
            one["stop"] = getattr(event, which)
    usage, figures = events[-1].usage, events[-1].spaceserve
    choices["usage"] = [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.cached_tokens]
    choices["prediction"] = usage.accepted_prediction_tokens + usage.rejected_prediction_tokens
    choices["seed"] = figures.seed if "seed" in choices else None
    assert not any(event.HasField("usage") or event.HasField("spaceserve") for event in events[:-1])
    assert figures.steps or not usage.completion_tokens
    return choices


def by_choice_of_sse(events: list[dict[str, Any]]) -> dict[Any, Any]:
    """The same of the events of HTTP."""
    choices: dict[Any, Any] = {}
    for event in events:
        for choice in event["choices"]:
            one = choices.setdefault(
                choice["index"], {"text": "", "ids": [], "logprobs": [], "finish": None, "stop": None}
            )
            one["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            one["ids"] += choice["token_ids"]
            known = choice["logprobs"] or {}
            if "content" in known:
                one["logprobs"] += [(entry["token"], entry["logprob"]) for entry in known["content"]]
            elif known:
                one["logprobs"] += list(zip(known["tokens"], known["token_logprobs"], strict=True))
            one["finish"] = one["finish"] or choice["finish_reason"]
            one["stop"] = choice["stop_reason"] if choice["finish_reason"] else None
    usage = events[-1]["usage"]
    details = usage.get("completion_tokens_details", {})
    choices["usage"] = [usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"],
                        usage["prompt_tokens_details"]["cached_tokens"]]  # fmt: skip
    choices["prediction"] = sum(details.get(f"{kind}_prediction_tokens", 0) for kind in ("accepted", "rejected"))
    choices["seed"] = None
    return choices


async def test_there_is_one_event_for_each_step_and_choice(start: Start) -> None:
    async with start(accepts=always, draft_length=3) as router:
        events = await router.events(prompt=PROMPT, max_tokens=13, n=2, ignore_eos=True)
    for index in (0, 1):
        mine = [event for event in events if event.index == index]
        assert [len(event.token_ids) for event in mine] == [1, 4, 4, 4]
        assert [list(event.token_steps) for event in mine] == [[0], [1] * 4, [2] * 4, [3] * 4]
        assert [list(event.token_drafts) for event in mine] == [[False], *[[True] * 3 + [False]] * 3]
    assert (events[-1].spaceserve.steps, events[-1].spaceserve.tokens_per_step) == (6, 4.0)
    assert events[-1].spaceserve.system_fingerprint.startswith("fp_")
    assert {event.request_id for event in events} == {events[0].request_id}
    assert {event.model for event in events} == {"tiny"}


async def test_half_a_character_is_never_sent(start: Start) -> None:
    async with start("é😀", accepts=always, draft_length=1) as router:
        events = await router.events(prompt=PROMPT, max_tokens=12)
    assert "".join(event.text for event in events) == "é😀é😀"
    assert all("\ufffd" not in event.text for event in events)


async def test_each_log_probability_says_id_bytes_place_and_alternatives(router: Any) -> None:
    events = await router.events(prompt=PROMPT, max_tokens=9, logprobs=2, seed=1, echo=True)
    text = "".join(event.text for event in events)
    known = [one for event in events for one in event.logprobs]
    assert [one.id for one in known] == [id_ for event in events for id_ in event.token_ids]
    for one in known:
        assert text[one.text_offset :].encode().startswith(one.bytes)
        assert one.bytes.decode() == one.token
        assert len(one.top) == 2 or len(one.top) == 1
        assert all(other.bytes.decode() == other.token for other in one.top)
    assert len(known) == 9


async def test_log_probabilities_of_a_long_prompt_come_with_its_first_choice_in_pieces(start: Start) -> None:
    ids = [70 + number % 40 for number in range(700)]
    async with start(window=2048, block_size=16) as router:
        events = await router.events(prompt_token_ids=ids, prompt_logprobs=2, n=2, max_tokens=3, seed=1)
        answer = await router.http.post(
            "/v1/completions", json={"prompt": ids, "prompt_logprobs": 2, "n": 2, "max_tokens": 3, "seed": 1}
        )
    known = [one for event in events for one in event.prompt_logprobs]
    assert [one.id for one in known] == ids[1:]
    assert {event.index for event in events if event.prompt_logprobs} == {0}
    assert max(len(event.prompt_logprobs) for event in events) <= PROMPT_IDS_PER_EVENT
    first, *rest = answer.json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [one.logprob for one in known] == [
        entry[str(id_)]["logprob"] for id_, entry in zip(ids[1:], rest, strict=True)
    ]


async def test_the_best_of_several_come_at_the_end_as_http_ranks_them(router: Any) -> None:
    wanted = {"prompt": PROMPT, "n": 2, "best_of": 5, "max_tokens": 12, "seed": 4}
    events = await router.events(**wanted, prompt_logprobs=0, logprobs=0)
    answer = await router.http.post("/v1/completions", json=wanted)
    texts = ["".join(event.text for event in events if event.index == index) for index in (0, 1)]
    assert texts == [choice["text"] for choice in answer.json()["choices"]]
    assert {event.index for event in events} == {0, 1}
    assert events[-1].usage.completion_tokens == answer.json()["usage"]["completion_tokens"]
    known = [(event.index, one.id) for event in events for one in event.prompt_logprobs]
    assert [index for index, _ in known] == [0] * (events[-1].usage.prompt_tokens - 1)
    assert not any(event.logprobs for event in await router.events(**wanted)), "ranking asks for them, the client not"


async def test_usage_comes_with_every_event_where_it_is_asked_for(router: Any) -> None:
    events = await router.events(prompt=PROMPT, max_tokens=8, continuous_usage_stats=True)
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == sum(len(event.token_ids) for event in events)


async def test_the_request_id_comes_before_the_first_event(router: Any) -> None:
    call = router.stub.Generate(generate_pb2.GenerateRequest(prompt=PROMPT, request_id="mine-7"))
    assert dict(await call.initial_metadata())["x-request-id"] == "mine-7"
    assert {event.request_id async for event in call} == {"mine-7"}


async def test_an_adapter_is_asked_for_by_its_name_and_named_in_the_events(start: Start) -> None:
    async with start(adapters=("code",)) as router:
        events = await router.events(prompt=PROMPT, model="code")
        assert {event.model for event in events} == {"code"}
        assert router.worker.figures.num_admits_by_adapter == {"code": 1}
        info = await router.stub.Info(generate_pb2.InfoRequest())
        assert (info.model, list(info.adapters)) == ("tiny", ["code"])


async def test_text_and_conversations_become_the_ids_of_their_prompts_and_ids_become_text(
    router: Any, seen: Any
) -> None:
    messages = [generate_pb2.ChatMessage(**one) for one in CHAT]
    for given in ({"text": PROMPT}, {"messages": messages}):
        reply = await router.stub.Tokenize(generate_pb2.TokenizeRequest(**given))
        await router.events(**{"prompt" if key == "text" else key: value for key, value in given.items()})
        assert tuple(reply.ids) == seen.pop().prompt_ids
        assert reply.max_model_len == 512
    reply = await router.stub.Tokenize(generate_pb2.TokenizeRequest(text=PROMPT))
    text = await router.stub.Detokenize(generate_pb2.DetokenizeRequest(ids=reply.ids))
    assert text.text == PROMPT


async def test_info_says_what_is_served_and_within_which_limits(router: Any) -> None:
    info = await router.stub.Info(generate_pb2.InfoRequest())
    body = (await router.http.get("/info")).json()
    assert info.ready
    assert info.chat
    assert (info.model, info.version) == (body["model_id"], body["version"])
    assert (info.max_model_len, info.vocab_size) == (body["max_total_tokens"], body["vocab_size"])
    assert (info.max_choices, info.max_stop_strings) == (body["max_best_of"], body["max_stop_sequences"])
    assert info.max_draft_length == body["speculation"]["max_request"]


ROOM = {"window": 4096, "num_blocks": 2048}
USER = {"role": "user", "content": "How is the weather?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "It rains.", "parameters": json.dumps(PARAMETERS)}
TOOLS = [WEATHER, {"name": "now", "strict": True}]
HTTP_TOOLS = [
    {"type": "function", "function": {**WEATHER, "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
HISTORY = [
    USER,
    {"role": "assistant", "tool_calls": [{"id": "call_1", "name": "now", "arguments": "{}"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
]
HTTP_HISTORY = [
    USER,
    {
        "role": "assistant",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    },
    HISTORY[2],
]
REQUIRED = "TOOL_MODE_REQUIRED"
TWINS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tools": TOOLS}, {"tools": HTTP_TOOLS}),
    ({"tools": TOOLS, "tool_choice": {"mode": REQUIRED}}, {"tools": HTTP_TOOLS, "tool_choice": "required"}),
    ({"tools": TOOLS, "tool_choice": {"mode": "TOOL_MODE_NONE"}}, {"tools": HTTP_TOOLS, "tool_choice": "none"}),
    (
        {"tools": TOOLS, "tool_choice": {"mode": REQUIRED, "names": ["now"]}},
        {
            "tools": HTTP_TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]},
            },
        },
    ),
    ({"tools": TOOLS, "parallel_tool_calls": False}, {"tools": HTTP_TOOLS, "parallel_tool_calls": False}),
    ({"messages": HISTORY}, {"messages": HTTP_HISTORY}),
    ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    (
        {"messages": [USER, {"role": "assistant", "content": "It"}], "continue_final_message": True},
        {"messages": [USER, {"role": "assistant", "content": "It"}], "continue_final_message": True},
    ),
    ({"structured_outputs": {"json": '{"type": "array"}'}}, {"structured_outputs": {"json": {"type": "array"}}}),
    ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"structured_outputs": {"grammar": 'start: "a"'}}),
]


async def test_each_field_of_a_conversation_asks_for_what_its_http_twin_asks(start: Start, seen: Any) -> None:
    async with start(**ROOM) as router:
        await router.events(messages=[USER], max_tokens=2)
        plain = seen.take()
        for fields, body in TWINS:
            await router.events(**{"messages": [USER], "max_tokens": 2, **fields})
            called = seen.take()
            answer = await router.http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 2, **body})
            assert answer.status_code == 200, answer.text
            assert called == seen.take(), fields
            assert called != plain or fields.get("tool_choice") == {"mode": "TOOL_MODE_NONE"}, fields


async def test_variables_that_the_template_does_not_know_have_no_effect_as_over_http(router: Any, seen: Any) -> None:
    await router.events(messages=[USER], max_tokens=2)
    plain = seen.take()[0].prompt_ids
    for fields, body in (
        ({"chat_template_kwargs": '{"mood": "good"}'}, {"chat_template_kwargs": {"mood": "good"}}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
    ):
        await router.events(messages=[USER], max_tokens=2, **fields)
        answer = await router.http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 2, **body})
        assert "has no effect" in answer.headers["warning"]
        assert [request.prompt_ids for request in seen.take()] == [plain, plain]


THINKS = (
    "{% for m in messages %}{{ m.role }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
)


async def test_reasoning_is_apart_from_the_text_and_goes_in_as_over_http(start: Start, seen: Any) -> None:
    async with start("One.</think>Two.<|endoftext|>", chat=THINKS, **ROOM) as router:
        events = await router.events(messages=[USER])
        assert "".join(event.reasoning_content for event in events) == "One."
        assert "".join(event.text for event in events) == "Two."
        body = {"messages": [USER], "stream": False}
        details = (await router.http.post("/v1/chat/completions", json=body)).json()["usage"]
        assert events[-1].usage.reasoning_tokens == details["completion_tokens_details"]["reasoning_tokens"] > 0
        off = await router.events(messages=[USER], enable_thinking=False)
        assert "".join(event.text for event in off) == "One.</think>Two."
        seen.take()
        said = {"role": "assistant", "content": "b", "reasoning_content": "a"}
        await router.events(messages=[USER, said], max_tokens=1)
        await router.http.post("/v1/chat/completions", json={"messages": [USER, said], "max_tokens": 1})
        called, posted = seen.take()
        assert called.prompt_ids == posted.prompt_ids
        error = await router.refusal(messages=[USER], thinking_token_budget=3)
        assert (error.code(), "one token" in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_structured_output_reaches_the_worker_as_its_grammar(router: Any, seen: Any) -> None:
    await router.events(prompt="x", structured_outputs={"regex": "[0-9]+"}, max_tokens=2)
    assert [request.sampling.grammar for request in seen] == [Grammar("regex", "[0-9]+")]


@pytest.mark.parametrize("reply", [f"Let me see.{CALL}<|endoftext|>", "It rains.<|endoftext|>", CALL * 2])
async def test_calls_are_streamed_apart_from_the_text_as_over_http(start: Start, reply: str) -> None:
    async with start(reply, accepts=always, **ROOM) as router:
        wanted = {"max_tokens": 120, "seed": 3, "ignore_eos": False}
        events = await router.events(messages=[USER], tools=TOOLS[:1], logprobs=0, **wanted)
        reported = await router.sse("/v1/chat/completions", messages=[USER], tools=HTTP_TOOLS[:1], **wanted)
    choices = [choice for event in reported for choice in event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(event.text for event in events) == "".join(delta.get("content") or "" for delta in deltas)
    theirs = [
        (piece["index"], piece.get("id", ""), piece["function"].get("name", ""), piece["function"]["arguments"])
        for delta in deltas
        for piece in delta.get("tool_calls", ())
    ]
    ours = [(piece.index, piece.id, piece.name, piece.arguments) for event in events for piece in event.tool_calls]
    assert calls(ours) == calls(theirs)
    assert bool(ours) == ("tool_call" in reply)
    name = generate_pb2.FinishReason.Name(events[-1].finish_reason).removeprefix("FINISH_REASON_").lower()
    assert choices[-1]["finish_reason"] == {"eos": "stop"}.get(name, name)
    assert sum(len(event.token_ids) for event in events) == reported[-1]["usage"]["completion_tokens"]
    assert all(len(event.logprobs) == len(event.token_ids) for event in events)


def calls(pieces: list[tuple[int, str, str, str]]) -> dict[int, tuple[str, str, str]]:
    """Calls that pieces add up to."""
    whole: dict[int, tuple[str, str, str]] = {}
    for index, id_, name, arguments in pieces:
        before = whole.get(index, ("", "", ""))
        whole[index] = (before[0] + id_, before[1] + name, before[2] + arguments)
    return whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs"),
        ({"tools": [{"name": "f", "parameters": "no JSON"}]}, "tools"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"tools": TOOLS, "tool_choice": {"mode": "TOOL_MODE_NONE", "names": ["now"]}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"names": ["dance"]}}, "tool_choice"),
    ],
)
async def test_what_is_no_json_or_no_tool_is_refused_by_name(router: Any, fields: dict[str, Any], param: str) -> None:
    error = await router.refusal(messages=[USER], **fields)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())["error-param"] == param
    assert param in error.details()
