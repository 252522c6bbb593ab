"""The exactness matrix: SPACE and plain decoding give the same text, bit by bit, under every condition of a cell."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from pairwise import covering_cases
from space_common.worker.client import ClientSequence, SequenceRequest, WorkerClient
from space_eval.acceptance.equivalence import DRAFTS, RIGHT, Future, ScriptedDrafts, first_difference
from space_eval.acceptance.equivalence import describe_difference as describe
from space_kernels.fp8 import FORMAT, NAN, as_kept
from space_kernels.paging.attention_plan import KEY_BLOCK
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch
from space_model.networks.network import USUAL_ROOM, PagedKV, StateRoom
from space_model.networks.sampled_step import SampledStep
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.drafts import DraftSources
from space_server.speculation.controller import DraftLimits, FixedLayout
from space_server.worker import Worker
from torch import Tensor


def without_draft_head(model: SpaceModel) -> SpaceModel:
    """The same weights, and drafts as the masks alone make them."""
    plain = copy.copy(model)
    headless = tuple(replace(adapter, has_draft_head=False) for adapter in model.facts.adapters)
    plain.facts = replace(model.facts, has_draft_head=False, adapters=headless)
    plain.drafting = replace(model.drafting.each(lambda one: replace(one, draft_head=None)), draft_head=None)
    return plain


class WatchedModel:
    """A SpaceModel behind a counter."""

    def __init__(self, model: SpaceModel) -> None:
        self._model = model
        self.num_forwards = 0
        self.batches: list[ForwardBatch] = []  # of the passes since this was last emptied
        self.kv: PagedKV | None = None  # the pages of the worker that was built last

    def allocate_kv(self, num_blocks: int, block_size: int, room: StateRoom = USUAL_ROOM) -> PagedKV:
        self.kv = self._model.allocate_kv(num_blocks, block_size, room)
        return self.kv

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        self.num_forwards += 1
        self.batches.append(batch)
        return self._model.forward(batch, kv)

    def sampled_step(self, kv: PagedKV, banned_ids: Tensor) -> CountedStep | None:
        step = self._model.sampled_step(kv, banned_ids)
        return None if step is None else CountedStep(step, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class CountedStep:
    """Steps in one call, each a forward pass of the model."""

    def __init__(self, step: SampledStep, model: WatchedModel) -> None:
        self._step, self._model = step, model

    def run(self) -> list[int] | None:
        self._model.num_forwards += 1
        return self._step.run()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def fill_with_nan(kv: PagedKV, kept: Iterable[tuple[int, int]]) -> None:
    """NaN into every slot but the `kept` (block, offset)."""
    stale = np.ones((kv.num_blocks, kv.block_size), dtype=np.bool_)
    if slots := list(kept):
        stale[tuple(np.array(slots).T)] = False
    where = torch.from_numpy(stale)[:, None, :, None]
    for tensor in [*kv.keys, *kv.values]:
        nothing = NAN if tensor.dtype is FORMAT else torch.nan
        as_kept(tensor).masked_fill_(where.to(tensor.device), nothing)


MAX_TOKENS = 16

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
FEW_IDS = "few_ids"  # beside PROCESSORS: three ids are allowed, so that the text repeats itself, exactly and nearly
TEMPERATURES = (0.0, 0.8, 1.0)
LAYOUTS = ("k0", "k1", "k2", "k3", "k4", "k5", "pruned", "stale", "mixed")
FORCED = (3, 0, 5, 1)
"""Forced drafts of the requests of seats 0, 1, 2, 3 with the layout "forced", where the controller would draft none."""
SOURCES = ("lookup", "predicted", "half predicted", "wrongly predicted", "half predicted and lookup")
"""Drafts from beside the masks, as a worker has them that serves."""

AXES: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16"), "layout": LAYOUTS, "temperature": TEMPERATURES, "processor": PROCESSORS,
    "company": ("alone", "batch"), "prefill": ("whole", "chunked"), "prefix": ("miss", "hit"),
    "life": ("undisturbed", "preempted", "restarted"), "head": (True, False), "context": ("short", "long"),
    "stale": ("left", "nan"),
}  # fmt: skip
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


HEAD_CELLS = [
    Cell("float32", "head5", 0.0, "none", "alone", "whole", "miss", "preempted", True, "short", "nan"),
    Cell("float32", "head3", 0.8, "repetition", "batch", "chunked", "hit", "undisturbed", True, "short", "left"),
    Cell("float32", "head2", 0.8, "top_p", "alone", "whole", "hit", "restarted", True, "long", "left"),
    Cell("float32", "head1", 1.0, "eos", "batch", "whole", "miss", "preempted", True, "short", "nan"),
    Cell("bfloat16", "head5", 0.0, "none", "batch", "chunked", "hit", "restarted", True, "short", "nan"),
    Cell("bfloat16", "head4", 0.8, "all", "batch", "whole", "miss", "undisturbed", True, "long", "left"),
    Cell("bfloat16", "heads and masks", 0.8, "none", "batch", "chunked", "hit", "preempted", True, "short", "nan"),
]
"""Of drafts that take no mask rows, by the base's own masks once beside them."""


