"""Linears, keys and values of eight bits: drafts change no bit of a text, and what a step then takes."""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from exactness_matrix import AXES, Cell, Mismatch, Subject, check_cell
from pairwise import covering_cases
from space_kernels.dispatch import ops_for
from space_model.geometry.draft_layout import DraftLayout
from space_model.loading.load import load_model
from space_model.loading.whole_model import quantize_to_fp8
from space_model.space_model import SpaceModel
from space_server.machine.memory import free_bytes

from gpu.clock import DeviceClock, forward_seconds
from gpu.llama import DRY, NUM_MASKS, SHAPES, Shape, draft_head, facts_of, random_llama, space_llama
from gpu.pace import BLOCK_SIZE
from gpu.report import Notes
from gpu.ties import checkpoint_of

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Held:
    """What is of eight bits."""

    weights: str
    kv_dtype: str

    def __str__(self) -> str:
        small = ["fp8 weights"] * (self.weights == "fp8") + ["fp8 keys and values"] * (self.kv_dtype == "fp8")
        return " and ".join(small) or "bfloat16"


WAYS = (Held("fp8", "auto"), Held("plain", "fp8"), Held("fp8", "fp8"))
MODELS = ("llama", "qwen3", "demo")
CONTEXTS = (512, 8192)
"""Cached ids: with few a step reads weights, with many keys and values too."""


def test_eight_bits(notes: Notes) -> None:
    """Times are measured where bits differ, too."""
    faults = _differences(notes)
    _seconds(notes)
    assert not faults, f"{len(faults)} cells are not equal; the first: {faults[0]}"


def _differences(notes: Notes) -> list[str]:
    """Cells of the matrix with exact products."""
    equal = 0
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def subject(name: str, held: Held) -> Subject:
            path = checkpoint_of(Path(folder) / name, name, "bfloat16")
            model = load_model(
                path,
                dtype="bfloat16",
                weights=held.weights,
                kv_dtype=held.kv_dtype,
                device=str(notes.device),
                exact=True,
            )
            return Subject(name, model)

        for name, held, cell in _cells(dry=notes.dry):
            if notes.is_late("eight bits: the rest of the cells"):
                break
            try:
                check_cell(subject(name, held), cell)
                equal += 1
            except Mismatch as difference:
                faults.append(f"{name}, {held}: {difference}")
                notes.note(faults[-1])
    notes.figure("eight bits: cells that are bitwise equal", equal)
    notes.figure("eight bits: cells that are not bitwise equal", len(faults))
    return faults


def _cells(*, dry: bool) -> Iterator[tuple[str, Held, Cell]]:
    """Every condition meets every way of holding somewhere; in a dry run there is one cell."""
    axes = {"model": MODELS, "held": WAYS, **AXES, "dtype": ("bfloat16",)}
    if dry:
        axes |= {name: values[:1] for name, values in AXES.items()} | {"dtype": ("bfloat16",)}
        axes |= {"model": MODELS[:1], "held": WAYS[-1:], "layout": ("k3",), "temperature": (0.8,)}
    for case in covering_cases(axes, strength=1 if dry else 2):
        name, held = case.pop("model"), case.pop("held")
        if isinstance(held, Held):
            yield str(name), held, Cell(**case)


def _seconds(notes: Notes) -> None:
    """Network and head of a Llama of 8B, on the device alone, beside bfloat16's."""
    device = notes.device
    shape, contexts = (DRY, (64,)) if notes.dry else (SHAPES["8b"], CONTEXTS)
    if not notes.dry and free_bytes(device) < 1.5 * shape.num_bytes:
        notes.missing("eight bits: seconds of a step", f"{shape.num_bytes / 1024**3:.1f} GiB of weights do not fit")
        return
    clock = DeviceClock(device)
    usual: dict[tuple[int, int], float] = {}
    rows = []
    for held in (Held("plain", "auto"), *WAYS):
        if notes.is_late(f"eight bits: seconds with {held}"):
            continue
        model = _model(shape, device, held)
        for context in contexts:
            kv = model.allocate_kv(-(-(context + 2 * (NUM_MASKS + 1)) // BLOCK_SIZE), BLOCK_SIZE)
            for layout in (DraftLayout.plain(), DraftLayout.full(NUM_MASKS, NUM_MASKS)):
                num_rows, seconds = forward_seconds(model, kv, layout, context, clock)
                first = usual.setdefault((context, num_rows), seconds)
                rows.append([str(held), context, num_rows, f"{1e3 * seconds:.3f}", f"{first / seconds:.2f}"])
                if held.weights == "fp8" or held.kv_dtype == "fp8":
                    notes.figure(f"8b, {held}: bfloat16's time over it, {num_rows} rows at {context}", first / seconds)
        del model, kv
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    head = ["held in", "cached ids", "rows", "ms", "bfloat16's over it"]
    notes.table(f"{shape.name}: network and head", head, rows)


def _model(shape: Shape, device: torch.device, held: Held) -> SpaceModel:
    facts = facts_of(shape, device)
    small = held.kv_dtype == "fp8"
    kv_bytes = facts.kv_bytes_per_token // (2 if small else 1)
    facts = replace(facts, weights=held.weights, fp8_kv=small, kv_bytes_per_token=kv_bytes)
    made = random_llama(shape, device)
    if held.weights == "fp8":
        quantize_to_fp8(made.base_model, device)
    ops = ops_for(device, dtype=facts.dtype, fp8_kv=small)
    return space_llama(made, facts, ops, draft_head(shape, device))
