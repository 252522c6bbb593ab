"""The draft head: k small sequential steps that condition each draft on the token before it (SPACE §4).
By tensor operations, and compiled for bfloat16 on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from space_kernels.build.cpu_library import CpuLibrary, DraftHeadStruct, DraftsStruct
from space_kernels.linear.cpu_linear import CompiledLinear
from space_kernels.linear.row_table import RowTable
from space_kernels.sampling.device_sampling import SamplingTensors, Stages
from space_kernels.sampling.noise import gumbel
from space_kernels.sampling.sampling_params import SamplingParams

NUM_CANDIDATES = 256
"""Candidate ids rescored per mask: a mask's 256 best ids keep 97 % of the accepted drafts (SPACE §4)."""

NUM_GREEDY_CANDIDATES = 64
"""Candidates rescored where all sampling is greedy. Noise lifts improbable ids; without it more candidates change no
draft."""

DRAFT_SHARPNESS = 1.25
"""Factor of the draft head's logits where sampling draws. A draft that shares the noise of verification is accepted
more often if it leans to the likeliest ids: 4 % more drafts a step at temperature 1."""


class DraftHeadForm(StrEnum):
    """The draft head's function of a mask's hidden state h and the embedding e of the previous token."""

    MLP = "mlp"  # h + W2·silu(W1·[h ; s·e]),   W1 [head hidden, 2·hidden]
    LOW_RANK = "low-rank"  # h + W2·(W1·(s·e)),   W1 [head hidden, hidden]: a bias by the previous token alone

    def num_inputs(self, hidden_size: int) -> int:
        """Columns of W1."""
        return 2 * hidden_size if self is DraftHeadForm.MLP else hidden_size


@dataclass(frozen=True)
class SamplingColumns:
    """Sampling parameters for choosing among candidates: columns [S, 1] on the device."""

    greedy: Tensor | None  # bool; None: every sequence is greedy, and the other columns are empty
    divisor: Tensor  # the temperature over DRAFT_SHARPNESS
    top_k: Tensor | None  # None: no sequence truncates; where off: at least the number of candidates
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, batch_params: Sequence[SamplingParams], device: torch.device) -> SamplingColumns:
        """Build float64 columns, the precision of sampling; only `greedy` matters for greedy sequences."""
        if all(params.greedy for params in batch_params):
            none = torch.empty(0, 1, dtype=torch.float64, device=device)
            return cls(greedy=None, divisor=none, top_k=None, top_p=none, min_p=none)
        values = [
            [float(params.greedy), params.divisor, params.top_k or math.inf, params.top_p, params.min_p]
            for params in batch_params
        ]
        columns = torch.tensor(values, dtype=torch.float64, device=device)  # [S, 5]
        greedy, divisor, top_k, top_p, min_p = columns.T[:, :, None]
        divisor = divisor / DRAFT_SHARPNESS
        cuts = any(params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 for params in batch_params)
        return cls(greedy=greedy > 0, divisor=divisor, top_k=top_k if cuts else None, top_p=top_p, min_p=min_p)


def sample_candidates(
    logits: Tensor, ids: Tensor, batch_params: SamplingColumns, keys: Tensor, positions: Tensor
) -> Tensor:
    """Sample one draft per row among a few candidates, with the noise that verification uses at that position.

    logits [S, M] float32, ids [S, M] int64 ascending per row, keys [S], positions [S] int64 -> [S] int64.
    Truncation considers the candidates only, and typical-p is skipped: a draft only has to be likely, not exact.
    """
    first = ids.gather(1, logits.argmax(dim=1, keepdim=True))  # equal values: the lower id
    if batch_params.greedy is None:
        return first[:, 0]
    z = logits.to(torch.float64) / batch_params.divisor
    if batch_params.top_k is not None:
        ordered, order = torch.sort(z, dim=1, descending=True, stable=True)
        rank = torch.arange(logits.shape[1], device=z.device)
        probability = torch.softmax(ordered.masked_fill(rank >= batch_params.top_k, -math.inf), dim=1)
        before = probability.cumsum(dim=1) - probability
        stays = (rank < batch_params.top_k) & ((before < batch_params.top_p) | (batch_params.top_p >= 1.0))
        stays &= probability >= batch_params.min_p * probability[:, :1]
        stays[:, 0] = True
        z = z.masked_fill(~torch.zeros_like(stays).scatter(1, order, stays), -math.inf)
    sampled = ids.gather(1, (z + gumbel(keys, positions, ids)).argmax(dim=1, keepdim=True))
    return torch.where(batch_params.greedy, first, sampled)[:, 0]


SampleCandidates = Callable[[Tensor, Tensor, SamplingColumns, Tensor, Tensor], Tensor]
"""The signature of `sample_candidates`."""


