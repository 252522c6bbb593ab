"""What a stream tells on the way: steps and drafts, accepted predictions, log-probabilities of prompts."""

from itertools import groupby
from typing import Any

import pytest
from doubles.router import always, listed
from doubles.router.whole_router import Start
from space_router.config import ServeConfig

MESSAGES = [{"role": "user", "content": "Say"}]
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Say"}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
]


async def choices(router: Any, path: str, **body: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every event that has a choice: the choice, and the event's `spaceserve` object."""
    events = await router.events(path, stream_options={"include_steps": True}, **body)
    return [(event["choices"][0], event["spaceserve"]) for event in events if event["choices"]]


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


@pytest.mark.parametrize(("path", "asked"), WAYS)
async def test_a_step_is_its_drafts_that_came_true_and_then_its_own_token(
    start: Start, path: str, asked: dict[str, Any]
) -> None:
    async with start("abcdefghij", accepts=listed([2, 0, 3])) as router:
        found = await choices(router, path, **asked, max_tokens=10)
        tokens = [token for _, steps in found for token in steps["tokens"]]
        assert [(token["text"], token["step"], token["draft"]) for token in tokens] == [
            ("a", 0, False),
            ("b", 1, True), ("c", 1, True), ("d", 1, False),
            ("e", 2, False),
            ("f", 3, True), ("g", 3, True), ("h", 3, True), ("i", 3, False),
            ("j", 4, False),
        ]  # fmt: skip
        assert found[-1][1]["drafted"] == sum(steps["verified"] for _, steps in found)
        assert found[-1][1]["accepted"] == sum(token["draft"] for token in tokens)


async def test_a_run_that_is_cut_at_a_stop_string_ends_with_a_draft(start: Start) -> None:
    async with start("abcdefghij", accepts=listed([3])) as router:
        found = await choices(router, "/v1/completions", prompt="x", max_tokens=9, stop="d")
        assert [(token["text"], token["draft"]) for token in found[-1][1]["tokens"]] == [("b", True), ("c", True)]


@pytest.mark.parametrize("lengths", [[0], [1], [2, 0], [3]])
@pytest.mark.parametrize(("path", "asked"), WAYS)
async def test_the_texts_of_the_tokens_join_to_the_events_text_whatever_is_held_back(
    start: Start, path: str, asked: dict[str, Any], lengths: list[int]
) -> None:
    reply = "né 🙂 STOR hello 漢 STOP never"
    async with start(reply, accepts=listed(lengths)) as router:
        found = await choices(router, path, **asked, max_tokens=60, stop="STOP")
        for choice, steps in found:
            joined = "".join(token["text"] for token in steps["tokens"])
            assert joined == text_of(choice) or not steps["tokens"]
        assert "".join(text_of(choice) for choice, _ in found) == reply.partition("STOP")[0]
        numbers = [token["step"] for _, steps in found for token in steps["tokens"]]
        assert numbers == sorted(numbers)


async def test_steps_are_told_for_each_choice_and_the_counts_for_all(start: Start) -> None:
    async with start(accepts=listed([1, 2, 0])) as router:
        found = await choices(router, "/v1/completions", prompt="x", max_tokens=9, n=2, seed=4, ignore_eos=True)
        for index in (0, 1):
            mine = [steps for choice, steps in found if choice["index"] == index]
            tokens = [token for steps in mine for token in steps["tokens"]]
            assert len(tokens) == 9
            for _, step in groupby(tokens, key=lambda token: token["step"]):
                drafts = [token["draft"] for token in step]
                assert drafts[:-1] == [True] * (len(drafts) - 1)
        assert found[-1][1]["drafted"] == sum(steps["verified"] for _, steps in found)


async def test_nothing_is_said_of_steps_where_nobody_asked(router: Any) -> None:
    events = await router.events("/v1/completions", prompt="x", max_tokens=4)
    assert all("tokens" not in event.get("spaceserve", {}) for event in events)


ANSWER = "abcdefghijklmnopqrstuvwxyz"
"""A token is a character here; the scripted worker counts those that stand at the same place in both."""

USER = [{"role": "user", "content": "Say"}]


def predicted(text: str) -> dict[str, Any]:
    return {"type": "content", "content": text}


def counts(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [(ANSWER, (8, 18)), ("abcdef", (6, 0)), ("abcdezzz", (5, 3)), ("zbcd", (3, 1)), ("zzz", (0, 3)), ("", (0, 0))],
)
async def test_tokens_of_the_prediction_that_appeared_are_accepted_the_others_rejected(
    start: Start, prediction: str, expected: tuple[int, int]
) -> None:
    async with start(ANSWER, accepts=always) as router:
        answer = await router.complete(prompt="Say", max_tokens=8, prediction=predicted(prediction))
        assert answer["choices"][0]["text"] == ANSWER[:8]
        assert counts(answer["usage"]) == expected
        assert answer["usage"]["completion_tokens"] == 8


async def test_without_a_prediction_both_are_0_as_openai_says(start: Start) -> None:
    async with start(ANSWER) as router:
        answer = await router.complete(prompt="Say", max_tokens=8)
        assert counts(answer["usage"]) == (0, 0)


async def test_parts_of_a_prediction_are_one_text_and_chat_counts_it_too(start: Start) -> None:
    parts = [{"type": "text", "text": ANSWER[:5]}, {"type": "text", "text": ANSWER[5:12]}]
    async with start(ANSWER) as router:
        body = {"messages": USER, "max_tokens": 20, "prediction": {"type": "content", "content": parts}}
        answer = (await router.post("/v1/chat/completions", **body)).json()
        assert counts(answer["usage"]) == (12, 0)


async def test_a_stream_counts_at_its_end_and_on_the_way(start: Start) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with start(ANSWER) as router:
        body = {"messages": USER, "max_tokens": 20, "prediction": predicted(ANSWER)}
        events = await router.events("/v1/chat/completions", stream_options=options, **body)
        found = [counts(event["usage"]) for event in events]
        assert found == sorted(found)
        assert found[-1] == (20, 6)
        assert found[0][0] >= 1


async def test_what_a_stop_string_cuts_off_is_not_counted(start: Start) -> None:
    async with start(ANSWER, accepts=always, draft_length=8) as router:
        answer = await router.complete(prompt="Say", max_tokens=20, stop="fg", prediction=predicted(ANSWER))
        assert answer["choices"][0]["text"] == "abcde"
        assert counts(answer["usage"]) == (5, len(ANSWER) - 5)


async def test_each_choice_has_or_has_not_the_prediction(start: Start) -> None:
    async with start(ANSWER) as router:
        answer = await router.complete(prompt="Say", max_tokens=6, n=2, prediction=predicted(ANSWER[:9]))
        assert counts(answer["usage"]) == (12, 6)


async def test_a_worker_that_is_lost_costs_no_prediction(start: Start) -> None:
    async with start(ANSWER, die_after_steps=4) as router:
        answer = await router.complete(prompt="Say", max_tokens=20, prediction=predicted(ANSWER))
        assert router.worker.num_lives == 2
        assert answer["choices"][0]["text"] == ANSWER[:20]
        assert counts(answer["usage"]) == (20, len(ANSWER) - 20)


async def test_drafts_are_counted_by_who_proposed_them_from_the_start(start: Start) -> None:
    async with start(ANSWER, accepts=always) as router:
        for source in ("masks", "lookup", "prediction"):
            assert router.value("spaceserve_drafted_tokens_by_source_total", source=source) == 0
            assert router.value("spaceserve_accepted_tokens_by_source_total", source=source) == 0
        await router.complete(prompt="Say", max_tokens=20)
        drafted = router.value("spaceserve_drafted_tokens_by_source_total", source="masks")
        assert drafted == router.value("spaceserve_drafted_tokens_total") > 0


LONG = "hello world, this prompt is long enough for several blocks and several steps of prefill. " * 2
SMALL_STEPS = ServeConfig(max_prefill_rows=12)  # the prompt comes in many pieces
CHAT = [{"role": "user", "content": LONG}]


def joined(stream: list[Any], index: int) -> dict[str, Any]:
    """All pieces of one choice as one: texts and lists one after the other, the last reasons."""
    whole: dict[str, Any] = {}
    for choice in (event["choices"][0] for event in stream if event["choices"]):
        if choice["index"] != index:
            continue
        for key, value in choice.items():
            if key in ("text", "prompt_logprobs", "token_ids"):
                whole[key] = whole.get(key, type(value)()) + value
            elif key == "logprobs" and value is not None:
                old = whole.get(key) or {name: [] for name in value}
                whole[key] = {name: old[name] + value[name] for name in value}
            else:
                whole[key] = value
    return whole


@pytest.mark.parametrize("config", [None, SMALL_STEPS], ids=["one step", "many steps"])
@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
        {"prompt_logprobs": 2},
        {"echo": True, "prompt_logprobs": 1},
        {"echo": True, "logprobs": 1, "prompt_logprobs": 3, "return_token_ids": True},
        {"echo": True, "logprobs": 1, "n": 3},
        {"prompt_logprobs": 1, "n": 2, "prompt": [LONG, "é<|im_start|>b", "a"]},
        {"echo": True, "logprobs": 1, "prompt": ["a", LONG, "é😀"], "n": 2},
    ],
)
async def test_a_stream_has_what_the_whole_answer_has(
    start: Start, config: ServeConfig | None, fields: dict[str, Any]
) -> None:
    async with start(config=config) as router:
        asked = {"prompt": LONG, "max_tokens": 6, "seed": 1, "ignore_eos": True, **fields}
        whole = await router.complete(**asked)
        stream = await router.events("/v1/completions", **asked)
        assert len(whole["choices"]) == len({event["choices"][0]["index"] for event in stream})
        for choice in whole["choices"]:
            assert joined(stream, choice["index"]) == choice
        assert [event for event in stream if "spaceserve" in event] == stream[-1:]


