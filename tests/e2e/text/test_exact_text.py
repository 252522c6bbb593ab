"""What ends a text in the middle of what one step emitted ends it there: exactly, however it is asked for.

The server drafts four ids in every step, by the embedded model's masks alone (see `steady`): the steps of a text that
runs alone are the same each time, so a test can find an end that lies inside a step's run, and ask for that.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from space_common.process import ServerProcess
from space_proto import worker_pb2 as pb
from space_router.text.tokenizer import Tokenizer
from tiny_checkpoints import tiny_adapter

K = 4
PROMPT = "import os\nimport sys\n\n\ndef main():\n"
ENDING_PROMPTS = ("def main():\n    return ", "def area(width):\n    return ", "x = 1\n", "import os\n", "try:\n")
SAMPLING_PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 3, "top_p": 0.95},
}
ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "tgi": "/generate"}
FEW_WAYS: list[tuple[str | int, bool]] = [("off", False), ("auto", False), (1, True), (K, True)]
ALL_WAYS = [(drafts, stream) for drafts in ("off", "auto", *range(K + 1)) for stream in (False, True)]
"""(speculation, streamed)."""

QUICK = {"completions": "greedy", "chat": "sampled", "tgi": "sampled"}

LONG = 25  # Tokens of a text that nothing ends


class Output(NamedTuple):
    """What a client reads in an answer of any route."""

    text: str
    ids: list[int]
    logprobs: list[float]
    top: list[Any]
    finish: str
    stop_reason: str | int | None  # TGI does not say
    num_generated: int


class Run(NamedTuple):
    """An answer, and what is known of its steps."""

    output: Output
    steps: list[int]  # of each token, where OpenAI's routes stream
    num_steps: int  # decode steps to the end; 0 where the route does not say
    num_accepted: int


class Exact:
    """Asks one server in several ways."""

    def __init__(self, live: Any, tokenizer: Tokenizer, ways: list[tuple[str | int, bool]]) -> None:
        self.live, self.tokenizer, self.ways = live, tokenizer, ways

    def run(self, route: str, drafts: str | int, stream: bool, **fields: Any) -> Run:
        """One answer: `LONG` tokens, or as OpenAI's `fields` say."""
        wanted = {"max_tokens": LONG, "speculation": drafts, **fields}
        return self._generate(wanted, stream) if route == "tgi" else self._openai(route, wanted, stream)

    def every_way(self, route: str, **fields: Any) -> Output:
        """The answer that every way of asking gives: drafted or not, streamed or not."""
        runs = {way: self.run(route, *way, **fields) for way in self.ways}
        output = runs["off", False].output
        assert {way: run.output for way, run in runs.items()} == dict.fromkeys(self.ways, output)
        return output

    def steady(self, route: str, **fields: Any) -> Run:
        """The answer when nothing else runs: what was asked for before is gone, and the steps are always the same."""
        self.live.wait_idle()
        return self.run(route, K, True, **fields)

    def ends(self, ids: list[int]) -> list[int]:
        """Where each token's text ends, in characters; all of them are whole ones."""
        special, content = self.tokenizer.special_ids, self.tokenizer.bytes_of
        lengths = (0 if id_ in special else len(content[id_].decode()) for id_ in ids)
        return list(itertools.accumulate(lengths))

    def _openai(self, route: str, wanted: dict[str, Any], stream: bool) -> Run:
        chat = route == "chat"
        body = {"return_token_ids": True, "ignore_eos": True, "stream": stream, **wanted}
        prompt = body.pop("prompt", PROMPT)
        if chat:
            body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True, "top_logprobs": 2}
        else:
            body |= {"prompt": prompt, "logprobs": 2}
        if stream:
            body["stream_options"] = {"include_steps": True}
        answer = self.live.answer(ROUTES[route], body)
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        if chat:
            logprobs = [token["logprob"] for token in found["content"]]
            top = [[(one["token"], one["logprob"]) for one in token["top_logprobs"]] for token in found["content"]]
        else:
            logprobs, top = found["token_logprobs"], found["top_logprobs"]
        output = Output(
            choice["text"],
            choice["token_ids"],
            logprobs,
            top,
            choice["finish_reason"],
            choice["stop_reason"],
            answer["usage"]["completion_tokens"],
        )
        figures = answer["spaceserve"]
        return Run(output, answer["steps"], figures["steps"], figures["accepted"])

    def _generate(self, wanted: dict[str, Any], stream: bool) -> Run:
        names = {"max_tokens": "max_new_tokens"}
        parameters: dict[str, Any] = {"details": True, "top_n_tokens": 2}
        parameters |= {names.get(name, name): value for name, value in wanted.items() if name != "prompt"}
        if parameters.pop("temperature", 0):
            parameters |= {"temperature": wanted["temperature"], "do_sample": True}
        body = {"inputs": wanted.get("prompt", PROMPT), "parameters": parameters}
        if stream:
            with self.live.http.stream("POST", "/generate_stream", json=body) as answer:
                assert answer.status_code == 200, answer.read()
                lines = [line for line in answer.iter_lines() if line]
            events = [json.loads(line.removeprefix("data:")) for line in lines]
            text, details = events[-1]["generated_text"], events[-1]["details"]
            kept = [event for event in events if not (event["token"]["special"] and event["token"]["text"] == "")]
            kept = events if details["finish_reason"] == "eos_token" else kept
            tokens, tops = [event["token"] for event in kept], [event["top_tokens"] for event in kept]
            assert "".join(event["token"]["text"] for event in events) == text
        else:
            answer = self.live.http.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            text, details = answer.json()["generated_text"], answer.json()["details"]
            tokens, tops = details["tokens"], details["top_tokens"]
        output = Output(
            text,
            [token["id"] for token in tokens],
            [token["logprob"] for token in tokens],
            [[(one["id"], one["logprob"]) for one in top] for top in tops],
            {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}[details["finish_reason"]],
            None,
            details["generated_tokens"],
        )
        return Run(output, [], 0, 0)


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.slow)])
def exact(steady: Any, request: pytest.FixtureRequest) -> Exact:
    with resources.as_file(resources.files("space_demo")) as folder:
        return Exact(steady, Tokenizer.load(folder), FEW_WAYS if request.param == "few" else ALL_WAYS)


