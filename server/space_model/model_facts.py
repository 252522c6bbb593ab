"""A loaded model's figures: sent from the worker to the router, and used for sizing; and the ranks that share it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from space_kernels.build.cpu_library import cpu_library
from space_kernels.fp8 import FORMAT
from space_kernels.recurrence.states import LayerState
from torch import Tensor


def number_format(dtype: torch.dtype, weights: str, *, fp8_kv: bool) -> str:
    """Return a description such as `bfloat16 with fp8 weights and fp8 keys and values`."""
    small = ([] if weights == "plain" else [f"{weights} weights"]) + ["fp8 keys and values"] * fp8_kv
    form = str(dtype).removeprefix("torch.")
    return f"{form} with {' and '.join(small)}" if small else form


class LayerKV(NamedTuple):
    """A layer's keys and values in the pages."""

    kv_heads: int
    head_dim: int
    source: int  # number of the layer whose pages it reads; its own if it stores keys and values
    value_size: int | None = None  # numbers of a value; None: as many as of a key

    @property
    def value_dim(self) -> int:
        """Return the numbers of a value."""
        return self.head_dim if self.value_size is None else self.value_size


class _Head(Protocol):
    @property
    def num_drafts(self) -> int: ...

    @property
    def acceptance(self) -> tuple[float, ...]: ...


HeadKind = Literal["recurrent", "model", "mtp", "eagle"]
"""What drafts one id after the other behind a step: a recurrent head, another model, the checkpoint's MTP layer, or an
EAGLE head."""


class HeadFacts(NamedTuple):
    """What drafts without masks: a recurrent draft head, or a draft network."""

    num_drafts: int = 0  # most drafts of a step; 0: there is no such head
    acceptance: tuple[float, ...] = ()  # conditional, of draft 1, 2, …, as declared; empty: unknown
    kind: HeadKind = "recurrent"

    @classmethod
    def of(cls, head: _Head | None) -> HeadFacts:
        """Return the figures of a loaded head, or of none."""
        return cls() if head is None else cls(head.num_drafts, head.acceptance)


NO_HEAD = HeadFacts()


@dataclass(frozen=True)
class AdapterFacts:
    """A loaded gated adapter."""

    name: str  # as requests name it; "" is the checkpoint's own
    num_masks: int
    has_draft_head: bool
    acceptance: tuple[float, ...] = ()  # as in ModelFacts
    format: str = "space"  # one of released_adapters.AdapterFormat
    head: HeadFacts = NO_HEAD  # its recurrent head

    @property
    def may_take_turns(self) -> bool:
        """Return whether the cost model may draft in one step and verify in the next, as released formats do."""
        return self.format != "space"


