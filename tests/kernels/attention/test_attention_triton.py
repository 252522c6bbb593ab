"""The fused attention kernel against the reference, and row invariance."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

import numpy as np
from doubles.kernels import SCALE, MadeUp, MadeUpStep, full_layout, made_up_step
from space_kernels.attention import attention_triton
from space_kernels.attention.attention import QKV, AttentionSpec, KVPages
from space_kernels.attention.attention_kernels import SPLIT, AttentionTile, swapped_tile, tile_for
from space_kernels.attention.attention_triton import (
    Walk,
    attend,
    in_step_attention,
    merge,
    prefix_attention,
    quick_split,
    space_attention,
    store_kv,
)
from space_kernels.attention.torch_backend import space_attention as reference
from space_kernels.paging.step_rows import PatternTables, RowPattern, StepRows, StepTables
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SHORT = MadeUp(cached=5, num_chain=1, groups=[(0, 2)], seed=1)
SPACE = MadeUp(cached=66, num_chain=3, groups=[(0, 2), (1, 0), (2, 1)], seed=2)
CHUNK = MadeUp(cached=20, num_chain=13, groups=[(12, 3)], seed=3)
PLAIN = MadeUp(cached=31, num_chain=1, seed=4)
ALL = [SHORT, SPACE, CHUNK, PLAIN]
WALKS: tuple[Walk, ...] = ("parallel", "serial")
LONG = MadeUp(cached=530, num_chain=2, groups=[(1, 3)], seed=5)


def real(step: MadeUpStep, out: Tensor) -> Tensor:
    return out[: step.num_rows]


def expected(step: MadeUpStep, window: int | None = None, softcap: float | None = None) -> Tensor:
    """The reference in float32, on the CPU, on copies of the pages."""
    qkv = QKV(*(tensor.cpu().float().clone() for tensor in step.qkv))
    pages = KVPages(*(tensor.cpu().float().clone() for tensor in step.pages))
    rows = step.rows
    on_cpu = StepRows(rows.pattern, rows.starts, rows.pages, rows.block_size, torch.device("cpu"))
    return real(step, reference(qkv, pages, on_cpu, AttentionSpec(SCALE, window, softcap)))


def found(step: MadeUpStep, window: int | None = None, softcap: float | None = None) -> Tensor:
    out = space_attention(step.qkv, step.pages, step.rows, AttentionSpec(SCALE, window, softcap))
    assert out.dtype is step.query.dtype
    return real(step, out)


def rounding(head_dim: int) -> float:
    """How far two float32 outputs may be apart, by the size of their heads.

    A score is a sum of `head_dim` products of about 1. Its partial sums grow as sqrt(n), and each of the n additions
    rounds one of them at random, by 2^-24 of it: a score is off by SCALE * 2^-24 * n / sqrt(2) in the mean, 1.6e-6 at
    128. An output is off by as much times the distance of its values, and the largest of 100,000 by some five times
    that. Up to 128 the bound is 1e-5, from there on it grows with n.
    """
    return 1e-5 * max(1.0, head_dim / 128)


def assert_equals_reference(step: MadeUpStep, window: int | None, softcap: float | None) -> None:
    wanted, near = expected(step, window, softcap), rounding(step.query.shape[-1])
    torch.testing.assert_close(found(step, window, softcap).cpu(), wanted, atol=near, rtol=0)


# heads, kv heads, head size, page size, window, softcap
COVER = [
    (1, 1, 64, 16, None, None),
    (4, 1, 128, 32, 3, 2.0),
    (8, 1, 256, 16, 40, None),
    (8, 1, 64, 32, None, 2.0),
    (2, 2, 256, 32, 3, None),
    (2, 2, 128, 16, None, 2.0),
    (4, 1, 64, 64, 40, None),
    (7, 1, 96, 16, 3, None),
    (6, 2, 16, 8, 40, 2.0),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window", "softcap"), COVER)
def test_ragged_steps_equal_the_reference(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None, softcap: float | None
) -> None:
    step = made_up_step(
        [SHORT, SPACE, CHUNK], heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, device=DEVICE
    )
    assert_equals_reference(step, window, softcap)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 3, 300])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (8, 1), (14, 2)])
def test_ragged_steps_equal_the_reference_whatever_meets(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None, softcap: float | None
) -> None:
    sequences = [*ALL, LONG]
    step = made_up_step(
        sequences, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, device=DEVICE
    )
    assert_equals_reference(step, window, softcap)


@pytest.mark.parametrize("k", range(9))
def test_every_number_of_masks_equals_the_reference(k: int) -> None:
    full = MadeUp(cached=20, num_chain=k + 1, groups=full_layout(k), seed=k)
    pruned = MadeUp(cached=17, num_chain=k + 1, groups=[(base, k - base) for base in range(k)], seed=k + 10)
    assert_equals_reference(made_up_step([full, pruned], heads=2, kv_heads=1, device=DEVICE), None, None)


@pytest.mark.parametrize("window", [None, 20, 520])
def test_several_splits_equal_the_reference(window: int | None) -> None:
    assert LONG.cached > SPLIT
    assert_equals_reference(made_up_step([LONG, SHORT], heads=2, kv_heads=1, device=DEVICE), window, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("walk", "window"), [("serial", None), ("parallel", 40)])
def test_sinks_equal_the_reference(walk: Walk, window: int | None, dtype: torch.dtype) -> None:
    """Some are far below all scores, some far above."""
    step = made_up_step([SPACE, CHUNK, SHORT, LONG], heads=6, kv_heads=2, head_dim=64, device=DEVICE, dtype=dtype)
    sinks = torch.tensor([-math.inf, -3.0, 0.0, 2.0, 7.0, 300.0])
    qkv = QKV(*(tensor.cpu().float().clone() for tensor in step.qkv))
    pages = KVPages(*(tensor.cpu().float().clone() for tensor in step.pages))
    rows = StepRows(step.rows.pattern, step.rows.starts, step.rows.pages, step.rows.block_size, torch.device("cpu"))
    wanted = real(step, reference(qkv, pages, rows, AttentionSpec(SCALE, window, sinks=sinks)))
    tables = StepTables.of(step.rows)
    store_kv(step.qkv, step.pages, tables)
    spec = AttentionSpec(SCALE, window, sinks=sinks.to(DEVICE))
    out = attend(step.qkv, step.pages, tables, spec, walk=walk)
    assert out.dtype is dtype
    near, relative = (1e-5, 0.0) if dtype is torch.float32 else (2**-7, 2**-7)  # weights and outputs are rounded
    torch.testing.assert_close(real(step, out).cpu().float(), wanted, atol=near, rtol=relative)
    assert not bool(out[len(real(step, out)) :].any())


SWAPPED = [AttentionTile(queries, keys=64, warps=4, stages=3, swapped=True) for queries in (16, 32)]


@pytest.mark.parametrize("tile", SWAPPED)
@pytest.mark.parametrize(("walk", "window", "softcap"), [("serial", None, None), ("parallel", 40, 2.0)])
def test_swapped_products_equal_the_reference(
    tile: AttentionTile, walk: Walk, window: int | None, softcap: float | None
) -> None:
    step = made_up_step([SPACE, CHUNK, SHORT, MadeUp(150, 1, seed=6)], heads=7, kv_heads=1, head_dim=64, device=DEVICE)
    tables = StepTables.of(step.rows)
    store_kv(step.qkv, step.pages, tables)
    out = attend(step.qkv, step.pages, tables, AttentionSpec(SCALE, window, softcap), walk=walk, split=128, tile=tile)
    torch.testing.assert_close(real(step, out).cpu(), expected(step, window, softcap), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("dots_round_once")
@pytest.mark.parametrize(
    ("head_dim", "window", "softcap", "dtype"),
    [
        pytest.param(128, None, None, torch.bfloat16, id="128-None-None-dtype0"),
        pytest.param(128, None, None, torch.float16, id="128-None-None-dtype1", marks=pytest.mark.slow),
        pytest.param(64, 40, 2.0, torch.bfloat16, id="64-40-2.0-dtype0", marks=pytest.mark.slow),
        pytest.param(64, 40, 2.0, torch.float16, id="64-40-2.0-dtype1"),
    ],
)
def test_every_tile_gives_the_same_bits(
    dtype: torch.dtype, head_dim: int, window: int | None, softcap: float | None
) -> None:
    """Decoding takes another tile than a prefill or mask rows, and restarts recompute what was decoded."""
    sequences = [SPACE, CHUNK, MadeUp(cached=150, num_chain=3, groups=full_layout(2), seed=8)]
    step = made_up_step(sequences, head_dim=head_dim, dtype=dtype, device=DEVICE)
    tables = StepTables.of(step.rows)
    store_kv(step.qkv, step.pages, tables)
    spec = AttentionSpec(SCALE, window, softcap)
    tiles = [tile_for(head_dim, dtype), *SWAPPED]
    outs = [
        attend(step.qkv, step.pages, tables, spec, walk=walk, split=128, tile=tile) for tile in tiles for walk in WALKS
    ]
    assert bool(outs[0].isfinite().all())
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 2.0)])
def test_sixteen_bits_stay_within_their_rounding(
    dtype: torch.dtype, bound: float, window: int | None, softcap: float | None
) -> None:
    """Weights and outputs are rounded once each, by Triton's interpreter towards zero: two units in the last place."""
    step = made_up_step([SHORT, SPACE], head_dim=64, dtype=dtype, device=DEVICE)
    wanted = expected(step, window, softcap)
    largest = float(torch.cat([step.pages.values.nan_to_num().flatten(), step.value.flatten()]).abs().max())
    error = (found(step, window, softcap).cpu().float() - wanted).abs().max()
    assert error <= bound * largest


