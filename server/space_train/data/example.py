"""A training example: token ids, and which of them the model learns to write."""

from __future__ import annotations

from dataclasses import dataclass

NOT_LEARNED = -100
"""The label transformers' losses leave out."""


@dataclass(frozen=True)
class Example:
    """One document as ids; learned[i]: the model learns to write ids[i] (False: it is given)."""

    ids: list[int]
    learned: list[bool]

    @property
    def num_learned(self) -> int:
        """Ids that are learned."""
        return sum(self.learned)

    def feature(self) -> dict[str, list[int]]:
        """As a dataset for `transformers.Trainer` has it: input_ids, and labels of which -100 are not learned."""
        labels = [id if learned else NOT_LEARNED for id, learned in zip(self.ids, self.learned, strict=True)]
        return {"input_ids": self.ids, "labels": labels}

    def pieces(self, length: int) -> list[Example]:
        """This example in pieces of at most `length` ids that learn something.

        Each piece after the first begins with the id before it, given, so that no target is lost:

            length 4, all learned:   a b c d e f   ->   a b c d | (d) e f
        """
        pieces, starts = [], range(0, max(1, len(self.ids) - 1), length - 1)
        for start in starts:
            learned = [False, *self.learned[start + 1 : start + length]]
            if any(learned):
                pieces.append(Example(self.ids[start : start + length], learned))
        return pieces
