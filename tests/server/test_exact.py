"""SPACE is plain decoding, bit for bit: whatever k, layout, drafts, batch, chunks, pauses, and stale memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from doubles.worker import PROMPTS, ScriptedDrafts
from quantized_testing import write_quantized
from space_common.worker.client import ClientSequence, WorkerClient
from space_model.geometry.draft_layout import DraftLayout
from space_model.loading.load import load_model
from space_model.networks.network import PagedKV
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import Controller, DraftLimits, FixedLayout
from space_server.worker import Worker

MAX_TOKENS = 24
SAMPLINGS = {
    "greedy": pb.Sampling(),
    "sampled": pb.Sampling(seed=3, temperature=0.9),
    "truncated": pb.Sampling(seed=2**64 - 1, temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, typical_p=0.95),
    "edited": pb.Sampling(
        seed=8, choice=2, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3,
        logit_bias={40: 2.0, 41: -3.0}, bad_words=[pb.IdRun(ids=[60]), pb.IdRun(ids=[40, 61])], min_tokens=10,
    ),
}  # fmt: skip


def decode(
    model: SpaceModel, sampling: pb.Sampling, *, controller: Controller | None = None, max_draft_length: int = 99,
    num_pages: int | None = None, after_step: Callable[[Worker, WorkerClient], None] | None = None, alone: bool = False,
    **settings: object,
) -> list[ClientSequence]:  # fmt: skip
    """Every prompt's run, with log-probabilities."""
    settings = {"num_blocks": 64, "block_size": 4} | settings
    worker = Worker(model, controller=controller or FixedLayout.full(3), **settings)  # type: ignore[arg-type]
    router = WorkerClient(worker)
    hook = (lambda: after_step(worker, router)) if after_step is not None else None
    numbers = []
    for prompt in PROMPTS:
        numbers.append(
            router.admit(
                prompt, max_tokens=MAX_TOKENS, sampling=sampling, max_draft_length=max_draft_length,
                num_pages=num_pages, want_logprobs=True,
            )
        )  # fmt: skip
        if alone:
            router.run(after_step=hook)
    router.run(after_step=hook)
    assert worker.num_forwards == sum(report.stepped for report in router.reports)
    assert sorted(router.free) == list(range(worker.num_blocks))
    return [router.sequences[number] for number in numbers]


def outcome(runs: list[ClientSequence]) -> list[tuple[list[int], list[float]]]:
    """Ids, and the bits of their log-probabilities."""
    return [(run.tokens, [entry.logprob for report in run.reports for entry in report.logprobs]) for run in runs]


