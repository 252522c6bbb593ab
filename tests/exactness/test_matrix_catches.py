"""The matrix is not blind: each of these faults, put into the worker on purpose, makes it fail."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from exactness_matrix import Cell, Mismatch, Subject, check_cell
from space_common.worker.client import WorkerClientError
from space_kernels.attention.attention import QKV, AttentionSpec, KVPages
from space_kernels.paging.step_rows import Ints, StepRows
from space_kernels.sampling import sampler
from space_kernels.sampling.sampling_params import SamplingParams, SamplingRow, SamplingRows
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.networks import llama_network
from space_server.batch import SequenceEnd, SequenceLimits
from torch import Tensor

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def noise_of_the_root(patch: Patch) -> None:
    """Every row of a chain draws the noise of the chain's first position."""

    def of_the_root(rows: SamplingRows, wanted: Callable[[SamplingParams], bool]) -> list[int]:
        runs = zip(rows.run_params, rows.run_positions, rows.run_counts, strict=True)
        return [first for sampling_params, first, count in runs if wanted(sampling_params) for _ in range(count)]

    patch.setattr(SamplingRows, "positions", of_the_root)


def forgotten_drafts(patch: Patch) -> None:
    """Processors look at the known ids only, not at the drafts before the row."""
    build = SamplingRow.__init__

    def without_tail(row: SamplingRow, *args: Any, **kwargs: Any) -> None:
        build(row, *args, **{**kwargs, "tail": (), "num_unknown": len(kwargs.get("tail", ()))})

    patch.setattr(SamplingRow, "__init__", without_tail)


def early_count(patch: Patch) -> None:
    """min_tokens counts from the known ids, not from the drafts before the row."""
    patch.setattr(SamplingRow, "num_generated", property(lambda row: len(row.ids) - row.num_prompt))


def seeing_ahead(patch: Patch) -> None:
    """A chain row sees the slot behind it: the next draft, or what was left there."""
    build = ForwardBatch.build.__func__  # type: ignore[attr-defined]

    def build_seeing(cls: type[ForwardBatch], segments: Sequence[Segment], **kwargs: Any) -> ForwardBatch:
        batch: ForwardBatch = build(cls, segments, **kwargs)
        reach = batch.rows.pattern.reach.copy()
        for rows in batch.chain_rows:
            reach[rows.start : rows.stop - 1] += 1
        return replace(batch, rows=replace(batch.rows, pattern=replace(batch.rows.pattern, reach=reach, parts={})))

    patch.setattr(ForwardBatch, "build", classmethod(build_seeing))


def no_cut(patch: Patch) -> None:
    """A run goes on behind an EOS inside it."""

    def cut(limits: SequenceLimits, emitted: Sequence[int], num_left: int) -> tuple[int, SequenceEnd | None]:
        return min(len(emitted), num_left), SequenceEnd.LENGTH if len(emitted) >= num_left else None

    patch.setattr(SequenceLimits, "cut", cut)


def unwritten_root(patch: Patch) -> None:
    """The root's slot keeps what the last step's draft left there."""
    chain_slots = StepRows.chain_slots

    def all_but_the_root(rows: StepRows) -> Ints:
        slots = chain_slots(rows)
        for run in rows.chain_runs:
            if len(run) > 1 and rows.positions[run.start] > 0:
                slots[run.start] = slots[run.stop - 1]
        return slots

    patch.setattr(StepRows, "chain_slots", all_but_the_root)


def one_too_many(patch: Patch) -> None:
    """Positions are one too large in decode steps."""
    build = ForwardBatch.build.__func__  # type: ignore[attr-defined]

    def build_shifted(cls: type[ForwardBatch], segments: Sequence[Segment], **kwargs: Any) -> ForwardBatch:
        batch: ForwardBatch = build(cls, segments, **kwargs)
        for rows in batch.chain_rows:
            if len(rows) > 1:
                batch.positions[rows.stop - 1] += 1
        return batch

    patch.setattr(ForwardBatch, "build", classmethod(build_shifted))


def leaking_masks(patch: Patch) -> None:
    """The keys of chain rows know a little of the mask rows."""
    attend = llama_network.space_attention

    def leak(qkv: QKV, pages: KVPages, rows: StepRows, spec: AttentionSpec) -> Tensor:
        key = qkv.key
        masks = key[rows.num_chain_rows : len(rows.positions)]
        if len(masks):
            key = torch.cat([key[: rows.num_chain_rows] + 1e-3 * masks[0], key[rows.num_chain_rows :]])
        return attend(qkv._replace(key=key), pages, rows, spec)

    patch.setattr(llama_network, "space_attention", leak)


def agreement_anywhere(patch: Patch) -> None:
    """Drafts that agree are counted, wherever they stand."""

    def count(samples: Sequence[int], drafts: Sequence[int]) -> int:
        return sum(sample == draft for sample, draft in zip(samples, drafts, strict=False))

    patch.setattr("space_server.host_runner.num_accepted", count)


def one_seed_for_all(patch: Patch) -> None:
    """The batch shares the noise of its first row."""
    patch.setattr("space_kernels.sampling.sampler.row_streams", _shared_streams)
    compiled = sampler._sample

    def shared(library: Any, logits: Tensor, batch_params: list[Any], positions: list[int]) -> tuple[Tensor, Tensor]:
        of_first = [replace(params, key=batch_params[0].key) for params in batch_params]
        return compiled(library, logits, of_first, positions)

    patch.setattr(sampler, "_sample", shared)


def _shared_streams(keys: Tensor, positions: Tensor) -> Tensor:
    from space_kernels.sampling.noise import row_streams

    return row_streams(keys[:1].expand_as(keys).contiguous(), positions)


PLAIN_CELL = {"dtype": "float32", "layout": "k3", "temperature": 0.8, "processor": "none", "company": "alone"}
PLAIN_CELL |= {"prefill": "whole", "prefix": "miss", "life": "undisturbed", "context": "short", "stale": "left"}


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (noise_of_the_root, {}),
        (forgotten_drafts, {"processor": "frequency"}),
        (forgotten_drafts, {"processor": "bad_words"}),
        (early_count, {"processor": "min_tokens", "layout": "k2"}),
        (seeing_ahead, {"temperature": 0.0}),
        (no_cut, {"processor": "eos"}),
        (unwritten_root, {"temperature": 0.0}),
        (one_too_many, {"temperature": 0.0}),
        (leaking_masks, {"temperature": 0.0}),
        (agreement_anywhere, {}),
        (one_seed_for_all, {"company": "batch"}),
    ],
)
def test_a_fault_is_caught(
    fault: Fault, where: dict[str, Any], subject_of: Callable[[str, str], Subject], monkeypatch: Patch
) -> None:
    subject = subject_of("llama", "float32")
    cell = Cell(**{**PLAIN_CELL, **where}, head=True)
    check_cell(subject, cell)  # sound, and its plain texts known
    fault(monkeypatch)
    with pytest.raises((Mismatch, WorkerClientError)):
        check_cell(subject, cell)


def test_a_cell_whose_drafts_are_never_accepted_proves_nothing(
    subject_of: Callable[[str, str], Subject], monkeypatch: Patch
) -> None:
    monkeypatch.setattr("exactness_matrix.DRAFTS", ("own", "wrong"))
    with pytest.raises((Mismatch, KeyError)):
        check_cell(subject_of("llama", "float32"), Cell(**PLAIN_CELL, head=True))
