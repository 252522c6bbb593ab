"""The sequences that are stepped on the device: which line of the state each of them has."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Run

import torch
from space_kernels.sampling.logits_processors import TokenCounts
from space_kernels.sampling.sampling_tensors import SamplingCapacity, Stages, send
from space_kernels.step.state import StateAdmission, StepState
from space_kernels.step.synthetic_acceptance import SyntheticAcceptanceTensors
from space_model.model_facts import ModelFacts
from torch import Tensor

from space_server.batch.sequence import RunningSequence
from space_server.device_runner.device_logprobs import MOST_TOP
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance

MOST_HISTORY_BYTES = 64 * 1024**2
"""Of ids known per line, which bad words are looked for in: where windows make it more, they are left to the host."""

MOST_DECREE_BYTES = 64 * 1024**2
"""Of texts from which drafts are decreed, 12 bytes an id: requests with longer ones are left to the host."""

_log = logging.getLogger(__name__)


class DeviceBatch:
    """Lines of a StepState and the sequences that have them.

    A sequence on a line goes on without the host: what the host knows of it is as old as the last step that was read.
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
        self.room = SamplingCapacity()
        self.state = StepState.empty(
            max_sequences,
            max_drafts=facts.most_masks if max_drafts is None else max(facts.most_masks, max_drafts),
            max_pages=self._max_pages,
            block_size=block_size,
            window=facts.window,
            vocab_size=facts.vocab_size,
            room=self.room,
            bounds=True,
            history=max_sequences * (facts.window + 1) * 8 <= MOST_HISTORY_BYTES,
            device=facts.device,
        )
        self.asking = torch.zeros(max_sequences, dtype=torch.int64, device=facts.device)  # lines, then 0
        self._asking: list[int] = []  # those that were sent
        self._synthetic, self.synthetic_tensors = synthetic, None
        if synthetic is not None:
            num_places = min(facts.window, MOST_DECREE_BYTES // (12 * max_sequences))
            self.synthetic_tensors = SyntheticAcceptanceTensors.empty(
                max_sequences, num_places, synthetic.chances, device=facts.device
            )
        self.lines: list[RunningSequence | None] = [None] * max_sequences
        self._line_of: dict[int, int] = {}
        self._sent_pages: dict[int, int] = {}  # by sequence number

    def __len__(self) -> int:
        return len(self._line_of)

    def __iter__(self) -> Iterator[RunningSequence]:
        """By line."""
        return (sequence for sequence in self.lines if sequence is not None)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._line_of

    @property
    def num_lines(self) -> int:
        """Up to the last one that is taken."""
        return max(self._line_of.values(), default=-1) + 1

    @property
    def num_pages(self) -> int:
        """Most that a sequence has."""
        return max(self._sent_pages.values(), default=0)

    @property
    def stages(self) -> Stages:
        """Those that some of the laws need, or a set of stages that contains them: few sets, so few graphs."""
        return few_stages(Stages.of(sequence.sampling_params for sequence in self))

    @property
    def adapter(self) -> int | None:
        """Whose masks draft: those of one adapter (None: the checkpoint's own) in all steps of the batch."""
        return next((sequence.adapter for sequence in self if sequence.most_masks), None)

    def fits(self, sequence: RunningSequence) -> bool:
        """Whether this sequence can be stepped here: only its root is to be computed, its masks, if it has any, are the
        others', and what is asked of it has room.
        """
        ends = len(sequence.limits.eos_ids | sequence.limits.stop_ids)
        return (
            sequence.num_pending == 1
            and (sequence.num_logprobs or 0) <= MOST_TOP
            and (sequence.drafter is None or self._takes_proposals(sequence))
            and self._has_its_masks(sequence)
            and ends <= self.room.num_ends
            and len(sequence.drafts) <= self.state.drafts.shape[1]
            and self.room.holds(sequence.sampling_params)
            and not (sequence.sampling_params.bad_words and not self.state.history.shape[1])
            and self._has_synthetic_acceptance(sequence)
        )

    def _takes_proposals(self, sequence: RunningSequence) -> bool:
        return self._synthetic is None and sequence.max_drafts <= self.state.drafts.shape[1]

    def _has_its_masks(self, sequence: RunningSequence) -> bool:
        if not sequence.most_masks:  # the text is everybody's
            return True
        return sequence.adapter == self.adapter or not any(one.most_masks for one in self)

    def _has_synthetic_acceptance(self, sequence: RunningSequence) -> bool:
        if self._synthetic is None or self.synthetic_tensors is None:
            return True
        known = self._synthetic.continuation_of(sequence)
        return known is None or len(known.ids) <= self.synthetic_tensors.num_places

    def put(self, sequence: RunningSequence) -> None:
        """Let a sequence that fits take the first line that is free."""
        line = self.lines.index(None)
        pages = sequence.pages[: self._max_pages]
        if self._synthetic is not None and self.synthetic_tensors is not None:
            known = self._synthetic.continuation_of(sequence)
            self.synthetic_tensors.put(
                line, *((), (), ()) if known is None else (known.ids, known.uniforms, known.others)
            )
        self.state.put(  # last: a line that nobody got is not live
            line,
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
        sequence.counts = None  # the state counts now
        self.lines[line] = sequence
        self._line_of[sequence.seq_id] = line
        self._sent_pages[sequence.seq_id] = len(pages)

    def send_pages(self) -> None:
        """Let the state know of the pages that sequences got since."""
        state, cells, counts = self.state, [], []
        for sequence in self:
            known, count = self._sent_pages[sequence.seq_id], min(len(sequence.pages), self._max_pages)
            if count > known:
                line = self._line_of[sequence.seq_id]
                cells += [(line, place, sequence.pages[place]) for place in range(known, count)]
                counts.append((line, count))
                self._sent_pages[sequence.seq_id] = count
        if cells:
            lines, places, blocks = _columns(cells, state.page_table.device)
            state.page_table.index_put_((lines, places), blocks.to(state.page_table.dtype))
            lines, numbers = _columns(counts, state.num_pages.device)
            state.num_pages.index_put_((lines,), numbers)

    def send_drafts(self, seq_ids: Iterable[int]) -> None:
        """Let these sequences, which no step under way has, verify the drafts that the host has for them."""
        state, cells, counts = self.state, [], []
        for seq_id in seq_ids:
            line = self._line_of.get(seq_id)
            sequence = None if line is None else self.lines[line]
            if line is not None and sequence is not None:
                cells += [(line, place, id_) for place, id_ in enumerate(sequence.drafts)]
                counts.append((line, len(sequence.drafts)))
        if counts:
            lines, places, ids = _columns(cells, state.drafts.device)
            state.drafts.index_put_((lines, places), ids)
            lines, numbers = _columns(counts, state.num_drafts.device)
            state.num_drafts.index_put_((lines,), numbers)

    def send_asking(self) -> tuple[list[int], int]:
        """Let `asking` name the lines that want log-probabilities; these, and most alternatives that one wants."""
        asks = [(line, one.num_logprobs) for line, one in enumerate(self.lines) if one is not None]
        lines = [line for line, num_top in asks if num_top is not None]
        if lines and lines != self._asking:
            send(self.asking, torch.tensor(lines + [0] * (len(self.lines) - len(lines))))
            self._asking = lines
        return lines, max((num_top for _, num_top in asks if num_top is not None), default=0)

    def close_gaps(self, num_lines: int) -> None:
        """Let sequences behind the first `num_lines` lines, of which enough are free, move there."""
        for line in range(num_lines, len(self.lines)):
            sequence = self.lines[line]
            if sequence is not None:
                to = self.lines.index(None)
                self.state.move(line, to)
                if self.synthetic_tensors is not None:
                    self.synthetic_tensors.move(line, to)
                self.lines[line], self.lines[to] = None, sequence
                self._line_of[sequence.seq_id] = to

    def remove(self, seq_id: int) -> None:
        """The sequence leaves its line. Steps that were launched with it may still be under way."""
        line = self._line_of.pop(seq_id)
        self._sent_pages.pop(seq_id)
        self.lines[line] = None
        self.state.clear(line)

    def give_back(self) -> list[RunningSequence]:
        """All sequences leave, to be stepped on the host. No step that was launched with them is unread."""
        found = list(self)
        for sequence in found:
            self.remove(sequence.seq_id)
            if sequence.sampling_params.penalises:
                sequence.counts = self._counts_of(sequence)
        return found

    def _counts_of(self, sequence: RunningSequence) -> TokenCounts | None:
        """Its counts; None where they cannot be had now. Each of its steps counts by itself then, and fails alone."""
        try:
            return TokenCounts(sequence.ids, sequence.num_prompt, self._facts.vocab_size, self._facts.device)
        except Exception as error:
            _log.warning("the ids of sequence %d cannot be counted (%s)", sequence.seq_id, error)
            return None


def few_stages(stages: Stages) -> Stages:
    """One of five sets that contains these stages: a law passes the others unchanged, bit by bit."""
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


def _columns(rows: Run[tuple[int, ...]], device: torch.device) -> tuple[Tensor, ...]:
    columns = torch.tensor(rows, dtype=torch.int64).T.contiguous()
    if device.type == "cuda":
        columns = columns.pin_memory()
    return columns.to(device, non_blocking=True).unbind()
