"""The Prometheus series of this router, all present from the first scrape on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

disable_created_metrics()  # type: ignore[no-untyped-call]  # timestamps that would double the number of series

SeriesT = TypeVar("SeriesT", Counter, Gauge, Histogram)


class FastHistogram(Collector):
    """Like prometheus_client's Histogram, four times as fast: no lock, and a binary search for buckets.

    All observations must come from one thread; `times` adds several equal ones at once. With a label, observations go
    to the `series` of its values.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        buckets: Sequence[float],
        registry: CollectorRegistry,
        **labels: Sequence[str],
    ) -> None:
        """`labels`: none, or one with its values."""
        self._name, self._documentation = name, documentation
        self._names = [*(str(float(bound)) for bound in buckets), "+Inf"]
        self._labelnames = list(labels)
        bounds = [float(bound) for bound in buckets]
        self.series = {value: HistogramSeries(bounds) for value in next(iter(labels.values()), ("",))}
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """Add an observation without a label."""
        self.series[""].observe(value, times)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for value, series in self.series.items():
            buckets = list(zip(self._names, accumulate(series.counts), strict=True))
            family.add_metric([value] if self._labelnames else [], buckets, series.sum)
        yield family


class HistogramSeries:
    """The observations of one label value."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # of each bucket alone; the last is above all bounds
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times


class InfoGauge(Collector):
    """A gauge with one sample; its labels are read at each scrape. For facts that a gateway or an autoscaler reads."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._documentation, self._labels = name, documentation, tuple(labels)
        self._read: Callable[[], tuple[Sequence[str], float]] = lambda: (("",) * len(self._labels), 0.0)
        registry.register(self)

    def read_from(self, read: Callable[[], tuple[Sequence[str], float]]) -> None:
        """Take the labels' values, in their order, and the gauge's from `read` at each scrape."""
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        values, value = self._read()
        family = GaugeMetricFamily(self._name, self._documentation, labels=self._labels)
        family.add_metric(list(values), value)
        yield family


POSITIONS = [str(position) for position in range(1, 17)]
"""Draft positions with a series of their own: label `position` of `accepted_by_position_total`."""

ROW_KINDS = ("chain", "mask", "prefill")
PHASES = ("forward", "sample", "draft")
BLOCK_STATES = ("free", "held", "cached")
HOST_BLOCK_STATES = ("free", "cached")
COPY_DIRECTIONS = ("to_host", "from_host")

# Seconds. A step of a small CPU model takes ~1 ms, an 8B model on a GPU 3-5 ms, a long prefill chunk up to seconds.
_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_WAIT_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_WHOLE_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# Tokens and drafts per step are small integers: one bucket each in the usual range, then wider ones.
_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17)
_DRAFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)

OUTCOMES = ("eos", "stop", "length", "embedded", "cancelled", "deadline", "queue_timeout", "error")
"""How a queued request ended: label `outcome` of `requests_total`."""

SOURCES = ("masks", "lookup", "prediction", "grammar", "head", "model", "mtp", "eagle")
"""Source of a draft: label `source` of `drafted_tokens_by_source_total` and `accepted_tokens_by_source_total`."""

REASONS = (
    "invalid",
    "too_long",
    "unauthorized",
    "body_too_large",
    "header_too_large",
    "slow_request",
    "queue_full",
    "rate_limited",
    "not_ready",
    "draining",
    "too_many_connections",
)
"""Why a request was refused, before it was queued or while it waited: label `reason` of `rejected_total`."""


