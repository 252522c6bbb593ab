"""Log-probabilities of steps on the device are those of steps on the host: ids, alternatives and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from doubles.worker import ScriptedModel
from space_common.worker.client import WorkerClient
from space_kernels.sampling.sampler import log_probabilities
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.device_runner.device_forward import (
    LogprobReport,
    StepKind,
    num_cells,
    report,
    round_up_count,
    round_up_top,
)
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker

pytestmark = pytest.mark.usefixtures("no_device_step_fails_unseen")

PROMPTS = [[70, 71, 72, 73], [20] * 17 + [33, 90], [100, 101], [50 + n % 40 for n in range(37)], [90, 80], [77] * 3]
SAMPLINGS = [
    pb.Sampling(),
    pb.Sampling(seed=3, temperature=0.9),
    pb.Sampling(seed=8, temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={70: 2.0}),
    pb.Sampling(seed=5, temperature=1.0, top_p=0.9),
]
LENGTHS = [40, 9, 31, 22, 17, 26]


def router_of(model: Any, *, device: bool, k: int = 3, **settings: Any) -> WorkerClient:
    controller = FixedLayout.full(k)
    return WorkerClient(
        Worker(model, num_blocks=512, block_size=16, controller=controller, device_steps=device, **settings)
    )


def kinds_of(router: WorkerClient) -> list[StepKind]:
    """Of the steps that will be taken on the device."""
    device = router.worker.engine.device
    assert device is not None
    kinds, take = [], device._take

    def noting(kind: StepKind) -> torch.Tensor:
        kinds.append(kind)
        return take(kind)

    device._take = noting
    return kinds


def said(router: WorkerClient) -> list[list[tuple[Any, ...]]]:
    """Each token with what is said of it."""
    return [
        [
            (one.id, one.logprob, list(one.top_ids), list(one.top_logprobs))
            for report in ran.reports
            for one in report.logprobs
        ]
        for ran in router.sequences.values()
    ]


@pytest.mark.parametrize("k", [0, 3])
def test_every_token_has_the_values_of_host_steps(tiny: SpaceModel, k: int) -> None:
    found = []
    for device in (False, True):
        router = router_of(tiny, device=device, k=k)
        kinds = kinds_of(router) if device else []
        for number, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
            wants = {"want_logprobs": True, "num_logprobs": (0, 3, 20)[number % 3]} if number % 4 else {}
            router.admit(prompt, max_tokens=length, sampling=SAMPLINGS[number % 4], **wants)
        router.run()
        found.append((said(router), [ran.tokens for ran in router.sequences.values()]))
        assert not device or len(kinds) > 10
    assert found[0] == found[1]
    logprobs, tokens = found[1]
    assert [len(one) for one in logprobs] == [0 if number % 4 == 0 else LENGTHS[number] for number in range(6)]
    assert all([entry[0] for entry in one] == ids for one, ids in zip(logprobs, tokens, strict=True) if one)
    assert {len(entry[2]) for one in logprobs for entry in one} == {0, 3, 20}
    assert {(kind.num_with_logprobs, kind.num_top) for kind in kinds} >= {(4, 20), (1, 20)}


def test_accepted_drafts_have_theirs_too() -> None:
    found = []
    for device in (False, True):
        router = router_of(ScriptedModel(wrong=range(0, 99, 5)), device=device)
        for start in (6, 9, 100):
            router.admit([5] * start, max_tokens=30, want_logprobs=True, num_logprobs=2, eos_ids=[60, 20])
        router.run()
        found.append(said(router))
        assert {0, 2, 3} <= {count for ran in router.sequences.values() for count in ran.accepted}
        for ran, entries in zip(router.sequences.values(), found[-1], strict=True):
            assert [entry[0] for entry in entries] == ran.tokens
    assert found[0] == found[1]


def test_who_does_not_ask_is_stepped_as_though_nobody_did(tiny: SpaceModel) -> None:
    router = router_of(tiny, device=True)
    kinds = kinds_of(router)
    router.admit(PROMPTS[0], max_tokens=9, want_logprobs=True, num_logprobs=1)
    router.admit(PROMPTS[1], max_tokens=40)
    router.run()
    assert [kind.num_with_logprobs for kind in kinds[:2]] == [1, 1]
    assert {kind.num_with_logprobs for kind in kinds[-6:]} == {0}
    assert sum(kind.num_with_logprobs == 0 for kind in kinds) > 10


def test_who_moves_to_another_line_goes_on_being_told() -> None:
    """Those on the first lines end; who asks moves there."""
    found = []
    for device in (False, True):
        router = router_of(ScriptedModel(), device=device, k=0, max_sequences=16)
        for number, length in enumerate([4] * 7 + [30]):
            router.admit([5] * (3 + number), max_tokens=length, want_logprobs=number == 7, num_logprobs=1)
        router.run()
        found.append(said(router))
    assert found[0] == found[1]
    assert len(found[1][7]) == 30


def test_nan_and_more_alternatives_than_there_are_ids_or_room() -> None:
    found = []
    for device in (False, True):
        router = router_of(ScriptedModel(nan_at=17, vocab_size=12, num_masks=2), device=device, k=2)
        for start, num_top in ((9, 20), (100, 20), (200, 21)):
            router.admit([6] * start, max_tokens=20, want_logprobs=True, num_logprobs=num_top)
        router.run()
        found.append((said(router), [(ran.tokens, ran.error) for ran in router.sequences.values()]))
    assert found[0] == found[1]
    assert found[1][1][0][1] != ""
    assert {len(entry[2]) for one in found[1][0] for entry in one} == {12}


def test_a_report_is_read_as_the_host_would_have_made_it() -> None:
    raw = torch.randn(3, 30, 50, generator=torch.Generator().manual_seed(2))  # more rows than are sorted at once
    ids = raw.argmax(dim=2)
    cells = report(raw, ids, 5)
    assert len(cells) == num_cells(3, 30, 5)
    read = LogprobReport(cells, 3, 30)
    for number in range(3):
        reported = ids[number, :7].tolist()
        assert read.of(number, reported, 4) == log_probabilities(raw[number, :7], reported, 4)


def test_kinds_are_few() -> None:
    assert [round_up_top(count) for count in (0, 1, 5, 6, 20)] == [0, 5, 5, 20, 20]
    assert [round_up_count(count, 64) for count in (0, 1, 2, 4, 5, 33, 64)] == [0, 1, 4, 4, 16, 64, 64]
    assert round_up_count(3, 3) == 3
