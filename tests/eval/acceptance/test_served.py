"""The rows of `spaceserve eval acceptance --url`: what they count, and their bounds."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from space_eval.__main__ import main
from space_eval.acceptance import served
from space_eval.acceptance.served import COLUMNS, ServedAnswer, ServedRow
from space_eval.report import bootstrap, columns_table, ratio_of_sums


def test_rows_are_means_over_steps_and_loops_are_apart() -> None:
    def answer(number: int, k: int, *, num_steps: int, ids: Sequence[int], seconds: float) -> ServedAnswer:
        return ServedAnswer(0.0, k, number, 0, tuple(ids), "", num_steps, len(ids) - 1, num_steps * k, 3, seconds)

    steady, loop = list(range(13)), [7] * 25
    plain = [answer(0, 0, num_steps=12, ids=steady, seconds=2.0), answer(1, 0, num_steps=24, ids=loop, seconds=4.0)]
    drafted = [answer(0, 1, num_steps=8, ids=steady, seconds=1.0), answer(1, 1, num_steps=12, ids=loop, seconds=2.0)]
    row = ServedRow.of(drafted, plain)
    assert (row.tokens_per_step, row.tokens_per_step_not_looping, row.looping) == (36 / 20, 12 / 8, 0.5)
    assert (row.speedup, row.tokens_per_second, row.accepted) == (2.0, 38 / 3, 6 / 20)
    assert row.bounds == (12 / 8, 24 / 12)
    assert row.bounds_not_looping == (1.5, 1.5)


def test_bounds_of_a_ratio_hold_its_truth_as_often_as_they_say() -> None:
    source, held = random.Random(3), 0
    for _ in range(200):
        parts = [
            (2.0 * below + source.choice((-3, 0, 3)), float(below)) for below in source.choices(range(3, 30), k=40)
        ]
        low, high = bootstrap(parts, statistic=ratio_of_sums, num_resamples=400)
        held += low <= 2.0 <= high
    assert 180 <= held <= 199


def test_what_was_not_counted_is_a_dash() -> None:
    loop = [7] * 25
    rows = [ServedRow.of([ServedAnswer(0.0, 0, 0, 0, tuple(loop), "", 24, 24, 0, 0, 1.0)] * 2, [])]
    assert "| – (–––) | 100% | – |" in columns_table(COLUMNS, rows)


def test_a_server_that_does_not_know_its_model_yet_is_not_said_to_have_no_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def get_json(_: object, path: str) -> dict[str, Any]:
        return {"/info": {"model_sha": None, "speculation": None}, "/v1/models": {"data": [{"id": "m"}]}}[path]

    monkeypatch.setattr(served, "get_json", get_json)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n', encoding="utf-8")
    assert main(["acceptance", "--url", "http://127.0.0.1:1", "--prompts", str(prompts)])
    assert "http://127.0.0.1:1 is not ready" in capsys.readouterr().err
