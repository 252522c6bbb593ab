"""Every known form says who asked and who answered; every other record is refused with its place, fields and cure."""

import json
from pathlib import Path
from typing import Any

import pytest
from space_train.data.records import BadRecord, DataConversation, PlainText, Role, SourceRecord, documents, records

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
def test_half_a_character_is_refused_with_its_place_and_a_whole_one_is_not(
    record: dict[str, Any], tmp_path: Path
) -> None:
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
