"""A made-up encoder, and a made-up cross-encoder, beside a scripted worker's model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from space_proto import worker_pb2
from space_router.text.encoder_text import EncoderText

from doubles.tokenizers import wordpiece

WINDOW = 24
TEXT = EncoderText("mini", "", wordpiece(), {"query": "query: ", "document": "text: "}, "", False)
VECTORS = worker_pb2.Encoder(hash="h", window=WINDOW, vocab_size=200, num_types=2, num_values=8)
SCORES = worker_pb2.Encoder(hash="h", window=WINDOW, vocab_size=200, num_types=2, num_values=1, scores_pairs=True)

Begin = Callable[..., AbstractAsyncContextManager[Any]]
"""Of the fixture `begin`: `async with begin() as router`."""
