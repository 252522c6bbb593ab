"""What rank 0 says is what a follower understands, in as many words as it takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from space_model.draft_layout import DraftLayout
from space_model.forward_batch import Segment
from space_server.plan_message import Kind, Message, MessageLost, PlanReader, PlanWriter

layouts = st.integers(0, 3).flatmap(
    lambda drafts: st.lists(st.integers(0, 3), min_size=drafts + 1, max_size=drafts + 1).map(
        lambda masks: DraftLayout(drafts, tuple(masks))
    )
)
segments = st.builds(
    Segment,
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    start=st.integers(0, 2**20),
    pages=st.lists(st.integers(0, 2**20), min_size=1, max_size=4),
    layout=layouts,
    adapter=st.none() | st.integers(0, 3),
    owner=st.none() | st.integers(1, 4) | st.just(2**63),
)
steps = st.lists(st.lists(segments, min_size=1, max_size=4, unique_by=lambda s: s.owner), min_size=1, max_size=8)


def understood(message: Message) -> list[tuple[object, ...]]:
    return [(list(s.ids), s.start, list(s.pages), s.layout, s.adapter) for s in message.segments]


@given(steps)
@settings(max_examples=60, deadline=None)
def test_a_follower_lays_out_the_same_rows(taken: list[list[Segment]]) -> None:
    writer, reader = PlanWriter(), PlanReader()
    for number, step in enumerate(taken):
        message = reader.read(writer.rows(step, number))
        assert (message.kind, message.figures) == (Kind.ROWS, (number,))
        assert understood(message) == understood(Message(Kind.ROWS, (), tuple(step)))


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
    for kind, figures in ((Kind.PAGES, (64, 16)), (Kind.HEAD, (3,)), (Kind.BEAT, ()), (Kind.END, ())):
        assert reader.read(writer.simple(kind, *figures)) == Message(kind, figures)


def test_a_number_that_does_not_follow_is_an_error_that_names_both() -> None:
    writer, reader = PlanWriter(), PlanReader()
    reader.read(writer.simple(Kind.BEAT))
    writer.simple(Kind.BEAT)
    with pytest.raises(MessageLost, match="Message 3 came where message 2 was due"):
        reader.read(writer.simple(Kind.BEAT))