def each(*routes: str) -> pytest.MarkDecorator:
    """Each of these routes under each law; but in the fast suite one law for each."""
    rest = [
        (route, sampling_params)
        for route in routes
        for sampling_params in SAMPLING_PARAMS
        if sampling_params != QUICK[route]
    ]
    marked = [pytest.param(*case, marks=pytest.mark.slow) for case in rest]
    return pytest.mark.parametrize(
        ("route", "sampling_params"), [*((route, QUICK[route]) for route in routes), *marked]
    )


def base_of(exact: Exact, route: str, sampling_params: str) -> Run:
    """The whole text with the steps that it takes; a route that does not tell them takes those of completions."""
    run = exact.steady("completions" if route == "tgi" else route, **SAMPLING_PARAMS[sampling_params])
    assert len(run.steps) == len(run.output.ids) == LONG
    assert run.num_accepted > 0
    assert route != "tgi" or 0 not in run.output.ids  # TGI cannot ignore an EOS
    return run


def is_inside_a_run(steps: list[int], at: int) -> bool:
    """The token at `at` and the one behind it came with one step."""
    return at + 1 < len(steps) and steps[at] == steps[at + 1]


class Straddling(NamedTuple):
    """A stop string that begins inside the run of one step and ends inside that of a later one."""

    stop: str
    start: int  # of its first occurrence, in characters
    first: int  # the token in which it begins
    last: int  # the token in which it ends


