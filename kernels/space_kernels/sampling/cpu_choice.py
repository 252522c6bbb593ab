"""Choices over the vocabulary in one call, for logits in float32 on a CPU: what laws without processors ask for."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from space_kernels.build.cpu_library import CpuLibrary, cpu_library
from space_kernels.build.cpu_structs import LogitsStruct
from space_kernels.sampling.sampling_rows import BatchSamplingParams


def takes(logits: Tensor) -> CpuLibrary | None:
    """The library, where it can be called with these."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return None
    return cpu_library()


def is_bare(batch_params: BatchSamplingParams) -> bool:
    """Whether choosing by these is taking the greatest logit that is not banned."""
    return not (batch_params.edits or batch_params.divides or batch_params.truncates or batch_params.samples)


def greatest(library: CpuLibrary, logits: Tensor, banned_ids: Tensor) -> tuple[Tensor, Tensor]:
    """[N, V], overwritten at the banned ids -> each row's first greatest id [N] int64, and whether it has one [N] bool:
    no NaN, and its greatest logit is finite."""
    ids, usable = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)
    library.choose(byref(_struct(logits, banned_ids)), ids.data_ptr(), usable.data_ptr(), torch.get_num_threads())
    return ids, usable


def best_of(library: CpuLibrary, logits: Tensor, banned_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[N, V], overwritten at the banned ids -> each row's best ids, ascending, [N, M] int64; and [N, M] float32 of 0,
    or -inf where the logit is. M: `count`, or V if that is fewer. Equal logits: the lower ids."""
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
