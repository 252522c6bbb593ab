"""What an operator sees of the engine, and histograms as prometheus_client has them."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from doubles.router import Script, always, never
from doubles.router.tabletop import in_house, request_of
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from space_proto import worker_pb2
from space_router.engine.engine_metrics import EngineMetrics
from space_router.engine.request.request_state import ReportResult
from space_router.metrics import FastHistogram, Metrics


async def test_tokens_per_step_leaves_out_the_prefill_token() -> None:
    async with in_house(Script(accepts=always)) as house:
        await house.text(request_of(6, 10))  # 1 by the prefill, then 4, 4, 1
        value = house.metrics.value
        assert value("spaceserve_tokens_per_step_count") == 3
        assert value("spaceserve_tokens_per_step_sum") == 9
        assert value("spaceserve_generated_tokens_total") == 10
        assert value("spaceserve_drafted_tokens_total") == value("spaceserve_accepted_tokens_total") == 6
        assert [value("spaceserve_accepted_by_position_total", position=str(i)) for i in (1, 2, 3, 4)] == [2, 2, 2, 0]
        assert value("spaceserve_draft_length_sum") == 6
        assert value("spaceserve_draft_length_count") == 3
        assert value("spaceserve_prompt_tokens_total") == 6


async def test_plain_steps_observe_one() -> None:
    async with in_house(Script(accepts=always)) as house:
        await house.text(request_of(6, 10, max_draft_length=0))
        assert house.metrics.value("spaceserve_tokens_per_step_count") == 9
        assert house.metrics.value("spaceserve_tokens_per_step_sum") == 9
        assert house.metrics.value("spaceserve_drafted_tokens_total") == 0


@pytest.mark.parametrize(("accepts", "num_tokens"), [(always, 4.0), (never, 1.0)])
async def test_the_speedup_is_measured_against_a_plain_step(accepts: Any, num_tokens: float) -> None:
    async with in_house(Script(accepts=accepts, plain_step_seconds=0.001, block_size=16)) as house:
        await house.text(request_of(6, 41))
        # a step costs 1.4 ms, a plain one 1 ms
        assert house.metrics.value("spaceserve_speculation_speedup") == pytest.approx(num_tokens / 1.4, rel=0.02)


async def test_gauges_return_to_rest_and_every_wait_is_observed_once() -> None:
    async with in_house() as house:
        for _ in range(3):
            await house.text(request_of(9, 12))
        await house.quiet()
        value = house.metrics.value
        assert value("spaceserve_requests", state="queued") == value("spaceserve_requests", state="running") == 0
        blocks = {state: value("spaceserve_kv_blocks", state=state) for state in ("free", "held", "cached")}
        assert blocks["held"] == 0
        assert sum(blocks.values()) == house.worker.script.num_blocks
        assert value("spaceserve_queue_seconds_count") == value("spaceserve_time_to_first_token_seconds_count") == 3
        assert value("spaceserve_inter_token_latency_seconds_count") == value("spaceserve_tokens_per_step_count")
        assert value("spaceserve_prefix_cache_hit_tokens_total") == 2 * 8
        assert value("spaceserve_step_seconds_count", phase="forward") == value("spaceserve_step_host_seconds_count")
        assert value("spaceserve_rows_total", kind="prefill") == 9 + 1 + 1


async def test_autoscalers_and_endpoint_pickers_read_what_waits_and_what_is_held() -> None:
    script = Script(num_blocks=16, block_size=4, loras=(("sql", "a" * 64), ("chat", "b" * 64)), step_seconds=0.005)
    async with in_house(script) as house, contextlib.AsyncExitStack() as stack:
        value, engine = house.metrics.value, house.engine
        assert value("spaceserve_waiting_prompt_tokens") == value("spaceserve_kv_cache_usage_perc") == 0
        assert value("spaceserve_cache_config_info", block_size="4", num_gpu_blocks="16") == 1
        begun = time.time()
        loras = {"max_lora": "2", "running_lora_adapters": "chat,sql"}
        assert (value("spaceserve_lora_requests_info", **loras, waiting_lora_adapters="") or 0) >= begun
        first = await stack.enter_async_context(engine.submit(request_of(40, 20, name="first")))
        await house.until(lambda: first.statistics.queue_seconds is not None)
        for number, length in enumerate((30, 25, 27)):  # none of them fits beside the first
            request = request_of(length, 30, name=f"later-{number}", lora=engine.loras.named["sql"] if number else None)
            await stack.enter_async_context(engine.submit(request))
        assert value("spaceserve_requests", state="queued") == 3
        assert value("spaceserve_waiting_prompt_tokens") == 30 + 25 + 27
        assert value("spaceserve_kv_cache_usage_perc") == engine.load().blocks_held / 16 > 0.5
        assert (value("spaceserve_lora_requests_info", **loras, waiting_lora_adapters="sql") or 0) >= begun
        engine.cancel("later-1")
        assert value("spaceserve_waiting_prompt_tokens") == 30 + 27


def energy(machine: str, device: str, joules: float) -> worker_pb2.StepReport:
    return worker_pb2.StepReport(energy=[worker_pb2.Energy(machine=machine, device=device, joules=joules)])


def test_without_a_sensor_there_is_no_energy_rather_than_zero() -> None:
    metrics = Metrics()
    EngineMetrics(metrics).step(worker_pb2.StepReport(), ReportResult(), "worker")
    assert b"spaceserve_energy_joules_total{" not in metrics.render()


def test_each_joule_is_counted_once_and_a_lost_workers_sensors_are_left_to_another() -> None:
    metrics = Metrics()
    observer = EngineMetrics(metrics)

    def counted(worker: str, machine: str, joules: float) -> float | None:
        observer.step(energy(machine, "package-0", joules), ReportResult(), worker)
        return metrics.value("spaceserve_energy_joules_total", device="package-0")

    assert [counted(worker, "here", 2.0) for worker in ("first", "second")] == [2.0, 2.0]
    assert counted("third", "there", 5.0) == 7.0
    observer.worker_lost("first", 1)
    assert counted("second", "here", 3.0) == 10.0


BOUNDS = (0.001, 0.5, 1, 2.5, 17)
values = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 40, allow_subnormal=False))


def text(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(values, st.integers(1, 3))))
def test_every_line_is_that_of_a_histogram(observed: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = FastHistogram("seconds", "What it takes", BOUNDS, ours)
    histogram = Histogram("seconds", "What it takes", buckets=BOUNDS, registry=theirs)
    for value, times in observed:
        tally.observe(value, times)
        for _ in range(times):
            histogram.observe(value)
    lines, expected = text(ours), text(theirs)
    assert [line.rsplit(" ", 1)[0] for line in lines] == [line.rsplit(" ", 1)[0] for line in expected]
    for line, other in zip(lines, expected, strict=True):
        if not line.startswith("#"):
            ours_is, theirs_is = float(line.rsplit(" ", 1)[1]), float(other.rsplit(" ", 1)[1])
            assert abs(ours_is - theirs_is) <= 1e-9 * max(1.0, theirs_is)
