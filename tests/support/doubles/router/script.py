"""What a scripted worker emits: a made-up language, and which drafts are accepted."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from space_proto import worker_pb2


class Language(Protocol):
    """Says the next id."""

    def next_id(self, ids: Sequence[int], num_prompt: int, sampling: worker_pb2.Sampling) -> int:
        """The id after `ids`, of which `num_prompt` are prompt."""


@dataclass(frozen=True)
class HashLanguage:
    """The next id is a hash of the prefix and, above temperature 0, of seed and choice."""

    vocab: Sequence[int]  # ids that may be said
    eos_id: int | None = None
    eos_period: int = 0  # about one id in so many is EOS; 0: never

    def next_id(self, ids: Sequence[int], num_prompt: int, sampling: worker_pb2.Sampling) -> int:
        key = b"%d,%d" % (sampling.seed, sampling.choice) if sampling.temperature > 0 else b""
        digest = hashlib.blake2b(array("I", ids).tobytes(), digest_size=16, key=key).digest()
        first, second = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        may_end = self.eos_id is not None and len(ids) - num_prompt >= sampling.min_tokens
        if may_end and self.eos_period and second % self.eos_period == 0 and self.eos_id is not None:
            return self.eos_id
        choice = sampling.allowed_ids or self.vocab
        return choice[first % len(choice)]


@dataclass(frozen=True)
class FixedReply:
    """The same answer to everything, over and over where it is too short."""

    reply: Sequence[int]

    def next_id(self, ids: Sequence[int], num_prompt: int, sampling: worker_pb2.Sampling) -> int:
        return self.reply[(len(ids) - num_prompt) % len(self.reply)]


def made_up_vector(ids: Sequence[int], size: int = 8) -> bytes:
    """A vector that depends on all of these ids, as a worker reports it."""
    digest = hashlib.blake2b(array("I", ids).tobytes(), digest_size=size).digest()
    return array("f", [byte / 128.0 - 1.0 for byte in digest]).tobytes()


Accepts: TypeAlias = Callable[[int, int, int], int]
"""(seq_id, number of the decode step in its sequence, live drafts d) -> accepted drafts, 0..d."""

Garbage: TypeAlias = Literal["report_no", "unknown_sequence", "too_many_tokens", "computed", "vocabulary"]
"""Ways in which a report can contradict the contract."""


def never(seq_id: int, step: int, num_drafts: int) -> int:
    return 0


def always(seq_id: int, step: int, num_drafts: int) -> int:
    return num_drafts


def half(seq_id: int, step: int, num_drafts: int) -> int:
    return num_drafts if step % 2 else 0


def sometimes(seq_id: int, step: int, num_drafts: int) -> int:
    """Any number, by a hash."""
    return hashlib.blake2b(b"%d,%d" % (seq_id, step), digest_size=1).digest()[0] % (num_drafts + 1)


def listed(lengths: Sequence[int]) -> Accepts:
    """These accepted lengths in turn, over and over, cut to the live drafts."""

    def accepts(seq_id: int, step: int, num_drafts: int) -> int:
        return min(lengths[step % len(lengths)], num_drafts)

    return accepts


@dataclass
class Script:
    """Who the worker says it is, and how it behaves. Behaviour may be changed while it runs."""

    language: Language = field(default_factory=lambda: HashLanguage(range(4, 250)))
    accepts: Accepts = sometimes
    draft_length: int = 3  # drafts it lays out where slots and limits allow
    num_masks: int | None = None  # None: as many as `draft_length`
    lays_out_masks: bool = True

    vocab_size: int = 256
    block_size: int = 4
    num_blocks: int = 64
    num_host_blocks: int = 0  # of host memory
    window: int = 512
    rope_switch: int = 0  # ids beyond which a sequence has other rotary angles; 0: all have the same
    max_sequences: int = 64
    mask_ids: tuple[int, ...] = (3,)
    adapters: tuple[str, ...] = ()  # gated adapters; they change nothing
    loras: tuple[tuple[str, str], ...] = ()  # names and hashes of LoRAs at start
    lora_error: str = ""  # why a LoRA cannot be loaded; "": it can
    takes_grammars: bool = True  # and follows none of them
    eos_ids: tuple[int, ...] = (2,)
    model_name: str = "scripted"
    model_hash: str = "scripted"
    tokenizer_hash: str = ""
    protocol_major: int = 1
    instruction_set: str = "made up"
    num_state_slots: int = 0  # for recurrent states that are kept
    state_bytes_per_sequence: int = 0  # of recurrent layers, which share no prefixes
    step_cost_source: str = ""  # what Hello says of them
    step_cost_reason: str = ""

    encoder: worker_pb2.Encoder | None = None  # beside the model; None: there is none
    encoder_texts: int = 4  # that the encoder encodes at each step

    step_seconds: float = 0.0  # sleep before each step
    plain_step_seconds: float = 0.001  # what it reports as the cost of plain decoding
    release_steps: int = 1  # steps that still write to a sequence's pages after its Release
    heartbeat_seconds: float = 1.0
    failing_id: int | None = None  # a sequence whose prompt holds this id fails alone
    deadly_id: int | None = None  # a sequence whose prompt holds this id kills the worker that steps it ...
    deadly_steps: int = 1  # ... so many times

    refuse: str | None = None  # answer Start with this refusal
    die_after_steps: int | None = None  # end every stream, and come back as a new incarnation, once
    hang_after_steps: int | None = None  # say nothing more, heartbeats included, once
    stall_after_steps: int | None = None  # only the heart beats from then on, while this is set
    garbage: Garbage | None = None  # contradict the contract in the next step, once
