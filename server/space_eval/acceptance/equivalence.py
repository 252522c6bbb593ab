"""`spaceserve eval equivalence`: drafts change no text, over k, temperatures, seeds, kinds of drafts and batches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

from space_common.worker.client import ClientSequence
from space_common.worker.completion import CompletionFailed, CompletionOutput, CompletionRequest, complete
from space_model.geometry.draft_layout import DraftLayout
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker
from tqdm import tqdm

from space_eval.acceptance.generation import describe_prompts, encode_prompts, load_tokenizer, torch_facts
from space_eval.data import load_prompts
from space_eval.report import columns_table, markdown_facts, publish

BLOCK_SIZE = 16
MOST_DRAFTS = 8


Right = Callable[[int, int], int]
"""(known ids, drafts of a whole chain) -> how many drafts are right before the first wrong one."""

DRAFTS = ("own", "oracle", "half", "wrong")  # kinds of drafts: the masks' own, and the scripted ones

RIGHT: dict[str, Right] = {
    "oracle": lambda num_known, k: k,
    "half": lambda num_known, k: 1 + num_known % (k - 1) if k > 1 else num_known % 2,  # 1 to k-1; of one, every second
    "wrong": lambda num_known, k: 0,
}


@dataclass(frozen=True)
class Future:
    """The whole text of a sequence, known from a plain run."""

    ids: Sequence[int]  # prompt and all of its output
    k: int  # drafts of a whole chain of this sequence


class ScriptedDrafts:
    """A DraftSource that drafts the known plain text for the first `num_right` drafts, then a wrong token.

    After the first wrong draft the rest is right again every second time, to test that only the longest prefix counts.
    """

    def __init__(self, num_right: Right, live_ids: Sequence[int]) -> None:
        self._num_right = num_right
        self._live_ids = list(live_ids)
        self.futures: dict[int, Future] = {}  # by seq_id; a sequence without one gets no drafts

    def propose(self, seq_id: int, ids: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Return `max_drafts` ids, arbitrary ones after the end of the plain text."""
        future = self.futures.get(seq_id)
        if future is None:
            return ()
        n = len(ids)
        drafts = [*future.ids[n : n + max_drafts], *self._live_ids][:max_drafts]
        stray = self._num_right(n, future.k)
        for i in range(stray, max_drafts if n % 2 else min(stray + 1, max_drafts)):
            drafts[i] = self._other(drafts[i])
        return drafts

    def _other(self, id_: int) -> int:
        """Return another id that could be sampled."""
        at = self._live_ids.index(id_) if id_ in self._live_ids else 0
        return self._live_ids[(at + 1) % len(self._live_ids)]


@dataclass(frozen=True)
class EquivalenceCell:
    """One condition under which all prompts are decoded."""

    temperature: float
    seed: int
    num_drafts: int  # k
    drafts: str  # own, oracle, half, wrong
    company: str  # alone, batch

    def __str__(self) -> str:
        where = "alone" if self.company == "alone" else "in a batch"
        return f"T={self.temperature:g}, seed {self.seed}, k={self.num_drafts}, {self.drafts} drafts, {where}"


@dataclass
class CellResult:
    """The comparison of all texts of a cell with plain decoding."""

    cell: EquivalenceCell
    num_texts: int = 0
    num_equal: int = 0
    num_tokens: int = 0
    num_steps: int = 0  # steps with drafts, except the last of each text, which may be cut
    accepted_none: int = 0  # of these steps: a = 0
    accepted_part: int = 0  # 0 < a < k
    accepted_whole: int = 0  # a = k, or all of a shorter chain
    difference: str | None = None  # the first, in words


