"""Run one engine and answer questions about it: a JSON line in, a JSON line out. Needs no package of this project.

python conversation.py DRIVER.py '{"checkpoint": …, "converted": …, "threads": 2, "most_sequences": 8, "most_ids": 200}'

DRIVER.py has `open_engine(settings)`. The first line out describes the engine. Then each line in is answered by one:
{"do": "prepare" | "run", "arm": …, "prompts": [[id, …], …], "max_tokens": n}, and {"do": "bounds", …} where the engine
has any. A run answers {"outputs": [[id, …], …], "seconds": [[s, …], …]}: every token, and when it was there, counted
from the moment at which the engine was given the prompts. What cannot be done answers {"error": …}.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

Timed = tuple[list[list[int]], list[list[float]]]  # by prompt: the ids that were generated, and when each was there


class Engine(Protocol):
    """What a driver opens."""

    def facts(self) -> dict[str, Any]:
        """`version`, `arms`, `settings`, and in `lacks` what its figures leave out."""

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Warm up."""

    def run(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timed:
        """Greedy, to the last token: ends of text are ignored."""


def load_driver(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def converse(engine: Engine, asked: Iterable[str], out: IO[str]) -> None:
    """Answer every line of `asked`. After a question that fails the next one is answered."""
    _send(out, {"ready": engine.facts()})
    for line in asked:
        try:
            _send(out, _answer(engine, json.loads(line)))
        except Exception as error:
            _send(out, {"error": f"{type(error).__name__}: {error}"})


def _answer(engine: Engine, question: dict[str, Any]) -> dict[str, Any]:
    do = question.pop("do")
    if do == "prepare":
        engine.prepare(**question)
        return {}
    if do == "run":
        outputs, seconds = engine.run(**question)
        return {"outputs": outputs, "seconds": seconds}
    if do == "bounds":
        found: dict[str, Any] = engine.bounds(**question)  # type: ignore[attr-defined]
        return found
    raise ValueError(f"'do' is {do!r}; it must be prepare, run or bounds.")


def _send(out: IO[str], answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def main(file: str, settings: str) -> None:
    """Engines print on stdout, from C++ too: that goes to stderr, and the conversation keeps a pipe of its own."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        engine = load_driver(Path(file)).open_engine(json.loads(settings))
    except Exception as error:
        _send(out, {"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error
    converse(engine, sys.stdin, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
