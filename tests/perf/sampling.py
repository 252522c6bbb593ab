"""Sampling a batch of rows on the CPU: the compiled library beside torch's operations.

Both compute the same ids. A row is one sequence's logits, normally distributed as a language model's are spread; every
turn samples all rows once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from space_eval.flags import whole_from
from space_kernels.build.cpu_library import cpu_library
from space_kernels.sampling import sampler
from space_kernels.sampling.sampling_params import SamplingParams, SamplingRow
from torch import Tensor

from perf.harness import Column, PerfError, Report, columns_table, log, numbers, take_turns, without_tails

ROWS = (1, 6, 36)
SPREAD = 3.0  # standard deviation of the logits
SEEN = tuple(range(30))  # ids of the prompt, which penalties apply to
BANNED = torch.empty(0, dtype=torch.int64)

Subject = Callable[[Tensor], object]

SUBJECTS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {},
    "and top_p 0.9": {"top_p": 0.9},
    "and top_k 40": {"top_k": 40},
    "and min_p 0.05": {"min_p": 0.05},
    "and repetition_penalty 1.1": {"repetition_penalty": 1.1},
}
NUM_TOP = 5

COLUMNS: tuple[Column, ...] = (
    ("what", "what", ""),
    ("rows", "rows", ""),
    ("torch, ms", "torch_ms", ""),
    ("compiled, ms", "compiled_ms", ""),
    ("torch / compiled", "ratio", ".1f"),
)


def subjects(count: int) -> dict[str, Subject]:
    """The measured calls for [count, V] float32 logits, by name."""
    found: dict[str, Subject] = {}
    for name, values in SUBJECTS.items():
        params = SamplingParams(key=3, temperature=0.7, **values)
        rows = [SamplingRow(params, SEEN, len(SEEN), (5,) * (number % 6)) for number in range(count)]
        found[name] = lambda logits, rows=rows: sampler.sample_rows(logits.clone(), rows, BANNED)  # type: ignore[misc]
    found[f"log-probabilities of the {NUM_TOP} most probable"] = lambda logits: sampler.log_probabilities(
        logits, [0] * count, NUM_TOP
    )
    return found


def measure(logits: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Time every subject on all rows of `logits` [N, V], both ways in turn."""
    found = []
    for name, subject in subjects(len(logits)).items():
        seconds: dict[str, list[float]] = {"torch": [], "compiled": []}

        def turn(arm: str, _: int, subject: Subject = subject, seconds: dict[str, list[float]] = seconds) -> None:
            library = None if arm == "torch" else cpu_library()
            with mock.patch.object(sampler, "cpu_library", return_value=library):
                begun = time.perf_counter()
                subject(logits)
                seconds[arm].append(time.perf_counter() - begun)

        take_turns(list(seconds), rounds + 1, turn)
        spreads = {arm: without_tails([1e3 * one for one in all_[1:]]) for arm, all_ in seconds.items()}
        found.append(
            {
                "what": name,
                "rows": len(logits),
                "torch_ms": spreads["torch"].shown(2),
                "compiled_ms": spreads["compiled"].shown(2),
                "ratio": spreads["torch"].median / spreads["compiled"].median,
            }
        )
    return found


def run(options: argparse.Namespace) -> Report:
    """Every subject at every number of rows. Raises PerfError without the compiled library."""
    library = cpu_library()
    if library is None:
        raise PerfError("this machine has no compiled operations; the log says why.")
    torch.set_num_threads(options.num_threads)
    generator = torch.Generator().manual_seed(0)
    found: list[dict[str, Any]] = []
    for count in options.rows:
        log(f"{count} rows")
        found += measure(torch.randn(count, options.vocabulary, generator=generator) * SPREAD, options.rounds)
    notes = (
        f"Medians of {options.rounds} rounds after an uncounted one, both in turn; in brackets where 80 % of the "
        "rounds are. Copying the logits, which sampling overwrites, is part of both."
    )
    facts = {"kind": library.kind, "threads": options.num_threads, "vocabulary": options.vocabulary}
    return Report("Sampling", notes, [columns_table(COLUMNS, found)], {"rows": found}, facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=numbers(1), default=ROWS, metavar="N,N,…", help="numbers of rows (1,6,36)")
    add("--vocabulary", type=whole_from(2), default=49152, help="logits of a row (49152)")
    add("--rounds", type=whole_from(1), default=9, help="measurements of each (9)")
    add("--num-threads", type=whole_from(1), default=1, help="threads (1)")
