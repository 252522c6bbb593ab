"""`stream_options.include_steps`: each event says which tokens it has, of which step, and which of them were drafts."""

from itertools import groupby
from typing import Any

import pytest
from doubles.router import listed
from doubles.router.whole_router import Start

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
