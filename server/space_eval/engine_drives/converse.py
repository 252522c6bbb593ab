"""Holds a conversation about one engine: a JSON line in, a JSON line out. Needs no package of this project.

python converse.py DRIVE.py '{"checkpoint": …, "converted": …, "threads": 2, "most_sequences": 8, "most_ids": 200}'

DRIVE.py has `open_engine(settings)`. The first line out says what the engine is. Then each line in is answered by one:
{"do": "prepare" | "run", "arm": …, "prompts": [[id, …], …], "max_tokens": n}, and {"do": "bounds", …} where the engine
knows any. A run answers {"outputs": [[id, …], …], "seconds": [[s, …], …]}: every token, and when it was there, counted
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

Timed = tuple[list[list[int]], list[list[float]]]
"""By prompt: the ids that were generated, and when each was there."""


class Engine(Protocol):
    """What a drive opens."""

    def facts(self) -> dict[str, Any]:
        """`version`, `arms`, `settings`, and in `lacks` what its figures leave out, if anything."""

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Whatever should not be timed."""

    def run(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timed:
        """Greedy, to the last token: ends of text are ignored."""


def load_drive(file: Path) -> Any:
    """The module in `file`."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def converse(engine: Engine, asked: Iterable[str], out: IO[str]) -> None:
    """Answer every line of `asked`. A question that fails ends nothing."""
    _say(out, {"ready": engine.facts()})
    for line in asked:
        try:
            _say(out, _answer(engine, json.loads(line)))
        except Exception as error:
            _say(out, {"error": f"{type(error).__name__}: {error}"})


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


def _say(out: IO[str], answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def main(file: str, settings: str) -> None:
    """Engines print on stdout, from C++ too: what is the conversation's is kept apart, the rest goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        engine = load_drive(Path(file)).open_engine(json.loads(settings))
    except Exception as error:
        _say(out, {"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error
    converse(engine, sys.stdin, out)


if __name__ == "__main__":
    if (_here := str(Path(__file__).resolve().parent)) not in sys.path:  # under PYTHONSAFEPATH it is left out
        sys.path.insert(0, _here)
    main(*sys.argv[1:])
