"""What SPACE takes in memory, beside a server that drafts with a second model.

Computed from the models' shapes. With --check a small model of each kind is loaded here, and the growth of memory is
shown beside what the same arithmetic gives.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from space_eval.flags import whole_from
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.weight_files import give_back, mappings
from space_model.loading.load import load_model
from space_model.make_model import SIZES, Size
from space_model.malloc import keep_freed_memory, use_one_heap
from space_server.startup.model_need import shown
from space_train.estimate import SHAPES, ModelShape, UnknownShape
from tiny_checkpoints import tiny_checkpoint

from perf.harness import PerfError, Report, start_module, table

DRAFT_MODELS = {
    "tinyllama-1.1b": ModelShape("TinyLlama 1.1B", 32000, 2048, 22, 32, 4, 64, 5632, tied=False),
    "llama-160m": ModelShape("Llama 160M", 32000, 768, 12, 12, 12, 64, 3072, tied=False),
    "llama-68m": ModelShape("Llama 68M", 32000, 768, 2, 12, 12, 64, 3072, tied=False),
}
"""Common draft models."""
BLOCK = 16


@dataclass(frozen=True)
class Serving:
    """How a model is held, and the load it serves."""

    num_sequences: int
    num_tokens: int  # cached of each
    num_drafts: int  # k: in flight, each in a slot of its own
    rank: int  # of the adapter
    head_hidden: int  # of the draft head
    itemsize: int = 2  # bytes of a number
    on_cpu: bool = False  # the output head is packed beside its rows


@dataclass(frozen=True)
class Side:
    """One server's bytes."""

    name: str
    weights: int  # of the model that writes the text
    drafting: int  # of what drafts: adapter, mask embeddings and draft head, or a second model
    keys_values: int  # of all tokens
    reserved: int  # of the k+1 slots of each sequence that are written ahead
    drafting_keys_values: int  # of the second model

    @property
    def total(self) -> int:
        return self.weights + self.drafting + self.keys_values + self.reserved + self.drafting_keys_values

    @property
    def for_drafts(self) -> int:
        """What plain decoding does not need (it also writes one slot ahead)."""
        return self.drafting + self.reserved + self.drafting_keys_values


def held(shape: ModelShape, serving: Serving) -> int:
    packed = shape.output if serving.on_cpu else 0
    return (shape.num_parameters + packed) * serving.itemsize


def slot(shape: ModelShape, serving: Serving) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * serving.itemsize


def adapter(shape: ModelShape, serving: Serving) -> int:
    """Bytes of a gated adapter on every linear layer, of the masks' embeddings, and of the draft head (an MLP)."""
    masks = serving.num_drafts * shape.hidden_size
    head = 3 * shape.hidden_size * serving.head_hidden
    return (shape.adapters(serving.rank) + masks + head) * serving.itemsize


def side(shape: ModelShape, draft: ModelShape | None, serving: Serving) -> Side:
    """`draft`: the second model, with weights, keys and values of its own; None: SPACE."""
    each, ahead = slot(shape, serving), serving.num_drafts + 1
    sequences, tokens = serving.num_sequences, serving.num_tokens
    return Side(
        "SPACE" if draft is None else f"draft model {draft.name}", held(shape, serving),
        adapter(shape, serving) if draft is None else held(draft, serving), sequences * tokens * each,
        sequences * ahead * each, 0 if draft is None else sequences * (tokens + ahead) * slot(draft, serving),
    )  # fmt: skip


def sides_table(models: Sequence[ModelShape], drafts: Sequence[ModelShape], serving: Serving) -> str:
    head = ["model", "drafts by", "weights", "adapter, draft head / second weights", "keys and values"]
    head += ["k+1 slots ahead", "second keys and values", "total", "for drafts"]
    rows = []
    for model in models:
        for one in [side(model, draft, serving) for draft in (None, *drafts)]:
            sizes = (one.weights, one.drafting, one.keys_values, one.reserved, one.drafting_keys_values)
            cells = [shown(size) if size else "–" for size in (*sizes, one.total, one.for_drafts)]
            rows.append((model.name, one.name, *cells))
    return table(head, rows)


