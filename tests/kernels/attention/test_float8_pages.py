"""The fp8 KV cache: stored values, attention over them, and row invariance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from doubles.kernels import SCALE, MadeUp, MadeUpStep, full_layout, made_up_step
from space_kernels.attention import library_parts
from space_kernels.attention import torch_backend as attention
from space_kernels.attention.attention import QKV, AttentionSpec, KVPages
from space_kernels.fp8 import FORMAT, nearest
from space_kernels.layers import layers
from space_kernels.layers.layers import HeadCounts
from space_kernels.paging.step_rows import StepRows, StepTables
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from space_kernels.attention import attention_triton  # noqa: E402
from space_kernels.fp8_bits import narrowed, widened  # noqa: E402
from space_kernels.layers import layers_triton  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""The interpreter does not round to bfloat16."""

SPACE = MadeUp(cached=66, num_chain=3, groups=[(0, 2), (1, 0), (2, 1)], seed=2)
CHUNK = MadeUp(cached=20, num_chain=13, groups=[(12, 3)], seed=3)
ALONE = MadeUp(cached=31, num_chain=1, seed=4)
LONG = MadeUp(cached=530, num_chain=2, groups=[(1, 3)], seed=5)

Attention = Callable[..., Tensor]
EITHER = [attention.space_attention, attention_triton.space_attention]


@triton.jit  # type: ignore[untyped-decorator]
def _both_ways(x, bits, back, N: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    lanes = tl.program_id(0) * N + tl.arange(0, N)
    narrow = narrowed(tl.load(x + lanes))
    tl.store(bits + lanes, narrow)
    tl.store(back + lanes, widened(narrow, back.dtype.element_ty))


def test_in_a_kernel_a_number_becomes_the_nearest_and_is_read_back_as_it() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FORMAT).float()
    ladder = numbers[numbers.isfinite()].sort().values
    generator = torch.Generator().manual_seed(0)
    x = torch.cat(
        [
            ladder,
            (ladder[1:] + ladder[:-1]) / 2,  # ties
            torch.randn(2048, generator=generator) * torch.exp2(torch.randint(-14, 10, (2048,), generator=generator)),
            torch.tensor([1e-30, -1e-45, 2**-10 * (1 + 2**-23), 449.0, 464.0, 1e9, -3e38]),
        ]
    )
    x = torch.cat([x, x.new_zeros(-len(x) % 256)]).to(DEVICE)
    bits, back = torch.empty(len(x), dtype=torch.uint8, device=DEVICE), torch.empty(len(x), device=DEVICE)
    _both_ways[(len(x) // 256,)](x, bits, back, N=256)
    assert torch.equal(bits, nearest(x).view(torch.uint8))
    assert torch.equal(back, nearest(x).float())


def run(how: Attention, step: MadeUpStep, **options: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return every row's output, and the pages after the step."""
    pages = step.copied_pages()
    out = how(step.qkv, pages, step.rows, AttentionSpec(SCALE, **options))  # type: ignore[arg-type]
    return out[: step.num_rows], *pages


def in_plain_pages(step: MadeUpStep) -> MadeUpStep:
    """Return the same step with float32 pages: stored keys and values are already rounded, those of masks are not."""
    chain = step.rows.num_chain_rows
    key, value = step.key.float(), step.value.float()
    for new in (key, value):
        new[:chain] = nearest(new[:chain]).float()
    pages = KVPages(step.pages.keys.float(), step.pages.values.float())
    return MadeUpStep(QKV(step.query.float(), key, value), pages, step.rows)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 2.0)])
