"""Drafts from a sequence's past and from predictions change no text either, in any life of a sequence."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from exactness_matrix import (
    AXES,
    FEW_IDS,
    Cell,
    Mismatch,
    Subject,
    check_joined_sources,
    check_sources,
    require_every_length,
)
from pairwise import covering_cases
from space_server.host_runner import HostRunner

Subjects = Callable[[str, str], Subject]

FEW: dict[str, tuple[Any, ...]] = {
    "model": ("llama",),
    "dtype": ("float32",),
    "layout": ("k1", "pruned"),
    "temperature": (0.0, 0.8),
    "processor": (FEW_IDS, "all"),
    "prefill": ("whole",),
    "prefix": ("miss",),
    "head": (True,),
    "context": ("short",),
    "stale": ("left",),
}
MANY = {
    "model": ("llama", "gemma2", "embedded"),
    "layout": ("k1", "k3", "k5", "pruned", "mixed"),
    "temperature": (0.0, 0.8),
    "processor": ("none", "repetition", FEW_IDS, "all"),
}


def cover(strength: int, **narrowed: tuple[Any, ...]) -> list[tuple[str, Cell]]:
    cases = covering_cases({**AXES, **narrowed}, strength=strength)
    return [(case.pop("model"), Cell(**case)) for case in cases]


def name_of(value: object) -> str | None:
    return str(value) if isinstance(value, Cell) else None


@pytest.mark.parametrize(("model", "cell"), cover(2, **FEW), ids=name_of)
def test_lookup_and_predictions_give_the_plain_text(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_sources(subject_of(model, cell.dtype), cell)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "cell"), cover(3, **MANY), ids=name_of)
def test_every_three_conditions_together(model: str, cell: Cell, subject_of: Subjects) -> None:
    check_sources(subject_of(model, cell.dtype), cell)


CELL = Cell(
    dtype="float32", layout="k3", temperature=0.8, processor=FEW_IDS, company="batch", prefill="whole", prefix="miss",
    life="restarted", head=True, context="short", stale="left",
)  # fmt: skip


@pytest.mark.parametrize("life", AXES["life"])
def test_lookups_are_refused_taken_in_part_and_taken_whole(life: str, subject_of: Subjects) -> None:
    verifications = []
    for temperature in (0.0, 0.8):
        cell = replace(CELL, life=life, temperature=temperature)
        verifications += check_sources(subject_of("llama", "float32"), cell)["lookup"]
    require_every_length(CELL, 3, verifications)


@pytest.mark.parametrize("temperature", [0.8, 1.0])
@pytest.mark.parametrize("device_steps", [False, True], ids=["host", "device"])
def test_masks_and_what_goes_on_behind_them_are_refused_and_taken_in_one_text(
    device_steps: bool, temperature: float, subject_of: Subjects
) -> None:
    check_joined_sources(subject_of("llama", "float32"), temperature, device_steps=device_steps)


def test_a_draft_that_is_taken_unverified_is_found(subject_of: Subjects, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_sequences = HostRunner._verify

    def credulous(runner: HostRunner, advances: Any, *arguments: Any) -> None:
        verify_sequences(runner, advances, *arguments)
        for advance in advances:
            if advance.num_accepted < len(advance.plan.drafts) and advance.plan.sequence.origin.match_length > 3:
                advance.tokens[advance.num_accepted] = advance.plan.drafts[advance.num_accepted]

    monkeypatch.setattr(HostRunner, "_verify", credulous)
    with pytest.raises(Mismatch, match="First difference"):
        check_sources(subject_of("llama", "float32"), CELL)
