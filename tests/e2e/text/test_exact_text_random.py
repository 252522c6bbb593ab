"""Random requests with random sets of all OpenAI fields, at once: the answers do not depend on speculation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from space_router.text.tokenizer import Tokenizer
from transformers import AutoModelForCausalLM

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


ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
WAYS: list[tuple[str | int, bool]] = [("off", False), ("auto", True), (1, False), (2, True), (4, True)]
"""(speculation, streamed)."""

CHARACTERS = "中文é😀"
LETTERS_PROMPT = "# 中文 é 😀\nx = '中文中文中文'\ny = 'éé😀é😀é😀'\nz = '中文é😀中文é"
NUM_TOKENS = 28


class Bytes:
    """Asks the steady server for texts of CHARACTERS' bytes: every token is one of them."""

    def __init__(self, live: Any, tokenizer: Tokenizer, route: str) -> None:
        self.live, self.tokenizer, self.route = live, tokenizer, route
        self.allowed = sorted({id_ for one in CHARACTERS for id_ in tokenizer.encode(one, add_special_tokens=False)})
        assert {len(tokenizer.bytes_of[id_]) for id_ in self.allowed} == {1}

    def ask(self, drafts: str | int, stream: bool, **fields: Any) -> tuple[dict[str, Any], list[int]]:
        """The choice that a seed gives, with its usage; and the steps of its tokens, where it is streamed."""
        body = {"prompt": LETTERS_PROMPT, "logprobs": 1}
        if self.route == "chat":
            body = {"messages": [{"role": "user", "content": LETTERS_PROMPT}], "logprobs": True, "top_logprobs": 1}
        body |= {"allowed_token_ids": self.allowed, "temperature": 0.9, "max_tokens": NUM_TOKENS}
        body |= {"return_token_ids": True, "speculation": drafts, "stream": stream, **fields}
        if stream:
            body["stream_options"] = {"include_steps": True}
        answer = self.live.answer(ROUTES[self.route], body)
        (choice,) = answer["choices"]
        return {**choice, "num_tokens": answer["usage"]["completion_tokens"]}, answer["steps"]

    def every_way(self, **fields: Any) -> dict[str, Any]:
        """The choice that every way of asking gives."""
        outputs = {way: self.ask(*way, **fields)[0] for way in WAYS}
        assert outputs == dict.fromkeys(WAYS, outputs["off", False])
        return outputs["off", False]

    def content(self, ids: list[int]) -> bytes:
        return b"".join(self.tokenizer.bytes_of[id_] for id_ in ids)


def characters(content: bytes) -> Iterator[tuple[int, int]]:
    """(begin, end) of the valid characters of several bytes."""
    begin = 0
    while begin < len(content):
        lengths = (length for length in (2, 3, 4) if is_character(content[begin : begin + length]))
        length = next(lengths, 1)
        if length > 1:
            yield begin, begin + length
        begin += length


def is_character(content: bytes) -> bool:
    try:
        return len(content.decode()) == 1
    except UnicodeDecodeError:
        return False


class Across(NamedTuple):
    """A character of which one step gave a part and a later one the rest; at least one of them gave several tokens."""

    seed: int
    ids: list[int]
    begin: int  # tokens before it
    end: int
    character: str


def character_across_steps(asked: Bytes) -> Across:
    """The first one among the seeds that stands nowhere before in its text."""
    for seed in range(60):
        asked.live.wait_idle()  # what runs alone takes the same steps each time
        outputs, steps = asked.ask(4, True, seed=seed)
        content = asked.content(outputs["token_ids"])
        for begin, end in characters(content):
            character = content[begin:end].decode()
            if content.decode(errors="replace").index(character) < len(content[:begin].decode(errors="replace")):
                continue
            first, last = steps[begin], steps[end - 1]
            if first < last and max(steps.count(first), steps.count(last)) > 1:
                return Across(seed, outputs["token_ids"], begin, end, character)
    raise AssertionError("no character lay across two steps")


@pytest.fixture(scope="module", params=["completions", pytest.param("chat", marks=pytest.mark.slow)])
def asked(steady: Any, request: pytest.FixtureRequest) -> Bytes:
    with resources.as_file(resources.files("space_demo")) as folder:
        return Bytes(steady, Tokenizer.load(folder), request.param)


def test_a_character_across_steps_is_told_once_and_whole(asked: Bytes) -> None:
    seed, ids, begin, end, character = character_across_steps(asked)
    outputs = asked.every_way(seed=seed)
    assert outputs["token_ids"] == ids
    assert outputs["text"] == asked.content(ids).decode(errors="replace")
    for limit in range(max(begin, 1), end + 1):  # the bytes of a cut character stand for nothing, and stay tokens
        cut, _ = asked.ask(4, True, seed=seed, max_tokens=limit)
        assert cut == asked.ask("off", False, seed=seed, max_tokens=limit)[0]
        assert cut["token_ids"] == ids[:limit]
        assert cut["text"] == asked.content(ids[:limit]).decode(errors="replace")
        assert cut["text"].endswith(character) == (limit == end)
    stopped = asked.every_way(seed=seed, stop=character)
    assert stopped["text"] == outputs["text"][: outputs["text"].index(character)]
    assert stopped["token_ids"] == ids[:begin]
    assert (stopped["finish_reason"], stopped["stop_reason"], stopped["num_tokens"]) == ("stop", character, begin)
    kept = asked.every_way(seed=seed, stop=character, include_stop_str_in_output=True)
    assert kept["text"] == stopped["text"] + character
    assert kept["token_ids"] == ids[:end]


