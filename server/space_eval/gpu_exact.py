"""Stages: drafts change no text on the GPU. In float32 and bfloat16 up to ties, with exact products to the last bit."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

import torch
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting
from space_model.space_model import SpaceModel
from space_model.testing import tiny_checkpoint
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout

from space_eval.desk import Desk, Record, Request
from space_eval.drafters import Future, ScriptedDrafts
from space_eval.equivalence import (
    RIGHT,
    Mismatch,
    Subject,
    check_cell,
    describe_difference,
    first_difference,
    make_worker,
)
from space_eval.equivalence_cell import AXES, DRAFTS, Cell
from space_eval.gpu_record import Notebook, StageFailed
from space_eval.gpu_ties import Judge, Verdicts, partings
from space_eval.greedy_oracle import GreedyOracle
from space_eval.pairwise import covering_cases

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3")
EXACT_FAMILIES = ("llama", "qwen3")
"""Those that have a compact network on a GPU: others are refused exact products."""

NUM_SEATS, NUM_BLOCKS = 4, 600
NUM_TOKENS = 96
_SHOWN = 30


def float32(notes: Notebook, until: float) -> None:
    """IEEE float32: TF32 is off."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    _contest(notes, until, "float32")


def bfloat16(notes: Notebook, until: float) -> None:
    """Ties are many, and listed."""
    _contest(notes, until, "bfloat16")


def device_of(notes: Notebook) -> str:
    """Where models of a stage are held."""
    return "cpu" if notes.dry else "cuda"


def _contest(notes: Notebook, until: float, dtype: str) -> None:
    families = FAMILIES[:1] if notes.dry else FAMILIES
    drafted, against = Verdicts(), Verdicts()
    accepted: Counter[str] = Counter()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in (*families, *(() if notes.dry else ("demo",))):
            if time.monotonic() > until:
                notes.missing(f"{dtype} {family}", "no time was left")
                continue
            path = Path(folder) / family
            contest = Contest(checkpoint_of(path, family, dtype), family, dtype, device_of(notes), dry=notes.dry)
            before = drafted.num_tokens, len(drafted.ties), against.num_tokens, len(against.ties)
            contest.run(drafted, against, accepted, until)
            after = drafted.num_tokens, len(drafted.ties), against.num_tokens, len(against.ties)
            rows.append([family, *(new - old for old, new in zip(before, after, strict=True))])
            head = ["model", "tokens on/off", "ties", "tokens against transformers", "ties"]
            notes.table(f"{dtype}: SPACE on against off, and against transformers' generate", head, rows)
    _report(notes, dtype, drafted, against, accepted)


def checkpoint_of(path: Path, family: str, dtype: str) -> str | Path:
    """A random one, written to `path`, that is stored in `dtype`; the embedded model as it is."""
    if family == "demo":
        return "demo"
    return tiny_checkpoint(path, family, seed=1, dtype=dtype, tie_word_embeddings=False)


def _report(notes: Notebook, dtype: str, drafted: Verdicts, against: Verdicts, accepted: Counter[str]) -> None:
    ties, faults = [*drafted.ties, *against.ties], [*drafted.faults, *against.faults]
    num_tokens = drafted.num_tokens + against.num_tokens
    notes.figure(f"{dtype} tokens compared", num_tokens)
    notes.figure(f"{dtype} differences that are no tie", len(faults))
    notes.figure(f"{dtype} ties", len(ties))
    notes.figure(f"{dtype} ties per 100,000 tokens", 1e5 * len(ties) / max(1, num_tokens))
    if ties:
        notes.figure(f"{dtype} median tie, share of the bound", statistics.median(abs(t.gap) / t.bound for t in ties))
    head = ["where", "position", "ours", "theirs", "gap", "bound"]
    rows = [[t.where, t.position, t.ours, t.theirs, f"{t.gap:.3g}", f"{t.bound:.3g}"] for t in [*faults, *ties]]
    notes.table(f"{dtype}: first partings", head, rows[:_SHOWN])
    notes.note(f"{dtype} verdicts: " + ", ".join(f"{count} {name}" for name, count in sorted(accepted.items())))
    missing = [name for name in ("a = 0", "0 < a < k", "a = k") if not accepted[name]]
    if missing:
        raise StageFailed(f"no chain had {' or '.join(missing)}: nothing is proved")
    if faults:
        raise StageFailed(f"{len(faults)} texts part where it is no tie; the first: {faults[0]}")


