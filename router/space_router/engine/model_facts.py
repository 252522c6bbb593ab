"""A worker's model and cache, as its Hello describes them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from space_proto import worker_pb2


@dataclass(frozen=True)
class WorkerModelFacts:
    """The fields of a worker's Hello that the router uses."""

    model_name: str
    model_hash: str
    tokenizer_hash: str  # "" if the worker has no tokenizer.json
    incarnation: str  # unique to each start of the process
    vocab_size: int
    window: int  # maximum positions of one sequence, prompt and output
    block_size: int  # slots per block
    num_blocks: int
    max_sequences: int  # maximum concurrent sequences
    max_draft_length: int
    num_masks: int  # 0: a plain checkpoint
    mask_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    has_draft_head: bool
    dtype: str
    device: str
    attention: str
    adapters: tuple[str, ...] = ()  # names of gated adapters that requests can ask for
    takes_grammars: bool = False  # the worker knows the bytes of its token ids
    synthetic_acceptance: tuple[float, ...] = ()  # acceptance probabilities that are simulated for measurements
    step_cost_source: str = ""  # file, measured or learned; "": the worker does not say
    step_cost_reason: str = ""  # why they are learned

    @property
    def num_slots(self) -> int:
        """Slots of all pages together."""
        return self.block_size * self.num_blocks

    @property
    def text_depends_on(self) -> tuple[str, ...]:
        """Properties that two workers must share for one to continue the other's requests with the same text."""
        return (self.model_hash, self.dtype, self.device.partition(":")[0])

    @property
    def fingerprint(self) -> str:
        """The `system_fingerprint` of responses: a short hash of `text_depends_on`."""
        return "fp_" + hashlib.sha256("\n".join(self.text_depends_on).encode()).hexdigest()[:12]

    def difference(self, before: WorkerModelFacts) -> str | None:
        """Return why this worker cannot continue the requests of `before`, or None if it can."""
        if self.text_depends_on != before.text_depends_on:
            theirs, ours = (" ".join(one.text_depends_on) for one in (self, before))
            return f"A worker has {theirs}, the one before it {ours}. Give all the same model and dtype."
        if set(self.adapters) != set(before.adapters):
            theirs, ours = (", ".join(one.adapters) or "none" for one in (self, before))
            return f"A worker has the adapters {theirs}, the one before it {ours}. Give all the same."
        return None

    @classmethod
    def from_hello(cls, hello: worker_pb2.Hello) -> WorkerModelFacts:
        values = {name: getattr(hello, name) for name in cls.__dataclass_fields__}
        lists = {name: tuple(values[name]) for name in ("mask_ids", "eos_ids", "synthetic_acceptance")}
        return cls(**{**values, **lists, "adapters": tuple(adapter.name for adapter in hello.adapters)})
