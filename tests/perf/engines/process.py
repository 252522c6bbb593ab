"""An engine in a process and an interpreter of its own, asked line by line, and the rate that its answer comes to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from perf.harness import environment

DRIVERS = Path(__file__).with_name("drivers")


class EngineFailed(Exception):
    """An engine that cannot be measured, or whose answer cannot be compared; the message says why."""


@dataclass(frozen=True)
class Point:
    """So many sequences, each with a prompt so long and so many new tokens."""

    num_sequences: int
    prompt_tokens: int
    new_tokens: int  # 1: the prompt alone is timed

    @property
    def is_prefill(self) -> bool:
        return self.new_tokens == 1

    @property
    def name(self) -> str:
        return f"prefill {self.prompt_tokens}" if self.is_prefill else f"batch {self.num_sequences}"


@dataclass(frozen=True)
class Answer:
    """By sequence: its new ids, and the seconds at which each was there."""

    outputs: Sequence[Sequence[int]]
    seconds: Sequence[Sequence[float]]

    def tokens_per_second(self, point: Point) -> float:
        """Of prompts: their ids until the last sequence has its first token. Else new tokens after that.

        The end is where the first sequence has all of its tokens, so that all of them run. Raises EngineFailed.

            sequence 1  |prompt....|t t t t t t t|
            sequence 2  |prompt......|t t t t t t t t|
                                     [ counted  )
        """
        self._check(point)
        begin = max(times[0] for times in self.seconds)
        if point.is_prefill:
            return point.num_sequences * point.prompt_tokens / begin
        end = min(times[-1] for times in self.seconds)
        num_tokens = sum(begin < moment <= end for moment in chain.from_iterable(self.seconds))
        if end <= begin or not num_tokens:
            raise EngineFailed(
                f"A sequence ended before another began: {point.new_tokens} new tokens are too few for a batch of "
                f"{point.num_sequences}. Ask for more by --new-tokens."
            )
        return num_tokens / (end - begin)

    def same_ids(self, other: Answer) -> float:
        """Share of the ids up to the first that differs, over all sequences."""
        same = total = 0
        for ids, others in zip(self.outputs, other.outputs, strict=True):
            differs = [one != another for one, another in zip(ids, others, strict=True)]
            same += differs.index(True) if True in differs else len(differs)
            total += len(differs)
        return same / total

    def _check(self, point: Point) -> None:
        if len(self.outputs) != point.num_sequences or len(self.seconds) != point.num_sequences:
            raise EngineFailed(f"It answered {len(self.outputs)} of {point.num_sequences} prompts.")
        for ids, times in zip(self.outputs, self.seconds, strict=True):
            if not len(ids) == len(times) == point.new_tokens:
                raise EngineFailed(
                    f"It gave {len(ids)} tokens at {len(times)} times, not the {point.new_tokens} asked."
                )
            if times[0] <= 0 or any(later < sooner for sooner, later in pairwise(times)):
                raise EngineFailed("Its times do not grow.")


@dataclass(frozen=True)
class EngineSpec:
    """Which engine, in which interpreter, by which driver; `url`: of a server that is already running."""

    name: str
    python: str
    driver: Path
    url: str | None = None


class EngineProcess:
    """Started by `with`, ended with its scope.

    with EngineProcess(spec, settings, num_threads=2) as engine: answer = engine.run("plain", prompts, point)
    """

    def __init__(self, spec: EngineSpec, settings: Mapping[str, Any], *, num_threads: int, log: Path | None) -> None:
        """`log`: file to which its stderr is appended; None: discarded."""
        self.spec, self._log = spec, log
        ours = environment() if spec.python == sys.executable else os.environ
        threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        with (log or Path(os.devnull)).open("ab") as stderr:
            try:
                self._process = subprocess.Popen(
                    [spec.python, str(DRIVERS / "conversation.py"), str(spec.driver), json.dumps(settings)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env={**ours, **threads},
                )  # fmt: skip
            except OSError as error:
                raise EngineFailed(f"{spec.python} cannot be started: {error.strerror}.") from error
        try:
            self.facts: Mapping[str, Any] = self._answer()["ready"]
            self.arms: Sequence[str] = self.facts["arms"]
        except KeyError as error:
            self.close()
            raise EngineFailed(f"its first line lacks {error}.") from error
        except EngineFailed:
            self.close()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
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
        self._ask({"do": "prepare", "arm": arm, "prompts": prompts, "max_tokens": point.new_tokens})

    def run(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> Answer:
        answer = self._ask({"do": "run", "arm": arm, "prompts": prompts, "max_tokens": point.new_tokens})
        try:
            return Answer(answer["outputs"], answer["seconds"])
        except KeyError as error:
            raise EngineFailed(f"its answer lacks {error}.") from error

    def bounds(self, point: Point) -> Mapping[str, Mapping[str, float]]:
        """By arm: the most that drafts can bring (spaceserve only)."""
        context = point.prompt_tokens + point.new_tokens // 2
        return self._ask({"do": "bounds", "num_sequences": point.num_sequences, "num_context": context})

    @property
    def resident_mib(self) -> float | None:
        """The most memory it had, pages of mapped files included; None where the system does not say."""
        if self.facts.get("is_remote"):
            return None
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
            answer = None
        if not isinstance(answer, dict):
            raise EngineFailed(f"it answered {line[:80]!r}, which is no JSON object.")
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer

    def _last_words(self) -> str:
        try:
            status = f" with {self._process.wait(10)}"
        except subprocess.TimeoutExpired:
            status = ""
        where = f" Its last output is in {self._log}." if self._log is not None else ""
        return f"its process has ended{status}.{where}"