class Contest:
    """One model: its plain texts, the same with drafts, and transformers'."""

    def __init__(self, path: str | Path, name: str, dtype: str, device: str, *, dry: bool) -> None:
        self._model = load_model(path, dtype=dtype, device=device)
        self._subject = Subject(name, self._model, seed=7)
        facts = self._model.facts
        with resources.as_file(resources.files("space_demo")) as embedded:
            oracle = GreedyOracle(embedded if path == "demo" else Path(path), banned_ids=facts.mask_ids)
        self._oracle, self._judge = oracle, Judge(oracle, facts.dtype)
        self._num_tokens = 16 if dry else NUM_TOKENS
        self._settings: list[tuple[float, int]] = [
            (heat, k) for heat in ((0.8,) if dry else (0.0, 0.8, 1.0)) for k in ((3,) if dry else (1, 3, 5))
        ]
        self._name, self._dry = name, dry
        self._plain: dict[tuple[int, float], Record] = {}

    def run(self, drafted: Verdicts, against: Verdicts, accepted: Counter[str], until: float) -> None:
        """Add what is found; as much as there is time for."""
        for connection in range(1 if self._dry else NUM_SEATS):
            plain = self._plain_text(connection, 0.0)
            prompt = plain.request.prompt
            found = partings(
                f"{self._name} against generate, seat {connection}",
                prompt,
                plain.tokens,
                functools.partial(self._generated, prompt, len(plain.tokens)),
                self._judge,
                plain.request.sampling,
            )
            against.add(found, len(plain.tokens))
        for heat, k in self._settings:
            for drafts in DRAFTS:
                if time.monotonic() < until:
                    self._drafts(heat, k, drafts, drafted, accepted)

    def _drafts(self, heat: float, k: int, drafts: str, drafted: Verdicts, accepted: Counter[str]) -> None:
        """A batch that joins one by one, against its plain texts."""
        live_ids = self._subject.live_ids
        source = None if drafts == "own" else ScriptedDrafts(RIGHT[drafts], live_ids)
        desk = Desk(make_worker(self._model, FixedLayout.full(k), source, num_blocks=NUM_BLOCKS))
        records = [Record(self._request(connection, heat)) for connection in range(NUM_SEATS)]
        for connection, record in enumerate(records):
            seq_id = desk.admit(record)
            if source is not None:
                source.futures[seq_id] = Future(self._plain_text(connection, heat).ids, k)
            desk.step()
        desk.run(lambda: not desk.records)
        desk.check_all_free()
        for connection, record in enumerate(records):
            where = f"{self._name} T={heat:g} k={k}, {drafts} drafts, seat {connection}"
            found = partings(
                where,
                record.request.prompt,
                record.tokens,
                functools.partial(self._plain_behind, connection, heat),
                self._judge,
                record.request.sampling,
            )
            drafted.add(found, len(record.tokens))
            for chain, count in [verification for verification in record.verifications[:-1] if verification[0]]:
                accepted["a = 0" if count == 0 else "a = k" if count == chain else "0 < a < k"] += 1

    def _generated(self, prompt: Sequence[int], num_tokens: int, known: Sequence[int]) -> list[int]:
        return self._oracle.generate([*prompt, *known], num_tokens - len(known))

    def _request(self, connection: int, heat: float) -> Request:
        request = self._subject.request(connection, heat, "none")
        return replace(request, limits=pb.Limits(max_tokens=self._num_tokens), want_logprobs=False, num_logprobs=0)

    def _plain_text(self, connection: int, heat: float) -> Record:
        if (connection, heat) not in self._plain:
            self._plain[connection, heat] = self._decoded(Record(self._request(connection, heat)))
        return self._plain[connection, heat]

    def _plain_behind(self, connection: int, heat: float, known: Sequence[int]) -> list[int]:
        """What plain decoding says behind the first ids of another text."""
        if not known:
            return self._plain_text(connection, heat).tokens
        return self._decoded(Record(self._request(connection, heat), tokens=list(known))).tokens[len(known) :]

    def _decoded(self, record: Record) -> Record:
        desk = Desk(make_worker(self._model, FixedLayout.full(0), None, num_blocks=NUM_BLOCKS))
        desk.admit(record)
        desk.run(lambda: not desk.records)
        return record


