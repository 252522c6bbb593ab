"""A training example: token ids, and which of them the model learns to write."""

from __future__ import annotations

from dataclasses import dataclass

NOT_LEARNED = -100
"""The label that transformers' losses ignore."""


@dataclass(frozen=True)
class Example:
    """One document as ids; learned[i]: ids[i] is a target (False: it is context)."""

    ids: list[int]
    learned: list[bool]

    @property
    def num_learned(self) -> int:
        """Number of targets."""
        return sum(self.learned)

    def feature(self) -> dict[str, list[int]]:
        """Return the record for `transformers.Trainer`: input_ids and labels, -100 where nothing is learned."""
        labels = [id if learned else NOT_LEARNED for id, learned in zip(self.ids, self.learned, strict=True)]
        return {"input_ids": self.ids, "labels": labels}

    def pieces(self, length: int) -> list[Example]:
        """Split into pieces of at most `length` ids, dropping pieces without targets.

        Each piece after the first starts with the previous id as context, so that no target is lost:

            length 4, all learned:   a b c d e f   ->   a b c d | (d) e f
        """
        pieces, starts = [], range(0, max(1, len(self.ids) - 1), length - 1)
        for start in starts:
            learned = [False, *self.learned[start + 1 : start + length]]
            if any(learned):
                pieces.append(Example(self.ids[start : start + length], learned))
        return pieces
