"""A router whose workers have a made-up encoder, or a made-up cross-encoder, beside the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from doubles.router.encoder import SCORES, TEXT, VECTORS, Begin
from doubles.router.whole_router import Start
from space_router.config import ServeConfig


@pytest.fixture
def begin(start: Start) -> Begin:
    """`async with begin() as router`: with an encoder; `scores=True`: a cross-encoder; others as of `start`."""

    def made(*, scores: bool = False, config: ServeConfig | None = None, **changes: Any) -> Any:
        served = replace(config or ServeConfig(), embedding_model="folder/mini")
        return start(config=served, **{"encoder_text": TEXT, "encoder": SCORES if scores else VECTORS} | changes)

    return made
