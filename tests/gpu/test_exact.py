"""Drafts change no text on the GPU: to the last bit with exact products, else up to ties."""

from __future__ import annotations

import functools
import gc
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness_matrix import AXES, Cell, Mismatch, Subject, check_cell, make_worker
from greedy_oracle import GreedyOracle
from pairwise import covering_cases
from space_common.worker.client import ClientSequence, SequenceRequest, WorkerClient
from space_eval.acceptance.equivalence import DRAFTS, RIGHT, Future, ScriptedDrafts
from space_kernels.dispatch import ops_for
from space_model.geometry.draft_layout import DraftLayout
from space_model.loading.load import load_model
from space_model.loading.whole_model import quantize_to_fp8
from space_model.model_error import InvalidSetting
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.machine.memory import free_bytes
from space_server.speculation.controller import FixedLayout

from gpu.llama import DRY, NUM_MASKS, SHAPES, Shape, facts_of, random_llama, space_llama
from gpu.pace import BLOCK_SIZE, DeviceClock, forward_seconds
from gpu.report import Notes
from gpu.ties import FAMILIES, NUM_BLOCKS, NUM_SEQUENCES, Comparison, TieRule, checkpoint_of, differences, outcome_name

pytestmark = pytest.mark.gpu

EXACT_FAMILIES = ("llama", "qwen3")  # those that have a compact network on a GPU: others are refused exact products


def test_exact_products(notes: Notes) -> None:
    """Cells of the matrix, each with own, right, half-right and wrong drafts; every two conditions meet in one."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def subject(name: str, dtype: str) -> Subject:
            family, _, head = name.partition(" ")
            path = checkpoint_of(Path(folder) / f"{name}-{dtype}", family, dtype, head_drafts=NUM_MASKS if head else 0)
            return Subject(name, load_model(path, dtype=dtype, device=str(notes.device), exact=True))

        cells = notes.part.share([((name, cell.dtype), cell) for name, cell in _cells(dry=notes.dry)])
        equal, faults = _check_cells(notes, "exact", subject, cells)
        if not notes.dry and notes.part.number == 1:
            _refused(notes, Path(folder))
    assert not faults, f"{len(faults)} of {equal + len(faults)} cells are not equal; the first: {faults[0]}"


def _check_cells(
    notes: Notes, what: str, subject: Callable[..., Subject], cells: Sequence[tuple[tuple[Any, ...], Cell]]
) -> tuple[int, list[str]]:
    """The number of cells that are equal, and the differences. `cells`: each with what names its `subject`."""
    equal, faults = 0, list[str]()
    for number, (names, cell) in enumerate(cells):
        if notes.is_late(f"{what}: the last {len(cells) - number} cells"):
            break
        try:
            check_cell(subject(*names), cell)
            equal += 1
        except Mismatch as difference:
            faults.append(f"{', '.join(map(str, names))}: {difference}")
            notes.note(faults[-1])
        if number % 10 == 9:
            notes.say(f"{number + 1} of {len(cells)} cells, {len(faults)} not equal")
    notes.figure(f"{what}: cells that are bitwise equal", equal)
    notes.figure(f"{what}: cells that are not bitwise equal", len(faults))
    return equal, faults


def _cells(*, dry: bool) -> Iterator[tuple[str, Cell]]:
    axes = {"model": (*EXACT_FAMILIES, "demo"), **AXES}
    if dry:
        axes |= {"model": ("llama",), "layout": ("k3",), "processor": ("none",), "temperature": (0.8,)}
        axes |= {name: values[:1] for name, values in AXES.items() if name not in axes or len(axes[name]) > 1}
        axes["company"] = ("batch",)
    for case in covering_cases(axes, strength=2):
        name = str(case.pop("model"))
        yield name, Cell(**case)
    layouts = ("head3",) if dry else ("head1", "head3", "head5")
    for case in covering_cases(axes | {"model": ("llama with head",), "layout": layouts}, strength=1 if dry else 2):
        yield str(case.pop("model")), Cell(**case)


def _refused(notes: Notes, folder: Path) -> None:
    """Others must be refused, not served inexactly."""
    path = checkpoint_of(folder / "refused", "gemma2", "float32")
    try:
        load_model(path, dtype="float32", device="cuda", exact=True)
    except InvalidSetting as refusal:
        notes.note(f"gemma2 with exact products is refused: {refusal}")
    else:
        pytest.fail("gemma2 is loaded with exact products, which it cannot have")


@dataclass(frozen=True)
class Held:
    """What is of eight bits."""

    weights: str
    kv_dtype: str

    def __str__(self) -> str:
        small = ["fp8 weights"] * (self.weights == "fp8") + ["fp8 keys and values"] * (self.kv_dtype == "fp8")
        return " and ".join(small) or "bfloat16"


WAYS = (Held("fp8", "auto"), Held("plain", "fp8"), Held("fp8", "fp8"))
MODELS = ("llama", "qwen3", "demo")
CONTEXTS = (512, 8192)  # cached ids: with few a step reads weights, with many keys and values too


def test_eight_bits(notes: Notes) -> None:
    """Times are measured where bits differ, too."""
    faults = _differences(notes)
    _seconds(notes)
    assert not faults, f"{len(faults)} cells are not equal; the first: {faults[0]}"


def _differences(notes: Notes) -> list[str]:
    """Cells of the matrix with exact products."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def subject(name: str, held: Held) -> Subject:
            path = checkpoint_of(Path(folder) / name, name, "bfloat16")
            model = load_model(
                path, dtype="bfloat16", weights=held.weights, kv_dtype=held.kv_dtype, device=str(notes.device),
                exact=True,
            )  # fmt: skip
            return Subject(name, model)

        cells = notes.part.share([((name, held), cell) for name, held, cell in _held_cells(dry=notes.dry)])
        return _check_cells(notes, "eight bits", subject, cells)[1]


