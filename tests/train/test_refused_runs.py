"""A command that is refused leaves the run in its folder as it was, and what is worth refusing is refused first."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.train_command import train, write_records
from space_train.data.examples import Example
from space_train.data.rows import PackedExamples
from space_train.data.train_batch import Texts, _places
from space_train.run_folder import FolderLock, check_same
from space_train.self_generation.self_generate import OwnText, OwnTexts, ScribeCounts
from space_train.train_plan import InvalidPlan

OWN = "--self-generate 3 --self-generate-tokens 8 --own-share 0.5"


def chats(file: Path, word: str) -> Path:
    records = [{"instruction": f"Say {n}", "output": f"{word} and {n} more {word} on a mat"} for n in range(20)]
    return write_records(file, records)


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Replace the worker by a writer that appends the texts that the file lacks; yields the prompts of each call."""
    calls: list[list[list[int]]] = []

    def write(checkpoint: Any, prompts: list[list[int]], *, max_tokens: int, file: Path, **_: Any) -> OwnTexts:
        calls.append(prompts)
        recipe = {"model": "m", "max_tokens": max_tokens, "eos_stops": True, "banned_ids": []}
        texts = [OwnText(tuple(p), (20, 21, 22), (0.0, 0.7, 1.0)[n % 3], n) for n, p in enumerate(prompts)]
        there = file.read_text().splitlines() if file.exists() else []
        lines = [json.dumps(text.__dict__ | recipe) for text in texts]
        with file.open("a") as stream:
            stream.writelines(line + "\n" for line in lines if line not in there)
        return OwnTexts(tuple(texts), 0, ScribeCounts(num_rows=5), 0.1)

    monkeypatch.setattr("space_train.text_source.write_own_texts", write)
    return calls


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("data", "flags", "named"),
    [
        ("dog", OWN, "text of --data"),
        ("cat", OWN.replace("generate 3", "generate 4"), "self_generate = 3; this one has 4"),
        ("cat", OWN.replace("tokens 8", "tokens 6"), "self_generate_tokens = 8; this one has 6"),
        ("cat", OWN.replace("0.5", "0.25"), "own_share = 0.5; this one has 0.25"),
        ("cat", "", "self_generate = 3; this one has 0"),
        ("cat", OWN + " --seed 1", "seed = 0; this one has 1"),
        ("cat", OWN + " --num-masks 2", "num_masks = 3; this one has 2"),
    ],
)
def test_another_command_on_the_folder_of_a_run_is_refused_before_it_writes_anything(
    data: str,
    flags: str,
    named: str,
    base: Path,
    tmp_path: Path,
    written: list[list[list[int]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    cat, out = chats(tmp_path / "cat.jsonl", "cat"), tmp_path / "out"
    assert train(base, cat, out, OWN) == 0
    before = files_of(out)
    assert train(base, chats(tmp_path / f"{data}.jsonl", data), out, flags) == 2
    assert named in capsys.readouterr().err
    assert len(written) == 1, "no text is written for a command that is refused"
    assert files_of(out) == before
    assert train(base, cat, out, OWN + " --steps 4") == 0, "the command of the run goes on"


def test_texts_of_another_command_in_the_file_are_not_part_of_a_run(base: Path, tmp_path: Path) -> None:
    """As where a command was stopped while it wrote them, before there was a state to compare with."""
    cat, out = chats(tmp_path / "cat.jsonl", "cat"), tmp_path / "out"
    assert train(base, cat, out, OWN) == 0
    (out / "state.pt").rename(tmp_path / "state.pt")
    assert train(base, chats(tmp_path / "dog.jsonl", "dog"), out, OWN) == 0
    (tmp_path / "state.pt").rename(out / "state.pt")
    assert len((out / "own_texts.jsonl").read_text().splitlines()) > 3
    assert train(base, cat, out, OWN + " --steps 4") == 0


@pytest.fixture(scope="module")
def finished(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and the run of a command; to be copied."""
    folder: Path = tmp_path_factory.mktemp("finished")
    assert train(base, chats(folder / "cat.jsonl", "cat"), folder / "out") == 0
    return folder


@pytest.mark.parametrize(
    ("data", "flags"),
    [
        ("", ""),
        ("cat", "--method head"),
        ("cat", "--method full --mask-ids 5000"),
        ("cat", "--template missing.jinja"),
        ("cat", "--self-generate 3 --self-generate-tokens 48"),
        ("cat", "--rows-per-step 3 --accumulate 2"),
    ],
)
def test_a_refused_restart_forgets_nothing(data: str, flags: str, base: Path, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    out = tmp_path / "out"
    before = files_of(out)
    (tmp_path / ".jsonl").write_text("")
    assert train(base, tmp_path / f"{data}.jsonl", out, f"{flags} --restart") == 2
    assert files_of(out) == before


def test_another_model_is_named_before_what_differs_with_it() -> None:
    before = {"adapter and draft head of the model": "a", "model": "b", "weights of the model": "c"}
    with pytest.raises(InvalidPlan, match=r"holds a run with model = b; this one has B\."):
        check_same(before, {name: value.upper() for name, value in before.items()}, Path("out"))


def test_another_run_is_named_before_its_memory(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cure for the memory, which keeps the run, would be of no use."""
    cat, out = chats(tmp_path / "cat.jsonl", "cat"), tmp_path / "out"
    assert train(base, cat, out) == 0
    monkeypatch.setattr("space_train.session.in_memory", lambda *_, **__: pytest.fail("memory is estimated"))
    assert train(base, cat, out, "--seed 1") == 2
    assert "seed = 0; this one has 1" in capsys.readouterr().err


def test_a_folder_that_another_process_trains_in_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cat, out = chats(tmp_path / "cat.jsonl", "cat"), tmp_path / "out"
    assert train(base, cat, out) == 0
    before = files_of(out)
    with FolderLock(out) as lock:
        lock.take()
        for flags in ("", "--restart", "--steps 4"):
            assert train(base, cat, out, flags) == 2
            assert f"Another process is training in {out}" in capsys.readouterr().err
    assert files_of(out) == before
    assert train(base, cat, out, "--steps 4") == 0


@pytest.mark.parametrize("place", ["file", "file/below", "closed/run"])
def test_a_place_that_cannot_be_written_is_named_before_the_model_is_read(
    place: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr("space_train.run_folder.os.access", lambda path, _: Path(path).name != "closed")
    monkeypatch.setattr("space_train.session.load_base", lambda *_: pytest.fail("the model is read"))
    assert train(base, chats(tmp_path / "cat.jsonl", "cat"), tmp_path / place) == 2
    said = capsys.readouterr().err
    named = "closed cannot be written" if "closed" in place else "file is a file, not a folder"
    assert named in said
    assert "Give another --out" in said


def test_a_refused_command_makes_no_folder(base: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert train(base, tmp_path / "empty.jsonl", tmp_path / "out") == 2
    assert not (tmp_path / "out").exists()


def test_short_data_is_not_padded_and_no_mask_is_trained_twice(base: Path, tmp_path: Path) -> None:
    """One record: a row of its own ids, and no more masks than it has places for."""
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"instruction": "Say it", "output": "the cat sat on a mat"}) + "\n")
    flags = "--length 256 --held-out-share 0 --steps 1 --rows-per-step 1"
    assert train(base, file, tmp_path / "out", flags) == 0
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["plan"]["length"] == record["num_tokens"] < 64
    most = record["num_tokens"] * 3  # as many masks a place
    assert 0 < record["num_masks"] <= most
    assert record["plan"]["anchors_per_token"] <= 0.375


def test_the_fullest_row_and_its_places_are_counted() -> None:
    examples = [
        Example(list(range(1, 9)), [False, False, True, True, False, True, True, True]),
        Example([1, 2, 3], [False, True, True]),
        Example(list(range(1, 12)), [False] * 10 + [True]),
    ]
    data = PackedExamples(examples, length=16, seed=0, pad_id=0)
    rows = data.rows(0, len(data))
    assert data.longest == int((rows.document >= 0).sum(1).max()) == 14
    texts = Texts(rows.ids, rows.learned, rows.document, torch.ones(len(rows.ids), dtype=torch.bool))
    assert data.most_places == max(len(places) for places in _places(texts))
