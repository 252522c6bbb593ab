"""The configurations of fused attention for compile_check: the shapes of common models."""

from __future__ import annotations

import torch

from space_kernels.attention.attention_kernels import ONE_SPLIT, PARALLEL, SERIAL, attend, combine
from space_kernels.attention.tile import SPLIT, combine_warps, padded, padded_queries, precision, tile_for
from space_kernels.build.launch import Tuned

_POINTERS, _PAGES = ("query", "key", "value"), ("key_pages", "value_pages")
_TABLES = (
    *("tiles", "chain_firsts", "chain_counts", "mask_firsts", "mask_counts", "offsets", "reaches", "group_firsts"),
    *("starts", "num_written", "page_table"),
)
_STRIDES = ("query_row", "query_head", "key_row", "key_head", "value_row", "value_head", "page_stride", "head_stride")
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _tuned_attend(
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    walk: int,
    *,
    masks: bool = True,
    chain: bool = False,
    pages: bool = True,
    window: int = 0,
    capped: bool = False,
    fp8: bool = False,
) -> Tuned:
    tile = tile_for(head_dim, dtype)
    lse = not pages
    return Tuned(
        attend,
        dict.fromkeys(_POINTERS, f"*{_TYPES[dtype]}")
        | dict.fromkeys(_PAGES, "*u8" if fp8 else f"*{_TYPES[dtype]}")
        | {"out": "*fp32" if walk == PARALLEL or lse else f"*{_TYPES[dtype]}", "lse": "*fp32"}
        | {"tops": "*fp32", "totals": "*fp32"}
        | dict.fromkeys(_TABLES, "*i32")
        | dict.fromkeys(_STRIDES, "i32:16")
        | {"table_width": "i32", "num_rows": "i32", "inner": "fp32", "outer": "fp32"},
        {
            "HEADS": heads[0],
            "KV_HEADS": heads[1],
            "D": head_dim,
            "BLOCK_D": padded(head_dim),
            "BLOCK_SIZE": 16,
            "M": tile.queries,
            "N": tile.keys,
            "SPLIT": SPLIT,
            "WINDOW": window,
            "CAPPED": capped,
            "PAGES": pages,
            "MASKS": masks,
            "CHAIN": chain,
            "WALK": walk,
            "LSE": lse,
            "PRECISION": precision(dtype),
        },
        tile.warps,
        tile.stages,
    )


def _tuned_combine(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> Tuned:
    block_q, block_d = padded_queries(*heads), padded(head_dim)
    return Tuned(
        combine,
        dict.fromkeys(("sums", "tops", "totals", "lse"), "*fp32")
        | {"out": f"*{_TYPES[dtype]}"}
        | dict.fromkeys(("owners", "offsets", "reaches", "starts", "num_written"), "*i32")
        | {"num_rows": "i32"},
        {
            "HEADS": heads[0],
            "KV_HEADS": heads[1],
            "D": head_dim,
            "BLOCK_Q": block_q,
            "BLOCK_D": block_d,
            "SPLIT": SPLIT,
            "WINDOW": 0,
            "LSE": False,
        },
        combine_warps(block_q, block_d),
    )


_8B = ((32, 8), 128)
_SHAPES = (_8B, ((32, 8), 64), ((32, 32), 128), ((14, 2), 64), ((32, 32), 96), ((8, 4), 256), ((8, 1), 128))

TUNED = (
    *(_tuned_attend(torch.bfloat16, *_8B, walk) for walk in (PARALLEL, SERIAL, ONE_SPLIT)),
    *(_tuned_attend(torch.bfloat16, *shape, walk) for shape in _SHAPES[1:] for walk in (PARALLEL, SERIAL)),
    *(_tuned_attend(torch.float16, *shape, walk) for shape in _SHAPES for walk in (PARALLEL, SERIAL)),
    *(_tuned_attend(torch.float32, (8, 4), dim, walk) for dim in (32, 64, 128, 256) for walk in (PARALLEL, SERIAL)),
    _tuned_attend(torch.bfloat16, *_8B, PARALLEL, masks=False),
    _tuned_attend(torch.bfloat16, *_8B, SERIAL, window=4096),
    _tuned_attend(torch.bfloat16, (8, 4), 256, PARALLEL, window=4096, capped=True),
    _tuned_attend(torch.bfloat16, *_8B, ONE_SPLIT, pages=False, chain=True),
    _tuned_attend(torch.bfloat16, *_8B, ONE_SPLIT, pages=False),
    *(_tuned_attend(torch.bfloat16, *_8B, walk, fp8=True) for walk in (PARALLEL, SERIAL, ONE_SPLIT)),
    *(_tuned_attend(torch.float16, *_8B, walk, fp8=True) for walk in (PARALLEL, SERIAL)),
    *(_tuned_attend(torch.bfloat16, *shape, walk, fp8=True) for shape in _SHAPES[1:] for walk in (PARALLEL, SERIAL)),
    _tuned_attend(torch.bfloat16, (8, 4), 256, PARALLEL, window=4096, capped=True, fp8=True),
    *(_tuned_combine(torch.bfloat16, *shape) for shape in _SHAPES),
    *(_tuned_combine(torch.float16, *shape) for shape in _SHAPES),
)
