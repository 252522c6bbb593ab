"""What is under way on the device while the host goes on: launches, reads, pages, failures and what is said of them."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import worker
from doubles.worker import ScriptedModel
from space_common.worker.client import WorkerClient
from space_kernels.sampling import sampler as processors
from space_kernels.sampling.sampler import TokenCounts
from space_kernels.sampling.sampling_params import SamplingParams
from space_model.geometry.draft_layout import DraftLayout
from space_proto import worker_pb2 as pb
from space_server.device_runner import device_batch
from space_server.speculation.controller import FixedLayout
from space_server.startup.calibration import Recorder
from space_server.worker import Worker

BLOCK, BLOCKS = 4, 300
EOS, STOP = [60, 20, 21], [61, 22]
router_of = partial(worker.router_of, device=True, num_blocks=BLOCKS)

pytestmark = pytest.mark.usefixtures("no_device_step_fails_unseen")


# ---------------------------------------------------------------------------------------------- what is under way


def test_the_next_step_is_launched_before_the_last_is_read(calls_of: Callable[[WorkerClient], list[str]]) -> None:
    router = router_of(ScriptedModel(), controller=FixedLayout.full(1))
    router.admit([5] * 6, max_tokens=21)
    said = calls_of(router)
    router.run()
    # one id by the prompt's step; of 20 more, two a step, but for all that is known one: 10 steps at least
    assert said[:2] == ["launch", "launch"]
    last_launch = len(said) - 1 - said[::-1].index("launch")
    assert said[2 : last_launch + 1] == ["read", "launch"] * ((last_launch - 1) // 2)
    assert said.count("read") == said.count("launch") >= 10


def test_no_step_is_launched_that_could_bring_nothing(calls_of: Callable[[WorkerClient], list[str]]) -> None:
    router = router_of(ScriptedModel(), controller=FixedLayout(lambda room: DraftLayout.plain()))
    router.admit([5] * 6, max_tokens=8)
    said = calls_of(router)
    router.run()
    assert said.count("launch") == 7


def test_pages_of_a_cancelled_sequence_are_given_back_when_no_step_under_way_has_them() -> None:
    router = router_of(ScriptedModel(), controller=FixedLayout(lambda room: DraftLayout.plain()))
    stays, goes = router.admit([5] * 6, max_tokens=30), router.admit([6] * 9, max_tokens=30)
    router.step()
    router.step()
    router.release(goes)
    assert router.worker.batch.get(goes) is None
    report = router.step()  # launches without it, reads the step before
    assert report is not None
    assert list(report.released) == [goes]
    assert [sequence.seq_id for sequence in report.sequences] == [stays]
    router.run()
    assert len(router.sequences[stays].tokens) == 30
    assert sorted(router.free) == list(range(BLOCKS))


def test_a_step_that_fills_the_last_page_says_its_ids_and_the_pause_as_one() -> None:
    router = router_of(ScriptedModel(), controller=FixedLayout(lambda room: DraftLayout.plain()))
    sequence = router.generate([5] * 6, max_tokens=12, num_pages=2)
    assert len(sequence.tokens) == 12
    pauses = [report for report in sequence.reports if report.paused]
    assert [report.num_computed for report in pauses] == [8, 12, 16]
    assert all(len(report.tokens) == 1 for report in pauses)


def test_a_line_that_is_taken_again_knows_nothing_of_who_had_it() -> None:
    def text(position: int) -> int:
        return 10 + position % 7

    router = router_of(ScriptedModel(text=text), max_sequences=1)
    sampling_params = pb.Sampling(frequency_penalty=100.0, temperature=0.0)
    sequence = router.generate([5] * 4, max_tokens=5, sampling=sampling_params)
    generated = router.generate([5] * 4, max_tokens=5, sampling=sampling_params)
    assert sequence.tokens == generated.tokens


def test_a_new_router_finds_an_empty_worker_and_nothing_under_way() -> None:
    worker = Worker(ScriptedModel(), num_blocks=50, block_size=4, device_steps=True)
    router = WorkerClient(worker)
    router.admit([5] * 6, max_tokens=30)
    router.step()
    router.step()
    assert worker.has_work
    worker.reset()
    assert not worker.has_work
    again = WorkerClient(worker)
    sequence = again.generate([5] * 6, max_tokens=30)
    assert len(sequence.tokens) == 30


def test_a_step_that_fails_harms_the_culprit_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = ScriptedModel(poison=50, text=lambda position: 50 if position == 219 else 10 + position % 30)
    router = router_of(model)
    starts = (9, 100, 211)
    good, other, bad = (router.admit([5] * start, max_tokens=20) for start in starts)
    router.run()
    assert router.sequences[bad].finish == pb.FINISH_ERROR
    assert "poison" in router.sequences[bad].error
    for seq_id, start in ((good, 9), (other, 100)):
        assert router.sequences[seq_id].tokens == [model.text(position) for position in range(start, start + 20)]
    assert any("stepped on the host" in message for message in caplog.messages)
    caplog.clear()
    assert router.worker.engine.device.num_forwards >= 5


def test_launches_that_keep_failing_are_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router = router_of(ScriptedModel(), controller=FixedLayout.full(1))
    seq_id = router.admit([5] * 6, max_tokens=30)
    device = router.worker.engine.device
    assert device is not None
    tried = []

    def fails(layout: DraftLayout) -> None:
        tried.append(layout)
        raise RuntimeError("no kernel")

    monkeypatch.setattr(device, "launch", fails)
    router.run()
    assert len(router.sequences[seq_id].tokens) == 30
    assert len(tried) == 3
    caplog.clear()


def test_a_sequence_for_which_no_line_can_be_prepared_is_stepped_on_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = ScriptedModel()
    router = router_of(model)
    device = router.worker.engine.device
    assert device is not None
    put = device.batch.state.batch_params.put

    def fails(line: int, sampling_params: SamplingParams) -> None:
        if sampling_params.temperature == 0.5:
            raise MemoryError("no room")
        put(line, sampling_params)

    monkeypatch.setattr(
        type(device.batch.state.batch_params),
        "put",
        lambda batch_params, line, sampling_params: fails(line, sampling_params),
    )
    good = router.admit([5] * 6)
    bad = router.admit([5] * 9, sampling=pb.Sampling(temperature=0.5, top_k=1))
    router.run()
    assert router.sequences[good].tokens == [model.text(position) for position in range(6, 22)]
    assert router.sequences[bad].tokens == [model.text(position) for position in range(9, 25)]
    assert [message for message in caplog.messages if "could not move to the device" in message] == [
        f"sequence {bad} could not move to the device (no room); it is stepped on the host"
    ]
    assert router.worker.engine.device.num_forwards > 0
    caplog.clear()


def test_counts_that_cannot_be_had_when_lines_are_given_back_fail_at_most_their_sequence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoRoom(TokenCounts):
        def __init__(self, ids: Sequence[int], *args: Any) -> None:
            if ids[0] == 7:
                raise MemoryError("no room")
            super().__init__(ids, *args)

    model, penalises = ScriptedModel(), pb.Sampling(presence_penalty=1e-6)
    router = router_of(model)
    bad = router.admit([7] * 3, sampling=penalises, max_tokens=40)
    good = router.admit([5] * 6, sampling=penalises, max_tokens=40)
    for _ in range(3):
        router.step()
    device = router.worker.engine.device
    assert device is not None
    assert len(device.sequences) == 2
    monkeypatch.setattr(device_batch, "TokenCounts", NoRoom)
    monkeypatch.setattr(processors, "TokenCounts", NoRoom)
    monkeypatch.setattr(device, "launch", lambda layout: [][0])
    router.run()
    assert "no room" in caplog.text
    assert router.sequences[good].tokens == [model.text(position) for position in range(6, 46)]
    assert router.sequences[bad].finish == pb.FINISH_ERROR
    caplog.clear()


@pytest.mark.parametrize("k", [0, 2])
def test_nan_harms_its_own_sequence_where_the_host_would_meet_it(k: int) -> None:
    runs = []
    for device in (False, True):
        router = router_of(ScriptedModel(nan_at=17), device=device, controller=FixedLayout.full(k))
        for start in (9, 100):
            router.admit([5] * start, max_tokens=20)
        router.run()
        runs.append([(ran.tokens, ran.finish, ran.error) for ran in router.sequences.values()])
    assert runs[0] == runs[1]
    assert runs[1][0][1] == pb.FINISH_ERROR


def test_draining_ends_when_the_last_step_under_way_is_read() -> None:
    router = router_of(ScriptedModel())
    router.admit([5] * 6, max_tokens=9)
    router.step()
    router.worker.apply(pb.Command(drain=pb.Drain()))
    assert not router.worker.drained
    router.run()
    assert router.worker.drained


def test_the_report_counts_what_it_counts_on_the_host() -> None:
    totals = []
    for device in (False, True):
        router = router_of(ScriptedModel(wrong=range(0, 99, 4)), device=device, prefill_seconds=1.0)
        router.admit([5] * 6, max_tokens=23)
        router.run()
        stats = [report.stats for report in router.reports if report.stepped]
        assert all(one.forward_seconds > 0 and one.host_seconds > 0 and one.plain_step_seconds > 0 for one in stats[1:])
        counts: dict[int, int] = {}
        for one in stats:
            for number, count in enumerate(one.draft_length_counts):
                counts[number] = counts.get(number, 0) + count
        totals.append((counts, sum(one.chain_rows for one in stats), sum(one.prefill_rows for one in stats)))
    assert totals[0] == totals[1]


def test_the_cost_of_device_steps_is_learnt() -> None:
    router = router_of(ScriptedModel())
    learnt = []
    cost = router.worker.cost
    cost.learn = lambda shape, seconds: learnt.append((shape, seconds))  # type: ignore[method-assign]
    for _ in range(2):
        router.admit([5] * 6, max_tokens=30)
    router.run()
    shapes = [shape for shape, _ in learnt if not shape.num_prefill_rows]
    assert {(shape.num_sequences, shape.num_chain_rows, shape.num_mask_rows) for shape in shapes} <= {
        (2, 8, 24),
        (1, 4, 12),
    }
    assert all(0 < seconds < 60 for _, seconds in learnt)


def test_a_step_that_was_compiled_or_captured_says_nothing_of_what_steps_cost() -> None:
    """Seconds of that made drafts of that kind look dear for hundreds of steps."""
    cost = Recorder()
    router = router_of(ScriptedModel(), cost=cost)
    assert router.worker.engine.device is not None
    graphs = SimpleNamespace(was_usual=False)
    router.worker.engine.device._graphs = graphs  # type: ignore[assignment]
    router.admit([5] * 6, max_tokens=80)
    while router.worker.engine.device.num_forwards < 6:
        router.step()
    assert len(cost.points) == 1  # the prompt's step, on the host
    graphs.was_usual = True
    router.run()
    assert len(cost.points) > 3


def test_gaps_are_closed_so_that_few_sequences_make_a_small_step() -> None:
    router = router_of(ScriptedModel(), max_sequences=16, controller=FixedLayout(lambda room: DraftLayout.plain()))
    lengths = [4, 4, 4, 4, 4, 4, 4, 30]
    sequences = [router.admit([5] * (3 + n), max_tokens=count) for n, count in enumerate(lengths)]
    widths: list[int] = []
    device = router.worker.engine.device
    assert device is not None
    router.run(after_step=lambda: widths.append(device.batch.batch_size))
    assert router.sequences[sequences[-1]].tokens == [router.worker.engine.host.model.text(p) for p in range(10, 40)]  # type: ignore[attr-defined]
    assert widths[2] == 8
    assert min(width for width in widths if width) == 1
