"""Reads a JSON object from a checkpoint's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from space_model.model_error import CheckpointNotFound


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in this file; a byte order mark is skipped. Raises CheckpointNotFound."""
    try:
        loaded = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise CheckpointNotFound(f"{file} is not JSON: {error}. Was it copied whole?") from error
    if not isinstance(loaded, dict):
        raise CheckpointNotFound(f"{file} holds no JSON object.")
    return loaded
