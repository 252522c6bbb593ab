"""A worker that dies, hangs, ends or talks nonsense costs its readers a pause and nothing else."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from doubles.router import Script, ScriptedWorker, never
from doubles.router.tabletop import House, Lockstep, answer, in_house, request_of, text_of, until
from doubles.router.whole_router import Certificate, authority, signed
from space_proto import worker_pb2, worker_pb2_grpc
from space_router.config import ServeConfig, build
from space_router.engine.engine import Engine
from space_router.engine.errors import NotReady, RequestFailed, WorkerFailed, WorkerStartFailed
from space_router.engine.request.request import Grammar, SamplingOptions
from space_router.engine.workers import worker_connection as connection
from space_router.engine.workers.supervisor import ExitCause, RemoteWorker
from space_router.engine.workers.worker_connection import FLOOR, MIN_STEPS, Link, LinkLost, Watchdog, WorkerMismatch
from space_router.metrics import Metrics

START = worker_pb2.Command(start=worker_pb2.Start(protocol_major=1, max_prefill_rows=64, max_draft_length=3))


def admit(seq_id: int) -> worker_pb2.Command:
    limits = worker_pb2.Limits(max_tokens=3)
    pages = [3 * seq_id, 3 * seq_id + 1, 3 * seq_id + 2]
    return worker_pb2.Command(
        admit=worker_pb2.Admit(seq_id=seq_id, ids=[10, 11, 12], num_prompt=3, pages=pages, limits=limits)
    )


@pytest.mark.parametrize("listen", [None, "127.0.0.1:0"])
async def test_hello_comes_first_and_commands_are_heeded_in_order(listen: str | None) -> None:
    async with ScriptedWorker(listen=listen) as worker:
        async with Link(worker.address, watchdog=Watchdog(5.0)) as link:
            assert link.hello.model_name == "scripted"
            link.send([START, admit(1)])
            link.send([admit(2)])
            report = await link.report()
            assert report.report_no == 1
            assert [part.seq_id for part in report.sequences] == [1, 2]
        worker.check()


async def test_a_worker_that_cannot_be_reached_is_lost() -> None:
    with pytest.raises(LinkLost, match="nobody"):
        async with Link("unix:/nobody.sock", watchdog=Watchdog(5.0)):
            pass


async def test_a_worker_that_dies_is_lost() -> None:
    async with ScriptedWorker() as worker, Link(worker.address, watchdog=Watchdog(5.0)) as link:
        link.send([START])
        worker.kill()
        with pytest.raises(LinkLost, match="died"):
            await link.report()


async def test_a_worker_that_is_silent_for_too_long_is_lost() -> None:
    silent = Script(hang_after_steps=0)
    async with ScriptedWorker(silent) as worker, Link(worker.address, watchdog=Watchdog(0.5)) as link:
        link.send([START])
        with pytest.raises(LinkLost, match=r"said nothing for 0\.[5-7]\d* s"):
            await link.report()


async def test_a_refusal_is_passed_on_in_the_workers_words() -> None:
    refusing = Script(refuse="not you")
    async with ScriptedWorker(refusing) as worker, Link(worker.address, watchdog=Watchdog(5.0)) as link:
        link.send([START])
        with pytest.raises(LinkLost, match="refuses: not you"):
            await link.report()


async def test_another_tokenizer_is_a_mismatch_unless_nobody_says_which() -> None:
    async with ScriptedWorker(Script(tokenizer_hash="theirs")) as worker:
        with pytest.raises(WorkerMismatch, match="tokenizer theirs, this router ours"):
            async with Link(worker.address, watchdog=Watchdog(5.0), tokenizer_hash="ours"):
                pass
        for fine in ("theirs", "", None):
            async with Link(worker.address, watchdog=Watchdog(5.0), tokenizer_hash=fine):
                pass


async def test_one_link_after_another_finds_an_empty_worker() -> None:
    async with ScriptedWorker() as worker:
        for _ in range(2):
            async with Link(worker.address, watchdog=Watchdog(5.0)) as link:
                link.send([START, admit(1)])
                assert (await link.report()).sequences[0].seq_id == 1
        worker.check()


async def test_nothing_is_left_waiting_behind_a_link() -> None:
    async with ScriptedWorker() as worker:
        before = asyncio.all_tasks()
        async with Link(worker.address, watchdog=Watchdog(5.0)) as link:
            link.send([START])
            worker.kill()
            with pytest.raises(LinkLost, match="died"):
                await link.report()
        async with asyncio.timeout(30):
            while any("_consume_request_iterator" in repr(task) for task in asyncio.all_tasks() - before):  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_a_scripted_heart_beats_before_its_router_has_said_anything() -> None:
    async with ScriptedWorker(Script(heartbeat_seconds=0.02)) as worker:
        async with Link(worker.address, watchdog=Watchdog(5.0)) as link:
            assert [(await link.report()).report_no for _ in range(2)] == [1, 2]
            link.send([START, admit(1)])
            while not (report := await link.report()).sequences:
                assert not report.stepped
        worker.check()


async def test_a_router_speaks_to_a_worker_elsewhere_by_mutual_tls(tmp_path: Path) -> None:
    ours, other = authority(tmp_path), authority(tmp_path, "other")
    of_worker, of_router = signed(tmp_path, "worker", ours), signed(tmp_path, "router", ours)

    def config(trusted: Certificate) -> ServeConfig:
        flags = {"worker_tls_ca": trusted.cert, "worker_tls_cert": of_router.cert, "worker_tls_key": of_router.key}
        return build({name: str(path) for name, path in flags.items()} | {"worker_address": "localhost:1"}, {})

    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(ScriptedWorker(), server)  # type: ignore[no-untyped-call]
    pair = (of_worker.key.read_bytes(), of_worker.cert.read_bytes())
    needed = grpc.ssl_server_credentials([pair], ours.cert.read_bytes(), require_client_auth=True)
    address = f"localhost:{server.add_secure_port('localhost:0', needed)}"
    await server.start()
    credentials = RemoteWorker(address, config(ours).worker_certificate()).credentials
    async with Link(address, watchdog=Watchdog(5.0), credentials=credentials) as link:
        assert link.hello.model_name == "scripted"
    for stranger in (RemoteWorker(address, config(other).worker_certificate()).credentials, None):
        with pytest.raises(LinkLost):
            async with Link(address, watchdog=Watchdog(5.0), credentials=stranger):
                pytest.fail("it was heard")
    await server.stop(grace=0)


async def test_a_worker_without_tls_is_named_as_that(tmp_path: Path) -> None:
    credentials = grpc.ssl_channel_credentials(authority(tmp_path).cert.read_bytes())
    async with ScriptedWorker(Script(), listen="127.0.0.1:0") as worker:
        with pytest.raises(LinkLost, match=r"speaks no TLS, and this router does. Give it --tls-cert"):
            async with Link(worker.address, watchdog=Watchdog(5.0), credentials=credentials):
                pass


@pytest.mark.parametrize(
    ("most", "start_seconds", "steps", "silence"),
    [
        (30.0, 2.0, [0.01], FLOOR),
        (30.0, 8.0, [], 8.0),
        (30.0, 8.0, [0.6], 12.0),
        (30.0, 8.0, [0.6, *[0.01] * 1000], 8.0),
        (3.0, 600.0, [60.0], 3.0),
    ],
)
def test_silence_is_forgiven_by_the_slowest_recent_step_and_the_start_and_never_longer_than_was_set(
    most: float, start_seconds: float, steps: list[float], silence: float
) -> None:
    watchdog = Watchdog(most, start_seconds=start_seconds)
    for seconds in steps:
        watchdog.stepped(seconds)
    assert watchdog.silence == pytest.approx(silence)
    assert FLOOR == 5.0


@pytest.mark.parametrize(
    ("steps", "stall"),
    [
        ([0.01] * (MIN_STEPS - 1), 300.0),  # its steps are not known yet: it may be compiling
        ([0.01] * MIN_STEPS, 30.0),
        ([*[0.01] * MIN_STEPS, 5.0], 100.0),
        ([*[0.01] * MIN_STEPS, 5.0, 500.0], 300.0),
    ],
)
def test_slow_steps_are_waited_for_though_no_longer_than_ten_times_what_was_set(
    steps: list[float], stall: float
) -> None:
    watchdog = Watchdog(30.0)
    for seconds in steps:
        watchdog.stepped(seconds)
    assert watchdog.stall == pytest.approx(stall)


BOUND = SamplingOptions(seed=1, grammar=Grammar("regex", "a+"))


def compiles() -> Script:
    """Only its heart beats."""
    return Script(stall_after_steps=0, heartbeat_seconds=0.01, eos_ids=())


def test_a_step_is_due_of_those_alone_whose_grammar_is_known() -> None:
    house = Lockstep(Script(num_blocks=200), delay=1)
    house.submit(request_of(9, 4, sampling=BOUND))
    house.step()
    assert (house.scheduler.is_step_due, house.scheduler.awaits_grammar) == (False, True)
    house.step()  # reported: it is compiled
    assert (house.scheduler.is_step_due, house.scheduler.awaits_grammar) == (True, False)


def test_beside_a_grammar_that_is_compiled_steps_and_pages_of_others_are_due() -> None:
    house = Lockstep(Script(num_blocks=200), delay=9)
    house.submit(request_of(9, 4, sampling=BOUND))
    other = house.submit(request_of(8, 4))
    house.step()
    assert house.scheduler.is_step_due
    house.cancel(other)
    assert house.scheduler.is_step_due


async def test_a_worker_that_compiles_for_longer_than_its_timeout_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_STALL_FACTOR", 1)
    async with in_house(compiles(), worker_timeout=0.2) as house:
        text = asyncio.create_task(house.text(request_of(6, 20, sampling=BOUND)))
        await asyncio.sleep(0.5)
        assert house.metrics.value("spaceserve_worker_up") == 1
        house.worker.script.stall_after_steps = None
        assert len(await text) == 20
        assert house.metrics.value("spaceserve_worker_restarts_total") == 0


async def test_a_worker_that_neither_compiles_nor_gives_up_in_its_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_STALL_FACTOR", 1)
    monkeypatch.setattr(connection, "GRAMMAR_SECONDS", 0.1)
    async with in_house(compiles(), worker_timeout=0.2) as house:
        text = asyncio.create_task(house.text(request_of(6, 20, sampling=BOUND)))
        await house.until(lambda: (house.metrics.value("spaceserve_worker_up") or 0) == 0)
        house.worker.script.stall_after_steps = None
        assert len(await text) == 20


async def crash(house: House) -> None:
    num_lives = house.engine.connections[0].num_incarnations
    house.worker.kill()
    await house.until(lambda: house.engine.connections[0].num_incarnations > num_lives)


async def test_readiness_is_off_after_three_crashes_until_a_worker_has_been_up_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with in_house(Script(heartbeat_seconds=0.02)) as house:
        for _ in range(2):
            await crash(house)
            assert house.engine.ready
        await crash(house)
        assert house.engine.load().num_workers_up == 1
        assert not house.engine.ready
        monkeypatch.setattr(connection, "STEADY_SECONDS", 0.05)
        await house.until(lambda: house.engine.ready)
        await crash(house)
        assert house.engine.ready, "a worker that was up for a while begins a new row"


async def test_each_crash_of_a_row_makes_the_next_start_wait_longer() -> None:
    async with in_house() as house:
        clock, waits = asyncio.get_running_loop().time, []
        for _ in range(4):
            begun = clock()
            await crash(house)
            waits.append(clock() - begun)
        assert waits[1] >= 0.1
        assert waits[2] >= 0.2
        assert waits[3] >= 0.4


async def test_a_request_is_served_by_a_worker_that_is_not_called_ready() -> None:
    async with in_house() as house:
        for _ in range(3):
            await crash(house)
        assert not house.engine.ready
        assert len(await house.text(request_of(6, 10))) == 10


async def test_a_worker_that_ends_when_all_is_done_is_no_loss_and_nobody_s_fault() -> None:
    """As each does in its turn when a new version is rolled out."""

    async with in_house() as house:
        (place,) = house.engine.connections
        for number in range(5):
            request = request_of(6, 40, name=str(number))
            async with house.engine.submit(request) as stream:
                first = await anext(stream)
                house.worker.leave()
                rest = [token async for delta in stream for token in delta.tokens]
            assert (*first.tokens, *rest) == answer(request, house.worker.script)
            assert stream.statistics.num_worker_losses == 0
            assert await house.text(request_of(6, 20)) == answer(request_of(6, 20), house.worker.script)
            assert place.num_incarnations == number + 2
        assert place.num_crashes == 0
        assert house.metrics.value("spaceserve_worker_restarts_total") == 0
        house.worker.kill()
        await house.until(lambda: place.num_incarnations == 7)
        assert house.metrics.value("spaceserve_worker_restarts_total") == 1


async def test_a_worker_that_says_it_leaves_and_does_not_counts_as_lost() -> None:
    async with in_house() as house:
        (place,) = house.engine.connections
        await house.text(request_of(6, 4))
        house.worker.leave()
        house.worker.num_lives -= 1  # the same process
        await house.until(lambda: place.num_incarnations == 2)
        assert house.metrics.value("spaceserve_worker_restarts_total") == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_streams_of_a_killed_worker_go_on_with_the_same_text(temperature: float) -> None:
    async with in_house(Script(die_after_steps=5)) as house:
        requests = [
            request_of(5 + i, 40, sampling=SamplingOptions(seed=i, temperature=temperature), name=str(i))
            for i in range(6)
        ]
        texts = await asyncio.gather(*(house.text(request) for request in requests))
        assert texts == [answer(request, house.worker.script) for request in requests]
        assert house.worker.num_lives == 2
        assert house.metrics.value("spaceserve_worker_restarts_total") == 1
        assert house.metrics.value("spaceserve_worker_up") == 1


async def test_what_was_emitted_before_a_loss_is_not_emitted_again_nor_its_logprobs() -> None:
    for num_steps in (1, 3, 5):  # in the middle of the prompt, and behind it
        async with in_house(Script(die_after_steps=num_steps), max_prefill_rows=8) as house:
            request = request_of(30, 20, want_logprobs=True, num_prompt_logprobs=0)
            async with house.engine.submit(request) as stream:
                deltas = [delta async for delta in stream]
            tokens = tuple(token for delta in deltas for token in delta.tokens)
            assert tokens == answer(request, house.worker.script)
            assert stream.statistics.num_generated == len(tokens) == 20
            assert stream.statistics.num_worker_losses == 1
            assert tuple(entry.id for delta in deltas for entry in delta.logprobs) == tokens
            assert tuple(e.id for delta in deltas for e in delta.prompt_logprobs) == request.prompt_ids[1:]


@pytest.mark.parametrize("garbage", ["report_no", "unknown_sequence", "too_many_tokens", "computed", "vocabulary"])
async def test_a_worker_that_contradicts_the_contract_is_not_believed(garbage: Any) -> None:
    async with in_house(Script(garbage=garbage)) as house:
        text = await house.text(request_of(6, 30))
        assert text == answer(request_of(6, 30), house.worker.script)
        assert house.metrics.value("spaceserve_worker_restarts_total") == 1


@pytest.mark.parametrize(
    "script",
    [Script(hang_after_steps=4), Script(stall_after_steps=4, heartbeat_seconds=0.01)],
    ids=["says nothing", "does not step"],
)
async def test_a_worker_that_falls_silent_or_does_not_step_is_given_up(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_STALL_FACTOR", 1)
    async with in_house(script, worker_timeout=0.3) as house:
        text = asyncio.create_task(house.text(request_of(6, 40)))
        await house.until(lambda: (house.metrics.value("spaceserve_worker_up") or 0) == 0)
        house.worker.script.hang_after_steps = house.worker.script.stall_after_steps = None
        assert await text == answer(request_of(6, 40), house.worker.script)


async def test_a_worker_that_keeps_the_pages_of_all_who_left_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody runs there any more, and nothing comes back: whoever comes next would wait for ever."""

    monkeypatch.setattr(connection, "MAX_STALL_FACTOR", 1)
    async with in_house(Script(stall_after_steps=4, heartbeat_seconds=0.01), worker_timeout=0.3) as house:
        text = asyncio.create_task(house.text(request_of(6, 40)))
        await house.until(lambda: house.worker.figures.num_steps >= 4)
        text.cancel()
        await house.until(lambda: (house.metrics.value("spaceserve_worker_up") or 0) == 0)
        house.worker.script.stall_after_steps = None
        assert await house.text(request_of(6, 40)) == answer(request_of(6, 40), house.worker.script)


