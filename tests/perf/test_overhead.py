"""`perf overhead`: rows, time by part, the batch at which masks stop paying, and its labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doubles.worker import ScriptedModel
from overhead_arms import arms, full
from space_common.worker_settings import parse_chances
from space_model.loading.load import load_model
from space_model.make_model import Size, random_llama
from space_model.space_model import SpaceModel
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance

from perf.harness import PerfError, main
from perf.overhead import Bench, Load, PassCost, Row, RowCurve, Subject, Turn, crossing, report, row

PROMPTS = [[10 + n, 20, 30] for n in range(3)]
ALWAYS = (1.0,) * 5
FLAT = PassCost(RowCurve(((1, 1.0), (2, 1.0))), RowCurve(((1, 0.0), (2, 0.0))))  # rows are free
LINEAR = PassCost(RowCurve(((1, 1.0), (2, 2.0))), RowCurve(((1, 0.0), (2, 0.0))))  # far above the ridge


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    folder = random_llama(tmp_path_factory.mktemp("random") / "small", Size(64, 2, 2, 96, 500, 256, 8))
    return load_model(folder, num_threads=1)


def bench_of(model: ScriptedModel | SpaceModel, chances: tuple[float, ...] = ALWAYS) -> Bench:
    synthetic = SyntheticAcceptance(chances, vocab_size=model.facts.vocab_size, mask_ids=model.facts.mask_ids)
    chosen = arms([1, 3], [(3, 6)], most_masks=5)
    load = Load(PROMPTS, max_tokens=12)
    return Bench(model, load, chosen, most_sequences=3, synthetic=synthetic, calibration_seconds=0.2)


def test_a_turn_counts_what_its_steps_lay_out_and_emit(small: SpaceModel) -> None:
    bench = bench_of(small)
    bench.learn_texts(3)
    turn = bench.turn(full(3), 3, most_steps=99)
    assert (turn.num_steps, turn.tokens_per_step) == (3, 4.0)  # 1 + 3·4 ≥ 12 tokens, everything accepted
    assert (turn.num_chain_rows, turn.num_mask_rows) == (3 * 3 * 4, 3 * 3 * 12)
    assert min(turn.parts.values()) > 0


def test_every_arm_takes_turns_on_the_same_pages_with_the_same_text(small: SpaceModel) -> None:
    bench = bench_of(small, parse_chances(".57"))
    bench.learn_texts(3)
    for arm in [*arms([1, 3], [(3, 6)], most_masks=5)] * 2:
        turn = bench.turn(arm, 2, most_steps=4)  # raises where a text differs
        assert turn.num_steps == 4
        assert turn.num_tokens >= 8


def test_a_text_that_changes_is_no_measurement() -> None:
    texts = {1: 10}
    model = ScriptedModel(num_masks=5, text=lambda position: 10 + (position * 7 + texts[1]) % 50)
    bench = bench_of(model)
    bench.learn_texts(1)
    texts[1] = 11
    with pytest.raises(PerfError, match="k=3 at batch 1 changed the text of prompt 1"):
        bench.turn(full(3), 1, most_steps=4)


def turn_of(seconds: float, *, tokens: int = 20, rows: int = 20) -> Turn:
    """Ten steps of two sequences."""
    shares = {"network": 0.7, "head": 0.1, "drafting": 0.1, "host": 0.1}
    return Turn(2, 10, tokens, rows // 2, rows // 2, {part: share * seconds for part, share in shares.items()})


def row_of(batch: int, ratio: float, cost: PassCost = FLAT) -> Row:
    plain = Turn(batch, 10, 10 * batch, 10 * batch, 0, {"network": 1.0})
    fast = Turn(batch, 10, 15 * batch, 20 * batch, 20 * batch, {"network": 1.5 / ratio})
    return row("k=1", [fast] * 3, [plain] * 3, cost)


def test_a_row_is_medians_and_ratios_of_rounds() -> None:
    plains = [turn_of(seconds) for seconds in (1.0, 2.0, 4.0)]
    fasts = [turn_of(seconds, tokens=30, rows=80) for seconds in (1.0, 2.0, 40.0)]  # the last one was disturbed
    found = row("k=1", fasts, plains, FLAT)
    assert (found.ratio.median, found.ratio.num) == (1.5, 3)
    assert found.ratio.low == pytest.approx(0.15)
    assert (found.tokens_per_step, found.chain_rows, found.mask_rows) == (1.5, 4.0, 4.0)
    assert found.step_ms == pytest.approx(200.0)
    assert list(found.parts_ms.values()) == pytest.approx([140, 20, 20, 20])


def test_prediction_is_e_where_rows_are_free_and_e_over_t_where_they_are_not() -> None:
    free, dear = row_of(4, 1.0, cost=FLAT), row_of(4, 1.0, cost=LINEAR)
    assert free.predicted == pytest.approx(1.5)
    assert free.limit == pytest.approx(1.5 / 4)
    assert dear.predicted == pytest.approx(dear.limit)


def test_rows_between_measured_ones_are_on_a_line_and_beyond_go_on() -> None:
    curve = RowCurve(((1, 1.0), (2, 1.0), (4, 2.0)))
    assert [curve.seconds(rows) for rows in (1, 1.5, 3, 4, 8)] == [1.0, 1.0, 1.5, 2.0, 4.0]


@pytest.mark.parametrize(
    ("ratios", "at"),
    [
        ([(1, 1.4), (2, 1.2), (4, 1.1)], "> 4"),
        ([(1, 0.9), (2, 0.8)], "< 1"),
        ([(1, 1.5), (4, 1.5), (16, 0.5)], "8.0"),
        ([(8, 1.0), (16, 0.9)], "8.0"),
        ([], "–"),
    ],
)
def test_the_crossing_is_found_over_the_logarithm_of_the_batch(ratios: list[tuple[int, float]], at: str) -> None:
    assert crossing(ratios) == at


def test_tables_with_synthetic_acceptance_say_so(tmp_path: Path) -> None:
    subjects = [Subject("demo", None), Subject("/models/big", parse_chances(".78"))]
    made = report(subjects, [[row_of(batch, ratio) for batch in (1, 2)] for ratio in (1.25, 1.75)], {})
    own, synthetic = made.tables[:2], made.tables[2:]
    assert not any("SYNTHETIC" in table or "1.750" in table for table in own)
    assert all("SYNTHETIC ACCEPTANCE .84 .81 .78 .75 .72" in table.splitlines()[0] for table in synthetic)
    made.write(tmp_path, "overhead")
    records = json.loads((tmp_path / "overhead.json").read_text())["subjects"]
    assert [one["synthetic_acceptance"] for one in records] == [None, [0.84, 0.81, 0.78, 0.75, 0.72]]


def test_the_command_measures_every_layout_beside_plain_decoding(
    capsys: pytest.CaptureFixture[str], small: SpaceModel
) -> None:
    flags = ["--batch", "2", "--k", "1", "--rounds", "1", "--max-tokens", "4", "--steps", "2", "--prompt-tokens", "8"]
    flags += ["--calibration-seconds", "0.1", "--num-threads", "1", "--model", small.facts.name]
    assert main(["overhead", *flags]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 2 |")]
    assert [line.split(" | ")[1] for line in rows] == ["plain", "k=1", "auto"]
    assert "| 4.0 + 4.0 |" in rows[1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--batch", "0"], "must be a whole number of at least 1; got '0'"),
        (["--synthetic-acceptance", ".6"], "must be .78, .57, or five chances"),
        (["--model", "nowhere"], "nowhere"),
        (["--prompt-tokens", "5000"], "--prompt-tokens is 5000; with --max-tokens it is at most"),
    ],
)
def test_unusable_flags_end_with_2_and_a_reason(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["overhead", *flags])
    except SystemExit as left:
        status = int(left.code or 0)
    assert status == 2
    assert reason in capsys.readouterr().err
