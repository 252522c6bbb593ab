"""Counts of records read and skipped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class LoadReport:
    """Counts of records read, and of those skipped by reason."""

    num_records: int = 0
    num_empty: int = 0  # without targets
    num_with_masks: int = 0  # skipped: they contain a mask token
    num_cut: int = 0  # conversations longer than max_length, cut at their end
    num_cut_away: int = 0  # skipped: their prompt alone fills max_length
    num_examples: int = 0
    num_held_out: int = 0
    num_tokens: int = 0  # of the examples to train on
    num_learned: int = 0
    template: str = ""  # Jinja source, written to the checkpoint for serving
    template_name: str = ""
    forms: Counter[str] = field(default_factory=Counter)

    @property
    def has_conversations(self) -> bool:
        """Whether the chat template was needed."""
        return bool(set(self.forms) - {"plain text"})

    def __str__(self) -> str:
        forms = ", ".join(f"{count:,} {name}" for name, count in self.forms.items())
        left_out = [
            f"{count:,} {reason}"
            for count, reason in (
                (self.num_empty, "empty ones left out"),
                (self.num_with_masks, "with a mask token left out"),
                (self.num_cut, "cut at the end"),
                (self.num_cut_away, "left out whose prompt alone is too long"),
                (self.num_held_out, "held out"),
            )
            if count
        ]
        return (
            f"{self.num_records:,} records ({forms or 'none'}): {self.num_examples:,} examples of "
            f"{self.num_tokens:,} tokens, {self.num_learned:,} learned"
            + "".join(f"; {part}" for part in left_out)
            + (f"; chat template: {self.template_name}" if self.has_conversations else "")
        )
