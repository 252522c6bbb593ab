"""Paged attention against a dense oracle, and row invariance."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from space_kernels.attention.cpu_backend import CompiledAttention
from space_kernels.attention.torch_backend import space_attention
from space_kernels.build import cpu_library
from space_kernels.dispatch import Attention
from space_kernels.paging.row_pattern import RowPattern
from space_kernels.paging.slots import StepRows
from torch import Tensor

HEAD_DIM = 16
NUM_BLOCKS = 64


@pytest.fixture(params=["torch", *cpu_library.own_kinds()])
def attention(request: pytest.FixtureRequest) -> Attention:
    """Each CPU implementation; the compiled ones support bfloat16 alone and leave the rest to torch."""
    if request.param == "torch":
        return space_attention
    return CompiledAttention(cpu_library.library_for(request.param))


@pytest.fixture(params=[16, 64, 144])
def head_dim(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Head sizes of one vector; of several, with keys read in place; and of several with a remainder."""
    monkeypatch.setattr(sys.modules[__name__], "HEAD_DIM", request.param)
    return int(request.param)


@dataclass
class Sequence_:
    """Keys and values of every position of a sequence, and its layout in one step."""

    cached: int
    num_chain: int
    groups: Sequence[tuple[int, int]]  # (base chain row, masks)
    pages: Sequence[int]
    seed: int

    def draw(self, heads: int, kv_heads: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        num_masks = sum(count for _, count in self.groups)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, HEAD_DIM, generator=generator)

        return {
            "old_k": normal(self.cached, kv_heads),
            "old_v": normal(self.cached, kv_heads),
            "q": normal(self.num_chain, heads),
            "k": normal(self.num_chain, kv_heads),
            "v": normal(self.num_chain, kv_heads),
            "mask_q": normal(num_masks, heads),
            "mask_k": normal(num_masks, kv_heads),
            "mask_v": normal(num_masks, kv_heads),
        }


def step(
    sequences: Sequence[Sequence_],
    attention: Attention = space_attention,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    garbage: float = float("nan"),
    window: int | None = None,
    softcap: float | None = None,
    spoil_masks: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """Run one step's attention; return the outputs of chain rows and of mask rows per sequence."""
    key_pages = torch.full((NUM_BLOCKS, kv_heads, block_size, HEAD_DIM), garbage, dtype=dtype)
    value_pages = key_pages.clone()
    drawn = [s.draw(heads, kv_heads) for s in sequences]
    chain_runs: list[range] = []
    mask_runs: list[range] = []
    offsets: list[int] = []
    reach: list[int] = []
    group: list[int] = []
    for s, d in zip(sequences, drawn, strict=True):
        for position in range(s.cached):
            page, offset = s.pages[position // block_size], position % block_size
            key_pages[page, :, offset] = d["old_k"][position].to(dtype)
            value_pages[page, :, offset] = d["old_v"][position].to(dtype)
        chain_runs.append(range(len(offsets), len(offsets) + s.num_chain))
        offsets += range(s.num_chain)
        reach += range(1, s.num_chain + 1)
        group += [-1] * s.num_chain
    num_chain = len(offsets)
    for number, s in enumerate(sequences):
        first = len(offsets)
        for g, (base, count) in enumerate(s.groups):
            offsets += [base + 1 + j for j in range(count)]
            reach += [base + 1] * count
            group += [100 * number + g] * count
        mask_runs.append(range(first, len(offsets)))
    padded = -(-len(offsets) // 4) * 4

    def rows_of(chain: str, mask: str) -> Tensor:
        parts = [d[chain] for d in drawn] + [d[mask] for d in drawn]
        joined = torch.cat(parts)
        return torch.cat([joined, joined.new_zeros(padded - len(joined), *joined.shape[1:])]).to(dtype)

    pattern = RowPattern(
        chain_runs=chain_runs,
        mask_runs=mask_runs,
        offsets=np.array(offsets),
        reach=np.array(reach),
        group=np.array(group),
        num_chain_rows=num_chain,
        num_padded=padded,
    )
    rows = StepRows(
        pattern=pattern,
        starts=np.array([s.cached for s in sequences]),
        pages=[s.pages for s in sequences],
        block_size=block_size,
        device=torch.device("cpu"),
    )
    key, value = rows_of("k", "mask_k"), rows_of("v", "mask_v")
    if spoil_masks:
        key[num_chain:] = value[num_chain:] = float("nan")
    out = attention(
        rows_of("q", "mask_q"), key, value, key_pages, value_pages, rows, scale=0.3, window=window, softcap=softcap
    )
    assert out.dtype is dtype
    return [(out[list(c)], out[list(m)]) for c, m in zip(chain_runs, mask_runs, strict=True)]


def dense(
    s: Sequence_,
    *,
    heads: int,
    kv_heads: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute every row's attention in float64, key by key, from inputs rounded to `dtype`."""
    d = {name: tensor.to(dtype).double() for name, tensor in s.draw(heads, kv_heads).items()}
    k, v = torch.cat([d["old_k"], d["k"]]), torch.cat([d["old_v"], d["v"]])
    outputs = []

    def attend(q: Tensor, keys: Tensor, values: Tensor, ages: Tensor) -> Tensor:
        seen = ages < (window or 10**9)
        out = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = (keys[seen, g] @ q[h]) * 0.3
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out.append(torch.softmax(scores, 0) @ values[seen, g])
        return torch.stack(out)

    for i in range(s.num_chain):
        end = s.cached + i + 1
        outputs.append(attend(d["q"][i], k[:end], v[:end], end - 1 - torch.arange(end)))
    first = 0
    for base, count in s.groups:
        end = s.cached + base + 1
        for j in range(count):
            own = slice(first, first + j + 1)
            keys, values = torch.cat([k[:end], d["mask_k"][own]]), torch.cat([v[:end], d["mask_v"][own]])
            outputs.append(attend(d["mask_q"][first + j], keys, values, end + j - torch.arange(end + j + 1)))
        first += count
    return torch.stack(outputs)


SHORT = Sequence_(cached=5, num_chain=1, groups=[(0, 2)], pages=[9], seed=1)
SPACE = Sequence_(cached=250, num_chain=3, groups=[(0, 2), (1, 0), (2, 1)], pages=range(20, 36), seed=2)
LONG = Sequence_(cached=530, num_chain=2, groups=[(1, 3)], pages=[*range(63, 38, -1), *range(10, 20)], seed=3)
CHUNK = Sequence_(cached=0, num_chain=37, groups=[], pages=[0, 3, 1], seed=4)
ALL = [SHORT, SPACE, LONG, CHUNK]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (3, 1), (8, 2)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (300, 2.0)])
def test_unequal_sequences_equal_dense_attention(
    heads: int, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    found = step(ALL, heads=heads, kv_heads=kv_heads, window=window, softcap=softcap)
    for s, (chain, masks) in zip(ALL, found, strict=True):
        wanted = dense(s, heads=heads, kv_heads=kv_heads, window=window, softcap=softcap)
        torch.testing.assert_close(torch.cat([chain, masks]).double(), wanted, atol=2e-6, rtol=0)


@pytest.mark.usefixtures("head_dim")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (300, 2.0)])
def test_bfloat16_is_as_near_as_its_roundings(
    attention: Attention, heads: int, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "dtype": torch.bfloat16}
    found = step(ALL, attention, window=window, softcap=softcap, **shape)  # type: ignore[arg-type]
    for s, (chain, masks) in zip(ALL, found, strict=True):
        wanted = dense(s, window=window, softcap=softcap, **shape)  # type: ignore[arg-type]
        # weights are rounded to bfloat16 as values are
        torch.testing.assert_close(torch.cat([chain, masks]).double(), wanted, atol=2**-7, rtol=2**-8)


@pytest.mark.usefixtures("head_dim")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40, 300])
def test_a_row_has_the_same_bits_in_any_company(
    attention: Attention, num_threads: int, dtype: torch.dtype, window: int | None
) -> None:
    together = step(ALL, attention, dtype=dtype, window=window)
    for s, (chain, masks) in zip(ALL, together, strict=True):
        ((alone, alone_masks),) = step([s], attention, dtype=dtype, window=window)
        assert torch.equal(chain, alone)
        assert torch.equal(masks, alone_masks)


