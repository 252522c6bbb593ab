"""The sequences that are stepped on the device, and the batch index of each in the StepState."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch
from space_kernels.sampling.logits_processors import TokenCounts
from space_kernels.sampling.sampling_tensors import SamplingCapacity, Stages, send
from space_kernels.step.state import StateAdmission, StepState
from space_kernels.step.synthetic_acceptance import SyntheticAcceptanceTensors
from space_model.model_facts import ModelFacts
from torch import Tensor

from space_server.batch.sequence import RunningSequence
from space_server.device_runner.device_forward import MOST_TOP
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance

MOST_HISTORY_BYTES = 64 * 1024**2
"""Bound on the token history kept for bad words; with larger windows such requests run on the host."""

MOST_CONTINUATION_BYTES = 64 * 1024**2
"""Bound on known continuations for synthetic acceptance, 12 bytes an id; longer ones run on the host."""

_log = logging.getLogger(__name__)


class DeviceBatch:
    """Assigns sequences to the batch indices of a StepState.

    A sequence in it advances without the host, which knows its state as of the last step that was read.
    """

    def __init__(
        self,
        facts: ModelFacts,
        *,
        max_sequences: int,
        block_size: int,
        max_drafts: int | None = None,
        synthetic: SyntheticAcceptance | None = None,
    ) -> None:
        """`max_drafts`: most per sequence and step; None: as many as there are masks."""
        self._facts = facts
        self._max_pages = -(-facts.window // block_size)
        self.capacity = SamplingCapacity()
        self.state = StepState.empty(
            max_sequences,
            max_drafts=facts.most_masks if max_drafts is None else max(facts.most_masks, max_drafts),
            max_pages=self._max_pages,
            block_size=block_size,
            window=facts.window,
            vocab_size=facts.vocab_size,
            room=self.capacity,
            bounds=True,
            history=max_sequences * (facts.window + 1) * 8 <= MOST_HISTORY_BYTES,
            device=facts.device,
        )
        self.logprob_indices = torch.zeros(max_sequences, dtype=torch.int64, device=facts.device)  # padded with 0
        self._sent_logprob_indices: list[int] = []  # those that were sent
        self._synthetic, self.synthetic_tensors = synthetic, None
        if synthetic is not None:
            num_places = min(facts.window, MOST_CONTINUATION_BYTES // (12 * max_sequences))
            self.synthetic_tensors = SyntheticAcceptanceTensors.empty(
                max_sequences, num_places, synthetic.chances, device=facts.device
            )
        self.by_index: list[RunningSequence | None] = [None] * max_sequences
        self._index_of: dict[int, int] = {}
        self._sent_pages: dict[int, int] = {}  # by sequence number

    def __len__(self) -> int:
        return len(self._index_of)

    def __iter__(self) -> Iterator[RunningSequence]:
        """Iterate in order of batch index."""
        return (sequence for sequence in self.by_index if sequence is not None)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._index_of

    @property
    def batch_size(self) -> int:
        """The highest batch index in use, plus 1."""
        return max(self._index_of.values(), default=-1) + 1

    @property
    def num_pages(self) -> int:
        """The most pages that one sequence has."""
        return max(self._sent_pages.values(), default=0)

    @property
    def stages(self) -> Stages:
        """The sampling stages that the sequences need, rounded up to one of a few sets: few CUDA graphs."""
        return round_up_stages(Stages.of(sequence.sampling_params for sequence in self))

    @property
    def adapter(self) -> int | None:
        """The adapter whose masks draft for the whole batch; None: the checkpoint's own."""
        return next((sequence.adapter for sequence in self if sequence.most_masks), None)

    def fits(self, sequence: RunningSequence) -> bool:
        """Whether this sequence can be stepped here: only its root is pending, it drafts with the same adapter's masks
        as the batch or with none, and its sampling parameters fit the tensors.
        """
        ends = len(sequence.limits.eos_ids | sequence.limits.stop_ids)
        return (
            sequence.num_pending == 1
            and (sequence.num_logprobs or 0) <= MOST_TOP
            and (sequence.drafter is None or self._takes_proposals(sequence))
            and self._has_its_masks(sequence)
            and ends <= self.capacity.num_ends
            and len(sequence.drafts) <= self.state.drafts.shape[1]
            and self.capacity.holds(sequence.sampling_params)
            and not (sequence.sampling_params.bad_words and not self.state.history.shape[1])
            and self._has_synthetic_acceptance(sequence)
        )

    def _takes_proposals(self, sequence: RunningSequence) -> bool:
        return self._synthetic is None and sequence.max_drafts <= self.state.drafts.shape[1]

    def _has_its_masks(self, sequence: RunningSequence) -> bool:
        if not sequence.most_masks:  # adapters change drafts only, so a sequence without masks fits any batch
            return True
        return sequence.adapter == self.adapter or not any(one.most_masks for one in self)

    def _has_synthetic_acceptance(self, sequence: RunningSequence) -> bool:
        if self._synthetic is None or self.synthetic_tensors is None:
            return True
        known = self._synthetic.continuation_of(sequence)
        return known is None or len(known.ids) <= self.synthetic_tensors.num_places

    def put(self, sequence: RunningSequence) -> None:
        """Give a sequence that fits the first free batch index."""
        batch_index = self.by_index.index(None)
        pages = sequence.pages[: self._max_pages]
        if self._synthetic is not None and self.synthetic_tensors is not None:
            known = self._synthetic.continuation_of(sequence)
            self.synthetic_tensors.put(
                batch_index, *((), (), ()) if known is None else (known.ids, known.uniforms, known.others)
            )
        self.state.put(  # last, so that a failure before leaves this batch index not live
            batch_index,
            StateAdmission(
                ids=sequence.ids,
                num_prompt=sequence.num_prompt,
                pages=pages,
                sampling_params=sequence.sampling_params,
                num_left=sequence.num_left,
                eos_ids=sorted(sequence.limits.eos_ids),
                stop_ids=sorted(sequence.limits.stop_ids),
                max_drafts=sequence.max_drafts,
                max_masks=min(sequence.max_drafts, sequence.num_masks),
                drafts=sequence.drafts,
            ),
        )
        sequence.counts = None  # the state keeps the counts now
        self.by_index[batch_index] = sequence
        self._index_of[sequence.seq_id] = batch_index
        self._sent_pages[sequence.seq_id] = len(pages)

    def send_pages(self) -> None:
        """Copy pages granted since the last call to the state."""
        rows: list[tuple[int, int, list[int]]] = []
        for sequence in self:
            known, count = self._sent_pages[sequence.seq_id], min(len(sequence.pages), self._max_pages)
            if count > known:
                rows.append((self._index_of[sequence.seq_id], known, sequence.pages[known:count]))
                self._sent_pages[sequence.seq_id] = count
        _send_rows(rows, self.state.page_table, self.state.num_pages)

    def send_drafts(self, seq_ids: Iterable[int]) -> None:
        """Copy the host's drafts of these sequences, which no step in flight includes, to the state."""
        rows: list[tuple[int, int, list[int]]] = []
        for seq_id in seq_ids:
            batch_index = self._index_of.get(seq_id)
            if batch_index is not None and (sequence := self.by_index[batch_index]) is not None:
                rows.append((batch_index, 0, sequence.drafts))
        _send_rows(rows, self.state.drafts, self.state.num_drafts)

    def send_logprob_indices(self) -> tuple[list[int], int]:
        """Send and return the batch indices that want log-probabilities; also return the most alternatives wanted."""
        asks = [(batch_index, one.num_logprobs) for batch_index, one in enumerate(self.by_index) if one is not None]
        batch_indices = [batch_index for batch_index, num_top in asks if num_top is not None]
        if batch_indices and batch_indices != self._sent_logprob_indices:
            send(self.logprob_indices, torch.tensor(batch_indices + [0] * (len(self.by_index) - len(batch_indices))))
            self._sent_logprob_indices = batch_indices
        return batch_indices, max((num_top for _, num_top in asks if num_top is not None), default=0)

    def close_gaps(self, batch_size: int) -> None:
        """Move sequences at `batch_size` or above to free indices below it, of which there must be enough."""
        for batch_index in range(batch_size, len(self.by_index)):
            sequence = self.by_index[batch_index]
            if sequence is not None:
                to = self.by_index.index(None)
                self.state.move(batch_index, to)
                if self.synthetic_tensors is not None:
                    self.synthetic_tensors.move(batch_index, to)
                self.by_index[batch_index], self.by_index[to] = None, sequence
                self._index_of[sequence.seq_id] = to

    def remove(self, seq_id: int) -> None:
        """Free the sequence's batch index. Steps launched with it may still be in flight."""
        batch_index = self._index_of.pop(seq_id)
        self._sent_pages.pop(seq_id)
        self.by_index[batch_index] = None
        self.state.clear(batch_index)

    def give_back(self) -> list[RunningSequence]:
        """Remove and return all sequences, to be stepped on the host. Requires that every step was read."""
        found = list(self)
        for sequence in found:
            self.remove(sequence.seq_id)
            if sequence.sampling_params.penalises:
                sequence.counts = self._counts_of(sequence)
        return found

    def _counts_of(self, sequence: RunningSequence) -> TokenCounts | None:
        """Return token counts, or None if that fails: its host steps then count, and may fail, alone."""
        try:
            return TokenCounts(sequence.ids, sequence.num_prompt, self._facts.vocab_size, self._facts.device)
        except Exception as error:
            _log.warning("the ids of sequence %d cannot be counted (%s)", sequence.seq_id, error)
            return None


def round_up_stages(stages: Stages) -> Stages:
    """Return one of five stage sets that contains these. Unneeded stages leave every bit unchanged."""
    edits = stages.edits or stages.penalises or stages.bounds
    cuts = stages.cuts or stages.floors
    return Stages(
        edits=edits,
        bounds=stages.bounds,
        penalises=edits,
        samples=stages.samples or edits,
        cuts=cuts or edits,
        floors=cuts or edits,
    )


def _send_rows(rows: Sequence[tuple[int, int, Sequence[int]]], table: Tensor, counts: Tensor) -> None:
    """Write each (batch index, first place, values) into its row of the table, and the values' end to `counts`."""
    cells = [(index, place, value) for index, first, values in rows for place, value in enumerate(values, first)]
    if cells:
        indices, places, written = _columns(cells, table.device)
        table.index_put_((indices, places), written.to(table.dtype))
    if rows:
        indices, ends = _columns([(index, first + len(values)) for index, first, values in rows], counts.device)
        counts.index_put_((indices,), ends)


def _columns(rows: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, ...]:
    columns = torch.tensor(rows, dtype=torch.int64).T.contiguous()
    if device.type == "cuda":
        columns = columns.pin_memory()
    return columns.to(device, non_blocking=True).unbind()
