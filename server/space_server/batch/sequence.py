"""One running sequence: its token ids, its pages, and how many of its ids are computed."""

from __future__ import annotations

from collections.abc import Sequence as Run
from dataclasses import dataclass, field

import numpy as np
from space_kernels.paging.row_pattern import Ints
from space_kernels.sampling.logits_processors import TokenCounts
from space_kernels.sampling.sampling_params import SamplingParams

from space_server.batch.limits import SequenceLimits
from space_server.batch.page_numbers import appended
from space_server.drafts.acceptance import Acceptance
from space_server.drafts.drafts import BY_MASKS, Drafter, DraftOrigin, Origin
from space_server.grammar.grammar_state import GrammarState


# computed                  pending                      drafts
# [0 ....... num_computed)  [num_computed .... len(ids)) [len(ids) ... + len(drafts))
#  K, V in the pages         the last one is the root     candidates of the next step
@dataclass(eq=False, slots=True, weakref_slot=True)
class RunningSequence:
    """A sequence between two steps. Prefill, decoding and resuming differ only in how many ids are pending."""

    seq_id: int
    ids: list[int]  # prompt, then output; all final
    num_prompt: int
    num_computed: int  # leading ids whose K and V are in the pages; below len(ids)
    pages: list[int]  # block numbers, position 0 onwards; `extend` adds to them
    sampling_params: SamplingParams
    limits: SequenceLimits
    max_drafts: int  # bound on drafts per step
    num_logprobs: int | None  # alternatives to report per emitted id; None: no log-probabilities
    num_prompt_logprobs: int | None  # the same for prompt ids
    counts: TokenCounts | None  # of `ids`, where a penalty is set
    adapter: int | None  # adapter whose masks draft; None: the checkpoint's own
    num_masks: int  # masks per group that the adapter or checkpoint has
    drafts: list[int] = field(default_factory=list)  # to be verified by the next step
    draft_depth: int = 1  # mask number of the first draft; 0: from no mask
    draft_chances: Run[float] = ()  # acceptance probability of each, given those before; only of drafts from no mask
    acceptance: Acceptance | None = None  # of drafts from its masks; None: not measured
    origin: Origin = BY_MASKS  # source of the drafts
    drafter: Drafter | None = None  # proposes drafts from the text; None: only masks draft
    grammar: GrammarState | None = None  # state of its grammar; None: unconstrained
    waits: bool = False  # for its grammar to be compiled
    num_emitted: int = 0  # ids emitted since admission
    paused: bool = False  # has no free slot, and was reported so
    most_ids: int = field(init=False)  # upper bound on len(ids)
    most_masks: int = field(init=False)  # upper bound on masks per group
    held_pages: set[int] = field(init=False, repr=False)  # `pages` as a set
    page_numbers: Ints = field(init=False, repr=False)  # `pages` as an array; replaced, never changed in place

    def __post_init__(self) -> None:
        self.held_pages = set(self.pages)
        self.page_numbers = np.array(self.pages, dtype=np.int64)
        self.most_ids = self.limits.num_left(0, self.num_prompt)
        self.most_masks = min(self.max_drafts, self.num_masks)

    @property
    def num_pending(self) -> int:
        """Ids to compute; at least 1."""
        return len(self.ids) - self.num_computed

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.most_ids - len(self.ids)

    @property
    def num_mask_drafts(self) -> int:
        """How many leading drafts came from its masks."""
        if self.draft_depth == 0:
            return 0
        return len(self.drafts) if self.origin.source is DraftOrigin.MASKS else self.origin.num_mask_drafts

    def num_free_slots(self, block_size: int) -> int:
        """Return the number of KV-cache slots behind the computed ids."""
        return len(self.pages) * block_size - self.num_computed

    def extend(self, pages: Run[int]) -> None:
        """Append newly granted pages."""
        self.pages += pages
        self.held_pages.update(pages)
        self.page_numbers = appended(self.page_numbers, pages)

    def advance(self, num_rows: int) -> None:
        """Count a prefill chunk that did not reach the root as computed."""
        self.num_computed += num_rows

    def emit(
        self,
        tokens: list[int],
        num_accepted: int,
        drafts: list[int],
        draft_depth: int = 1,
        origin: Origin = BY_MASKS,
    ) -> None:
        """Append the emitted tokens and set the next step's drafts. K and V of the root and the accepted drafts are in
        place.

        Rejected drafts wrote the slots behind them; the next step overwrites those. Nothing is copied.
        """
        self.num_computed = min(len(self.ids) + num_accepted, len(self.ids) + len(tokens) - 1)
        self.ids += tokens
        self.num_emitted += len(tokens)
        self.drafts, self.draft_depth = drafts, draft_depth
        self.origin, self.draft_chances = origin, origin.chances
        if self.counts is not None:
            self.counts.extend(tokens)
        if self.grammar is not None:
            self.grammar.advance(tokens)
