"""Texts for the workers' encoder: what a request asks for, and the parts of it that go to workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from space_proto import worker_pb2

from space_router.engine.errors import EngineError

CHUNK_TEXTS = 32  # of one chunk
CHUNK_IDS = 4096  # of one chunk, which has one text at least


@dataclass(frozen=True)
class EncodingText:
    """The ids of one text, or of two that are scored together."""

    ids: Sequence[int]
    type_ids: Sequence[int] = ()  # which of the two texts each id is of; empty: all of the first


@dataclass(eq=False)
class Encoding:
    """The texts of one request, and what came of them."""

    request_id: str
    key: str  # name of the API key; "": none
    texts: Sequence[EncodingText]
    done: asyncio.Future[None]
    values: list[Sequence[float] | None] = field(init=False)  # by text; None: not yet
    num_missing: int = field(init=False)
    has_begun: bool = False  # some of its texts were given to a worker

    def __post_init__(self) -> None:
        self.values = [None] * len(self.texts)
        self.num_missing = len(self.texts)

    def fail(self, error: EngineError) -> None:
        """End it, unless it has ended."""
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(eq=False)
class Chunk:
    """Some texts of an encoding, which are at one worker together."""

    encoding: Encoding
    numbers: list[int]  # of texts that are not encoded yet
    num_losses: int = 0  # of workers that had them
    num_crashes: int = 0  # among these
    num_reported: int = 0  # texts that the worker has encoded

    @property
    def num_ids(self) -> int:
        """Ids of its texts."""
        return sum(len(self.encoding.texts[number].ids) for number in self.numbers)


def chunks_of(encoding: Encoding) -> Iterator[Chunk]:
    """Yield the chunks of all texts of an encoding."""
    numbers: list[int] = []
    num_ids = 0
    for number, text in enumerate(encoding.texts):
        if numbers and (len(numbers) >= CHUNK_TEXTS or num_ids + len(text.ids) > CHUNK_IDS):
            yield Chunk(encoding, numbers)
            numbers, num_ids = [], 0
        numbers.append(number)
        num_ids += len(text.ids)
    if numbers:
        yield Chunk(encoding, numbers)


class EncodedPart(NamedTuple):
    """What a worker reports of a chunk."""

    chunk: Chunk
    message: worker_pb2.Encoded
    vectors: Sequence[Sequence[float]]  # of message.values