def propose(
    hidden: Tensor,
    ids: Tensor,
    offsets: Tensor,
    bonus: Tensor,
    positions: Tensor,
    keys: Tensor,
    batch_params: SamplingColumns,
    *,
    w1: Tensor,
    w2: Tensor,
    embedding_scale: float,
    form: DraftHeadForm = DraftHeadForm.MLP,
    embed: Callable[[Tensor], Tensor],
    logits_of: Callable[[Tensor, Tensor], Tensor],
    sample: SampleCandidates = sample_candidates,
) -> Tensor:
    """Draft up to K tokens for each of S sequences; returns [S, K] int64. Columns beyond a sequence's masks are unused.

    hidden [S, K, hidden]: hidden states of the masks, in order; ids [S, K, M] int64: each mask's candidates, ascending;
    offsets [S, K, M] float32: added to the candidates' logits by sampling parameters (-inf: impossible);
    bonus [S] int64; positions [S] int64: absolute position of the first draft; keys [S] int64.
    `embed`: [S] ids -> [S, hidden]; `logits_of`: [S, hidden], [S, M] ids -> [S, M] float32.

        mlp:       h'_j = h_j + W2·silu(W1·[h_j ; s·e(previous)])     previous: the bonus token, then the last draft
        low-rank:  h'_j = h_j + W2·(W1·(s·e(previous)))
    """
    previous = bonus
    drafts = []
    for j in range(hidden.shape[1]):
        h = hidden[:, j]
        token = embedding_scale * embed(previous)  # [S, hidden]
        is_mlp = form is DraftHeadForm.MLP
        inner = F.silu(F.linear(torch.cat([h, token], dim=1), w1)) if is_mlp else F.linear(token, w1)
        rescored = h + F.linear(inner, w2)  # inner [S, head hidden]
        logits = logits_of(rescored, ids[:, j]) + offsets[:, j]  # [S, M]
        previous = sample(logits, ids[:, j], batch_params, keys, positions + j)
        drafts.append(previous)
    return torch.stack(drafts, dim=1)  # [S, K]


def sampling_columns(batch_params: SamplingTensors, stages: Stages) -> SamplingColumns:
    """Extract what `sample_candidates` needs from the batch's sampling parameters."""

    def column(values: Tensor) -> Tensor:
        return values.to(torch.float64)[:, None]

    cuts = stages.cuts or stages.floors
    return SamplingColumns(
        greedy=batch_params.greedy[:, None] if stages.samples else None,
        divisor=column(batch_params.divisor) / DRAFT_SHARPNESS,
        top_k=column(batch_params.top_k) if cuts else None,
        top_p=column(batch_params.top_p),
        min_p=column(batch_params.log_min_p).exp(),
    )


def candidates(logits: Tensor, stages: Stages, edit: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return each mask's best ids, ascending, and the offsets that sampling parameters add to their logits.

    logits [S, K, V] float32 raw (overwritten) -> [S, K, M] int64, [S, K, M] float32. `edit`: `device_sampling.edit` for
    these rows. Penalties become a shift of the mask's own logit, which is accurate enough for a draft.
    """
    raw = logits.clone() if stages.edits or stages.bounds or stages.penalises else None
    edited = edit(logits)
    best = torch.topk(edited, min(NUM_CANDIDATES, logits.shape[2]), dim=2, sorted=False)
    ids, order = best.indices.sort(dim=2)
    allowed = best.values.gather(2, order)
    if raw is None:
        return ids, torch.where(allowed > -math.inf, 0.0, -math.inf)
    return ids, allowed - raw.gather(2, ids)


class CompiledDraftHead:
    """`draft_head.propose`. Last bits may differ from the reference: drafts are verified anyway."""

    def __init__(
        self,
        library: CpuLibrary,
        w1: Tensor,
        w2: Tensor,
        embedding: RowTable,
        output: RowTable,
        *,
        embedding_scale: float,
        form: DraftHeadForm,
    ) -> None:
        """w1 [inner, …], w2 [hidden, inner]; embedding and output [V, hidden]."""
        self._library = library
        self._inner, self._outer = CompiledLinear(library, w1, None), CompiledLinear(library, w2, None)
        self._held = embedding, output
        self._struct = DraftHeadStruct(
            self._inner.struct,
            self._outer.struct,
            *(table.struct() for table in self._held),
            len(w2),
            embedding_scale,
            form is DraftHeadForm.LOW_RANK,
        )

    @property
    def struct(self) -> DraftHeadStruct:
        """The C struct of the head; it keeps nothing alive."""
        return self._struct

    @staticmethod
    def takes(w1: Tensor, w2: Tensor, embedding: RowTable, output: RowTable) -> bool:
        """Whether the compiled head supports these weights."""
        return CompiledLinear.takes(w1) and CompiledLinear.takes(w2) and embedding.dtype == output.dtype == w1.dtype

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
        divisor, noise, top_k, top_p, min_p = None, None, None, None, None
        if batch_params.greedy is not None:
            steps = torch.arange(num_masks, device=keys.device)
            rows = keys.repeat_interleave(num_masks), (positions[:, None] + steps).flatten()
            drawn = gumbel(*rows, ids.view(-1, num_candidates)).view_as(ids)
            noise = drawn.masked_fill_(batch_params.greedy[:, :, None], 0.0).float()
            divisor = torch.where(batch_params.greedy, 1.0, batch_params.divisor).float()
            if batch_params.top_k is not None:
                top_k = batch_params.top_k.clamp(max=num_candidates).long()
                top_p, min_p = batch_params.top_p.double().contiguous(), batch_params.min_p.double().contiguous()
        chosen = torch.empty(num_sequences, num_masks, dtype=torch.int64)
        drafts = DraftsStruct(
            num_sequences,
            num_masks,
            num_candidates,
            hidden.data_ptr(),
            ids.data_ptr(),
            offsets.data_ptr(),
            None if divisor is None else divisor.data_ptr(),
            None if noise is None else noise.data_ptr(),
            None if top_k is None else top_k.data_ptr(),
            None if top_p is None else top_p.data_ptr(),
            None if min_p is None else min_p.data_ptr(),
            bonus.data_ptr(),
            chosen.data_ptr(),
        )
        self._library.draft(byref(self._struct), byref(drafts), torch.get_num_threads())
        return chosen
