"""The recurrent draft head: drafts one after the other from the state of the last accepted chain row, without masks.

    s_j = s_{j-1} + W2·silu(W1·[s_{j-1} ; scale·e(previous)])        previous: the bonus token, then the last draft

The idea is ReDrafter's (arXiv 2403.09919): one small recurrent network instead of a head a position.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref

import torch
from torch import Tensor
from torch.nn import functional as F

from space_kernels.build.cpu_library import CpuLibrary, RecurrentDraftsStruct, RecurrentHeadStruct
from space_kernels.linear.cpu_linear import CompiledLinear
from space_kernels.linear.row_table import RowTable

Linear = Callable[[Tensor], Tensor]


def next_state(state: Tensor, token: Tensor, first: Linear, second: Linear, scale: float) -> Tensor:
    """Return s_j [S, hidden] from s_{j-1} and the embedding `token` [S, hidden] of the id before the draft.
    `first` multiplies by W1, `second` by W2."""
    return state + second(F.silu(first(torch.cat([state, scale * token], dim=1))))


class CompiledRecurrentHead:
    """A recurrent head's drafts in one call, for bfloat16 on a CPU. The last bits of a state may differ from those of
    `next_state`, which rounds once more: drafts are verified anyway."""

    def __init__(
        self,
        library: CpuLibrary,
        first: CompiledLinear,
        second: CompiledLinear,
        embedding: RowTable,
        output: CompiledLinear,
        ids: Tensor | None,
        *,
        num_ids: int,
        embedding_scale: float,
    ) -> None:
        """`output`: the draft vocabulary's rows of the output head, with float32 results, and maybe zero rows behind
        the `num_ids`; ids [num_ids] int64 ascending, None: row d is id d; embedding [V, hidden]."""
        self._library, self._num_outputs = library, output.out_features
        self._held = first, second, embedding, output, ids
        self._struct = RecurrentHeadStruct(
            first.struct,
            second.struct,
            embedding.struct(),
            output.struct,
            None if ids is None else ids.data_ptr(),
            embedding.width,
            num_ids,
            embedding_scale,
        )

    def draft(self, state: Tensor, previous: Tensor, num_drafts: int) -> Tensor:
        """Return drafts [S, num_drafts] int64, each the likeliest behind those before it. state [S, hidden], of the
        chain rows that gave the tokens `previous` [S] int64."""
        chosen = state.new_empty(len(state), num_drafts, dtype=torch.int64)
        self._run(state.clone(memory_format=torch.contiguous_format), previous, chosen)
        return chosen

    def advance(self, state: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next state [S, hidden], and the logits [S, num_ids] float32 of its draft."""
        state = state.clone(memory_format=torch.contiguous_format)
        logits = self._run(state, previous, state.new_empty(len(state), 1, dtype=torch.int64))
        return state, logits[:, : self._struct.num_ids]

    def _run(self, state: Tensor, previous: Tensor, chosen: Tensor) -> Tensor:
        """Draft into `chosen` [S, drafts], and overwrite the state, contiguous. Returns the last draft's logits."""
        logits = torch.empty(len(state), self._num_outputs)
        drafts = RecurrentDraftsStruct(
            *chosen.shape,
            state.data_ptr(),
            previous.data_ptr(),
            logits.data_ptr(),
            self._num_outputs,
            chosen.data_ptr(),
        )
        self._library.draft_recurrent(byref(self._struct), byref(drafts), torch.get_num_threads())
        return logits
