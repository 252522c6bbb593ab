"""Workers that come and go by a list, and their rolling restart: no stream is lost by either."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from doubles.router import Script, ScriptedWorker
from doubles.router.tabletop import answer, request_of, text_of, until
from space_router.config import ServeConfig
from space_router.engine.engine import Engine
from space_router.engine.errors import RequestFailed, RestartRefused
from space_router.engine.request.request import SamplingOptions
from space_router.engine.workers import worker_connection as connection
from space_router.engine.workers.rolling_restart import RestartState, RollingRestart
from space_router.engine.workers.supervisor import RemoteWorker, Supervisor
from space_router.engine.workers.worker_connection import LinkLost
from space_router.metrics import Metrics

PACED = Script(eos_ids=(), step_seconds=0.005)


@asynccontextmanager
async def following() -> AsyncIterator[Engine]:
    async with Engine(ServeConfig(), Metrics(), sources=()) as engine:
        yield engine


def up(engine: Engine) -> int:
    return engine.load().num_workers_up


async def test_workers_are_met_as_they_are_listed_and_their_seats_taken_once_they_are_not_and_away() -> None:
    async with following() as engine, ScriptedWorker(PACED) as two, AsyncExitStack() as stack:
        one = await stack.enter_async_context(ScriptedWorker(PACED))
        engine.worker_pool.follow([one.address], finish_seconds=0.0)
        await engine.wait_ready()
        engine.worker_pool.follow([one.address, two.address], finish_seconds=0.0)
        await until(lambda: up(engine) == 2)
        requests = [request_of(5 + i, 200, name=str(i)) for i in range(6)]
        streams = [asyncio.create_task(text_of(engine, request)) for request in requests]
        await until(lambda: all(s.scheduler and s.scheduler.num_running for s in engine.connections))
        while not one.drained.is_set():  # each list finds whoever came back meanwhile, as after a lost link
            engine.worker_pool.follow([two.address], finish_seconds=0.0)
            await asyncio.sleep(0.005)  # and what it ran has been handed over
        await stack.aclose()
        await until(lambda: up(engine) == 1)
        engine.worker_pool.follow([two.address], finish_seconds=0.0)
        assert [connection.number for connection in engine.connections] == [1]
        assert await asyncio.gather(*streams) == [answer(request, PACED) for request in requests]
        engine.worker_pool.follow([one.address, two.address], finish_seconds=0.0)
        assert sorted(connection.number for connection in engine.connections) == [0, 1]  # numbers are used again


async def test_an_engine_ends_though_a_connection_hides_that_it_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    num_starts = 0

    async def start(worker: RemoteWorker) -> str:
        nonlocal num_starts
        num_starts += 1
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if num_starts == 1:
                raise LinkLost(f"{worker.name} is gone") from None  # as grpc.aio does where the call fails meanwhile
            raise
        return ""

    monkeypatch.setattr(RemoteWorker, "start", start)
    async with following() as engine:
        engine.worker_pool.follow(["127.0.0.1:1"], finish_seconds=0.0)
        await until(lambda: num_starts == 1)
    assert num_starts == 1


async def test_requests_wait_while_the_list_is_empty() -> None:
    async with following() as engine:
        async with ScriptedWorker(PACED) as first:
            engine.worker_pool.follow([first.address], finish_seconds=0.0)
            await engine.wait_ready()
        await until(lambda: up(engine) == 0)
        engine.worker_pool.follow([], finish_seconds=0.0)
        assert engine.connections == []
        request = request_of(5, 10)
        waiting = asyncio.create_task(text_of(engine, request))
        async with ScriptedWorker(PACED) as second:
            engine.worker_pool.follow([second.address], finish_seconds=0.0)
            assert await waiting == answer(request, PACED)


@pytest.mark.parametrize("listed", [True, False])
async def test_a_worker_of_another_model_is_left_out_until_it_is_set_right(
    listed: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_FAILED_STARTS", 1)
    monkeypatch.setattr(connection, "FIRST_GAP", 0.0)

    async with ScriptedWorker(PACED) as one, ScriptedWorker(replace(PACED)) as other:
        addresses = (one.address, other.address)
        config = ServeConfig(worker_address=() if listed else addresses)
        async with Engine(config, Metrics(), sources=() if listed else None) as engine:
            if listed:
                engine.worker_pool.follow(addresses, finish_seconds=0.0)
            await until(lambda: up(engine) == 2)
            other.script.model_hash = "another"
            other.kill()
            await until(lambda: caplog.text.count("It is asked again, in case it is set right.") >= 2)
            assert up(engine) == 1
            (stranger,) = [empty for empty in engine.connections if empty.scheduler is None]
            assert "Give all the same model" in stranger.trouble
            requests = [request_of(5 + i, 40, name=str(i)) for i in range(6)]
            assert [await text_of(engine, request) for request in requests] == [answer(r, PACED) for r in requests]
            other.script.model_hash = PACED.model_hash
            await until(lambda: up(engine) == 2)
            streams = [asyncio.create_task(text_of(engine, request)) for request in requests]
            await until(lambda: stranger.scheduler is not None and stranger.scheduler.num_running > 0)
            assert await asyncio.gather(*streams) == [answer(request, PACED) for request in requests]
            assert not stranger.is_given_up


@pytest.mark.parametrize("windows", [(64, 160), (160, 64)])
async def test_the_worker_that_takes_the_longest_sets_the_limits_whichever_comes_last(windows: tuple[int, int]) -> None:
    request = request_of(5, 100)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(ScriptedWorker(replace(SCRIPT, window=w))) for w in windows]
        engine = await stack.enter_async_context(Engine(ServeConfig(), Metrics(), sources=()))
        for number in (1, 2):
            engine.worker_pool.follow([worker.address for worker in workers[:number]], finish_seconds=0.0)
            await until(lambda number=number: up(engine) == number)  # type: ignore[misc]
        assert engine.facts is not None
        assert engine.facts.window == 160
        assert await text_of(engine, request) == answer(request, SCRIPT)


async def test_an_engine_with_workers_of_its_own_follows_nobody() -> None:
    config = ServeConfig(worker_address=("localhost:1",))
    async with Engine(config, Metrics()) as engine:
        with pytest.raises(ValueError, match="These workers are fixed"):
            engine.worker_pool.follow([], finish_seconds=0.0)


SCRIPT = Script(eos_ids=())
LIMIT = 120.0


def argv(*flags: str) -> Callable[[ServeConfig, str], Sequence[str]]:
    base = [sys.executable, "-m", "doubles.router", "--block-size", "4", "--num-blocks", "256"]
    return lambda config, address: [*base, "--listen", address, *flags]


async def all_up(engine: Engine) -> None:
    await until(lambda: engine.load().num_workers_up == len(engine.connections))


@asynccontextmanager
async def three_workers(*flags: str, num_workers: int = 3) -> AsyncIterator[tuple[Engine, RollingRestart, Metrics]]:
    """As processes of this machine; at the end every page of all of them is back."""
    metrics = Metrics()
    config = ServeConfig(workers=num_workers, worker_start_timeout=LIMIT)
    async with Engine(config, metrics, worker_argv=argv("--step-seconds", "0.01", *flags)) as engine:
        restart = RollingRestart(engine.connections, back_seconds=LIMIT)
        await all_up(engine)
        yield engine, restart, metrics
        while engine.load().blocks_held:  # noqa: ASYNC110  pages come back with reports, which are no events here
            await asyncio.sleep(0.01)
        engine.check()


@pytest.mark.parametrize("num_workers", [1, 3])
async def test_every_worker_is_another_process_afterwards_and_streams_have_the_same_text(num_workers: int) -> None:
    async with three_workers(num_workers=num_workers) as (engine, restart, metrics):
        sources = [connection.source for connection in engine.connections if isinstance(connection.source, Supervisor)]
        before = [source.pid for source in sources]
        assert len(before) == num_workers
        requests = [
            request_of(5 + i, 150, name=str(i), sampling=SamplingOptions(seed=i, temperature=float(i % 2)))
            for i in range(12)
        ]
        streams = [asyncio.create_task(text_of(engine, request)) for request in requests]
        await asyncio.sleep(0.1)
        restart.begin(finish_seconds=0.0)
        await restart.wait()
        assert (restart.state, restart.error) == (RestartState.DONE, "")
        assert restart.num_done == num_workers
        assert await asyncio.gather(*streams) == [answer(request, SCRIPT) for request in requests]
        assert not {source.pid for source in sources} & set(before)
        assert metrics.value("spaceserve_worker_restarts_total") == 0  # nothing that should wake anybody
        assert metrics.value("spaceserve_worker_up") == num_workers


async def test_streams_that_end_in_time_are_computed_where_they_began() -> None:
    async with three_workers(num_workers=2) as (engine, restart, _):
        streams = [engine.submit(request_of(6, 60, name=str(i))) for i in range(4)]
        for stream in streams:
            await stream.__aenter__()
        await engine.connections[0].until(lambda: engine.load().num_running == 4)
        restart.begin(finish_seconds=LIMIT)
        for stream in streams:
            assert sum([len(delta.tokens) async for delta in stream]) == 60
            await stream.__aexit__(None, None, None)
        await restart.wait()
        assert restart.state is RestartState.DONE
        assert all(stream.statistics.num_worker_losses == 0 for stream in streams)
        assert all(stream.statistics.num_preemptions == 0 for stream in streams)


async def test_nothing_new_goes_to_a_worker_that_is_taken_off_duty() -> None:
    async with three_workers(num_workers=2) as (engine, _, _):
        long = engine.submit(request_of(6, 400, name="long"))
        async with long:
            (connection,) = [
                one for one in engine.connections if one.scheduler is not None and one.scheduler.num_running
            ]
            retiring = asyncio.create_task(connection.retire(finish_seconds=LIMIT))
            await asyncio.sleep(0)
            await asyncio.gather(*(text_of(engine, request_of(6, 5, name=str(i))) for i in range(6)))
            assert connection.scheduler is not None
            assert connection.scheduler.num_running == 1
        await retiring
        await connection.until(lambda: connection.num_incarnations == 2)


async def test_a_worker_that_does_not_come_back_stops_the_rest() -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(ScriptedWorker(SCRIPT)) for _ in range(2)]
        config = ServeConfig(worker_address=tuple(worker.address for worker in workers))
        engine = await stack.enter_async_context(Engine(config, Metrics()))
        await all_up(engine)
        restart = RollingRestart(engine.connections, back_seconds=0.3)
        stack.callback(restart.cancel)
        gone = asyncio.create_task(_end(workers[0]))
        restart.begin(finish_seconds=0.0)
        await restart.wait()
        await gone
        assert restart.state is RestartState.FAILED
        assert f"the worker at {workers[0].address} was not up within 0.3 s" in restart.error
        assert engine.connections[1].num_incarnations == 1
        request = request_of(6, 20)
        assert await text_of(engine, request) == answer(request, SCRIPT)


async def test_a_worker_that_never_was_up_or_is_refused_holds_no_restart_back(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_FAILED_STARTS", 1)
    async with ScriptedWorker(SCRIPT) as one, ScriptedWorker(replace(SCRIPT)) as other:
        addresses = (one.address, other.address, f"unix:{tmp_path}/autoscaled.sock")
        async with Engine(ServeConfig(worker_address=addresses), Metrics()) as engine:
            await until(lambda: up(engine) == 2)
            other.script.model_hash = "another"
            other.kill()
            await until(lambda: engine.connections[1].is_refused)
            restart = RollingRestart(engine.connections, back_seconds=LIMIT)
            kept = asyncio.create_task(_keep_alive(one))
            restart.begin(finish_seconds=0.0)
            async with asyncio.timeout(LIMIT / 10):
                await restart.wait()
            kept.cancel()
            assert (restart.state, restart.num_done, restart.num_wanted) == (RestartState.DONE, 1, 1)
            refused, never = restart.left_out
            assert f"the worker at {other.address} is refused (" in refused
            assert f"the worker at {addresses[2]} has not been up yet (" in never
            with pytest.raises(RestartRefused, match=r"Worker 2 cannot be restarted: .* has not been up yet"):
                restart.begin(numbers=[0, 2])


async def test_a_worker_that_went_away_during_a_restart_is_waited_for_and_the_wait_can_be_ended() -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(ScriptedWorker(SCRIPT))
        away = ScriptedWorker(SCRIPT)
        await away.__aenter__()
        config = ServeConfig(worker_address=(one.address, away.address))
        engine = await stack.enter_async_context(Engine(config, Metrics()))
        await all_up(engine)
        await away.__aexit__(None, None, None)
        await until(lambda: up(engine) == 1)
        restart = RollingRestart(engine.connections, back_seconds=LIMIT)
        restart.begin(finish_seconds=0.0)
        await until(lambda: restart.waits_for == f"the worker at {away.address} to be up")
        restart.cancel()
        await restart.wait()
        assert (restart.state, restart.num_done) == (RestartState.CANCELLED, 0)
        assert "ended on request, with 0 of 2 workers restarted" in restart.error
        long_away = RollingRestart(engine.connections, back_seconds=0.0)
        with pytest.raises(RestartRefused, match=r"has been away for 0 s"):
            long_away.begin(numbers=[1])


async def test_a_restart_that_is_ended_before_the_worker_was_asked_leaves_it_at_work() -> None:
    async with (
        ScriptedWorker(PACED) as worker,
        Engine(ServeConfig(worker_address=(worker.address,)), Metrics()) as engine,
    ):
        await all_up(engine)
        restart = RollingRestart(engine.connections, back_seconds=LIMIT)
        stream = engine.submit(request_of(5, 200))
        async with stream:
            await until(lambda: engine.load().num_running == 1)
            restart.begin(finish_seconds=LIMIT)
            await until(lambda: "to end: what it runs has 120 s to finish" in restart.waits_for)
            restart.cancel()
            await restart.wait()
            assert restart.state is RestartState.CANCELLED
            request = request_of(6, 5)
            assert await text_of(engine, request) == answer(request, PACED)  # a worker on leave would admit nothing
        assert engine.connections[0].num_incarnations == 1


async def test_an_address_that_is_away_is_logged_once_and_once_more_when_it_is_up(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries = 0

    async def start(worker: RemoteWorker) -> str:
        nonlocal num_tries
        num_tries += 1
        await asyncio.sleep(0.001)
        return address

    monkeypatch.setattr(RemoteWorker, "start", start)
    address = f"unix:{tmp_path}/autoscaled.sock"
    caplog.set_level("INFO", logger="space_router")
    async with Engine(ServeConfig(worker_address=(address,)), Metrics()) as engine:
        await until(lambda: num_tries > 5)
        assert caplog.text.count("is away: ") == 1
        async with ScriptedWorker(SCRIPT, listen=address):
            await until(lambda: up(engine) == 1)
            assert caplog.text.count(f"the worker at {address} is up") == 1


def test_a_lasting_trouble_is_logged_at_gaps_that_grow_to_an_hour() -> None:
    notice = connection.RepeatedNotice()
    logged = [second for second in range(0, 4 * 86400, 5) if notice.is_due("LinkLost", second)]
    assert logged[:4] == [0, 60, 180, 420]
    assert {later - earlier for earlier, later in zip(logged[-50:], logged[-49:], strict=False)} == {3600}
    assert notice.is_due("LinkRefused", 1.0)  # another kind of trouble is news
    assert notice.ends()
    assert not notice.ends()


async def _keep_alive(worker: ScriptedWorker) -> None:
    """As systemd would: another process whenever one has ended on request."""
    while True:
        await worker.drained.wait()
        worker.drained.clear()
        worker.kill()


async def _end(worker: ScriptedWorker) -> None:
    """What the process around a worker does: it ends when the worker is drained, and here nobody starts another."""
    await worker.drained.wait()
    await worker.__aexit__(None, None, None)


async def test_a_remote_worker_is_told_to_end_and_met_again_once_somebody_has_started_it(tmp_path: Any) -> None:
    async def kept_alive(listen: str, lives: list[int]) -> None:
        """As Kubernetes or systemd would."""
        while True:
            process = await asyncio.create_subprocess_exec(*argv("--step-seconds", "0.01")(ServeConfig(), listen))
            lives.append(process.pid)
            try:
                await process.wait()
            except asyncio.CancelledError:
                process.kill()
                await process.wait()
                raise

    addresses = tuple(f"unix:{tmp_path}/{number}.sock" for number in range(2))
    lives: list[int] = []
    async with asyncio.TaskGroup() as group:
        keeping = [group.create_task(kept_alive(address, lives)) for address in addresses]
        async with Engine(ServeConfig(worker_address=addresses), Metrics()) as engine:
            await all_up(engine)
            restart = RollingRestart(engine.connections, back_seconds=LIMIT)
            requests = [request_of(5 + i, 200, name=str(i)) for i in range(6)]
            streams = [asyncio.create_task(text_of(engine, request)) for request in requests]
            await asyncio.sleep(0.1)
            restart.begin(finish_seconds=0.0)
            await restart.wait()
            assert (restart.state, restart.error) == (RestartState.DONE, "")
            assert await asyncio.gather(*streams) == [answer(request, SCRIPT) for request in requests]
            assert len(lives) == 4
        for task in keeping:
            task.cancel()


async def test_one_restart_at_a_time_and_of_workers_that_exist() -> None:
    async with three_workers(num_workers=2) as (_, restart, _):
        with pytest.raises(RestartRefused, match="There is no worker 7; there are 0, 1"):
            restart.begin(numbers=[1, 7])
        restart.begin(numbers=[1])
        with pytest.raises(RestartRefused, match="0 of 1 workers done"):
            restart.begin()
        await restart.wait()
        assert restart.num_done == restart.num_wanted == 1


class Flickering:
    """A seat whose worker is lost whenever it is taken off duty: by the first `num_losses` times it only reconnects."""

    number, is_given_up, is_refused, trouble = 0, False, False, ""

    def __init__(self, num_losses: int) -> None:
        self.source = SimpleNamespace(name="worker 0")
        self.scheduler = object()
        self.num_incarnations, self.incarnation = 1, "first"
        self._num_losses = num_losses

    async def retire(self, *, finish_seconds: float) -> None:
        self.num_incarnations += 1
        self._num_losses -= 1
        if self._num_losses < 0:
            self.incarnation = "second"

    async def until(self, holds: Callable[[], bool]) -> None:
        assert holds()

    def why_not_expected(self, seconds: float) -> str:
        return ""


@pytest.mark.parametrize(("num_losses", "state"), [(0, "done"), (2, "done"), (3, "failed")])
async def test_a_worker_that_only_lost_its_connection_is_not_taken_for_another(num_losses: int, state: str) -> None:
    connection: Any = Flickering(num_losses)
    restart = RollingRestart([connection], back_seconds=1.0)
    restart.begin()
    await restart.wait()
    assert restart.state.value == state
    assert (connection.incarnation == "second") is (state == "done")
    assert ("came back as the same process" in restart.error) is (state == "failed")


async def test_a_worker_with_other_instructions_is_left_out_while_others_are_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = replace(PACED, instruction_set="avx512")
    new = replace(old, instruction_set="amx_bf16")
    async with ScriptedWorker(old) as one, ScriptedWorker(new) as other, following() as engine:
        engine.worker_pool.follow((one.address,), finish_seconds=0.0)
        await until(lambda: up(engine) == 1)
        before = engine.facts
        engine.worker_pool.follow((one.address, other.address), finish_seconds=0.0)
        await until(lambda: "computes with amx_bf16, another with avx512" in caplog.text)
        assert (up(engine), engine.facts) == (1, before)
        other.script.instruction_set = ""  # of an earlier release: it does not say
        other.kill()
        await until(lambda: up(engine) == 2)


@pytest.mark.parametrize("instruction_set", ["avx512", "amx_bf16"])
async def test_no_text_goes_on_with_other_instructions(instruction_set: str) -> None:
    old = replace(PACED, instruction_set="avx512", max_sequences=1)
    async with (
        ScriptedWorker(old) as worker,
        Engine(ServeConfig(worker_address=(worker.address,)), Metrics()) as engine,
    ):
        before = await engine.wait_ready()
        begun, waiting = request_of(5, 40, name="begun"), request_of(6, 40, name="waiting")
        stream, queued = engine.submit(begun), asyncio.create_task(text_of(engine, waiting))
        first = await anext(aiter(stream))
        assert first.tokens
        worker.script.instruction_set = instruction_set
        worker.kill()
        if instruction_set == "avx512":
            rest = [token async for delta in stream for token in delta.tokens]
            assert [*first.tokens, *rest] == list(answer(begun, old))
        else:
            with pytest.raises(
                RequestFailed, match="with avx512 is lost, and the one that is up computes with amx_bf16"
            ):
                async for _ in stream:
                    pass
        assert await queued == answer(waiting, old)  # its first token was computed by the new one
        after = await engine.wait_ready()
        assert (after.fingerprint == before.fingerprint) is (instruction_set == "avx512")
