"""The texts that a worker's encoder has to encode: in batches between the steps of sequences, bounded in time."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from space_model.encoder.text_encoder import EncoderFacts, TextIds
from space_model.free_memory import is_out_of_memory
from space_proto import worker_pb2 as pb
from torch import Tensor

from space_server.machine.memory import give_back_unused, is_lost
from space_server.worker_messages import failure_message, vector_bytes

MOST_TEXTS = 64  # of one batch; more are not faster on a CPU
MOST_IDS = 16384  # of one batch, padding included
BESIDE_SECONDS = 0.03  # a batch while sequences run: their tokens wait for it
ALONE_SECONDS = 0.25  # a batch while none runs: a sequence that is admitted meanwhile waits for it
FIRST_IDS = 256  # of the first batch, whose speed is not known
MEMORY = 0.7  # weight of what is known of the speed beside a new measurement

_log = logging.getLogger(__name__)


class EncoderModel(Protocol):
    """An encoder. `space_model.encoder.text_encoder.TextEncoder` implements it."""

    @property
    def facts(self) -> EncoderFacts: ...

    @property
    def device(self) -> torch.device: ...

    def encode(self, texts: Sequence[TextIds]) -> Tensor:
        """Return [texts, num_values] float32 on the CPU."""


class _Waiting(NamedTuple):
    """A text that was not encoded yet."""

    encode_id: int
    number: int  # among the inputs of its Encode
    text: TextIds


class Encodings:
    """Texts wait in the order of their arrival. A batch takes from their front texts of about one length."""

    def __init__(self, encoder: EncoderModel, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.encoder = encoder
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._reports: list[pb.Encoded] = []  # without a batch: refused, or handed back
        self._seconds_per_id = 0.0  # padding included; 0: not known
        self._next_beside = 0.0  # when a batch may go beside sequences again

    @property
    def facts(self) -> EncoderFacts:
        """Sizes of the encoder."""
        return self.encoder.facts

    @property
    def has_work(self) -> bool:
        """Whether texts wait, or answers are to be reported."""
        return bool(self._waiting or self._reports)

    def clear(self) -> None:
        """Forget every text: the router is gone."""
        self._waiting.clear()
        self._reports = []

    def add(self, command: pb.Encode, *, draining: bool = False) -> None:
        """Take the texts of an Encode, or hand them back where the worker drains."""
        facts, encode_id = self.facts, command.encode_id
        if draining:
            self._reports.append(pb.Encoded(encode_id=encode_id, returned=True))
            return
        texts = [TextIds(list(one.ids), list(one.type_ids)) for one in command.inputs]
        for text in texts:
            if (why := self._why_refused(text, facts)) is not None:
                self._reports.append(pb.Encoded(encode_id=encode_id, error=why))
                return
        self._waiting.extend(_Waiting(encode_id, number, text) for number, text in enumerate(texts))

    @staticmethod
    def _why_refused(text: TextIds, facts: EncoderFacts) -> str | None:
        if not 1 <= len(text.ids) <= facts.window:
            return f"A text has {len(text.ids)} ids; 1 to {facts.window} can be encoded."
        if (most := max(text.ids)) >= facts.vocab_size:
            return f"Id {most} is outside the encoder's vocabulary of {facts.vocab_size}."
        if text.type_ids and (len(text.type_ids) != len(text.ids) or max(text.type_ids) >= max(1, facts.num_types)):
            return f"A text of {len(text.ids)} ids has {len(text.type_ids)} type ids, below {facts.num_types}."
        return None

    def stop(self, encode_id: int) -> None:
        """Forget the texts of an Encode that wait."""
        self._waiting = deque(one for one in self._waiting if one.encode_id != encode_id)
        self._reports = [one for one in self._reports if one.encode_id != encode_id]

    def step(self, *, beside: bool) -> list[pb.Encoded]:
        """Encode one batch, if it is time for one, and return what is to be reported.

        `beside`: sequences run, so a batch is short, and the next one comes after their steps had as long. Raises if
        the device is lost.
        """
        reports, self._reports = self._reports, []
        if not self._waiting or (beside and self._clock() < self._next_beside):
            return reports
        batch = self._take(BESIDE_SECONDS if beside else ALONE_SECONDS)
        begun = self._clock()
        reports += self._encoded(batch)
        ended = self._clock()
        num_ids = len(batch) * max(len(one.text.ids) for one in batch)
        known, measured = self._seconds_per_id, (ended - begun) / num_ids
        self._seconds_per_id = MEMORY * known + (1 - MEMORY) * measured if known else measured
        self._next_beside = ended + (ended - begun)
        return reports

    def _take(self, seconds: float) -> list[_Waiting]:
        """Take the texts of a batch that lasts about `seconds`; at least one.

        Of the texts at the front the batch has those whose length is nearest to the first one's, so that little of it
        is padding and none waits for long.
        """
        most = min(MOST_IDS, int(seconds / self._seconds_per_id)) if self._seconds_per_id else FIRST_IDS
        front = [self._waiting[place] for place in range(min(len(self._waiting), 4 * MOST_TEXTS))]
        first = len(front[0].text.ids)
        order = sorted(range(len(front)), key=lambda place: (abs(len(front[place].text.ids) - first), place))
        taken = {order[0]}
        longest = first
        for place in order[1:MOST_TEXTS]:
            longest = max(longest, len(front[place].text.ids))
            if (len(taken) + 1) * longest > most:
                break
            taken.add(place)
        rest = [one for place, one in enumerate(front) if place not in taken]
        for _ in front:
            self._waiting.popleft()
        self._waiting.extendleft(reversed(rest))
        return [front[place] for place in sorted(taken)]

    def _encoded(self, batch: Sequence[_Waiting]) -> Iterable[pb.Encoded]:
        """Encode a batch; one that fails is encoded text by text, so that only its cause fails."""
        try:
            vectors = self.encoder.encode([one.text for one in batch])
        except Exception as error:
            if not (wants_memory := is_out_of_memory(error)) and is_lost(self.encoder.device):
                raise
            _log.exception("a batch of %d texts could not be encoded", len(batch))
            message = failure_message("The text could not be encoded", error)
        else:
            found: dict[int, pb.Encoded] = {}
            for one, vector in zip(batch, vectors, strict=True):
                encoded = found.setdefault(one.encode_id, pb.Encoded(encode_id=one.encode_id))
                encoded.numbers.append(one.number)
                encoded.values.add(values=vector_bytes(vector))
            return found.values()
        if wants_memory:
            give_back_unused()
        if len(batch) > 1:
            return [report for one in batch for report in self._encoded([one])]
        self.stop(batch[0].encode_id)
        return [pb.Encoded(encode_id=batch[0].encode_id, error=message)]
