"""A JSONL file of requests: texts, or lengths alone, and when each comes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from space_eval.prompts import FIELDS, PromptError, load_prompts

PROMPT_LENGTHS = ("prompt_tokens", "input_length")
OUTPUT_LENGTHS = ("output_tokens", "max_tokens", "output_length")


@dataclass(frozen=True)
class Recorded:
    """One line."""

    text: str | None  # None: only its length is known
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    arrival: float | None = None  # seconds after the first


def load_recorded(path: Path) -> list[Recorded]:
    """The lines of `path`; a file that does not end in .jsonl is one prompt. Raises PromptError.

    A line has a text (`prompt`, `question`, `turns`, ...) or a length (`prompt_tokens`, `input_length`), and may have
    the answer's (`output_tokens`, `max_tokens`, `output_length`) and an arrival: `arrival` in seconds, or `timestamp`
    in milliseconds, as published traces have it.
    """
    if path.suffix != ".jsonl" or not path.is_file():
        return [Recorded(prompt.text) for prompt in load_prompts(path)]
    made = []  # not by splitlines: it also cuts at U+2028 and U+0085, which may stand in a JSON string
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            made.append(_recorded(line, f"{path}:{number}"))
    if not made:
        raise PromptError(f"{path} holds no request. Give at least one JSON line with `prompt` or `prompt_tokens`.")
    with_arrival = [one.arrival for one in made if one.arrival is not None]
    if with_arrival and len(with_arrival) < len(made):
        raise PromptError(f"{path}: {len(with_arrival)} of {len(made)} lines have an arrival; give all or none.")
    if with_arrival != sorted(with_arrival):
        raise PromptError(f"{path}: its arrivals do not ascend. Sort its lines by arrival.")
    return made


def _recorded(line: str, where: str) -> Recorded:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where} is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise PromptError(f"{where} is not a JSON object.")
    turns = record.get("turns")
    texts = [turns[0]] if isinstance(turns, list) and turns else []
    texts += [record[name] for name in FIELDS if name in record]
    text = next((text for text in texts if isinstance(text, str)), None)
    prompt_tokens = _length(record, PROMPT_LENGTHS, where)
    if text is None and prompt_tokens is None:
        raise PromptError(f"{where} has none of the fields turns, {', '.join((*FIELDS, *PROMPT_LENGTHS))}.")
    return Recorded(text, prompt_tokens, _length(record, OUTPUT_LENGTHS, where), _arrival(record, where))


def _length(record: dict[str, Any], names: tuple[str, ...], where: str) -> int | None:
    name = next((name for name in names if record.get(name) is not None), None)
    if name is None:
        return None
    value = record[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PromptError(f"{where}: `{name}` must be a whole number of at least 1; it is {value!r}.")
    return value


def _arrival(record: dict[str, Any], where: str) -> float | None:
    name, unit = ("arrival", 1.0) if "arrival" in record else ("timestamp", 0.001)
    value = record.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise PromptError(f"{where}: `{name}` must be a number of at least 0; it is {value!r}.")
    return float(value) * unit
