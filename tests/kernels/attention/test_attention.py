"""Paged attention against a dense oracle, and row invariance."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from doubles.kernels import SCALE, MadeUp, MadeUpStep, made_up_step, run
from space_kernels.attention.alibi import Alibi, Bias
from space_kernels.attention.attention import Attention, AttentionSpec, refuse_rare
from space_kernels.attention.cpu_backend import WIDEST_HEAD, CompiledAttention
from space_kernels.attention.torch_backend import space_attention
from space_kernels.build import cpu_library
from torch import Tensor

HEAD_DIM = 16


@pytest.fixture(params=["torch", *cpu_library.own_kinds()])
def attention(request: pytest.FixtureRequest) -> Attention:
    """Each CPU implementation; the compiled ones support bfloat16 alone and leave the rest to torch."""
    if request.param == "torch":
        return space_attention
    return CompiledAttention(cpu_library.library_for(request.param))


in_each_dtype = pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        *((name, torch.bfloat16) for name in ["torch", *cpu_library.own_kinds()]),
        *((name, torch.float32) for name in ["torch", *cpu_library.own_kinds()[:1]]),  # torch's in every kind
    ],
    indirect=["attention"],
)


@pytest.fixture(params=[16, 64, 144])
def head_dim(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Head sizes of one vector; of several, with keys read in place; and of several with a remainder."""
    monkeypatch.setattr(sys.modules[__name__], "HEAD_DIM", request.param)
    return int(request.param)


def made(sequences: Sequence[MadeUp], **options: Any) -> MadeUpStep:
    return made_up_step(sequences, **{"head_dim": HEAD_DIM, **options})


def outputs(
    step: MadeUpStep, attention: Attention = space_attention, **options: float | Alibi | None
) -> list[tuple[Tensor, Tensor]]:
    """Return the outputs of chain rows and of mask rows per sequence."""
    out = run(step, attention, **options)  # type: ignore[arg-type]
    assert out.dtype is step.query.dtype
    pattern = step.rows.pattern
    return [(out[list(c)], out[list(m)]) for c, m in zip(pattern.chain_runs, pattern.mask_runs, strict=True)]


