"""From hidden states to logits: the output head, whole or sharded by vocabulary, and the draft head's weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from space_common.files import is_contained
from space_kernels.build.cpu_library import cpu_library
from space_kernels.linear.cpu_linear import CompiledLinear, torch_linear
from space_kernels.linear.cuda_linear import CudaLinear
from space_kernels.linear.group_weights import GroupLinear, Parts, group_form
from space_kernels.linear.packed_linear import PackedLinear, pad_rows
from space_kernels.linear.row_table import RowTable
from space_kernels.step.draft_head import CompiledDraftHead, DraftHeadForm
from torch import Tensor, nn
from torch.nn import functional as F

from space_model.checkpoint.space_section import DraftHeadSection
from space_model.checkpoint.stored_weight import StoredWeight
from space_model.model_error import InvalidSpaceSection
from space_model.model_facts import Ranks
from space_model.stored_weights import read_once

_VOCABULARY_TILE = 64
"""The packed head is padded with zero rows to a multiple of this, so that element-wise work on logits has no tail."""


class OutputHead:
    """logits = cap(scale · hidden·Eᵀ + bias), float32."""

    def __init__(
        self,
        weight: Tensor | RowTable,
        bias: Tensor | None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        packed: bool = True,
        weights: str = "plain",
        keeps_rows: bool = True,
        stored: StoredWeight | None = None,
        table: RowTable | None = None,
        linear: Callable[[Tensor, Tensor | None], nn.Module] = CudaLinear,
    ) -> None:
        """weight [V, hidden]; of a table, a few rows are read at a time if they are quantised. The CPU's full matmul
        uses a packed copy. `packed` False: no copy, for a head with gathered rows only; `weights`: int8 or int4: the
        copy has eight bits; `keeps_rows` False: no gathered rows are needed; `stored`: the same weight as its file has
        it, which the copy keeps; on a CPU. `table`: gathered rows; None: those of the weight. `linear` replaces the
        full matmul."""
        is_packed = packed and (isinstance(weight, RowTable) or weight.device.type == "cpu")
        library = cpu_library() if is_packed and CompiledLinear.takes(weight) else None
        missing = -len(weight) % _VOCABULARY_TILE
        if isinstance(weight, RowTable) and (missing or library is None or weights not in ("int8", "int4")):
            weight = weight[:]
        if isinstance(weight, Tensor):
            weight = weight.detach()
        self.table = (table or RowTable.of(weight)) if keeps_rows else None
        self.bias = None if bias is None else bias.detach()
        self.vocab_size = len(weight)
        self._scale, self._softcap = scale, softcap
        self._linear: nn.Module
        if is_packed:
            padded_bias = None if self.bias is None else F.pad(self.bias, (0, missing))
            if stored is not None:
                self._linear = _from_stored(read_once([*stored[:-1], stored[-1].padded(missing)]), padded_bias)
                return
            padded = F.pad(weight, (0, 0, 0, missing)) if isinstance(weight, Tensor) and missing else weight
            if library is not None:
                form = group_form(weights, head=True)
                self._linear = CompiledLinear(library, padded, padded_bias, wide=True, weights=form or weights)
            elif weights in ("int8", "int4"):
                self._linear = torch_linear(weights, head=True)(padded, padded_bias, wide=True)
            else:
                assert isinstance(padded, Tensor)
                self._linear = PackedLinear(padded, padded_bias)
        else:
            assert isinstance(weight, Tensor)
            self._linear = linear(weight, self.bias)

    @property
    def is_plain(self) -> bool:
        """Return whether the logits are a plain matmul without bias, scale or cap."""
        return self.bias is None and self._scale == 1.0 and self._softcap is None

    @property
    def logits_linear(self) -> CompiledLinear | None:
        """Return the compiled matmul if it gives the logits (and padding behind them) without scale or cap."""
        is_whole = self._scale == 1.0 and self._softcap is None
        return self._linear if is_whole and isinstance(self._linear, CompiledLinear) else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32; a row's logits do not depend on the other rows."""
        padded = hidden if isinstance(self._linear, CompiledLinear) else pad_rows(hidden)
        logits = self._finish(self._linear(padded).float())
        num_rows, width = len(hidden), self.vocab_size
        return logits if logits.shape == (num_rows, width) else logits[:num_rows, :width]

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N, hidden], ids [N, M] -> [N, M] float32: the logits of those ids."""
        if self.table is None:
            raise RuntimeError("The rows of this head were not kept: there is no draft head to rescore with.")
        if hidden.is_cuda:
            from space_kernels.step.draft_head_triton import logits_of

            assert isinstance(self.table.source, Tensor)
            logits = logits_of(hidden, self.table.source, ids)
        else:  # each row times its own rows of the weight, [N, M, hidden]
            logits = torch.bmm(self.table.rows(ids).float(), hidden.float().unsqueeze(-1)).squeeze(-1)
        if self.bias is not None:
            logits = logits + self.bias[ids]
        return self._finish(logits)

    def rows(self, ids: Tensor, **form: Any) -> OutputHead:
        """Return the head of the ids [D] alone, which copies their rows. `form`: keyword arguments of the class."""
        if self.table is None:
            raise RuntimeError("The rows of this head were not kept.")
        bias = None if self.bias is None else self.bias[ids]
        return OutputHead(
            self.table.rows(ids), bias, scale=self._scale, softcap=self._softcap, keeps_rows=False, **form
        )

    def _finish(self, logits: Tensor) -> Tensor:
        if self._scale != 1.0:
            logits = logits.mul_(self._scale)
        return logits if self._softcap is None else logits.div_(self._softcap).tanh_().mul_(self._softcap)


def _from_stored(weight: Parts, bias: Tensor | None) -> nn.Module:
    library = cpu_library()
    if library is None:
        return GroupLinear(weight, bias, wide=True)
    return CompiledLinear(library, weight, bias, wide=True)


class ShardedHead:
    """Each rank computes the logits of its ids; rank 0 concatenates them. Only rank 0 needs the logits, because it
    alone samples: sampling reads penalties' counts, bans and histories, which other ranks do not have, and a single
    process cannot disagree with itself."""

    def __init__(self, part: OutputHead, whole: OutputHead | None, vocab_size: int, ranks: Ranks) -> None:
        """`part`: this rank's ids, equally many on every rank; `whole`: rank 0's whole head, to rescore drafts."""
        self._part, self.whole, self._ranks = part, whole, ranks
        self.vocab_size = vocab_size

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32 on rank 0, [N, 0] elsewhere; all ranks must pass the same rows."""
        parts = self._ranks.gather(self._part.logits(hidden).contiguous())
        if not parts:
            return hidden.new_empty(len(hidden), 0, dtype=torch.float32)
        return torch.cat(parts, dim=1)[:, : self.vocab_size]

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[N, hidden], ids [N, M] -> [N, M] float32; computed on rank 0 alone."""
        if self.whole is None:
            raise RuntimeError("This rank does not have the whole head: it has no draft head to rescore with.")
        return self.whole.logits_of(hidden, ids)


@dataclass(frozen=True)
class BaseSpec:
    """What adapters and draft heads are loaded for: a base model, where and how it is held."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class DraftHeadWeights:
    """h'_j = h_j + W2·silu(W1·[h_j ; s·e(previous)]), or h_j + W2·(W1·(s·e(previous)))  (SPACE §4)."""

    w1: Tensor  # [head hidden, 2·hidden]; low-rank: [head hidden, hidden]
    w2: Tensor  # [hidden, head hidden]
    embedding_scale: float  # s
    form: DraftHeadForm = DraftHeadForm.MLP
    compiled: CompiledDraftHead | None = None  # used instead of these tensors on a CPU that supports it


