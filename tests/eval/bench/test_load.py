"""Load on scripted servers, under a clock that jumps: every figure is exact."""

import asyncio
import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.scripted_http import Reply, ScriptedServer, jumping, openai_answer
from space_common.http_client import Endpoint, HttpError
from space_eval.bench.arms import APIS, Arm, Exchange, LoadRequest
from space_eval.bench.meters import DraftSample, draft_figures, idle
from space_eval.bench.options import BenchSettings
from space_eval.bench.report import BenchResult, half_ratios, summarize, timelines
from space_eval.bench.rounds import LoadRun, Round, run_round
from space_eval.bench.workload import Closed, Lengths, LoadShape, Open, Recorded, Swing, Workload, load_recorded
from space_eval.data import load_prompts
from space_eval.flags import RecordError

TEN = openai_answer([(1.0, 1), *[(0.5, 2)] * 4, (1.0, 1)], ids=True)  # 10 tokens in 4 seconds


def arm(server: ScriptedServer, name: str = "a", **more: Any) -> Arm:
    return Arm(name, Endpoint.parse(server.url), APIS["openai"], **more)


def asks(num: int, arrivals: Iterator[float] | None = None) -> Iterator[LoadRequest]:
    times = itertools.repeat(0.0) if arrivals is None else arrivals
    return (LoadRequest(number, "x", 10, arrival) for number, arrival in zip(range(num), times, strict=False))


def a_round(
    shape: LoadShape,
    script: Callable[[str, Any], Reply],
    asked: Iterator[LoadRequest],
    seconds: float | None = None,
    **more: Any,
) -> tuple[Round, ScriptedServer]:
    async def run() -> tuple[Round, ScriptedServer]:
        async with ScriptedServer(script).serving() as server:
            return await run_round(arm(server), shape, asked, salt=None, seconds=seconds, **more), server

    return jumping(run())


def always(reply: Reply) -> Callable[[str, Any], Reply]:
    return lambda path, body: reply


def test_a_closed_loop_keeps_so_many_streams_and_no_more() -> None:
    made, server = a_round(Closed(3), always(TEN), asks(6))
    assert server.most_open == 3
    assert (made.seconds, made.num_tokens, made.num_finished) == (8.0, 60, 6)
    assert made.tokens_per_second == 7.5
    assert [exchange.started for exchange in made.exchanges] == [0, 0, 0, 4, 4, 4]
    first = made.exchanges[0]
    assert (first.first_token_seconds, first.seconds) == (1.0, 4.0)
    assert first.event_gaps == [0.5] * 4 + [1.0]
    assert first.token_gaps == [0.25] * 8 + [1.0]


def test_a_closed_loop_of_some_time_counts_what_came_in_it() -> None:
    made, _ = a_round(Closed(2), always(TEN), asks(1000), seconds=6.25)
    assert made.seconds == 6.25
    assert made.num_tokens == 2 * (10 + 1 + 2 * 2)  # a whole answer, then those of 1.0, 1.5 and 2.0
    assert (made.num_finished, len(made.exchanges), made.errors) == (2, 4, {})
    assert made.timeline(1.0) == [0.0, 6.0, 8.0, 4.0, 2.0, 6.0]  # what comes on the second begins the next one


def test_a_closed_loop_ends_with_the_first_refusal() -> None:
    with pytest.raises(HttpError, match="429"):
        a_round(Closed(2), always(Reply.json({"error": "full"}, 429)), asks(6))


def test_an_open_loop_sends_when_it_is_due_however_slow_the_server() -> None:
    made, server = a_round(Open(1.0), always(TEN), asks(4, iter([0.5, 1.0, 1.5, 9.0])))
    assert server.most_open == 3
    assert [exchange.started for exchange in made.exchanges] == [0.5, 1.0, 1.5, 9.0]
    assert {exchange.seconds for exchange in made.exchanges} == {4.0}
    assert {exchange.late for exchange in made.exchanges} == {0.0}
    assert made.seconds == 13.0


def test_an_open_loop_counts_refusals_and_goes_on() -> None:
    def script(path: str, body: Any) -> Reply:
        full = len(server_asked) % 2
        server_asked.append(body)
        return Reply.json({"error": "full"}, 429) if full else TEN

    server_asked: list[Any] = []
    made, _ = a_round(Open(1.0), script, asks(5, iter([0.0, 1.0, 2.0, 3.0, 4.0])))
    assert (made.num_finished, made.errors, made.num_tokens) == (3, {"429": 2}, 30)