def dense(
    step: MadeUpStep,
    number: int,
    *,
    window: int | None,
    softcap: float | None,
    alibi: Alibi | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute every row's attention of one sequence in float64, key by key."""
    rows, pattern = step.rows, step.rows.pattern
    cached, chain, masks = int(rows.starts[number]), pattern.chain_runs[number], pattern.mask_runs[number]

    def seen_by_chain(pages: Tensor, new: Tensor) -> Tensor:
        old = pages[list(rows.pages[number])].transpose(1, 2).flatten(0, 1)[:cached]
        return torch.cat([old, new[list(chain)]]).double()

    k, v = seen_by_chain(step.pages.keys, step.key), seen_by_chain(step.pages.values, step.value)
    per_kv = step.query.shape[1] // step.key.shape[1]
    found = []
    for row in (*chain, *masks):
        end = cached + int(pattern.reach[row])
        own = [m for m in masks if m <= row and pattern.group[m] == pattern.group[row]] if row in masks else []
        keys, values = torch.cat([k[:end], step.key[own].double()]), torch.cat([v[:end], step.value[own].double()])
        ages = len(keys) - 1 - torch.arange(len(keys))
        seen = (ages < (window or 10**9)) & (ages <= (len(keys) - 1) % (chunk or 10**9))
        of_heads = []
        for head, query in enumerate(step.query[row].double()):
            scores = (keys[seen, head // per_kv] @ query) * SCALE
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi is not None and alibi.form is not Bias.ROUNDED_POSITION:
                scores = scores - alibi.slopes[head] * ages[seen]
            elif alibi is not None:
                places = torch.arange(len(keys))[seen].bfloat16()
                scores = scores + alibi.factor * (torch.tensor(alibi.slopes[head]).bfloat16() * places).double()
            sink = scores.new_full((1,), -math.inf) if sinks is None else sinks[head, None].double()
            of_heads.append(torch.softmax(torch.cat([scores, sink]), 0)[:-1] @ values[seen, head // per_kv])
        found.append(torch.stack(of_heads))
    return torch.stack(found)


SHORT = MadeUp(cached=5, num_chain=1, groups=[(0, 2)], seed=1)
SPACE = MadeUp(cached=250, num_chain=3, groups=[(0, 2), (1, 0), (2, 1)], seed=2)
LONG = MadeUp(cached=530, num_chain=2, groups=[(1, 3)], seed=3)
CHUNK = MadeUp(cached=0, num_chain=37, seed=4)
ALL = [SHORT, SPACE, LONG, CHUNK]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (3, 1), (8, 2)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (300, 2.0)])
def test_unequal_sequences_equal_dense_attention(
    heads: int, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    step = made(ALL, heads=heads, kv_heads=kv_heads)
    for number, (chain, masks) in enumerate(outputs(step, window=window, softcap=softcap)):
        wanted = dense(step, number, window=window, softcap=softcap)
        torch.testing.assert_close(torch.cat([chain, masks]).double(), wanted, atol=2e-6, rtol=0)


@pytest.mark.usefixtures("head_dim")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (300, 2.0)])
def test_bfloat16_is_as_near_as_its_roundings(
    attention: Attention, heads: int, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    step = made(ALL, heads=heads, kv_heads=kv_heads, dtype=torch.bfloat16)
    for number, (chain, masks) in enumerate(outputs(step, attention, window=window, softcap=softcap)):
        wanted = dense(step, number, window=window, softcap=softcap)
        # weights are rounded to bfloat16 as values are
        torch.testing.assert_close(torch.cat([chain, masks]).double(), wanted, atol=2**-7, rtol=2**-8)


@pytest.mark.parametrize("window", [None, 3])
def test_the_widest_heads_are_as_near_as_their_roundings(attention: Attention, window: int | None) -> None:
    step = made([SHORT, SPACE], head_dim=WIDEST_HEAD, dtype=torch.bfloat16)
    for number, (chain, masks) in enumerate(outputs(step, attention, window=window)):
        wanted = dense(step, number, window=window, softcap=None)
        torch.testing.assert_close(torch.cat([chain, masks]).double(), wanted, atol=2**-7, rtol=2**-8)


@in_each_dtype
@pytest.mark.parametrize("chunk", [3, 126, 252])
def test_a_row_sees_its_own_chunk_of_positions(attention: Attention, dtype: torch.dtype, chunk: int) -> None:
    """The end of a chunk is within a chain, within a group of masks, and far behind."""
    step = made(ALL, heads=4, kv_heads=2, dtype=dtype)
    out = attention(step.qkv, step.pages, step.rows, AttentionSpec(SCALE, chunk=chunk))
    near = {"atol": 2e-6, "rtol": 0.0} if dtype is torch.float32 else {"atol": 2**-7, "rtol": 2**-7}
    for number, (chain, masks) in enumerate(
        zip(step.rows.pattern.chain_runs, step.rows.pattern.mask_runs, strict=True)
    ):
        wanted = dense(step, number, window=None, softcap=None, chunk=chunk)
        torch.testing.assert_close(out[[*chain, *masks]].double(), wanted, **near)


def test_a_backend_without_chunks_refuses_them() -> None:
    with pytest.raises(ValueError, match=r"'triton' has no chunked attention .*; use --attention torch"):
        refuse_rare(AttentionSpec(SCALE, chunk=8), "triton")


def with_sinks(step: MadeUpStep, attention: Attention, sinks: Tensor | None, window: int | None) -> Tensor:
    pages = type(step.pages)(*(part.clone() for part in step.pages))
    return attention(step.qkv, pages, step.rows, AttentionSpec(SCALE, window, sinks=sinks))


@in_each_dtype
@pytest.mark.parametrize("window", [None, 3, 300])
def test_a_sink_is_one_more_score_whose_value_is_zero(
    attention: Attention, dtype: torch.dtype, window: int | None
) -> None:
    """Against attention without sinks, by the log-sum-exp of a head with sinks of minus infinity and in between."""
    step = made(ALL, heads=6, kv_heads=2, dtype=dtype)
    plain = with_sinks(step, attention, None, window)
    assert torch.equal(with_sinks(step, attention, torch.full((6,), -math.inf), window), plain)
    assert not bool(with_sinks(step, attention, torch.full((6,), 200.0), window).any())
    sinks = torch.linspace(-2.0, 6.0, 6)
    near = {"atol": 2e-6, "rtol": 0.0} if dtype is torch.float32 else {"atol": 2**-7, "rtol": 2**-7}
    out = with_sinks(step, attention, sinks, window)
    for number, (chain, masks) in enumerate(
        zip(step.rows.pattern.chain_runs, step.rows.pattern.mask_runs, strict=True)
    ):
        wanted = dense(step, number, window=window, softcap=None, sinks=sinks)
        torch.testing.assert_close(out[[*chain, *masks]].double(), wanted, **near)


@in_each_dtype
def test_a_row_with_sinks_has_the_same_bits_in_any_company(attention: Attention, dtype: torch.dtype) -> None:
    sinks = torch.linspace(-2.0, 6.0, 6)

    def of(*sequences: MadeUp) -> Tensor:
        step = made(sequences, heads=6, kv_heads=2, dtype=dtype)
        rows = [*step.rows.pattern.chain_runs[-1], *step.rows.pattern.mask_runs[-1]]
        return with_sinks(step, attention, sinks, 40)[rows]

    alone = of(SPACE)
    assert torch.equal(of(SHORT, SPACE), alone)
    assert torch.equal(of(LONG, CHUNK, SPACE), alone)


SLOPES = (0.21, 0.03, 0.007, 0.0013)
BIASES = [Alibi(SLOPES), Alibi(SLOPES, Bias.ROUNDED_POSITION, factor=0.3), Alibi(SLOPES, Bias.POSITION)]


@pytest.mark.parametrize("alibi", BIASES, ids=lambda alibi: alibi.form.name)
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 40])
def test_linear_biases_equal_dense_attention(kv_heads: int, window: int | None, alibi: Alibi) -> None:
    step = made(ALL, heads=4, kv_heads=kv_heads)
    for number, (chain, masks) in enumerate(outputs(step, window=window, alibi=alibi)):
        wanted = dense(step, number, window=window, softcap=None, alibi=alibi)
        torch.testing.assert_close(torch.cat([chain, masks]).double(), wanted, atol=2e-5, rtol=0)


@pytest.mark.usefixtures("head_dim")
@pytest.mark.parametrize("alibi", BIASES, ids=lambda alibi: alibi.form.name)
def test_linear_biases_in_bfloat16_are_as_near_as_its_roundings(attention: Attention, alibi: Alibi) -> None:
    step = made(ALL, heads=4, kv_heads=2, dtype=torch.bfloat16)
    for number, (chain, masks) in enumerate(outputs(step, attention, alibi=alibi)):
        wanted = dense(step, number, window=None, softcap=None, alibi=alibi)
        torch.testing.assert_close(torch.cat([chain, masks]).double(), wanted, atol=2**-7, rtol=2**-8)


@in_each_dtype
@pytest.mark.parametrize("alibi", BIASES, ids=lambda alibi: alibi.form.name)
def test_a_row_with_linear_biases_has_the_same_bits_in_any_company(
    attention: Attention, num_threads: int, dtype: torch.dtype, alibi: Alibi
) -> None:
    together = outputs(made(ALL, dtype=dtype), attention, alibi=alibi)
    for one, (chain, masks) in zip(ALL, together, strict=True):
        ((alone, alone_masks),) = outputs(made([one], dtype=dtype), attention, alibi=alibi)
        assert torch.equal(chain, alone)
        assert torch.equal(masks, alone_masks)


@pytest.mark.usefixtures("head_dim")
@in_each_dtype
@pytest.mark.parametrize("window", [None, 40, 300])
def test_a_row_has_the_same_bits_in_any_company(
    attention: Attention, num_threads: int, dtype: torch.dtype, window: int | None
) -> None:
    together = outputs(made(ALL, dtype=dtype), attention, window=window)
    for one, (chain, masks) in zip(ALL, together, strict=True):
        ((alone, alone_masks),) = outputs(made([one], dtype=dtype), attention, window=window)
        assert torch.equal(chain, alone)
        assert torch.equal(masks, alone_masks)


@pytest.mark.usefixtures("head_dim")
@in_each_dtype
@pytest.mark.parametrize("heads", [2, 4, 6])
def test_a_chain_row_does_not_depend_on_masks_or_on_later_rows(
    attention: Attention, num_threads: int, dtype: torch.dtype, heads: int
) -> None:
    """Row i of a chain of 64 equals row i of the chain cut after i, with and without masks behind it."""
    options = {"heads": heads, "dtype": dtype}
    whole = made([MadeUp(cached=230, num_chain=64, seed=7)], **options)
    ((expected, _),) = outputs(whole, attention)
    for length in (1, 2, 3, 4, 6, 8, 11, 16, 33, 64):
        for groups in ([], [(length - 1, 3)]):
            part = made([MadeUp(230, length, groups)], **options)
            for mine, theirs in zip(part.qkv, whole.qkv, strict=True):
                mine[:length] = theirs[:length]
            rows = dataclasses.replace(part.rows, pages=whole.rows.pages)
            ((found, _),) = outputs(dataclasses.replace(part, pages=whole.pages, rows=rows), attention)
            assert torch.equal(found, expected[:length]), (length, groups)


@in_each_dtype
def test_what_lies_in_unwritten_slots_changes_nothing(attention: Attention, dtype: torch.dtype) -> None:
    clean, dirty = (outputs(made(ALL, dtype=dtype, garbage=garbage), attention) for garbage in (math.nan, 7.0))
    for (chain, masks), (other, other_masks) in zip(clean, dirty, strict=True):
        assert torch.equal(chain, other)
        assert torch.equal(masks, other_masks)


@in_each_dtype
def test_a_mask_row_gone_wrong_leaves_the_chain_alone(attention: Attention, dtype: torch.dtype) -> None:
    healthy, sick = made(ALL, dtype=dtype), made(ALL, dtype=dtype)
    for new in (sick.key, sick.value):
        new[sick.rows.num_chain_rows :] = math.nan
    right, wrong = outputs(healthy, attention), outputs(sick, attention)
    for (chain, _), (spoilt, _) in zip(right, wrong, strict=True):
        assert torch.equal(chain, spoilt)


@in_each_dtype
def test_the_block_size_changes_no_bit(attention: Attention, dtype: torch.dtype) -> None:
    ((expected, _),) = outputs(made([SPACE], dtype=dtype, block_size=16), attention)
    for block_size in (8, 32, 128, 256):
        ((found, _),) = outputs(made([SPACE], dtype=dtype, block_size=block_size), attention)
        assert torch.equal(found, expected)


def test_a_block_size_that_does_not_tile_a_key_block_is_refused() -> None:
    with pytest.raises(ValueError, match="Blocks of 48 slots do not tile a key block of 128"):
        outputs(made([SHORT], block_size=48))