def check(size: str = "125m", draft: str = "15m") -> list[tuple[str, str, int, int]]:
    """(server, part, computed bytes, measured bytes), of models with random weights. Raises PerfError."""
    serving = Serving(4, 1024, 5, 32, SIZES[size].draft_head_width, on_cpu=True)
    num_slots = serving.num_sequences * (serving.num_tokens + serving.num_drafts + 1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _random(folder / "space", SIZES[size], serving)
        _random(folder / "plain", SIZES[size], None)
        _random(folder / "draft", SIZES[draft], None)
        shape, small = (ModelShape.of(str(folder / model)) for model in ("plain", "draft"))
        found = []
        for name, one, folders in (
            ("SPACE", side(shape, None, serving), ["space"]),
            ("draft model", side(shape, small, serving), ["plain", "draft"]),
        ):
            weights, keys_values = grown([folder / model for model in folders], num_slots)
            computed = one.keys_values + one.reserved + one.drafting_keys_values
            found.append((name, "weights", one.weights + one.drafting, weights))
            found.append((name, "keys and values", computed, keys_values))
    return found


def _random(folder: Path, size: Size, serving: Serving | None) -> None:
    """A random Llama; with `serving`, with an adapter and a draft head of its sizes."""
    tiny_checkpoint(
        folder, "llama", vocab_size=size.vocab_size, num_masks=0 if serving is None else serving.num_drafts,
        draft_head=serving is not None, draft_head_width=size.draft_head_width,
        adapter_rank=None if serving is None else serving.rank, words=True, dtype="bfloat16", window=size.window,
        hidden_size=size.hidden_size, num_layers=size.num_layers, num_heads=size.num_heads, kv_heads=size.num_heads,
        head_dim=size.hidden_size // size.num_heads, intermediate_size=size.intermediate_size,
    )  # fmt: skip


def grown(folders: Sequence[Path], num_slots: int) -> tuple[int, int]:
    """Bytes by which loading these models and writing their pages grow a process of its own. Raises PerfError."""
    with start_module("perf.memory", num_slots, *folders) as child:
        output = child.communicate(timeout=600)[0]
    if child.returncode:
        raise PerfError("--check could not measure; the reason is above.")
    weights, keys_values = json.loads(output.splitlines()[-1])
    return int(weights), int(keys_values)


def _child(num_slots: int, folders: Sequence[str]) -> None:
    """In a fresh process, so that no memory from before is reused: print what weights and pages take, as JSON."""
    use_one_heap()
    load_model(folders[-1])  # once beforehand: what libraries allocate at their first use is not weights
    keep_freed_memory()
    use_one_heap()
    files = [file for folder in folders for file in Checkpoint.open(folder).weights]
    give_back(files)
    start = _resident(files)
    models = [load_model(folder) for folder in folders]
    give_back(files)
    for model in models:
        model.embed(torch.arange(model.facts.vocab_size))  # what is read of the files from here on
    keep_freed_memory()
    loaded = _resident(files)
    pages = [model.allocate_kv(-(-num_slots // BLOCK), BLOCK) for model in models]
    print(json.dumps([loaded - start, _resident(files) - loaded]))
    del pages


def _resident(files: Sequence[Path]) -> int:
    """Bytes in memory that belong to no file, and those of these files (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    own = int(status.partition("RssAnon:")[2].split()[0]) * 1024
    return own + sum(here.resident for here in mappings(files))


def run(options: argparse.Namespace) -> Report:
    serving = Serving(options.sequences, options.tokens, options.k, options.rank, options.head_hidden)
    try:
        models = [ModelShape.of(name) for name in options.models]
        drafts = [DRAFT_MODELS.get(name) or ModelShape.of(name) for name in options.drafts]
    except UnknownShape as error:
        raise PerfError(str(error)) from error
    sides = {model.name: [side(model, draft, serving) for draft in (None, *drafts)] for model in models}
    record = {name: [asdict(one) | {"total": one.total} for one in of_model] for name, of_model in sides.items()}
    tables = [sides_table(models, drafts, serving)]
    notes = (
        "Computed from shapes, not measured: weights, keys and values; activations are left out, for both alike. "
        f"{serving.num_sequences} sequences of {serving.num_tokens} tokens, k={serving.num_drafts}, numbers of "
        f"{8 * serving.itemsize} bits; SPACE: a gated adapter of rank {serving.rank} and a draft head of width "
        f"{serving.head_hidden}. *For drafts*: what plain decoding would not take."
    )
    if options.check:
        notes += (
            " Second table: measured here, a random Llama of 125M on the CPU in bfloat16, its output head packed "
            "beside its rows as on every CPU; the draft model has 15M."
        )
        rows = [(*names, shown(was), shown(found), f"{found / was:.3f}") for *names, was, found in check()]
        tables.append(table(("server", "part", "computed", "measured", "measured / computed"), rows))
    return Report("Memory for drafting", notes, tables, {"serving": asdict(serving), "models": record})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", default=list(SHAPES), metavar="MODEL", help="1b, 7b, 13b, or checkpoints (all three)")
    add("--drafts", nargs="+", default=["tinyllama-1.1b", "llama-160m"], metavar="MODEL",
        help=f"second models: {', '.join(DRAFT_MODELS)}, or checkpoints (tinyllama-1.1b llama-160m)")  # fmt: skip
    add("--sequences", type=whole_from(1), default=8, help="at once (8)")
    add("--tokens", type=whole_from(1), default=2048, help="cached of each (2048)")
    add("--k", type=whole_from(1), default=5, help="drafts per step (5)")
    add("--rank", type=whole_from(1), default=32, help="of the adapter (32, as in training)")
    add("--head-hidden", type=whole_from(1), default=384, help="width of the draft head (384, as in training)")
    add("--check", action="store_true", help="load small models here and compare what they take with the arithmetic")


if __name__ == "__main__":
    _child(int(sys.argv[1]), sys.argv[2:])
