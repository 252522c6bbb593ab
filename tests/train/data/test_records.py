"""Records come out of files, folders and datasets, in every known form; what cannot be read says where and why."""

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from space_train.data.records import (
    BadRecord,
    DataConversation,
    DataError,
    PlainText,
    Role,
    SourceNotFound,
    SourceRecord,
    documents,
    records,
)

ROWS = [{"instruction": "a", "output": "b"}, {"instruction": "c", "output": "d"}]


def read(source: Path | str, split: str = "train") -> list[tuple[str, object]]:
    """(file:line, value) of every record."""
    return [(record.where, record.value) for record in records(str(source), split=split)]


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package, with its cache in a temporary folder and the hub out of reach."""
    package = importlib.import_module("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(package.config, "HF_HUB_OFFLINE", True)
    package.disable_progress_bars()
    yield package
    package.enable_progress_bars()


def test_json_lines_are_read_one_a_line_and_blank_lines_count(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"x": 1}\n\n{"x": 2}\n', encoding="utf-8-sig")
    assert read(file) == [(f"{file}:1", {"x": 1}), (f"{file}:3", {"x": 2})]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (json.dumps([{"x": 1}, {"x": 2}]), [1, 1]),
        (json.dumps([{"x": 1}, {"x": 2}], indent=1), [2, 5]),
        ('{"x": 1}\n{"x": 2}\n', [1, 2]),
        ('\n[\n{"x": 1}\n,\n{"x":\n2}]', [3, 5]),
    ],
)
def test_a_json_file_is_a_list_or_records_one_after_the_other(tmp_path: Path, text: str, lines: list[int]) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    assert read(file) == [(f"{file}:{line}", {"x": x}) for line, x in zip(lines, (1, 2), strict=True)]


def test_a_text_file_is_one_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert read(tmp_path / "a.txt") == [(f"{tmp_path / 'a.txt'}:1", {"text": "one\ntwo\n"})]


def test_a_folder_is_every_file_below_it_by_path_without_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.md", "a/d.png", ".git/e.txt", "z.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [value for _, value in read(tmp_path)] == [{"text": name} for name in ("a/c.md", "b.txt", "z.py")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"x": 1}\n{"x":\n', r"a.jsonl:2 is not JSON: Expecting value"),
        ("a.json", '[{"x": 1},\n{"x" 2}]', r"a.json:2 is not JSON: Expecting ':' delimiter"),
        ("a.json", '[{"x": 1},\n{"x": 2}\n', r"a.json:3 is not JSON: the list must go on .* Was the file cut off"),
        ("a.json", '[{"x": 1} {"x": 2}]', r"a.json:1 is not JSON: the list must go on"),
        ("a.json", "[", r"a.json:1 is not JSON: the list must go on"),
    ],
)
def test_broken_json_is_refused_with_file_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadRecord, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"text": "\xff\xfe"}')
    with pytest.raises(BadRecord, match=r"is not UTF-8 \(invalid start byte\)\. Convert it first"):
        read(tmp_path / name)


@pytest.mark.parametrize("source", ["/no/such/place", "./nothing", "~/nothing-at-all", "data.jsonl", "x.parquet", " "])
def test_a_path_with_nothing_there_says_so(source: str) -> None:
    with pytest.raises(SourceNotFound, match="There is no file or folder"):
        read(source)


def test_a_pipe_is_not_said_to_be_missing_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "texts.jsonl")
    with pytest.raises(SourceNotFound, match="Give a file, a folder, or the id of a dataset, not a pipe"):
        read(tmp_path / "texts.jsonl")


def test_a_file_of_unknown_kind_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_text("")
    with pytest.raises(SourceNotFound, match=r"ends in \.zip, which says no .*\. Unpack it, and name it .*\.jsonl"):
        read(tmp_path / "a.zip")


def test_a_folder_without_data_names_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="has nothing to read: no file"):
        read(tmp_path)
    (tmp_path / "a.png").write_text("")
    (tmp_path / "b").write_text("")
    with pytest.raises(SourceNotFound, match=r"has nothing to read: \(none\), \.png\. Read are"):
        read(tmp_path)


def test_plain_files_have_one_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for source in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(SourceNotFound, match="has no split 'test': plain files are all of the split 'train'"):
            read(source, "test")


def test_an_unreadable_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")

    def refused(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(DataError, match=r"a\.txt cannot be read: Permission denied"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("form", ["parquet file", "folder of parquet", "csv", "save_to_disk", "saved splits"])
def test_tables_are_read_through_datasets(tmp_path: Path, datasets: Any, form: str) -> None:
    table, path = datasets.Dataset.from_list(ROWS), tmp_path / "data"
    if form == "parquet file":
        path = tmp_path / "data.parquet"
        table.to_parquet(str(path))
    elif form == "folder of parquet":
        path.mkdir()
        table.to_parquet(str(path / "train.parquet"))
        (path / "README.md").write_text("a card")
    elif form == "csv":
        path = tmp_path / "data.csv"
        table.to_csv(str(path))
    elif form == "save_to_disk":
        table.save_to_disk(str(path))
    else:
        datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(str(path))
        assert [value for _, value in read(path, "test")] == ROWS[1:]
    found = read(path)
    assert [value for _, value in found] == ROWS
    assert [where for where, _ in found] == [f"{path}[train]:1", f"{path}[train]:2"]


def test_a_missing_split_is_refused_with_those_there_are(tmp_path: Path, datasets: Any) -> None:
    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(SourceNotFound, match="has no split 'test'; it has train"):
        read(tmp_path / "saved", "test")
    (tmp_path / "folder").mkdir()
    table.to_parquet(str(tmp_path / "folder" / "train.parquet"))
    with pytest.raises(SourceNotFound, match=r"`datasets` does not open .*\(split 'test'\): .*test"):
        read(tmp_path / "folder", "test")


def test_a_dataset_that_the_hub_does_not_give_is_refused_in_one_line(datasets: Any) -> None:
    with pytest.raises(SourceNotFound, match=r"'owner/none' is no file or folder here, and `datasets`") as caught:
        read("owner/none")
    assert "\n" not in str(caught.value)


def test_an_id_of_the_hub_may_name_a_configuration(datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*names: object, **options: object) -> list[object]:
        asked.append((names, options))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [value for _, value in read("openai/gsm8k:main", "test")] == ROWS
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]


def test_without_the_package_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DataError, match=r"owner/name needs the package `datasets`: pip install 'spaceserve\[train\]'"):
        read("owner/name")


ASKED_AND_ANSWERED = [("user", "Hi?", False), ("assistant", "Ho.", True)]


def said(record: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """(role, content, learned) of each turn."""
    ((_, _, document),) = documents([SourceRecord("data.jsonl", 1, record)])
    assert isinstance(document, DataConversation)
    return [(str(turn.role), turn.content, turn.learned) for turn in document.turns]


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "Hi?", "input": "", "output": "Ho."},
        {"instruction": "Hi?", "output": "Ho.", "text": "### Instruction: Hi? ### Response: Ho."},
        {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}]},
        {"conversations": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]},
        {"conversations": ["Hi?", "Ho."], "source": "lima"},
        {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi?"}]},
                {"role": "model", "content": "Ho."},
            ]
        },
        {"prompt": "Hi?", "completion": "Ho."},
        {"prompt": [{"role": "user", "content": "Hi?"}], "completion": [{"role": "assistant", "content": "Ho."}]},
        {"prompt": "Hi?", "response": "Ho."},
        {"question": "Hi?", "answer": "Ho."},
        {"instruction": "Hi?", "context": "", "response": "Ho.", "category": "qa"},
    ],
    ids=lambda record: "+".join(record),
)
def test_each_form_says_who_asked_and_who_answered(record: dict[str, Any]) -> None:
    assert said(record) == ASKED_AND_ANSWERED


def test_an_input_follows_its_instruction_and_history_and_system_come_before() -> None:
    record = {"system": "Be kind.", "history": [["A", "B"]], "instruction": "Sum", "input": "1 2", "output": "3"}
    assert said(record) == [
        ("system", "Be kind.", False),
        ("user", "A", False),
        ("assistant", "B", True),
        ("user", "Sum\n1 2", False),
        ("assistant", "3", True),
    ]


def test_every_turn_of_an_assistant_is_learned_but_those_of_weight_0() -> None:
    turns = [("user", "1"), ("assistant", "a"), ("user", "2"), ("assistant", "b"), ("tool", "t"), ("assistant", "c")]
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
    messages[3]["weight"] = 0
    assert [content for _, content, learned in said({"messages": messages}) if learned] == ["a", "c"]


@pytest.mark.parametrize("record", [{"text": "All of it."}, {"content": "All of it.", "path": "a.py"}])
def test_plain_text_is_one_text(record: dict[str, Any]) -> None:
    ((_, form, document),) = documents([SourceRecord("data.jsonl", 1, record)])
    assert (form, document) == ("plain text", PlainText("All of it."))


def test_a_null_is_a_missing_field() -> None:
    assert said({"messages": None, "instruction": "Hi?", "input": None, "output": "Ho."}) == ASKED_AND_ANSWERED


def test_files_may_differ_in_form(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "plain"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "Hi?", "completion": "Ho."}\n')
    assert [form for _, form, _ in documents(records(str(tmp_path)))] == ["plain text", "prompt and completion"]


def test_a_record_in_no_form_is_refused_with_its_place_its_fields_and_the_known_forms(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"title": "x", "body": "y"}\n')
    with pytest.raises(BadRecord) as caught:
        list(documents(records(str(file))))
    assert str(caught.value).startswith(f"{file}:1 has the fields title, body, which is no known form: ")
    for form in ("OpenAI messages (messages)", "alpaca (instruction+output)", "question+answer", "plain text (text"):
        assert form in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "record",
    [
        {"text": "cut \ud83d"},
        {"instruction": "cut \ud83d", "output": "b"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\ud83d cut"}]},
    ],
    ids=["text", "question", "answer"],
)
def test_half_a_character_is_refused_with_its_place_a_whole_one_not(record: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    line = json.dumps(record)
    whole = line.replace("\\ud83d", "\\ud83d\\ude00")
    file.write_text(f"{whole}\n{line}\n")
    found = documents(records(str(file)))
    _, _, document = next(found)
    assert "\N{GRINNING FACE}" in document.content
    with pytest.raises(BadRecord, match=r"data.jsonl:2 has half a character, \\ud83d: .* Remove it"):
        next(found)


def test_a_record_in_another_form_than_its_file_is_refused_with_both(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    lines = [{"instruction": "a", "output": "b"}, {"instruction": "c", "output": "d"}, {"question": "e"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(BadRecord, match=r"data.jsonl:3 has the fields question, but since .*:1 the form is alpaca"):
        list(documents(records(str(file))))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], r"d:7 is a list, not an object with fields"),
        ("x", r"d:7 is text, not an object"),
        ({}, r"d:7 has the fields \(none\), which is no known form"),
        ({"text": 3}, r"d:7: text must be text; got a number"),
        ({"instruction": "a", "output": ["b"]}, r"d:7: output must be text; got a list"),
        ({"instruction": "a", "input": {}, "output": "b"}, r"d:7: input must be text; got an object"),
        ({"instruction": "a", "output": "b", "history": "x"}, r"d:7: history must be a list; got text"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, r"d:7: each entry of history must be a pair"),
        ({"messages": "x"}, r"d:7: messages must be a list; got text"),
        ({"messages": ["x"]}, r"d:7: turn 1 of messages must be an object with role and content; got text"),
        ({"messages": [{"role": "owl", "content": "x"}]}, r"d:7: turn 1 of messages has role='owl'; known are system"),
        ({"messages": [{"content": "x"}]}, r"d:7: turn 1 of messages has role=None"),
        ({"messages": [{"role": "user"}]}, r"d:7: turn 1 of messages: content must be text; got null"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            r"d:7: turn 1 of messages: content has a part that is no text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            r"d:7: turn 1 of messages calls a tool, and calls are not learned",
        ),
        ({"conversations": [{"from": "human"}]}, r"d:7: turn 1 of conversations: value must be text; got null"),
    ],
)
def test_a_broken_record_is_refused_with_its_place_and_what_is_wrong(record: object, message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        list(documents([SourceRecord("d", 7, record)]))


def test_roles_go_by_many_names() -> None:
    turns = [{"from": "System", "value": "s"}, {"from": "human", "value": "q"}, {"from": "bot", "value": "a"}]
    assert [role for role, _, _ in said({"conversations": turns})] == [Role.SYSTEM, Role.USER, Role.ASSISTANT]
