"""`spaceserve bench overhead`: rows, time by part, the batch at which masks stop paying, and its plain labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from space_eval import overhead
from space_eval.make_model import Size, random_llama
from space_eval.overhead_arms import arms, full
from space_eval.overhead_curve import PassCost, RowCurve, crossing
from space_eval.overhead_model import TimedModel
from space_eval.overhead_report import Measured, Row, Subject, draw, row, to_markdown, write
from space_eval.overhead_turns import Bench, Load, OverheadError, Parts, Turn
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_server.speculation.controller import FixedLayout
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance, parse_chances
from space_server.testing import ScriptedModel, SmallRouter
from space_server.worker import Worker

PROMPTS = [[10 + n, 20, 30] for n in range(3)]
ALWAYS = (1.0,) * 5
FLAT = PassCost(RowCurve(((1, 1.0), (2, 1.0))), RowCurve(((1, 0.0), (2, 0.0))))  # rows are free
LINEAR = PassCost(RowCurve(((1, 1.0), (2, 2.0))), RowCurve(((1, 0.0), (2, 0.0))))  # far above the ridge


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    folder = random_llama(tmp_path_factory.mktemp("random") / "small", Size(64, 2, 2, 96, 500, 256, 8))
    return load_model(folder, num_threads=1)


class Ticks:
    """Every look at it is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def bench_of(
    model: ScriptedModel | SpaceModel,
    chances: tuple[float, ...] = ALWAYS,
    max_tokens: int = 12,
    *,
    by_cost: bool = False,
) -> Bench:
    synthetic = SyntheticAcceptance(chances, vocab_size=model.facts.vocab_size, mask_ids=model.facts.mask_ids)
    return Bench(
        model,
        Load(PROMPTS, max_tokens),
        arms([1, 3], [(3, 6)], most_masks=5),
        most_sequences=3,
        synthetic=synthetic,
        calibration_seconds=0.2,
        by_cost=by_cost,
    )


def test_a_turn_counts_what_its_steps_lay_out_and_emit(small: SpaceModel) -> None:
    bench = bench_of(small)
    bench.learn_texts(3)
    turn = bench.turn(full(3), 3, most_steps=99)
    assert (turn.num_steps, turn.tokens_per_step) == (3, 4.0)  # 1 + 3·4 ≥ 12 tokens, everything accepted
    assert (turn.num_chain_rows, turn.num_mask_rows) == (3 * 3 * 4, 3 * 3 * 12)
    assert turn.verifications == [(3, 3)] * 9
    assert min(turn.parts.network, turn.parts.head, turn.parts.drafting, turn.parts.host) > 0
    assert len(turn.chain_shares) == 1


def test_every_arm_takes_turns_on_the_same_pages_with_the_same_text(small: SpaceModel) -> None:
    bench = bench_of(small, parse_chances(".57"))
    bench.learn_texts(3)
    for arm in [*arms([1, 3], [(3, 6)], most_masks=5)] * 2:
        turn = bench.turn(arm, 2, most_steps=4)  # raises where a text differs
        assert turn.num_steps == 4
        assert turn.num_tokens >= 8


def test_by_cost_equal_steps_take_equal_time_whatever_the_clock_says(small: SpaceModel) -> None:
    bench = bench_of(small, by_cost=True)
    bench.learn_texts(3)
    turns = [bench.turn(full(3), 3, most_steps=99) for _ in range(3)]
    assert len({round(turn.parts.total, 12) for turn in turns}) == 1
    assert turns[0].parts.total > bench.turn(full(1), 3, most_steps=3).parts.total > 0
    assert turns[0].parts.network == 0.0


def test_a_text_that_changes_is_no_measurement() -> None:
    texts = {1: 10}
    model = ScriptedModel(num_masks=5, text=lambda position: 10 + (position * 7 + texts[1]) % 50)
    bench = bench_of(model)
    bench.learn_texts(1)
    texts[1] = 11
    with pytest.raises(OverheadError, match="k=3 at batch 1 changed the text of prompt 1"):
        bench.turn(full(3), 1, most_steps=4)


def test_the_chain_alone_is_the_same_rows_without_masks(small: SpaceModel) -> None:
    seen: list[tuple[int, int]] = []

    class Watched(TimedModel):
        def forward(self, batch, kv):  # type: ignore[no-untyped-def]
            seen.append((batch.num_chain_rows, batch.num_mask_rows))
            return super().forward(batch, kv)

    watched = Watched(small)
    timed = TimedModel(watched, Ticks())
    router = SmallRouter(Worker(timed, num_blocks=32, controller=FixedLayout.full(2)))
    router.admit([10, 20], max_tokens=12)
    router.admit([30, 20, 10], max_tokens=12)
    for _ in range(3):
        router.step()
    last = seen[-1]
    text = [list(sequence.ids) for sequence in router.worker.batch]
    assert timed.chain_share(masks_first=True) == 1.0  # by this clock every pass takes a second
    assert seen[-2:] == [last, (last[0], 0)]
    timed.chain_share(masks_first=False)
    assert seen[-2:] == [(last[0], 0), last]
    assert [list(sequence.ids) for sequence in router.worker.batch] == text
    router.run()
    alone = SmallRouter(Worker(small, num_blocks=32, controller=FixedLayout.full(2)))
    alone.admit([10, 20], max_tokens=12)
    alone.admit([30, 20, 10], max_tokens=12)
    alone.run()
    assert [ran.tokens for ran in router.ran.values()] == [ran.tokens for ran in alone.ran.values()]


