"""The folder of a run: the files it writes, and whether an existing `model` may be replaced."""

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
"""Files that a run writes and `--restart` deletes; those that mark the folder as a run's come last."""


def holds_run(out: Path) -> bool:
    """Return whether `out` has a run's state or final report."""
    return (out / STATE_FILE).is_file() or (out / REPORT).is_file()


def check_may_write(out: Path, checkpoint: Checkpoint) -> None:
    """Raise InvalidPlan if `out/model` is the model to train, or was not written by a run."""
    model = out / MODEL
    # Weights and adapter may be in different folders.
    if any(place.resolve().is_relative_to(model.resolve()) for place in (checkpoint.home, checkpoint.folder)):
        raise InvalidPlan(f"{out} would overwrite the model it is trained from, {checkpoint.name}: give another --out.")
    there = [place for name in MODELS if (place := out / name).exists()]
    if there and not holds_run(out):
        raise InvalidPlan(
            f"{there[0]} is there already and no run has written it: {out} has neither {STATE_FILE} nor {REPORT}. "
            "Give another --out."
        )


def kept_updates(out: Path) -> int | None:
    """Return the number of updates in the saved state of `out`, or None without one."""
    file = out / STATE_FILE
    if not file.is_file():
        return None
    state = torch.load(file, weights_only=True, map_location="cpu", mmap=True)  # no tensor is read
    return int(state["counters"]["step"])


def forget(out: Path, *, but: Collection[str] = ()) -> None:
    """Delete the files that a run wrote to `out`, except those in `but`."""
    is_ours = holds_run(out)
    for name in WRITTEN:
        path = out / name
        if name in but or (name in MODELS and not is_ours):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
