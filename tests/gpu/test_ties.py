"""SPACE on against off, and against transformers' `generate`: equal up to ties, in float32 and bfloat16."""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from exactness_matrix import Subject, make_worker
from greedy_oracle import GreedyOracle
from space_common.worker_client import ClientSequence, SequenceRequest, WorkerClient
from space_eval.acceptance.equivalence import DRAFTS, RIGHT, Future, ScriptedDrafts
from space_model.loading.load import load_model
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout

from gpu.report import Notes
from gpu.ties import FAMILIES, NUM_BLOCKS, NUM_SEQUENCES, Comparison, TieRule, checkpoint_of, differences, outcome_name

pytestmark = pytest.mark.gpu

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
        for family in (*families, *(() if notes.dry else ("demo",))):
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
                f"{self._name} against generate, seat {connection}",
                prompt,
                plain.tokens,
                functools.partial(self._generated, prompt, len(plain.tokens)),
                self._rule,
                plain.request.sampling,
            )
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
                where,
                record.request.prompt,
                record.tokens,
                functools.partial(self._plain_behind, connection, heat),
                self._rule,
                record.request.sampling,
            )
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