@pytest.mark.usefixtures("head_dim")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 4, 6])
def test_a_chain_row_does_not_depend_on_masks_or_on_later_rows(
    attention: Attention, num_threads: int, dtype: torch.dtype, heads: int
) -> None:
    """Row i of a chain of 64 equals row i of the chain cut after i, with and without masks behind it."""
    whole = Sequence_(cached=230, num_chain=64, groups=[], pages=range(20), seed=7)
    ((expected, _),) = step([whole], attention, heads=heads, dtype=dtype)
    drawn = whole.draw
    for length in (*range(1, 12), 16, 33, 64):
        for groups in ([], [(length - 1, 3)]):
            part = Sequence_(whole.cached, length, groups, whole.pages, whole.seed)
            part.draw = (
                lambda h, g, n=length, m=bool(groups): {  # type: ignore[method-assign]
                    name: (tensor[:n] if name in {"q", "k", "v"} else tensor)
                    if not name.startswith("mask")
                    else torch.randn(3 * m, *tensor.shape[1:], generator=torch.Generator().manual_seed(0))
                    for name, tensor in drawn(h, g).items()
                }
            )
            ((found, _),) = step([part], attention, heads=heads, dtype=dtype)
            assert torch.equal(found, expected[:length]), (length, groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_in_unwritten_slots_changes_nothing(attention: Attention, dtype: torch.dtype) -> None:
    clean, dirty = step(ALL, attention, dtype=dtype), step(ALL, attention, dtype=dtype, garbage=7.0)
    for (chain, masks), (other, other_masks) in zip(clean, dirty, strict=True):
        assert torch.equal(chain, other)
        assert torch.equal(masks, other_masks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_row_gone_wrong_leaves_the_chain_alone(attention: Attention, dtype: torch.dtype) -> None:
    right, wrong = step(ALL, attention, dtype=dtype), step(ALL, attention, dtype=dtype, spoil_masks=True)
    for (chain, _), (spoilt, _) in zip(right, wrong, strict=True):
        assert torch.equal(chain, spoilt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_block_size_changes_no_bit(attention: Attention, dtype: torch.dtype) -> None:
    wide = [Sequence_(s.cached, s.num_chain, s.groups, range(40), s.seed) for s in (SPACE,)]
    ((expected, _),) = step(wide, attention, dtype=dtype, block_size=16)
    for block_size in (8, 32, 128, 256):
        ((found, _),) = step(wide, attention, dtype=dtype, block_size=block_size)
        assert torch.equal(found, expected)


def test_a_block_size_that_does_not_tile_a_key_block_is_refused() -> None:
    with pytest.raises(ValueError, match="Blocks of 48 slots do not tile a key block of 128"):
        step([SHORT], block_size=48)
