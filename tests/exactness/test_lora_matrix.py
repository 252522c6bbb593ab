"""SPACE with ordinary LoRAs ≡ plain decoding with the same LoRA alone, bitwise, each seat of a batch with its own."""

from __future__ import annotations

from functools import cache

import pytest
from exactness_matrix import Cell, Mismatch, Subject, Subjects, cell_name, check_cell, cover, make_worker
from space_common.files import hash_lora
from space_common.worker.client import ClientSequence, WorkerClient
from space_kernels.linear.gated_delta import GatedDelta
from space_model.checkpoint.recurrent_layers import HYBRIDS
from space_model.loading.load import load_model
from space_server.drafts import TYPICAL
from space_server.speculation.controller import FixedLayout
from tiny_checkpoints import MORE_FAMILIES, tiny_checkpoint, tiny_lora
from torch import Tensor

MODELS = ("ids-llama", "own-qwen3", "own-gemma2", "ids-gemma3")
"""Masks with ids, or the checkpoint's own gated adapter, whose delta mask rows have beside the LoRA's."""
HYBRID = ("ids-qwen3_next", "own-qwen3_5")
FEW: dict[str, tuple[object, ...]] = {
    "model": MODELS[:3],
    "layout": ("k5", "mixed"),
    "temperature": (0.0, 0.8),
    "processor": ("none", "repetition"),
    "context": ("short",),
}


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    @cache
    def make(name: str, dtype: str) -> Subject:
        kind, _, family = name.partition("-")
        folder = tmp_path_factory.mktemp(name)
        recurrent = MORE_FAMILIES.get(family, {}).get("model_type") in HYBRIDS
        sizes = {"hidden_size": 64 if recurrent else 32, "num_heads": 2, "kv_heads": 1, "num_masks": 5}
        few = ("in_proj_qkvz", "in_proj_qkv", "out_proj") if recurrent else ("q_proj", "down_proj")
        rank = 3 if kind == "own" else None
        path = tiny_checkpoint(folder / "model", family, seed=1, tie_word_embeddings=False, adapter_rank=rank, **sizes)
        loras = {
            "sql": tiny_lora(folder / "sql", path, rank=8, seed=5),
            "law": tiny_lora(folder / "law", path, rank=1, seed=6, linears=few),
        }
        hashes = [hash_lora(one) for one in loras.values()]
        seats = (hashes[0], "", hashes[1], hashes[0])
        return Subject(name, load_model(path, dtype=dtype, loras=loras), loras=seats)

    return make


@pytest.mark.parametrize(("model", "cell"), cover(2, **FEW), ids=cell_name)
def test_drafts_leave_the_text_of_each_lora(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.parametrize(("model", "cell"), cover(2, **FEW | {"model": ("own-deepseek_v3",)})[::4], ids=cell_name)
def test_drafts_leave_the_text_of_each_lora_of_compressed_keys(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.parametrize(("model", "cell"), cover(1, **FEW | {"model": HYBRID})[:2], ids=cell_name)
def test_drafts_leave_the_text_of_each_lora_of_recurrent_layers(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cell"), cover(2, **FEW | {"model": HYBRID}), ids=cell_name)
def test_drafts_leave_the_text_of_each_lora_of_recurrent_layers_under_every_two_conditions(
    model: str, cell: Cell, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cell"), cover(2, model=MODELS), ids=cell_name)
def test_drafts_leave_the_text_of_each_lora_under_every_two_conditions(
    model: str, cell: Cell, subject_of: Subjects
) -> None:
    check_cell(subject_of(model, cell.dtype), cell)


def test_a_lora_that_leaks_into_the_rows_beside_it_is_caught(
    subject_of: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of("ids-gemma3", "float32")
    cell = Cell("float32", "k2", 0.0, "none", "batch", "whole", "miss", "undisturbed", False, "short", "left")
    check_cell(subject, cell)

    def leak(delta: GatedDelta, y: Tensor, x: Tensor, rows: slice) -> None:
        y[: rows.stop + 1] += delta(x[: rows.stop + 1])

    monkeypatch.setattr(GatedDelta, "add_to", leak)
    with pytest.raises(Mismatch):
        check_cell(subject, cell)


def test_acceptance_is_measured_for_each_lora(subject_of: Subjects) -> None:
    subject = subject_of("ids-llama", "float32")
    worker = make_worker(subject.model, FixedLayout.full(3), None)
    client = WorkerClient(worker, automatic=True)
    means: dict[str, list[float]] = {lora: [] for lora in subject.loras[:2]}
    for seat in range(len(means)):  # random masks are seldom right
        client.submit(ClientSequence(subject.request(seat, 0.0, "none")))
        client.run()
        for known in means:
            shapes = worker._shapes.get((known, False))
            means[known].append(TYPICAL[0] if shapes is None else shapes[0][None].mean(1))
    first, second = means.values()
    assert first[0] == first[1] < TYPICAL[0]
    assert second[0] == TYPICAL[0] > second[1]
