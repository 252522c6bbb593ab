"""Writes the converted folder atomically, with safetensors of bounded size."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from space_model.checkpoint.whole_folder import whole_folder
from space_model.convert.source import ConvertError


@contextmanager
def converted_folder(target: Path, *, num_bytes: int, force: bool) -> Iterator[Path]:
    """Yield a folder, which becomes `target` after the block, or is removed if the block raises.

    `num_bytes`: size of the output; lack of disk space is detected before anything is written. An existing `target` is
    replaced only with `force`, and only at the very end.
    """
    if target.exists() and not force:
        raise ConvertError(f"{target} exists already. Choose another folder, or replace it with --force.")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise ConvertError(
            f"The converted checkpoint takes {num_bytes / 1024**3:.1f} GiB; {target.parent} has "
            f"{free / 1024**3:.1f} GiB free. Make room or choose another disk."
        )
    with whole_folder(target) as folder:
        yield folder


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, max_bytes: int) -> None:
    """Write the tensors to safetensors files of at most `max_bytes` each (a larger tensor gets its own file).

    Holds one file's tensors in memory at a time. One file is `model.safetensors`; several are numbered and have an
    index, as transformers names them.
    """
    shard: dict[str, Tensor] = {}
    names: list[list[str]] = []  # per shard
    sizes: list[int] = []

    def flush() -> None:
        if shard:
            save_file(shard, folder / f"{len(names)}.safetensors", metadata={"format": "pt"})
            names.append(list(shard))
            sizes.append(_num_bytes(shard.values()))
            shard.clear()

    for name, tensor in tensors:
        if shard and _num_bytes(shard.values()) + tensor.nbytes > max_bytes:
            flush()
        shard[name] = tensor
    flush()
    if len(names) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, inside in enumerate(names):
        file = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(inside, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
