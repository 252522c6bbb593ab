"""Where drafts may come from besides the model's masks. They are verified by the same rule, whoever proposes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DraftSource(Protocol):
    """Proposes what may come next."""

    def propose(self, seq_id: int, ids: Sequence[int], max_drafts: int) -> Sequence[int] | None:
        """Up to `max_drafts` ids that may follow `ids` (all that is known of the sequence).

        None leaves the drafts to the model's masks; an empty sequence means: no drafts.
        """
        ...
