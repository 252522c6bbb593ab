"""Beginnings of Python files, for load where no prompt file is given."""

import importlib.util
from pathlib import Path

from space_eval.prompts import Prompt

_TASKS = (
    ("count_vowels", "text: str", "int", "The number of vowels in `text`, whatever their case."),
    ("running_mean", "values: list[float]", "list[float]", "The mean of all values up to each place."),
    ("is_palindrome", "text: str", "bool", "Whether `text` reads the same from both ends, spaces aside."),
    ("merge_sorted", "left: list[int], right: list[int]", "list[int]", "One ascending list from two."),
    ("parse_header", "line: bytes", "tuple[str, str]", "Name and value of a `name: value` line."),
    ("fibonacci", "count: int", "list[int]", "The first `count` numbers, each the sum of the two before it."),
    ("group_by_length", "words: list[str]", "dict[int, list[str]]", "Words under their number of letters."),
    ("read_config", "path: str", "dict[str, str]", "The `key = value` lines of a file; `#` starts a comment."),
)


def built_in() -> list[Prompt]:
    """Eight function heads with a docstring."""
    return [
        Prompt(name, f'def {name}({arguments}) -> {result}:\n    """{doc}"""\n')
        for name, arguments, result, doc in _TASKS
    ]


_MODULES = ("heapq", "textwrap", "difflib", "argparse", "statistics", "ast", "csv", "string")


def long_text(num_characters: int = 1 << 17) -> str:
    """Source code of Python's own library: a long text that does not repeat, for prompts of a given length."""
    specs = [importlib.util.find_spec(name) for name in _MODULES]
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    return "".join(file.read_text(encoding="utf-8") for file in files)[:num_characters]
