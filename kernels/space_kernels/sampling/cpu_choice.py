"""Compiled argmax and top-k over the vocabulary, for float32 logits on a CPU without logits processors."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from space_kernels.build.cpu_library import CpuLibrary, cpu_library
from space_kernels.build.cpu_structs import LogitsStruct
from space_kernels.sampling.sampling_rows import BatchSamplingParams


def takes(logits: Tensor) -> CpuLibrary | None:
    """Return the compiled library if it supports these logits, else None."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return None
    return cpu_library()


def is_bare(batch_params: BatchSamplingParams) -> bool:
    """Whether these parameters sample the greatest logit that is not banned."""
    return not (batch_params.edits or batch_params.divides or batch_params.truncates or batch_params.samples)


def greatest(library: CpuLibrary, logits: Tensor, banned_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's greatest id [N] int64, ties to the lower id, and whether it is usable [N] bool.

    logits [N, V], overwritten at the banned ids. A row is usable if it has no NaN and its greatest logit is finite.
    """
    ids, usable = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)
    library.choose(byref(_struct(logits, banned_ids)), ids.data_ptr(), usable.data_ptr(), torch.get_num_threads())
    return ids, usable


def best_of(library: CpuLibrary, logits: Tensor, banned_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's best M = min(count, V) ids, ascending, [N, M] int64, and offsets [N, M] float32.

    logits [N, V], overwritten at the banned ids. An offset is -inf where the logit is, else 0. Ties: the lower ids.
    """
    count = min(count, logits.shape[1])
    ids, offsets = torch.empty(len(logits), count, dtype=torch.int64), torch.empty(len(logits), count)
    here = byref(_struct(logits, banned_ids))
    library.best_of(here, count, ids.data_ptr(), offsets.data_ptr(), torch.get_num_threads())
    return ids, offsets


def _struct(logits: Tensor, banned_ids: Tensor) -> LogitsStruct:
    rows, vocabulary = logits.shape
    return LogitsStruct(
        logits.data_ptr(), rows, logits.stride(0), vocabulary, banned_ids.data_ptr(), len(banned_ids)
    )  # fmt: skip