def straddling(text: str, ends: list[int], steps: list[int]) -> Straddling:
    """The shortest that there is; inside the tokens, too, where they have several characters."""
    starts = [0, *ends[:-1]]
    found = []
    for first in range(1, len(ends)):
        for last in range(first + 1, len(ends)):
            if steps[first] == steps[last] or not is_inside_a_run(steps, first - 1) or not is_inside_a_run(steps, last):
                continue
            start = min(starts[first] + 1, ends[first] - 1)
            end = max(ends[last] - 1, starts[last] + 1)
            if text.find(text[start:end]) == start:
                found.append(Straddling(text[start:end], start, first, last))
    return min(found, key=lambda one: len(one.stop))


@each(*ROUTES)
def test_a_stop_string_that_straddles_steps_cuts_at_its_character(
    exact: Exact, route: str, sampling_params: str
) -> None:
    run = base_of(exact, route, sampling_params)
    base = run.output
    ends = exact.ends(base.ids)
    stop = straddling(base.text, ends, run.steps)
    output = exact.every_way(route, stop=[stop.stop], **SAMPLING_PARAMS[sampling_params])
    begins_inside = stop.start > (ends[stop.first - 1])
    kept = stop.first + begins_inside  # a token stays if one of its characters stays
    assert output.text == base.text[: stop.start]
    assert output.ids == base.ids[:kept]
    assert output.num_generated == kept
    assert output.finish == "stop"
    if route == "tgi":
        return
    assert output.logprobs == base.logprobs[:kept]
    assert output.top == base.top[:kept]
    assert output.stop_reason == stop.stop
    again = exact.steady(route, stop=[stop.stop], **SAMPLING_PARAMS[sampling_params])
    assert again.steps == run.steps[:kept]
    assert again.num_steps == run.steps[stop.last] > run.steps[stop.first]  # it was completed by a later step
    whole = exact.every_way(
        route, stop=[stop.stop], include_stop_str_in_output=True, **SAMPLING_PARAMS[sampling_params]
    )
    assert whole.text == base.text[: stop.start] + stop.stop
    assert whole.ids == base.ids[: stop.last + 1]
    assert whole.logprobs == base.logprobs[: stop.last + 1]


def first_inside(ids: list[int], steps: list[int], *, behind: int) -> int:
    """The place of an id that is not its step's last and stands nowhere before."""
    fitting = [at for at in range(behind, len(ids)) if is_inside_a_run(steps, at) and ids[at] not in ids[:at]]
    return fitting[0]


@each("completions", "chat")
def test_a_stop_id_inside_a_run_ends_the_text_and_has_no_text_itself(
    exact: Exact, route: str, sampling_params: str
) -> None:
    run = base_of(exact, route, sampling_params)
    base = run.output
    at = first_inside(base.ids, run.steps, behind=4)
    stop = base.ids[at]
    output = exact.every_way(route, stop_token_ids=[stop], **SAMPLING_PARAMS[sampling_params])
    assert output.text == base.text[: exact.ends(base.ids)[at - 1]]
    assert output.ids == base.ids[: at + 1]
    assert (output.logprobs, output.top) == (base.logprobs[:at], base.top[:at])
    assert (output.finish, output.stop_reason, output.num_generated) == ("stop", stop, at + 1)
    again = exact.steady(route, stop_token_ids=[stop], **SAMPLING_PARAMS[sampling_params])
    assert again.steps == run.steps[: at + 1]
    assert again.num_steps == run.steps[at] == run.steps[at + 1]  # the step went on
    shown = exact.every_way(
        route, stop_token_ids=[stop], include_stop_str_in_output=True, **SAMPLING_PARAMS[sampling_params]
    )
    known = {"logprobs": base.logprobs[: at + 1], "top": base.top[: at + 1]}
    assert shown == output._replace(text=base.text[: exact.ends(base.ids)[at]], **known)


