"""Perplexity of each form of the weights beside llama.cpp's, on the same ids in the same windows.

The text is the source of asyncio (CPython, PSF licence), which every Python brings. Windows do not overlap; each begins
with the tokenizer's BOS, or, where there is none, with an id of its own that is only context. llama.cpp reads the same
GGUF file where ours is one; of a Llama in bfloat16 it makes the formats of `--quantize` itself, and both read these.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from space_common import default_model
from space_common.hub import Hub
from space_eval.flags import whole_from
from space_eval.quality.perplexity import PerplexityMeter
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.loading.load import load_model
from transformers import AutoTokenizer

from perf.engines.gguf_llama import write_gguf
from perf.harness import PerfError, Report, log, table

MOST_WORSE = 0.005
"""How much larger our perplexity may be than llama.cpp's in the same format."""

CHILD = """
import json, sys
import numpy as np
from llama_cpp import Llama
asked = json.load(sys.stdin)
length = max(map(len, asked["windows"]))
model = Llama(asked["file"], n_ctx=length, n_batch=length, n_threads=asked["threads"], n_threads_batch=asked["threads"],
              logits_all=True, verbose=False)
for ids in asked["windows"]:
    model.reset()
    model.eval(ids)
    logits = np.asarray(model.scores[: len(ids) - 1], dtype=np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(ids) - 1), ids[1:]]
    print(float((np.log(np.exp(logits).sum(axis=1)) - chosen).sum()), flush=True)
"""

QUANTIZE = """
import sys
import llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + sys.argv[3])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


@dataclass(frozen=True)
class Measured:
    """A file in a form, ours beside theirs."""

    file: str
    weights: str
    ours: float  # nats
    theirs: float | None  # nats; None: llama.cpp does not read it, or was not asked
    num_ids: int

    @property
    def difference(self) -> float | None:
        """Our perplexity over theirs, less one."""
        return None if self.theirs is None else math.exp((self.ours - self.theirs) / self.num_ids) - 1

    @property
    def cells(self) -> tuple[str, ...]:
        theirs = None if self.theirs is None else math.exp(self.theirs / self.num_ids)
        shown = "–" if theirs is None or self.difference is None else f"{theirs:.4f}"
        more = "–" if self.difference is None else f"{self.difference:+.3%}"
        return (self.file, f"`{self.weights}`", f"{math.exp(self.ours / self.num_ids):.4f}", shown, more)


def windows_of(checkpoint: Checkpoint, length: int, most: int | None) -> list[list[int]]:
    """The ids of each window. Raises PerfError if the text has none."""
    files = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(checkpoint.folder), local_files_only=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = length - len(begin)
    windows = [begin + ids[first : first + size] for first in range(0, len(ids) - size + 1, size)][:most]
    if not windows:
        raise PerfError(f"the text has {len(ids)} tokens: no window of {length}.")
    return windows


def of_ours(model: str | Path, weights: str, windows: Sequence[Sequence[int]], options: argparse.Namespace) -> float:
    """Nats of all ids but each window's first."""
    loaded = load_model(model, weights=weights, dtype=options.dtype, device="cpu", num_threads=options.threads)
    meter = PerplexityMeter(loaded, None, length=len(windows[0]))
    nats = math.fsum(meter.nats(ids) for ids in windows)
    del loaded, meter
    gc.collect()
    return nats


def of_llama(python: str, file: Path, windows: Sequence[Sequence[int]], threads: int) -> float:
    """The same by llama-cpp-python. Raises PerfError."""
    asked = json.dumps({"file": str(file), "windows": windows, "threads": threads})
    run = subprocess.run([python, "-c", CHILD], input=asked, capture_output=True, text=True, check=False)
    if run.returncode:
        raise PerfError(f"{python} did not read {file}: {run.stderr[-400:]}")
    return math.fsum(map(float, run.stdout.split()))


def quantized(python: str, checkpoint: Checkpoint, forms: Sequence[str], folder: Path) -> list[Path]:
    """The checkpoint as GGUF files: BF16, and what llama.cpp makes of that. Raises PerfError."""
    files = [folder / "BF16.gguf"]
    try:
        write_gguf(checkpoint.folder, files[0], has_tokenizer=True)
    except ValueError as error:
        raise PerfError(str(error)) from None
    for form in forms:
        files.append(folder / f"{form}.gguf")
        run = subprocess.run(
            [python, "-c", QUANTIZE, str(files[0]), str(files[-1]), form], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise PerfError(f"{python} makes no {form} of {checkpoint.name}: {run.stderr[-400:]}")
    return files


def run(options: argparse.Namespace) -> Report:
    path = default_model.choose(options.model, is_named=True, hub=Hub())[0]
    checkpoint = Checkpoint.open(path)
    windows = windows_of(checkpoint, options.length, options.windows)
    num_ids = sum(len(ids) - 1 for ids in windows)
    found: list[Measured] = []

    def measure(name: str, model: str | Path, weights: str, file: Path | None) -> None:
        """`file`: what llama.cpp reads; None: nothing."""
        theirs = None if file is None else of_llama(options.llama, file, windows, options.threads)
        found.append(Measured(name, weights, of_ours(model, weights, windows, options), theirs, num_ids))
        log(" ".join(found[-1].cells))

    with tempfile.TemporaryDirectory() as folder:
        for weights in options.weights:
            own = checkpoint.gguf.path if checkpoint.gguf is not None and weights in ("gguf", "plain") else None
            measure(own.name if own else checkpoint.name, path, weights, own if options.llama else None)
        if options.quantize and not options.llama:
            raise PerfError("--quantize needs --llama PYTHON, which makes the files.")
        for file in quantized(options.llama, checkpoint, options.quantize, Path(folder)) if options.quantize else ():
            measure(file.stem, file, "plain" if file.stem == "BF16" else "gguf", file)
    failures = [
        f"{one.file} {one.weights}: {one.difference:+.2%} perplexity over llama.cpp's"
        for one in found
        if one.difference is not None and one.difference > MOST_WORSE
    ]
    notes = f"{options.model}; {num_ids} ids counted, in {len(windows)} windows of {len(windows[0])}; {options.dtype}."
    head = ("file", "weights", "perplexity", "llama.cpp", "difference")
    record = {"measured": [asdict(one) for one in found]}
    return Report("Perplexity", notes, [table(head, [one.cells for one in found])], record, failures=failures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2", help="as of serve (smollm2)")
    add("--weights", nargs="*", default=["plain"], metavar="FORM", help="plain, int8, int4, gguf, packed (plain)")
    add("--llama", metavar="PYTHON", help="a Python with llama-cpp-python, to read the same GGUF files")
    add("--quantize", nargs="*", default=[], metavar="FORM",
        help="formats of llama.cpp, such as Q8_0 Q4_0 Q4_1, made of a Llama in bfloat16 and read by both")  # fmt: skip
    add("--length", type=whole_from(2), default=1024, help="ids of a window (1024)")
    add("--windows", type=whole_from(1), help="most windows (all of the text)")
    add("--threads", type=whole_from(1), default=2, help="of both (2)")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of ours (bfloat16)")