def layout_for(name: str, connection: int) -> DraftLayout:
    """The layout of the sequence in seat 0, 1, 2, … of the batch."""
    if name == "pruned":
        return DraftLayout.pruned(4, 5, 9, (1.0, 0.7, 0.5, 0.3, 0.2, 0.1))
    if name == "stale":  # no group but the first: after a accepted drafts its masks from a+1 on stand in
        return DraftLayout(4, (5, 0, 0, 0, 0))
    if name == "mixed":
        mixed = (
            DraftLayout.full(3, 5), DraftLayout.plain(), DraftLayout(5, (5, 0, 2, 0, 1, 0)), DraftLayout.full(1, 1),
        )  # fmt: skip
        return mixed[connection % len(mixed)]
    if name == "heads and masks":
        mixed = DraftLayout.by_head(3, 5), DraftLayout.full(3, 3), DraftLayout.by_head(5, 5), DraftLayout.plain()
        return mixed[connection % len(mixed)]
    if name.startswith("head"):
        k = int(name.removeprefix("head"))
        return DraftLayout.by_head(k, k)
    if name.startswith("turns"):
        return DraftLayout.turns(int(name.removeprefix("turns")))
    k = FORCED[connection] if name == "forced" else int(name.removeprefix("k"))
    return DraftLayout.full(k, k) if k else DraftLayout.plain()


def sampling_for(
    temperature: float, processor: str, base: Sequence[int], live_ids: Sequence[int], seed: int
) -> pb.Sampling:
    """One processor in turn, with values that bite: `base` is the text of the same seed without any.

    `live_ids`: ids that may be sampled at all.
    """
    sampling = pb.Sampling(seed=seed, temperature=temperature)
    everything = processor == "all"
    if processor == FEW_IDS:
        sampling.allowed_ids.extend(live_ids[:3])
    if everything or processor == "top_k":
        sampling.top_k = 12
    if everything or processor == "top_p":
        sampling.top_p = 0.7
    if everything or processor == "min_p":
        sampling.min_p = 0.1
    if everything or processor == "typical_p":
        sampling.typical_p = 0.6
    if everything or processor == "presence":
        sampling.presence_penalty = 1.5
    if everything or processor == "frequency":
        sampling.frequency_penalty = 0.7
    if everything or processor == "repetition":
        sampling.repetition_penalty = 1.4
    if everything or processor == "logit_bias":
        sampling.logit_bias[base[0]] = -2.5
        sampling.logit_bias[live_ids[7]] = 2.0
    if everything or processor == "bad_words":
        # Half the pairs of the text's own ids: bans that bite at many places of a chain.
        own = list(dict.fromkeys(base))
        pairs = [(head, last) for i, head in enumerate(own) for j, last in enumerate(own) if (i + j) % 2]
        sampling.bad_words.extend(pb.IdRun(ids=pair) for pair in pairs)
        sampling.bad_words.extend([pb.IdRun(ids=base[5:8]), pb.IdRun(ids=[live_ids[3]])])
    if everything or processor == "allowed_ids":
        sampling.allowed_ids.extend(sorted({*live_ids[::2], *live_ids[7:10]}))
    ends_at = base.index(_late(base, ENDS[processor])) if processor in ENDS else MAX_TOKENS
    if everything or processor == "min_tokens" or ends_at < TURNING_POINT:  # a loop: too short for a chain of drafts
        sampling.min_tokens = 9
    return sampling


