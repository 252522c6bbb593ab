"""The `spaceserve train` command at its smallest: records of a sentence, and flags for seconds of training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from space_train.__main__ import main

TINY = "--steps 3 --length 48 --rows-per-step 4 --num-masks 3 --head-hidden 8 --lora-rank 2 --precision no"


def write_records(file: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write JSON lines."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def train(model: Path | str, data: Path, out: Path, flags: str = "") -> int:
    """Run the command with TINY and `flags`, which override it. Return its exit status."""
    return main(["--model", str(model), "--data", str(data), "--out", str(out), *TINY.split(), *flags.split()])
