"""What rank 0 tells the others: numbered messages, each a few integers. Torch-free.

    [number, kind, …]        kind   ROWS   one step: padded rows, then each segment in turn
                                    HEAD   how many hidden rows follow, to make logits of
                                    PAGES  number of blocks, block size: allocate
                                    MEMORY say how much is free
                                    BEAT   answer, so that each knows that the others live
                                    END    leave

A segment is its slot, start, adapter, ids, layout, and what is new of its pages: rank 0 and the followers keep the page
tables of the sequences that the last step had, and forget the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from space_kernels.paging.step_rows import Ints
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import Segment

from space_server.batch.sequence import begins_with


class PlanMessageKind(IntEnum):
    """What a message asks for."""

    ROWS = 1
    HEAD = 2
    PAGES = 3
    MEMORY = 4
    BEAT = 5
    END = 6


class MessageLost(Exception):
    """A message does not follow the one before it, so its cached page tables cannot be resolved."""


@dataclass(frozen=True)
class PlanMessage:
    """A decoded message."""

    kind: PlanMessageKind
    figures: tuple[int, ...]  # HEAD: (rows,); PAGES: (blocks, block size); ROWS: (padded rows,)
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class _Table:
    """A sequence's pages, and the slot where both sides cache them."""

    slot: int
    pages: Ints


class PlanWriter:
    """Encodes rank 0's messages. One writer numbers all of them without gaps."""

    def __init__(self) -> None:
        self._number = 0
        self._tables: dict[int, _Table] = {}  # by the sequence's number

    def simple(self, kind: PlanMessageKind, *figures: int) -> bytes:
        """Encode a message without segments."""
        return self._numbered(kind, figures)

    def rows(self, segments: Sequence[Segment], num_padded: int) -> bytes:
        """Encode one step's rows."""
        words = [num_padded, len(segments)]
        before, self._tables = self._tables, {}
        taken = {table.slot for s in segments if s.owner is not None and (table := before.get(s.owner)) is not None}
        free = iter(slot for slot in range(2 * len(segments) + 1) if slot not in taken)
        for segment in segments:
            known = None if segment.owner is None else before.get(segment.owner)
            pages = np.asarray(segment.pages, dtype=np.int64)
            kept = 0
            if known is not None:
                kept = len(known.pages) if begins_with(pages, known.pages) else 0
            table = _Table(next(free) if known is None else known.slot, pages)
            if segment.owner is not None:
                self._tables[segment.owner] = table
            layout = segment.layout
            words += [table.slot, segment.start, -1 if segment.adapter is None else segment.adapter]
            words += [len(segment.ids), *segment.ids, layout.num_drafts, *layout.masks]
            words += [kept, len(pages) - kept, *pages[kept:].tolist()]
        return self._numbered(PlanMessageKind.ROWS, words)

    def _numbered(self, kind: PlanMessageKind, words: Sequence[int]) -> bytes:
        self._number += 1
        number = self._number
        return np.array([number & 0x7FFFFFFF, number >> 31, kind, *words], dtype=np.int32).tobytes()


class PlanReader:
    """Decodes messages on a follower."""

    def __init__(self) -> None:
        self._number = 0
        self._tables: dict[int, Ints] = {}  # by slot

    def read(self, message: bytes) -> PlanMessage:
        """Decode a message. Raises MessageLost if it does not follow the last one."""
        words = np.frombuffer(message, dtype=np.int32).tolist()
        number = words[0] + (words[1] << 31)
        self._number += 1
        if number != self._number:
            raise MessageLost(
                f"Message {number} came where message {self._number} was due: this rank no longer knows which rows "
                "the others lay out. Start the group again."
            )
        kind, rest = PlanMessageKind(words[2]), words[3:]
        if kind is not PlanMessageKind.ROWS:
            return PlanMessage(kind, tuple(rest))
        return PlanMessage(kind, (rest[0],), self._segments(rest))

    def _segments(self, words: list[int]) -> tuple[Segment, ...]:
        before, self._tables = self._tables, {}
        at = 2

        def take(count: int) -> list[int]:
            nonlocal at
            at += count
            return words[at - count : at]

        segments = []
        for _ in range(words[1]):
            slot, start, adapter, num_ids = take(4)
            ids = take(num_ids)
            (num_drafts,) = take(1)
            masks = take(num_drafts + 1)
            kept, num_new = take(2)
            fresh = take(num_new)
            pages = before[slot] if kept and not fresh else np.array([*before.get(slot, ())[:kept], *fresh], np.int64)
            self._tables[slot] = pages
            layout = DraftLayout.of(num_drafts, tuple(masks))
            segments.append(Segment(ids, start, pages, layout, None if adapter < 0 else adapter, slot))
        return tuple(segments)