ENDS = {"eos": 14, "stop_id": 11}
"""Processors that end the text at an id of its own, and the place before which that id comes first."""


def limits_for(processor: str, base: Sequence[int], live_ids: Sequence[int], max_tokens: int = MAX_TOKENS) -> pb.Limits:
    """When the text ends: at an id that the unprocessed text has, so that a run is cut inside."""
    limits = pb.Limits(max_tokens=max_tokens)
    if processor == "eos":
        limits.eos_ids.append(_late(base, ENDS["eos"]))
    if processor == "stop_id":
        limits.stop_ids.append(_late(base, ENDS["stop_id"]))
    if processor in ("min_tokens", "all"):  # they would end the text early, and do so as soon as they may
        limits.eos_ids.extend(dict.fromkeys([*base[2::2], *live_ids[1::2]]))
        limits.stop_ids.extend(dict.fromkeys(base[3::2]))
    return limits


def _late(base: Sequence[int], most: int) -> int:
    """The id whose first place in `base` is the latest below `most`."""
    return max(base[:most], key=base.index)


def sampling_of_seat(cell: Cell, connection: int) -> tuple[float, str]:
    """Temperature and processor: the cell's for seat 0, others for the rest of the batch, so that rows must not mix."""
    if connection == 0 or cell.processor == FEW_IDS:
        return cell.temperature, cell.processor
    at = PROCESSORS.index(cell.processor)
    return TEMPERATURES[(at + connection) % len(TEMPERATURES)], PROCESSORS[(at + 4 * connection) % len(PROCESSORS)]


BLOCK_SIZE = 4
NUM_BLOCKS = 200
CHUNK_ROWS = {"short": 5, "long": 67}
PROMPT_LENGTHS = (9, 22, 3, 13)  # of seats 0, 1, 2, 3
LONG_PROMPT = KEY_BLOCK - 6
JOINS_AT = (0, 1, 3, 6)  # step at which each seat's sequence comes
MAX_TOKENS_OF_SEAT = (MAX_TOKENS, 10, 14, MAX_TOKENS)
LEAVES_AFTER = {3: 4}  # seat 3 is released by its client after so many ids
MOST_STEPS = 500
TURNING_POINT = 5  # ids after which seat 0 is preempted, or the worker restarted


class Mismatch(AssertionError):
    """Text that is not plain decoding's; or a cell that proved nothing."""


@dataclass
class Subject:
    """A model under proof, and its plain texts as they become known."""

    name: str
    model: SpaceModel
    seed: int = 0
    adapters: Sequence[str] = ("",)  # that the seats draft by, in turn
    loras: Sequence[str] = ("",)  # hashes of LoRAs that the seats have, in turn; plain decoding has the same
    base: SpaceModel | None = None  # what plain decoding runs on, where that is another: the weights without adapters
    _plain: dict[tuple[int, float, str, bool], ClientSequence] = field(default_factory=dict)

    @property
    def live_ids(self) -> list[int]:
        banned = {*self.model.facts.mask_ids, *self.model.facts.eos_ids}
        return [id_ for id_ in range(self.model.facts.vocab_size) if id_ not in banned]

    def prompt(self, connection: int, *, long: bool) -> tuple[int, ...]:
        """Arbitrary ids, the same each time."""
        rng = np.random.default_rng((self.seed, connection))
        return tuple(int(id_) for id_ in rng.choice(self.live_ids, LONG_PROMPT if long else PROMPT_LENGTHS[connection]))

    def request(self, connection: int, temperature: float, processor: str, *, long: bool = False) -> SequenceRequest:
        """The request of a seat. Seats 0 and 2 ask for log-probabilities."""
        seed = (1 << 64) - 1 - connection
        max_tokens = MAX_TOKENS_OF_SEAT[connection]
        if processor == "none":
            sampling, limits = pb.Sampling(seed=seed, temperature=temperature), pb.Limits(max_tokens=max_tokens)
        else:
            base = self.plain(connection, temperature, "none", long=long).tokens
            sampling = sampling_for(temperature, processor, base, self.live_ids, seed)
            limits = limits_for(processor, base, self.live_ids, max_tokens)
        adapter = self.adapters[connection % len(self.adapters)]
        prompt = self.prompt(connection, long=long)
        return SequenceRequest(
            prompt,
            sampling,
            limits,
            want_logprobs=connection % 2 == 0,
            num_logprobs=4,
            adapter=adapter,
            lora=self.loras[connection % len(self.loras)],
        )

    def plain(self, connection: int, temperature: float, processor: str, *, long: bool = False) -> ClientSequence:
        """Plain decoding: alone, undisturbed, the prompt whole, no drafts, no masks."""
        key = (connection, temperature, processor, long)
        if key not in self._plain:
            record = ClientSequence(replace(self.request(connection, temperature, processor, long=long), adapter=""))
            worker = make_worker(without_draft_head(self.base or self.model), FixedLayout.full(0), None)
            client = WorkerClient(worker, automatic=True)
            client.submit(record)
            client.run()
            self._plain[key] = record
        return self._plain[key]


