"""A recurrent draft head's weights. It drafts from a chain row's hidden state, without masks, as ReDrafter's does.

s_0 = hidden state of the last accepted chain row        previous_0 = the bonus token
s_j = s_{j-1} + W2·silu(W1·[s_{j-1} ; scale·e(previous_{j-1})])
logits_j = output head's rows of the draft vocabulary · s_j        previous_j = draft j
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from space_kernels.build.cpu_library import cpu_library
from space_kernels.linear.cpu_linear import CompiledLinear
from space_kernels.linear.packed_linear import pad_rows
from space_kernels.linear.row_table import RowTable
from space_kernels.step.recurrent_head import CompiledRecurrentHead, next_state
from torch import Tensor, nn

from space_model.checkpoint.space_section import RecurrentHeadSection
from space_model.heads import BaseSpec, OutputHead, read_head_tensors
from space_model.model_error import InvalidSpaceSection


@dataclass(frozen=True)
class RecurrentHeadWeights:
    """The weights as loaded."""

    w1: Tensor  # [inner, 2·hidden]
    w2: Tensor  # [hidden, inner]
    embedding_scale: float
    num_drafts: int  # it was trained to make in a row
    ids: Tensor | None = None  # [D] int64 ascending: the draft vocabulary; None: the whole vocabulary
    acceptance: tuple[float, ...] = ()  # conditional, of draft 1, 2, …, as declared; empty: unknown


class RecurrentHead:
    """A recurrent head of an assembled model."""

    def __init__(
        self,
        weights: RecurrentHeadWeights,
        whole: OutputHead,
        linear: Callable[[Tensor, Tensor | None], nn.Module],
        form: str = "plain",
        embedding: RowTable | None = None,
    ) -> None:
        """`whole`: the model's output head, with its rows; `linear`: makes linears of weight and bias; `form`: of the
        draft vocabulary's rows on a CPU, int8 or plain; `embedding`: of the model, to draft in one call where that is
        possible. Raises InvalidSpaceSection for an id outside the vocabulary."""
        self.num_drafts, self.ids = weights.num_drafts, weights.ids
        self._scale = weights.embedding_scale
        self._first, self._second = linear(weights.w1, None), linear(weights.w2, None)
        self._output = whole
        if self.ids is not None:
            if int(self.ids[-1]) >= whole.vocab_size:
                raise InvalidSpaceSection(
                    f"The recurrent head drafts id {int(self.ids[-1])}, outside the vocabulary of {whole.vocab_size}."
                )
            self._output = whole.rows(self.ids, weights=form, linear=linear)
        self.compiled = None if embedding is None else self._compiled(embedding)
        """Drafts in one call; None where the head is not compiled."""

    def _compiled(self, embedding: RowTable) -> CompiledRecurrentHead | None:
        library, output = cpu_library(), self._output.logits_linear
        first, second = self._first, self._second
        if library is None or output is None or embedding.dtype != torch.bfloat16:
            return None
        if not isinstance(first, CompiledLinear) or not isinstance(second, CompiledLinear):
            return None
        num_ids, scale = self._output.vocab_size, self._scale
        return CompiledRecurrentHead(
            library, first, second, embedding, output, self.ids, num_ids=num_ids, embedding_scale=scale
        )

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        """[S, hidden], embedding of the id before the draft [S, hidden] -> the next state [S, hidden]."""
        if state.is_cuda or isinstance(self._first, CompiledLinear):
            return next_state(state, token, self._first, self._second, self._scale)
        padded = next_state(pad_rows(state), pad_rows(token), self._first, self._second, self._scale)
        return padded[: len(state)]

    def logits(self, state: Tensor) -> Tensor:
        """[S, hidden] -> [S, D] float32, of the draft vocabulary."""
        return self._output.logits(state)

    def widened(self, logits: Tensor, vocab_size: int) -> Tensor:
        """[S, D] -> [S, vocab_size]: -inf outside the draft vocabulary."""
        if self.ids is None:
            return logits
        whole = logits.new_full((len(logits), vocab_size), float("-inf"))
        return whole.index_copy_(1, self.ids, logits)

    def best(self, logits: Tensor) -> Tensor:
        """[S, D] -> [S] int64: the most probable ids."""
        best = logits.argmax(dim=1)
        return best if self.ids is None else self.ids[best]


def load_recurrent_head(folder: Path, section: RecurrentHeadSection, base: BaseSpec) -> RecurrentHeadWeights:
    """Read w1 [inner, 2·hidden], w2 [hidden, inner] and, where it has one, the draft vocabulary.
    Raises InvalidSpaceSection."""
    shapes = {
        "recurrent_head.w1.weight": (section.hidden, 2 * base.hidden_size),
        "recurrent_head.w2.weight": (base.hidden_size, section.hidden),
    }
    found = read_head_tensors(folder, section.file, shapes, {"recurrent_head.ids"})
    ids = found.get("recurrent_head.ids")
    if ids is not None:
        if ids.dtype != torch.int64 or ids.dim() != 1 or not len(ids) or int(ids[0]) < 0 or not _ascends(ids):
            raise InvalidSpaceSection(
                f"recurrent_head.ids in {folder / section.file} must be token ids, int64 and ascending."
            )
        ids = ids.to(base.device)
    w1, w2 = (base.place(found[name]) for name in shapes)
    return RecurrentHeadWeights(w1, w2, section.embedding_scale, section.num_drafts, ids, section.acceptance)


def _ascends(ids: Tensor) -> bool:
    return bool((ids[1:] > ids[:-1]).all())
