"""OpenAI's `prediction`: sent to the worker, again after a loss, and counted in `usage`, whole or streamed."""

from typing import Any

import pytest
from doubles.router import always
from doubles.router.whole_router import Start

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
