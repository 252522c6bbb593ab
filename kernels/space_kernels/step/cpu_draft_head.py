"""The compiled draft head, for bfloat16 on a CPU."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from space_kernels.build.cpu_library import CpuLibrary
from space_kernels.build.cpu_structs import DraftHeadStruct, DraftsStruct
from space_kernels.linear.cpu_linear import CompiledLinear
from space_kernels.sampling.noise import gumbel
from space_kernels.step.draft_head import DraftHeadForm, SamplingColumns


class CompiledDraftHead:
    """`draft_head.propose` without truncation. Last bits may differ from the reference: drafts are verified anyway."""

    def __init__(
        self,
        library: CpuLibrary,
        w1: Tensor,
        w2: Tensor,
        embedding: Tensor,
        output: Tensor,
        *,
        embedding_scale: float,
        form: DraftHeadForm,
    ) -> None:
        """w1 [inner, …], w2 [hidden, inner]; embedding and output [V, hidden]."""
        self._library = library
        self._inner, self._outer = CompiledLinear(library, w1, None), CompiledLinear(library, w2, None)
        self._held = embedding.contiguous(), output.contiguous()
        self._struct = DraftHeadStruct(
            self._inner.struct, self._outer.struct, *(table.data_ptr() for table in self._held), len(w2),
            embedding_scale, form is DraftHeadForm.LOW_RANK,
        )  # fmt: skip

    @staticmethod
    def takes(w1: Tensor, w2: Tensor, embedding: Tensor, output: Tensor) -> bool:
        """Whether the compiled head supports these weights."""
        return CompiledLinear.takes(w1) and CompiledLinear.takes(w2) and embedding.dtype == output.dtype == w1.dtype

    @staticmethod
    def obeys(batch_params: SamplingColumns) -> bool:
        """Whether the compiled head supports these sampling parameters: it does not truncate."""
        return batch_params.top_k is None

    def propose(
        self,
        hidden: Tensor,
        ids: Tensor,
        offsets: Tensor,
        bonus: Tensor,
        positions: Tensor,
        keys: Tensor,
        batch_params: SamplingColumns,
    ) -> Tensor:
        """Return drafts [S, K] int64; arguments as in `draft_head.propose`."""
        num_sequences, num_masks, num_candidates = ids.shape
        hidden, ids, offsets = hidden.contiguous(), ids.contiguous(), offsets.contiguous()
        divisor, noise = None, None
        if batch_params.greedy is not None:
            steps = torch.arange(num_masks, device=keys.device)
            rows = keys.repeat_interleave(num_masks), (positions[:, None] + steps).flatten()
            drawn = gumbel(*rows, ids.view(-1, num_candidates)).view_as(ids)
            noise = drawn.masked_fill_(batch_params.greedy[:, :, None], 0.0).float()
            divisor = torch.where(batch_params.greedy, 1.0, batch_params.divisor).float()
        chosen = torch.empty(num_sequences, num_masks, dtype=torch.int64)
        drafts = DraftsStruct(
            num_sequences, num_masks, num_candidates, hidden.data_ptr(), ids.data_ptr(), offsets.data_ptr(),
            None if divisor is None else divisor.data_ptr(), None if noise is None else noise.data_ptr(),
            bonus.data_ptr(), chosen.data_ptr(),
        )  # fmt: skip
        self._library.draft(byref(self._struct), byref(drafts), torch.get_num_threads())
        return chosen
