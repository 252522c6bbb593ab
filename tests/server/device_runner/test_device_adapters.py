"""Sequences that gated adapters draft for, on the device: texts and drafts are those of steps on the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.worker import PROMPTS, ScriptedModel
from space_common.worker.client import WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.device_runner.device_forward import StepKind
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tiny_checkpoints import released_adapter

pytestmark = pytest.mark.usefixtures("no_device_step_fails_unseen")

SAMPLING_PARAMS = [
    pb.Sampling(),
    pb.Sampling(seed=3, temperature=0.9),
    pb.Sampling(seed=5, temperature=1.0, top_p=0.9),
    pb.Sampling(seed=8, temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3),
]
Steps = list[tuple[int, int, list[int]]]


@pytest.fixture(scope="module")
def gated(gated_of: Callable[[str], SpaceModel]) -> SpaceModel:
    return gated_of("float32")


class Watched:
    """A worker's router, the kinds of its steps on the device, and what each sequence drafted."""

    def __init__(self, model: Any, *, device: bool, k: int = 4, controller: FixedLayout | None = None) -> None:
        controller = controller or FixedLayout.full(k)
        worker = Worker(model, num_blocks=128, block_size=4, controller=controller, device_steps=device)
        self.router, self.kinds = WorkerClient(worker), list[StepKind]()
        self.drafts: dict[int, list[list[int]]] = {}
        if worker.engine.device is not None:
            self._take = worker.engine.device._take
            worker.engine.device._take = self._noting

    def _noting(self, kind: StepKind) -> torch.Tensor:
        self.kinds.append(kind)
        return self._take(kind)

    def run(self) -> None:
        def look() -> None:
            for sequence in self.router.worker.batch:
                drafted = self.drafts.setdefault(sequence.seq_id, [])
                if not drafted or drafted[-1] != sequence.drafts:
                    drafted.append(list(sequence.drafts))

        self.router.run(after_step=look)

    @property
    def steps(self) -> list[Steps]:
        """Drafted, accepted and emitted in each step of each sequence."""
        return [
            [(r.num_drafted, r.num_accepted, list(r.tokens)) for r in ran.reports]
            for ran in self.router.sequences.values()
        ]


@pytest.mark.parametrize("name", ["wide", "narrow", "bare"])
def test_an_adapter_drafts_what_it_drafts_on_the_host(gated: SpaceModel, name: str) -> None:
    found = []
    for device in (False, True):
        watched = Watched(gated, device=device)
        for prompt, sampling_params in zip(PROMPTS, SAMPLING_PARAMS, strict=True):
            watched.router.admit(prompt, max_tokens=18, sampling=sampling_params, adapter=name)
        watched.run()
        found.append((watched.steps, watched.drafts))
    assert found[0] == found[1]
    number = gated.facts.adapter_number(name)
    assert {kind.adapter for kind in watched.kinds if kind.layout.num_masks} == {number}
    assert max(len(drafts) for drafts in watched.drafts[1]) == (2 if name == "narrow" else 4)
    plain = Watched(gated, device=True, k=0)
    for prompt, sampling_params in zip(PROMPTS, SAMPLING_PARAMS, strict=True):
        plain.router.admit(prompt, max_tokens=18, sampling=sampling_params)
    plain.run()
    assert [ran.tokens for ran in plain.router.sequences.values()] == [
        ran.tokens for ran in watched.router.sequences.values()
    ]


def test_adapters_that_come_together_are_stepped_one_on_the_device_and_the_others_on_the_host(
    gated: SpaceModel,
) -> None:
    found = []
    for device in (False, True):
        watched = Watched(gated, device=device)
        for number, name in enumerate(["wide", "bare", "", "wide"]):
            watched.router.admit(PROMPTS[number], max_tokens=18, sampling=SAMPLING_PARAMS[number], adapter=name)
        never = watched.router.admit(PROMPTS[0], max_tokens=18, adapter="bare", max_draft_length=0)
        watched.run()
        found.append(watched.steps)
        if device:
            assert never not in watched.drafts or not any(watched.drafts[never])
    assert found[0] == found[1]
    adapters = [kind.adapter for kind in watched.kinds if kind.layout.num_masks]
    assert set(adapters) == {gated.facts.adapter_number("wide")}
    assert max(kind.batch_size for kind in watched.kinds) == 4  # two of it, and one that never drafts


def test_another_adapter_has_the_device_when_the_first_has_gone() -> None:
    model = ScriptedModel(num_masks=3, adapters={"few": 1, "many": 6})
    watched = Watched(model, device=True, k=8)
    for name in ("few", "many", ""):
        watched.router.admit([5, 6], max_tokens=30, adapter=name)
        watched.run()
    assert [max(ran.accepted) for ran in watched.router.sequences.values()] == [1, 6, 3]
    drafting = [kind.adapter for kind in watched.kinds if kind.layout.num_masks]
    assert list(dict.fromkeys(drafting)) == [0, 1, None]


@pytest.mark.parametrize("form", ["uno", "i-dlm"])
def test_a_released_adapter_drafts_what_it_drafts_on_the_host(form: str, tiny_path: Path, tmp_path: Path) -> None:
    adapter = released_adapter(tmp_path / "adapter", tiny_path, rank=8)
    section = {"adapter": ".", "adapter_format": form, "mask_token_id": 100}
    (adapter / "config.json").write_text(json.dumps({"space": section}), encoding="utf-8")
    model = load_model(tiny_path, dtype="float32", num_threads=1, adapters={"released": adapter})
    found = []
    for device in (False, True):
        watched = Watched(model, device=device, k=3)
        for prompt, sampling_params in zip(PROMPTS, SAMPLING_PARAMS, strict=True):
            watched.router.admit(prompt, max_tokens=18, sampling=sampling_params, adapter="released")
        watched.run()
        found.append((watched.steps, watched.drafts))
    assert found[0] == found[1]
    assert watched.kinds
    assert max(len(drafts) for drafts in watched.drafts[1]) == 3


def test_on_the_device_drafts_and_verification_take_turns(tiny_path: Path, tmp_path: Path) -> None:
    adapter = released_adapter(tmp_path / "adapter", tiny_path, rank=8)
    model = load_model(tiny_path, dtype="float32", num_threads=1, adapters={"released": f"uno:{adapter}"})
    texts = []
    for layout in (DraftLayout.turns(3), DraftLayout.plain()):
        watched = Watched(model, device=True, controller=FixedLayout(lambda room, layout=layout: layout))
        for prompt, sampling_params in zip(PROMPTS, SAMPLING_PARAMS, strict=True):
            watched.router.admit(prompt, max_tokens=18, sampling=sampling_params, adapter="released")
        watched.run()
        texts.append([ran.tokens for ran in watched.router.sequences.values()])
        layouts = [kind.layout for kind in watched.kinds]
        if layout.in_turns:
            assert {DraftLayout(0, (3,)), DraftLayout(3, (0, 0, 0, 0))} <= set(layouts)
            assert not any(one.num_drafts and one.num_masks for one in layouts)
            assert max(len(drafts) for drafts in watched.drafts[1]) == 3
    assert texts[0] == texts[1]
