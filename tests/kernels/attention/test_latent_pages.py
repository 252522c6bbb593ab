"""Attention with values that are a part of their keys (MLA), or of another size: against pages of equal sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from doubles.kernels import SCALE, MadeUp, MadeUpStep, made_up_step, run
from space_kernels.attention.attention import QKV, Attention, AttentionSpec, KVPages
from space_kernels.attention.cpu_backend import CompiledAttention
from space_kernels.attention.torch_backend import space_attention
from space_kernels.build import cpu_library
from torch import Tensor

SHORT = MadeUp(cached=5, num_chain=1, groups=[(0, 2)], seed=1)
SPACE = MadeUp(cached=250, num_chain=3, groups=[(0, 2), (1, 0), (2, 1)], seed=2)
LONG = MadeUp(cached=530, num_chain=2, groups=[(1, 3)], seed=3)
CHUNK = MadeUp(cached=0, num_chain=37, seed=4)
ALL = [SHORT, SPACE, LONG, CHUNK]

SIZES = [(20, 1, 80, 64), (3, 1, 48, 32), (16, 1, 576, 512)]
"""Query heads, key heads, numbers of a key, numbers of its value; the last as DeepSeek-V2-Lite."""

in_each_dtype = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("torch", torch.float32),
        *((name, torch.bfloat16) for name in ["torch", *cpu_library.own_kinds()]),
    ],
)


def attention_of(name: str) -> Attention:
    return space_attention if name == "torch" else CompiledAttention(cpu_library.library_for(name))


def made(sequences: Sequence[MadeUp], dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> MadeUpStep:
    heads, kv_heads, dim, _ = sizes
    return made_up_step(sequences, heads=heads, kv_heads=kv_heads, head_dim=dim, dtype=dtype)


def latent(step: MadeUpStep, value_dim: int, attention: Attention, window: int | None = None) -> Tensor:
    """Return the outputs [R, H, value_dim] of rows whose values are the first numbers of their keys."""
    keys = step.pages.keys.clone()
    qkv = QKV(step.query, step.key, step.key[..., :value_dim])
    return attention(qkv, KVPages(keys, keys), step.rows, AttentionSpec(SCALE, window, is_latent=True))[: step.num_rows]


def unequal(step: MadeUpStep, value_dim: int, attention: Attention) -> Tensor:
    """Return the outputs of rows whose values have pages of their own, and another size than keys."""
    pages = KVPages(step.pages.keys.clone(), step.pages.values[..., :value_dim].contiguous())
    qkv = QKV(step.query, step.key, step.value[..., :value_dim])
    return attention(qkv, pages, step.rows, AttentionSpec(SCALE))[: step.num_rows]


def of_sequence(step: MadeUpStep, number: int, out: Tensor) -> Tensor:
    pattern = step.rows.pattern
    return out[[*pattern.chain_runs[number], *pattern.mask_runs[number]]]


@in_each_dtype
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("window", [None, 40])
def test_latent_attention_is_that_of_keys_and_a_copy_of_them(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int], window: int | None
) -> None:
    step = made(ALL, dtype, sizes)
    copied = MadeUpStep(QKV(step.query, step.key, step.key), KVPages(step.pages.keys, step.pages.keys), step.rows)
    wanted = run(copied, space_attention, window=window)[..., : sizes[3]]
    found = latent(step, sizes[3], attention_of(name), window)
    bound = 2e-6 if dtype is torch.float32 else 2**-6
    torch.testing.assert_close(found.float(), wanted.float(), atol=bound, rtol=bound)


@in_each_dtype
@pytest.mark.parametrize("sizes", [(4, 2, 48, 32), (4, 2, 16, 48)])
def test_values_may_have_another_size_than_keys(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    heads, kv_heads, dim, value_dim = sizes
    step = made(ALL, dtype, (heads, kv_heads, max(dim, value_dim), 0))
    cut = MadeUpStep(
        QKV(step.query[..., :dim], step.key[..., :dim], step.value),
        KVPages(step.pages.keys[..., :dim].contiguous(), step.pages.values),
        step.rows,
    )
    zeros = MadeUpStep(  # keys with zeros behind them have the same scores
        QKV(step.query.clone(), step.key.clone(), step.value), step.copied_pages(), step.rows
    )
    for keys in (zeros.query, zeros.key, zeros.pages.keys):
        keys[..., dim:] = 0.0
    wanted = run(zeros, space_attention)[..., :value_dim]
    bound = 2e-6 if dtype is torch.float32 else 2**-6
    found = unequal(cut, value_dim, attention_of(name))
    torch.testing.assert_close(found.float(), wanted.float(), atol=bound, rtol=bound)


@in_each_dtype
@pytest.mark.parametrize("sizes", SIZES)
def test_a_row_of_latent_attention_has_the_same_bits_in_any_company(
    name: str, num_threads: int, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    attention, value_dim = attention_of(name), sizes[3]
    step = made(ALL, dtype, sizes)
    together = latent(step, value_dim, attention)
    for number, one in enumerate(ALL):
        alone = made([one], dtype, sizes)
        assert torch.equal(
            of_sequence(step, number, together), of_sequence(alone, 0, latent(alone, value_dim, attention))
        )


@in_each_dtype
@pytest.mark.parametrize("sizes", SIZES)
def test_a_chain_row_of_latent_attention_does_not_depend_on_masks_or_later_rows(
    name: str, num_threads: int, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    attention, value_dim = attention_of(name), sizes[3]
    whole = made([MadeUp(cached=230, num_chain=40, seed=7)], dtype, sizes)
    expected = latent(whole, value_dim, attention)
    for length in (1, 2, 3, 4, 6, 11, 40):
        for groups in ([], [(length - 1, 3)]):
            part = made([MadeUp(230, length, groups)], dtype, sizes)
            for mine, theirs in zip(part.qkv, whole.qkv, strict=True):
                mine[:length] = theirs[:length]
            assert whole.rows.block_size == part.rows.block_size
            count = -(-(230 + length) // part.rows.block_size)
            for mine, theirs in zip(part.rows.pages[0][:count], whole.rows.pages[0], strict=False):
                part.pages.keys[mine] = whole.pages.keys[theirs]
            found = latent(part, value_dim, attention)
            assert torch.equal(found[:length], expected[:length]), (length, groups)