NEAR = 1e-4
AREA = "def area(width, height):\n    return"
SAMPLING_PARAMS: list[dict[str, Any]] = [
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
    return [AREA, oracle.tokenizer.encode(AREA), [65, 20, 33, 97, 20, 33, 97, 20]]


def ways() -> Iterator[dict[str, Any]]:
    for sampling_params in SAMPLING_PARAMS:
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
        asked = {"prompt": AREA} if "chat" not in route else {"messages": [{"role": "user", "content": AREA}]}
        for _ in range(2):  # the prefix cache has nothing to say about it
            (choice,) = live.answer(route, body | asked)["choices"]
            ids, outputs = choice["prompt_token_ids"], choice["prompt_logprobs"]
            assert len(outputs) == len(ids)
            assert outputs[0] is None
            for row, id_, entries in zip(oracle.logprobs(ids), ids[1:], outputs[1:], strict=True):
                assert entries[str(id_)]["logprob"] == pytest.approx(float(row[id_]), abs=NEAR)
                ranked = sorted((one["rank"], one["logprob"]) for one in entries.values() if one["rank"] is not None)
                best = torch.topk(row, NUM_TOP).values.tolist()
                assert [value for _, value in ranked][:NUM_TOP] == pytest.approx(best, abs=NEAR)
                for other, one in entries.items():
                    assert one["logprob"] == pytest.approx(float(row[int(other)]), abs=NEAR)
                    assert one["decoded_token"] == oracle.tokenizer.token_text(int(other))


def test_a_prompt_of_ids_has_the_logprobs_of_its_text(served: tuple[Any, Oracle]) -> None:
    live, oracle = served
    ids = oracle.tokenizer.encode(AREA)
    body = {"max_tokens": 8, "temperature": 0, "logprobs": NUM_TOP, "echo": True, "prompt_logprobs": 1}
    text, same = (live.answer("/v1/completions", body | {"prompt": prompt})["choices"][0] for prompt in (AREA, ids))
    assert text == same


PROMPT = "def first_word(text):\n    return text.split()[0]\n\n\ndef last_word(text):\n    " * 3


def echoed(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 8, "temperature": 0.7, "seed": 4, "logprobs": 3, "echo": True, **fields}


def completion(live: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    """How many tokens came from the cache, and the first choice."""
    answer = live.http.post("/v1/completions", json=echoed(**fields)).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]


def test_the_same_request_has_the_same_values_before_and_after_its_prompt_is_cached(live: Any) -> None:
    num_cached, first = completion(live)
    assert num_cached == 0
    num_cached, plain = completion(live, echo=False)
    assert num_cached > 0  # what was computed for the log-probabilities serves others
    assert plain["text"] == first["text"].removeprefix(PROMPT)
    num_prompt = sum(offset < len(PROMPT) for offset in first["logprobs"]["text_offset"])
    made, ended = first["logprobs"]["token_logprobs"][num_prompt:], plain["finish_reason"] == "stop"
    assert plain["logprobs"]["token_logprobs"] == (made[:-1] if ended else made)  # only `echo` has the EOS
    assert completion(live) == (0, first)
    num_cached, again = completion(live, prompt_logprobs=3)
    assert (num_cached, again["logprobs"]) == (0, first["logprobs"])
    for entries, value in zip(again["prompt_logprobs"][1:], first["logprobs"]["token_logprobs"][1:], strict=False):
        assert value in [entry["logprob"] for entry in entries.values()]


def test_a_stream_joins_to_the_whole_answer(live: Any) -> None:
    _, whole = completion(live, n=2, prompt_logprobs=1)
    events = live.stream(**echoed(n=2, prompt_logprobs=1, ignore_eos=False))
    pieces = [event["choices"][0] for event in events if event["choices"]]
    mine = [piece for piece in pieces if piece["index"] == 0]
    assert "".join(piece["text"] for piece in mine) == whole["text"]
    assert [one for piece in mine for one in piece.get("prompt_logprobs", [])] == whole["prompt_logprobs"]
    for name, values in whole["logprobs"].items():
        assert [one for piece in mine for one in piece["logprobs"][name]] == values


def test_the_last_token_of_a_prompt_that_fills_the_window_has_the_value_it_has_as_an_answer(live: Any) -> None:
    window = live.http.get("/v1/models").json()["data"][0]["max_model_len"]
    ids = (live.http.post("/tokenize", json={"prompt": PROMPT * 40}).json()["tokens"] * window)[: window - 1]
    greedy = echoed(prompt=ids, max_tokens=1, temperature=0, return_token_ids=True, ignore_eos=True)
    answered = live.http.post("/v1/completions", json=greedy).json()["choices"][0]
    full = echoed(prompt=ids + answered["token_ids"], max_tokens=0)
    scored = live.http.post("/v1/completions", json=full).json()["choices"][0]
    assert len(scored["logprobs"]["token_logprobs"]) == window
    assert scored["logprobs"]["token_logprobs"] == answered["logprobs"]["token_logprobs"]
    assert scored["logprobs"]["top_logprobs"] == answered["logprobs"]["top_logprobs"]
