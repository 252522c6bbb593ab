"""Log-probabilities over HTTP are transformers': of answer, alternatives and prompt, in both of OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from space_router.text.tokenizer import Tokenizer
from transformers import AutoModelForCausalLM

NEAR = 1e-4
PROMPT = "def area(width, height):\n    return"
LAWS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 4, "top_p": 0.9, "frequency_penalty": 0.5},  # the logits stay raw all the same
]
NUM_TOP = 5


class Oracle:
    """The checkpoint under stock transformers."""

    def __init__(self, folder: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model = model.eval()
        self.tokenizer = Tokenizer.load(folder)
        self._ids: dict[str, list[int]] = {}  # by text: several ids may have the same
        for id_ in range(model.config.vocab_size):
            self._ids.setdefault(self.tokenizer.token_text(id_), []).append(id_)

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids) - 1, V]: row i is about id i+1."""
        logits: torch.Tensor = self._model(torch.tensor([list(ids)]), use_cache=False).logits[0, :-1]
        return torch.log_softmax(logits, dim=1)

    def check(self, row: torch.Tensor, id_: int, logprob: float, top: dict[str, float]) -> None:
        """A token's log-probability and its alternatives, which are the most probable ones; others may stand beside."""
        assert logprob == pytest.approx(float(row[id_]), abs=NEAR)
        assert top[self.tokenizer.token_text(id_)] == pytest.approx(logprob, abs=0) or self._is_shared(id_)
        best = torch.topk(row, NUM_TOP)
        values = sorted(top.values(), reverse=True)
        texts = {self.tokenizer.token_text(int(one)) for one in best.indices}
        if len(texts) == NUM_TOP:
            assert values[:NUM_TOP] == pytest.approx(best.values.tolist(), abs=NEAR)
            assert len(top) in (NUM_TOP, NUM_TOP + 1)
        for text, value in top.items():
            assert any(value == pytest.approx(float(row[one]), abs=NEAR) for one in self._ids[text]), text

    def _is_shared(self, id_: int) -> bool:
        return len(self._ids[self.tokenizer.token_text(id_)]) > 1


@pytest.fixture(scope="module", params=["small", "steady"])
def served(request: pytest.FixtureRequest) -> tuple[Any, Oracle]:
    """A server that drafts, of a tiny checkpoint or of the embedded model, and the oracle of its model."""
    live = request.getfixturevalue(request.param)
    if request.param == "small":
        return live, Oracle(request.getfixturevalue("checkpoint"))
    with resources.as_file(resources.files("space_demo")) as folder:
        return live, Oracle(folder)


def prompts(oracle: Oracle) -> list[str | list[int]]:
    """A text, its ids, and ids that are nobody's text."""
    return [PROMPT, oracle.tokenizer.encode(PROMPT), [65, 20, 33, 97, 20, 33, 97, 20]]


def ways() -> Iterator[dict[str, Any]]:
    for sampling_params in LAWS:
        for speculation in ("off", "auto"):
            yield {"speculation": speculation, **sampling_params}


def test_completions_tell_transformers_logprobs_of_prompt_and_answer(served: tuple[Any, Oracle]) -> None:
    live, oracle = served
    accepted = 0
    for prompt in prompts(oracle):
        for way in ways():
            body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "logprobs": NUM_TOP, "echo": True, **way}
            answer = live.answer("/v1/completions", body | {"return_token_ids": True})
            accepted += answer["spaceserve"]["accepted"]
            (choice,) = answer["choices"]
            ids = choice["prompt_token_ids"] + choice["token_ids"]
            lists = choice["logprobs"]
            assert len(ids) == len(lists["tokens"]) == len(choice["prompt_token_ids"]) + 12
            assert lists["tokens"] == [oracle.tokenizer.token_text(id_) for id_ in ids]
            assert lists["token_logprobs"][0] is None
            assert lists["top_logprobs"][0] is None
            rows = oracle.logprobs(ids)
            for at, row in enumerate(rows, start=1):
                oracle.check(row, ids[at], lists["token_logprobs"][at], lists["top_logprobs"][at])
            without = live.answer("/v1/completions", body | {"echo": False, "return_token_ids": True})
            generated = without["choices"][0]
            assert generated["token_ids"] == choice["token_ids"]
            begin = len(choice["prompt_token_ids"])
            for name in ("tokens", "token_logprobs", "top_logprobs"):  # the same path: the same bits
                assert generated["logprobs"][name] == lists[name][begin:]
            if isinstance(prompt, str):
                assert lists["text_offset"][0] == 0
                assert choice["text"].startswith(prompt)
                assert lists["text_offset"][begin] == len(prompt)
    assert accepted > 0 or "demo" not in live.model