async def test_an_idle_worker_that_only_beats_its_heart_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_STALL_FACTOR", 1)
    async with in_house(Script(heartbeat_seconds=0.02), worker_timeout=0.3) as house:
        await asyncio.sleep(0.5)  # longer than a silent worker has, or one that owes a step
        assert house.engine.ready
        assert house.metrics.value("spaceserve_worker_restarts_total") == 0


async def test_a_request_that_kills_its_worker_twice_is_refused_and_the_others_go_on() -> None:
    async with in_house(Script(deadly_id=99, num_blocks=256)) as house:
        deadly = request_of((99, 12, 13), 40, name="deadly")
        others = [request_of(5 + i, 40, sampling=SamplingOptions(seed=i), name=str(i)) for i in range(6)]
        texts = [asyncio.create_task(house.text(request)) for request in others]
        with pytest.raises(WorkerFailed, match="2 workers ended while they ran this request"):
            await house.text(deadly)
        assert await asyncio.gather(*texts) == [answer(request, house.worker.script) for request in others]
        assert house.metrics.value("spaceserve_worker_restarts_total") == 2


async def test_a_request_that_kills_now_and_then_is_found_while_the_others_go_on() -> None:
    async with in_house(Script(deadly_id=99, deadly_steps=5, num_blocks=256)) as house:
        deadly = request_of((99, 12, 13), 400, name="deadly")
        others = [request_of(5 + i, 60, sampling=SamplingOptions(seed=i), name=str(i)) for i in range(4)]
        texts = [asyncio.create_task(house.text(request)) for request in others]
        with pytest.raises(WorkerFailed, match="workers ended while they ran this request"):
            await house.text(deadly)
        assert await asyncio.gather(*texts) == [answer(request, house.worker.script) for request in others]
        assert 2 < (house.metrics.value("spaceserve_worker_restarts_total") or 0) <= 5