def turn_of(arm: str, seconds: float, *, tokens: int = 20, rows: int = 20) -> Turn:
    """Ten steps of two sequences."""
    parts = Parts(network=0.7 * seconds, head=0.1 * seconds, drafting=0.1 * seconds, host=0.1 * seconds)
    return Turn(arm, 2, 10, tokens, rows // 2, rows // 2, parts, [0.4, 0.5, 9.0], [(1, 1), (1, 0)])


def row_of(batch: int, ratio: float, arm: str = "k=1", cost: PassCost = FLAT) -> Row:
    plain = Turn("plain", batch, 10, 10 * batch, 10 * batch, 0, Parts(network=1.0))
    fast = Turn(arm, batch, 10, 15 * batch, 20 * batch, 20 * batch, Parts(network=1.5 / ratio), [], [(1, 1), (1, 0)])
    return row([fast] * 3, [plain] * 3, cost)


def test_a_row_is_medians_and_ratios_of_rounds() -> None:
    plains = [turn_of("plain", seconds) for seconds in (1.0, 2.0, 4.0)]
    fasts = [turn_of("k=1", seconds, tokens=30, rows=80) for seconds in (1.0, 2.0, 40.0)]  # the last one was disturbed
    found = row(fasts, plains, FLAT)
    assert (found.ratio.median, found.ratio.num) == (1.5, 3)
    assert found.ratio.low == pytest.approx(0.15)
    assert (found.tokens_per_step, found.chain_rows, found.mask_rows) == (1.5, 4.0, 4.0)
    assert found.step_ms == pytest.approx(200.0)
    assert list(found.parts_ms.values()) == pytest.approx([70, 70, 20, 20, 20])
    assert found.accepted_share == (0.5,)


def test_prediction_is_e_where_rows_are_free_and_e_over_t_where_they_are_not() -> None:
    free, dear = row_of(4, 1.0, cost=FLAT), row_of(4, 1.0, cost=LINEAR)
    assert free.predicted == pytest.approx(1.5)
    assert free.limit == pytest.approx(1.5 / 4)
    assert dear.predicted == pytest.approx(dear.limit)


def test_rows_between_measured_ones_lie_on_a_line_and_beyond_go_on() -> None:
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


def measured_of(subject: Subject, ratio: float) -> Measured:
    return Measured(subject, {"machine": "m"}, FLAT, [row_of(batch, ratio) for batch in (1, 2)])


def test_tables_with_synthetic_acceptance_say_so_and_show_the_trained_row_beside() -> None:
    trained, synthetically_accepted = Subject("demo", None), Subject("/models/big", parse_chances(".78"))
    text = to_markdown([measured_of(trained, 1.25), measured_of(synthetically_accepted, 1.75)])
    plain_part, _, loud_part = text.partition("## big")
    assert "SYNTHETIC" not in plain_part
    assert "1.750" not in plain_part
    titles = [line for line in loud_part.splitlines() if line.startswith(("Steps of", "Batch at which", " — ", ","))]
    assert titles
    assert all("SYNTHETIC ACCEPTANCE .84 .81 .78 .75 .72" in line for line in titles if line[0] != ",")
    rows = [line for line in loud_part.splitlines() if "| k=1 |" in line and line.startswith(("| 1 ", "| 2 "))]
    assert len(rows) == 2
    assert all("1.750" in line and "1.250" in line for line in rows)


def test_the_command_measures_every_layout_beside_plain_decoding(
    capsys: pytest.CaptureFixture[str], small: SpaceModel
) -> None:
    flags = ["--batch", "2", "--k", "1", "--rounds", "1", "--max-tokens", "4", "--steps", "2", "--prompt-tokens", "8"]
    flags += ["--calibration-seconds", "0.1", "--num-threads", "1", "--model", small.facts.name]
    assert overhead.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| 2 |")]
    assert [line.split(" | ")[1] for line in rows] == ["plain", "k=1", "auto"]
    assert "| 4.0 + 4.0 |" in rows[1]
    assert overhead.main([*flags, "--by-cost"]) == 0
    assert "what was measured at the start for its size" in capsys.readouterr().out


def test_the_figure_is_a_picture_for_each_subject(tmp_path: Path) -> None:
    files = draw(tmp_path, [measured_of(Subject("big", chances), 1.5) for chances in (None, ALWAYS)])
    assert [file.name for file in files] == ["overhead-1.png", "overhead-2.png"]
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files)


def test_a_record_of_synthetic_acceptance_has_its_chances(tmp_path: Path) -> None:
    write(tmp_path, [measured_of(Subject("big", parse_chances(".57")), 1.0)])
    (subject,) = json.loads((tmp_path / "overhead.json").read_text())["subjects"]
    assert subject["synthetic_acceptance"] == [0.63, 0.60, 0.57, 0.54, 0.51]
    assert "SYNTHETIC" in subject["title"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--batch", "0"], "must be a whole number of at least 1; got '0'"),
        (["--synthetic-acceptance", ".6"], "must be .78, .57, or five chances"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_flags_that_make_no_sense_end_in_2_and_a_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = overhead.main(flags)
    except SystemExit as left:
        status = left.code  # type: ignore[assignment]
    assert status == 2
    assert said in capsys.readouterr().err
