"""The interface that steps sequences, and what a step returns. `HostRunner` and `DeviceRunner` implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from space_kernels.sampling.sampler import IdLogprobs
from space_model.draft_network import DraftNetwork
from space_model.encoder.prompt_pooling import PromptPooling
from space_model.geometry.forward_batch import ForwardBatch
from space_model.heads import DraftHeadWeights
from space_model.model_facts import ModelFacts
from space_model.networks.network import USUAL_ROOM, PagedKV, StateRoom
from space_model.networks.sampled_step import SampledStep
from space_model.recurrent_head import RecurrentHead
from torch import Tensor

from space_server.batch import RunningSequence, SequenceEnd
from space_server.drafts import BY_MASKS, NOT_FORCED, Origin, Proposal, chances_of
from space_server.scheduled_batch import PrefillBudget, ScheduledSequence
from space_server.speculation.controller import Controller
from space_server.step_cost import StepShape


@dataclass(slots=True)
class SequenceOutput:
    """What a step gave one sequence."""

    plan: ScheduledSequence
    tokens: list[int] = field(default_factory=list)  # emitted, cut at the end of the sequence
    num_accepted: int = 0  # drafts among them that were accepted
    end: SequenceEnd | None = None
    drafts: list[int] = field(default_factory=list)  # for the next step
    draft_depth: int = 1  # mask number of the first of them; 0: from no mask
    origin: Origin = BY_MASKS  # their source
    offered_chances: Sequence[float] = ()  # of the drafts that the text offered, whether taken or not
    num_predicted: Sequence[int] = ()  # ids of the client's prediction that appeared with each token
    logprobs: Sequence[IdLogprobs] = ()
    prompt_logprobs: Sequence[IdLogprobs] = ()
    pooling: PromptPooling | None = None  # with this step's rows, where the sequence is pooled
    error: str | None = None  # the sequence cannot go on

    @property
    def max_drafts(self) -> int:
        """Drafts that the next step could verify; below 1 if the sequence ends."""
        sequence = self.plan.sequence
        return min(sequence.max_drafts, sequence.num_left - len(self.tokens) - 1)

    def take_proposal(self, proposal: Proposal, behind: tuple[float, ...] = ()) -> None:
        """Draft the proposal instead. `behind`: acceptance of its leading drafts, if masks made the same."""
        self.drafts = proposal.ids
        self.origin = proposal.origin(len(proposal.ids), behind)
        if not behind:
            self.draft_depth = 0

    @property
    def mask_chances(self) -> tuple[float, ...]:
        """Acceptance of each of its drafts, which masks made, given those before."""
        return chances_of(self.plan.sequence.acceptance, self.draft_depth, len(self.drafts))

    def go_on(self, proposal: Proposal) -> None:
        """Draft the proposal behind the drafts of masks."""
        masks = self.mask_chances
        self.drafts = [*self.drafts, *proposal.ids]
        chances = (*masks, *proposal.known_chances)
        self.origin = Origin(proposal.acceptance.source, len(masks), proposal.match_length, chances)

    def commit(self) -> None:
        """Apply the output to the sequence."""
        sequence = self.plan.sequence
        if self.error is not None:
            return
        sequence.pooling = self.pooling
        if self.plan.closes:
            sequence.emit(
                self.tokens, self.num_accepted, self.drafts, self.draft_depth, self.origin, self.offered_chances
            )
        else:
            sequence.advance(self.plan.num_pending)


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step. The first three are model computation: the network, its heads, and tensor work over the
    vocabulary. The rest of a step is host time, part of which is measured below."""

    forward: float = 0.0  # network, and the head over the chain rows; on a device the whole step
    sample: float = 0.0  # logits processors, sampling, log-probabilities
    draft: float = 0.0  # the head over the accepted groups, candidates, draft head

    pack: float = 0.0  # host: pack the rows
    attend: float = 0.0  # host: plan attention
    verify: float = 0.0  # host: sampling parameters of the rows, verification, ends
    propose: float = 0.0  # host: select drafts and their rows


@dataclass(slots=True)
class StepOutput:
    """What one forward pass gave its sequences."""

    outputs: list[SequenceOutput]
    shape: StepShape  # what it computed
    times: StepTimes
    seconds: float | None = None  # its duration for the cost model; None: measured until `update_from_output`
    is_usual: bool = True  # nothing was compiled or captured in it


class ModelRunner(ABC):
    """Steps sequences: `schedule` -> `execute_model` -> `get_output` -> `update_from_output`."""

    controller: Controller
    num_forwards = 0  # forward passes run
    waited = 0.0  # seconds that the host has spent in the model, or waiting for it
    has_failed = False  # the last launch: once the steps in flight are read, `give_back` is due

    @property
    @abstractmethod
    def num_in_flight(self) -> int:
        """Steps executed whose output was not taken."""

    @property
    @abstractmethod
    def out_of_slots(self) -> Sequence[RunningSequence]:
        """Sequences that cannot continue without another page."""

    @property
    def num_replays(self) -> int:
        """Forward passes that replayed a CUDA graph."""
        return 0

    @property
    def sequences(self) -> Sequence[RunningSequence]:
        """Sequences that it keeps, which no other runner may step."""
        return ()

    @property
    def reads_first(self) -> bool:
        """Whether a step in flight is read before the next is launched."""
        return False

    @abstractmethod
    def schedule(
        self,
        batch: Iterable[RunningSequence],
        budget: PrefillBudget,
        *,
        reported: Set[int] = frozenset(),
        elsewhere: Sequence[RunningSequence] = (),
    ) -> Any | None:
        """Select the sequences and layouts of the next step; None: nothing is to be executed.
        `reported`: numbers of sequences stepped already for this report. `elsewhere`: sequences of other runners."""

    @abstractmethod
    def execute_model(self, scheduled: Any) -> None:
        """Run the step that was scheduled; a device does so without waiting."""

    @abstractmethod
    def get_output(self) -> StepOutput:
        """Return the output of the oldest step in flight, once it is done."""

    @abstractmethod
    def update_from_output(self, output: StepOutput, pause: float | None = None) -> None:
        """Learn from a step whose output was applied. `pause`: seconds between the worker's last two steps."""

    def give_back(self) -> None:  # noqa: B027
        """Leave the sequences that it keeps to another runner for at least one step. Nothing is in flight."""

    def refers_to(self, seq_id: int) -> bool:
        """Whether a step in flight may read or write this sequence's pages."""
        return False

    @abstractmethod
    def reset(self) -> None:
        """Wait for the steps in flight, and drop every sequence."""


