"""Where drafts come from: none, lookup, masks, or both joined, as `auto` chooses, on prompts of your own.

Every prompt is answered alone, through the worker's own step, in each of these ways in turn. All ways start from step
costs measured once, and learn from prompt to prompt as a server does. Prefill is not counted. A text that depends on
the drafts fails the measurement.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from space_common.worker.client import WorkerClient
from space_eval.data import load_conversations
from space_eval.flags import whole_from
from space_model.loading.load import load_model
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_router.config import ServeConfig
from space_router.text.model_text import ModelText
from space_server.config import ModelSource, parse
from space_server.drafts import DraftSources
from space_server.startup.calibration import calibrate
from space_server.step_cost import Point, StepCost
from space_server.worker import Worker

from perf.harness import Column, PerfError, Report, columns_table

ARMS: Mapping[str, tuple[bool, bool]] = {
    "none": (False, False), "lookup": (True, False), "masks": (False, True), "joined": (True, True),
}  # fmt: skip
"""Whether each way of drafting looks up, and whether masks or a recurrent head draft."""

BLOCK_SIZE = 16


@dataclass
class Way:
    """One way of drafting: its worker, and what has come of it."""

    name: str
    client: WorkerClient
    num_tokens: int = 0  # after the prefill's
    num_steps: int = 0
    seconds: float = 0.0
    drafted: dict[str, int] = field(default_factory=dict)  # by source
    accepted: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, model: SpaceModel, points: Sequence[Point], num_blocks: int) -> Way:
        lookup, by_model = ARMS[name]
        sources = DraftSources(lookup=lookup, masks=by_model, head=by_model)
        cost = StepCost.from_points(points) if points else None
        worker = Worker(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, sources=sources, cost=cost)
        return cls(name, WorkerClient(worker))

    def answer(self, prompt: Sequence[int], sampling: pb.Sampling, max_tokens: int, eos: Sequence[int]) -> list[int]:
        """Answer one prompt, and count its steps."""
        number = self.client.admit(prompt, max_tokens=max_tokens, sampling=sampling, eos_ids=eos)
        sequence = self.client.sequences[number]
        while not sequence.tokens:
            self.client.step()
        begun = time.perf_counter()
        self.client.run()
        self.seconds += time.perf_counter() - begun
        self.num_tokens += sum(len(report.tokens) for report in sequence.decoded)
        self.num_steps += len(sequence.decoded)
        for report in sequence.decoded:
            self._count(report)
        return sequence.tokens

    def _count(self, report: pb.SequenceReport) -> None:
        source = pb.DraftSource.Name(report.draft_source).removeprefix("DRAFT_SOURCE_").lower()
        leading = report.num_mask_drafts if report.draft_source else report.num_drafted
        parts = ("masks", leading, min(leading, report.num_accepted)), (
            source, report.num_drafted - leading, max(0, report.num_accepted - leading)
        )  # fmt: skip
        for name, drafted, accepted in parts:
            self.drafted[name] = self.drafted.get(name, 0) + drafted
            self.accepted[name] = self.accepted.get(name, 0) + accepted

    def record(self, plain: Way) -> dict[str, object]:
        """What the tables show."""
        rate, plain_rate = (way.num_tokens / max(way.seconds, 1e-9) for way in (self, plain))
        shares = {
            f"{name}_accepted": self.accepted.get(name, 0) / self.drafted[name] if self.drafted.get(name) else math.nan
            for name in ("lookup", "masks")
        }
        counts = {"drafted": self.drafted, "accepted": self.accepted}
        return {
            "way": self.name, "num_tokens": self.num_tokens, "tokens_per_step": self.num_tokens / self.num_steps,
            "rate": rate, "speedup": rate / plain_rate, **shares, **counts,
        }  # fmt: skip


COLUMNS: Sequence[Column] = (
    ("drafts by", "way", ""),
    ("tokens per step", "tokens_per_step", ".2f"),
    ("tokens/s", "rate", ".1f"),
    ("over none", "speedup", ".2f"),
    ("lookup's accepted", "lookup_accepted", ".2f"),
    ("masks' accepted", "masks_accepted", ".2f"),
)


def run(options: argparse.Namespace) -> Report:
    if options.prompts is None:
        raise PerfError("There are no prompts. Give --prompts FILE.")
    config = parse(["--model", options.model, "--listen", "unix:unused", *options.worker_flags])
    checkpoint = ModelSource(config).checkpoint()
    model = load_model(
        checkpoint, dtype=config.dtype, weights=config.weights, kv_dtype=config.kv_dtype, num_threads=config.num_threads
    )
    prompts = _encoded(options, config.download_folder, model.facts.window - options.max_tokens)
    num_blocks = -(-(max(map(len, prompts)) + options.max_tokens + 2 * BLOCK_SIZE) // BLOCK_SIZE)
    points: Sequence[Point] = ()
    if options.calibration_seconds:
        kv = model.allocate_kv(max(256, num_blocks), BLOCK_SIZE)
        points = calibrate(model, kv, max_sequences=2, seconds=options.calibration_seconds).points
    ways = [Way.of(name, model, points, num_blocks) for name in ARMS]
    failures = []
    for number, prompt in enumerate(prompts):
        sampling = pb.Sampling(seed=number, temperature=options.temperature)
        first = number % len(ways)
        texts = [
            way.answer(prompt, sampling, options.max_tokens, model.facts.eos_ids)
            for way in (*ways[first:], *ways[:first])
        ]
        if any(text != texts[0] for text in texts):
            failures.append(f"prompt {number + 1} has another text with other drafts")
    if not ways[0].num_steps:
        raise PerfError("No prompt has a second token. Give other prompts, or a larger --max-tokens.")
    records = [way.record(ways[0]) for way in ways]
    facts = {
        "model": model.facts.name, "numbers": model.facts.number_format, "prompts": len(prompts),
        "new tokens": options.max_tokens, "temperature": options.temperature,
    }  # fmt: skip
    notes = "One request at a time. Tokens and seconds are those after the prefill's token."
    return Report(
        "Drafts by source", notes, [columns_table(COLUMNS, records)],
        {"ways": records, "points": [(*shape, seconds) for shape, seconds in points]}, facts, failures,
    )  # fmt: skip


def _encoded(options: argparse.Namespace, folder: Path | None, most: int) -> list[list[int]]:
    """The ids of the prompts, the first `most` of each: questions through the chat template, texts as they are."""
    text = ModelText.load(
        ServeConfig(model=options.model, download_folder=None if folder is None else str(folder), offline="on")
    )
    found = []
    for conversation in load_conversations(options.prompts, options.limit):
        turn = conversation.turns[0]
        if conversation.is_chat and text.chat_template is not None:
            rendered = text.chat_template.render([{"role": "user", "content": turn}])
            ids = text.tokenizer.encode(rendered, add_special_tokens=False)
        else:
            ids = text.tokenizer.encode(turn)
        found.append(ids[:most])
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="a checkpoint, smollm2 or demo (demo)")
    add("--prompts", type=Path, help="JSONL (prompt, question, turns, …) or text; needed")
    add("--limit", type=whole_from(1), help="only so many prompts (all)")
    add("--max-tokens", type=whole_from(2), default=100, help="of each answer (100)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    add("--calibration-seconds", type=float, default=3.0, help="measure what steps cost; 0: learn it (3)")
    add("worker_flags", nargs="*", metavar="-- FLAG", help="of the worker, behind --: weights, threads, folder, …")