async def test_suspects_are_tried_alone_and_then_run_together_again() -> None:
    async with in_house(Script(step_seconds=0.001)) as house:
        requests = [request_of(20 + i, 60, sampling=SamplingOptions(seed=i), name=str(i)) for i in range(5)]
        texts = [asyncio.create_task(house.text(request)) for request in requests]
        await house.until(lambda: len(house.engine.connections[0].scheduler.running) == 5)
        house.worker.kill()
        together = []
        await house.until(lambda: house.engine.connections[0].scheduler is None)
        await house.until(lambda: house.engine.connections[0].scheduler is not None)
        while not all(text.done() for text in texts):
            running = house.engine.connections[0].scheduler.running
            if any(sequence.live.is_suspect for sequence in running):
                assert len(running) == 1
            together.append(len(running))
            await asyncio.sleep(0)
        assert max(together) == 5, "once all are cleared they run beside each other"


async def test_a_request_that_waits_while_the_worker_is_down_is_served_afterwards() -> None:
    async with in_house() as house:
        house.worker.kill()
        await house.until(lambda: not house.engine.ready)
        assert len(await house.text(request_of(6, 10))) == 10


async def test_two_workers_share_the_load_and_the_requests_of_the_dead_one_move_over() -> None:
    async with ScriptedWorker(Script(step_seconds=0.001)) as one, ScriptedWorker(Script()) as two:
        config = ServeConfig(worker_address=(one.address, two.address))
        async with Engine(config, Metrics()) as engine:
            await until(lambda: engine.load().num_workers_up == 2)
            requests = [request_of((10 + i, 11), 30, name=str(i)) for i in range(6)]

            texts = [asyncio.create_task(text_of(engine, request)) for request in requests]
            await until(lambda: bool(one.figures.num_admits and two.figures.num_admits))
            one.kill()
            assert await asyncio.gather(*texts) == [answer(request, two.script) for request in requests]
            engine.check()
        one.check()
        two.check()