Subjects = Callable[[str, str], Subject]
"""(name, dtype) -> a model under proof."""


def make_worker(
    model: Any,  # SpaceModel or WatchedModel
    controller: FixedLayout,
    drafts: ScriptedDrafts | None,
    *,
    num_blocks: int = NUM_BLOCKS,
    block_size: int = BLOCK_SIZE,
    sources: DraftSources | None = None,
) -> Worker:
    return Worker(
        model,
        num_blocks=num_blocks,
        block_size=block_size,
        controller=controller,
        draft_source=drafts,
        sources=sources,
        loras=model.loras,
        num_state_slots=1,
    )


FAMILIES = ("llama", "qwen3", "gemma2", "gemma3")


def cover(strength: int, *, model: Sequence[str] = FAMILIES, **narrowed: tuple[object, ...]) -> list[tuple[str, Cell]]:
    """Return models and cells such that every `strength` conditions meet in one; `narrowed`: axes with fewer values."""
    cases = covering_cases({"model": tuple(model), **AXES, **narrowed}, strength=strength)
    return [(case.pop("model"), Cell(**case)) for case in cases]


def cell_name(value: object) -> str | None:
    """Return the id of a cell as a test's parameter, None for other parameters."""
    return str(value) if isinstance(value, Cell) else None


def check_cell(subject: Subject, cell: Cell) -> None:
    """Run a cell with each kind of drafts. Raises Mismatch at the first difference, or if it proved nothing."""
    nothing_drafted = not any(layout_for(cell.layout, seat).num_drafts for seat in range(len(PROMPT_LENGTHS)))
    kinds = DRAFTS[:2] if nothing_drafted else DRAFTS  # scripted drafts are then all the same: none
    runs = {drafts: Run(subject, cell, drafts).finished() for drafts in kinds}
    check_coverage(cell, runs)


def accepted_lengths(subject: Subject, cell: Cell, drafts: str) -> set[tuple[int, int]]:
    """Run a cell with these drafts: the drafts laid out and accepted, of each report of each sequence."""
    reports = [report for record in Run(subject, cell, drafts).finished() for report in record.reports]
    return {(report.num_drafted, report.num_accepted) for report in reports}


BETWEEN = Cell("float32", "head3", 0.8, FEW_IDS, "batch", "whole", "miss", "restarted", True, "short", "left")
"""A cell where lookup finds drafts between those of a draft network."""


def check_sources(subject: Subject, cell: Cell) -> dict[str, list[tuple[int, int]]]:
    """Run a cell with drafts from each source beside the masks: its verdicts. Raises Mismatch as `check_cell` does."""
    runs = {drafts: Run(subject, cell, drafts).finished() for drafts in SOURCES}
    verifications = {drafts: [v for r in records for v in _by_sources(r)] for drafts, records in runs.items()}
    k = max(layout_for(cell.layout, connection).num_drafts for connection in range(len(runs["lookup"])))
    require_every_length(cell, k, [verification for known in verifications.values() for verification in known])
    return verifications


JOINED_TOKENS = 160
JOINED = DraftLayout.of(6, (2,) * 7)
"""Two drafts of masks, and behind them up to four of what followed the same ids before."""


