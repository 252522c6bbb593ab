"""Identifies a run, to check that a saved state belongs to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from space_model.checkpoint.checkpoint import Checkpoint

from space_train.data.mixed_rows import MixedRows
from space_train.train_plan import InvalidPlan, TrainPlan

RESUMABLE = frozenset({"budget", "checkpoint_seconds", "checkpoint_steps", "evaluations", "compile", "accumulate"})
"""Options that may change on resume, because they do not change the result of an update."""


def identity_of(plan: TrainPlan, checkpoint: Checkpoint, data: MixedRows, mask_ids: Sequence[int]) -> dict[str, Any]:
    """Return everything an update depends on, by name: the plan's options, and digests of its inputs."""
    first = hashlib.blake2b(data.rows(0, 1).ids.numpy().tobytes(), digest_size=8).hexdigest()
    return plan.as_json() | {
        "model": checkpoint.model_hash()[:16],
        "weights of the model": fingerprint(checkpoint),
        "adapter and draft head of the model": parts_digest(checkpoint),
        "data": f"{len(data)} rows, {first}",
        "text of the data": data.digest(),
        "mask ids": list(mask_ids),
    }


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
    for name in (section.get("adapter"), (section.get("draft_head") or {}).get("file")):
        place = checkpoint.home / name if name else None
        if place is None or not place.exists():
            continue
        for file in sorted(place.iterdir()) if place.is_dir() else [place]:  # peft writes a folder
            if file.suffix in {".safetensors", ".json"}:
                with file.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    """Raise InvalidPlan if `out` holds another run. Digests that an older state lacks are not compared."""
    for name in sorted(set(before) & set(now)):
        if name not in RESUMABLE and before[name] != now[name]:
            raise InvalidPlan(
                f"{out} holds a run with {name} = {before[name]}; this one has {now[name]}. "
                "Give the same, another --out, or --restart."
            )
