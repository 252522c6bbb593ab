"""Drafts that are made one after the other, of several sequences at once. Each is sampled after those before it, so
penalties, bans and grammars see the text as verification will."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from space_kernels.sampling.sampler import sample_rows
from torch import Tensor

from space_server.batch import RunningSequence
from space_server.drafters.mask_drafter import MaskRun, SamplingGroups, Stopwatch, draft_rows


@dataclass(frozen=True, slots=True)
class HeadRun:
    """The drafts to be made for one sequence, without masks."""

    sequence: RunningSequence
    emitted: Sequence[int]  # tokens of this step, the bonus last; not yet in sequence.ids
    row: int  # flat number of the chain row that sampled the bonus
    count: int  # drafts; at least one


class DraftVocabulary(Protocol):
    """Whose logits the drafts are chosen from."""

    def widened(self, logits: Tensor, vocab_size: int) -> Tensor:
        """[S, D] -> [S, vocab_size]: -inf outside the draft vocabulary."""

    def best(self, logits: Tensor) -> Tensor:
        """[S, D] -> [S] int64: the most probable ids."""


class SequentialDrafts:
    """The drafts of several runs while they are made, with the sampling parameters and the noise that verification
    uses at the same positions."""

    def __init__(
        self,
        runs: Sequence[HeadRun],
        vocabulary: DraftVocabulary,
        *,
        vocab_size: int,
        banned_ids: Tensor,
        sampling_groups: SamplingGroups,
        computing: Stopwatch,
    ) -> None:
        """`vocab_size`: of the served model; `computing`: counts tensor work."""
        self.drafts: list[list[int]] = [[] for _ in runs]
        self.going = list(range(len(runs)))  # numbers of the runs that want another draft
        self._runs, self._vocabulary = runs, vocabulary
        self._vocab_size, self._banned = vocab_size, banned_ids
        self._groups, self._computing = sampling_groups, computing

    @property
    def last(self) -> list[int]:
        """The last draft of each run that is going."""
        return [self.drafts[number][-1] for number in self.going]

    @property
    def are_likeliest(self) -> bool:
        """Whether every draft is the likeliest id of its logits: no sampling, logits processor or grammar of any run
        changes that."""
        group = self._groups.of([run.sequence for run in self._runs])
        return group.is_alike and not (group.batch_params.samples or group.batch_params.edits)

    def take(self, drafts: Sequence[Sequence[int]]) -> None:
        """Set each run's drafts to the first of these that it wants."""
        self.drafts = [[*ids[: run.count]] for run, ids in zip(self._runs, drafts, strict=True)]
        self.going = []

    def add(self, logits: Tensor) -> list[int]:
        """Sample one draft of each run that is going, from logits [S, D]. Return the places among them of those that
        want another; a run ends early where its grammar forbids the draft."""
        ones = [MaskRun(self._runs[n].sequence, [*self._runs[n].emitted, *self.drafts[n]], 0, 1) for n in self.going]
        group = self._groups.of([one.sequence for one in ones])
        rows = draft_rows(ones, group)
        with self._computing:
            if rows.run_params.samples or rows.run_params.edits or not group.is_alike:
                whole = self._vocabulary.widened(logits, self._vocab_size)
                ids = sample_rows(whole, rows, self._banned).ids.tolist()
            else:
                ids = self._vocabulary.best(logits).tolist()
        stay = []
        for place, (one, number, id_) in enumerate(zip(ones, self.going, ids, strict=True)):
            if one.sequence.grammar is not None and not one.sequence.grammar.num_possible(one.emitted, [id_]):
                continue
            self.drafts[number].append(id_)
            if len(self.drafts[number]) < self._runs[number].count:
                stay.append(place)
        self.going = [self.going[place] for place in stay]
        return stay