async def test_streams_of_a_worker_elsewhere_that_is_gone_for_good_go_on_at_once() -> None:
    script = Script(step_seconds=0.01, num_blocks=1024, accepts=never)

    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(ScriptedWorker(script)) for _ in range(2)]
        life = await stack.enter_async_context(AsyncExitStack())
        mortal = await life.enter_async_context(ScriptedWorker(script))
        config = ServeConfig(worker_address=(mortal.address, *(worker.address for worker in workers)))
        engine = await stack.enter_async_context(Engine(config, Metrics(), max_lag=500))  # no worker rests
        for place in engine.connections:
            await place.until(lambda place=place: place.scheduler is not None)  # type: ignore[misc]
        requests = [request_of((10 + i, 11), 500, name=str(i)) for i in range(12)]  # none ends meanwhile
        streams = [await stack.enter_async_context(engine.submit(request)) for request in requests]
        texts: list[tuple[int, ...]] = [()] * 12

        async def read(num_tokens: int) -> None:
            async with asyncio.timeout(40):
                for number, stream in enumerate(streams):
                    while len(texts[number]) < num_tokens:
                        texts[number] += (await anext(aiter(stream))).tokens

        await read(20)
        assert mortal.figures.num_admits
        begun = [worker.figures.num_steps for worker in workers]
        await life.aclose()
        await read(70)
        num_steps = max(worker.figures.num_steps - steps for worker, steps in zip(workers, begun, strict=True))
        assert engine.load().num_workers_up == 2
        assert all(text == answer(request, script)[: len(text)] for request, text in zip(requests, texts, strict=True))
        assert num_steps < 250, "50 for the tokens, and the pause"
    for worker in workers:
        worker.check()


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (Script(garbage="computed"), ExitCause.CRASHED),
        (Script(stall_after_steps=4, heartbeat_seconds=0.01), ExitCause.CRASHED),
        (Script(hang_after_steps=4), ExitCause.UNKNOWN),
        (Script(die_after_steps=4), ExitCause.UNKNOWN),
    ],
    ids=["contradicts", "does not step", "says nothing", "hangs up"],
)
async def test_of_a_worker_elsewhere_only_what_it_says_itself_is_held_against_it(
    script: Script, cause: ExitCause, monkeypatch: pytest.MonkeyPatch
) -> None:
    causes: list[ExitCause] = []
    worker_lost = Engine.worker_lost

    def noted(engine: Engine, connection: Any, lost: Any, why: ExitCause) -> None:
        causes.append(why)
        worker_lost(engine, connection, lost, why)

    monkeypatch.setattr(connection, "MAX_STALL_FACTOR", 1)
    monkeypatch.setattr(Engine, "worker_lost", noted)
    async with in_house(script, worker_timeout=0.3) as house:
        text = asyncio.create_task(house.text(request_of(6, 40)))
        await house.until(lambda: bool(causes))
        house.worker.script.stall_after_steps = house.worker.script.hang_after_steps = None
        assert len(await text) == 40
        assert causes == [cause]


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_what_a_draining_worker_hands_back_runs_elsewhere(num_workers: int) -> None:
    async with ScriptedWorker(Script()) as one, ScriptedWorker(Script(step_seconds=0.001)) as two:
        addresses = (one.address, two.address)[:num_workers]
        async with Engine(ServeConfig(worker_address=addresses), Metrics()) as engine:
            await until(lambda: engine.load().num_workers_up == num_workers)
            for conversation in one._conversations:
                conversation._batch.draining = True
            requests = [request_of((10 + i, 11), 30, name=str(i)) for i in range(6)]

            assert await asyncio.gather(*(text_of(engine, request) for request in requests)) == [
                answer(one_, one.script) for one_ in requests
            ]
            engine.check()
        one.check()
        two.check()