@dataclass(frozen=True)
class ModelFacts:
    """The checkpoint and its formats in memory."""

    name: str  # as given to load_model
    vocab_size: int  # rows of the output head
    hidden_size: int
    num_layers: int
    num_heads: int
    kv_heads: int  # of layers that differ, as in `family.sizes`
    head_dim: int
    window: int  # maximum positions of one sequence
    dtype: torch.dtype  # of weights and KV cache, unless a field below says otherwise
    dtype_reason: str  # why this dtype was chosen, for the log
    device: torch.device
    eos_ids: tuple[int, ...]
    mask_ids: tuple[int, ...]  # id of mask 1, 2, …, num_masks; a shared id is repeated; empty: masks without ids
    num_masks: int  # 0: no masks, plain decoding
    model_hash: str
    tokenizer_hash: str  # "" if the checkpoint has no tokenizer.json
    has_draft_head: bool
    kv_bytes_per_token: int  # keys and values of one token in all layers, and in those of a draft network
    attention: str  # the attention implementation in use
    num_threads: int  # threads of one CPU matmul
    acceptance: tuple[float, ...] = ()  # conditional, of draft 1, 2, …, as the checkpoint declares; empty: unknown
    adapters: tuple[AdapterFacts, ...] = ()  # rows refer to an adapter by its index
    weights: str = "plain"  # storage of linears: one of precision.WEIGHTS
    fp8_kv: bool = False  # the KV cache is 8-bit
    head_rows: int = 8  # rows whose logits take at most the time of reading the head's weights twice
    head: HeadFacts = NO_HEAD  # the checkpoint's own recurrent head, or the draft network in its place
    latent_dim: int | None = None  # of latent attention (MLA): numbers of a key that are its value; None: all others
    is_chunked: bool = False  # some layers see chunks of positions (Llama 4)
    kv_layers: tuple[LayerKV, ...] = ()  # by layer; empty: all alike, each with pages of its own
    states: tuple[LayerState | None, ...] = ()  # what each layer remembers beside keys and values; empty: nothing
    rope_switch: int | None = None  # ids beyond which a sequence has other angles (LongRoPE); None: all have the same
    angles_of_window: str = ""  # rotary angles that the served window decides; "": the checkpoint alone does
    num_ranks: int = 1  # ranks that share the model; numbers of heads and bytes of KV cache are per rank
    is_exact: bool = False  # a row's bits do not depend on the rest of the batch; on a GPU other kernels see to that

    @property
    def served_hash(self) -> str:
        """Return a hash that two workers share only if they compute the same function of a text."""
        if not self.angles_of_window:
            return self.model_hash
        return hashlib.sha256(f"{self.model_hash} {self.angles_of_window}".encode()).hexdigest()

    @property
    def number_format(self) -> str:
        """Return the formats of weights and KV cache, which two workers must share to generate the same text."""
        return number_format(self.dtype, self.weights, fp8_kv=self.fp8_kv)

    @property
    def instruction_set(self) -> str:
        """Return what computes the products, which decides their last bits: `torch`, a kind of cpu_library.py, or
        the compute capability of the GPU, such as `sm_90`, with `exact` or without; among how many ranks their sums are
        divided, such as `avx2, 2 ranks`; and, where results are exact, an attention that is not the kind's own."""
        parts = [self._processor]
        if self.is_exact and self.attention not in ("compiled", self._processor):
            parts.append(f"{self.attention} attention")
        if self.num_ranks > 1:
            parts.append(f"{self.num_ranks} ranks")
        return ", ".join(parts)

    @property
    def _processor(self) -> str:
        if self.device.type == "cuda":
            capability = "sm_{}{}".format(*torch.cuda.get_device_capability(self.device))
            return f"{capability} exact" if self.is_exact else capability
        scans = any(state is not None and state.shape for state in self.states)  # recurrences are compiled in any dtype
        library = cpu_library() if self.dtype is torch.bfloat16 or scans else None
        return "torch" if library is None else library.kind

    @property
    def has_odd_values(self) -> bool:
        """Return whether values are a part of the keys, or of another size."""
        return self.latent_dim is not None or any(one.value_dim != one.head_dim for one in self.kv_layers)

    @property
    def is_recurrent(self) -> bool:
        """Return whether layers remember states, which belong to a whole text and not to its pages."""
        return bool(self.states)

    def state_bytes(self, most_drafts: int) -> int:
        """Return the bytes of the recurrent states of one sequence, with so many drafts in a step."""
        return sum(state.num_bytes(most_drafts) for state in self.states if state is not None)

    @property
    def kept_state_bytes(self) -> int:
        """Return the bytes of recurrent states that are kept for other sequences, for each of them."""
        return sum(state.kept_bytes for state in self.states if state is not None)

    def kv_of(self, layer: int) -> LayerKV:
        """Return what the pages hold of one layer."""
        return self.kv_layers[layer] if self.kv_layers else LayerKV(self.kv_heads, self.head_dim, layer)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Return the dtype of the KV cache."""
        return FORMAT if self.fp8_kv else self.dtype

    @property
    def quantizes_head(self) -> bool:
        """Return whether the output head is held in fewer bits, too. Of `packed` weights it is as the file has it."""
        return self.weights in ("int8", "int4", "gguf")

    @property
    def most_masks(self) -> int:
        """Return the maximum masks per group, over all adapters."""
        return max(self.num_masks, *(adapter.num_masks for adapter in self.adapters), 0)

    def head_of(self, adapter: int | None) -> HeadFacts:
        """Return the recurrent head of an adapter; None: the checkpoint's own."""
        return self.head if adapter is None else self.adapters[adapter].head

    @property
    def most_head_drafts(self) -> int:
        """Return the most drafts of a recurrent head in one step, over all adapters."""
        return max(self.head.num_drafts, *(adapter.head.num_drafts for adapter in self.adapters), 0)

    @property
    def most_drafts(self) -> int:
        """Return the most drafts in one step from masks or a recurrent head, over all adapters."""
        return max(self.most_masks, self.most_head_drafts)

    @property
    def keeps_head_rows(self) -> bool:
        """Return whether drafting needs single rows of the output head."""
        return self.has_any_draft_head or self.most_head_drafts > 0

    @property
    def has_any_draft_head(self) -> bool:
        """Return whether the checkpoint's masks or an adapter's have a draft head."""
        return self.has_draft_head or any(adapter.has_draft_head for adapter in self.adapters)

    def adapter_number(self, name: str) -> int | None:
        """Return the adapter's index; None: the checkpoint's own masks with ids. Raises KeyError if unknown."""
        for number, adapter in enumerate(self.adapters):
            if adapter.name == name:
                return number
        if name:
            raise KeyError(name)
        return None


class Ranks(Protocol):
    """The process group that shares one model, seen from one process."""

    @property
    def rank(self) -> int:
        """Return this process's rank; 0 leads."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, with the same bits on every rank; may overwrite x."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' x, in order, on rank 0; an empty list elsewhere."""