@pytest.mark.parametrize("config", [None, SMALL_STEPS], ids=["one step", "many steps"])
async def test_a_prompt_may_fill_the_window_where_no_answer_is_wanted(start: Start, config: Any) -> None:
    prompt = "abcdefg" * 9 + "é"  # two bytes, two tokens: the last is half a character
    async with start(config=config, window=65) as filled, start(config=config, window=99) as roomy:
        for fields in ({"logprobs": 2}, {"logprobs": 2, "n": 2, "prompt_logprobs": 1, "best_of": 2}, {}, {"stop": "x"}):
            asked = {"prompt": prompt, "max_tokens": 0, "echo": True, "seed": 1, "return_token_ids": True, **fields}
            whole = await filled.complete(**asked)
            wanted = await roomy.complete(**asked)
            assert whole["choices"] == wanted["choices"]
            same = {"prompt_tokens": 65, "completion_tokens": 0}
            assert whole["usage"] | same == whole["usage"]
            stream = await filled.events("/v1/completions", **asked)
            for choice in whole["choices"]:
                assert joined(stream, choice["index"]) == choice
        for fields in ({"max_tokens": 1}, {"max_tokens": 0, "prompt": prompt + "!"}):
            beyond = await filled.post("/v1/completions", **{"prompt": prompt, "echo": True, **fields})
            assert beyond.json()["error"]["code"] == "context_length_exceeded"


