"""An engine in a process and an interpreter of its own, asked line by line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from space_eval.engines_point import Answer, Point, WrongAnswer

DRIVES = Path(__file__).with_name("engine_drives")
OURS = "spaceserve"
BUILT_IN: Mapping[str, Path] = {
    OURS: DRIVES / "drive_spaceserve.py",
    "openvino": DRIVES / "drive_openvino.py",
    "transformers": DRIVES / "drive_transformers.py",
    "llama.cpp": DRIVES / "drive_llama.py",
}
"""Engines that are known by name, with what drives them."""


class EngineFailed(Exception):
    """An engine that cannot be measured; the message names it and its reason."""


@dataclass(frozen=True)
class EngineSpec:
    """Which engine, in which interpreter."""

    name: str
    python: str
    drive: Path


class EngineProcess:
    """Started by `with`, ended with its scope.

    with EngineProcess(spec, settings, num_threads=2) as engine: answer = engine.run("plain", prompts, 64)
    """

    def __init__(self, spec: EngineSpec, settings: Mapping[str, Any], *, num_threads: int, log: Path | None) -> None:
        """`log`: file to which its stderr is appended; None: thrown away."""
        self.spec, self._log = spec, log
        environment = os.environ | {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        with (log or Path(os.devnull)).open("ab") as stderr:
            try:
                self._process = subprocess.Popen(
                    [spec.python, str(DRIVES / "converse.py"), str(spec.drive), json.dumps(settings)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=environment,
                )
            except OSError as error:
                raise EngineFailed(f"{spec.name}: {spec.python} cannot be started: {error.strerror}.") from error
        try:
            self.facts: Mapping[str, Any] = self._answer()["ready"]
            self.arms: Sequence[str] = self.facts["arms"]
        except KeyError as error:
            self.close()
            raise EngineFailed(f"{spec.name}: its first line lacks {error}.") from error
        except EngineFailed:
            self.close()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it: by the end of its input, else by force."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> None:
        """Warm up. Raises EngineFailed."""
        self._ask({"do": "prepare", "arm": arm, "prompts": prompts, "max_tokens": point.new_tokens})

    def run(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> Answer:
        """One turn. Raises EngineFailed."""
        said = self._ask({"do": "run", "arm": arm, "prompts": prompts, "max_tokens": point.new_tokens})
        try:
            return Answer(said["outputs"], said["seconds"])
        except KeyError as error:
            raise EngineFailed(f"{self.spec.name}: its answer lacks {error}.") from error

    def bounds(self, point: Point) -> Mapping[str, Mapping[str, float]]:
        """By arm: the most that drafts can bring (only ours knows)."""
        context = point.prompt_tokens + point.new_tokens // 2
        return self._ask({"do": "bounds", "num_sequences": point.num_sequences, "num_context": context})

    @property
    def resident_mib(self) -> float | None:
        """The most memory it had, pages of mapped files included; None where the system does not say."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return None
        found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(found[0]) / 1024 if found else None

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise EngineFailed(self._last_words()) from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(self._last_words())
        try:
            answer = json.loads(line)
        except ValueError:
            raise EngineFailed(f"{self.spec.name}: it said {line[:80]!r}, which is no JSON.") from None
        if not isinstance(answer, dict):
            raise EngineFailed(f"{self.spec.name}: it said {line[:80]!r}, which is no JSON object.")
        if "error" in answer:
            raise EngineFailed(f"{self.spec.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        try:
            status = f" with {self._process.wait(10)}"
        except subprocess.TimeoutExpired:
            status = ""
        said = f" What it said last stands in {self._log}." if self._log is not None else ""
        return f"{self.spec.name}: its process has ended{status}.{said}"


def check(answer: Answer, point: Point, name: str) -> float:
    """Its rate. Raises EngineFailed where the answer is not what was asked for."""
    try:
        return answer.tokens_per_second(point)
    except WrongAnswer as error:
        raise EngineFailed(f"{name}: {error}") from error
