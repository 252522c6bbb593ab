"""The folder of a run: its files, whether they may be replaced, and whether a saved state belongs to the run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from space_model.checkpoint.checkpoint import PARTIAL, REPLACED, Checkpoint
from space_model.checkpoint.space_section import declared_files

from space_train.data.rows import MixedRows
from space_train.train_plan import InvalidPlan, TrainPlan

Measures = dict[str, float]

STATE_FILE = "state.pt"
MODEL = "model"
MODELS = (MODEL, MODEL + PARTIAL, MODEL + REPLACED)
REPORT = "run.json"
OWN_TEXT_FILE, LEDGER = "own_texts.jsonl", "own_texts.cost.json"
OWN_PROMPTS, OWN_USER_TURNS = "own_prompts.json", "own_user_turns.jsonl"
OWN_FILES = (OWN_TEXT_FILE, LEDGER, OWN_PROMPTS, OWN_USER_TURNS)
WRITTEN = (*MODELS, *OWN_FILES, "tensorboard", "run.md", "run.png", REPORT, STATE_FILE)
"""Files that a run writes and `--restart` deletes; those that mark the folder as a run's come last."""


def holds_run(out: Path) -> bool:
    """Return whether `out` has a run's state or final report."""
    return holds_state(out) or (out / REPORT).is_file()


def holds_state(out: Path) -> bool:
    """Return whether `out` has the saved state of a run, from which the same command goes on."""
    return (out / STATE_FILE).is_file()


class FolderLock:
    """Keeps two processes from training in one folder. The lock is on the folder itself, and leaves no file.

    with FolderLock(out) as lock:
        lock.take()   # raises InvalidPlan where another process has it; nothing is done without a folder
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._descriptor: int | None = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def take(self) -> None:
        """Take the lock if it is not held and the folder exists. Raises InvalidPlan if another process has it."""
        if self._descriptor is not None or not self._out.is_dir():
            return
        descriptor = os.open(self._out, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise InvalidPlan(
                f"Another process is training in {self._out}: wait until it has ended, or give another --out."
            ) from None
        except OSError:  # some network file systems have no such locks
            os.close(descriptor)
            return
        self._descriptor = descriptor


def check_may_write(out: Path, checkpoint: Checkpoint) -> None:
    """Raise InvalidPlan if `out` is no folder that can be written, or `out/model` is the model to train or was not
    written by a run."""
    place = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not place.is_dir():
        raise InvalidPlan(f"--out {out}: {place} is a file, not a folder. Give another --out.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InvalidPlan(f"--out {out}: {place} cannot be written. Give another --out, or change its permissions.")
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
    return int(_state(out)["counters"]["step"]) if holds_state(out) else None


def kept_option(out: Path, name: str) -> int | None:
    """Return an option of the saved run that is a number, or None without one."""
    return int(json.loads(_state(out)["plan"])[name]) if holds_state(out) else None


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


RESUMABLE = frozenset({"budget", "checkpoint_seconds", "checkpoint_steps", "evaluations", "compile", "accumulate"})
"""Options that may change on resume, because they do not change the result of an update."""


def identity_of(plan: TrainPlan, checkpoint: Checkpoint, data: MixedRows, mask_ids: Sequence[int]) -> dict[str, Any]:
    """Return everything an update depends on, by name: the plan's options, and digests of its inputs."""
    first = hashlib.blake2b(data.rows(0, 1).ids.numpy().tobytes(), digest_size=8).hexdigest()
    return {
        **plan.as_json(),
        **_model_identity(checkpoint),
        "data": f"{len(data)} rows, {first}",
        "text of the data": data.digest(),
        "mask ids": list(mask_ids),
    }


def inputs_of(plan: TrainPlan, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the part of `identity_of` that does not depend on texts."""
    return {**plan.as_json(), **_model_identity(checkpoint)}


def _model_identity(checkpoint: Checkpoint) -> dict[str, str]:
    return {
        "model": checkpoint.model_hash()[:16],
        "weights of the model": fingerprint(checkpoint),
        "adapter and draft head of the model": parts_digest(checkpoint),
    }


def check_goes_on(out: Path, inputs: Mapping[str, Any]) -> None:
    """Raise InvalidPlan if `out` holds a run with other inputs. Reads only; call it before anything is written."""
    if holds_state(out):
        check_same(json.loads(_state(out)["plan"]), inputs, out)


def _state(out: Path) -> dict[str, Any]:
    """Return the saved state of `out` without reading its tensors."""
    return load_checkpoint(out / STATE_FILE, mmap=True)


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return 12 hexadecimal digits that identify a model: a hash of its config and of samples of its weights."""
    digest = hashlib.sha256(checkpoint.model_hash().encode())
    for file in checkpoint.weights:
        size = file.stat().st_size
        with file.open("rb") as stream:
            for part in range(64):
                stream.seek(size * part // 64)
                digest.update(stream.read(256))
    return digest.hexdigest()[:12]


def parts_digest(checkpoint: Checkpoint) -> str:
    """Return a digest of the `space` section and of the (small) files that it names."""
    section = checkpoint.config.get("space") or {}
    digest = hashlib.sha256(json.dumps(section, sort_keys=True).encode())
    for name in declared_files(section):
        place = checkpoint.home / name
        if not place.exists():
            continue
        for file in sorted(place.iterdir()) if place.is_dir() else [place]:  # peft writes a folder
            if file.suffix in {".safetensors", ".json"}:
                with file.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]


REMOVED = {"survival": False, "scheduled_drafting": 0.0}
"""Options of earlier versions that lowered accepted drafts, with the values that switched them off."""


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    """Raise InvalidPlan if `out` holds another run. Digests that an older state lacks are not compared."""
    removed = [name for name, off in REMOVED.items() if before.get(name, off) != off]
    if before.get("loss") == "mixed":
        removed.append("loss")
    for name in removed:
        raise InvalidPlan(
            f"{out} holds a run with {name} = {before[name]}, which was removed because it does not add accepted "
            "drafts. Give another --out, or --restart."
        )
    for name in sorted(set(before) & set(now), key=_causes_first):
        if name not in RESUMABLE and before[name] != now[name]:
            was, is_now = ("the default" if value is None else value for value in (before[name], now[name]))
            raise InvalidPlan(
                f"{out} holds a run with {name} = {was}; this one has {is_now}. "
                "Give the same, another --out, or --restart."
            )


def _causes_first(name: str) -> tuple[int, str]:
    """Sort the model first, then options, the rows that follow from both, and the anchors that short texts limit."""
    last = ("data", "text of the data", "mask ids", "anchors_per_token")
    if name == "model":
        return -1, name
    return last.index(name) + 1 if name in last else 0, name


def save_atomically(state: Mapping[str, Any], path: Path) -> None:
    """Write, fsync, then rename: readers see the old file or the new one, never a partial one. Raises OSError."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        partial.unlink(missing_ok=True)  # a partial file would keep a full disk full
        if isinstance(error, OSError):
            raise OSError(f"{path} cannot be written: {error.strerror or error}") from error
        if isinstance(error, RuntimeError):  # torch raises it for a failed write
            raise OSError(f"{path} cannot be written: {error.__context__ or error}") from error
        raise
    partial.replace(path)


def load_checkpoint(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Load the tensors and plain values of a checkpoint (no code is run). `mmap`: tensors are read when used."""
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu", mmap=mmap)
    return state
