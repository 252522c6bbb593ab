"""Prompts to measure with: JSONL of several well-known shapes, or plain text."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELDS = ("prompt", "question", "inputs", "text")


class PromptError(ValueError):
    """A prompt file that cannot be used; the message names the file, the line and the cure."""


@dataclass(frozen=True)
class Prompt:
    """One prompt and the name it is reported under."""

    name: str
    text: str


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read prompts from `path`: one per JSON line (HumanEval-X `prompt`, GSM8K `question`, the first of MT-Bench's
    `turns`), or the whole file as one prompt if it does not end in `.jsonl`."""
    if not path.is_file():
        raise PromptError(f"There is no prompt file at {path}. Give --prompts a JSONL or text file.")
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [Prompt(path.stem, text)]
    prompts = []
    # Not splitlines: it also cuts at U+2028 and U+0085, which may stand in a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            prompts.append(_prompt_of(line, f"{path}:{number}", fallback=f"{path.stem}/{number}"))
        if limit is not None and len(prompts) >= limit:
            break
    if not prompts:
        raise PromptError(f"{path} holds no prompt. Give at least one JSON line with one of {', '.join(FIELDS)}.")
    return prompts


def _prompt_of(line: str, where: str, fallback: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where} is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise PromptError(f"{where} is not a JSON object.")
    name = str(record.get("task_id") or record.get("question_id") or fallback)
    turns = record.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return Prompt(name, turns[0])
    for field in FIELDS:
        if isinstance(record.get(field), str):
            return Prompt(name, record[field])
    raise PromptError(f"{where} has none of the fields {', '.join(FIELDS)}, turns.")
