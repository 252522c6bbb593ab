"""`spaceserve eval acceptance --url` on a running server: what it asks, counts and writes, and what stops it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import Live
from space_eval.__main__ import main
from space_eval.acceptance import served
from space_eval.acceptance.served import ServedAnswer
from space_eval.report import from_json

QUESTIONS = [
    {"turns": ["What is a fox?", "And a hare?"]},
    {"question": "Name a colour."},
    {"prompt": "def add(a, b):\n"},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "three.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8")
    return file


def flags(live: Live, prompts: Path, *more: str) -> list[str]:
    return ["acceptance", "--url", live.url, "--prompts", str(prompts), "--max-tokens", "12", *more]


def answers_of(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "settings" not in line]


def test_every_turn_is_answered_with_every_setting_and_exactly_k_drafts(
    live: Live, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    settings = ["--k", "2", "--temperature", "0", "0.8", "--at-once", "3", "--out", str(out)]
    assert main(flags(live, prompts, *settings)) == 0
    answers = [from_json(ServedAnswer, line) for line in answers_of(out)]
    turns = {(0, 0), (0, 1), (1, 0), (2, 0)}
    assert {one.key for one in answers} == {(t, k, *turn) for t in (0.0, 0.8) for k in (0, 2) for turn in turns}
    for one in answers:
        assert one.num_decoded == len(one.ids) - 1  # the prefill gives the first
        assert one.num_decoded == one.num_steps + one.num_accepted
        if one.max_drafts == 0:
            assert (one.num_drafted, one.num_steps) == (0, one.num_decoded)
        else:
            assert one.num_steps < one.num_drafted <= 2 * one.num_steps  # fewer only where the text ends
    rows = json.loads((out / "acceptance.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["temperature"], row["max_drafts"], row["num_outputs"]) for row in rows] == [
        (0.0, 0, 4), (0.0, 2, 4), (0.8, 0, 4), (0.8, 2, 4)
    ]  # fmt: skip
    table = capsys.readouterr().out
    assert f"{rows[1]['tokens_per_step']:.2f} ({rows[1]['bounds'][0]:.2f}–{rows[1]['bounds'][1]:.2f})" in table
    # A turn goes through the chat template with the answers before it, a prompt does not.
    with_template, plain = (one for one in answers if one.key in {(0.0, 0, 1, 0), (0.0, 0, 2, 0)})
    body = {"model": live.model, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    asked = {**body, "prompt": QUESTIONS[2]["prompt"]}
    assert live.http.post("/v1/completions", json=asked).json()["choices"][0]["token_ids"] == list(plain.ids)
    asked = {**body, "messages": [{"role": "user", "content": "Name a colour."}]}
    assert live.http.post("/v1/chat/completions", json=asked).json()["choices"][0]["token_ids"] == list(
        with_template.ids
    )


def test_a_stopped_run_goes_on_and_another_one_is_refused(
    live: Live, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    settings = ["--k", "1", "--temperature", "0", "--out", str(out)]
    assert main(flags(live, prompts, *settings)) == 0
    whole, page = answers_of(out), (out / "acceptance.json").read_text(encoding="utf-8")
    lines = (out / "answers.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (out / "answers.jsonl").write_text("".join(lines[:4]), encoding="utf-8")
    asked = []
    ask = served.ServedAcceptance._ask

    async def counted(self: Any, question: Any, key: Any) -> ServedAnswer:
        asked.append(key)
        return await ask(self, question, key)

    monkeypatch.setattr(served.ServedAcceptance, "_ask", counted)
    assert main(flags(live, prompts, *settings)) == 0
    assert len(asked) == len(whole) - 3

    def texts(lines: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return sorted((line["max_drafts"], line["conversation"], line["turn"], line["text"]) for line in lines)

    assert texts(answers_of(out)) == texts(whole)
    assert json.loads(page)["rows"][0]["num_outputs"] == 4
    assert main(flags(live, prompts, *settings, "--seed", "5")) == 2
    assert "holds answers for seed 0; this run has 5" in capsys.readouterr().err


def test_another_text_with_drafts_ends_the_run(
    live: Live, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = served.ServedAcceptance._ask

    async def wrong(self: Any, question: Any, key: Any) -> ServedAnswer:
        answer = await ask(self, question, key)
        return replace(answer, ids=(*answer.ids[:-1], answer.ids[-1] + 1)) if answer.key[1:] == (1, 1, 0) else answer

    monkeypatch.setattr(served.ServedAcceptance, "_ask", wrong)
    assert main(flags(live, prompts, "--k", "1", "--temperature", "0")) == 1
    assert "Prompt 2, turn 1: k=1 gives another text than no drafts do." in capsys.readouterr().err


def test_flags_of_a_model_that_is_loaded_here_are_refused(
    live: Live, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(live, prompts, "--weights", "int8")) == 2
    assert (
        "--weights goes with a model that is loaded here; the server at --url has its own." in capsys.readouterr().err
    )


def test_a_server_that_is_away_or_takes_no_drafts_is_one_line(
    live: Live, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["acceptance", "--url", "http://127.0.0.1:9", "--prompts", str(prompts)]) == 2
    assert "No connection to 127.0.0.1:9" in capsys.readouterr().err
    read = served.get_json

    async def without_masks(endpoint: Any, path: str) -> dict[str, Any]:
        found = await read(endpoint, path)
        return found | {"speculation": found["speculation"] | {"max_request": 0}} if path == "/info" else found

    monkeypatch.setattr(served, "get_json", without_masks)
    assert main(flags(live, prompts)) == 2
    assert "takes no `speculation: k`" in capsys.readouterr().err
