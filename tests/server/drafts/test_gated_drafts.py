"""Sequences of several adapters in one batch: the text is the base's, the drafts are each adapter's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from doubles.worker import PROMPTS, ScriptedDrafts, ScriptedModel
from space_common.worker.client import WorkerClient
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tiny_checkpoints import released_adapter, tiny_adapter

SAMPLING_PARAMS = [
    pb.Sampling(),
    pb.Sampling(seed=3, temperature=0.9),
    pb.Sampling(seed=5, temperature=1.0, top_p=0.9),
    pb.Sampling(seed=8, temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3),
]
ADAPTERS = ["", "wide", "narrow", "bare"]
Drafts = list[list[int]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def gated(request: pytest.FixtureRequest, gated_of: Callable[[str], SpaceModel]) -> SpaceModel:
    return gated_of(request.param)


def run(
    model: SpaceModel, names: Mapping[int, str], *, k: int = 4, source: ScriptedDrafts | None = None,
    num_pages: int | None = None,
) -> tuple[dict[int, list[int]], dict[int, Drafts], dict[int, list[int]]]:  # fmt: skip
    """Prompt n by adapter names[n], all in one batch: texts, drafts after each step, accepted lengths."""
    worker = Worker(model, num_blocks=64, block_size=4, controller=FixedLayout.full(k), draft_source=source)
    router = WorkerClient(worker)
    prompt_of, drafts = {}, {n: [] for n in names}
    for n, name in names.items():
        seq_id = router.admit(PROMPTS[n], max_tokens=18, sampling=SAMPLING_PARAMS[n], adapter=name, num_pages=num_pages)
        prompt_of[seq_id] = n

    def look() -> None:
        for sequence in worker.batch:
            drafts[prompt_of[sequence.seq_id]].append(list(sequence.drafts))

    router.run(after_step=look)
    texts = {n: router.sequences[seq_id].tokens for seq_id, n in prompt_of.items()}
    return texts, drafts, {n: router.sequences[seq_id].accepted for seq_id, n in prompt_of.items()}


def test_every_adapter_gives_the_plain_text_and_drafts_as_it_does_alone(gated: SpaceModel) -> None:
    plain = {n: run(gated, {n: ""}, k=0)[0][n] for n in range(4)}
    alone = {name: {n: run(gated, {n: name})[1][n] for n in range(4)} for name in ADAPTERS}
    for turn in (0, 2):
        names = {n: ADAPTERS[(n + turn) % 4] for n in range(4)}
        texts, drafts, _ = run(gated, names)
        assert texts == plain
        assert drafts == {n: alone[name][n] for n, name in names.items()}
    assert len({str(alone[name]) for name in ADAPTERS}) == 4
    assert max(len(drafted) for drafted in alone["narrow"][0]) == 2
    assert max(len(drafted) for drafted in alone["wide"][0]) == 4


def test_drafts_that_come_true_in_part_leave_the_text_as_it_is(gated: SpaceModel) -> None:
    plain = {n: run(gated, {n: ""}, k=0)[0][n] for n in range(4)}
    whole = {n + 1: PROMPTS[n] + text for n, text in plain.items()}
    source = ScriptedDrafts(whole, wrong=lambda position: position % 11 in (0, 1, 4), other=lambda id_: 9 + id_ % 100)
    names = dict(enumerate(ADAPTERS))
    for num_pages in (None, 10):  # with few pages the sequences pause
        texts, _, accepted = run(gated, names, source=source, num_pages=num_pages)
        assert texts == plain
        assert {a for lengths in accepted.values() for a in lengths} >= {0, 2, 4}


def test_a_sequence_lays_out_no_more_masks_than_its_adapter_has() -> None:
    model = ScriptedModel(num_masks=3, adapters={"few": 1, "many": 6})
    model.facts = replace(model.facts, window=64)
    worker = Worker(model, num_blocks=64, block_size=4, controller=FixedLayout.full(8))
    assert worker.max_draft_length == 6
    router = WorkerClient(worker)
    numbers = [router.admit([5, 6], max_tokens=30, adapter=name) for name in ("", "few", "many")]
    router.run()
    assert [max(router.sequences[n].accepted) for n in numbers] == [3, 1, 6]
    assert len({tuple(router.sequences[n].tokens) for n in numbers}) == 1


def test_an_unknown_adapter_fails_that_sequence_alone() -> None:
    router = WorkerClient(Worker(ScriptedModel(adapters={"code": 2}), num_blocks=64, block_size=4))
    wrong, right = router.admit([5], adapter="prose"), router.admit([5], adapter="code")
    router.run()
    assert router.sequences[wrong].error == "There is no adapter prose; this worker has code."
    assert len(router.sequences[right].tokens) == 16


def test_hello_lists_the_adapters_that_can_be_named(tiny_path: Path, tmp_path: Path) -> None:
    own = tiny_adapter(tmp_path / "own", tiny_path, num_masks=2)
    other = tiny_adapter(tmp_path / "other", tiny_path, num_masks=5, draft_head=False)
    uno = f"uno:{released_adapter(tmp_path / 'uno', tiny_path, rank=4)}"
    model = load_model(own, dtype="float32", num_threads=1, adapters={"other": other, "fast": uno})
    hello = Worker(model, num_blocks=64, block_size=4).hello("life 1")
    assert (hello.num_masks, list(hello.mask_ids), hello.max_draft_length, hello.has_draft_head) == (2, [], 7, True)
    found = [(a.name, a.num_masks, a.has_draft_head, a.format) for a in hello.adapters]
    assert found == [("other", 5, False, "space"), ("fast", 7, False, "uno")]
    assert hello.mask_format == "space"
    router = WorkerClient(Worker(model, num_blocks=64, block_size=4, controller=FixedLayout.full(5)))
    numbers = [router.admit([70, 71], max_tokens=12, adapter=name) for name in ("", "other")]
    router.run()
    assert router.sequences[numbers[0]].tokens == router.sequences[numbers[1]].tokens
    drafted = [max(report.num_drafted for report in router.sequences[n].reports) for n in numbers]
    assert drafted == [2, 5]
