"""The tasks of the paper's table, and of two larger benches: where their questions come from and what is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space_eval.prompts import PromptError
from space_eval.records import RecordError, load_records

_CODE = (
    "Complete the following python code. Give the answer in a code block starts with '```python' and end with '``'\n"
)
_SUMMARY = "Document: {}\nBased on the previous text, provide a brief single summary:"


class DataError(PromptError):
    """Questions that cannot be had or read; the message names the place and the cure."""


@dataclass(frozen=True)
class Question:
    """One prompt of a task, before a family's frame is put around it."""

    name: str
    turns: tuple[str, ...]  # what the user says, one answer after each
    plain_turns: tuple[str, ...]  # the same for a base model, which continues text and takes no instructions
    category: str = ""
    reference: str = ""  # what an answer is compared with


@dataclass(frozen=True)
class Task:
    """A set of questions."""

    name: str
    title: str
    hub_id: str  # of `datasets`, with :CONFIG and @SPLIT; "" where there is none to be relied on
    read: Callable[[Mapping[str, Any], str], Question]  # a record, and the name to give it if it has none
    quality: str = ""  # what answers are judged by: ROUGE-L, pass, exact match; "" by nothing


def _text(record: Mapping[str, Any], *fields: str) -> str:
    for field in fields:
        if isinstance(record.get(field), str):
            return str(record[field])
    raise KeyError(" or ".join(fields))


def _xsum(record: Mapping[str, Any], name: str) -> Question:
    asked = (_SUMMARY.format(_text(record, "document")),)
    return Question(str(record.get("id", name)), asked, asked, reference=_text(record, "summary"))


def _human_eval(record: Mapping[str, Any], name: str) -> Question:
    prompt = _text(record, "prompt")
    return Question(str(record.get("task_id", name)), (_CODE + prompt,), (prompt,))


def _cip(record: Mapping[str, Any], name: str) -> Question:
    asked = _text(record, "prompt", "instruction")
    if record.get("input"):
        asked = f"{asked}\n{record['input']}"
    return Question(str(record.get("id", name)), (asked,), (asked,))


def _turns(record: Mapping[str, Any], name: str) -> Question:
    turns = record.get("turns", record.get("prompt"))
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise KeyError("turns")
    name = str(record.get("question_id", record.get("prompt_id", name)))
    return Question(name, tuple(turns), tuple(turns), category=str(record.get("category", "")))


def _gsm8k(record: Mapping[str, Any], name: str) -> Question:
    asked = (_text(record, "question"),)
    return Question(name, asked, asked, reference=_text(record, "answer").rpartition("####")[2].strip())


TASKS = {
    task.name: task
    for task in (
        Task("xsum", "XSum", "EdinburghNLP/xsum@test", _xsum, "ROUGE-L"),
        Task("human_eval", "HumanEval-X", "openai/openai_humaneval@test", _human_eval, "pass"),
        Task("cip", "CIP", "alespalla/chatbot_instruction_prompts@test", _cip),
        Task("mt_bench", "MT-Bench", "HuggingFaceH4/mt_bench_prompts@train", _turns),
        Task("gsm8k", "GSM8K", "openai/gsm8k:main@test", _gsm8k, "exact match"),
        Task("spec_bench", "Spec-Bench", "", _turns),
    )
}
"""CIP: chatbot instruction prompts. The published script has no prompt for XSum; ours is that of its authors' next one
(BiTA), and their script for CIP read the first 100 records and stopped at 512 new tokens."""


def load_questions(task: Task, source: str, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of `source`: a JSONL or JSON file, or a hub id with optional :CONFIG and @SPLIT."""
    if not source:
        raise DataError(f"{task.title} has no home on the hub. Give --data {task.name}=FILE, a JSONL file.")
    place, split = place_and_split(source)
    try:
        records = load_records(place, needs=((),), split=split)
    except RecordError as error:
        raise DataError(f"{task.title}: {error} (--data {task.name}=FILE)") from error
    questions = []
    for number, record in enumerate(records[:limit], start=1):
        try:
            questions.append(task.read(record, f"{task.name}/{number}"))
        except KeyError as missing:
            raise DataError(
                f"Record {number} of {source} has no field {missing.args[0]}, which {task.title} needs. "
                f"It has: {', '.join(sorted(record))}."
            ) from None
    return questions


def place_and_split(source: str) -> tuple[str, str]:
    """`owner/name:config@split` in two; a path is left whole. The split is `test` where none is given."""
    place, at, split = source.rpartition("@")
    return (source, "test") if not at or Path(source).expanduser().exists() else (place, split)