def _held_cells(*, dry: bool) -> Iterator[tuple[str, Held, Cell]]:
    """Every condition meets every way of holding somewhere; in a dry run there is one cell."""
    axes = {"model": MODELS, "held": WAYS, **AXES, "dtype": ("bfloat16",)}
    if dry:
        axes |= {name: values[:1] for name, values in AXES.items()} | {"dtype": ("bfloat16",)}
        axes |= {"model": MODELS[:1], "held": WAYS[-1:], "layout": ("k3",), "temperature": (0.8,)}
    for case in covering_cases(axes, strength=1 if dry else 2):
        name, held = case.pop("model"), case.pop("held")
        if isinstance(held, Held):
            yield str(name), held, Cell(**case)


def _seconds(notes: Notes) -> None:
    """Network and head of a Llama of 8B, on the device alone, beside bfloat16's."""
    device = notes.device
    shape, contexts = (DRY, (64,)) if notes.dry else (SHAPES["8b"], CONTEXTS)
    if not notes.dry and free_bytes(device) < 1.5 * shape.num_bytes:
        notes.missing("eight bits: seconds of a step", f"{shape.num_bytes / 1024**3:.1f} GiB of weights do not fit")
        return
    clock = DeviceClock(device)
    usual: dict[tuple[int, int], float] = {}
    rows = []
    for held in (Held("plain", "auto"), *notes.part.share(WAYS)):
        if notes.is_late(f"eight bits: seconds with {held}"):
            continue
        model = _model(shape, device, held)
        for context in contexts:
            kv = model.allocate_kv(-(-(context + 2 * (NUM_MASKS + 1)) // BLOCK_SIZE), BLOCK_SIZE)
            for layout in (DraftLayout.plain(), DraftLayout.full(NUM_MASKS, NUM_MASKS)):
                num_rows, seconds = forward_seconds(model, kv, layout, context, clock)
                first = usual.setdefault((context, num_rows), seconds)
                rows.append([str(held), context, num_rows, f"{1e3 * seconds:.3f}", f"{first / seconds:.2f}"])
                if held.weights == "fp8" or held.kv_dtype == "fp8":
                    notes.figure(f"8b, {held}: bfloat16's time over it, {num_rows} rows at {context}", first / seconds)
        del model, kv
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    head = ["held in", "cached ids", "rows", "ms", "bfloat16's over it"]
    notes.table(f"{shape.name}: network and head", head, rows)


def _model(shape: Shape, device: torch.device, held: Held) -> SpaceModel:
    facts = facts_of(shape, device)
    small = held.kv_dtype == "fp8"
    kv_bytes = facts.kv_bytes_per_token // (2 if small else 1)
    facts = replace(facts, weights=held.weights, fp8_kv=small, kv_bytes_per_token=kv_bytes)
    made = random_llama(shape, device)
    if held.weights == "fp8":
        quantize_to_fp8(made.base_model, device)
    ops = ops_for(device, dtype=facts.dtype, fp8_kv=small)
    return space_llama(made, facts, ops, shape)


NUM_TOKENS = 96
_SHOWN = 30


def test_exact_float32(notes: Notes) -> None:
    """IEEE float32: TF32 is off."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    _compare_all(notes, "float32")


def test_exact_bfloat16(notes: Notes) -> None:
    """Ties are many, and listed."""
    _compare_all(notes, "bfloat16")


def _compare_all(notes: Notes, dtype: str) -> None:
    families = FAMILIES[:1] if notes.dry else FAMILIES
    drafted, against = Comparison(), Comparison()
    accepted: Counter[str] = Counter()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in notes.part.share((*families, *(() if notes.dry else ("demo",)))):
            if notes.is_late(f"{dtype} {family}"):
                continue
            path = Path(folder) / family
            texts = ModelTexts(notes, checkpoint_of(path, family, dtype), family, dtype)
            before = drafted.num_tokens, len(drafted.ties), against.num_tokens, len(against.ties)
            texts.compare(drafted, against, accepted)
            after = drafted.num_tokens, len(drafted.ties), against.num_tokens, len(against.ties)
            rows.append([family, *(new - old for old, new in zip(before, after, strict=True))])
            head = ["model", "tokens on/off", "ties", "tokens against transformers", "ties"]
            notes.table(f"{dtype}: SPACE on against off, and against transformers' generate", head, rows)
    _report(notes, dtype, drafted, against, accepted)


def _report(notes: Notes, dtype: str, drafted: Comparison, against: Comparison, accepted: Counter[str]) -> None:
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
    notes.table(f"{dtype}: first differences", head, rows[:_SHOWN])
    notes.note(f"{dtype} chains: " + ", ".join(f"{count} {name}" for name, count in sorted(accepted.items())))
    missing = [name for name in ("a = 0", "0 < a < k", "a = k") if not accepted[name]]
    assert not missing, f"no chain had {' or '.join(missing)}: nothing is proved"
    assert not faults, f"{len(faults)} texts differ where it is no tie; the first: {faults[0]}"


class ModelTexts:
    """The texts of one model: plain, with drafts, and transformers'."""

    def __init__(self, notes: Notes, path: str | Path, name: str, dtype: str) -> None:
        dry = notes.dry
        self._model = load_model(path, dtype=dtype, device=str(notes.device))
        self._subject = Subject(name, self._model, seed=7)
        facts = self._model.facts
        with resources.as_file(resources.files("space_demo")) as embedded:
            oracle = GreedyOracle(embedded if path == "demo" else Path(path), banned_ids=facts.mask_ids)
        self._oracle, self._rule = oracle, TieRule(oracle, facts.dtype)
        self._num_tokens = 16 if dry else NUM_TOKENS
        self._settings: list[tuple[float, int]] = [
            (heat, k) for heat in ((0.8,) if dry else (0.0, 0.8, 1.0)) for k in ((3,) if dry else (1, 3, 5))
        ]
        self._name, self._notes = name, notes
        self._plain: dict[tuple[int, float], ClientSequence] = {}

    def compare(self, drafted: Comparison, against: Comparison, accepted: Counter[str]) -> None:
        """Add all differences, of as many texts as there is time for."""
        for connection in range(1 if self._notes.dry else NUM_SEQUENCES):
            plain = self._plain_text(connection, 0.0)
            prompt = plain.request.prompt
            found = differences(
                f"{self._name} against generate, seat {connection}", prompt, plain.tokens,
                functools.partial(self._generated, prompt, len(plain.tokens)), self._rule, plain.request.sampling,
            )  # fmt: skip
            against.add(found, len(plain.tokens))
        for heat, k in self._settings:
            for drafts in DRAFTS:
                if not self._notes.is_late(f"{self._name} T={heat:g} k={k}, {drafts} drafts"):
                    self._drafts(heat, k, drafts, drafted, accepted)

    def _drafts(self, heat: float, k: int, drafts: str, drafted: Comparison, accepted: Counter[str]) -> None:
        """A batch that joins one by one, against its plain texts."""
        live_ids = self._subject.live_ids
        source = None if drafts == "own" else ScriptedDrafts(RIGHT[drafts], live_ids)
        client = WorkerClient(
            make_worker(self._model, FixedLayout.full(k), source, num_blocks=NUM_BLOCKS), automatic=True
        )
        records = [ClientSequence(self._request(connection, heat)) for connection in range(NUM_SEQUENCES)]
        for connection, record in enumerate(records):
            seq_id = client.submit(record).seq_id
            if source is not None:
                source.futures[seq_id] = Future(self._plain_text(connection, heat).ids, k)
            client.step()
        client.run()
        client.check_all_free()
        for connection, record in enumerate(records):
            where = f"{self._name} T={heat:g} k={k}, {drafts} drafts, seat {connection}"
            found = differences(
                where, record.request.prompt, record.tokens, functools.partial(self._plain_behind, connection, heat),
                self._rule, record.request.sampling,
            )  # fmt: skip
            drafted.add(found, len(record.tokens))
            for chain, count in [verdict for verdict in record.verifications[:-1] if verdict[0]]:
                accepted[outcome_name(chain, count)] += 1

    def _generated(self, prompt: Sequence[int], num_tokens: int, known: Sequence[int]) -> list[int]:
        return self._oracle.generate([*prompt, *known], num_tokens - len(known))

    def _request(self, connection: int, heat: float) -> SequenceRequest:
        request = self._subject.request(connection, heat, "none")
        return replace(request, limits=pb.Limits(max_tokens=self._num_tokens), want_logprobs=False, num_logprobs=0)

    def _plain_text(self, connection: int, heat: float) -> ClientSequence:
        if (connection, heat) not in self._plain:
            self._plain[connection, heat] = self._decoded(ClientSequence(self._request(connection, heat)))
        return self._plain[connection, heat]

    def _plain_behind(self, connection: int, heat: float, known: Sequence[int]) -> list[int]:
        """What plain decoding says behind the first ids of another text."""
        if not known:
            return self._plain_text(connection, heat).tokens
        return self._decoded(ClientSequence(self._request(connection, heat), tokens=list(known))).tokens[len(known) :]

    def _decoded(self, record: ClientSequence) -> ClientSequence:
        client = WorkerClient(
            make_worker(self._model, FixedLayout.full(0), None, num_blocks=NUM_BLOCKS), automatic=True
        )
        client.submit(record)
        client.run()
        return record
