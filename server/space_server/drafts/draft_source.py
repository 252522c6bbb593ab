"""The interface of draft sources besides the model's masks. All drafts are verified by the same rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DraftSource(Protocol):
    """Proposes tokens that may come next."""

    def propose(self, seq_id: int, ids: Sequence[int], max_drafts: int) -> Sequence[int] | None:
        """Return up to `max_drafts` ids that may follow `ids` (everything known of the sequence).

        None leaves the drafts to the model's masks; an empty sequence means no drafts.
        """
        ...