def test_an_open_loop_that_is_only_refused_is_an_error() -> None:
    with pytest.raises(HttpError, match=r"a: none of 2 requests was answered \(503\)"):
        a_round(Open(1.0), always(Reply.json({}, 503)), asks(2, iter([0.0, 1.0])))


def test_an_open_loop_of_some_time_waits_for_what_came_in_it() -> None:
    made, _ = a_round(Open(1.0), always(TEN), asks(100, itertools.count(0.0)), seconds=3.0)
    assert (len(made.exchanges), made.num_finished, made.seconds) == (3, 3, 6.0)


def test_what_a_late_client_sends_late_is_counted_against_the_answer() -> None:
    async def run() -> Any:
        async with ScriptedServer(always(TEN)).serving() as server:
            exchange = Exchange()
            await asyncio.sleep(2.0)
            await arm(server).answer(LoadRequest(0, "x", 1), None, exchange, begun=0.5)  # due at 0.5, sent at 2.0
            return exchange

    made = jumping(run())
    assert (made.late, made.first_token_seconds, made.seconds) == (1.5, 2.5, 5.5)


def test_a_swing_has_so_many_streams_in_each_half() -> None:
    burst = openai_answer([(0.5, 1)] * 100)  # one token each half second, longer than any half
    made, server = a_round(Swing(1, 3, 4.0), always(burst), asks(1000), seconds=16.0)
    assert server.most_open == 3
    assert made.seconds == 16.0
    line = made.timeline(4.0)
    assert line[0] == 7 / 4  # at 0.5, 1.0, ... 3.5; what comes at 4.0 begins the next half
    assert line[1] == (8 + 2 * 7) / 4
    assert line[2] == 8 / 4
    assert line[3] == (8 + 2 * 7) / 4
    (phase,) = [half_ratios(Swing(1, 3, 4.0), [made], [made])]
    assert {name: ratio.median for name, ratio in phase.items()} == {"low": 1.0, "high": 1.0}
    quiet, again = timelines(Swing(1, 3, 4.0), [[made, made]])
    assert quiet.ratios == ()
    assert set(again.ratios) == {1.0}
    assert again.share_below == 0.0


def test_the_chosen_draft_length_is_read_from_the_servers_figures() -> None:
    looks = iter([(10, 10), (40, 20), (40, 30)])  # drafts and steps so far

    def script(path: str, body: Any) -> Reply:
        if path != "/metrics":
            return openai_answer([(2.5, 1)])
        drafted, steps = next(looks)
        text = f"spaceserve_draft_length_count {steps}.0\nspaceserve_draft_length_sum {drafted}.0\nother 3\n"
        return Reply([(0.0, text.encode())])

    made, _ = a_round(Closed(1), script, asks(1), poll_seconds=1.0)
    assert [(sample.seconds, sample.draft_length) for sample in made.drafts] == [(1.0, 3.0), (2.0, 0.0)]


def test_the_next_round_waits_until_a_server_is_idle() -> None:
    async def run(loads: list[dict[str, int]]) -> float:
        looks = iter(loads)
        async with ScriptedServer(lambda path, body: Reply([(1.0, json.dumps(next(looks)).encode())])).serving() as one:
            await idle(Endpoint.parse(one.url), is_ours=True)
        return asyncio.get_running_loop().time()

    assert jumping(run([{"num_running": 2}, {"num_running": 0, "blocks_held": 1}, {}])) == pytest.approx(3.04)


def test_a_server_without_such_figures_has_no_draft_lengths() -> None:
    assert draft_figures("vllm:steps 3\n") is None
    assert draft_figures("spaceserve_draft_length_sum x\nspaceserve_draft_length_count 1\n") is None


def test_the_draft_length_in_time_is_of_all_rounds_and_its_change_within_halves() -> None:
    swing = Swing(1, 2, 2.0)
    lines = ((4, 2, 2, 4, 0), (0, 2, 2, 0))
    watches = [[DraftSample(0.5 * n + 0.01, drafts) for n, drafts in enumerate(line, 1)] for line in lines]
    made = [[Round("off", 4.0, [], {}), Round("auto", 4.0, [], {}, watch)] for watch in watches]
    quiet, auto = timelines(swing, made)
    assert (quiet.draft_lengths, quiet.draft_change) == ((), None)
    assert auto.draft_lengths[:2] == ((0.25, 2, 0, 4), (0.75, 2, 2, 2))
    assert auto.draft_lengths[4] == (2.25, 0, 0, 0)
    assert auto.draft_change == pytest.approx((2 + 0 + 2 + 2 + 0 + 2) / 6)  # the last 4 to 0 is from half to half


