"""The cells of the exactness matrix: every condition under which the text must not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from space_model.geometry.draft_layout import DraftLayout
from space_proto import worker_pb2 as pb

MAX_TOKENS = 24

PROCESSORS = (
    "none",  # the same as ignore_eos: no EOS is known
    "eos",
    "stop_id",
    "min_tokens",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "presence",
    "frequency",
    "repetition",
    "logit_bias",
    "bad_words",
    "allowed_ids",
    "all",
)
FEW_IDS = "few_ids"
"""Beside PROCESSORS: three ids are allowed, so that the text repeats itself, exactly and nearly."""
TEMPERATURES = (0.0, 0.8, 1.0)
LAYOUTS = ("k0", "k1", "k2", "k3", "k4", "k5", "pruned", "stale", "mixed")
DRAFTS = ("own", "oracle", "half", "wrong")
SOURCES = ("lookup", "predicted", "half predicted", "wrongly predicted", "half predicted and lookup")
"""Drafts from beside the masks, as a worker has them that serves."""

AXES: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16"),
    "layout": LAYOUTS,
    "temperature": TEMPERATURES,
    "processor": PROCESSORS,
    "company": ("alone", "batch"),
    "prefill": ("whole", "chunked"),
    "prefix": ("miss", "hit"),
    "life": ("undisturbed", "preempted", "restarted"),
    "head": (True, False),
    "context": ("short", "long"),
    "stale": ("left", "nan"),
}
"""Without the model: the models a run has are a matter of where it runs."""


@dataclass(frozen=True)
class Cell:
    """One condition. It is run once with each kind of drafts."""

    dtype: str
    layout: str
    temperature: float
    processor: str
    company: str  # alone, or in a batch of unequal sequences that join and leave
    prefill: str  # whole, or in chunks of 5 rows
    prefix: str  # miss, or hit: pages computed by an earlier sequence
    life: str  # undisturbed; released and admitted again on other pages; the worker replaced by a new one
    head: bool  # drafts rescored by the checkpoint's draft head
    context: str  # short; long: seat 0's text crosses from one key block of attention into the next
    stale: str  # slots beyond each cached length, and pages nobody holds: left as they are; NaN after every step

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))


def layout_for(name: str, connection: int) -> DraftLayout:
    """The layout of the sequence in seat 0, 1, 2, … of the batch."""
    if name == "pruned":
        return DraftLayout.pruned(4, 5, 9, (1.0, 0.7, 0.5, 0.3, 0.2, 0.1))
    if name == "stale":  # no group but the first: after a accepted drafts its masks from a+1 on stand in
        return DraftLayout(4, (5, 0, 0, 0, 0))
    if name == "mixed":
        mixed = (
            DraftLayout.full(3, 5),
            DraftLayout.plain(),
            DraftLayout(5, (5, 0, 2, 0, 1, 0)),
            DraftLayout.full(1, 1),
        )
        return mixed[connection % len(mixed)]
    k = int(name.removeprefix("k"))
    return DraftLayout.full(k, k) if k else DraftLayout.plain()


def sampling_for(
    temperature: float, processor: str, base: Sequence[int], live_ids: Sequence[int], seed: int
) -> pb.Sampling:
    """One processor in turn, with values that bite: `base` is the text of the same seed without any.

    `live_ids`: ids that may be sampled at all.
    """
    sampling_params = pb.Sampling(seed=seed, temperature=temperature)
    everything = processor == "all"
    if processor == FEW_IDS:
        sampling_params.allowed_ids.extend(live_ids[:3])
    if everything or processor == "top_k":
        sampling_params.top_k = 12
    if everything or processor == "top_p":
        sampling_params.top_p = 0.7
    if everything or processor == "min_p":
        sampling_params.min_p = 0.1
    if everything or processor == "typical_p":
        sampling_params.typical_p = 0.6
    if everything or processor == "presence":
        sampling_params.presence_penalty = 1.5
    if everything or processor == "frequency":
        sampling_params.frequency_penalty = 0.7
    if everything or processor == "repetition":
        sampling_params.repetition_penalty = 1.4
    if everything or processor == "logit_bias":
        sampling_params.logit_bias[base[0]] = -2.5
        sampling_params.logit_bias[live_ids[7]] = 2.0
    if everything or processor == "bad_words":
        # Half the pairs of the text's own ids: bans that bite at many places of a chain.
        own = list(dict.fromkeys(base))
        pairs = [(head, last) for i, head in enumerate(own) for j, last in enumerate(own) if (i + j) % 2]
        sampling_params.bad_words.extend(pb.IdRun(ids=pair) for pair in pairs)
        sampling_params.bad_words.extend([pb.IdRun(ids=base[5:8]), pb.IdRun(ids=[live_ids[3]])])
    if everything or processor == "allowed_ids":
        sampling_params.allowed_ids.extend(sorted({*live_ids[::2], *live_ids[7:10]}))
    if everything or processor == "min_tokens":
        sampling_params.min_tokens = 9
    return sampling_params


def limits_for(processor: str, base: Sequence[int], max_tokens: int = MAX_TOKENS) -> pb.Limits:
    """When the text ends: at an id that the unprocessed text has, so that a run is cut inside."""
    limits = pb.Limits(max_tokens=max_tokens)
    if processor == "eos":
        limits.eos_ids.append(_late(base, 14))
    if processor == "stop_id":
        limits.stop_ids.append(_late(base, 11))
    if processor in ("min_tokens", "all"):  # they would end the text early, and do so as soon as they may
        limits.eos_ids.extend(dict.fromkeys(base[2::2]))
        limits.stop_ids.extend(dict.fromkeys(base[3::2]))
    return limits


def _late(base: Sequence[int], most: int) -> int:
    """The id whose first place in `base` is the latest below `most`."""
    return max(base[:most], key=base.index)


def params_of_index(cell: Cell, connection: int) -> tuple[float, str]:
    """Seat 0 has the cell's law; the others in the batch have laws of their own, so that rows must not mix."""
    if connection == 0 or cell.processor == FEW_IDS:
        return cell.temperature, cell.processor
    at = PROCESSORS.index(cell.processor)
    return TEMPERATURES[(at + connection) % len(TEMPERATURES)], PROCESSORS[(at + 4 * connection) % len(PROCESSORS)]