def run(options: argparse.Namespace) -> int:
    """Print the cells. Return exit status 0 if all texts are equal and every accepted length occurred, else 1."""
    if not all(1 <= k <= MOST_DRAFTS for k in options.k):
        raise InvalidSetting(f"--k must lie in 1..{MOST_DRAFTS}; got {' '.join(map(str, options.k))}.")
    if not all(0 <= seed < 1 << 64 for seed in options.seed):
        raise InvalidSetting(f"--seed must lie in 0 .. 2^64-1; got {' '.join(map(str, options.seed))}.")
    tokenizer = load_tokenizer(options.model)
    chosen = {"dtype": options.dtype, "device": options.device, "num_threads": options.num_threads}
    model = load_model(options.model, weights="auto", **chosen)
    loaded = load_prompts(options.prompts, options.limit)
    prompts = encode_prompts(tokenizer, loaded, window=model.facts.window, max_tokens=options.max_tokens)
    check = EquivalenceCheck(model, prompts, options.max_tokens)
    cells = list(_cells(options, model.facts.num_masks))
    results = [check.run(cell) for cell in tqdm(cells, unit="cell", file=sys.stderr, disable=None)]
    known = model.facts
    facts = {"model": known.name, "model hash": known.model_hash[:12], "dtype": known.number_format}
    facts["draft head"] = "yes" if known.has_draft_head else "no"
    facts |= {
        "machine": f"{known.device.type}, {torch_facts()}",
        "prompts": describe_prompts(options.prompts.stem, prompts),
        "new tokens": str(options.max_tokens),
        "compared": check.compared,
    }
    faults = faults_of(results)
    num_texts, num_tokens = sum(one.num_texts for one in results), sum(one.num_tokens for one in results)
    equal = f"equal: {len(cells)} cells, {num_texts} texts, {num_tokens} tokens"
    facts["outcome"] = f"NOT PROVED: {faults[0]}" if faults else equal
    page = markdown_facts(facts) + "\n" + columns_table(COLUMNS, results)
    record = {"facts": facts, "cells": [asdict(result) for result in results]}
    publish("equivalence", options.out, page, record)
    for fault in faults:
        print(f"spaceserve eval: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _cells(options: argparse.Namespace, num_masks: int) -> Iterator[EquivalenceCell]:
    """Yield the cells: greedy texts have one seed, and own drafts are limited to the number of masks."""
    for heat, seed in product(options.temperature, options.seed):
        if heat == 0.0 and seed != options.seed[0]:
            continue
        for k, drafts, company in product(sorted(set(options.k)), DRAFTS, ("alone", "batch")):
            if drafts != "own" or k <= num_masks:
                yield EquivalenceCell(heat, seed, k, drafts, company)


class EquivalenceCheck:
    """One checkpoint and its prompts; plain texts are cached."""

    def __init__(self, model: SpaceModel, prompts: list[list[int]], max_tokens: int) -> None:
        self._model, self._prompts, self._max_tokens = model, prompts, max_tokens
        facts = model.facts
        self._live_ids = [v for v in range(facts.vocab_size) if v not in {*facts.mask_ids, *facts.eos_ids}]
        self._is_bitwise = facts.device.type == "cpu"
        self.compared = "ids, ends, log-probabilities to the last bit" if self._is_bitwise else "ids and ends"
        self._plain: dict[tuple[float, int], list[CompletionOutput]] = {}

    def run(self, cell: EquivalenceCell) -> CellResult:
        """Decode every prompt under the cell's conditions, and compare with plain decoding."""
        key = (cell.temperature, cell.seed)
        numbers = list(range(len(self._prompts)))
        if key not in self._plain:
            self._plain[key] = [self._decode([number], *key)[number] for number in numbers]
        plain = self._plain[key]
        result = CellResult(cell)
        for group in [[number] for number in numbers] if cell.company == "alone" else [numbers]:
            source = None if cell.drafts == "own" else ScriptedDrafts(RIGHT[cell.drafts], self._live_ids)
            if source is not None:
                texts = ([*plain[number].prompt_ids, *plain[number].tokens] for number in group)
                source.futures = {seq_id: Future(ids, cell.num_drafts) for seq_id, ids in enumerate(texts, start=1)}
            try:
                found = self._decode(group, *key, k=cell.num_drafts, source=source)
            except CompletionFailed as error:
                result.num_texts += len(group)
                result.difference = result.difference or f"[{cell}] {error}"
                continue
            for number in group:
                self._count(result, number, found[number], plain[number])
        return result

    def _decode(
        self, group: list[int], temperature: float, seed: int, *, k: int = 0, source: ScriptedDrafts | None = None
    ) -> dict[int, CompletionOutput]:
        """Decode one batch, whose prompts join one step after the other. Return the generations by prompt number."""
        longest = max(len(self._prompts[number]) for number in group)
        worker = Worker(
            self._model,
            num_blocks=len(group) * -(-(longest + self._max_tokens + k + 1) // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            controller=FixedLayout(lambda room: DraftLayout.full(k, k)),
            draft_source=source,
        )
        sampling = pb.Sampling(seed=seed, temperature=temperature)
        made = complete(
            worker,
            [CompletionRequest("", number, self._prompts[number], sampling, num_logprobs=2) for number in group],
            max_tokens=self._max_tokens,
            max_draft_length=k,
            eos_ids=self._model.facts.eos_ids,
            max_sequences=len(group),
            one_by_one=True,
        )
        return {request.sample: generation for request, generation in made}

    def _count(self, result: CellResult, number: int, ours: CompletionOutput, plain: CompletionOutput) -> None:
        result.num_texts += 1
        result.num_tokens += len(ours.tokens)
        verified = [step for step in ours.steps[:-1] if step.num_drafted]
        result.num_steps += len(verified)
        result.accepted_none += sum(step.num_accepted == 0 for step in verified)
        result.accepted_whole += sum(step.num_accepted == step.num_drafted for step in verified)
        result.accepted_part += sum(0 < step.num_accepted < step.num_drafted for step in verified)
        difference = self._difference(ours, plain)
        if difference is None:
            result.num_equal += 1
        elif result.difference is None:
            result.difference = f"[{result.cell}, prompt {number + 1}] {difference}"

    def _difference(self, ours: CompletionOutput, plain: CompletionOutput) -> str | None:
        start = len(plain.prompt_ids)
        if (at := first_difference(ours.tokens, plain.tokens)) is not None:
            return describe_difference(at, ours, plain, start=start)
        if ours.finish != plain.finish:
            return f"It ended with {ours.finish}, plain decoding with {plain.finish}."
        if self._is_bitwise and (at := first_difference(ours.logprobs, plain.logprobs)) is not None:
            return f"Same ids, other log-probabilities. {describe_difference(at, ours, plain, start=start)}"
        return None


Text = CompletionOutput | ClientSequence  # ids with their log-probabilities


def first_difference(ours: Sequence[object], wanted: Sequence[object]) -> int | None:
    """Return the first index at which two sequences differ, or None if they are equal, including in length."""
    pairs = enumerate(zip(ours, wanted, strict=False))
    shorter = min(len(ours), len(wanted)) if len(ours) != len(wanted) else None
    return next((i for i, (a, b) in pairs if a != b), shorter)


def describe_difference(at: int, ours: Text, plain: Text, *, start: int) -> str:
    """Describe the ids that two texts, whose prompt has `start` ids, chose at index `at`, and the alternatives."""
    chosen = [text.tokens[at] if at < len(text.tokens) else None for text in (ours, plain)]
    words = f"First difference at position {start + at}: {chosen[0]}, plain decoding {chosen[1]}."
    for name, text in (("ours", ours), ("plain", plain)):
        if at < len(text.logprobs):
            row = text.logprobs[at]
            top = ", ".join(f"{id_}: {p:.7g}" for id_, p in zip(row.top_ids, row.top_logprobs, strict=True))
            words += f" First of {name}: {top}; gap {row.top_logprobs[0] - row.top_logprobs[1]:.3g}."
    return words


def faults_of(results: list[CellResult]) -> list[str]:
    """Return the first difference, and every k for which some accepted length never occurred."""
    faults = [result.difference for result in results if result.difference is not None][:1]
    for k in sorted({result.cell.num_drafts for result in results}):
        of_k = [result for result in results if result.cell.num_drafts == k]
        counts = {
            "refused at once (a = 0)": sum(result.accepted_none for result in of_k),
            "accepted in part (0 < a < k)": sum(result.accepted_part for result in of_k) if k > 1 else 1,
            "accepted whole (a = k)": sum(result.accepted_whole for result in of_k),
        }
        if missing := [name for name, count in counts.items() if count == 0]:
            faults.append(f"With k={k} no chain was {' or '.join(missing)}: nothing is proved. Raise --max-tokens.")
    return faults


COLUMNS: Sequence[tuple[str, Callable[[CellResult], str]]] = (
    ("T", lambda result: f"{result.cell.temperature:g}"),
    ("seed", lambda result: "–" if result.cell.temperature == 0.0 else str(result.cell.seed)),
    ("k", lambda result: str(result.cell.num_drafts)),
    ("drafts", lambda result: result.cell.drafts),
    ("company", lambda result: result.cell.company),
    ("texts equal", lambda result: f"{result.num_equal}/{result.num_texts}"),
    ("tokens", lambda result: str(result.num_tokens)),
    ("steps with drafts", lambda result: str(result.num_steps)),
    ("a=0", lambda result: str(result.accepted_none)),
    ("0<a<k", lambda result: str(result.accepted_part)),
    ("a=k", lambda result: str(result.accepted_whole)),
)