def test_chat_tells_transformers_logprobs_and_the_bytes_of_each_token(served: tuple[Any, Oracle]) -> None:
    live, oracle = served
    for way in ways():
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "Say something."}], "max_completion_tokens": 12, **way}
            body |= {"logprobs": True, "top_logprobs": NUM_TOP, "return_token_ids": True, "ignore_eos": True}
            (choice,) = live.answer("/v1/chat/completions", body | {"stream": stream})["choices"]
            prompt, made = choice["prompt_token_ids"], choice["token_ids"]
            content = choice["logprobs"]["content"]
            assert len(content) == len(made) == 12
            for row, id_, entry in zip(oracle.logprobs(prompt + made)[len(prompt) - 1 :], made, content, strict=True):
                assert bytes(entry["bytes"]) == oracle.tokenizer.bytes_of[id_]
                assert len(entry["top_logprobs"]) == NUM_TOP
                ours = [one["logprob"] for one in entry["top_logprobs"]]
                best = torch.topk(row, NUM_TOP).values.tolist()
                assert ours == pytest.approx(best, abs=NEAR)
                top = {one["token"]: one["logprob"] for one in entry["top_logprobs"]}
                oracle.check(row, id_, entry["logprob"], {entry["token"]: entry["logprob"]} | top)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_are_transformers_with_ranks(served: tuple[Any, Oracle], route: str) -> None:
    live, oracle = served
    for speculation in ("off", "auto"):
        body = {"max_tokens": 3, "prompt_logprobs": NUM_TOP, "return_token_ids": True, "speculation": speculation}
        asked = {"prompt": PROMPT} if "chat" not in route else {"messages": [{"role": "user", "content": PROMPT}]}
        for _ in range(2):  # the prefix cache has nothing to say about it
            (choice,) = live.answer(route, body | asked)["choices"]
            ids, told = choice["prompt_token_ids"], choice["prompt_logprobs"]
            assert len(told) == len(ids)
            assert told[0] is None
            for row, id_, entries in zip(oracle.logprobs(ids), ids[1:], told[1:], strict=True):
                assert entries[str(id_)]["logprob"] == pytest.approx(float(row[id_]), abs=NEAR)
                ranked = sorted((one["rank"], one["logprob"]) for one in entries.values() if one["rank"] is not None)
                best = torch.topk(row, NUM_TOP).values.tolist()
                assert [value for _, value in ranked][:NUM_TOP] == pytest.approx(best, abs=NEAR)
                for other, one in entries.items():
                    assert one["logprob"] == pytest.approx(float(row[int(other)]), abs=NEAR)
                    assert one["decoded_token"] == oracle.tokenizer.token_text(int(other))


def test_a_prompt_of_ids_has_the_logprobs_of_its_text(served: tuple[Any, Oracle]) -> None:
    live, oracle = served
    ids = oracle.tokenizer.encode(PROMPT)
    body = {"max_tokens": 8, "temperature": 0, "logprobs": NUM_TOP, "echo": True, "prompt_logprobs": 1}
    text, same = (live.answer("/v1/completions", body | {"prompt": prompt})["choices"][0] for prompt in (PROMPT, ids))
    assert text == same
