"""`suffix`: the model is asked for the middle where its tokenizer has words for that, and refused elsewhere."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from doubles.router import FixedReply, ScriptedWorker
from doubles.router.whole_router import Start
from doubles.tokenizers import VOCAB_SIZE, byte_level
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken

NAMES = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")
PREFIX, SUFFIX, MIDDLE, END = range(VOCAB_SIZE, VOCAB_SIZE + 4)


def tokenizer() -> Tokenizer:
    inner = byte_level()
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    return Tokenizer(inner, {"bos_token": "<|endoftext|>", "add_bos_token": True})


TOKENIZER = tokenizer()


def filling(start: Start, reply: str = "mid") -> AbstractAsyncContextManager[Any]:
    """A router in front of a worker whose checkpoint fills in the middle."""
    return start(language=FixedReply(ids(reply)), tokenizer=TOKENIZER, vocab_size=VOCAB_SIZE + 4)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


async def test_prefix_and_suffix_become_one_prompt_behind_the_first_token(start: Start) -> None:
    async with filling(start) as router:
        asked = {"prompt": "def f(", "suffix": "):\n", "max_tokens": 3, "return_token_ids": True}
        answer = await router.complete(**asked)
        expected = [TOKENIZER.bos_id, PREFIX, *ids("def f("), SUFFIX, *ids("):\n"), MIDDLE]
        assert answer["choices"][0]["prompt_token_ids"] == expected
        assert answer["choices"][0]["text"] == "mid"
        assert answer["usage"]["prompt_tokens"] == len(expected)


async def test_prompts_may_be_several_ids_or_empty_and_are_echoed_alone(start: Start) -> None:
    async with filling(start) as router:
        asked = {"suffix": "z", "max_tokens": 1, "return_token_ids": True, "add_special_tokens": False, "echo": True}
        answer = await router.complete(prompt=["ab", "c", ""], **asked)
        shown = [(choice["prompt_token_ids"], choice["text"]) for choice in answer["choices"]]
        assert shown == [
            ([PREFIX, *ids("ab"), SUFFIX, *ids("z"), MIDDLE], "abm"),
            ([PREFIX, *ids("c"), SUFFIX, *ids("z"), MIDDLE], "cm"),
            ([PREFIX, SUFFIX, *ids("z"), MIDDLE], "m"),
        ]
        answer = await router.complete(prompt=[TOKENIZER.bos_id, 70], **asked)
        assert answer["choices"][0]["prompt_token_ids"] == [TOKENIZER.bos_id, PREFIX, 70, SUFFIX, *ids("z"), MIDDLE]


async def test_what_the_family_writes_behind_the_middle_is_an_eos(start: Start) -> None:
    async with filling(start, "mid<file_sep>more") as router:
        choice = (await router.complete(prompt="a", suffix="b", max_tokens=9))["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("mid", "stop", None)
        plain = (await router.complete(prompt="a", max_tokens=5))["choices"][0]
        assert (plain["text"], plain["finish_reason"]) == ("midm", "length")  # it is skipped, and ends nothing
        going = await router.complete(prompt="a", suffix="b", max_tokens=5, ignore_eos=True)
        assert going["choices"][0]["text"] == "midm"


async def test_truncation_takes_from_the_front_of_the_prefix(start: Start) -> None:
    async with filling(start) as router:
        asked = {"prompt": "abcdef", "suffix": "xy", "max_tokens": 1, "return_token_ids": True}
        answer = await router.complete(**asked, truncate_prompt_tokens=7)
        assert answer["choices"][0]["prompt_token_ids"] == [PREFIX, *ids("ef"), SUFFIX, *ids("xy"), MIDDLE]
        refused = await router.post("/v1/completions", **asked, truncate_prompt_tokens=4)
        assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("suffix", [None, ""])
async def test_an_empty_suffix_is_none(start: Start, suffix: str | None) -> None:
    for router_of in (filling(start), start("mid")):
        async with router_of as router:
            answer = await router.complete(prompt="ab", suffix=suffix, max_tokens=1, return_token_ids=True)
            assert PREFIX not in answer["choices"][0]["prompt_token_ids"]


async def test_where_the_tokenizer_has_no_words_for_it_it_is_refused_by_name(router: Any) -> None:
    error = (await router.post("/v1/completions", prompt="a", suffix="b")).json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert "fill-in-the-middle" in error["message"]
    assert isinstance(router.worker, ScriptedWorker)
    assert router.worker.figures.num_steps == 0


async def test_logprobs_of_a_prompt_in_another_order_are_not_echoed(start: Start) -> None:
    async with filling(start) as router:
        asked = {"prompt": "a", "suffix": "b", "echo": True, "logprobs": 0}
        assert (await router.post("/v1/completions", **asked)).json()["error"]["param"] == "echo"
        mask = await router.post("/v1/completions", prompt="a", suffix="<|mask_1|>")
        assert mask.json()["error"]["param"] == "suffix"