@pytest.mark.parametrize("route", ["completions", pytest.param("chat", marks=pytest.mark.slow)])
def test_before_min_tokens_an_end_inside_a_run_is_impossible_and_stop_strings_are_text(
    exact: Exact, route: str
) -> None:
    run = base_of(exact, route, "greedy")
    base = run.output
    at = first_inside(base.ids, run.steps, behind=2)
    for more in (1, 5):
        output = exact.every_way(
            route, stop_token_ids=[base.ids[at]], min_tokens=at + more, **SAMPLING_PARAMS["greedy"]
        )
        assert output.ids[:at] == base.ids[:at]
        assert output.ids[at] != base.ids[at]
        assert output.num_generated >= at + more
    ends = exact.ends(base.ids)
    stop = base.text[ends[at - 1] : ends[at]]
    output = exact.every_way(route, stop=stop, min_tokens=at + 1, **SAMPLING_PARAMS["greedy"])
    assert output.text[: ends[at]] == base.text[: ends[at]]
    again = base.text.find(stop, ends[at])
    assert output.text == (base.text if again < 0 else base.text[:again])


def with_an_eos_inside_a_run(exact: Exact, route: str) -> tuple[dict[str, Any], Run, int]:
    """A law under which an EOS is an accepted draft with more behind it; the text that goes on there; its place."""
    for seed in range(40):
        sampling_params = {"temperature": 1.0, "seed": seed, "logit_bias": {"0": 5.0}}
        run = exact.steady(route, **sampling_params)
        ids = run.output.ids
        at = ids.index(0) if 0 in ids else 0
        if at >= 2 and is_inside_a_run(run.steps, at):
            return sampling_params, run, at
    raise AssertionError("no EOS came inside a run")


@pytest.mark.parametrize("route", [pytest.param("completions", marks=pytest.mark.slow), "chat"])
def test_an_eos_inside_a_run_ends_the_text_unless_it_is_ignored(exact: Exact, route: str) -> None:
    sampling_params, run, at = with_an_eos_inside_a_run(exact, route)
    output = exact.every_way(route, ignore_eos=False, **sampling_params)
    assert output.ids == run.output.ids[: at + 1]
    assert output.logprobs == run.output.logprobs[:at]
    assert output.text == run.output.text[: exact.ends(run.output.ids)[at]]
    assert (output.finish, output.stop_reason, output.num_generated) == ("stop", None, at + 1)
    again = exact.steady(route, ignore_eos=False, **sampling_params)
    assert again.num_steps == run.steps[at] == run.steps[at + 1]
    ignoring = exact.every_way(route, **sampling_params)
    assert ignoring == run.output
    assert (ignoring.finish, ignoring.num_generated) == ("length", LONG)


def test_an_eos_inside_a_run_ends_tgi_s_text(exact: Exact) -> None:
    for prompt in ENDING_PROMPTS:
        run = exact.steady("completions", prompt=prompt, temperature=0)
        at = run.output.ids.index(0) if 0 in run.output.ids else LONG
        if is_inside_a_run(run.steps, at):
            break
    else:
        raise AssertionError("no EOS came inside a run")
    output = exact.every_way("tgi", prompt=prompt, temperature=0)
    assert output.text == run.output.text[: exact.ends(run.output.ids)[at]]
    assert output.ids == run.output.ids[: at + 1]
    assert (output.finish, output.num_generated) == ("stop", at + 1)


@each(*ROUTES)
def test_max_tokens_is_exact_also_inside_a_run(exact: Exact, route: str, sampling_params: str) -> None:
    run = base_of(exact, route, sampling_params)
    base = run.output
    ends = exact.ends(base.ids)
    inside = []
    for limit in range(1, 25):
        for drafts, stream in exact.ways if len(exact.ways) > len(FEW_WAYS) else [(K, limit % 2 == 0)]:
            output = exact.run(route, drafts, stream, max_tokens=limit, **SAMPLING_PARAMS[sampling_params]).output
            assert output.text == base.text[: ends[limit - 1]]
            assert output.ids == base.ids[:limit]
            assert (output.finish, output.stop_reason, output.num_generated) == ("length", None, limit)
            assert route == "tgi" or output.logprobs == base.logprobs[:limit]
        inside.append(is_inside_a_run(run.steps, limit - 1))
    assert sum(inside) > 6


