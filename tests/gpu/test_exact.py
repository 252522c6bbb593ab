"""Exact products: drafts change no bit of a text on the GPU."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from exactness_matrix import AXES, Cell, Mismatch, Subject, check_cell
from pairwise import covering_cases
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting

from gpu.report import Notes
from gpu.ties import checkpoint_of

pytestmark = pytest.mark.gpu

EXACT_FAMILIES = ("llama", "qwen3")
"""Those that have a compact network on a GPU: others are refused exact products."""


def test_exact_products(notes: Notes) -> None:
    """Cells of the matrix, each with own, right, half-right and wrong drafts; every two conditions meet in one."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def subject(name: str, dtype: str) -> Subject:
            path = checkpoint_of(Path(folder) / f"{name}-{dtype}", name, dtype)
            return Subject(name, load_model(path, dtype=dtype, device=str(notes.device), exact=True))

        wanted = list(_cells(dry=notes.dry))
        equal, faults = 0, []
        for number, (name, cell) in enumerate(wanted):
            if notes.is_late(f"exact: the last {len(wanted) - number} cells"):
                break
            try:
                check_cell(subject(name, cell.dtype), cell)
                equal += 1
            except Mismatch as difference:
                faults.append(str(difference))
                notes.note(f"{name}: {difference}")
            if number % 10 == 9:
                notes.say(f"{number + 1} of {len(wanted)} cells, {len(faults)} not equal")
        if not notes.dry:
            _refused(notes, Path(folder))
    notes.figure("exact: cells that are bitwise equal", equal)
    notes.figure("exact: cells that are not bitwise equal", len(faults))
    assert not faults, f"{len(faults)} of {equal + len(faults)} cells are not equal; the first: {faults[0]}"


def _cells(*, dry: bool) -> Iterator[tuple[str, Cell]]:
    axes = {"model": (*EXACT_FAMILIES, "demo"), **AXES}
    if dry:
        axes |= {"model": ("llama",), "layout": ("k3",), "processor": ("none",), "temperature": (0.8,)}
        axes |= {name: values[:1] for name, values in AXES.items() if name not in axes or len(axes[name]) > 1}
        axes["company"] = ("batch",)
    for case in covering_cases(axes, strength=2):
        name = str(case.pop("model"))
        yield name, Cell(**case)


def _refused(notes: Notes, folder: Path) -> None:
    """Others must be refused, not served inexactly."""
    path = checkpoint_of(folder / "refused", "gemma2", "float32")
    try:
        load_model(path, dtype="float32", device="cuda", exact=True)
    except InvalidSetting as refusal:
        notes.note(f"gemma2 with exact products is refused: {refusal}")
    else:
        pytest.fail("gemma2 is loaded with exact products, which it cannot have")