def check_joined_sources(subject: Subject, temperature: float, *, device_steps: bool) -> None:
    """Compare decoding by chains of mask drafts and lookup behind them with plain decoding. Raises Mismatch at the
    first difference, or unless in one text mask drafts and lookup drafts were both accepted and rejected."""
    requests = []
    for connection in range(len(PROMPT_LENGTHS)):
        # A penalty keeps the text from looping; few ids let it repeat itself, exactly and nearly.
        sampling = pb.Sampling(
            seed=connection + 14, temperature=temperature, frequency_penalty=0.2, allowed_ids=subject.live_ids[:4]
        )
        limits = pb.Limits(max_tokens=JOINED_TOKENS)
        prompt = subject.prompt(connection, long=False)
        requests.append(SequenceRequest(prompt, sampling, limits, want_logprobs=True, num_logprobs=2))
    texts = []
    model = copy.copy(subject.model)  # its facts say that masks are mostly accepted, so lookup does not replace them
    model.facts = replace(model.facts, acceptance=(0.98, 0.98))
    for layout, lookup in ((DraftLayout.plain(), False), (JOINED, True)):
        worker = Worker(
            model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, controller=FixedLayout(_always(layout)),
            sources=DraftSources(lookup=lookup), max_draft_length=JOINED.num_drafts, device_steps=device_steps,
        )  # fmt: skip
        client = WorkerClient(worker, automatic=True)
        texts.append([client.submit(request) for request in requests])
        client.run()
    proven = False
    for connection, (plain, ours) in enumerate(zip(*texts, strict=True)):
        if (at := first_difference(ours.tokens, plain.tokens)) is not None:
            raise Mismatch(f"[joined, seat {connection}] {describe_difference(at, ours, plain)}")
        if ours.logprobs != plain.logprobs or ours.finish != plain.finish:
            raise Mismatch(f"[joined, seat {connection}] same ids, other log-probabilities or another end.")
        joined = [one for one in ours.decoded if 0 < one.num_mask_drafts < one.num_drafted]
        proven |= (
            any(one.num_accepted == 0 for one in joined)
            and any(0 < one.num_accepted <= one.num_mask_drafts for one in joined)
            and any(one.num_mask_drafts < one.num_accepted < one.num_drafted for one in joined)
            and any(one.num_accepted == one.num_drafted for one in joined)
        )
    if not proven:
        raise Mismatch("[joined] no text had drafts of both sources accepted and rejected.")


def _always(layout: DraftLayout) -> Callable[[DraftLimits], DraftLayout]:
    return lambda limits: layout


def _by_sources(record: ClientSequence) -> list[tuple[int, int]]:
    """Verdicts on drafts that no mask made, but for the last step's, which may be cut."""
    return [
        verification
        for verification, report in zip(record.verifications[:-1], record.decoded, strict=False)
        if report.draft_source != pb.DRAFT_SOURCE_MASKS
    ]


def require_every_length(cell: Cell, k: int, verifications: Sequence[tuple[int, int]]) -> None:
    """Of the drafts of some step none was accepted, of another's some, of another's all of a whole chain."""
    _require((k, k) in verifications, cell, f"a whole chain of {k} was never accepted (a = k)")
    _require(any(d > 0 == a for d, a in verifications), cell, "no draft was ever rejected at once (a = 0)")
    _require(k == 1 or any(0 < a < d for d, a in verifications), cell, "no chain was accepted in part (0 < a < k)")


def check_coverage(cell: Cell, runs: dict[str, list[ClientSequence]]) -> None:
    """Every accepted length that k allows occurred, and each kind of drafts fared as its name says.

    The last step of a text may be cut: there fewer drafts count as accepted than agreed (but none only if none did).
    """
    connections = range(len(runs["own"]))
    k = max(layout_for(cell.layout, connection).num_drafts for connection in connections)
    if k == 0:
        return
    seen = {kind: [v for r in records for v in r.verifications[:-1] if v[0] > 0] for kind, records in runs.items()}
    for drafted, accepted in seen["oracle"]:
        _require(accepted == drafted, cell, f"of {drafted} oracle drafts only {accepted} were accepted")
    for drafted, accepted in seen["wrong"]:
        _require(accepted == 0, cell, f"of {drafted} drafts whose first is wrong {accepted} were accepted")
    for connection, record in enumerate(runs["half"]):
        own = layout_for(cell.layout, connection).num_drafts
        for drafted, accepted in record.verifications[:-1]:
            if own > 1 and drafted == own:
                _require(0 < accepted < own, cell, f"of {own} half-right drafts {accepted} were accepted")
    union = [
        verification
        for records in runs.values()
        for r in records
        for verification in r.verifications
        if verification[0] > 0
    ]
    _require(any(a == 0 for _, a in union), cell, "no draft was ever rejected at once (a = 0)")
    _require((k, k) in union, cell, f"a whole chain of {k} was never accepted (a = k)")
    in_part = any(0 < a < drafted for verifications in seen.values() for drafted, a in verifications)
    _require(k == 1 or in_part, cell, "no chain was accepted in part (0 < a < k)")