@pytest.mark.parametrize("how", EITHER)
def test_a_row_sees_the_nearest_numbers(how: Attention, window: int | None, softcap: float | None) -> None:
    step = made_up_step([SPACE, CHUNK, ALONE], dtype=torch.float32, device=DEVICE, fp8=True)
    wanted = run(attention.space_attention, in_plain_pages(step), window=window, softcap=softcap)[0]
    found, keys, _ = run(how, step, window=window, softcap=softcap)
    assert keys.dtype is FORMAT
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("heads", [(4, 1, 64), (2, 2, 128)])
def test_kernel_and_reference_store_the_same_bytes_and_nearly_agree(heads: tuple[int, int, int]) -> None:
    sizes = dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True))
    step = made_up_step([LONG, SPACE], dtype=DTYPE, device=DEVICE, fp8=True, **sizes)  # type: ignore[arg-type]
    wanted, found = (run(how, step) for how in EITHER)
    torch.testing.assert_close(found[0].float(), wanted[0].float(), atol=2**-7, rtol=0)
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_both_stores_are_the_same() -> None:
    step = made_up_step([SPACE, ALONE], dtype=DTYPE, device=DEVICE, fp8=True)
    step.key[0, 0, :3] = torch.tensor([float("nan"), float("inf"), 1000.0])
    found = []
    for store in (library_parts.store_kv, attention_triton.store_kv):
        pages = step.copied_pages()
        store(step.qkv, pages, StepTables.of(step.rows))
        found.append([page.view(torch.uint8) for page in pages])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    slot = int(StepTables.of(step.rows).slots()[0])
    kept = found[0][0].view(FORMAT)[slot // 16, 0, slot % 16, :3]
    assert kept.tolist() == [0.0, 0.0, 448.0]


def test_rotary_stores_are_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(6, (4 + 2 + 2) * 16, generator=generator).to(DEVICE, DTYPE)
    angles = layers.angles(torch.arange(6, device=DEVICE), torch.rand(8, generator=generator).to(DEVICE))
    slots = torch.tensor([3, -1, 17, 40], device=DEVICE)
    found = []
    for store in (layers.rotary_store, layers_triton.rotary_store):
        pages = KVPages(*(torch.zeros(3, 2, 16, 16, dtype=FORMAT, device=DEVICE) for _ in range(2)))
        out = store(fused.clone(), angles, pages, slots, HeadCounts(4, 2))
        found.append([page.view(torch.uint8) for page in pages])
        assert torch.equal(pages[0][1, :, 1].float(), nearest(out[1][2]).float())
        assert torch.equal(pages[1][0, :, 3].float(), nearest(out[2][0]).float())
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("how", EITHER)
def test_a_chain_has_the_same_bits_alone_in_company_and_row_by_row(how: Attention) -> None:
    plain = MadeUp(cached=66, num_chain=3, seed=2)
    with_masks = dataclasses.replace(plain, groups=full_layout(2))
    sizes = {"dtype": DTYPE, "device": DEVICE, "fp8": True}
    wanted, keys, values = run(how, made_up_step([plain], **sizes))  # type: ignore[arg-type]
    beside = made_up_step([ALONE, with_masks, CHUNK], **sizes)  # type: ignore[arg-type]
    assert torch.equal(run(how, beside)[0][1:4], wanted)
    step = made_up_step([plain], **sizes)  # type: ignore[arg-type]
    alone = made_up_step([dataclasses.replace(plain, num_chain=1)], **sizes)  # type: ignore[arg-type]
    for row in range(3):
        one = StepRows(alone.rows.pattern, alone.rows.starts + row, step.rows.pages, 16, torch.device(DEVICE))
        own = QKV(*(torch.cat([part[row : row + 1], part[:3] * 0]) for part in step.qkv))
        found = how(own, KVPages(keys, values), one, AttentionSpec(SCALE))
        assert torch.equal(found[0], wanted[row])


@pytest.mark.parametrize("how", EITHER)
def test_what_lies_in_unwritten_slots_changes_nothing(how: Attention) -> None:
    found = [
        run(how, made_up_step([SPACE, ALONE], dtype=DTYPE, device=DEVICE, fp8=True, garbage=garbage))[0]
        for garbage in (float("nan"), 300.0)
    ]
    assert torch.equal(*found)