@pytest.mark.parametrize("route", ROUTES)
def test_an_end_on_the_last_place_is_an_end_and_not_the_limit(exact: Exact, route: str) -> None:
    run = base_of(exact, route, "greedy")
    base = run.output
    ends = exact.ends(base.ids)
    at = first_inside(base.ids, run.steps, behind=6)
    stop = base.text[ends[at] - 6 : ends[at]]
    assert base.text.find(stop) == ends[at] - 6
    output = exact.every_way(route, stop=[stop], max_tokens=at + 1, **SAMPLING_PARAMS["greedy"])
    assert (output.text, output.finish) == (base.text[: ends[at] - 6], "stop")
    if route != "tgi":
        output = exact.every_way(route, stop_token_ids=[base.ids[at]], max_tokens=at + 1, **SAMPLING_PARAMS["greedy"])
        assert (output.finish, output.stop_reason, output.num_generated) == ("stop", base.ids[at], at + 1)


NUM_STREAMS = 64


def request(number: int) -> dict[str, Any]:
    """Unequal prompts, lengths and laws."""
    sampling_params = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number, "top_p": 0.9}
    bound = ("auto", "off", 1, 3)[number // 2 % 4]
    return {
        "prompt": f"{number} " * (1 + number % 7),
        "max_tokens": 20 + number % 13,
        "speculation": bound,
        **sampling_params,
    }


def test_64_streams_equal_their_solo_runs_and_leave_every_block_free_or_cached(live: Any) -> None:
    def read(number: int) -> str:
        return "".join(event["choices"][0]["text"] for event in live.stream(**request(number), cache_salt="together"))

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        together = list(pool.map(read, range(NUM_STREAMS)))
    live.wait_idle()
    alone = [live.complete(**request(i), cache_salt="alone")["choices"][0]["text"] for i in range(NUM_STREAMS)]
    assert together == alone
    assert len(set(together)) > NUM_STREAMS // 2
    live.wait_idle()


def test_choices_of_one_request_share_its_prompt_and_differ(live: Any) -> None:
    before = live.wait_idle()["spaceserve_prefix_cache_hit_tokens_total"]
    prompt = "def the_same_prompt_for_all(of, the, choices):\n    '''It is longer than a block.'''\n"
    answer = live.complete(prompt, n=4, temperature=1.0, seed=5, cache_salt="choices")
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 4
    assert texts[0] == live.complete(prompt, temperature=1.0, seed=5, cache_salt="choices")["choices"][0]["text"]
    assert live.wait_idle()["spaceserve_prefix_cache_hit_tokens_total"] > before


def wanted(number: int) -> dict[str, Any]:
    """Needs 15 of the 24 blocks before it is done."""
    sampling_params = {"temperature": 0} if number == 0 else {"temperature": 0.9, "seed": number}
    return {"prompt": f"{number}: ", "max_tokens": 110, **sampling_params}


def test_preempted_streams_give_the_text_they_give_alone(small: Any) -> None:
    alone = [small.complete(**wanted(number))["choices"][0]["text"] for number in range(3)]
    before = small.wait_idle()["spaceserve_preemptions_total"]

    def read(number: int) -> str:
        return "".join(event["choices"][0]["text"] for event in small.stream(**wanted(number)))

    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(read, range(3)))
    assert together == alone
    assert small.wait_idle()["spaceserve_preemptions_total"] > before


