"""Adapters act on their own mask rows: chain rows keep the base's bits, mask rows are those of the merged weights."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from space_kernels.linear.gated_delta import GatedDelta
from space_kernels.linear.packed_linear import can_pack
from space_model.adapters import GatedLora
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.family import decoder_layers
from space_model.checkpoint.recurrent_layers import WITHOUT_ATTENTION, layer_states
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.heads import BaseSpec
from space_model.loading.load import load_model
from space_model.model_error import CheckpointNotFound, InvalidSetting, InvalidSpaceSection
from space_model.model_facts import AdapterFacts
from space_model.networks.llama_compiled_network import CompiledLlama
from space_model.networks.llama_network import LlamaNetwork
from space_model.networks.network import PagedKV
from space_model.random_checkpoint import FIRST_MASK
from space_model.space_model import SpaceModel
from tiny_checkpoints import FAMILIES, MORE_FAMILIES, tiny_adapter, tiny_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

COMPACT = ["llama", "mistral", "qwen2", "qwen3"]
OTHERS = ["llama", "qwen3", "gemma2", "phi3", "starcoder2", "mixtral"]
NETWORKS = {"compact": COMPACT, "transformers": OTHERS}
BOTH = ["float32", "bfloat16"]
BLOCK = 16


def ids_of(seed: int, length: int) -> list[int]:
    return torch.randint(16, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="session")
def adapters_of(
    tmp_path_factory: pytest.TempPathFactory, checkpoint_of: Callable[[str], Path]
) -> Callable[[str], Mapping[str, Path]]:
    """Two adapters for a family: `wide` on every linear, three masks; `narrow` on few, five masks and no draft head."""
    made: dict[str, Mapping[str, Path]] = {}

    def make(family: str) -> Mapping[str, Path]:
        if family not in made:
            base, folder = checkpoint_of(family), tmp_path_factory.mktemp(f"adapters-{family}")
            few = ("q_proj", "up_proj", "qkv_proj", "c_fc")
            made[family] = {
                "wide": tiny_adapter(folder / "wide", base, num_masks=3, rank=3, seed=1),
                "narrow": tiny_adapter(folder / "narrow", base, seed=2, linears=few, draft_head=False),
            }
        return made[family]

    return make


LAYOUT = DraftLayout(2, (3, 1, 2))
SEEN = 21  # ids of the first sequence computed before the step


def step(
    model: SpaceModel, first: int | None, others: tuple[int | None, ...] = (None, None)
) -> tuple[ForwardBatch, Tensor]:
    """A step of three sequences by these adapters: one with drafts and masks, one with masks, one that prefills too."""
    kv = model.allocate_kv(16, BLOCK)
    num_masks = [adapter.num_masks for adapter in model.facts.adapters]

    def run(*segments: Segment) -> tuple[ForwardBatch, Tensor]:
        batch = ForwardBatch.build(segments, block_size=BLOCK, mask_ids=model.facts.mask_ids, adapter_masks=num_masks)
        return batch, model.forward(batch, kv)

    ids = ids_of(0, 24)
    run(Segment(ids[:SEEN], 0, [0, 1]), Segment(ids_of(1, 9)[:8], 0, [2], state=1))
    beside = DraftLayout.full(0, 3)
    return run(
        Segment(ids[SEEN:], SEEN, [0, 1], LAYOUT, first),
        Segment(ids_of(1, 9)[8:], 8, [2], beside, others[0], state=1),
        Segment(ids_of(2, 6), 0, [3], beside, others[1], state=2),
    )


def chains(batch: ForwardBatch, hidden: Tensor) -> Tensor:
    return hidden[: batch.num_chain_rows]


def masks(batch: ForwardBatch, hidden: Tensor, segment: int) -> Tensor:
    return hidden[[row for group in batch.mask_rows[segment] for row in group]]


@pytest.mark.parametrize(
    ("network", "family", "dtype"),
    [
        *((network, name, dtype) for network, known in NETWORKS.items() for name, dtype in product(known, BOTH)),
        *(("compiled", name, "bfloat16") for name in COMPACT),
    ],
)
def test_chain_rows_have_the_base_s_bits_and_mask_rows_their_own_in_any_company(
    family: str,
    network: str,
    dtype: str,
    checkpoint_of: Callable[[str], Path],
    adapters_of: Callable[[str], Mapping[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if network == "transformers":
        monkeypatch.setattr(LlamaNetwork, "fits", lambda config, dtype: False)
        monkeypatch.setattr(CompiledLlama, "fits", lambda base, dtype, head_dim: False)
    if network == "compact" and not can_pack(getattr(torch, dtype)):
        pytest.skip(f"this processor packs no {dtype}: only the compiled network and the transformers one take it")
    attention = "torch" if network == "compact" else "auto"
    bare = load_model(checkpoint_of(family), dtype=dtype, attention=attention)
    model = load_model(checkpoint_of(family), dtype=dtype, attention=attention, adapters=adapters_of(family))
    assert isinstance(model._network, LlamaNetwork) == (network == "compact")
    assert isinstance(model._network, CompiledLlama) == (network == "compiled")

    plain_batch, plain = step(bare, None)
    own = masks(plain_batch, plain, 0)
    alone = {adapter: masks(*step(model, adapter), 0) for adapter in (None, 0, 1)}
    for first, others in [
        (None, (None, None)),
        (0, (1, None)),
        (1, (0, 0)),
        (0, (None, 1)),
        (None, (0, 1)),
        (1, (1, 1)),
    ]:
        batch, hidden = step(model, first, others)
        assert torch.equal(chains(batch, hidden), chains(plain_batch, plain)), (first, others)
        assert torch.equal(model.logits(chains(batch, hidden)), bare.logits(chains(plain_batch, plain)))
        assert torch.equal(masks(batch, hidden, 0), alone[first]), (first, others)
    assert torch.equal(alone[None], own)
    assert not torch.allclose(alone[0], own, atol=0.1)
    assert not torch.allclose(alone[0], alone[1], atol=0.1)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_threads_change_no_bit_of_a_gated_row(
    family: str,
    num_threads: int,
    checkpoint_of: Callable[[str], Path],
    adapters_of: Callable[[str], Mapping[str, Path]],
) -> None:
    model = load_model(checkpoint_of(family), dtype="float32", num_threads=num_threads, adapters=adapters_of(family))
    wanted = masks(*step(model, 0, (None, None)), 0)
    for others in [(0, 0), (0, 1), (1, 1)]:
        assert torch.equal(masks(*step(model, 0, others), 0), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 3, 32])
def test_a_delta_gives_a_row_the_same_bits_whatever_the_others(rank: int, dtype: torch.dtype, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(rank)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    delta = GatedDelta(
        [(normal(rank, 64), normal(24, rank)), None, (normal(rank, 64), normal(40, rank))], [24, 8, 40], 2
    )
    x = normal(70, 64)
    whole = delta(x)
    for start in (0, 5):
        for count in (*range(1, 10), 31, 33, 64):
            assert torch.equal(delta(x[start : start + count]), whole[start : start + count]), (start, count)


def test_deltas_side_by_side_are_those_of_each_linear() -> None:
    generator = torch.Generator().manual_seed(0)
    a1, b1, a2, b2, x = (torch.randn(*s, generator=generator) for s in ((2, 8), (6, 2), (3, 8), (4, 3), (5, 8)))
    y = torch.zeros(5, 15)
    GatedDelta([(a1, b1), None, (a2, b2)], [6, 5, 4], scale=0.5).add_to(y, x, slice(1, 4))
    torch.testing.assert_close(y[1:4, :6], 0.5 * x[1:4] @ a1.T @ b1.T)
    torch.testing.assert_close(y[1:4, 11:], 0.5 * x[1:4] @ a2.T @ b2.T)
    assert not y[:, 6:11].any()
    assert not y[[0, 4]].any()
    a, b = torch.empty(3, 8, device="meta"), torch.empty(6, 3, device="meta")
    delta = GatedDelta([(a, b)], [6], scale=2.0)(torch.empty(5, 8, device="meta"))
    assert (delta.shape, delta.device.type) == ((5, 6), "meta")


def plain(path: Path) -> nn.Module:
    """The transformers model; eager attention, which alone knows soft caps in every version."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def merged(path: Path, adapter: GatedLora) -> nn.Module:
    """The transformers model with the adapter in its weights, everywhere; its masks alone enter the first layer, or are
    the embeddings of which the layers' versions of a row are made."""
    model = plain(path)
    for name, (a, b) in adapter.pairs.items():
        model.get_submodule(name).weight.data += adapter.scale * b @ a

    model.first_mask = 0  # of a pass

    def embedded(count: int) -> Tensor:
        return adapter.mask_embeddings[None, model.first_mask : model.first_mask + count]

    def enter(layer: nn.Module, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (embedded(rows[0].shape[1]), *rows[1:])

    if hasattr(model.config, "altup_num_inputs"):
        model.get_input_embeddings().register_forward_hook(lambda layer, ids, rows: embedded(rows.shape[1]))
    else:
        decoder_layers(model.base_model)[1][0].register_forward_pre_hook(enter)
    return model


# In one row behind a cache transformers' Bamba and Mamba-2 differ from themselves without one: they tell nothing here.
@pytest.mark.parametrize("family", [one for one in (*FAMILIES, *MORE_FAMILIES) if one not in ("bamba", "mamba2")])
@torch.inference_mode()
def test_mask_rows_are_those_of_merged_weights_behind_the_base_s_keys_and_values(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "base", family)
    folder = tiny_adapter(tmp_path / "adapter", path, num_masks=3)
    model = load_model(path, dtype="float32", adapters={"one": folder})
    batch, hidden = step(model, 0, (None, 0))
    adapter = GatedLora.load(folder / "gated_lora.safetensors", BaseSpec(64, torch.float32))
    base, dense = plain(path), merged(path, adapter)
    ids = ids_of(0, 24)
    # transformers' Mamba forgets its state before a pass over several rows.
    begins_anew = any(state is not None and state.begins_anew for state in layer_states(base.config))
    cache = "cache_params" if base.config.model_type in WITHOUT_ATTENTION else "past_key_values"
    for g, rows in enumerate(batch.mask_rows[0]):
        prefix = torch.tensor([ids[: SEEN + 1 + g]])
        past = base(prefix, use_cache=True)[cache]
        wanted = []
        for dense.first_mask in range(0, len(rows), 1 if begins_anew else len(rows)):
            masks = torch.zeros(1, 1 if begins_anew else len(rows), dtype=torch.int64)
            wanted.append(dense(masks, use_cache=True, **{cache: past}).logits[0])
        torch.testing.assert_close(model.logits(hidden[list(rows)]), torch.cat(wanted), atol=5e-4, rtol=0)


def test_a_checkpoint_that_names_an_adapter_is_served_as_it_is_and_bans_no_id(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "gated", adapter_rank=4, num_masks=4)
    model = load_model(path, dtype="float32")
    facts = model.facts
    assert (facts.mask_ids, facts.num_masks, facts.most_masks, facts.has_draft_head) == ((), 4, 4, True)
    assert facts.adapters == (AdapterFacts("", 4, True),)
    assert facts.adapter_number("") == 0
    assert model.draft_head_of(0) is model.drafting.draft_head
    plain = load_model(tiny_checkpoint(tmp_path / "plain", num_masks=0), dtype="float32")
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.logits(x), plain.logits(x))
    batch, hidden = step(model, 0, (0, 0))
    plain_batch, wanted = step_without_masks(plain)
    assert torch.equal(chains(batch, hidden), chains(plain_batch, wanted))


