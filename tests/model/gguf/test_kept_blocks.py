"""`--weights gguf`: a GGUF's linears stay in its blocks, and the model computes with the file's own numbers."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from doubles.gguf_files import write_gguf
from quantized_testing import check_needs_a_cpu_worker_alone
from space_common.gguf.reader import GgufFile
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.heads import OutputHead
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting, UnsupportedModel
from space_model.precision import choose_weights
from space_model.space_model import SpaceModel
from space_server.config import parse
from space_server.startup.doctor import examine
from space_server.startup.model_need import ModelNeed
from tiny_checkpoints import tiny_checkpoint
from torch import Tensor, nn

IDS = [(7 * i + 1) % 128 for i in range(40)]
K_QUANTS = Path(__file__).with_name("k_quants.gguf")
WORDS = ["--listen", "unix:/nowhere", "--device", "cpu", "--weights", "gguf", "--model"]


def logits_of(model: SpaceModel, ids: list[int]) -> Tensor:
    """[ids, V]"""
    batch = ForwardBatch.build([Segment(ids, 0, [0, 1, 2])], block_size=16, mask_ids=(), device=model.facts.device)
    return model.logits(model.forward(batch, model.allocate_kv(3, 16))[: batch.num_rows])


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "Q4_1"), ("qwen2", "Q8_0"), ("gemma2", "Q5_0"), ("gemma3", "Q8_0"), ("phi3", "Q4_0"), ("k", "Q4_K")],
)
def test_it_computes_with_the_files_numbers(
    family: str, kind: str, attention: str, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    file = K_QUANTS if family == "k" else write_gguf(checkpoint_of(family), tmp_path / "x.gguf", kind)
    wanted = logits_of(load_model(file, dtype="float32"), IDS)  # of the dequantised numbers
    model = load_model(file, weights="gguf", attention=attention)
    assert model.facts.number_format == "bfloat16 with gguf weights"
    found = logits_of(model, IDS)
    assert (found - wanted).abs().max() < 0.03 * wanted.abs().max()
    for length in (1, 2, 13, 39):
        assert torch.equal(logits_of(model, IDS[:length]), found[:length])


def test_linears_and_head_are_held_in_the_bytes_of_their_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tiny_checkpoint(
        tmp_path / "source", vocab_size=1360, num_masks=0, hidden_size=128, num_heads=8, tie_word_embeddings=False
    )
    file = write_gguf(source, tmp_path / "x.gguf", "Q4_0")
    with caplog.at_level(logging.INFO):
        model = load_model(file, weights="gguf")
    assert "16 weights stay as the file has them (Q4_0); the embedding's rows are looked up in it" in caplog.text
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter)]
    assert [
        tuple(one.shape) for one in tensors if one.dtype == torch.bfloat16 and 1360 in one.shape and all(one.stride())
    ] == []
    need = ModelNeed.asked(parse([*WORDS, str(file)]), Checkpoint.open(file))
    plain = ModelNeed.asked(parse([*WORDS, str(file), "--weights", "plain"]), Checkpoint.open(file))
    assert need.head == 1360 * 128 // 32 * 18
    linears = 2 * (2 * 128 * 128 + 2 * 2 * 16 * 128 + 3 * 128 * 256)
    assert plain.weights - need.weights == 2 * 1360 * 128 + linears * 2 - linears // 32 * 18
    assert model.facts.weights == "gguf"


def test_a_type_that_is_not_kept_is_plain(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", "Q5_1")
    with caplog.at_level(logging.INFO):
        found = logits_of(load_model(file, weights="gguf"), IDS)
    assert "0 weights stay as the file has them (none); 15 others are held as plain numbers" in caplog.text
    assert torch.equal(found, logits_of(load_model(file, dtype="bfloat16"), IDS))


def test_what_it_cannot_be_had_with_is_said(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", "Q8_0")
    with pytest.raises(InvalidSetting, match="the checkpoint is none; take --weights int4"):
        load_model(llama, weights="gguf")
    with pytest.raises(InvalidSetting, match="the checkpoint is none; take --weights int4"):
        load_model(write_gguf(llama, tmp_path / "f16.gguf", "F16"), weights="gguf")
    check_needs_a_cpu_worker_alone(file, "gguf")


def test_a_scale_that_is_not_finite_is_named(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", "Q8_0")
    with pytest.raises(UnsupportedModel, match=r"a scale of blk.1.ffn_up.weight \(Q8_0\) is not finite"):
        load_model(_spoilt(file), weights="gguf")


def _spoilt(file: Path) -> Path:
    data = bytearray(file.read_bytes())
    tensor = GgufFile.open(file).tensors["blk.1.ffn_up.weight"]
    data[tensor.offset : tensor.offset + 2] = b"\x00\x7c"
    file.write_bytes(data)
    return file


def test_a_quantised_file_keeps_its_blocks_by_default_on_a_cpu(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", "Q4_1")
    words = ["--listen", "unix:/nowhere", "--device", "cpu", "--model"]
    for weights, held in (("auto", "bfloat16 with gguf weights"), ("plain", load_model(file).facts.number_format)):
        assert load_model(file, weights=weights).facts.number_format == held
        config = parse([*words, str(file), *(["--weights", weights] if weights == "plain" else [])])
        (model,) = [finding.fact for finding in examine(config) if finding.part == "model"]
        assert f"held in {held} (" in model
    assert load_model(llama, weights="auto").facts.weights == "plain"


def test_where_blocks_cannot_be_multiplied_the_default_is_plain() -> None:
    cpu = torch.device("cpu")
    assert choose_weights("auto", "auto", cpu, kept="Q4_1") == "gguf"
    assert choose_weights("auto", "bfloat16", cpu, kept="Q4_1") == "gguf"
    assert choose_weights("auto", "float32", cpu, kept="Q4_1") == "plain"
    assert choose_weights("auto", "auto", torch.device("cuda"), kept="Q4_1") == "plain"
    assert choose_weights("auto", "auto", cpu, kept="Q5_1") == "plain"
    assert choose_weights("auto", "auto", cpu, kept=None) == "plain"
    assert choose_weights("auto", "auto", cpu, kept="Q4_1", num_ranks=2) == "plain"
    assert choose_weights("auto", "auto", cpu, kept="Q4_1", cpu_kernels="torch") == "plain"
    assert choose_weights("int4", "float32", torch.device("cuda"), kept=None) == "int4"  # refused elsewhere


def test_doctor_says_so(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(llama, tmp_path / "x.gguf", "Q4_1")
    (model,) = [finding.fact for finding in examine(parse([*WORDS, str(file)])) if finding.part == "model"]
    assert "held in bfloat16 with gguf weights" in model


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_head_that_is_quantised_in_pieces_has_the_bits_of_one_from_a_whole_copy(weights: str, tmp_path: Path) -> None:
    sizes = {"num_heads": 1, "kv_heads": 1, "head_dim": 64, "hidden_size": 64, "num_layers": 1, "words": True}
    folder = tiny_checkpoint(
        tmp_path / "model", vocab_size=8256, dtype="bfloat16", tie_word_embeddings=True, num_masks=0, **sizes
    )
    file = write_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    head = load_model(file, weights=weights)._head
    table = load_model(file, weights="plain")._head.table
    assert isinstance(head, OutputHead)
    assert table is not None
    whole = OutputHead(table[:], None, weights=weights, keeps_rows=False)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(head.logits(hidden), whole.logits(hidden))