async def test_tokens_of_an_echoed_prompt_come_with_their_text_as_it_is_computed(start: Start) -> None:
    async with start("yes", config=SMALL_STEPS) as router:
        stream = await router.events("/v1/completions", prompt=LONG, max_tokens=2, echo=True, logprobs=0)
        assert len(stream) > 10
        length = 0
        for choice in (event["choices"][0] for event in stream):
            offsets = choice["logprobs"]["text_offset"]
            assert all(length <= offset < length + len(choice["text"]) for offset in offsets)
            length += len(choice["text"])
        assert length == len(LONG) + 2


async def test_chat_streams_them_too(start: Start) -> None:
    async with start("yes", config=SMALL_STEPS) as router:
        asked = {"messages": CHAT, "max_tokens": 3, "prompt_logprobs": 1, "n": 2, "seed": 1}
        whole = (await router.post("/v1/chat/completions", **asked)).json()
        stream = await router.events("/v1/chat/completions", **asked)
        for choice in whole["choices"]:
            assert len(choice["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
            assert choice["prompt_logprobs"][0] is None
            assert joined(stream, choice["index"])["prompt_logprobs"] == choice["prompt_logprobs"]
        first = [event["choices"][0]["delta"].get("role") for event in stream]
        assert first.count("assistant") == 2


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}])
async def test_they_do_not_read_the_prefix_cache_and_others_read_what_they_computed(
    start: Start, fields: dict[str, Any]
) -> None:
    async with start() as router:
        asked = {"prompt": LONG, "max_tokens": 4, "seed": 2, "ignore_eos": True}

        async def cached(**fields: Any) -> tuple[int, Any]:
            answer = await router.complete(**asked, **fields)
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"]

        first = await cached(**fields)  # into an empty cache
        assert first[0] == 0
        num_cached, plain = await cached()  # what it computed can be shared
        assert num_cached > 100
        assert plain[0]["text"] == first[1][0]["text"].removeprefix(LONG)
        assert await cached(**fields) == first  # with everything in the cache
        assert await cached() == (num_cached, plain)


