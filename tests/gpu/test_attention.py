"""Attention as a share of its roofline, by backend, context, batch and rows.

The least that a step's attention must move: keys and values of the prefix once, whatever the rows; queries, in-step
keys and values, and results. Over the seconds it took, that is a bandwidth; its share of the bandwidth of a large copy,
measured in the same process, is what counts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from space_kernels.attention.attention import QKV, Attention, AttentionSpec, KVPages
from space_kernels.attention.torch_backend import space_attention as reference
from space_kernels.attention_backends import BACKENDS, AttentionNeed, Backend, available_backends
from space_kernels.paging.step_rows import StepRows
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from torch import Tensor

from gpu.pace import DeviceClock
from gpu.report import BATCHES, CONTEXTS, ROWS, Notes, attention_name, written

pytestmark = pytest.mark.gpu

COPY_BYTES = 2 * 1024**3
BLOCK_SIZE = 16
K = 5

CHECKED_CONTEXT = 8192
"""Longest that is compared with the reference, at batch 1: a kernel that is wrong has no bandwidth."""


@dataclass(frozen=True)
class Sizes:
    """Of one layer's attention."""

    num_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Step:
    """One layer's attention of a made-up step: `num_rows` rows of each of `batch` sequences of `context` positions."""

    rows: StepRows
    qkv: QKV
    pages: KVPages
    num_rows: int
    least_bytes: int

    @classmethod
    def of(cls, sizes: Sizes, context: int, batch: int, rows: int, block_size: int, device: torch.device) -> Step:
        """Every sequence has pages of its own, in no order. Raises torch.OutOfMemoryError."""
        layout = DraftLayout.full(K, K) if rows > 1 else DraftLayout.plain()
        chain = layout.num_drafts + 1
        each = -(-(context + chain) // block_size)
        generator = torch.Generator(device).manual_seed(0)
        order = torch.randperm(batch * each, generator=generator, device=device).tolist()
        made = ForwardBatch.build(
            [Segment([0] * chain, context, order[n * each : (n + 1) * each], layout) for n in range(batch)],
            block_size=block_size,
            mask_ids=[0] * K,
            device=device,
        )

        def drawn(*shape: int) -> Tensor:
            tensor = torch.empty(*shape, sizes.head_dim, dtype=sizes.dtype, device=device)
            return tensor.normal_(generator=generator)

        num_padded, item = len(made.ids), sizes.dtype.itemsize
        prefix = 2 * batch * context * sizes.kv_heads
        in_step = 2 * made.num_rows * sizes.kv_heads + 2 * made.num_chain_rows * sizes.kv_heads  # read; stored
        queries = 2 * made.num_rows * sizes.num_heads  # and results
        return cls(
            made.rows,
            QKV(*(drawn(num_padded, count) for count in (sizes.num_heads, sizes.kv_heads, sizes.kv_heads))),
            KVPages(*(drawn(batch * each, sizes.kv_heads, block_size) for _ in range(2))),
            made.num_rows,
            (prefix + in_step + queries) * sizes.head_dim * item,
        )

    def run(self, attention: Attention) -> Tensor:
        """[rows, H, D] without padding."""
        spec = AttentionSpec(self.qkv.query.shape[-1] ** -0.5)
        return attention(self.qkv, self.pages, self.rows, spec)[: self.num_rows]


def test_attention(notes: Notes) -> None:
    """Every backend that can be used, in every case of the targets; dry: two tiny cases, Triton's interpreted."""
    device = notes.device
    sizes = Sizes(4, 2, 16, torch.float32) if notes.dry else Sizes()
    clock = DeviceClock(device)
    bandwidth = clock.copy_bandwidth(1 << 20 if notes.dry else COPY_BYTES)
    torch.cuda.empty_cache()  # of what was copied
    notes.figure("copy bandwidth", bandwidth / 1e12, "TB/s")
    launch = clock.empty_launch()
    notes.figure("an empty kernel", 1e6 * launch, "µs")
    backends = _interpreted() if notes.dry else _usable(notes, sizes, device)
    cases = [(context, batch, rows) for context in CONTEXTS for batch in BATCHES for rows in ROWS]  # small ones first
    cases = [(64, 2, rows) for rows in ROWS] if notes.dry else cases
    rows: list[list[str]] = []
    head = ["context", "batch", "rows", "backend", "µs", "GB/s", "share of copy", "the same, less an empty kernel"]
    wrong = []
    for context, batch, num_rows in cases:
        name = attention_name(*((1024, batch, num_rows) if notes.dry else (context, batch, num_rows)))
        if notes.is_late(name):
            continue
        shares = {}
        for backend, (attention, block_size) in backends.items():
            try:
                step = Step.of(sizes, context, batch, num_rows, block_size, device)
                if batch == 1 and context <= CHECKED_CONTEXT and (off := _wrong(step, attention)):
                    wrong.append(f"{backend} at {context} × {batch}, {num_rows} rows: {off}")
                seconds = clock.seconds(lambda step=step, call=attention: step.run(call))  # type: ignore[misc]
            except Exception as error:  # a library may raise anything; the others are still to be measured
                notes.note(f"{backend} at {context} × {batch}, {num_rows} rows: {type(error).__name__}: {error}"[:300])
                continue
            least = step.least_bytes / bandwidth
            shares[backend] = least / seconds
            net = least / max(seconds - launch, 1e-9)
            rows.append(
                [
                    *map(str, (context, batch, num_rows, backend)), f"{1e6 * seconds:.1f}",
                    f"{step.least_bytes / seconds / 1e9:.0f}", written(shares[backend], "%"), written(net, "%"),
                ]
            )  # fmt: skip
            notes.table("Attention", head, rows)
            del step
        if shares:
            notes.figure(name, max(shares.values()), "%")
            if not notes.dry and least < 2 * launch:
                notes.note(f"{name}: at the copy's bandwidth {1e6 * least:.1f} µs, which no kernel can be launched in")
        else:
            notes.missing(name, "no backend could be measured")
    assert not wrong, f"{len(wrong)} results are not the reference's; the first: {wrong[0]}"


def _usable(notes: Notes, sizes: Sizes, device: torch.device) -> Mapping[str, tuple[Attention, int]]:
    """By name: the attention, and the pages it takes. The reference is left out: it is not made to be fast."""
    found: dict[str, tuple[Attention, int]] = {}
    for backend in BACKENDS.values():
        if backend.name == "torch":
            continue
        need = _need(sizes, backend, device)
        refusal = available_backends(need, backends={backend.name: backend})[1].get(backend.name)
        try:
            if refusal is None:
                found[backend.name] = (backend.load(need), need.block_size)
        except Exception as error:  # a package that is installed and broken may raise anything
            refusal = f"{type(error).__name__}: {error}"[:300]
        if refusal is not None:
            notes.missing(f"attention by {backend.name}", refusal)
    return found


def _need(sizes: Sizes, backend: Backend, device: torch.device) -> AttentionNeed:
    return AttentionNeed.on(
        device, num_heads=sizes.num_heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, dtype=sizes.dtype,
        block_size=max(BLOCK_SIZE, backend.page_multiple),
    )  # fmt: skip


def _interpreted() -> Mapping[str, tuple[Attention, int]]:
    """On a CPU: the reference, and our kernel as Triton's interpreter runs it."""
    os.environ["TRITON_INTERPRET"] = "1"
    found: dict[str, tuple[Attention, int]] = {"torch": (reference, BLOCK_SIZE)}
    try:
        from space_kernels.attention.attention_triton import space_attention
    except ModuleNotFoundError:
        return found
    return found | {"triton, interpreted": (space_attention, BLOCK_SIZE)}


def _wrong(step: Step, attention: Attention) -> str | None:
    """What is off, by the rule of `space_server.startup.attention_choice`; None: nothing."""
    found, expected = step.run(attention).float(), step.run(reference).float()
    off = (found - expected).abs().max().item()
    bound = 16 * torch.finfo(step.qkv.query.dtype).eps
    return None if off <= bound else f"off by {off:.3g} from the reference; the bound is {bound:.3g}"
