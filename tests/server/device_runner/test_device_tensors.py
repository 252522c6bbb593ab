"""A device step asks nothing of the host while it is launched: shown on the CPU, where it could ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from space_common.worker.client import WorkerClient
from space_kernels.attention.attention import QKV, AttentionSpec, KVPages
from space_kernels.dispatch import Ops
from space_kernels.layers import layers
from space_kernels.layers.layers import HeadCounts, HeadNorm
from space_kernels.linear.cuda_linear import CudaLinear
from space_kernels.paging.step_rows import StepRows, StepTables
from space_model.loading.load import load_model
from space_model.networks import llama_network
from space_model.networks.llama_cuda_network import LlamaCudaNetwork
from space_model.networks.llama_parts import LlamaSource
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_server.device_runner.device_forward import StepKind, TensorForward
from space_server.device_runner.device_runner import DeviceRunner
from space_server.speculation.controller import FixedLayout
from space_server.speculation.synthetic_acceptance import SyntheticAcceptance
from space_server.worker import Worker
from tiny_checkpoints import tiny_adapter, tiny_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK, BLOCKS = 4, 60
ASKS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}


class NothingAsked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations whose result the host must look at, or whose shape depends on a tensor's values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num_operations += 1
        name = func.overloadpacket.__name__
        by_mask = name in {"index", "index_put", "index_put_"} and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        assert name not in ASKS, f"{name} waits for the device"
        assert not by_mask, f"{name} by a mask waits for the device"
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------------------- an attention of tensors


def turn_and_store(
    fused: Tensor, angles: tuple[Tensor, Tensor], pages: KVPages, slots: Tensor, counts: HeadCounts,
    norm: HeadNorm | None = None,
) -> QKV:  # fmt: skip
    """`layers.rotary_store` in which dead rows write to the last block, which nobody has."""
    assert norm is None
    num_heads, kv_heads = counts
    heads = fused.view(len(fused), num_heads + 2 * kv_heads, -1)
    query, key, value = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    turned = heads[:, : num_heads + kv_heads]
    first, second = turned.chunk(2, dim=-1)
    cos, sin = (of_row[:, None] for of_row in angles)
    turned.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
    size, count = pages.keys.shape[2], len(slots)
    slots = torch.where(slots < 0, len(pages.keys) * size - 1, slots)
    for kept, new in ((pages.keys, key), (pages.values, value)):
        kept[slots // size, :, slots % size] = new[:count]
    return QKV(query, key, value)


def attend(qkv: QKV, of_layer: KVPages, rows: StepRows, spec: AttentionSpec) -> Tensor:
    """Each row over all slots of its sequence's page table and all rows of the step, what it must not see hidden."""
    assert spec == AttentionSpec(spec.scale)
    query, key, value = qkv
    tables = StepTables.of(rows)
    at = tables.pattern
    count, num_heads = at.num_rows, query.shape[1]
    owner = at.owner.long()
    table = tables.page_table.long().clamp(0, len(of_layer.keys) - 1)[owner]  # [rows, P]

    def of_pages(pages: Tensor, new: Tensor) -> Tensor:
        old = pages[table].transpose(2, 3).flatten(1, 2)  # [rows, P·size, G, D]
        both = torch.cat([old, new[None, :count].expand(count, -1, -1, -1)], dim=1)
        return both.repeat_interleave(num_heads // pages.shape[1], dim=2)  # [rows, keys, H, D]

    keys, values = of_pages(of_layer.keys, key), of_pages(of_layer.values, value)
    slot, row = torch.arange(tables.capacity), torch.arange(count)
    in_pages = slot < (tables.starts[owner] + torch.minimum(at.reach, tables.num_written[owner]))[:, None]
    in_step = (at.group[:, None] >= 0) & (row >= at.group_first[:, None]) & (row <= row[:, None])
    seen = torch.cat([in_pages, in_step], dim=1)  # [rows, keys]
    scores = torch.einsum("rhd,rkhd->rhk", query[:count], keys) * spec.scale
    weights = scores.masked_fill(~seen[:, None], -1e30).softmax(dim=2)
    found = torch.einsum("rhk,rkhd->rhd", weights, values)
    return torch.cat([found, torch.zeros_like(query[count:])])


def refuses(*arguments: object, **others: object) -> Tensor:
    raise AssertionError("the network has another attention")


OPS = Ops(
    attention="tensors", space_attention=refuses, attend=attend, rms_norm=layers.rms_norm,
    add_rms_norm=layers.add_rms_norm, rotary_store=turn_and_store, swiglu=layers.swiglu, linear=CudaLinear,
)  # fmt: skip


class OnTensors:
    """Stands where the CPU's network is looked for."""

    @staticmethod
    def fits(config: object, dtype: torch.dtype) -> bool:
        return True

    def __new__(cls, source: LlamaSource) -> LlamaCudaNetwork:  # type: ignore[misc]
        assert source.weights == "plain"
        return LlamaCudaNetwork(source, OPS)


@pytest.fixture(scope="module", params=["draft head", "masks alone", "adapter"])
def on_tensors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpaceModel:
    path = tiny_checkpoint(
        tmp_path_factory.mktemp("tiny") / "llama", num_masks=3, draft_head=request.param == "draft head"
    )
    adapters = {}
    if request.param == "adapter":
        adapters = {"wide": tiny_adapter(path.parent / "wide", path, num_masks=4, rank=3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_network, "LlamaNetwork", OnTensors)
        model = load_model(path, dtype="float32", num_threads=1, adapters=adapters)
    assert isinstance(model._network, LlamaCudaNetwork)
    return model


SAMPLINGS = [
    pb.Sampling(),
    pb.Sampling(seed=3, temperature=0.9, top_k=30, top_p=0.9, min_p=0.01),
    pb.Sampling(
        seed=8, temperature=0.8, repetition_penalty=1.2, min_tokens=9, bad_words=[pb.IdRun(ids=[60])],
        logit_bias={70: 1},
    ),
]  # fmt: skip


class Watched:
    """A launch in which nothing may be asked."""

    def __init__(self, router: WorkerClient) -> None:
        device = router.worker.engine.device
        assert device is not None
        self.mode = NothingAsked()
        self._take = device._take
        self.kinds: set[StepKind] = set()
        device._take = self

    def __call__(self, kind: StepKind) -> Tensor:
        self.kinds.add(kind)
        with self.mode:
            return self._take(kind)


def texts(
    model: SpaceModel, *, device: bool, synthetic: SyntheticAcceptance | None = None
) -> tuple[list[list[int]], WorkerClient]:
    """The second request asks for log-probabilities, too; where there is an adapter, it drafts."""
    controller = FixedLayout.full(3)
    worker = Worker(
        model, num_blocks=BLOCKS, block_size=BLOCK, controller=controller, max_sequences=5, synthetic=synthetic
    )
    router = WorkerClient(worker)
    router.free.remove(BLOCKS - 1)  # where dead rows write
    if device:
        worker.engine.device = DeviceRunner(
            model, worker.kv, max_sequences=5, controller=controller, forward=TensorForward, synthetic=synthetic
        )
        watched = Watched(router)
    adapter = model.facts.adapters[0].name if model.facts.adapters else ""
    for number, sampling in enumerate(SAMPLINGS):
        asks: dict[str, Any] = {"want_logprobs": True, "num_logprobs": 3} if number == 1 else {}
        prompt = [70 + number, 71, 72, 90][: 2 + number]
        max_tokens = 12 if number else 6  # so that the batch shrinks
        router.admit(prompt, max_tokens=max_tokens, sampling=sampling, num_pages=2, adapter=adapter, **asks)
    router.run()
    if device:
        assert watched.mode.num_operations > 500
        assert {kind.adapter for kind in watched.kinds} == ({0} if model.facts.adapters else {None})
        assert {kind.batch_size for kind in watched.kinds} >= ({2, 4} if synthetic is None else {4})
    return [ran.tokens for ran in router.sequences.values()], router


def test_a_step_on_tensors_alone_asks_nothing_and_gives_the_same_text(
    on_tensors: SpaceModel, caplog: pytest.LogCaptureFixture
) -> None:
    on_host, _ = texts(on_tensors, device=False)
    on_device, router = texts(on_tensors, device=True)
    assert on_device == on_host
    assert not any("failed" in message for message in caplog.messages)
    assert any(report.paused for ran in router.sequences.values() for report in ran.reports)


def test_log_probabilities_ask_nothing_either(on_tensors: SpaceModel) -> None:
    found = []
    for device in (False, True):
        _, router = texts(on_tensors, device=device)
        found.append([one for report in router.sequences[2].reports for one in report.logprobs])
    assert len(found[1]) == 12
    for on_host, on_device in zip(*found, strict=True):
        assert (on_device.id, list(on_device.top_ids)) == (on_host.id, list(on_host.top_ids))
        assert on_device.logprob == pytest.approx(on_host.logprob, rel=1e-4)
        assert list(on_device.top_logprobs) == pytest.approx(list(on_host.top_logprobs), rel=1e-4)


def test_decreed_drafts_ask_nothing_either(on_tensors: SpaceModel) -> None:
    facts = on_tensors.facts
    synthetic = SyntheticAcceptance((0.8,) * 5, vocab_size=facts.vocab_size, mask_ids=facts.mask_ids)
    first, _ = texts(on_tensors, device=True, synthetic=synthetic)
    again, router = texts(on_tensors, device=True, synthetic=synthetic)
    assert again == first
    assert {0, 3} <= {count for ran in router.sequences.values() for count in ran.accepted}


def test_what_waits_for_the_device_is_seen() -> None:
    for ask in (
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: bool((x > 0).any()),
        lambda x: x.masked_select(x > 0),
    ):
        with pytest.raises(AssertionError, match="waits"), NothingAsked():
            ask(torch.ones(3))


@pytest.mark.slow
def test_kernels_take_the_same_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a network of one layer, all of them, through the worker."""
    pytest.importorskip("triton")
    from space_kernels.dispatch import triton_ops
    from space_kernels.linear.packed_linear import PackedLinear

    kernels = triton_ops(PackedLinear)
    path = tiny_checkpoint(tmp_path, "llama", hidden_size=32, num_layers=1, num_heads=2, kv_heads=1, num_masks=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_network, "LlamaNetwork", OnTensors)
        patch.setitem(globals(), "OPS", kernels)
        model = load_model(path, dtype="float32", num_threads=1)
    assert model._network._ops is kernels  # type: ignore[attr-defined]
    found = []
    for device in (False, True):
        controller = FixedLayout.full(2)
        worker = Worker(model, num_blocks=16, block_size=16, controller=controller, max_sequences=2)
        if device:
            worker.engine.device = DeviceRunner(
                model, worker.kv, max_sequences=2, controller=controller, forward=TensorForward
            )
        router = WorkerClient(worker)
        for number in range(2):
            router.admit([70 + number, 71, 72], max_tokens=5)
        router.run()
        found.append([ran.tokens for ran in router.sequences.values()])
        assert worker.engine.device is None or worker.engine.device.num_forwards > 3
    assert found[0] == found[1]
    assert not any("failed" in message for message in caplog.messages)