def run_of(
    scripts: dict[str, Reply], settings: BenchSettings, work: Workload, **more: Any
) -> tuple[BenchResult, list[tuple[str, Any]]]:
    """All arms' figures, and what was asked of whom in order."""
    asked: list[tuple[str, Any]] = []

    def noting(name: str, reply: Reply) -> Callable[[str, Any], Reply]:
        def script(path: str, body: Any) -> Reply:
            asked.append((name, body))
            return reply

        return script

    async def run() -> BenchResult:
        servers = [ScriptedServer(noting(name, reply)) for name, reply in scripts.items()]
        async with servers[0].serving(), servers[-1].serving() if len(servers) > 1 else servers[0].serving():
            named = zip(scripts, servers, strict=True)
            arms = [arm(server, name, is_baseline=not place, **more) for place, (name, server) in enumerate(named)]
            return summarize(settings, arms, await LoadRun(settings, arms, work, lambda _: dict).measure())

    return jumping(run()), asked


def one_stream(**more: Any) -> BenchSettings:
    return BenchSettings(**{"concurrency": (1,), "num_rounds": 2, "num_requests": 1, "num_warm_up": 0, **more})


WORK = Workload([Recorded("x")], Lengths.parse("10"))


def test_arms_take_turns_and_the_one_that_begins_changes() -> None:
    slow, fast = openai_answer([(4.0, 1)]), openai_answer([(2.0, 1)])
    made, asked = run_of({"slow": slow, "fast": fast}, one_stream(num_rounds=3), WORK)
    assert [name for name, _ in asked] == ["slow", "fast", "fast", "slow", "slow", "fast"]
    assert made.rows[1].ratios["slow"].median == 2.0
    assert made.rows[1].ratios["slow"].num == 3


def test_arms_are_asked_the_same_in_a_round_and_prompts_differ_between_rounds() -> None:
    _, asked = run_of({"a": TEN, "b": TEN}, one_stream(), WORK)
    prompts = [body["prompt"] for _, body in asked]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert all(prompt.endswith("\nx") for prompt in prompts)


def test_our_servers_get_a_salt_for_each_round_and_prompts_as_they_are() -> None:
    _, asked = run_of({"a": TEN, "b": TEN}, one_stream(), WORK, is_spaceserve=True)
    assert {body["prompt"] for _, body in asked} == {"x"}
    assert len({body["cache_salt"] for _, body in asked}) == 4


def test_warm_up_is_not_measured() -> None:
    made, asked = run_of({"a": TEN}, one_stream(num_rounds=1, num_warm_up=3), WORK)
    assert len(asked) == 4
    assert made.rows[0].num_requests == 1


def drafting(made: list[tuple[str, Any]]) -> list[tuple[str, int, bool]]:
    """Prompt, length and whether there may be drafts, request by request."""
    return [(body["prompt"], body["max_tokens"], body["speculation"] != "off") for _, body in made]


def test_drafts_by_decree_are_asked_for_only_where_the_answer_was_written_without_them_before() -> None:
    recorded = [Recorded(text, output_tokens=length) for text, length in (("x", 5), ("y", 7), ("x", 6))]
    known = Workload(recorded, Lengths.parse("10"))
    twice = one_stream(num_requests=3)
    _, asked = run_of({"a": TEN}, twice, known, is_spaceserve=True, has_synthetic_acceptance=True, speculation="auto")
    plainly = [("x", 5, False), ("y", 7, False), ("x", 6, False)]
    drafted = [("x", 5, True), ("y", 7, True), ("x", 6, True)]
    assert drafting(asked)[:2] == [("x", 6, False), ("y", 7, False)]  # each once, as long as it will be
    assert drafting(asked)[2:] == drafted * 2
    _, asked = run_of({"a": TEN}, twice, known, is_spaceserve=True, has_synthetic_acceptance=True, speculation="off")
    assert drafting(asked) == plainly * 2
    _, asked = run_of({"a": TEN}, twice, known, is_spaceserve=True, speculation="auto")
    assert drafting(asked) == drafted * 2


def test_seeded_answers_are_written_beforehand_for_each_seed() -> None:
    two = one_stream(num_requests=2)
    _, asked = run_of(
        {"a": TEN}, two, WORK, is_spaceserve=True, has_synthetic_acceptance=True, speculation=3, temperature=0.8
    )
    assert [(body["seed"], body["speculation"]) for _, body in asked] == [(1, "off"), (2, "off"), *[(1, 3), (2, 3)] * 2]


