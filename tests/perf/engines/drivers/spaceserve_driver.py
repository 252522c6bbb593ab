"""The worker of this project, stepped in the process: plain, and with drafts as the server chooses them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overhead_arms import plain
from space_common.version import version
from space_common.worker.client import WorkerClient
from space_model.loading.load import load_model
from space_server.speculation.controller import PLAIN as NO_DRAFTS
from space_server.speculation.controller import LayoutYield, layout_yields
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.startup.calibration import calibrate
from space_server.step_cost import StepCost, StepShape
from space_server.worker import Worker

PLAIN, OWN = "plain", "SPACE, own drafts"
BLOCK_SIZE = 16
CALIBRATION_SECONDS = 20.0
"""Enough for steps of every batch size that is compared, also of a model whose steps take a tenth of a second."""


def synthetic_arm(chances: Sequence[float]) -> str:
    """Named by the middle one: `SPACE at .78`."""
    return f"SPACE at {f'{sorted(chances)[len(chances) // 2]:.2f}'.removeprefix('0')}"


@dataclass(frozen=True)
class Bound:
    """The most that drafts can bring: of all layouts the one with the most expected tokens per measured second."""

    speed_up: float  # over plain decoding
    tokens_per_step: float  # E, of one sequence
    num_rows: float  # T, of one sequence
    cost: float  # of such a step, in plain steps

    @classmethod
    def of(
        cls, cost: StepCost, chances: Sequence[float], *, max_drafts: int, num_sequences: int, num_context: int
    ) -> Bound:
        """`num_context`: ids before the root, of each sequence."""

        def shape(worth: LayoutYield) -> StepShape:
            drafts = worth.layout.num_drafts > 0
            return StepShape(
                num_sequences, round(num_sequences * worth.chain_rows), round(num_sequences * worth.mask_rows),
                num_drafting=num_sequences if drafts else 0, num_context=num_sequences * num_context,
            )  # fmt: skip

        plain_seconds = cost.seconds(shape(NO_DRAFTS))
        best = max(
            layout_yields(tuple(chances), max_drafts), key=lambda worth: worth.tokens / cost.seconds(shape(worth))
        )
        times = cost.seconds(shape(best)) / plain_seconds
        return cls(best.tokens / times, best.tokens, best.chain_rows + best.mask_rows, times)


class SpaceServe:
    """A worker for each arm, all on the same weights and pages: they take turns, and between two all are free."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._weights = settings.get("weights", "plain")
        given = {"dtype": settings["dtype"], "weights": self._weights}
        self._model = load_model(settings["checkpoint"], **given, num_threads=settings["threads"])
        facts = self._model.facts
        most, ids = settings["most_sequences"], settings["most_ids"] + facts.most_masks + 1
        num_blocks = most * -(-ids // BLOCK_SIZE)
        kv = self._model.allocate_kv(num_blocks, BLOCK_SIZE)
        calibration = calibrate(self._model, kv, max_sequences=most, seconds=CALIBRATION_SECONDS)
        self._chances = {synthetic_arm(chances): tuple(chances) for chances in settings["synthetic_acceptance"]}
        self._workers: dict[str, Worker] = {}
        self._clients: dict[str, WorkerClient] = {}
        own = [OWN] if settings["own_drafts"] else []
        for arm in (PLAIN, *own, *(self._chances if facts.most_masks else ())):
            synthetic = None
            if arm in self._chances:
                synthetic = SyntheticAcceptance(
                    self._chances[arm], vocab_size=facts.vocab_size, mask_ids=facts.mask_ids
                )
            worker = self._workers[arm] = Worker(
                self._model, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_sequences=most, kv=kv,
                cost=StepCost.from_points(calibration.points),
                controller=plain().controller() if arm == PLAIN else None, synthetic=synthetic,
            )  # fmt: skip
            self._clients[arm] = WorkerClient(worker, max_prefill_rows=1 << 20)

    def facts(self) -> dict[str, Any]:
        facts = self._model.facts
        dtype = str(facts.dtype).removeprefix("torch.")
        return {
            "version": version(),
            "arms": list(self._clients),
            "settings": f"{dtype}, weights {self._weights}, attention {facts.attention}, {facts.num_threads} threads; "
            "all prompts may go into one step",
            "lacks": "nothing: scheduler and greedy choice are its own",
        }

    def prepare(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Synthetic acceptance needs the text; and the controller has seen such a batch, as in a server."""
        for _ in range(2 if arm in self._chances else 1):
            self.run(arm, prompts, max_tokens)

    def run(self, arm: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Any:
        client = self._clients[arm]
        begun = time.perf_counter()
        numbers = [client.admit(prompt, max_tokens=max_tokens) for prompt in prompts]
        outputs: dict[int, list[int]] = {number: [] for number in numbers}
        seconds: dict[int, list[float]] = {number: [] for number in numbers}
        while self._workers[arm].has_work:
            report = client.step()
            now = time.perf_counter() - begun
            for sequence in [] if report is None else report.sequences:
                if sequence.error:
                    raise RuntimeError(sequence.error)
                outputs[sequence.seq_id] += sequence.tokens
                seconds[sequence.seq_id] += [now] * len(sequence.tokens)
        for number in numbers:
            client.release(number)
        client.step()
        return [outputs[number] for number in numbers], [seconds[number] for number in numbers]

    def bounds(self, num_sequences: int, num_context: int) -> dict[str, Any]:
        """By arm, from what steps cost as its worker has measured them until now: at its start, and ever since."""
        return {
            arm: vars(
                Bound.of(
                    self._workers[arm].cost, chances, max_drafts=self._model.facts.most_masks,
                    num_sequences=num_sequences, num_context=num_context,
                )
            )
            for arm, chances in self._chances.items()
            if arm in self._clients
        }  # fmt: skip


def open_engine(settings: dict[str, Any]) -> SpaceServe:
    return SpaceServe(settings)
