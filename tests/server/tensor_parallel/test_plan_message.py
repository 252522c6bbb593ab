"""What rank 0 says is what a follower understands, in as many words as it takes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import Segment
from space_server.tensor_parallel.plan_message import MessageLost, PlanMessage, PlanMessageKind, PlanReader, PlanWriter


def some_steps(rng: random.Random) -> Iterator[list[Segment]]:
    """Steps of a few sequences that come and go, whose pages grow or are suddenly others."""
    pages: dict[int | None, list[int]] = {}
    for _ in range(12):
        step = []
        for owner in rng.sample([None, 1, 2, 3, 2**63], rng.randint(1, 4)):
            held = pages.get(owner, [])
            if rng.random() < 0.3:
                held = []
            pages[owner] = held = held + rng.sample(range(2**20), rng.randint(0 if held else 1, 3))
            masks = tuple(rng.randint(0, 3) for _ in range(rng.randint(1, 4)))
            ids = [rng.randrange(2**31) for _ in range(rng.randint(1, 5))]
            adapter = rng.choice([None, 0, 3])
            layout = DraftLayout(len(masks) - 1, masks)
            step.append(Segment(ids, rng.randrange(2**20), held, layout, adapter, owner))
        yield step


def understood(message: PlanMessage) -> list[tuple[object, ...]]:
    return [(list(s.ids), s.start, list(s.pages), s.layout, s.adapter) for s in message.segments]


@pytest.mark.parametrize("seed", range(20))
def test_a_follower_lays_out_the_same_rows(seed: int) -> None:
    writer, reader = PlanWriter(), PlanReader()
    for number, step in enumerate(some_steps(random.Random(seed))):
        message = reader.read(writer.rows(step, number))
        assert (message.kind, message.figures) == (PlanMessageKind.ROWS, (number,))
        assert understood(message) == understood(PlanMessage(PlanMessageKind.ROWS, (), tuple(step)))


def test_pages_are_said_once_and_then_only_the_new_ones() -> None:
    writer, reader = PlanWriter(), PlanReader()
    pages = np.arange(1000)
    sizes = []
    for held in (pages, pages, np.arange(1001), np.arange(1001)):
        said = writer.rows([Segment([7], 5, held, owner=3), Segment([8], 9, [4], owner=2)], 4)
        sizes.append(len(said) // 4)
        assert [list(s.pages) for s in reader.read(said).segments] == [list(held), [4]]
    assert sizes[0] > 1000
    assert sizes[1:] == [sizes[1], sizes[1] + 1, sizes[1]]
    assert sizes[1] < 40


def test_a_sequence_number_that_comes_again_with_other_pages_is_another_sequence() -> None:
    writer, reader = PlanWriter(), PlanReader()
    for pages in ([1, 2, 3], [1, 4], [1, 4, 3], [9]):
        (segment,) = reader.read(writer.rows([Segment([7], 0, pages, owner=1)], 4)).segments
        assert list(segment.pages) == pages


def test_messages_without_rows_carry_their_figures() -> None:
    writer, reader = PlanWriter(), PlanReader()
    for kind, figures in (
        (PlanMessageKind.PAGES, (64, 16)),
        (PlanMessageKind.HEAD, (3,)),
        (PlanMessageKind.BEAT, ()),
        (PlanMessageKind.END, ()),
    ):
        assert reader.read(writer.simple(kind, *figures)) == PlanMessage(kind, figures)


def test_a_number_that_does_not_follow_is_an_error_that_names_both() -> None:
    writer, reader = PlanWriter(), PlanReader()
    reader.read(writer.simple(PlanMessageKind.BEAT))
    writer.simple(PlanMessageKind.BEAT)
    with pytest.raises(MessageLost, match="Message 3 came where message 2 was due"):
        reader.read(writer.simple(PlanMessageKind.BEAT))