def test_poisson_arrivals_are_seeded_and_have_their_rate() -> None:
    work = Workload([Recorded("x")], Lengths.parse("1"), seed=3)
    arrivals = [ask.arrival for ask in itertools.islice(work.requests(1, 5.0), 4000)]
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.08)  # as wide as it is long: exponential
    assert arrivals[:9] == [ask.arrival for ask in itertools.islice(work.requests(1, 5.0), 9)]
    assert arrivals[:9] != [ask.arrival for ask in itertools.islice(work.requests(2, 5.0), 9)]


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("7", 7, 7, 7.0),
        ("uniform:3:9", 3, 9, 6.0),
        ("normal:50:5", 1, 70, 50.0),
        ("normal:50:5:48:52", 48, 52, 50.0),
        ("lognormal:100:0.5:1:100000", 1, 100000, 113.3),
    ],
)
def test_lengths_keep_their_distribution_and_bounds(text: str, low: int, high: int, mean: float) -> None:
    sampling_params, source = Lengths.parse(text), random.Random(1)
    drawn = [sampling_params.draw(source) for _ in range(4000)]
    assert (sampling_params.low, sampling_params.high) == (low, high)
    assert low <= min(drawn) <= max(drawn) <= high
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "at least 1"),
        ("1.5", "whole numbers"),
        ("uniform:9:3", "the lower bound 9 is above the upper one, 3"),
        ("normal:5", "is no length"),
        ("normal:5:-1:1:9", "must be at least 0; got -1"),
        ("nan", "is no length"),
        ("poisson:3", "is no length"),
    ],
)
def test_lengths_that_are_none_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Lengths.parse(text)


def test_prompts_of_given_length_are_cut_from_ids_or_text() -> None:
    made = Workload([Recorded("x")], Lengths.parse("1"), Lengths.parse("uniform:3:12"), text="abcdef", ids=(1, 2, 3, 4))
    ids = [ask.prompt for ask in itertools.islice(made.requests(1), 50)]
    assert {len(prompt) for prompt in ids} <= set(range(3, 13))
    assert all(prompt[1] == prompt[0] % 4 + 1 for prompt in ids if isinstance(prompt, tuple))
    text = Workload([Recorded("x")], Lengths.parse("1"), Lengths.parse("5"), text="abcdef", characters_per_token=4.0)
    prompts = [ask.prompt for ask in itertools.islice(text.requests(1, mark="# 1"), 9)]
    assert {len(prompt) for prompt in prompts} == {20}
    assert all(isinstance(prompt, str) and prompt.startswith(f"# 1.{n}\n") for n, prompt in enumerate(prompts))


def lines(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "work.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path


def test_a_file_may_have_lengths_and_arrivals_of_its_own(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        {"prompt": "a", "output_tokens": 3, "arrival": 10},
        {"turns": ["b", "c"], "arrival": 10.5},
        {"input_length": 2, "output_length": 4, "timestamp": 12000},
    )
    recorded = load_recorded(path)
    assert [(one.text, one.prompt_tokens, one.output_tokens, one.arrival) for one in recorded] == [
        ("a", None, 3, 10.0),
        ("b", None, None, 10.5),
        (None, 2, 4, 12.0),
    ]
    work = Workload(recorded, Lengths.parse("9"), text="z", ids=(5,))
    made = list(itertools.islice(work.requests(1), 5))
    assert [(ask.prompt, ask.max_tokens) for ask in made[:3]] == [("a", 3), ("b", 9), ((5, 5), 4)]
    assert [ask.arrival for ask in made] == [0.0, 0.5, 2.0, 3.0, 3.5]  # a turn is 3 s: 2 s and a mean gap
    assert work.max_output_tokens == 9


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_ends_where_json_lines_says_and_not_at_marks_inside_a_text(tmp_path: Path, mark: str, end: str) -> None:
    texts = [f"one{mark}two", "three"]
    path = tmp_path / "work.jsonl"
    path.write_bytes("".join(json.dumps({"prompt": t}, ensure_ascii=False) + end for t in texts).encode())
    assert [one.text for one in load_recorded(path)] == texts
    assert load_prompts(path) == texts


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"nothing": 1}], "has none of the fields"),
        ([{"prompt": "a", "output_tokens": 0}], "`output_tokens` must be a whole number of at least 1; it is 0"),
        ([{"prompt": "a", "arrival": -1}], "`arrival` must be a number of at least 0; it is -1"),
        ([{"prompt": "a", "arrival": 1}, {"prompt": "b"}], "1 of 2 lines have an arrival"),
        ([{"prompt": "a", "arrival": 2}, {"prompt": "b", "arrival": 1}], "do not ascend"),
        ([], "holds no request"),
        ([[1]], "is not a JSON object"),
    ],
)
def test_a_file_that_cannot_be_used_names_the_line_and_the_cure(tmp_path: Path, records: Any, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        load_recorded(lines(tmp_path, *records))
