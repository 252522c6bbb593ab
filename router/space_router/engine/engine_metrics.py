"""Records engine events in the Prometheus series."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from space_proto import worker_pb2

from space_router.engine.queueing.admission import LoadFigures, step_seconds
from space_router.engine.request.request import Delta
from space_router.engine.request.request_state import ReportResult, RequestState, SequenceUpdate
from space_router.metrics import POSITIONS, ROW_KINDS, SOURCES, Metrics

SPEEDUP_MEMORY = 0.98  # decay per step: the gauge averages about the last 50 steps


class LoraNames(NamedTuple):
    """Names of ordinary LoRAs, sorted."""

    loaded: Sequence[str]  # those that requests can give
    waiting: Sequence[str]  # those that queued requests gave


class EngineMetrics:
    """Records engine events. Times are in seconds and passed in; this class reads no clock."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._positions = [metrics.accepted_by_position_total.labels(position=position) for position in POSITIONS]
        self._rows = {kind: metrics.rows_total.labels(kind=kind) for kind in ROW_KINDS}
        self._drafted = [metrics.drafted_tokens_by_source_total.labels(source=source) for source in SOURCES]
        self._accepted = [metrics.accepted_tokens_by_source_total.labels(source=source) for source in SOURCES]
        self._phases = metrics.step_seconds.series
        # Each sensor, a machine's device, belongs to the first worker that reports it, until that worker is lost.
        self._sensors: dict[tuple[str, str], object] = {}
        self._plain_seconds = 0.0  # decayed sum: cost of the recent tokens with plain decoding
        self._spent_seconds = 0.0  # decayed sum: cost of the steps that gave them

    def step(self, report: worker_pb2.StepReport, outcome: ReportResult, worker: object = None) -> None:
        """Record one report of a worker: rows, phase times, speculation and energy."""
        metrics = self._metrics
        for energy in report.energy:
            if self._sensors.setdefault((energy.machine, energy.device), worker) is worker:
                metrics.energy_joules_total.labels(device=energy.device).inc(max(0.0, energy.joules))
        for number in outcome.decoded:
            metrics.tokens_per_step.observe(number)
        if drafting := [update for update in outcome.updates if update.delta.decoded and update.delta.drafted]:
            self._drafts(drafting)
        if num_tokens := sum(len(update.delta.tokens) for update in outcome.updates):
            metrics.generated_tokens_total.inc(num_tokens)
        if report.stepped:
            self._stats(report.stats)
            self._speedup(report.stats, len(outcome.decoded), sum(outcome.decoded))

    def _drafts(self, drafting: Sequence[SequenceUpdate]) -> None:
        """Record drafted and accepted tokens of one step, by position and by source."""
        accepted = [0] * len(self._positions)
        num_drafted = num_accepted = 0
        for update in drafting:
            num_drafted += update.delta.drafted
            num_accepted += update.delta.accepted
            if update.live.request.lora is not None:
                self._draft_of_lora(update.live.request.lora.name, update.delta)
            for i in range(min(update.delta.accepted, len(accepted))):
                accepted[i] += 1
        for series, number in zip(self._positions, accepted, strict=True):
            if not number:
                break  # a draft is accepted only if all drafts before it are
            series.inc(number)
        self._metrics.drafted_tokens_total.inc(num_drafted)
        self._metrics.accepted_tokens_total.inc(num_accepted)
        self._by_source([update.part for update in drafting])

    def lora_loaded(self, name: str) -> None:
        """Begin the series of a LoRA."""
        self._metrics.lora_drafted_tokens_total.labels(lora=name)
        self._metrics.lora_accepted_tokens_total.labels(lora=name)

    def lora_unloaded(self, name: str) -> None:
        """End the series of a LoRA; a request that still uses it begins them anew."""
        for series in (self._metrics.lora_drafted_tokens_total, self._metrics.lora_accepted_tokens_total):
            with contextlib.suppress(KeyError):
                series.remove(name)

    def _draft_of_lora(self, name: str, delta: Delta) -> None:
        self._metrics.lora_drafted_tokens_total.labels(lora=name).inc(delta.drafted)
        self._metrics.lora_accepted_tokens_total.labels(lora=name).inc(delta.accepted)

    def _by_source(self, drafting: Iterable[worker_pb2.SequenceReport]) -> None:
        """Record drafts by source. A chain may begin with the masks' drafts and continue with another source's."""
        drafted, accepted = [0] * len(SOURCES), [0] * len(SOURCES)
        for part in drafting:
            source, masks = int(part.draft_source), part.num_mask_drafts
            if not 0 < source < len(SOURCES):
                source, masks = 0, part.num_drafted
            masks = min(masks, part.num_drafted)
            drafted[0] += masks
            drafted[source] += part.num_drafted - masks
            accepted[0] += min(part.num_accepted, masks)
            accepted[source] += max(0, part.num_accepted - masks)
        for number in range(len(SOURCES)):
            if drafted[number]:
                self._drafted[number].inc(drafted[number])
                self._accepted[number].inc(accepted[number])

    def _stats(self, stats: worker_pb2.StepStats) -> None:
        for length, number in enumerate(stats.draft_length_counts):
            if number:
                self._metrics.draft_length.observe(length, number)
        for kind, number in (("chain", stats.chain_rows), ("mask", stats.mask_rows), ("prefill", stats.prefill_rows)):
            if number:
                self._rows[kind].inc(number)
        self._phases["forward"].observe(stats.forward_seconds)
        self._phases["sample"].observe(stats.sample_seconds)
        self._phases["draft"].observe(stats.draft_seconds)
        self._metrics.step_host_seconds.observe(stats.host_seconds)

    def _speedup(self, stats: worker_pb2.StepStats, num_sequences: int, num_tokens: int) -> None:
        """Set the speedup: tokens per sequence and step, times the cost of a plain step, over this step's cost."""
        if not num_sequences or stats.prefill_rows or stats.plain_step_seconds <= 0:
            return
        spent = step_seconds(stats)
        plain = num_tokens / num_sequences * stats.plain_step_seconds
        self._plain_seconds = SPEEDUP_MEMORY * self._plain_seconds + plain
        self._spent_seconds = SPEEDUP_MEMORY * self._spent_seconds + spent
        if self._spent_seconds > 0:
            self._metrics.speculation_speedup.set(self._plain_seconds / self._spent_seconds)

    def admitted(self, live: RequestState) -> None:
        self._metrics.queue_seconds.observe(live.statistics.queue_seconds or 0.0)
        self._metrics.prompt_tokens_total.inc(live.num_prompt)
        self._metrics.prefix_cache_hit_tokens_total.inc(live.statistics.num_cached)

    def copied(self, num_offloaded: int, num_restored: int) -> None:
        """Record blocks copied to host memory and back."""
        copied = self._metrics.kv_offload_copied_blocks_total
        copied.labels(direction="to_host").inc(num_offloaded)
        copied.labels(direction="from_host").inc(num_restored)

    def tokens(self, live: RequestState, num_tokens: int, now: float) -> None:
        """Record new tokens of a request: the gap since its last ones, per token, observed once per step."""
        if live.last_token is None:
            self._metrics.time_to_first_token_seconds.observe(now - live.submitted)
        else:
            self._metrics.inter_token_latency_seconds.observe((now - live.last_token) / num_tokens)

    def worker_lost(self, worker: object, num_up: int) -> None:
        self._sensors = {sensor: reporter for sensor, reporter in self._sensors.items() if reporter is not worker}
        self._metrics.worker_up.set(num_up)

    def read_state_from(
        self, load: Callable[[], LoadFigures], loras: Callable[[], LoraNames], now: Callable[[], float] = time.time
    ) -> None:
        """Read blocks, requests and LoRAs from `load` at each scrape. `now`: seconds since 1970."""
        blocks, requests = self._metrics.kv_blocks, self._metrics.requests
        blocks.labels(state="free").set_function(lambda: load().blocks_free)
        blocks.labels(state="held").set_function(lambda: load().blocks_held)
        blocks.labels(state="cached").set_function(lambda: load().blocks_cached)
        slots = self._metrics.state_slots
        slots.labels(state="free").set_function(lambda: load().states_free)
        slots.labels(state="held").set_function(lambda: load().states_held)
        slots.labels(state="cached").set_function(lambda: load().states_cached)
        host_blocks = self._metrics.kv_offload_blocks
        host_blocks.labels(state="free").set_function(lambda: load().host_blocks_free)
        host_blocks.labels(state="cached").set_function(lambda: load().host_blocks_cached)
        requests.labels(state="queued").set_function(lambda: load().num_queued)
        requests.labels(state="running").set_function(lambda: load().num_running)
        self._metrics.waiting_prompt_tokens.set_function(lambda: load().num_waiting_tokens)
        self._metrics.kv_cache_usage_perc.set_function(lambda: load().blocks_held / max(1, load().num_blocks))
        self._metrics.cache_config_info.read_from(lambda: _cache_config(load()))
        self._metrics.lora_requests_info.read_from(lambda: _lora_requests(loras(), now()))


def _cache_config(load: LoadFigures) -> tuple[Sequence[str], float]:
    return (str(load.block_size), str(load.num_blocks)), 1.0


def _lora_requests(loras: LoraNames, now: float) -> tuple[Sequence[str], float]:
    """Every worker has every LoRA, and a step may use all of them at once."""
    return (str(len(loras.loaded)), ",".join(loras.loaded), ",".join(loras.waiting)), now
