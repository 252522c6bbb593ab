"""flash-attn and flashinfer themselves, on a GPU, against the reference."""

import functools
from collections.abc import Callable

import pytest
import torch
from doubles.kernels import SCALE, MadeUp, MadeUpStep, full_layout, made_up_step, run
from space_kernels.attention.attention import AttentionSpec
from space_kernels.attention.torch_backend import space_attention as reference
from space_kernels.attention_backends import BACKENDS, AttentionNeed, installed_version
from space_kernels.paging.step_rows import StepRows, StepTables
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SEQUENCES = [
    MadeUp(cached=5, num_chain=1, groups=[(0, 2)], seed=1),
    MadeUp(cached=250, num_chain=3, groups=[(0, 2), (1, 2), (2, 2)], seed=2),
    MadeUp(cached=100, num_chain=60, seed=6),
    MadeUp(cached=300, num_chain=4, groups=[(0, 3), (2, 1)], seed=3),
    MadeUp(cached=256, num_chain=1, seed=4),
    MadeUp(cached=0, num_chain=40, groups=[(39, 3)], seed=5),
]
LIBRARIES = ["flash-attn-2", "flash-attn-4", "flashinfer", "flash-attn-3"]
LARGEST_PAGE = 256


def attention_of(name: str, step: MadeUpStep) -> Callable[..., Tensor]:
    need = AttentionNeed.on(
        step.query.device, num_heads=step.query.shape[1], kv_heads=step.key.shape[1], head_dim=step.query.shape[2],
        dtype=step.query.dtype, block_size=step.rows.block_size,
    )  # fmt: skip
    refusal = BACKENDS[name].refusal(need, installed_version)
    if refusal is not None:
        pytest.skip(f"{name} {refusal}")
    return BACKENDS[name].load(need)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (4, 4, 128), (8, 1, 128)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (300, 20.0)])
def test_the_library_equals_the_reference(
    name: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None, softcap: float | None
) -> None:
    made = functools.partial(
        made_up_step, SEQUENCES, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, garbage=0.0
    )
    step = made(block_size=LARGEST_PAGE, device="cuda")
    found = run(step, attention_of(name, step), window=window, softcap=softcap)
    wanted = run(made(), reference, window=window, softcap=softcap)
    torch.testing.assert_close(found.float().cpu(), wanted.float(), atol=8 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name != "flashinfer"])
def test_flash_attn_runs_in_a_graph_of_which_the_host_does_not_know_the_lengths(name: str) -> None:
    sequences = [SEQUENCES[1], MadeUp(511, 3, full_layout(2), seed=9)]
    step = made_up_step(
        sequences, head_dim=64, block_size=LARGEST_PAGE, dtype=torch.bfloat16, device="cuda", garbage=0.0
    )
    attention, tables = attention_of(name, step), StepTables.of(step.rows)
    given = step.qkv, step.pages
    run(step, attention)  # compiles, and builds the pattern, which copies to the device
    rows = StepRows(step.rows.pattern, step.rows.starts, step.rows.pages, LARGEST_PAGE, step.rows.device)
    rows.parts[StepTables, rows.device] = tables
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*given, rows, AttentionSpec(SCALE))
    for moved in (0, -7):
        tables.starts.add_(moved)  # on the device alone
        graph.replay()
        found = out[: step.num_rows].clone()
        there = StepRows(rows.pattern, rows.starts + moved, rows.pages, LARGEST_PAGE, rows.device)
        torch.testing.assert_close(
            found, attention(*given, there, AttentionSpec(SCALE))[: step.num_rows], atol=0, rtol=0
        )