def test_a_full_queue_answers_429_with_retry_after_and_harms_nobody(small: Any) -> None:
    alone = small.complete(**wanted(0))["choices"][0]["text"]
    before = small.wait_idle()["spaceserve_rejected_total{reason=queue_full}"]
    body = {"ignore_eos": True, "stream": True, **wanted(0)}
    connections = [small.connect(body) for _ in range(8)]  # three run, two wait
    texts, refused = [], 0
    for connection in connections:
        with closing(connection), connection.makefile("rb") as answer:
            head, _, content = answer.read().partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 429"):
            refused += 1
            error = json.loads(content)["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert b"\r\nretry-after: " in head.lower()
        else:
            assert head.startswith(b"HTTP/1.1 200")
            events = [line for line in content.split(b"\n") if line.startswith(b"data: {")]
            texts.append("".join(json.loads(event[6:])["choices"][0]["text"] for event in events))
    assert refused >= 1
    assert len(texts) >= 3
    assert set(texts) == {alone}
    assert small.wait_idle()["spaceserve_rejected_total{reason=queue_full}"] - before == refused


def test_what_can_never_fit_is_refused_at_once(small: Any) -> None:
    answer = small.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 192})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == ("context_length_exceeded", 1, 192)


AREA = "def area(width, height):\n    return "
DRAFTED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 11, "top_p": 0.95},
    "penalised": {
        "temperature": 1.0,
        "seed": 2**63 + 5,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.3,
        "top_k": 40,
    },
}


@pytest.mark.parametrize("sampling_params", DRAFTED)
def test_the_text_is_the_same_with_speculation_off_auto_and_each_k(drafting: Any, sampling_params: str) -> None:
    most = drafting.get("/info")["speculation"]["max_request"]
    answers = {
        bound: drafting.complete(
            AREA, max_tokens=48, speculation=bound, return_token_ids=True, **DRAFTED[sampling_params]
        )
        for bound in ("off", "auto", *range(most + 1))
    }
    assert most >= 1
    plain = answers["off"]["choices"][0]["token_ids"]
    assert [bound for bound, one in answers.items() if one["choices"][0]["token_ids"] != plain] == []
    assert {one["choices"][0]["text"] for one in answers.values()} == {answers["off"]["choices"][0]["text"]}
    for bound, one in answers.items():
        figures = one["spaceserve"]
        assert figures["steps"] + figures["accepted"] == 47, "the prefill gives the first token"
        assert figures["tokens_per_step"] == pytest.approx(47 / figures["steps"], abs=1e-4)
        assert figures["accepted"] <= figures["drafted"] <= figures["steps"] * most
        assert (figures["drafted"] == 0) == (bound in ("off", 0))
        if isinstance(bound, int):  # a command: only the last steps, near max_tokens, have fewer
            assert bound * (figures["steps"] - bound) <= figures["drafted"] <= bound * figures["steps"]


def test_drafts_that_are_right_give_several_tokens_per_step(drafting: Any) -> None:
    # With one id allowed every draft must be right, whatever the weights.
    allowed = drafting.http.post("/tokenize", json={"prompt": "a"}).json()["tokens"][-1:]
    before = drafting.metrics()
    figures = drafting.complete(AREA, max_tokens=61, allowed_token_ids=allowed, speculation=2)["spaceserve"]
    assert figures["accepted"] == figures["drafted"] > 0
    assert figures["tokens_per_step"] > 2.5
    after = drafting.metrics()
    for name, key in (("tokens_per_step_count", "steps"), ("drafted_tokens_total", "drafted"),
                      ("accepted_tokens_total", "accepted")):  # fmt: skip
        assert after[f"spaceserve_{name}"] - before[f"spaceserve_{name}"] == figures[key]
    assert after["spaceserve_accepted_by_position_total{position=2}"] > 0


def test_stop_strings_cut_at_the_character_whatever_the_drafts(live: Any) -> None:
    allowed = live.http.post("/tokenize", json={"prompt": "a"}).json()["tokens"][-1:]
    for bound in ("off", 1, "auto"):
        answer = live.complete(AREA, allowed_token_ids=allowed, stop="aaaaa", speculation=bound)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "aaaaa")


