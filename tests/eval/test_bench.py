"""The arithmetic of the load benchmark, and its flags."""

import json
import sys
import types
from pathlib import Path

import pytest
from space_eval import bench
from space_eval.bench_report import Spread, rows, table
from space_eval.bench_round import Round, percentile
from space_eval.load_client import Exchange, Piece


def exchange(*pieces: tuple[float, tuple[int, ...]], steps: int = 1, rate: float | None = 1.0) -> Exchange:
    statistics = {"steps": steps, "tokens_per_step": rate}
    return Exchange([Piece(*piece) for piece in pieces], statistics=statistics, seconds=pieces[-1][0])


def a_round(speculation: str, seconds: float, *exchanges: Exchange) -> Round:
    return Round(speculation, seconds, exchanges, {"router": 0.5 * seconds})


def test_a_percentile_is_a_value_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([3.0], 0.5) == percentile([3.0], 0.99) == 3.0


def test_the_gap_before_an_event_is_shared_among_its_tokens() -> None:
    one = exchange((1.0, (5,)), (1.5, (6, 7)), (1.6, (8,)))
    assert one.first_token_seconds == 1.0
    assert one.token_gaps == pytest.approx([0.25, 0.25, 0.1])
    assert one.token_ids == (5, 6, 7, 8)


def test_tokens_per_step_weighs_streams_by_their_steps() -> None:
    one = exchange((1.0, (1,)), steps=3, rate=2.0)
    other = exchange((1.0, (1,)), steps=1, rate=4.0)
    assert a_round("auto", 1.0, one, other).tokens_per_step == 2.5
    assert a_round("auto", 1.0, exchange((1.0, (1,)), steps=0, rate=None)).tokens_per_step is None


def test_a_ratio_is_of_one_pair_and_its_middle_is_the_median() -> None:
    four = exchange((0.1, (1, 2)), (0.2, (3, 4)))
    pairs = [(a_round("off", 4.0, four), a_round("auto", seconds, four)) for seconds in (1.0, 2.0, 4.0)]
    plain, fast = rows(8, pairs)
    assert plain.ratio is None
    assert fast.ratio == Spread(median=2.0, low=1.0, high=4.0)
    assert fast.tokens_per_second == Spread(median=2.0, low=1.0, high=4.0)
    assert (plain.num_streams, plain.speculation, plain.identical) == (8, "off", "3/3")
    assert fast.cpu_shares == {"router": 1.0}


def test_answers_that_differ_are_counted_and_shown() -> None:
    pair = (a_round("off", 1.0, exchange((0.1, (1,)))), a_round("auto", 1.0, exchange((0.1, (2,)))))
    found = rows(1, [pair])
    assert found[1].identical == "0/1"
    assert "0/1" in table(found)


def test_given_flags_win_over_the_smoke_preset() -> None:
    options, serve_flags = bench._options(["--smoke", "--concurrency", "2,3", "--", "--num-threads", "1"])
    settings = bench._settings(options)
    assert settings.concurrency == (2, 3)
    assert settings.max_tokens == bench.SMOKE.max_tokens
    assert serve_flags == ["--num-threads", "1"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--concurrency", "0"], "must be a whole number of at least 1; got '0'"),
        (["--temperature", "hot"], "must be a number from 0 to 2; got 'hot'"),
        (["--speculation", "off"], "must be a whole number of at least 1; got 'off'"),
        (["--url", "x", "--model", "y"], "not allowed with"),
    ],
)
def test_flags_that_mean_nothing_are_refused_by_name(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(flags)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_unusable_settings_end_with_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench.main(["--url", "ftp://x"]) == 1
    assert "is no server address" in capsys.readouterr().err
    assert bench.main(["--url", "http://x", "--", "--port", "1"]) == 2
    assert "leave out --url" in capsys.readouterr().err
    assert bench.main(["--url", "http://x", "--api-key-file", str(tmp_path / "none")]) == 2
    assert "there is no key in it" in capsys.readouterr().err


def test_a_record_is_json() -> None:
    pair = (a_round("off", 1.0, exchange((0.1, (1,)))), a_round("auto", 1.0, exchange((0.1, (1,)))))
    made = bench.record({"machine": "m"}, {"max_tokens": 1}, rows(1, [pair]))
    assert json.loads(json.dumps(made))["rows"][1]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}


def test_a_word_before_the_flags_goes_to_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    module = types.ModuleType("space_eval.never")
    module.main = lambda argv: given.append(argv) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(bench, "COMMANDS", {"never": (module.__name__, "")})
    assert bench.main(["never", "--flag", "1"]) == 7
    assert given == [["--flag", "1"]]


@pytest.mark.parametrize("word", ["overhead", "simulate"])
def test_the_other_benchmarks_are_shown_in_the_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--help"])
    assert ended.value.code == 0
    assert f"spaceserve bench {word}" in capsys.readouterr().out