@pytest.fixture(scope="module")
def plain(tiny: SpaceModel) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Each prompt alone, without speculation."""
    return {
        name: outcome(decode(tiny, sampling, max_draft_length=0, alone=True)) for name, sampling in SAMPLINGS.items()
    }


WRONG: dict[str, Callable[[int], bool]] = {
    "oracle": lambda position: False,
    "half right": lambda position: position % 16 in (0, 1, 4),
    "wrong": lambda position: True,
}


def drafts_like(kind: str, texts: list[tuple[list[int], list[float]]]) -> ScriptedDrafts | None:
    if kind == "masks":
        return None
    whole = {n: prompt + tokens for n, (prompt, (tokens, _)) in enumerate(zip(PROMPTS, texts, strict=True), start=1)}
    return ScriptedDrafts(whole, wrong=WRONG[kind], other=lambda id_: 9 + (id_ - 8) % 119)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    ("k", "kind"), [(1, "half right"), (2, "oracle"), (3, "masks"), (3, "half right"), (5, "wrong"), (8, "half right")]
)
def test_any_k_and_any_drafts_give_the_plain_text(
    tiny: SpaceModel, plain: dict[str, list[tuple[list[int], list[float]]]], sampling: str, k: int, kind: str
) -> None:
    source = drafts_like(kind, plain[sampling])
    runs = decode(tiny, SAMPLINGS[sampling], controller=FixedLayout.full(k), draft_source=source)
    assert outcome(runs) == plain[sampling]
    accepted = {a for run in runs for a in run.accepted}
    if kind == "half right":
        assert {0, k} <= accepted
        assert k == 1 or accepted & set(range(1, k))
    if kind == "oracle":
        assert accepted == {k} or accepted == {k, k - 1}  # the last step drafts what is left
    if kind == "wrong":
        assert accepted == {0}


@pytest.mark.parametrize("sampling", ["greedy", "edited"])
def test_pruned_layouts_mixed_per_sequence_give_the_plain_text(
    tiny: SpaceModel, plain: dict[str, list[tuple[list[int], list[float]]]], sampling: str
) -> None:
    layouts = [
        lambda d: DraftLayout.plain(),
        lambda d: DraftLayout(d, (4, 0, 2, 0, 1)[: d + 1]),
        lambda d: DraftLayout.pruned(d, 4, 7, (1.0, 0.6, 0.3)),
        lambda d: DraftLayout.full(d, 4),
    ]

    def rule(room: DraftLimits) -> DraftLayout:
        return layouts[room.seq_id % 4](min(room.num_drafts, 4))

    source = drafts_like("half right", plain[sampling])
    assert outcome(decode(tiny, SAMPLINGS[sampling], controller=FixedLayout(rule))) == plain[sampling]
    assert (
        outcome(decode(tiny, SAMPLINGS[sampling], controller=FixedLayout(rule), draft_source=source)) == plain[sampling]
    )


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_chunked_prefill_gives_the_plain_text(
    tiny: SpaceModel, plain: dict[str, list[tuple[list[int], list[float]]]], rows: int
) -> None:
    assert outcome(decode(tiny, SAMPLINGS["sampled"], max_prefill_rows=rows)) == plain["sampled"]


def test_a_sequence_that_pauses_at_every_page_gives_the_plain_text(
    tiny: SpaceModel, plain: dict[str, list[tuple[list[int], list[float]]]]
) -> None:
    source = drafts_like("half right", plain["edited"])
    runs = decode(tiny, SAMPLINGS["edited"], num_pages=1, draft_source=source)
    assert outcome(runs) == plain["edited"]
    assert all(any(report.paused for report in run.reports) for run in runs)


@pytest.mark.parametrize("at", [1, 7, 16])
def test_a_sequence_admitted_again_with_what_it_emitted_goes_on_with_the_same_text(
    tiny: SpaceModel, plain: dict[str, list[tuple[list[int], list[float]]]], at: int
) -> None:
    for name in ("sampled", "edited"):
        tokens, _ = plain[name][1]
        router = WorkerClient(Worker(tiny, num_blocks=32, block_size=4))
        sequence = router.generate(
            PROMPTS[1] + tokens[:at], num_prompt=len(PROMPTS[1]), max_tokens=MAX_TOKENS, sampling=SAMPLINGS[name]
        )
        assert sequence.tokens == tokens


def test_cached_blocks_of_another_sequence_give_the_plain_text(
    tiny: SpaceModel, plain: dict[str, list[tuple[list[int], list[float]]]]
) -> None:
    router = WorkerClient(Worker(tiny, num_blocks=64, block_size=4))
    first = router.admit(PROMPTS[3], max_tokens=MAX_TOKENS, sampling=SAMPLINGS["sampled"])
    while router.sequences[first].finish == pb.FINISH_NONE:
        router.step()
    shared = router.sequences[first].pages[:9]  # 36 of 37 ids
    request = replace(router.sequences[first].request, max_draft_length=3)
    second = router.submit(ClientSequence(request), num_pages=19, shared=shared)
    router.run()
    assert second.num_computed > 36
    assert second.tokens == router.sequences[first].tokens == plain["sampled"][3][0]


def fill_stale(kv: PagedKV, held: list[tuple[list[int], int]]) -> None:
    """NaN into every slot that no sequence's computed ids occupy. held: (pages, computed length) per sequence."""
    live = torch.zeros(kv.num_blocks, kv.block_size, dtype=torch.bool)
    for pages, computed in held:
        for position in range(computed):
            live[pages[position // kv.block_size], position % kv.block_size] = True
    for layer in (*kv.keys, *kv.values):
        layer.permute(0, 2, 1, 3)[~live] = math.nan


@pytest.mark.parametrize("k", range(9))
def test_rollback_is_real_nan_in_every_stale_slot_changes_nothing(
    tiny: SpaceModel, plain: dict[str, list[tuple[list[int], list[float]]]], k: int
) -> None:
    def poison(worker: Worker, router: WorkerClient) -> None:
        fill_stale(worker.kv, [(ran.pages, ran.num_computed) for ran in router.sequences.values() if ran.pages])

    source = drafts_like("half right", plain["sampled"])
    runs = decode(tiny, SAMPLINGS["sampled"], controller=FixedLayout.full(k), draft_source=source, after_step=poison)
    assert outcome(runs) == plain["sampled"]
    assert k < 2 or {0, k} <= {a for run in runs for a in run.accepted}


def test_a_rollback_moves_no_key_and_no_value(
    tiny: SpaceModel, plain: dict[str, list[tuple[list[int], list[float]]]]
) -> None:
    # Computed slots keep their bits from the step that wrote them to the end.
    kept: dict[tuple[int, int], torch.Tensor] = {}

    def compare(worker: Worker, router: WorkerClient) -> None:
        for seq_id, ran in router.sequences.items():
            for position in range(ran.num_computed if ran.pages else 0):
                at = (ran.pages[position // 4], position % 4)
                bits = torch.stack([layer[at[0], :, at[1]] for layer in (*worker.kv.keys, *worker.kv.values)])
                assert torch.equal(kept.setdefault((seq_id, position), bits.clone()), bits)

    source = drafts_like("half right", plain["greedy"])
    assert outcome(decode(tiny, SAMPLINGS["greedy"], draft_source=source, after_step=compare)) == plain["greedy"]


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["masks", "half right"])
def test_bfloat16_with_a_shared_mask_id_and_no_draft_head_is_exact_too(
    tiny_bf16: SpaceModel, sampling: str, kind: str
) -> None:
    sampling_params = SAMPLINGS[sampling]
    expected = outcome(decode(tiny_bf16, sampling_params, max_draft_length=0, alone=True))
    source = drafts_like(kind, expected)
    assert outcome(decode(tiny_bf16, sampling_params, controller=FixedLayout.full(5), draft_source=source)) == expected


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["masks", "half right"])
def test_float16_is_exact_too(tiny_fp16: SpaceModel, sampling: str, kind: str) -> None:
    sampling_params = SAMPLINGS[sampling]
    expected = outcome(decode(tiny_fp16, sampling_params, max_draft_length=0, alone=True))
    source = drafts_like(kind, expected)
    assert outcome(decode(tiny_fp16, sampling_params, controller=FixedLayout.full(5), draft_source=source)) == expected


def test_a_batch_of_unequal_sequences_drafts_what_each_would_by_itself(tiny: SpaceModel) -> None:
    def drafts(alone: bool) -> list[list[int]]:
        found: dict[int, list[int]] = {}

        def note(worker: Worker, router: WorkerClient) -> None:
            for sequence in worker.batch:
                found[sequence.seq_id] = [*found.get(sequence.seq_id, []), *sequence.drafts]

        decode(tiny, SAMPLINGS["sampled"], controller=FixedLayout.full(4), after_step=note, alone=alone)
        return [found[number] for number in sorted(found)]

    together = drafts(alone=False)
    assert all(together)
    assert together == drafts(alone=True)


QUANTIZED_PROMPTS = [[70, 71, 72], [20] * 17 + [33, 90]]
Text = tuple[list[int], list[float]]


@pytest.mark.parametrize("kind", ["awq", "fp8 per tensor"])
def test_any_drafts_on_quantised_weights_give_the_plain_text(kind: str, tiny_path: Path, tmp_path: Path) -> None:
    write_quantized(tiny_path, tmp_path / "packed", tmp_path / "plain", kind)
    model = load_model(tmp_path / "packed", dtype="float32", num_threads=1)

    def texts(k: int, source: ScriptedDrafts | None = None) -> tuple[list[Text], set[int]]:
        router = WorkerClient(
            Worker(model, num_blocks=64, block_size=4, controller=FixedLayout.full(k), draft_source=source)
        )
        sampling = pb.Sampling(seed=3, temperature=0.9)
        numbers = [router.admit(p, max_tokens=24, sampling=sampling, want_logprobs=True) for p in QUANTIZED_PROMPTS]
        router.run()
        runs = [router.sequences[number] for number in numbers]
        found = [(run.tokens, [entry.logprob for report in run.reports for entry in report.logprobs]) for run in runs]
        return found, {a for run in runs for a in run.accepted}

    plain, _ = texts(0)
    known = {
        n: prompt + tokens
        for n, (prompt, (tokens, _)) in enumerate(zip(QUANTIZED_PROMPTS, plain, strict=True), start=1)
    }
    drafts = ScriptedDrafts(known, wrong=lambda p: p % 8 in (0, 1), other=lambda id_: 9 + (id_ - 8) % 119)
    assert texts(3)[0] == plain
    found, accepted = texts(3, drafts)
    assert found == plain
    assert {0, 3} < accepted