def an_engine(address: str, **fields: Any) -> Engine:
    return Engine(ServeConfig(worker_address=(address,)), Metrics(), **fields)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(protocol_major=2), r"speaks protocol 2\.0, this router 1\.x"),
        (Script(tokenizer_hash="theirs"), "has tokenizer theirs, this router ours"),
        (Script(num_blocks=0), "has 0 blocks"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_with_both_sides_named(script: Script, message: str) -> None:
    async with ScriptedWorker(script) as worker, an_engine(worker.address, tokenizer_hash="ours") as engine:
        with pytest.raises(WorkerStartFailed, match=message):
            await engine.wait_ready()
        with pytest.raises(WorkerStartFailed, match=message):
            await engine.failed()


async def test_a_worker_with_another_model_is_refused_beside_the_first_and_in_its_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_FAILED_STARTS", 1)

    async with ScriptedWorker(Script()) as one, ScriptedWorker(Script(model_hash="other")) as two:
        config = ServeConfig(worker_address=(one.address, two.address))
        async with Engine(config, Metrics()) as engine:
            await until(lambda: bool(caplog.records))
            assert engine.load().num_workers_up == 1
            for worker in (one, two):
                worker.script.model_hash = "changed"
            one.kill()
            two.kill()
            async with asyncio.timeout(30):
                with pytest.raises(WorkerStartFailed, match="Give all the same model"):
                    await engine.failed()


async def test_nothing_is_taken_before_the_first_worker_is_up() -> None:
    async with an_engine("unix:/nonexistent/w.sock") as engine:
        assert not engine.ready
        with pytest.raises(NotReady):
            engine.submit(request_of())


async def test_hundreds_that_no_longer_fit_end_one_by_one() -> None:
    async with in_house(max_queue=1000) as house:
        house.worker.script.num_blocks = 2
        house.worker.kill()
        await house.until(lambda: not house.engine.ready)
        streams = [house.engine.submit(request_of(6, 40)) for _ in range(600)]
        for stream in streams:
            with pytest.raises(RequestFailed, match="less cache"):
                await anext(aiter(stream))
