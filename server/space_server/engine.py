"""Runs the steps of a worker's sequences with a host runner and, if there is one, a device runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from space_server.batch import RunningBatch, RunningSequence
from space_server.device_runner.device_runner import DeviceRunner
from space_server.drafts import DraftSources
from space_server.host_runner import HostRunner
from space_server.model_runner import ModelRunner, StepOutput
from space_server.scheduled_batch import PrefillBudget


class EngineCore:
    """One interface to both runners. A sequence that the device runner does not keep is stepped by the host's."""

    def __init__(self, host: HostRunner, device: DeviceRunner | None, sources: DraftSources) -> None:
        """`sources`: they get the price of a draft before each step."""
        self.host, self.device = host, device
        self._sources = sources
        self._reported: set[int] = set()  # sequences stepped for the current report

    @property
    def runners(self) -> list[ModelRunner]:
        """The runners in the order of their launches: the host's step runs beside the device's."""
        return [self.host] if self.device is None else [self.device, self.host]

    @property
    def waited(self) -> float:
        """Seconds that the host has spent in the model, or waiting for it."""
        return self.host.waited if self.device is None else self.device.waited + self.host.waited

    @property
    def is_under_way(self) -> bool:
        """Whether a step is in flight."""
        return self.host.num_in_flight > 0 or (self.device is not None and self.device.num_in_flight > 0)

    def step(self, batch: RunningBatch, budget: PrefillBudget, pause: float | None = None) -> Iterator[StepOutput]:
        """Step each sequence at most once, and yield the outputs; the caller applies each before it takes the next.

        A device step may stay in flight until the next call. `pause`: seconds since the last call, if there was work
        all along.
        """
        self._reported = set()
        has_read: set[ModelRunner] = set()
        for runner in self.runners:
            while runner.reads_first and runner.num_in_flight and not self._reported:
                has_read.add(runner)
                yield from self._read(runner, pause)
            yield from self._launch(runner, batch, budget, pause)
        for runner in reversed(self.runners):
            while runner.num_in_flight and not (runner in has_read and self._reported):
                has_read.add(runner)
                yield from self._read(runner, pause)
                if runner.reads_first and not runner.num_in_flight:
                    yield from self._launch(runner, batch, budget, pause)

    def _launch(
        self, runner: ModelRunner, batch: RunningBatch, budget: PrefillBudget, pause: float | None
    ) -> Iterator[StepOutput]:
        """Start the runner's next step. If that fails, read its steps in flight, and leave its sequences to others."""
        elsewhere: Sequence[RunningSequence] = ()
        pricing = self.host.controller
        if self.device is not None:
            elsewhere = [one for other in self.runners if other is not runner for one in other.sequences]
        scheduled = runner.schedule(batch, budget, reported=self._reported, elsewhere=elsewhere)
        if scheduled is None:
            return
        if self.device is not None:
            pricing = next((one.controller for one in self.runners if _has_drafters(one)), pricing)
        self._sources.price, self._sources.is_paused = pricing.row_price, pricing.is_paused
        runner.execute_model(scheduled)
        if runner.has_failed:
            while runner.num_in_flight:
                yield from self._read(runner, pause)
            runner.give_back()

    def _read(self, runner: ModelRunner, pause: float | None) -> Iterator[StepOutput]:
        output = runner.get_output()
        self._reported.update([one.plan.sequence.seq_id for one in output.outputs])
        yield output
        runner.update_from_output(output, pause)


def _has_drafters(runner: ModelRunner) -> bool:
    """Whether any sequence that the runner keeps has a drafter besides masks."""
    return any(one.drafter is not None and one.max_drafts > 0 for one in runner.sequences)
