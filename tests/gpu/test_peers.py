"""Another engine and ours on one GPU, over HTTP, in alternating turns: plain decoding, drafts, first tokens."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from perf.engines.compare import OURS, Cell, measure, turned
from perf.engines.process import DRIVERS, Answer, EngineFailed, EngineProcess, EngineSpec, Point
from space_eval.report import Ratio, Spread

from gpu.llama import DRY, FIRST_MASK, NUM_MASKS, SHAPES
from gpu.peers import PEERS, Command, Server, ServerFailed, Weights, our_command
from gpu.report import Notes, written
from gpu.side_by_side import AUTO, COLUMNS, DRAFTS, FIRST_TOKEN, PLAIN, TABLE

pytestmark = pytest.mark.gpu

DEPTHS = (1, 2, 3, 5)  # drafts a step of the other engine, each a start of its own


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    batches: Sequence[int] = (1, 8, 32, 64, 128, 256)
    draft_batches: Sequence[int] = (1, 8, 32, 64, 128)
    prompts: Sequence[tuple[int, int]] = ((1, 2048), (8, 2048), (32, 512), (1, 50))  # how many, of how many tokens
    context: int = 513
    new_tokens: int = 320
    rounds: int = 3
    start_seconds: float = 100.0
    clients: int = 8  # processes that read streams
    depths: Sequence[int] = DEPTHS


LITTLE = Sizes((1, 2), (1, 2), ((1, 24), (2, 16)), 12, 200, 2, 90.0, 1, (1, 5))


def test_weights(notes: Notes, comparison: Comparison) -> None:
    begun = time.perf_counter()
    was_made = comparison.weights.make(notes.device)
    notes.note(f"{'written' if was_made else 'there already'}: {comparison.shape.name}")
    notes.figure("seconds to write the weights", time.perf_counter() - begun, "s")


def test_vllm_plain(comparison: Comparison) -> None:
    comparison.plain("vllm")


def test_vllm_drafts(comparison: Comparison) -> None:
    comparison.drafts("vllm")


def test_vllm_first_token(comparison: Comparison) -> None:
    comparison.first_token("vllm")


def test_sglang_plain(comparison: Comparison) -> None:
    comparison.plain("sglang")


def test_sglang_drafts(comparison: Comparison) -> None:
    comparison.drafts("sglang")


def test_sglang_first_token(comparison: Comparison) -> None:
    comparison.first_token("sglang")


@pytest.fixture
def comparison(notes: Notes, pytestconfig: pytest.Config) -> Iterator[Comparison]:
    with ExitStack() as stack:
        yield Comparison(notes, pytestconfig, stack)


def tokens_per_step(answer: Answer) -> float:
    """Tokens that came together, after the first of each sequence: what a step gave, as a client sees it."""
    moments = [times[1:] for times in answer.seconds]
    return sum(map(len, moments)) / max(1, sum(len(set(times)) for times in moments))


class Lane:
    """One way of an engine to decode, under a name of its own; it counts tokens per step."""

    def __init__(self, engine: EngineProcess, name: str, arm: str, shown: str) -> None:
        """`arm`: as its driver calls it; `shown`: as the report does."""
        self.spec, self.arms = EngineSpec(name, engine.spec.python, engine.spec.driver, engine.spec.url), [shown]
        self.per_step: list[float] = []
        self._engine, self._arm = engine, arm

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> None:
        """A turn that does not count: graphs are captured, and synthetic acceptance has seen the text."""
        self._engine.run(self._arm, turned(prompts, -1) if point.is_prefill else prompts, point)

    def run(self, arm: str, prompts: Sequence[Sequence[int]], point: Point) -> Answer:
        answer = self._engine.run(self._arm, prompts, point)
        self.per_step.append(tokens_per_step(answer))
        return answer


class Comparison:
    """One slice: two servers on the device, and turns of both."""

    def __init__(self, notes: Notes, config: pytest.Config, stack: ExitStack) -> None:
        option = config.getoption
        self._notes, self._stack = notes, stack
        self.shape = DRY if notes.dry else SHAPES[option("--shape", "8b")]
        self._sizes = LITTLE if notes.dry else Sizes()
        weights = (option("--weights", None) or notes.folder / "weights").resolve()
        self.weights = Weights(weights / self.shape.name, self.shape)
        self._pythons = dict(text.split("=", 1) for text in option("--peer", []))
        self._failures: list[str] = []
        self._rows: list[list[str]] = []
        self._servers: dict[str, Server] = {}

    def plain(self, name: str) -> None:
        """And ours with drafts in the same turns."""
        batches = self._notes.part.share(self._sizes.batches)
        lanes = self._start(name, num_drafts=0, ours=("off", "auto"), batches=self._sizes.batches)
        for batch in batches:
            cells = self._measured(lanes, PLAIN, str(batch), Point(batch, self._sizes.context, self._sizes.new_tokens))
            plain, auto = (
                next((c for c in cells if (c.engine, c.arm) == (OURS, arm)), None) for arm in ("off", "auto")
            )
            if plain is not None and auto is not None and plain.rates and auto.rates:
                ratios = [one / other for one, other in zip(auto.rates, plain.rates, strict=False)]
                self._row(AUTO, str(batch), auto, auto.rates, "tokens/s", Ratio.of(ratios))
        self._end()

    def drafts(self, name: str) -> None:
        """A start of the other engine for each k."""
        for depth in self._notes.part.share(self._sizes.depths):
            with ExitStack() as self._stack:
                batches = self._sizes.draft_batches
                lanes = self._start(name, num_drafts=depth, ours=("auto",), batches=batches)
                for batch in batches:
                    self._measured(lanes, DRAFTS, str(batch), Point(batch, self._sizes.context, self._sizes.new_tokens))
        self._end()

    def first_token(self, name: str) -> None:
        lanes = self._start(name, num_drafts=0, ours=("off",), batches=self._sizes.batches)
        for number, length in self._sizes.prompts:
            self._measured(lanes, FIRST_TOKEN, f"{number} × {length}", Point(number, length, 1))
        self._end()

    def _start(self, name: str, *, num_drafts: int, ours: Sequence[str], batches: Sequence[int]) -> list[Lane]:
        """The lanes of ours, and the peer's: not there where it is reported as failed."""
        peer, notes = PEERS[name], self._notes
        python = self._pythons.get(name, sys.executable)
        why = peer.missing(python)
        if why and not notes.dry:
            pytest.skip(why)
        if notes.dry:
            notes.note(f"{why} A second server of ours stands in for {peer.label}.".strip())
        self.weights.make(notes.device)

        def of_ours(port: int) -> Command:
            flags = ["--synthetic-acceptance", ".78"]
            return our_command(self.weights.ours, port, "--served-model-name", OURS, *flags, dry=notes.dry)

        def of_peer(port: int) -> Command:
            if not notes.dry:
                return peer.command(python, self.weights, port, num_drafts, batches)
            flags = ["--served-model-name", f"{name}-stand-in", "--speculation", num_drafts or "off"]
            return our_command(self.weights.ours, port, *flags, dry=True)

        lanes = [
            Lane(engine, OURS, engine.arms[arm == "auto"], arm) for engine in self._open(OURS, of_ours) for arm in ours
        ]
        if not lanes:
            self._end()
        for engine in self._open(name, of_peer):
            arm = f"k={num_drafts}" if num_drafts else "off"
            lanes.append(Lane(engine, name, engine.arms[-1 if num_drafts else 0], arm))
        return lanes

    def _open(self, name: str, command: Callable[[int], Command]) -> Iterator[EngineProcess]:
        """A server and the process that asks it; nothing where one fails, which is reported."""
        folder, sizes = self._notes.folder, self._sizes
        log = folder / f"{self._notes.part}-{name}.log"
        begun = time.perf_counter()
        try:
            server = self._stack.enter_context(Server(name, command, log=log, start_seconds=sizes.start_seconds))
            self._notes.note(f"{name}: {time.perf_counter() - begun:.1f} s to start")
            spec = EngineSpec(name, sys.executable, DRIVERS / "openai_driver.py", server.url)
            settings = {"url": server.url, "clients": sizes.clients}
            engine = self._stack.enter_context(
                EngineProcess(spec, settings, num_threads=1, log=log.with_suffix(".client"))
            )
        except (ServerFailed, EngineFailed) as error:
            self._failed(str(error))
            return
        self._servers[name] = server
        yield engine

    def _measured(self, lanes: Sequence[Lane], what: str, size: str, point: Point) -> list[Cell]:
        """Turns of all, and a row of each."""
        notes = self._notes
        if notes.is_late(f"{what} at {size}"):
            return []
        ids = random.Random(point.num_sequences)
        first, last = FIRST_MASK + NUM_MASKS, self.shape.vocab_size
        prompts = [[ids.randrange(first, last) for _ in range(point.prompt_tokens)] for _ in range(point.num_sequences)]
        for lane in lanes:
            lane.per_step.clear()
        cells = measure(lanes, point, prompts, num_rounds=self._sizes.rounds, seconds=max(1.0, notes.seconds_left / 2))
        values = {cell.name: self._values(cell, point) for cell in cells}
        theirs = next((values[cell.name] for cell in cells if cell.engine != OURS), [])
        for lane, cell in zip(lanes, cells, strict=True):
            if cell.failure is not None:
                self._failed(f"{what} at {size}: {cell.failure}{self._obituary(cell.engine)}")
                continue
            ratios = [one / other for one, other in zip(values[cell.name], theirs, strict=False)]
            ratio = Ratio.of(ratios) if cell.engine == OURS and ratios else None
            unit = "ms" if point.is_prefill else "tokens/s"
            self._row(what, size, cell, values[cell.name], unit, ratio, 0.0 if point.is_prefill else lane.per_step[-1])
        return cells

    def _values(self, cell: Cell, point: Point) -> list[float]:
        """By round: tokens per second, or milliseconds to the last first token."""
        if not point.is_prefill:
            return list(cell.rates)
        return [1e3 * point.num_sequences * point.prompt_tokens / rate for rate in cell.rates]

    def _row(
        self, what: str, size: str, cell: Cell, values: Sequence[float], unit: str, ratio: Ratio | None,
        per_step: float = 0.0,
    ) -> None:  # fmt: skip
        spread = Spread.of(values)
        row: Mapping[str, str] = {
            "what": what, "size": size, "engine": cell.engine, "drafts": cell.arm,
            "median": f"{spread.median:.5g}", "low": f"{spread.low:.5g}", "high": f"{spread.high:.5g}", "unit": unit,
            "rounds": str(len(values)), "ours/theirs": "–" if ratio is None else ratio.shown(),
            "tokens a step": f"{per_step:.2f}" if per_step else "–",
            "same ids": "–" if cell.same_ids is None else f"{cell.same_ids:.2f}",
        }  # fmt: skip
        self._rows.append([row[name] for name in COLUMNS])
        self._notes.table(TABLE, COLUMNS, self._rows)
        self._notes.say(f"{what} at {size}, {cell.name}: {written(spread.median, unit)}")

    def _obituary(self, name: str) -> str:
        server = self._servers.get(name)
        if server is None or server.code is None:
            return ""
        return f" Its server ended with status {server.code}. It said last: {server.last_words()}"

    def _failed(self, why: str) -> None:
        self._failures.append(why)
        self._notes.note(why)

    def _end(self) -> None:
        """Fail where something did, now that all the rest has been measured."""
        if self._failures:
            pytest.fail("; ".join(self._failures))