def _require(holds: bool, cell: Cell, message: str) -> None:
    if not holds:
        raise Mismatch(f"[{cell}] {message}.")


class Run:
    """One cell with one kind of drafts, from the first admission to the last token."""

    def __init__(self, subject: Subject, cell: Cell, drafts: str) -> None:
        self._subject, self._cell, self._drafts = subject, cell, drafts
        self._model = WatchedModel(subject.model if cell.head else without_draft_head(subject.model))
        self._connections = range(len(PROMPT_LENGTHS) if cell.company == "batch" else 1)
        self._records, self._plain = [], []
        for connection in self._connections:
            asked, long = sampling_of_seat(cell, connection), cell.context == "long" and connection == 0
            plain = subject.plain(connection, *asked, long=long)
            prediction = _prediction(drafts, plain.tokens, subject.live_ids)
            request = replace(
                subject.request(connection, *asked, long=long),
                prediction=prediction,
                num_forced_drafts=FORCED[connection] if cell.layout == "forced" else 0,
            )
            self._records.append(ClientSequence(request))
            self._plain.append(plain)
        self._waiting = list(self._connections)
        self._left: set[int] = set()
        self._kept: list[int] = []  # pages of the prompt that seat 0 finds computed
        self._open()

    def finished(self) -> list[ClientSequence]:
        """Run to the end, compare every seat with its plain text, and return the records."""
        if self._cell.prefix == "hit":
            self._compute_prefix()
        turned = self._cell.life == "undisturbed"
        turns = 0
        while self._waiting or self._client.running:
            _require(turns < MOST_STEPS, self._cell, f"the texts were not finished in {turns} steps")
            while self._waiting and JOINS_AT[self._waiting[0]] <= turns:
                self._admit(self._waiting.pop(0))
            self._client.step()
            turns += 1
            self._let_leave()
            main = self._records[0]
            if not turned and len(main.tokens) >= TURNING_POINT and main.finish == pb.FINISH_NONE:
                turned = True
                self._preempt() if self._cell.life == "preempted" else self._restart()
        self._close()
        for connection in self._connections:
            self._compare(connection)
        return self._records

    def _open(self) -> None:
        right, live_ids = RIGHT.get(self._drafts), self._subject.live_ids
        self._source = ScriptedDrafts(right, live_ids) if right is not None else None
        sources = DraftSources(lookup="lookup" in self._drafts) if self._drafts in SOURCES else None
        self._connection_of: dict[int, int] = {}
        chosen = "k0" if self._cell.layout == "forced" else self._cell.layout
        controller = FixedLayout(lambda room: layout_for(chosen, self._connection_of.get(room.seq_id, 0)))
        worker = make_worker(self._model, controller, self._source, sources=sources)
        rows = CHUNK_ROWS[self._cell.context] if self._cell.prefill == "chunked" else 4096
        self._client = WorkerClient(worker, max_prefill_rows=rows, automatic=True)
        self._first_forward = self._model.num_forwards
        if self._cell.stale == "nan":
            self._client.after_step = lambda report: self._spoil()

    def _spoil(self) -> None:
        """NaN wherever no computed id of a living sequence, nor of a kept page, has its keys and values."""
        assert self._model.kv is not None
        kept = [(page, offset) for page in self._kept for offset in range(BLOCK_SIZE)]
        held = [slot for seq_id in self._client.running for slot in self._client.held_slots(seq_id)]
        fill_with_nan(self._model.kv, [*kept, *held])

    def _close(self) -> None:
        """Nothing leaked, and every step was one forward pass."""
        self._client.drop(self._kept)
        self._client.check_all_free()
        passes = self._model.num_forwards - self._first_forward
        _require(passes == self._client.num_steps, self._cell, f"{self._client.num_steps} steps took {passes} passes")

    def _admit(self, connection: int) -> None:
        shared = self._kept if connection == 0 else []
        load_state = 0 if shared and self._model.facts.is_recurrent else None
        seq_id = self._client.submit(self._records[connection], shared=shared, load_state=load_state).seq_id
        self._connection_of[seq_id] = connection
        if self._source is not None:
            k = layout_for(self._cell.layout, connection).num_drafts
            self._source.futures[seq_id] = Future(self._plain[connection].ids, k)

    def _compute_prefix(self) -> None:
        """An earlier sequence with the same prompt and more computes its pages; seat 0 may share the whole ones."""
        request = self._records[0].request
        earlier = ClientSequence(
            SequenceRequest(
                (*request.prompt, *request.prompt[:5]), pb.Sampling(), pb.Limits(max_tokens=6), lora=request.lora
            )
        )
        whole = (len(request.prompt) - 1) // BLOCK_SIZE
        keep_states = {whole * BLOCK_SIZE: 0} if self._model.facts.is_recurrent else None
        seq_id = self._client.submit(earlier, keep_states=keep_states).seq_id
        self._connection_of[seq_id] = 0
        self._client.run(lambda: earlier.num_computed >= len(request.prompt))
        self._kept = earlier.pages[:whole]
        self._client.keep(self._kept)
        self._client.release_and_wait(seq_id)

    def _let_leave(self) -> None:
        for connection, after in LEAVES_AFTER.items():
            if (
                connection in self._connections
                and connection not in self._left
                and len(self._records[connection].tokens) >= after
            ):
                self._left.add(connection)
                if (seq_id := self._records[connection].seq_id) in self._client.running:
                    self._client.release(seq_id)

    def _preempt(self) -> None:
        """Sequence 0 is preempted and admitted again on other pages, with its tokens up to the last report."""
        seq_id = self._records[0].seq_id
        if self._client.release_and_wait(seq_id).finish == pb.FINISH_NONE:
            self._admit(0)

    def _restart(self) -> None:
        """A new worker, with empty pages; every living sequence comes back with all it has said."""
        living = [
            connection
            for connection in self._connections
            if connection not in self._waiting and self._records[connection] in self._living()
        ]
        self._kept = []
        self._open()
        for connection in living:
            self._admit(connection)

    def _living(self) -> list[ClientSequence]:
        return [r for r in self._client.running.values() if r.finish == pb.FINISH_NONE and not self._has_left(r)]

    def _has_left(self, record: ClientSequence) -> bool:
        return any(self._records[connection] is record for connection in self._left)

    def _compare(self, connection: int) -> None:
        """Ids, reason of the end and log-probabilities, to the last bit."""
        ours, plain = self._records[connection], self._plain[connection]
        wanted = plain.tokens[: len(ours.tokens)] if connection in self._left else plain.tokens
        where = f"[{self._subject.name}-{self._cell}, {self._drafts} drafts, seat {connection}]"
        if (at := first_difference(ours.tokens, wanted)) is not None:
            raise Mismatch(f"{where} {describe_difference(at, ours, plain)}")
        if connection not in self._left and ours.finish != plain.finish:
            raise Mismatch(f"{where} ended with {ours.finish}, plain decoding with {plain.finish}.")
        logprobs = plain.logprobs[: len(ours.logprobs)] if connection in self._left else plain.logprobs
        if (at := first_difference(ours.logprobs, logprobs)) is not None:
            raise Mismatch(f"{where} same ids, other log-probabilities. {describe_difference(at, ours, plain)}")


def _prediction(drafts: str, tokens: Sequence[int], live_ids: Sequence[int]) -> tuple[int, ...]:
    """What a client predicted of this text: all of it, with every seventh id another, or only the first right."""
    if "predicted" not in drafts:
        return ()
    others = [live_ids[(live_ids.index(id_) + 1) % len(live_ids)] if id_ in live_ids else id_ for id_ in tokens]
    if drafts == "wrongly predicted":
        return (*tokens[:1], *others[1:])
    if drafts == "predicted":
        return tuple(tokens)
    return tuple(other if at % 7 == 3 else id_ for at, (id_, other) in enumerate(zip(tokens, others, strict=True)))


def describe_difference(at: int, ours: ClientSequence, plain: ClientSequence) -> str:
    """Where two records differ, what each chose there, and between what."""
    return describe(at, ours, plain, start=len(plain.request.prompt))