# -------------------------------------------------------------------------------------------------- to the last bit


def products(notes: Notebook, until: float) -> None:
    """Cells of the matrix, each with own, right, half-right and wrong drafts; every two conditions meet in one."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def subject(name: str, dtype: str) -> Subject:
            path = checkpoint_of(Path(folder) / f"{name}-{dtype}", name, dtype)
            return Subject(name, load_model(path, dtype=dtype, device=device_of(notes), exact=True))

        wanted = list(_cells(dry=notes.dry))
        equal, faults = 0, []
        for number, (name, cell) in enumerate(wanted):
            if time.monotonic() > until:
                notes.missing("exact: the rest of the cells", f"time for {number} of {len(wanted)}")
                break
            try:
                check_cell(subject(name, cell.dtype), cell)
                equal += 1
            except Mismatch as difference:
                faults.append(str(difference))
                notes.note(f"{name}: {difference}")
            if number % 10 == 9:
                notes.say(f"{number + 1} of {len(wanted)} cells, {len(faults)} not equal")
        if not notes.dry:
            _refused(notes, Path(folder))
    notes.figure("exact: cells that are bitwise equal", equal)
    notes.figure("exact: cells that are not bitwise equal", len(faults))
    if faults:
        raise StageFailed(f"{len(faults)} of {equal + len(faults)} cells are not equal; the first: {faults[0]}")


def changed_texts(model: SpaceModel, num_texts: int, num_tokens: int) -> list[str]:
    """Where k = 5 changed plain decoding's ids or log-probabilities, in words: half-right drafts, all in one batch."""
    subject = Subject(model.facts.name, model, seed=11)
    limits = pb.Limits(max_tokens=num_tokens)
    asked = [replace(subject.request(n % NUM_SEATS, 0.8 * (n % 2), "none"), limits=limits) for n in range(num_texts)]
    asked = [replace(request, want_logprobs=True, num_logprobs=4) for request in asked]
    plain = []
    for request in asked:
        plain.append(Record(request))
        desk = Desk(make_worker(model, FixedLayout.full(0), None, num_blocks=NUM_BLOCKS))
        desk.admit(plain[-1])
        desk.run(lambda desk=desk: not desk.records)  # type: ignore[misc]
    source = ScriptedDrafts(RIGHT["half"], subject.live_ids)
    desk = Desk(make_worker(model, FixedLayout.full(5), source, num_blocks=NUM_BLOCKS))
    ours = [Record(request) for request in asked]
    for record, known in zip(ours, plain, strict=True):
        source.futures[desk.admit(record)] = Future(known.ids, 5)
    desk.run(lambda: not desk.records)
    changed = []
    for number, (record, known) in enumerate(zip(ours, plain, strict=True)):
        at = first_difference(record.tokens, known.tokens)
        at = first_difference(record.logprobs, known.logprobs) if at is None else at
        if at is not None:
            changed.append(f"text {number}: {describe_difference(at, record, known)}")
    return changed


def _cells(*, dry: bool) -> Iterator[tuple[str, Cell]]:
    axes = {"model": (*EXACT_FAMILIES, "demo"), **AXES}
    if dry:
        axes |= {"model": ("llama",), "layout": ("k3",), "processor": ("none",), "temperature": (0.8,)}
        axes |= {name: values[:1] for name, values in AXES.items() if name not in axes or len(axes[name]) > 1}
        axes["company"] = ("batch",)
    for case in covering_cases(axes, strength=2):
        name = str(case.pop("model"))
        yield name, Cell(**case)


def _refused(notes: Notebook, folder: Path) -> None:
    """Others must be refused, not served inexactly."""
    path = checkpoint_of(folder / "refused", "gemma2", "float32")
    try:
        load_model(path, dtype="float32", device="cuda", exact=True)
    except InvalidSetting as refusal:
        notes.note(f"gemma2 with exact products is refused: {refusal}")
    else:
        raise StageFailed("gemma2 is loaded with exact products, which it cannot have")