async def test_other_choices_share_the_blocks_of_the_one_that_computes_them(start: Start) -> None:
    async with start() as router:
        await router.complete(prompt=LONG, max_tokens=2, prompt_logprobs=0, n=4)
        hits = router.value("spaceserve_prefix_cache_hit_tokens_total")
        assert hits >= 3 * 100


@pytest.mark.parametrize("stream", [False, True])
async def test_best_of_has_the_prompts_of_the_choice_that_computed_them(start: Start, stream: bool) -> None:
    async with start() as router:
        asked = {"prompt": LONG, "max_tokens": 4, "best_of": 3, "seed": 1, "echo": True, "logprobs": 1}
        answer = await router.post("/v1/completions", **asked, stream=stream)
        if stream:  # the best is known at the end
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")
            return
        alone = await router.complete(**asked | {"best_of": 1})
        num_prompt = alone["usage"]["prompt_tokens"]
        found, expected = (one["choices"][0]["logprobs"] for one in (answer.json(), alone))
        for name in found:
            assert found[name][:num_prompt] == expected[name][:num_prompt]


@pytest.mark.parametrize("lengths", [[0], [2, 0]])
@pytest.mark.parametrize(("path", "asked"), WAYS)
async def test_no_event_is_sent_for_tokens_that_are_hidden_and_the_next_one_has_them(
    start: Start, path: str, asked: dict[str, Any], lengths: list[int]
) -> None:
    async with start("ab<|im_start|><|im_start|>c<|im_start|>", accepts=listed(lengths)) as router:
        logprobs = {"logprobs": True} if "messages" in asked else {"logprobs": 1}
        asked = {**asked, **logprobs, "max_tokens": 6, "return_token_ids": True, "temperature": 0}
        whole = (await router.post(path, **asked)).json()
        options = {"include_steps": True, "continuous_usage_stats": True}
        events = await router.events(path, **asked, stream_options=options)
        found = [event["choices"][0] for event in events]
        begun = found[1:] if "messages" in asked else found
        assert all(text_of(choice) for choice in begun[:-1])
        assert "".join(map(text_of, found)) == "abc"
        ids = [id_ for choice in found for id_ in choice["token_ids"]]
        assert ids == whole["choices"][0]["token_ids"]
        assert len(ids) == 6
        told = [token["text"] for event in events for token in event["spaceserve"]["tokens"]]
        assert told == ["a", "b", "", "", "c", ""]
        assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 6
        names = [one for choice in found for one in list_of(choice["logprobs"])]
        assert names == list_of(whole["choices"][0]["logprobs"])
        expected = ["a", "b", "<|im_start|>", "<|im_start|>", "c", "<|im_start|>"]
        assert [one if isinstance(one, str) else one["token"] for one in names] == expected


def list_of(logprobs: dict[str, Any]) -> list[Any]:
    found: list[Any] = logprobs["content"] if "content" in logprobs else logprobs["tokens"]
    return found