def step_without_masks(model: SpaceModel) -> tuple[ForwardBatch, Tensor]:
    kv: PagedKV = model.allocate_kv(16, BLOCK)
    ids = ids_of(0, 24)
    batch = ForwardBatch.build(
        [Segment(ids[:SEEN], 0, [0, 1]), Segment(ids_of(1, 9)[:8], 0, [2])], block_size=BLOCK, mask_ids=()
    )
    model.forward(batch, kv)
    segments = [Segment(ids[SEEN:], SEEN, [0, 1]), Segment(ids_of(1, 9)[8:], 8, [2]), Segment(ids_of(2, 6), 0, [3])]
    batch = ForwardBatch.build(segments, block_size=BLOCK, mask_ids=())
    return batch, model.forward(batch, kv)


def test_mask_ids_stay_banned_beside_adapters(llama: Path, adapters_of: Callable[[str], Mapping[str, Path]]) -> None:
    facts = load_model(llama, adapters=adapters_of("llama")).facts
    assert (facts.mask_ids[0], facts.num_masks, facts.most_masks) == (FIRST_MASK, 5, 5)
    assert [adapter.name for adapter in facts.adapters] == ["wide", "narrow"]
    assert (facts.adapter_number(""), facts.adapter_number("narrow")) == (None, 1)
    with pytest.raises(KeyError):
        facts.adapter_number("absent")