def of_sequences(sequences: Sequence[MadeUp], out: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split an output into chain rows and mask rows, per sequence."""
    pattern = made_up_step(sequences, head_dim=1).rows.pattern
    return [
        (out[chain.start : chain.stop], out[masks.start : masks.stop])
        for chain, masks in zip(pattern.chain_runs, pattern.mask_runs, strict=True)
    ]


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 40), (torch.bfloat16, None)])
def test_a_sequence_has_the_same_bits_in_any_company(dtype: torch.dtype, window: int | None) -> None:
    together = found(made_up_step(ALL, dtype=dtype, device=DEVICE), window)
    for one, (chain, masks) in zip(ALL, of_sequences(ALL, together), strict=True):
        alone = found(made_up_step([one], dtype=dtype, device=DEVICE), window)
        assert torch.equal(torch.cat([chain, masks]), alone), one


@pytest.mark.parametrize(("dtype", "heads"), [(torch.float32, 7), (torch.bfloat16, 4)])
def test_a_chain_has_the_same_bits_whatever_masks_stand_behind_it(dtype: torch.dtype, heads: int) -> None:
    """Over three splits, the last of which only some of its rows reach."""
    plain = MadeUp(cached=126, num_chain=4, seed=9)
    layouts: list[list[tuple[int, int]]] = [[], [(0, 1)], [(3, 3)], full_layout(3)]
    steps = [dataclasses.replace(plain, groups=groups) for groups in layouts]
    outs = [
        walked(made_up_step([laid_out], heads=heads, kv_heads=1, dtype=dtype, device=DEVICE), "parallel")[:4]
        for laid_out in steps
    ]
    for out in outs[1:]:
        assert torch.equal(out, outs[0])


def tables_of(num_chain: int, starts: list[int], page_table: Tensor, block_size: int) -> StepTables:
    """Sequences of so many chain rows each, from tensors of our own, as a CUDA graph holds them."""
    count = len(starts)
    pattern = RowPattern(
        chain_runs=[range(n * num_chain, (n + 1) * num_chain) for n in range(count)],
        mask_runs=[range(count * num_chain, count * num_chain)] * count, offsets=np.tile(np.arange(num_chain), count),
        reach=np.tile(np.arange(1, num_chain + 1), count), group=np.full(count * num_chain, -1),
        num_chain_rows=count * num_chain, num_padded=count * num_chain,
    )  # fmt: skip
    tables = PatternTables.of(pattern, page_table.device)
    where = torch.tensor(starts, dtype=torch.int32, device=page_table.device)
    return StepTables(tables, where, page_table, block_size, tables.num_chain)


@pytest.mark.usefixtures("dots_round_once")
@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 50)])
def test_a_row_decoded_alone_has_the_bits_it_has_in_a_prefill(dtype: torch.dtype, window: int | None) -> None:
    step = made_up_step([MadeUp(cached=110, num_chain=24, seed=3)], heads=4, kv_heads=1, dtype=dtype, device=DEVICE)
    prefilled = walked(step, "serial", window)
    whole = StepTables.of(step.rows)
    for number in (0, 3, 17, 18, 23):  # 18 is the first row that sees the third split
        one = tables_of(1, [110 + number], whole.page_table, whole.block_size)
        own = slice(number, number + 1)
        qkv = QKV(*(part[own] for part in step.qkv))
        alone = attend(qkv, step.pages, one, AttentionSpec(SCALE, window), walk="parallel", split=64)
        assert torch.equal(alone, prefilled[own]), number


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 70), (torch.float32, None), (torch.bfloat16, None)])
def test_who_walks_the_splits_changes_no_bit(dtype: torch.dtype, window: int | None) -> None:
    sequences = [SPACE, MadeUp(cached=150, num_chain=3, groups=full_layout(2), seed=8)]
    step = made_up_step(sequences, heads=4, kv_heads=1, dtype=dtype, device=DEVICE)
    outs = [walked(step, walk, window) for walk in ("parallel", "serial")]
    assert torch.equal(outs[0], outs[1])
    if dtype is torch.float32:
        torch.testing.assert_close(outs[0].cpu(), expected(step, window), atol=1e-5, rtol=0)


def walked(step: MadeUpStep, walk: Walk, window: int | None = None, tables: StepTables | None = None) -> Tensor:
    """With splits of one key block or two."""
    tables = tables or StepTables.of(step.rows)
    store_kv(step.qkv, step.pages, tables)
    return real(step, attend(step.qkv, step.pages, tables, AttentionSpec(SCALE, window), walk=walk, split=64))


@pytest.mark.parametrize("walk", ["parallel", "serial"])
def test_room_in_the_page_table_changes_no_bit(walk: Walk) -> None:
    """A wider table means more programs, more splits, and a second kernel where there was one."""
    step = made_up_step([SPACE, SHORT], device=DEVICE)
    tables = StepTables.of(step.rows)
    rooms = []
    for width in (tables.page_table.shape[1], 20):
        wide = torch.full((2, width), 10**6, dtype=torch.int32, device=DEVICE)
        wide[:, : tables.page_table.shape[1]] = tables.page_table
        rooms.append(walked(step, walk, tables=dataclasses.replace(tables, page_table=wide)))
    assert torch.equal(rooms[0], rooms[1])
    short = made_up_step([SHORT], device=DEVICE)
    assert torch.equal(walked(short, walk), found(short))  # one split of 64, one of 512


def test_what_lies_in_unwritten_slots_changes_nothing() -> None:
    outs = [found(made_up_step(ALL, garbage=garbage, device=DEVICE)) for garbage in (float("nan"), 7.0)]
    assert torch.equal(outs[0], outs[1])
    assert bool(outs[0].isfinite().all())


def test_keys_and_values_that_are_not_finite_count_as_zero() -> None:
    spoilt = made_up_step([SPACE, PLAIN], device=DEVICE)
    spoilt.key[1, 0, 3], spoilt.value[-2, 1, 0], spoilt.key[5, 1, 2] = float("inf"), float("nan"), -float("inf")
    zeros = made_up_step([SPACE, PLAIN], device=DEVICE)
    zeros.key[1, 0, 3] = zeros.value[-2, 1, 0] = zeros.key[5, 1, 2] = 0.0
    assert torch.equal(found(spoilt), found(zeros))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of numpy, in the interpreter
def test_a_row_gone_wrong_stays_alone() -> None:
    healthy, spoilt = (made_up_step([SPACE, PLAIN], device=DEVICE) for _ in range(2))
    spoilt.query[1, 2] = float("nan")
    wanted, out = found(healthy), found(spoilt)
    assert bool(out[1, 2].isnan().all())
    out[1, 2] = wanted[1, 2]
    assert torch.equal(out, wanted)


def test_queries_keys_and_values_may_be_cut_from_one_product() -> None:
    step = made_up_step([SPACE, SHORT], device=DEVICE)
    fused = torch.cat([step.query, step.key, step.value], 1).contiguous()
    query, key, value = fused.split([4, 2, 2], 1)
    cut = dataclasses.replace(step, qkv=QKV(query, key, value))
    assert torch.equal(found(cut), found(made_up_step([SPACE, SHORT], device=DEVICE)))


def test_padding_rows_are_zero() -> None:
    step = made_up_step([SHORT], device=DEVICE)
    out = space_attention(step.qkv, step.pages, step.rows, AttentionSpec(SCALE))
    assert len(out) > step.num_rows
    assert not bool(out[step.num_rows :].any())


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, 2.0)])
def test_prefix_and_step_merge_to_the_whole(chain: bool, window: int | None, softcap: float | None) -> None:
    """With the chain's own keys from the pages, or from the step."""
    step = made_up_step([SPACE, CHUNK], device=DEVICE)
    wanted = expected(step, window, softcap)
    tables = StepTables.of(step.rows)
    store_kv(step.qkv, step.pages, tables)
    committed = dataclasses.replace(tables, num_written=torch.zeros_like(tables.num_written)) if chain else tables
    spec = AttentionSpec(SCALE, window, softcap)
    prefix = prefix_attention(step.query, step.pages, committed, spec)
    among = in_step_attention(step.qkv, tables, spec, chain=chain)
    num_chain = tables.pattern.num_chain_rows
    if not chain:
        assert bool((among[1][:num_chain] == -float("inf")).all())
        assert not bool(among[0][:num_chain].any())
    out, lse = merge(*prefix, *among)
    torch.testing.assert_close(real(step, out).cpu(), wanted, atol=1e-5, rtol=0)
    assert bool(real(step, lse).isfinite().all())


def test_the_log_sum_exp_is_that_of_the_scores() -> None:
    step = made_up_step([MadeUp(cached=70, num_chain=1, seed=5)], heads=2, kv_heads=2, device=DEVICE)
    tables = StepTables.of(step.rows)
    store_kv(step.qkv, step.pages, tables)
    for walk in ("parallel", "serial"):
        _, lse = prefix_attention(step.query, step.pages, tables, AttentionSpec(SCALE), walk=walk, split=64)
        keys = step.pages.keys[tables.page_table[0].long()].transpose(1, 2).flatten(0, 1)[:71]
        scores = torch.einsum("hd,nhd->hn", step.query[0].double(), keys.double()) * SCALE
        torch.testing.assert_close(lse[0].double(), torch.logsumexp(scores, 1), atol=1e-5, rtol=0)


def test_rows_that_see_nothing_merge_to_nothing() -> None:
    out = torch.full((1, 2, 16), float("nan"), device=DEVICE)
    some = torch.ones((1, 2, 16), device=DEVICE)
    nothing = torch.full((1, 2), -float("inf"), device=DEVICE)
    merged, lse = merge(out, nothing, out, nothing)
    assert not bool(merged.any())
    assert bool((lse == -float("inf")).all())
    merged, lse = merge(out, nothing, some, torch.zeros_like(nothing))
    assert torch.equal(merged, some)
    assert torch.equal(lse, torch.zeros_like(nothing))


def test_tables_updated_in_place_move_every_sequence_on() -> None:
    """CUDA graph replays do this: the same tensors with new values."""
    steps = [made_up_step([MadeUp(c, 2, seed=1), MadeUp(40, 2, seed=2)], device=DEVICE) for c in (30, 44)]
    tables = StepTables.of(steps[0].rows)
    static = dataclasses.replace(tables, starts=tables.starts.clone(), page_table=tables.page_table.clone())
    for step in steps:
        now = StepTables.of(step.rows)
        static.starts.copy_(now.starts)
        static.page_table.copy_(now.page_table)
        store_kv(step.qkv, step.pages, static)
        out = attend(step.qkv, step.pages, static, AttentionSpec(SCALE))
        torch.testing.assert_close(real(step, out).cpu(), expected(step), atol=1e-5, rtol=0)


def test_chain_rows_that_are_dead_store_nothing_and_harm_nobody() -> None:
    """A graph lays out k drafts for all; a sequence with fewer, or none left, has dead rows over unwritten slots."""
    step = made_up_step([MadeUp(30, 3, seed=1), MadeUp(40, 3, seed=2)], device=DEVICE)
    wanted = expected(step)
    tables = StepTables.of(step.rows)
    alive = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    before = step.pages.keys.clone()
    fewer = dataclasses.replace(tables, num_written=alive)
    store_kv(step.qkv, step.pages, fewer)
    assert int((before.isnan() & ~step.pages.keys.isnan()).any((1, 3)).sum()) == 2  # slots
    out = attend(step.qkv, step.pages, fewer, AttentionSpec(SCALE))
    torch.testing.assert_close(out[:2].cpu(), wanted[:2], atol=1e-5, rtol=0)
    assert bool(out.isfinite().all())


def test_a_step_needs_a_positive_scale_and_heads_that_divide() -> None:
    step = made_up_step([SHORT], heads=4, kv_heads=2, device=DEVICE)
    tables = StepTables.of(step.rows)
    pages, spec = step.pages, AttentionSpec(SCALE)
    with pytest.raises(ValueError, match="The scale is 0"):
        attend(step.qkv, pages, tables, AttentionSpec(0.0))
    with pytest.raises(ValueError, match="3 query heads do not divide among 2"):
        attend(step.qkv._replace(query=step.query[:, :3]), pages, tables, spec)
    with pytest.raises(ValueError, match="A split of 40 positions is no multiple"):
        attend(step.qkv, pages, tables, spec, split=40)
    with pytest.raises(ValueError, match="slots of a page must be adjacent"):
        attend(step.qkv, KVPages(*(p.transpose(1, 2) for p in pages)), tables, spec)


def test_a_tile_follows_from_head_size_and_dtype_alone() -> None:
    dtypes = torch.bfloat16, torch.float16, torch.float32
    for head_dim, dtype, hopper in itertools.product((16, 64, 96, 128, 256), dtypes, (True, False)):
        tile = tile_for(head_dim, dtype, hopper=hopper)
        assert SPLIT % tile.keys == 0
        assert (
            tile.keys * head_dim * dtype.itemsize * 2 * tile.stages <= 100 * 1024
        )  # of shared memory: an A100 has 163


def test_few_packed_rows_of_sixteen_bits_swap_the_products() -> None:
    for dtype, head_dim, packed in itertools.product((torch.bfloat16, torch.float16), (64, 96, 128), (1, 16, 17, 32)):
        swapped, usual = swapped_tile(head_dim, dtype, packed), tile_for(head_dim, dtype)
        assert swapped is not None
        assert packed <= swapped.queries < 2 * max(packed, 16)
        assert swapped.keys == usual.keys  # or the bits would differ
    assert swapped_tile(128, torch.bfloat16, 33) is None
    assert swapped_tile(32, torch.bfloat16, 4) is None  # too few lanes for a warpgroup's rows
    assert swapped_tile(256, torch.bfloat16, 4) is None
    assert swapped_tile(128, torch.float32, 4) is None


@pytest.mark.parametrize(
    ("num_chain", "num_sequences", "swapped"), [(1, 3, 16), (1, 64, 16), (6, 3, 32), (6, 64, 0), (9, 3, 0)]
)
def test_hopper_swaps_the_products_of_one_row_always_and_of_a_few_while_there_is_room(
    monkeypatch: pytest.MonkeyPatch, num_chain: int, num_sequences: int, swapped: int
) -> None:
    monkeypatch.setattr(attention_triton, "is_hopper", lambda device: True)
    monkeypatch.setattr(attention_triton, "num_multiprocessors", lambda device: 132)
    pages = KVPages(*(torch.zeros(4, 8, 16, 128, dtype=torch.bfloat16) for _ in range(2)))
    query = torch.zeros(num_chain * num_sequences, 32, 128, dtype=torch.bfloat16)
    tables = tables_of(num_chain, [0] * num_sequences, torch.zeros(num_sequences, 4, dtype=torch.int32), 16)
    tile = attention_triton.step_tile(query, 8, pages, tables.pattern)
    assert tile.swapped == bool(swapped)
    assert tile.queries == (swapped or 64)
    as_fp8 = KVPages(*(part.to(torch.uint8) for part in pages))
    assert not attention_triton.step_tile(query, 8, as_fp8, tables.pattern).swapped


def test_longer_splits_are_taken_where_bits_may_differ_and_the_device_is_full_even_so() -> None:
    cpu = torch.device("cpu")  # counts as 132 multiprocessors
    assert quick_split(1024 + 16, 8, cpu) == SPLIT
    assert quick_split(32 * 1024, 8, cpu) == 2 * SPLIT
    assert quick_split(1024, 16 * 8, cpu) == SPLIT
    assert quick_split(1024 + 16, 16 * 8, cpu) == 2 * SPLIT


def test_steps_that_need_not_be_exact_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "num_multiprocessors", lambda device: 2)  # which few programs fill
    step = made_up_step([LONG, SHORT], heads=2, kv_heads=1, device=DEVICE)
    taken = quick_split(StepTables.of(step.rows).capacity, 2, step.rows.device)
    assert taken == 2 * SPLIT
    out = space_attention(step.qkv, step.pages, step.rows, AttentionSpec(SCALE), exact=False)
    torch.testing.assert_close(real(step, out).cpu(), expected(step), atol=1e-5, rtol=0)