def load_draft_head(folder: Path, section: DraftHeadSection, base: BaseSpec) -> DraftHeadWeights:
    """Read w1 [head hidden, 2·hidden or, low-rank, hidden] and w2 [hidden, head hidden], and check their shapes."""
    wanted = {
        "draft_head.w1.weight": (section.hidden, section.form.num_inputs(base.hidden_size)),
        "draft_head.w2.weight": (base.hidden_size, section.hidden),
    }
    found = read_head_tensors(folder, section.file, wanted)
    w1, w2 = (base.place(found[name]) for name in wanted)
    return DraftHeadWeights(w1, w2, section.embedding_scale, section.form)


def read_head_tensors(
    folder: Path, name: str, wanted: Mapping[str, tuple[int, ...]], others: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the tensors of the safetensors file `name` in `folder`: the `wanted` ones, of these shapes and finite
    floats, and those of `others` that it has. Raises InvalidSpaceSection."""
    file = folder / name
    if file.parent != folder or not file.is_file() or not is_contained(file, folder):
        raise InvalidSpaceSection(f"The draft head {name} is not in {folder}.")
    try:
        with safe_open(file, framework="pt") as tensors:
            found = {one: tensors.get_tensor(one) for one in tensors.keys()}  # noqa: SIM118  (safe_open is no mapping)
    except SafetensorError as error:
        raise InvalidSpaceSection(f"{file} is no safetensors file: {error}") from error
    if unknown := sorted(found.keys() - wanted.keys() - set(others)):
        raise InvalidSpaceSection(f"{file} has {unknown[0]}, which is no part of this draft head.")
    for one, shape in wanted.items():
        if one not in found:
            raise InvalidSpaceSection(f"{file} has no tensor {one}.")
        if tuple(found[one].shape) != shape:
            raise InvalidSpaceSection(
                f"{one} in {file} has shape {tuple(found[one].shape)}; config.json makes it {shape}."
            )
        if not found[one].is_floating_point() or not bool(found[one].float().isfinite().all()):
            raise InvalidSpaceSection(f"{one} in {file} is {found[one].dtype}, or has values that are not finite.")
    return found


def with_compiled(head: DraftHeadWeights | None, embedding: RowTable, output: OutputHead) -> DraftHeadWeights | None:
    """Add the compiled form if this CPU supports it and the logits are a plain matmul."""
    library = cpu_library()
    if head is None or library is None or output.table is None or not output.is_plain:
        return head
    tensors = head.w1, head.w2, embedding, output.table
    if not CompiledDraftHead.takes(*tensors):
        return head
    compiled = CompiledDraftHead(library, *tensors, embedding_scale=head.embedding_scale, form=head.form)
    return replace(head, compiled=compiled)


UNMEASURED = 64  # the result on devices that are not measured
SMALL = 1 << 20  # bytes of a head that stays in a core's cache: one product costs less than two
BASE = 2  # number of rows that takes the time of reading the weights
TRIED = (4, 5, 6, 8, 10, 12, 16, 20, 24, 32)  # numbers of rows to try

WHOLE_ROUNDS, STEADY_ROUNDS, STEADY = 2, 8, 0.01
"""Rounds that time all counts; then rounds that time only the counts at the limit, until so many in a row lower no
minimum by more than this share."""

CACHED = 64 << 20
"""Bytes read before each timed call, so that the weights come from memory, as in a step behind the layers' weights."""

SECONDS, MOST_SECONDS = 0.3, 1.0  # time limits for starting a round: normally, and while minima still fall


def head_rows(
    logits: Callable[[Tensor], Tensor], base: BaseSpec, num_bytes: int, clock: Callable[[], float] | None = None
) -> int:
    """Return the most rows [R, hidden_size] whose `logits` take at most twice as long as two rows; 0 if none do.
    `num_bytes` of the head's weights; `clock` in seconds; None: the CPU time of all threads, which other load hardly
    affects."""
    if torch.device(base.device).type != "cpu":
        return UNMEASURED
    if num_bytes <= SMALL:
        return max(TRIED)
    if clock is None:
        clock = time.process_time
    others = torch.zeros(CACHED // 4)
    rows = torch.zeros(max(TRIED), base.hidden_size, dtype=base.dtype, device=base.device)
    logits(rows[:BASE])  # warm-up
    least: dict[int, float] = {}
    begun, num_rounds, last_fall = clock(), 0, 0
    tried: Sequence[int] = TRIED
    while num_rounds < WHOLE_ROUNDS + STEADY_ROUNDS or num_rounds - last_fall < STEADY_ROUNDS:
        for count in (number for one in tried for number in (BASE, one)):
            others.sum()
            started = clock()
            logits(rows[:count])
            taken = clock() - started
            if taken < (1.0 - STEADY) * least.get(count, math.inf):
                last_fall = num_rounds
            least[count] = min(least.get(count, taken), taken)
        num_rounds += 1
        fitting = [count for count in TRIED if _at_most(least, count) <= 2.0 * least[BASE]]
        if num_rounds >= WHOLE_ROUNDS:
            tried = [*fitting[-1:], *TRIED[len(fitting) : len(fitting) + 1]]
        if clock() - begun > (MOST_SECONDS if last_fall + 2 > num_rounds - WHOLE_ROUNDS else SECONDS):
            break
    return max(fitting, default=0)


def _at_most(least: dict[int, float], count: int) -> float:
    return min(taken for rows, taken in least.items() if rows >= count)
