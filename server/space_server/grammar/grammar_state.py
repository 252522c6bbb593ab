"""The state of one sequence's output in its grammar, and the ids that may come next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from space_common.grammar import is_stuck, reason
from space_kernels.sampling.sampling_rows import IdBits

from space_server.drafts.drafts import Forced
from space_server.grammar.vocabulary import TokenVocabulary, bits_of, ids_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

_FEW_WORDS = 8  # bit-set words with ids above which the text is not checked for being forced


@dataclass(frozen=True, slots=True)
class Possible:
    """The ids that may stand at one position of an output."""

    ids: IdBits | None  # None: unreachable, because the tail before it is impossible
    only_end: bool = False  # the text is complete and can only end

    def __contains__(self, id_: int) -> bool:
        return self.ids is None or bool(self.ids[id_ >> 5] >> (id_ & 31) & 1)


_UNASKED = Possible(None)


class GrammarState:
    """Follows a sequence's output, and looks ahead behind drafts.

    output (final)          tail (hypothetical)
    [0 ............. n)     [n ........ n + t)      the matcher stands behind both, and is rolled back as needed

    What may come next depends only on the bytes before. A position where the library fails, or where no id can follow,
    has no possible ids; that matters only if the output reaches it.
    """

    def __init__(
        self,
        vocabulary: TokenVocabulary,
        fresh: Callable[[], LLMatcher],
        *,
        eos_ids: Collection[int],
        stop_ids: Collection[int] = (),
        ignores_eos: bool = False,
        output: Sequence[int] = (),
    ) -> None:
        """`fresh`: this state's own matcher, at the beginning. EOS ids, and stop ids without text, are possible where
        the text may end; with `ignores_eos`, EOS ids only where it must. `output`: ids emitted already.
        """
        self._vocabulary, self._fresh = vocabulary, fresh
        stops = {id_ for id_ in stop_ids if not vocabulary.texts[id_]}
        self._end_ids = stops.union(eos_ids)
        self._end_bits = bits_of(self._end_ids, vocabulary.size)  # where the text must end
        self._stop_bits = bits_of(stops, vocabulary.size) if ignores_eos else self._end_bits  # where it may
        self._text_bits = vocabulary.possible & ~self._end_bits
        self._matcher = fresh()
        self._output: list[int] = []
        self._tail: list[int] = []
        self._known: dict[tuple[int, ...], Possible] = {}  # cache, by tail
        self.trouble: str | None = None  # why the last dead end has no possible ids
        self._is_lost = False  # the output violates the grammar
        self.advance(output)
        if self._is_lost:
            raise ValueError(f"The {len(output)} ids generated before are no beginning of one of its texts.")

    def possible(self, tail: Sequence[int] = ()) -> Possible:
        """Return the ids that may follow the output and `tail`."""
        key = tuple(tail)
        known = self._known.get(key)
        if known is None:
            if self._is_lost:
                return Possible(np.zeros_like(self._text_bits))
            reached = self._end_ids.isdisjoint(key) and self._go_behind(key)
            known = self._known[key] = self._look() if reached else _UNASKED
        return known

    def num_possible(self, tail: Sequence[int], drafts: Sequence[int]) -> int:
        """Return how many leading drafts may follow the output and `tail`, up to an end."""
        behind = list(tail)
        for count, id_ in enumerate(drafts):
            if id_ not in self.possible(behind):
                return count
            if id_ in self._end_ids:
                return count + 1
            behind.append(id_)
        return len(drafts)

    def forced(self, tail: Sequence[int], most: int) -> Forced:
        """Return up to `most` ids that must follow the output and `tail`. If the forced text has several tokenizations,
        the longest ids are used.
        """
        behind, certain = list(tail), True
        while len(behind) < len(tail) + most:
            ways = self._ways(self.possible(behind))
            if not ways:
                break
            behind.append(ways[0])
            certain = certain and len(ways) == 1
            if ways[0] in self._end_ids:
                break
        return Forced(tuple(behind[len(tail) :]), certain)

    def _ways(self, possible: Possible) -> list[int]:
        """Return the possible ids if all are prefixes of the first; none if the text is not forced."""
        if possible.ids is None or not 0 < np.count_nonzero(possible.ids) <= _FEW_WORDS:
            return []
        texts, ids = self._vocabulary.texts, ids_of(possible.ids)
        if len(ids) == 1:
            return ids
        ids.sort(key=lambda id_: -len(texts[id_]))
        is_forced = all(texts[id_] and texts[ids[0]].startswith(texts[id_]) for id_ in ids)  # an end has no text
        return ids if is_forced else []

    def advance(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens."""
        ended = len(tokens) > 0 and tokens[-1] in self._end_ids
        text = list(tokens[:-1] if ended else tokens)
        if not self._go_behind(text):
            self.trouble, self._is_lost = "the library gave up behind the last id", True
            self._known = {}
            return
        self._output += text
        self._tail = self._tail[len(text) :]
        key, count = tuple(text), len(text)
        self._known = {tail[count:]: known for tail, known in self._known.items() if tail[:count] == key}

    def _go_behind(self, tail: Sequence[int]) -> bool:
        """Move the matcher behind `tail`. False if an id is impossible; the matcher then stands before it."""
        common = 0
        for ours, theirs in zip(self._tail, tail, strict=False):
            if ours != theirs:
                break
            common += 1
        if len(self._tail) > common:
            if not self._matcher.rollback(len(self._tail) - common):
                self._start_again()
                common = 0
            del self._tail[common:]
        rest = list(tail[common:])
        if rest:
            count = self._matcher.try_consume_tokens(rest)
            if self._matcher.is_error():
                self._start_again()
                return False
            self._tail += rest[:count]
            return count == len(rest)
        return True

    def _look(self) -> Possible:
        """Return the ids that may follow at the matcher's position."""
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: len(self._text_bits)]
        if self._matcher.is_error():
            stuck = is_stuck(self._matcher)
            self.trouble = "no id goes on with it" if stuck else reason(self._matcher.get_error())
            self._start_again()
            return Possible(np.zeros_like(self._text_bits))
        text = found & self._text_bits
        goes_on = bool(text.any())
        ends = self._matcher.is_accepting()
        if ends:
            text |= self._stop_bits if goes_on else self._end_bits
        if not goes_on:
            self.trouble = "its text is complete, and no id ends it" if ends else "no id goes on with it"
        return Possible(text, only_end=ends and not goes_on)

    def _start_again(self) -> None:
        """Replace a matcher that failed for good by a new one behind the output."""
        self._matcher = self._fresh()
        self._tail = []
        self._matcher.try_consume_tokens(self._output)