class StepModel(Protocol):
    """A decoder on a paged KV cache. `space_model.SpaceModel` implements it."""

    @property
    def facts(self) -> ModelFacts:
        """Sizes, token ids and device of the model."""

    @property
    def draft_network(self) -> DraftNetwork | None:
        """The network that drafts in place of recurrent heads, with keys and values in `PagedKV.draft`; or None."""

    def recurrent_head_of(self, adapter: int | None) -> RecurrentHead | None:
        """Return the recurrent draft head of an adapter (None: the checkpoint's own), or None if there is none."""

    def draft_head_of(self, adapter: int | None) -> DraftHeadWeights | None:
        """Return the draft head of an adapter's masks (None: the checkpoint's own), or None if there is none."""

    def allocate_kv(self, num_blocks: int, block_size: int, room: StateRoom = USUAL_ROOM) -> PagedKV:
        """Allocate a KV cache of num_blocks · block_size slots, and room for the states of recurrent layers."""

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """Return [R, hidden] after the final norm."""

    def sampled_step(self, kv: PagedKV, banned_ids: Tensor) -> SampledStep | None:
        """Return what samples steps, and drafts from their masks, in one call; None: this model has no such call."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32."""

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N, hidden], ids [N, M] -> [N, M] float32."""

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]."""


class Proposing:
    """Asks drafters, and cuts what they propose at the first id that could never be sampled."""

    def __init__(self, facts: ModelFacts, *, in_grammars: bool = True) -> None:
        """`in_grammars`: also propose what a grammar forces."""
        self._not_drafted, self._vocab_size = frozenset(facts.mask_ids), facts.vocab_size
        self._in_grammars = in_grammars

    def proposal(self, sequence: RunningSequence, tokens: Sequence[int], wanted: int) -> Proposal | None:
        """Return at most `wanted` ids to follow the sequence's and `tokens`, which its drafter has read; None if there
        are none."""
        assert sequence.drafter is not None
        if sequence.num_forced_drafts:  # all of them from masks
            return None
        grammar = sequence.grammar if self._in_grammars else None
        if grammar is None and not sequence.drafter.reads:
            return None
        forced = NOT_FORCED if grammar is None else grammar.forced(tokens, wanted)
        proposal = sequence.drafter.propose(wanted, forced)
        if proposal is None:
            return None
        ids = self.valid(sequence, tokens, proposal.ids)
        if not ids:
            return None
        return proposal if len(ids) == len(proposal.ids) else replace(proposal, ids=ids)

    def _behind(
        self, sequence: RunningSequence, tokens: Sequence[int], drafts: list[int], wanted: int
    ) -> Proposal | None:
        """Return what the sequence's past proposes behind these drafts of its masks, with which at most `wanted` ids
        are drafted; None if there is nothing. After `proposal`."""
        drafter = sequence.drafter
        if drafter is None or sequence.num_forced_drafts or not drafts:
            return None
        proposal = drafter.propose_behind(drafts, wanted - len(drafts))
        if proposal is None:
            return None
        ids = self.valid(sequence, tokens, [*drafts, *proposal.ids])[len(drafts) :]
        return replace(proposal, ids=ids) if ids else None

    def join(self, output: SequenceOutput, proposal: Proposal | None) -> bool:
        """Continue the drafts of masks in `output` by `proposal`, the text's own for this place, where it begins with
        them all, else by what followed them in the text before. Return whether they were."""
        if proposal is not None and proposal.goes_on_behind(output.drafts):
            output.take_proposal(proposal, behind=output.mask_chances)
            return True
        behind = self._behind(output.plan.sequence, output.tokens, output.drafts, output.max_drafts)
        if behind is not None:
            output.go_on(behind)
        return behind is not None

    def valid(self, sequence: RunningSequence, tokens: Sequence[int], drafts: list[int]) -> list[int]:
        """Return the drafts after `tokens` up to the first that could never be sampled."""
        grammar = sequence.grammar
        if not self.are_ids(drafts):
            drafts = drafts[: [self.are_ids([id_]) for id_ in drafts].index(False)]
        return drafts if grammar is None else drafts[: grammar.num_possible(tokens, drafts)]

    def are_ids(self, drafts: list[int]) -> bool:
        """Whether all are ids of the vocabulary and none is a mask."""
        if not drafts:
            return True
        return min(drafts) >= 0 and max(drafts) < self._vocab_size and self._not_drafted.isdisjoint(drafts)