class Metrics:
    """All series on their own registry, with every label value present from construction.

    An attribute is named like its series without `spaceserve_`. The engine records everything except `requests_total`,
    `rejected_total` and `request_seconds`, which the HTTP and gRPC APIs record: only they know whether a request was
    left because a stop string matched or because its client disconnected.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        # `requests` and `requests_total` are two series in Prometheus' text format, but collide in one registry.
        beside = CollectorRegistry()
        of_keys, beside_keys = CollectorRegistry(), CollectorRegistry()  # series with the names of API keys
        self._registries = (registry, beside, of_keys, beside_keys)

        def labelled(series: SeriesT, values: Mapping[str, Iterable[str]]) -> SeriesT:
            for label, known in values.items():
                for value in known:
                    series.labels(**{label: value})
            return series

        def counter(name: str, help_: str, on: CollectorRegistry = registry, **values: Iterable[str]) -> Counter:
            return labelled(Counter(f"spaceserve_{name}", help_, values, registry=on), values)

        def gauge(name: str, help_: str, on: CollectorRegistry = registry, **values: Iterable[str]) -> Gauge:
            return labelled(Gauge(f"spaceserve_{name}", help_, values, registry=on), values)

        def histogram(name: str, help_: str, buckets: tuple[float, ...], **values: Iterable[str]) -> Histogram:
            series = Histogram(f"spaceserve_{name}", help_, values, buckets=buckets, registry=registry)
            return labelled(series, values)

        def fast_histogram(name: str, help_: str, buckets: tuple[float, ...], **values: Sequence[str]) -> FastHistogram:
            return FastHistogram(f"spaceserve_{name}", help_, buckets, registry, **values)

        self.tokens_per_step = fast_histogram(
            "tokens_per_step", "Tokens emitted by one sequence in one decode step, after the cut", _TOKENS
        )
        self.drafted_tokens_total = counter("drafted_tokens_total", "Draft tokens verified")
        self.accepted_tokens_total = counter("accepted_tokens_total", "Draft tokens accepted, inside the cut")
        self.accepted_by_position_total = counter(
            "accepted_by_position_total",
            "Draft tokens accepted, by place in the chain behind the root",
            position=POSITIONS,
        )
        self.drafted_tokens_by_source_total = counter(
            "drafted_tokens_by_source_total", "Draft tokens verified, by their source", source=SOURCES
        )
        self.accepted_tokens_by_source_total = counter(
            "accepted_tokens_by_source_total", "Draft tokens accepted, by their source", source=SOURCES
        )
        # Labelled by the LoRAs that requests can name; the engine creates the label values as they are loaded.
        self.lora_drafted_tokens_total = counter(
            "lora_drafted_tokens_total", "Draft tokens verified for requests with a LoRA", lora=()
        )
        self.lora_accepted_tokens_total = counter(
            "lora_accepted_tokens_total", "Draft tokens accepted for requests with a LoRA, inside the cut", lora=()
        )
        self.draft_length = fast_histogram(
            "draft_length", "Drafts laid out for one sequence in one decode step", _DRAFTS
        )
        self.rows_total = counter("rows_total", "Rows that went through the model", kind=ROW_KINDS)
        self.speculation_speedup = gauge(
            "speculation_speedup", "Tokens per second with speculation over the measured cost of plain decoding"
        )

        self.step_seconds = fast_histogram(
            "step_seconds", "Worker time of one step, by phase", _STEP_SECONDS, phase=PHASES
        )
        self.step_host_seconds = fast_histogram(
            "step_host_seconds", "Worker time of one step spent outside the model", _STEP_SECONDS
        )
        self.worker_up = gauge("worker_up", "Workers connected and accepted")
        self.worker_restarts_total = counter("worker_restarts_total", "Workers that were lost and started again")

        self.time_to_first_token_seconds = histogram(
            "time_to_first_token_seconds", "From submission to the first token", _WHOLE_SECONDS
        )
        self.inter_token_latency_seconds = fast_histogram(
            "inter_token_latency_seconds", "Gap between steps that gave a request tokens, per token", _GAP_SECONDS
        )
        self.request_seconds = histogram("request_seconds", "From submission to the end of a request", _WHOLE_SECONDS)
        self.queue_seconds = histogram("queue_seconds", "From submission to the first admission", _WAIT_SECONDS)
        self.requests = gauge("requests", "Requests in the router now", beside, state=("queued", "running"))
        self.requests_total = counter("requests_total", "Requests that were queued and have ended", outcome=OUTCOMES)
        self.rejected_total = counter(
            "rejected_total", "Requests refused before anything of them was computed", reason=REASONS
        )
        self.slow_readers_cut_total = counter(
            "slow_readers_cut_total", "Connections cut because their client left what was sent unread"
        )
        # Labelled by API key name; `api_keys.RateLimit` creates the label values at start.
        self.key_requests = gauge("key_requests", "Requests that generate, in the router now", beside_keys, key=())
        self.key_requests_total = counter(
            "key_requests_total", "Requests that generate and were let in", of_keys, key=()
        )
        self.key_tokens_total = counter("key_tokens_total", "Tokens of prompts and outputs", of_keys, key=(), kind=())
        self.key_rejected_total = counter(
            "key_rejected_total", "Requests refused because of their key's limits", of_keys, key=(), limit=()
        )

        self.prompt_tokens_total = counter("prompt_tokens_total", "Prompt tokens of admitted requests")
        self.generated_tokens_total = counter("generated_tokens_total", "Tokens emitted")
        self.prefix_cache_hit_tokens_total = counter(
            "prefix_cache_hit_tokens_total", "Prompt tokens whose keys and values were already in shared blocks"
        )
        self.kv_blocks = gauge("kv_blocks", "Blocks of the key/value cache", state=BLOCK_STATES)
        self.kv_cache_usage_perc = gauge(
            "kv_cache_usage_perc", "Share of the key/value cache's blocks that running requests hold; 1: all"
        )
        self.waiting_prompt_tokens = gauge("waiting_prompt_tokens", "Prompt tokens of the requests that are queued")
        # The labels are those of vLLM's series of these names, which endpoint pickers of the Gateway API read.
        self.cache_config_info = InfoGauge(
            "spaceserve_cache_config_info",
            "Tokens of a block of the key/value cache, and the blocks of all workers; 1",
            ("block_size", "num_gpu_blocks"),
            registry,
        )
        self.lora_requests_info = InfoGauge(
            "spaceserve_lora_requests_info",
            "LoRAs that are loaded, and those that queued requests wait with; the time of this answer",
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            registry,
        )
        self.state_slots = gauge(
            "state_slots", "Slots for states of recurrent layers behind prompts that may come again", state=BLOCK_STATES
        )
        self.kv_offload_blocks = gauge(
            "kv_offload_blocks", "Blocks of host memory for what leaves the key/value cache", state=HOST_BLOCK_STATES
        )
        self.kv_offload_copied_blocks_total = counter(
            "kv_offload_copied_blocks_total",
            "Blocks copied between the key/value cache and host memory",
            direction=COPY_DIRECTIONS,
        )
        self.preemptions_total = counter("preemptions_total", "Sequences released to make room and admitted again")
        # One series per sensor; none without sensors.
        self.energy_joules_total = counter("energy_joules_total", "Energy drawn, by device", device=())

    def value(self, name: str, **labels: str) -> float | None:
        found = (registry.get_sample_value(name, labels) for registry in self._registries)
        return next((value for value in found if value is not None), None)

    def render(self, *, with_keys: bool = True) -> bytes:
        """Return all series as text; `with_keys`: also those that have the names of API keys."""
        return b"".join(map(generate_latest, self._registries if with_keys else self._registries[:2]))
