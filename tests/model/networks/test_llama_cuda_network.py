"""The GPU's network of the Llama family: as transformers has it, on either set of operations, and row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from space_kernels.dispatch import Ops, ops_for, triton_ops
from space_kernels.linear.cuda_linear import ExactLinear
from space_kernels.linear.packed_linear import PackedLinear
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading import load
from space_model.networks import llama_network
from space_model.networks.llama_cuda_network import LlamaCudaNetwork
from space_model.networks.llama_network import LlamaNetwork
from space_model.networks.llama_parts import LlamaSource
from space_model.networks.network import Taps
from space_model.networks.transformers_network import TransformersNetwork
from space_model.space_model import SpaceModel
from tiny_checkpoints import released_adapter, tiny_adapter, tiny_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FAMILIES = ["llama", "llama3", "mistral", "qwen2", "qwen3"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16
NUM_BLOCKS = 8


class OnOps:
    """Stands where the CPU's network is looked for, and makes the GPU's on these operations."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def fits(self, config: object, dtype: torch.dtype) -> bool:
        return True

    def __call__(self, source: LlamaSource) -> LlamaCudaNetwork:
        assert source.weights == "plain"
        return LlamaCudaNetwork(source, self._ops)


def load_on(
    ops: Ops,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    adapters: Mapping[str, Path] | None = None,
    dtype: str = "float32",
) -> SpaceModel:
    with monkeypatch.context() as patch:
        patch.setattr(llama_network, "LlamaNetwork", OnOps(ops))
        model = load.load_model(path, dtype=dtype, attention="torch", adapters=adapters)
    assert isinstance(model._network, LlamaCudaNetwork)
    return model


