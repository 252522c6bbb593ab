"""What loading a model adds to a process on a CPU: held afterwards, and at most meanwhile, beside its tensors' bytes.

Bytes are this process's share of resident pages (PSS), those of mapped files included, without keys and values. What
loading adds leaves out shared libraries: the share in them changes whenever another Python starts or ends. Tensors are
counted once, in the form that they are held in: a GGUF's own blocks, or so many bits of each number; adapters and
draft heads are counted, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from space_common import default_model
from space_common.hub import Hub
from space_kernels.linear.group_weights import INT4, INT4_HEAD, SHARED
from space_kernels.linear.rounded_inputs import GROUP
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.weight_files import give_back
from space_model.loading.load import load_model
from space_model.malloc import give_back_freed, keep_freed_memory, use_one_heap
from space_server.startup.model_need import shown, stored

from perf.harness import PerfError, Report, start_module, table

MOST_HELD, MOST_AT_ONCE = 1.15, 1.3
"""What loading may add, over the tensors' bytes: held, and at most meanwhile."""

OTHER = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=2048, n_threads=2, verbose=False)
next(iter(model.generate([1, 2, 3], temp=0.0)))
print(open("/proc/self/smaps_rollup").read().partition("Pss:")[2].split()[0])
"""


@dataclass(frozen=True)
class Loaded:
    """Bytes of one load."""

    weights: str
    tensors: int
    held: int
    at_once: int
    process: int  # all of the process afterwards

    @property
    def cells(self) -> tuple[str, ...]:
        sizes = shown(self.tensors), shown(self.held), shown(self.at_once), shown(self.process)
        return (f"`{self.weights}`", *sizes, f"{self.held / self.tensors:.2f}", f"{self.at_once / self.tensors:.2f}")


def opened(model: str) -> Checkpoint:
    return Checkpoint.open(default_model.choose(model, is_named=True, hub=Hub())[0])


def tensor_bytes(checkpoint: Checkpoint, weights: str) -> int:
    """Bytes of the model's tensors in this form, and of what drafts."""
    drafting = [] if checkpoint.home == checkpoint.folder else checkpoint.home.glob("*.safetensors")
    total = sum(file.stat().st_size for file in drafting)
    if weights == "packed" and checkpoint.gguf is None:
        return total + sum(file.stat().st_size for file in checkpoint.weights)
    if weights == "gguf" and checkpoint.gguf is not None:
        return total + sum(tensor.num_bytes for tensor in checkpoint.gguf.tensors.values())
    names = {name for name, _, _ in stored(checkpoint)}
    head = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
    group = SHARED * GROUP
    bits = {"int8": (8.0, 8.0)} | {"int4": tuple(8 * f.bytes_of_groups / group for f in (INT4, INT4_HEAD))}
    of_linears, of_head = bits.get(weights, (16.0, 16.0))
    for name, _, count in stored(checkpoint):
        share = of_head if name == head else of_linears if name.endswith("_proj.weight") else 16.0
        total += int(count * share / 8)
    return total


def loaded(model: str, weights: str, small: str) -> Loaded:
    """Load the model in a process of its own, after `small`. Raises PerfError."""
    with start_module("perf.loading", model, weights, small) as child:
        output = child.communicate(timeout=600)[0]
    if child.returncode:
        raise PerfError(f"{model} was not loaded with {weights}; the reason is above.")
    return Loaded(weights, *json.loads(output.splitlines()[-1]))


def _child(model: str, weights: str, small: str) -> None:
    """In a fresh process: print a `Loaded` but for its name, as JSON."""
    use_one_heap()
    torch.set_num_threads(1)
    first = opened(small)
    load_model(first, weights="int4" if weights == "gguf" and first.gguf is None else weights)  # imports, buffers
    gc.collect()
    give_back_freed()
    checkpoint = opened(model)
    before, resident = _pss_without_libraries(), _status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")
    held = load_model(checkpoint, weights=weights)
    at_once = _status("VmHWM:") - resident
    give_back()
    gc.collect()
    keep_freed_memory()
    added, process = _pss_without_libraries() - before, _pss()
    del held
    print(json.dumps([tensor_bytes(checkpoint, weights), added, at_once, process]))


def _pss() -> int:
    return int(Path("/proc/self/smaps_rollup").read_text().partition("Pss:")[2].split()[0]) * 1024


def _pss_without_libraries() -> int:
    total, counts = 0, True
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):  # addresses, flags, offset, device, inode, perhaps a file
            counts = ".so" not in Path(rest[-1]).suffixes
        elif first == "Pss:" and counts:
            total += int(rest[0]) * 1024
    return total


def _status(field: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(field)[2].split()[0]) * 1024


def other(python: str, model: Path) -> int:
    """Bytes of a process that has loaded the file by llama-cpp-python and computed a token. Raises PerfError."""
    run = subprocess.run([python, "-c", OTHER, str(model)], capture_output=True, text=True, check=False, timeout=600)
    if run.returncode:
        raise PerfError(f"{python} did not load {model}: {run.stderr[-400:]}")
    return int(run.stdout) * 1024


def run(options: argparse.Namespace) -> Report:
    found = [loaded(options.model, weights, options.small) for weights in options.weights]
    rows: list[Sequence[str]] = [one.cells for one in found]
    if options.llama:
        process = other(options.llama, opened(options.model).weights[0])
        rows.append(("llama.cpp, 2048 positions", "–", "–", "–", shown(process), "–", "–"))
    head = ("weights", "tensors", "held", "at most", "whole process", "held / tensors", "at most / tensors")
    failures = [
        f"{one.weights}: {one.held / one.tensors:.2f} times the tensors held, {one.at_once / one.tensors:.2f} at most"
        for one in found
        if one.held > MOST_HELD * one.tensors or one.at_once > MOST_AT_ONCE * one.tensors
    ]
    notes = f"{options.model}; loading may hold {MOST_HELD} times its tensors, and at most {MOST_AT_ONCE} times."
    record = {"model": options.model, "loaded": [vars(one) for one in found]}
    return Report("Memory of loading", notes, [table(head, rows)], record, failures=failures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2", help="as of serve (smollm2)")
    add("--weights", nargs="+", default=["plain"], metavar="FORM", help="plain, int8, int4, gguf, packed (plain)")
    add("--small", default="demo", help="a small model that is loaded before, for what is imported (demo)")
    add("--llama", metavar="PYTHON", help="a Python with llama-cpp-python, to load the same GGUF file beside")


if __name__ == "__main__":
    _child(*sys.argv[1:])