def test_a_prediction_is_taken_where_it_is_right_counted_and_changes_no_text(live: Any) -> None:
    plain = live.complete(AREA, max_tokens=48, speculation="off", return_token_ids=True)["choices"][0]
    before = live.metrics()
    for content, most in ((plain["text"], 48), ("nothing of the kind. " * 9, 4)):
        prediction = {"type": "content", "content": content}
        answer = live.complete(AREA, max_tokens=48, prediction=prediction, return_token_ids=True)
        assert answer["choices"][0]["token_ids"] == plain["token_ids"]
        counts = answer["usage"]["completion_tokens_details"]
        accepted, rejected = counts["accepted_prediction_tokens"], counts["rejected_prediction_tokens"]
        assert 0 <= accepted <= most
        assert accepted + rejected == len(live.http.post("/tokenize", json={"prompt": content}).json()["tokens"])
    after = live.metrics()
    for kind in ("drafted", "accepted"):
        by_source = [name for name in after if name.startswith(f"spaceserve_{kind}_tokens_by_source_total")]
        total = f"spaceserve_{kind}_tokens_total"
        assert len(by_source) == len(pb.DraftSource.values())
        assert sum(after[name] - before[name] for name in by_source) == after[total] - before[total]


Serve = Callable[..., AbstractContextManager[ServerProcess]]


def test_requests_choose_an_adapter_and_all_get_the_base_s_text(serve: Serve, checkpoint: Path, tmp_path: Path) -> None:
    code = tiny_adapter(tmp_path / "code", checkpoint, num_masks=3, rank=8)
    prose = tiny_adapter(tmp_path / "prose", checkpoint, num_masks=5, seed=2, draft_head=False)
    flags = ["--served-model-name", "base", "--speculation", "3", "--adapter", f"code={code}"]
    with (
        serve(*flags, "--adapter", f"prose={prose}") as server,
        httpx.Client(base_url=server.url, timeout=60.0) as http,
        ThreadPoolExecutor(6) as pool,
    ):
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["base", "code", "prose"]

        def complete(name: str, **sampling_params: Any) -> dict[str, Any]:
            body = {"model": name, "prompt": "def f(x):", "max_tokens": 40, "ignore_eos": True, **sampling_params}
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
            return dict(answer.json())

        for sampling_params in ({"temperature": 0}, {"temperature": 0.9, "seed": 7}):
            plain = complete("base", **sampling_params, speculation="off")["choices"][0]["text"]
            names = ["base", "code", "prose"] * 2
            answers = list(
                pool.map(lambda name, sampling_params=sampling_params: complete(name, **sampling_params), names)
            )
            assert {answer["choices"][0]["text"] for answer in answers} == {plain}
            assert all(answer["spaceserve"]["drafted"] > 0 for answer in answers)
        assert http.post("/v1/completions", json={"model": "verse", "prompt": "x"}).status_code == 404


def test_an_adapter_folder_is_served_as_a_model_on_its_base(serve: Serve, checkpoint: Path, tmp_path: Path) -> None:
    folder = tiny_adapter(tmp_path / "gated", checkpoint, num_masks=4)
    with (
        serve("--model", str(folder), "--speculation", "4") as server,
        httpx.Client(base_url=server.url, timeout=60.0) as http,
    ):
        info = http.get("/info").json()
        assert (info["model_id"], info["speculation"]["num_masks"], info["adapters"]) == ("gated", 4, [])
        body = {"prompt": "def f(x):", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        texts = {
            speculation: http.post("/v1/completions", json=body | {"speculation": speculation}).json()
            for speculation in ("off", 4)
        }
        assert texts["off"]["choices"][0]["text"] == texts[4]["choices"][0]["text"]
        assert texts[4]["spaceserve"]["drafted"] > 0