def test_a_folder_without_weights_takes_everything_from_its_base(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", eos_token_id=9)
    whole = load_model(base, dtype="float32")
    for where in (str(base), "../base"):
        folder = tiny_adapter(tmp_path / "adapter", base)
        change(folder, base=where)
        model = load_model(folder, dtype="float32")
        assert (model.facts.name, model.facts.eos_ids) == (str(folder), whole.facts.eos_ids)
        assert (model.facts.model_hash, model.facts.tokenizer_hash) == (
            whole.facts.model_hash,
            whole.facts.tokenizer_hash,
        )
        assert (model.facts.mask_ids, model.facts.num_masks, model.facts.has_draft_head) == ((), 5, True)


def change(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["space"] = {key: value for key, value in (config["space"] | fields).items() if value is not None}
    file.write_text(json.dumps(config))


def test_an_adapter_in_the_hubs_cache_is_served_though_its_files_are_links(llama: Path, tmp_path: Path) -> None:
    folder = tiny_adapter(tmp_path / "adapter", llama)
    change(folder, base=str(llama))
    snapshot, blobs = (tmp_path / "models--owner--name" / part for part in ("snapshots/abc", "blobs"))
    for made in (snapshot, blobs):
        made.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs", str(number)))
    facts = load_model(snapshot).facts
    assert (facts.num_masks, facts.has_draft_head) == (5, True)


@pytest.mark.parametrize("link", ["gated_lora.safetensors", "draft_head.safetensors"])
def test_an_adapter_that_is_a_link_out_of_its_folder_is_refused(link: str, llama: Path, tmp_path: Path) -> None:
    folder = tiny_adapter(tmp_path / "adapter", llama)
    (folder / link).rename(tmp_path / link)
    (folder / link).symlink_to(tmp_path / link)
    with pytest.raises(InvalidSpaceSection, match=f"{link} is not in"):
        load_model(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base": "/absent"}, "has no weights of its own, and its base cannot be had: There is no folder /absent"),
        ({"base": 7}, "must be a path or a hub id; got 7"),
        ({"base": "."}, "nested"),
        ({"adapter": "../base/gated_lora.safetensors"}, "is not in"),
        ({"adapter": "absent.safetensors"}, "There is no adapter file"),
        ({"adapter": 3}, "must name a file; got 3"),
        ({"num_masks": 6}, "embeddings for 5 masks; 6 are asked for"),
        ({"num_masks": True}, "num_masks must be 0 or more"),
    ],
)
def test_unfit_adapter_folders_are_refused(
    fields: dict[str, object], message: str, llama: Path, tmp_path: Path
) -> None:
    folder = tiny_adapter(tmp_path / "adapter", llama)
    if message == "nested":
        outer = tiny_adapter(tmp_path / "outer", llama)
        change(outer, base=str(folder))
        folder, fields, message = outer, {}, "which has a base itself; name that one"
    change(folder, **fields)
    with pytest.raises((CheckpointNotFound, InvalidSpaceSection), match=message):
        load_model(folder)


def test_errors_of_a_named_adapter_say_which(llama: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", hidden_size=32)
    with pytest.raises(InvalidSpaceSection, match=r"Adapter one: .* must be \[masks, 64\]"):
        load_model(llama, adapters={"one": tiny_adapter(tmp_path / "adapter", other)})
    with pytest.raises(InvalidSpaceSection, match=r"Adapter one: .* declares no .adapter."):
        load_model(llama, adapters={"one": llama})
    with pytest.raises(InvalidSetting, match="needs a name"):
        load_model(llama, adapters={"": tmp_path})
    deep = tiny_checkpoint(tmp_path / "deep", num_layers=3)
    with pytest.raises(InvalidSpaceSection, match=r"adapts model\.layers\.2"):
        load_model(llama, adapters={"one": tiny_adapter(tmp_path / "deeper", deep)})


def test_an_adapter_that_names_its_base_is_refused_on_another(llama: Path, tmp_path: Path) -> None:
    base, folder = llama, tiny_adapter(tmp_path / "adapter", llama)
    own = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    change(folder, base_sha256=own)
    assert load_model(folder).facts.num_masks == 5
    assert load_model(base, adapters={"one": folder}).facts.adapters[0].num_masks == 5
    other = tiny_checkpoint(tmp_path / "other", seed=99)
    its = hashlib.sha256((other / "model.safetensors").read_bytes()).hexdigest()
    assert its != own
    both = f"made for weights with the sha256 {own}; those of {re.escape(str(other))} have {its}"
    with pytest.raises(InvalidSpaceSection, match=f"Adapter one: .*{both}"):
        load_model(other, adapters={"one": folder})
    change(folder, base=str(other))
    with pytest.raises(InvalidSpaceSection, match=own):
        load_model(folder)
    change(folder, base_sha256="abc")
    with pytest.raises(InvalidSpaceSection, match="must be 64 hexadecimal digits; got 'abc'"):
        load_model(folder)


def test_weights_in_several_files_have_one_hash_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    digests = "".join(hashlib.sha256(part).hexdigest() for part in (b"a", b"b"))
    checkpoint = Checkpoint("two", tmp_path, {}, (tmp_path / "a", tmp_path / "b"), tmp_path)
    assert checkpoint.weights_sha256() == hashlib.sha256(digests.encode()).hexdigest()


def test_mask_ids_and_an_adapter_exclude_each_other(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, adapter_rank=2)
    with pytest.raises(InvalidSpaceSection, match="have no ids"):
        load_model(path, mask_ids=[4])
    assert load_model(path, num_masks=2).facts.num_masks == 2
    assert load_model(path, num_masks=0).facts.adapters == ()


def test_peft_folders_are_served(llama: Path, tmp_path: Path) -> None:
    ours = tiny_adapter(tmp_path / "ours", llama, draft_head=False)
    gated = GatedLora.load(ours / "gated_lora.safetensors", BaseSpec(64, torch.float32))
    gated.save_peft(tmp_path / "peft", base="base")
    shutil.copytree(ours, tmp_path / "beside")
    gated.save_peft(tmp_path / "beside" / "lora", base="base")
    change(tmp_path / "beside", adapter="lora")
    folders = {"ours": ours, "peft": tmp_path / "peft", "beside": tmp_path / "beside"}
    model = load_model(llama, dtype="float32", adapters=folders)
    wanted = masks(*step(model, 0), 0)
    assert torch.equal(masks(*step(model, 1), 0), wanted)
    assert torch.equal(masks(*step(model, 2), 0), wanted)


Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapter() -> GatedLora:
    pairs = {Q: (normal(1, 3, 64), normal(2, 64, 3)), DOWN: (normal(3, 3, 128), normal(4, 64, 3))}
    return GatedLora(normal(5, 4, 64), pairs, scale=0.5)


def read(path: Path, num_masks: int | None = None) -> GatedLora:
    return GatedLora.load(path, BaseSpec(64, torch.float32), num_masks)


def same(one: GatedLora, other: GatedLora) -> bool:
    halves = [torch.equal(x, y) for n in one.pairs for x, y in zip(one.pairs[n], other.pairs[n], strict=True)]
    embeddings = torch.equal(one.mask_embeddings, other.mask_embeddings)
    return one.pairs.keys() == other.pairs.keys() and one.scale == other.scale and embeddings and all(halves)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    adapter().save(tmp_path / "one.safetensors")
    adapter().save_peft(tmp_path / "peft", base="tiny")
    assert same(read(tmp_path / "one.safetensors"), adapter())
    assert same(read(tmp_path / "peft"), adapter())


def test_eight_bits_are_within_half_a_step_of_each_row_and_need_half_of_bfloat16_s_bytes(tmp_path: Path) -> None:
    wide = {Q: (normal(1, 32, 576), normal(2, 576, 32).mul_(torch.linspace(0, 3, 576)[:, None]))}
    given, file = GatedLora(normal(5, 4, 64), wide, scale=0.5), tmp_path / "one.safetensors"
    given.save(file, int8=True)
    found = read(file)
    assert (found.scale, torch.equal(found.mask_embeddings, given.mask_embeddings)) == (0.5, True)
    for before, after in zip(given.pairs[Q], found.pairs[Q], strict=True):
        assert bool(((before - after).abs() <= before.abs().amax(1, keepdim=True) / 253).all())
        assert not torch.equal(before, after)
    assert not found.pairs[Q][1][0].any()  # a row of zeros
    bf16 = 2 * sum(part.numel() for part in wide[Q])
    assert file.stat().st_size < 0.6 * bf16 + given.mask_embeddings.nbytes + 1000
    found.save(tmp_path / "again.safetensors", int8=True)
    assert same(read(tmp_path / "again.safetensors"), found)


def test_an_adapter_in_eight_bits_is_served_like_the_dequantised_one(llama: Path, tmp_path: Path) -> None:
    folder = tiny_adapter(tmp_path / "int8", llama, draft_head=False)
    file = folder / "gated_lora.safetensors"
    before = masks(*step(load_model(llama, dtype="float32", adapters={"one": folder}), 0), 0)
    read(file).save(file, int8=True)
    shutil.copytree(folder, tmp_path / "whole")
    read(file).save(tmp_path / "whole" / file.name)
    model = load_model(llama, dtype="float32", adapters={"int8": folder, "whole": tmp_path / "whole"})
    found = masks(*step(model, 0), 0)
    assert torch.equal(found, masks(*step(model, 1), 0))
    torch.testing.assert_close(found, before, atol=0.1, rtol=0)
    assert not torch.equal(found, before)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda tensors: tensors.pop(f"gated_lora.{Q}.b.scale"), rf"{Q}.b in .* with scales of shape None"),
        (lambda tensors: tensors.update({f"gated_lora.{Q}.a.scale": torch.ones(2)}), r"scales of shape \(2,\)"),
        (lambda tensors: tensors.update({f"gated_lora.{Q}.a": torch.ones(3, 64)}), "is torch.float32 of shape"),
        (lambda tensors: tensors.update({"x.scale": torch.ones(3)}), "has x.scale, the scales of no tensor"),
        (lambda tensors: tensors[f"gated_lora.{Q}.b.scale"].fill_(torch.inf), "values that are not finite"),
    ],
)
def test_eight_bit_files_that_do_not_fit_are_refused_by_name(
    act: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "one.safetensors"
    adapter().save(file, int8=True)
    with safe_open(file, framework="pt") as found:
        metadata = found.metadata()
    tensors = load_file(file)
    act(tensors)
    save_file(tensors, file, metadata)
    with pytest.raises(InvalidSpaceSection, match=message):
        read(file)


def test_the_file_has_the_names_and_the_header_of_its_format(tmp_path: Path) -> None:
    adapter().save(tmp_path / "one.safetensors")
    with safe_open(tmp_path / "one.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "space-gated-lora-1", "rank": "3", "alpha": "1.5", "num_masks": "4"}
        shapes = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
    assert shapes == {
        f"gated_lora.{Q}.a": (3, 64),
        f"gated_lora.{Q}.b": (64, 3),
        f"gated_lora.{DOWN}.a": (3, 128),
        f"gated_lora.{DOWN}.b": (64, 3),
        "gated_lora.mask_embeddings": (4, 64),
    }


def test_fewer_masks_are_the_leading_ones_and_embeddings_alone_are_an_adapter(tmp_path: Path) -> None:
    adapter().save(tmp_path / "one.safetensors")
    assert torch.equal(read(tmp_path / "one.safetensors", 2).mask_embeddings, adapter().mask_embeddings[:2])
    with pytest.raises(InvalidSpaceSection, match="embeddings for 4 masks; 5 are asked for"):
        read(tmp_path / "one.safetensors", 5)
    bare = replace(adapter(), pairs={})
    bare.save(tmp_path / "one.safetensors")
    assert same(read(tmp_path / "one.safetensors"), bare)


def spoil_header(file: Path, name: str, value: str) -> None:
    with safe_open(file, framework="pt") as found:
        metadata = found.metadata() | {name: value}
    save_file(load_file(file), file, metadata=metadata)


def spoil(name: str, change: Callable[[Tensor], Tensor | None], rename: str | None = None) -> Callable[[Path], None]:
    def act(file: Path) -> None:
        with safe_open(file, framework="pt") as found:
            metadata = found.metadata()
        tensors = load_file(file)
        changed = change(tensors.pop(name))
        save_file(tensors | ({} if changed is None else {rename or name: changed.contiguous()}), file, metadata)

    return act


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda file: spoil_header(file, "format", "lora-9"), "format 'lora-9' in its header; space-gated-lora-1"),
        (lambda file: spoil_header(file, "rank", "three"), "needs numbers rank, alpha and num_masks"),
        (lambda file: spoil_header(file, "rank", "0"), "says rank 0"),
        (lambda file: spoil_header(file, "alpha", "nan"), "alpha nan"),
        (lambda file: spoil_header(file, "rank", "4"), r"q_proj.a in .* has shape \(3, 64\); its header says rank 4"),
        (lambda file: spoil_header(file, "num_masks", "9"), "has 4 rows; its header says 9"),
        (spoil("gated_lora.mask_embeddings", lambda t: None), "mask_embeddings of .* is not there"),
        (spoil("gated_lora.mask_embeddings", lambda t: t[:, :9]), r"has shape \(4, 9\); it must be \[masks, 64\]"),
        (spoil(f"gated_lora.{Q}.a", lambda t: None), rf"has gated_lora.{Q}.b and lacks gated_lora.{Q}.a"),
        (spoil(f"gated_lora.{Q}.b", lambda t: t[:, :2]), r"shapes \(3, 64\) and \(64, 2\)"),
        (spoil(f"gated_lora.{Q}.b", lambda t: t * torch.nan), "q_proj in .* has values that are not finite"),
        (spoil(f"gated_lora.{Q}.b", lambda t: t, "lora.q.b"), "has a tensor lora.q.b, which is no part"),
        (lambda file: file.write_bytes(b"pickle"), "is no safetensors file"),
        (Path.unlink, "There is no adapter file"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(act: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    adapter().save(file)
    act(file)
    with pytest.raises(InvalidSpaceSection, match=message):
        read(file)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora = True, which is not served"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"r": None}, "no config of a LoRA with r and lora_alpha"),
    ],
)
def test_unfit_peft_folders_are_refused(fields: dict[str, object], message: str, tmp_path: Path) -> None:
    adapter().save_peft(tmp_path, base="tiny")
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(InvalidSpaceSection, match=message):
        read(tmp_path)


def test_rank_stabilised_scaling_is_kept(tmp_path: Path) -> None:
    adapter().save_peft(tmp_path, base="tiny")
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
    assert read(tmp_path).scale == 1.5 / 3**0.5


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("model.layers.2.self_attn.q_proj", "adapts model.layers.2.self_attn.q_proj, which is no linear of"),
        ("model.layers.0.input_layernorm", "no linear of the model's model.layers"),
        ("lm_head", "adapts lm_head, which is no linear of"),
        (DOWN, r"down_proj makes \[64, 64\]; the model's weight is \[64, 128\]"),
    ],
)
def test_pairs_that_fit_no_linear_of_the_model_are_refused(path: str, message: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path))
    adapter().check(model, "model.layers")
    with pytest.raises(InvalidSpaceSection, match=message):
        replace(adapter(), pairs={path: adapter().pairs[Q]}).check(model, "model.layers")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own
def test_peft_reads_what_is_saved_for_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path / "base"))
    before = {path: model.get_submodule(path).weight.detach().clone() for path in (Q, DOWN)}
    adapter().save_peft(tmp_path / "peft", base=str(tmp_path / "base"))
    merged = peft.PeftModel.from_pretrained(model, str(tmp_path / "peft")).merge_and_unload()
    for path, (a, b) in adapter().pairs.items():
        torch.testing.assert_close(merged.get_submodule(path).weight, before[path] + 0.5 * b @ a)
