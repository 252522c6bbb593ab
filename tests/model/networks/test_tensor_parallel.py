"""A model in parts says what the whole model says: sums are reordered, and nothing else is different."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_testing import write_quantized
from safetensors.torch import load_file, save_file
from space_model.checkpoint.weight_files import Checkpoint, WeightFiles
from space_model.geometry.draft_layout import DraftLayout
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting, ModelError, UnsupportedModel
from space_model.networks.llama_network import LlamaNetwork
from space_model.networks.tensor_parallel import Share, check_ranks
from space_model.networks.transformers_network import TransformersNetwork
from space_model.space_model import SpaceModel
from tiny_checkpoints import released_adapter, tiny_adapter, tiny_checkpoint
from torch import Tensor


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.all_here = threading.Barrier(size)


class ThreadRank:
    """One of them."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self.rank, self.size, self._threads = rank, threads.size, threads

    def _exchange(self, x: Tensor) -> list[Tensor]:
        threads = self._threads
        threads.parts[self.rank] = x.clone()
        threads.all_here.wait(30)
        parts = list(threads.parts)
        threads.all_here.wait(30)
        return parts

    def sum(self, x: Tensor) -> Tensor:
        parts = self._exchange(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = self._exchange(x)
        return parts if self.rank == 0 else []


Said = tuple[Tensor, Tensor]  # hidden rows and logits


def say(model: SpaceModel, ids: list[int], adapter: int | None = None) -> Said:
    """A prompt, two drafts and their masks, one after the other in two steps on the same pages."""
    facts, kv = model.facts, model.allocate_kv(4, 16)
    hidden = []
    for start, part, layout in ((0, ids[:30], DraftLayout.plain()), (30, ids[30:], DraftLayout.full(2, 3))):
        batch = ForwardBatch.build(
            [Segment(part, start, range(4), layout, adapter)],
            block_size=16,
            mask_ids=facts.mask_ids,
            adapter_masks=[one.num_masks for one in facts.adapters],
        )
        hidden.append(model.forward(batch, kv)[: batch.num_rows])
    rows = torch.cat(hidden)
    return rows, model.logits(rows)


def said_in_parts(path: Path, size: int, adapter: int | None = None, **settings: Any) -> tuple[Said, list[SpaceModel]]:
    """What rank 0 of `size` says, and all ranks' models. The hidden rows are the same on all of them, bitwise."""
    threads = Threads(size)
    models = [load_model(path, ranks=ThreadRank(threads, rank), **settings) for rank in range(size)]
    said: list[Said] = [(torch.empty(0), torch.empty(0))] * size

    def run(rank: int) -> None:
        said[rank] = say(models[rank], IDS, adapter)

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert all(torch.equal(said[0][0], hidden) for hidden, _ in said)
    return said[0], models


IDS = torch.randint(16, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def assert_the_same(found: Said, wanted: Said) -> None:
    assert found[1].shape == wanted[1].shape
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
def test_two_ranks_say_what_one_says(family: str, checkpoint_of: Callable[[str], Path]) -> None:
    path = checkpoint_of(family)
    said, models = said_in_parts(path, 2, dtype="float32")
    assert_the_same(said, say(load_model(path, dtype="float32"), IDS))
    assert all(isinstance(model._network, LlamaNetwork) for model in models)
    assert [model.facts.kv_heads for model in models] == [1, 1]
    assert models[1].allocate_kv(3, 16).keys[0].shape == (3, 1, 16, 16)
    assert models[0].facts.kv_bytes_per_token == 2 * 2 * 1 * 16 * 4


def test_two_ranks_keep_keys_and_values_of_eight_bits(llama: Path) -> None:
    path = llama
    (_, logits), models = said_in_parts(path, 2, dtype="float32", kv_dtype="fp8")
    _, wanted = say(load_model(path, dtype="float32", kv_dtype="fp8"), IDS)
    assert [model.facts.kv_bytes_per_token for model in models] == [2 * 2 * 1 * 16] * 2
    # sums are reordered, and a key within rounding of the middle between two numbers may become either
    assert (logits - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_the_embedded_model_in_two_parts_says_what_it_says_whole() -> None:
    (_, logits), _ = said_in_parts(Path("demo"), 2, dtype="float32")
    _, wanted = say(load_model("demo", dtype="float32"), IDS)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


def test_a_quantised_checkpoint_in_two_parts(llama: Path, tmp_path: Path) -> None:
    write_quantized(llama, tmp_path / "packed", tmp_path / "plain", "awq")
    said, _ = said_in_parts(tmp_path / "packed", 2, dtype="float32")
    assert_the_same(said, say(load_model(tmp_path / "plain", dtype="float32"), IDS))


def test_four_ranks_with_biases_an_untied_head_and_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    path = tiny_checkpoint(
        tmp_path,
        vocab_size=300,
        num_heads=8,
        kv_heads=4,
        head_dim=8,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    )
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in tensors:
        if name.endswith("bias"):  # of zeros, as they are made, nothing would be seen
            tensors[name] = torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    whole = load_model(path, dtype="float32")
    said, models = said_in_parts(path, 4, dtype="float32")
    wanted = say(whole, IDS)
    assert said[1].shape[1] == 300
    assert_the_same(said, wanted)
    ids = torch.tensor([[1, 299]] * len(said[0]))
    torch.testing.assert_close(models[0].logits_of(wanted[0], ids), whole.logits_of(wanted[0], ids))
    with pytest.raises(RuntimeError, match="does not have the whole head"):
        models[1].logits_of(wanted[0], ids)


def test_transformers_network_in_parts(checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint_of("qwen3")
    whole = load_model(path, dtype="float32")
    monkeypatch.setattr(LlamaNetwork, "fits", lambda config, dtype: False)
    said, models = said_in_parts(path, 2, dtype="float32")
    assert all(isinstance(model._network, TransformersNetwork) for model in models)
    assert_the_same(said, say(whole, IDS))


@pytest.mark.parametrize("compact", [True, False])
def test_a_gated_adapter_is_cut_as_the_linears_it_adds_to(
    compact: bool, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = llama
    adapters = {"code": tiny_adapter(tmp_path, path)}
    wanted = say(load_model(path, dtype="float32", adapters=adapters), IDS, adapter=0)
    if not compact:
        monkeypatch.setattr(LlamaNetwork, "fits", lambda config, dtype: False)
    said, _ = said_in_parts(path, 2, adapter=0, dtype="float32", adapters=adapters)
    assert_the_same(said, wanted)


def test_a_released_adapter_is_cut_as_the_linears_it_adds_to(llama: Path, tmp_path: Path) -> None:
    adapters = {"code": f"uno:{released_adapter(tmp_path, llama, rank=8)}"}
    wanted = say(load_model(llama, dtype="float32", adapters=adapters), IDS, adapter=0)
    said, _ = said_in_parts(llama, 2, adapter=0, dtype="float32", adapters=adapters)
    assert_the_same(said, wanted)


def test_bfloat16_parts_differ_by_rounding_alone(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, dtype="bfloat16")
    (_, logits), _ = said_in_parts(path, 2, dtype="bfloat16")
    _, wanted = say(load_model(path, dtype="bfloat16"), IDS)
    exact = say(load_model(path, dtype="float32"), IDS)[1]
    assert float((logits - exact).abs().mean()) < 1.5 * float((wanted - exact).abs().mean())


def test_a_rank_reads_its_part_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(tmp_path, tie_word_embeddings=False, num_layers=1, draft_head=False)
    read: list[tuple[str, int]] = []
    for name in ("whole", "rows", "columns"):
        original = getattr(WeightFiles, name)

        def note(files: WeightFiles, tensor: str, *part: slice, original: Callable[..., Tensor] = original) -> Tensor:
            found: Tensor = original(files, tensor, *part)
            read.append((tensor.rpartition(".weight")[0].rpartition(".")[2], found.numel()))
            return found

        monkeypatch.setattr(WeightFiles, name, note)
    load_model(path, ranks=ThreadRank(Threads(2), 1), dtype="float32")
    hidden, inner, kv = 64, 128, 32
    assert dict(read) == {
        "embed_tokens": 128 * hidden,
        "q_proj": hidden * hidden // 2,
        "k_proj": kv * hidden // 2,
        "v_proj": kv * hidden // 2,
        "o_proj": hidden * hidden // 2,
        "gate_proj": hidden * inner // 2,
        "up_proj": hidden * inner // 2,
        "down_proj": hidden * inner // 2,
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "norm": hidden,
        "lm_head": 128 * hidden // 2,
    }


@pytest.mark.parametrize(
    ("family", "size", "error", "message"),
    [
        ("llama", 3, InvalidSetting, "3 ranks cannot share 4 heads evenly; .* --tensor-parallel can be 1 or 2"),
        ("llama", 4, InvalidSetting, "4 ranks cannot share 2 key-value heads evenly; .* can be 1 or 2"),
        ("gemma2", 2, UnsupportedModel, "'gemma2' are not shared among ranks; those of llama, .* --tensor-parallel 1"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_cure(
    family: str, size: int, error: type[ModelError], message: str, checkpoint_of: Callable[[str], Path]
) -> None:
    with pytest.raises(error, match=message):
        check_ranks(str(checkpoint_of(family)), size)


def test_a_weight_that_is_not_there_is_named(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lack .*layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path, ranks=ThreadRank(Threads(2), 0))


@pytest.mark.parametrize("vocab_size", [1, 64, 128, 129, 1000, 32000])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_id_is_one_ranks_and_the_parts_are_as_wide(vocab_size: int, size: int) -> None:
    shares = [Share(rank, size) for rank in range(size)]
    ids = [id_ for share in shares for id_ in range(vocab_size)[share.of_vocabulary(vocab_size)]]
    assert ids == list(range(vocab_size))
    width = shares[0].vocabulary_width(vocab_size)
    assert width * size >= vocab_size
    for share in shares[:-1]:
        part = range(vocab_size)[share.of_vocabulary(vocab_size)]
        assert len(part) == width or part.stop == vocab_size


def test_the_files_are_open_as_long_as_the_block_lasts(llama: Path) -> None:
    with WeightFiles.open(Checkpoint.open(llama)) as files:
        name = "model.layers.0.mlp.up_proj.weight"
        whole = files.whole(name)
        assert (name in files, "absent" in files, files.shape(name)) == (True, False, (128, 64))
        assert torch.equal(files.rows(name, slice(8, 10)), whole[8:10])
        assert torch.equal(files.columns(name, slice(8, 10)), whole[:, 8:10])
        assert files.num_bytes == whole.nbytes + 2 * 64 * 4 + 128 * 2 * 4
