"""Texts of a model's own on disk: appended line by line, by one process at a time, and readable after any end."""

import errno
import io
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from space_train.data.examples import Example
from space_train.self_generation.self_generate import (
    OtherTexts,
    OwnText,
    OwnTextFile,
    OwnTextRecipe,
    keep_asked,
    own_examples,
)
from space_train.train_plan import OwnTextError

RECIPE = OwnTextRecipe("abc", 12, True)
TEXT = OwnText((1, 2), (3,), 0.7, 9)


def test_a_file_of_another_law_or_another_content_is_refused_whole(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    with OwnTextFile(path, RECIPE) as file:
        file.append(TEXT)
    with (
        pytest.raises(OtherTexts, match="max_tokens 12, and 13 is asked for"),
        OwnTextFile(path, OwnTextRecipe("abc", 13, True)),
    ):
        pass
    with pytest.raises(OtherTexts, match="model abc, and abd"), OwnTextFile(path, OwnTextRecipe("abd", 12, True)):
        pass
    path.write_text('{"text": "hello"}\n')
    with pytest.raises(OwnTextError, match=r"Line 1 .* is no text"), OwnTextFile(path, RECIPE):
        pass


def test_a_file_that_another_process_writes_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, found = tmp_path / "own.jsonl", list[OwnText]()

    def second() -> None:
        with OwnTextFile(path, RECIPE) as file:
            found.extend(file.texts)

    with OwnTextFile(path, RECIPE) as file:
        waiting = threading.Thread(target=second)
        waiting.start()
        file.append(TEXT)
        while "waiting for another process" not in capsys.readouterr().err:
            assert waiting.is_alive()
    waiting.join(10)
    assert found == [TEXT]


def test_a_full_disk_is_named_and_half_a_line_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.jsonl"
    with OwnTextFile(tmp_path / "one.jsonl", RECIPE) as file:
        file.append(TEXT)
    length = (tmp_path / "one.jsonl").stat().st_size

    class FillsUp(io.FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            if self.tell() > 2.5 * length:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[:50])  # a disk may take a part

    monkeypatch.setattr("space_train.self_generation.self_generate.io.FileIO", FillsUp)
    with OwnTextFile(path, RECIPE) as file:
        file.append(replace(TEXT, seed=0))
        file.append(replace(TEXT, seed=1))
        with pytest.raises(OwnTextError, match=r"No space left on device.*make room"):
            file.append(replace(TEXT, seed=2))
    assert not path.read_bytes().endswith(b"\n")
    monkeypatch.undo()
    with OwnTextFile(path, RECIPE) as file:
        assert [text.seed for text in file.texts] == [0, 1]
    assert path.read_bytes().endswith(b"\n")


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(OwnTextError, match="cannot be written: Is a directory"), OwnTextFile(tmp_path, RECIPE):
        pass


def test_a_line_says_all_that_its_text_depends_on(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    with OwnTextFile(path, RECIPE) as file:
        file.append(TEXT)
    assert json.loads(path.read_text()) == {
        "prompt": [1, 2],
        "output": [3],
        "temperature": 0.7,
        "seed": 9,
        "model": "abc",
        "max_tokens": 12,
        "eos_stops": True,
        "banned_ids": [],
    }


def test_examples_learn_the_output_and_come_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    with OwnTextFile(path, RECIPE) as file:
        file.append(TEXT)
        file.append(OwnText((5,), (6, 7), 0.0, 8))
    assert own_examples(path) == [Example([5, 6, 7], [False, True, True]), Example([1, 2, 3], [False, False, True])]


def test_of_a_file_only_what_is_asked_for_under_the_same_law_is_kept(tmp_path: Path) -> None:
    path, other = tmp_path / "own.jsonl", OwnText((5,), (6, 7, 8), 0.0, 8)
    assert keep_asked(path, RECIPE, {TEXT.question}) == 0.0
    with OwnTextFile(path, RECIPE) as file:
        file.append(other)
        file.append(TEXT)
    with path.open("a") as stream:
        stream.write('{"prompt": [1')
    assert keep_asked(path, RECIPE, {TEXT.question}) == 0.25  # one id of four
    with OwnTextFile(path, RECIPE) as file:
        assert file.texts == [TEXT]
    assert keep_asked(path, replace(RECIPE, model="abd"), {TEXT.question}) == 0.0
    assert not path.exists()
