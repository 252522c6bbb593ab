"""The folder of a run: what it leaves there, and whose the `model` is that is there already."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

import torch
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.whole_folder import PARTIAL, REPLACED

from space_train.train_plan import InvalidPlan

STATE_FILE = "state.pt"
MODEL = "model"
MODELS = (MODEL, MODEL + PARTIAL, MODEL + REPLACED)
REPORT = "run.json"
OWN_TEXT_FILE, LEDGER = "own_texts.jsonl", "own_texts.cost.json"
WRITTEN = (*MODELS, OWN_TEXT_FILE, LEDGER, "tensorboard", "run.md", "run.png", REPORT, STATE_FILE)
"""What a run leaves in its folder, and `--restart` forgets: what says that the rest is a run's comes last."""


def holds_run(out: Path) -> bool:
    """Whether a run was here: its state, or the report of its end."""
    return (out / STATE_FILE).is_file() or (out / REPORT).is_file()


def check_may_write(out: Path, checkpoint: Checkpoint) -> None:
    """Raises InvalidPlan where `out/model` is the model that is trained, or another that no run has written."""
    model = out / MODEL
    # The folder of its weights may be another than that of its adapter.
    if any(place.resolve().is_relative_to(model.resolve()) for place in (checkpoint.home, checkpoint.folder)):
        raise InvalidPlan(f"{out} would overwrite the model it is trained from, {checkpoint.name}: give another --out.")
    there = [place for name in MODELS if (place := out / name).exists()]
    if there and not holds_run(out):
        raise InvalidPlan(
            f"{there[0]} is there already and no run has written it: {out} has neither {STATE_FILE} nor {REPORT}. "
            "Give another --out."
        )


def kept_updates(out: Path) -> int | None:
    """Updates behind the state in `out`; None where there is no state."""
    file = out / STATE_FILE
    if not file.is_file():
        return None
    state = torch.load(file, weights_only=True, map_location="cpu", mmap=True)  # no tensor is read
    return int(state["counters"]["step"])


def forget(out: Path, *, but: Collection[str] = ()) -> None:
    """Remove what a run has left in `out`, and nothing else; `but` these of it stay."""
    is_ours = holds_run(out)
    for name in WRITTEN:
        path = out / name
        if name in but or (name in MODELS and not is_ours):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