def ids_of(seed: int, length: int) -> list[int]:
    return torch.randint(16, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(model: SpaceModel, *steps: Sequence[Segment]) -> Tensor:
    """The last step's rows without padding, behind the steps before it, on pages of their own."""
    kv = model.allocate_kv(NUM_BLOCKS, BLOCK)
    masks = [adapter.num_masks for adapter in model.facts.adapters]
    hidden = torch.empty(0)
    for segments in steps:
        batch = ForwardBatch.build(
            segments, block_size=BLOCK, mask_ids=model.facts.mask_ids, adapter_masks=masks, device=model.facts.device
        )
        hidden = model.forward(batch, kv)[: batch.num_rows]
    return hidden


PREFILL = [Segment(ids_of(0, 21), 0, [5, 1, 2]), Segment(ids_of(1, 8), 0, [3])]
MIXED = [
    Segment(ids_of(2, 3), 21, [5, 1, 2], DraftLayout(2, (3, 1, 2))),
    Segment(ids_of(3, 1), 8, [3], DraftLayout.full(0, 3)),
    Segment(ids_of(4, 6), 0, [0]),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_references_it_equals_the_transformers_network(
    family: str, dtype: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = load_on(ops_for("cpu"), checkpoint_of(family), monkeypatch, dtype=dtype)
    monkeypatch.setattr(LlamaNetwork, "fits", lambda config, dtype: False)
    other = load.load_model(checkpoint_of(family), dtype=dtype, attention="torch")
    assert isinstance(other._network, TransformersNetwork)
    tolerance = 2e-5 if dtype == "float32" else 0.1
    torch.testing.assert_close(run(fused, PREFILL, MIXED), run(other, PREFILL, MIXED), atol=tolerance, rtol=0)
    ids = torch.arange(16)
    assert torch.equal(fused.embed(ids), other.embed(ids))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer and one key-value head: interpreted kernels take their time."""
    folder = tmp_path_factory.mktemp("small")
    return tiny_checkpoint(folder, "qwen3", hidden_size=32, num_layers=1, num_heads=2, kv_heads=1, draft_head=False)


def on_triton(path: Path, monkeypatch: pytest.MonkeyPatch, *, exact: bool) -> SpaceModel:
    """On a GPU, as it is loaded there; elsewhere interpreted."""
    pytest.importorskip("triton")
    if DEVICE == "cuda":
        model = load.load_model(path, dtype="float32", device="cuda", exact=exact)
        assert isinstance(model._network, LlamaCudaNetwork)
        return model
    return load_on(triton_ops(ExactLinear if exact else PackedLinear), path, monkeypatch)


SHORT_PREFILL = [Segment(ids_of(0, 7), 0, [5]), Segment(ids_of(1, 2), 0, [3])]
SHORT_MIXED = [Segment(ids_of(2, 2), 7, [5], DraftLayout(1, (1, 2))), Segment(ids_of(3, 1), 2, [3])]


def test_tritons_operations_say_what_the_references_say(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run(load_on(ops_for("cpu"), small, monkeypatch), SHORT_PREFILL, SHORT_MIXED)
    found = run(on_triton(small, monkeypatch, exact=False), SHORT_PREFILL, SHORT_MIXED)
    torch.testing.assert_close(found.cpu(), wanted, atol=5e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tritons_operations_say_so_of_every_family(
    family: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(load_on(ops_for("cpu"), checkpoint_of(family), monkeypatch), PREFILL, MIXED)
    found = run(on_triton(checkpoint_of(family), monkeypatch, exact=False), PREFILL, MIXED)
    torch.testing.assert_close(found.cpu(), wanted, atol=5e-5, rtol=0)


def check_chain_rows(model: SpaceModel, prompt: list[int], chain: list[int], layout: DraftLayout) -> None:
    """A chain row has the same bits with drafts and masks, without them, and beside other sequences."""
    start, pages = len(prompt), [5, 1]
    prefill = [Segment(prompt, 0, pages)]
    whole = run(model, prefill, [Segment(chain, start, pages, layout)])
    for count in range(1, len(chain) + 1):
        plain = [[Segment([token], start + number, pages)] for number, token in enumerate(chain[:count])]
        assert torch.equal(run(model, prefill, *plain)[0], whole[count - 1]), count
    beside = [Segment(chain, start, pages), SHORT_MIXED[1]]
    assert torch.equal(run(model, [*prefill, SHORT_PREFILL[1]], beside)[: len(chain)], whole[: len(chain)])


@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_references_a_chain_rows_bits_do_not_depend_on_its_company(
    family: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_on(ops_for("cpu"), checkpoint_of(family), monkeypatch)
    check_chain_rows(model, ids_of(0, 21), ids_of(2, 3), DraftLayout(2, (3, 1, 2)))


def test_with_exact_products_on_a_gpu_they_do_not_either(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_chain_rows(on_triton(small, monkeypatch, exact=True), ids_of(0, 7), ids_of(2, 2), DraftLayout(1, (1, 2)))


def test_adapters_act_on_mask_rows_as_on_a_cpu(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = llama
    few = ("q_proj", "up_proj")
    adapters = {
        "wide": tiny_adapter(tmp_path / "wide", path, num_masks=3, rank=3, seed=1),
        "narrow": tiny_adapter(tmp_path / "narrow", path, seed=2, linears=few, draft_head=False),
    }
    fused = load_on(ops_for("cpu"), path, monkeypatch, adapters)
    cpu = load.load_model(path, dtype="float32", adapters=adapters)
    assert isinstance(cpu._network, LlamaNetwork)
    steps = (
        PREFILL,
        [
            Segment(ids_of(2, 3), 21, [5, 1, 2], DraftLayout(2, (3, 1, 2)), 1),
            Segment(ids_of(3, 1), 8, [3], DraftLayout.full(0, 3), 0),
            Segment(ids_of(4, 6), 0, [0], DraftLayout.full(0, 2)),
        ],
    )
    found = run(fused, *steps)
    torch.testing.assert_close(found, run(cpu, *steps), atol=2e-5, rtol=0)
    own = run(fused, PREFILL, [Segment(s.ids, s.start, s.pages, s.layout) for s in steps[1]])
    assert torch.equal(found[:10], own[:10])  # chain rows
    assert not torch.allclose(found[10:], own[10:], atol=1e-3)


def test_a_released_adapter_s_masks_read_as_on_a_cpu(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = {"fast": f"uno:{released_adapter(tmp_path, llama, rank=8)}"}
    fused = load_on(ops_for("cpu"), llama, monkeypatch, adapters)
    steps = (PREFILL, [Segment(ids_of(2, 3), 21, [5, 1, 2], DraftLayout(2, (3, 1, 2)), 0)])
    found = run(fused, *steps)
    torch.testing.assert_close(
        found, run(load.load_model(llama, dtype="float32", adapters=adapters), *steps), atol=2e-5, rtol=0
    )


class NothingAsked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where somebody would wait for a number on the device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_truth = name.startswith("index") and any(
            isinstance(part, Tensor) and part.dtype is torch.bool for part in (args[1] if name == "index" else ())
        )
        if name in self.WAITING or by_truth:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(DEVICE == "cuda", reason="the graph's capture shows it")
def test_on_triton_a_forward_pass_asks_the_device_nothing(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_triton(small, monkeypatch, exact=True)
    batch = ForwardBatch.build(SHORT_MIXED, block_size=BLOCK, mask_ids=model.facts.mask_ids)
    kv = model.allocate_kv(NUM_BLOCKS, BLOCK)
    with NothingAsked():  # type: ignore[no-untyped-call]
        model.logits(model.forward(batch, kv))
        with pytest.raises(AssertionError, match="waits for the device"):
            kv.keys[0][kv.keys[0] > 0].sum()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a CUDA device")
def test_a_captured_forward_pass_is_replayed_for_other_ids_and_positions(checkpoint_of: Callable[[str], Path]) -> None:
    from space_kernels.paging.step_rows import StepTables

    model = load.load_model(checkpoint_of("qwen3"), dtype="float32", device="cuda")
    layout = DraftLayout(2, (3, 1, 2))

    def batch_of(seed: int, start: int) -> ForwardBatch:
        segments = [Segment(ids_of(seed, 3), start, [5, 1, 2], layout)]
        return ForwardBatch.build(segments, block_size=BLOCK, mask_ids=model.facts.mask_ids, device="cuda")

    kv = model.allocate_kv(NUM_BLOCKS, BLOCK)
    prompt = ForwardBatch.build([Segment(ids_of(0, 30), 0, [5, 1, 2])], block_size=BLOCK, mask_ids=(), device="cuda")
    model.forward(prompt, kv)
    held, later = batch_of(1, 21), batch_of(2, 26)
    tables, later_tables = StepTables.of(held.rows), StepTables.of(later.rows)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        model.forward(held, kv)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = model.forward(held, kv)
    held.ids.copy_(later.ids)
    held.positions.copy_(later.positions)
    tables.starts.copy_(later_tables.starts)
    graph.replay()
    assert torch.equal(hidden, model.forward(later, kv))


@torch.inference_mode()
def test_it_copies_the_inputs_of_layers_as_the_cpu_s_network_does(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for model in (
        load_on(ops_for("cpu"), checkpoint_of("qwen3"), monkeypatch),
        load.load_model(checkpoint_of("qwen3")),
    ):
        batch = ForwardBatch.build(PREFILL, block_size=BLOCK, mask_ids=model.facts.mask_ids)
        taps = Taps.of((2, 1), batch, model.facts)
        model.network.forward(batch, model.allocate_kv(NUM_BLOCKS, BLOCK), taps)
        found.append(taps.states)
    torch.testing.assert_close(*found, atol=2e-5, rtol=0)
