"""The weights of the draft head: k small sequential steps that condition each draft on the previous one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from space_kernels.build.cpu_library import cpu_library
from space_kernels.step.draft_head import CompiledDraftHead, DraftHeadForm
from torch import Tensor

from space_model.heads.output_head import OutputHead


@dataclass(frozen=True)
class DraftHeadWeights:
    """h'_j = h_j + W2·silu(W1·[h_j ; s·e(previous)]), or h_j + W2·(W1·(s·e(previous)))  (SPACE §4)."""

    w1: Tensor  # [head hidden, 2·hidden]; low-rank: [head hidden, hidden]
    w2: Tensor  # [hidden, head hidden]
    embedding_scale: float  # s
    form: DraftHeadForm = DraftHeadForm.MLP
    compiled: CompiledDraftHead | None = None  # used instead of these tensors on a CPU that supports it


def with_compiled(head: DraftHeadWeights | None, embedding: Tensor, output: OutputHead) -> DraftHeadWeights | None:
    """Add the compiled form if this CPU supports it and the logits are a plain matmul."""
    library = cpu_library()
    if head is None or library is None or output.weight is None or not output.is_plain:
        return head
    tensors = head.w1, head.w2, embedding, output.weight
    if not CompiledDraftHead.takes(*tensors):
        return head
    compiled = CompiledDraftHead(library, *tensors, embedding_scale=head.embedding_scale, form=head.form)
    return replace(head, compiled=compiled)
