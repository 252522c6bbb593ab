"""What a checkpoint is read as, and why others are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_sweep import EQUAL, sweep
from safetensors.torch import load_file, save_file
from space_kernels.build.cpu_library import SWITCH, cpu_library, own_kinds
from space_kernels.step.draft_head import DraftHeadForm
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.family import read_config
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.loading.load import load_model
from space_model.model_error import (
    CheckpointNotFound,
    InvalidSetting,
    InvalidSpaceSection,
    ModelError,
    UnsupportedModel,
)
from space_model.precision import choose_dtype, refuse_tf32
from space_model.random_checkpoint import FIRST_MASK
from tiny_checkpoints import tiny_checkpoint
from tokenizers import Tokenizer
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM


def test_facts_say_what_the_checkpoint_is(llama: Path) -> None:
    path = llama
    model = load_model(path, dtype="float32")
    facts = model.facts
    assert (facts.name, facts.vocab_size, facts.hidden_size, facts.num_layers, facts.window) == (
        str(path),
        128,
        64,
        2,
        512,
    )
    assert (facts.mask_ids, facts.num_masks, facts.has_draft_head) == ((4, 5, 6, 7, 8), 5, True)
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert facts.eos_ids == (0,)
    assert facts.tokenizer_hash == hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest()
    assert model.drafting.draft_head.w1.shape == (32, 128)
    assert model.drafting.draft_head.w2.shape == (64, 32)
    assert model.drafting.draft_head.embedding_scale == 2.0


def test_the_model_hash_sees_the_config_and_the_headers(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    before = Checkpoint.open(path).model_hash()
    assert Checkpoint.open(path).model_hash() == before
    assert Checkpoint.open(copy_of(rms_norm_eps=0.5)).model_hash() != before


def test_masks_are_those_of_the_section_unless_arguments_win(copy_of: Callable[..., Path], llama: Path) -> None:
    model = load_model(copy_of(space=None), dtype="float32")
    assert (model.facts.num_masks, model.facts.mask_ids, model.drafting.draft_head) == (0, (), None)
    section = {"num_masks": 2, "mask_token_ids": [4, 5], "draft_head": None}
    assert load_model(copy_of(space=section | {"acceptance": [0.7, 0.5]})).facts.acceptance == (0.7, 0.5)
    assert load_model(copy_of(space=section)).facts.acceptance == ()
    for wrong in ("high", [1.5], [None]):
        with pytest.raises(InvalidSpaceSection, match="must be chances"):
            load_model(copy_of(space=section | {"acceptance": wrong}))
    path = copy_of(space=None)
    assert load_model(path, mask_ids=[9], num_masks=3).facts.mask_ids == (9, 9, 9)
    assert load_model(path, mask_ids=[9, 10]).facts.mask_ids == (9, 10)
    facts = load_model(llama, num_masks=2).facts
    assert facts.mask_ids == (FIRST_MASK, FIRST_MASK + 1)
    assert load_model(llama, num_masks=0).facts.mask_ids == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask_ids": [128]}, "Mask id 128 is outside the vocabulary of 128"),
        ({"mask_ids": [1, 2], "num_masks": 3}, "3 masks need 1 or 3 mask ids; got 2"),
        ({"num_masks": -1}, "num_masks must be 0 or more; got -1"),
        ({"mask_ids": [0], "num_masks": 3}, "Id 0 ends a text and cannot be a mask too"),
    ],
)
def test_masks_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str, llama: Path) -> None:
    with pytest.raises(InvalidSpaceSection, match=message):
        load_model(llama, **arguments)


def test_masks_without_ids_are_refused(copy_of: Callable[..., Path]) -> None:
    with pytest.raises(InvalidSpaceSection, match="5 masks need mask ids"):
        load_model(copy_of(space=None), num_masks=5)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"file": "absent.safetensors", "hidden": 32, "embedding_scale": 2}, "absent.safetensors is not in"),
        (
            {"file": "draft_head.safetensors", "hidden": 31, "embedding_scale": 2},
            r"has shape \(32, 128\); .* \(31, 128\)",
        ),
        ({"file": "draft_head.safetensors", "hidden": 32}, "needs file, hidden and embedding_scale"),
        ({"file": "../draft_head.safetensors", "hidden": 32, "embedding_scale": 2}, "is not in"),
        (
            {"file": "draft_head.safetensors", "hidden": 32, "embedding_scale": 2, "form": "low-rank"},
            r"has shape \(32, 128\); .* \(32, 64\)",
        ),
        (
            {"file": "draft_head.safetensors", "hidden": 32, "embedding_scale": 2, "form": "wide"},
            "no draft head of form 'wide'; there are mlp, low-rank",
        ),
        ({"file": "draft_head.safetensors", "hidden": 32.0, "embedding_scale": 2}, "32.0 is no whole number"),
        (
            {"file": "draft_head.safetensors", "hidden": 32, "embedding_scale": float("nan")},
            "nan is no scale",
        ),
    ],
)
def test_an_unfit_draft_head_is_refused(head: dict[str, Any], message: str, copy_of: Callable[..., Path]) -> None:
    with pytest.raises(InvalidSpaceSection, match=message):
        load_model(copy_of(space={"num_masks": 1, "mask_token_ids": [4], "draft_head": head}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda head: head | {"more": torch.ones(2)}, "has more, which is no part of this draft head"),
        (lambda head: {name: w.to(torch.int8) for name, w in head.items()}, "w1.weight in .* is torch.int8"),
        (lambda head: {name: w * torch.inf for name, w in head.items()}, "has values that are not finite"),
    ],
    ids=["another tensor", "integers", "infinite"],
)
def test_a_draft_head_of_other_tensors_is_refused(
    spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, copy_of: Callable[..., Path]
) -> None:
    path = copy_of()
    save_file(spoil(load_file(path / "draft_head.safetensors")), path / "draft_head.safetensors")
    with pytest.raises(InvalidSpaceSection, match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_token_ids": 5}, "must be a list of ids; got 5"),
        ({"mask_token_ids": [4], "num_masks": 10**12}, "num_masks must be 1024 at most"),
        ({"mask_token_ids": [4], "num_masks": True}, "num_masks must be 0 or more; got True"),
    ],
    ids=str,
)
def test_masks_that_cannot_be_are_refused(fields: dict[str, Any], message: str, copy_of: Callable[..., Path]) -> None:
    with pytest.raises(InvalidSpaceSection, match=message):
        load_model(copy_of(space=fields))


def test_a_low_rank_draft_head_is_read_and_an_absent_form_is_the_mlp(copy_of: Callable[..., Path]) -> None:
    section = {"num_masks": 1, "mask_token_ids": [4]}
    head = {"file": "draft_head.safetensors", "hidden": 32, "embedding_scale": 2}
    path = copy_of(space=section | {"draft_head": head})
    loaded = load_model(path).drafting.draft_head
    assert loaded.form is DraftHeadForm.MLP
    weights = load_file(path / "draft_head.safetensors")
    weights["draft_head.w1.weight"] = weights["draft_head.w1.weight"][:, 64:].contiguous()
    save_file(weights, path / "low_rank.safetensors")
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["space"]["draft_head"] = head | {"file": "low_rank.safetensors", "form": "low-rank"}
    file.write_text(json.dumps(config))
    loaded = load_model(path).drafting.draft_head
    assert (loaded.form, tuple(loaded.w1.shape)) == (DraftHeadForm.LOW_RANK, (32, 64))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4, "factor": 2.0}}, "by 'ntk'"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, "are LlamaForCausalLM: .* Use a checkpoint of Llama"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}, "brings .auto_map .* is never run"),
        ({"model_type": "openai-gpt"}, "OpenAIGPTLMHeadModel computes its attention by itself"),
        ({"model_type": "gpt_oss"}, "for which GptOssForCausalLM has no place"),
        ({"model_type": "kimi_linear"}, "linear_attention layers"),
        ({"model_type": "t5"}, "no causal language models"),
        ({"model_type": "nonesuch"}, "has no models of type 'nonesuch'"),
        ({"model_type": None}, "has no model_type"),
        ({"hidden_size": "wide"}, "cannot read the config"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised as GPTQ, and none of them is"),
        ({"hidden_act": "hardswish"}, "Hardswish calls hardswish, .* not served on a CPU"),
        ({"space": {"adapter": "gated.safetensors"}}, "There is no adapter file"),
        ({"num_hidden_layers": 3}, "lack model.layers.2"),
    ],
)
def test_what_is_not_served_is_refused(fields: dict[str, Any], message: str, copy_of: Callable[..., Path]) -> None:
    with pytest.raises((UnsupportedModel, InvalidSpaceSection), match=message):
        load_model(copy_of(**fields))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float64"}, "dtype must be auto, float32, bfloat16 or float16; got 'float64'"),
        ({"device": "abacus"}, "'abacus' is no device"),
        ({"num_threads": 0}, "num_threads must be at least 1; got 0"),
        ({"attention": "none"}, "no attention implementation 'none'"),
        ({"max_model_len": 513}, r"must lie in 1..512, the model's positions; got 513"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments: dict[str, Any], message: str, llama: Path) -> None:
    with pytest.raises(InvalidSetting, match=message):
        load_model(llama, **arguments)


def test_a_shorter_window_is_kept(llama: Path) -> None:
    assert load_model(llama, max_model_len=100).facts.window == 100


def test_pickled_weights_are_refused_with_the_cure(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointNotFound, match="spaceserve convert"):
        load_model(path)


def test_absent_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"has no config\.json"):
        load_model(tmp_path)
    with pytest.raises(CheckpointNotFound, match="There is no folder"):
        load_model(tmp_path / "absent")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("params.json", "of the format of the model's makers, which is not read: fetch config.json"),
        ("consolidated.safetensors", "of the format of the model's makers"),
        ("consolidated.00.pth", "of the format of the model's makers"),
        ("onnx/model.onnx", "of ONNX, which is not read: use the checkpoint that it was made from"),
        ("openvino_model.xml", "of OpenVINO's format"),
        ("weights.npz", "of an old format of MLX"),
        ("tf_model.h5", "of TensorFlow's format"),
    ],
)
@pytest.mark.parametrize("has_config", [True, False])
def test_weights_in_another_format_are_named_with_the_cure(
    file: str, message: str, has_config: bool, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    if has_config:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointNotFound, match=f"has {file}, {message}"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("field", ["quantization", "quantization_config"])
def test_weights_quantised_for_mlx_are_named(field: str, copy_of: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModel, match=r"is quantised for Apple's MLX .*Use the checkpoint it was made from"):
        load_model(copy_of(**{field: {"group_size": 64, "bits": 4, "mode": "affine"}}))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(("text", "message"), [('{"a": ', "is not JSON"), ("[1]", "holds no JSON object")])
def test_json_cut_or_without_object_is_named(name: str, text: str, message: str, copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    (path / name).write_text(text)
    with pytest.raises(CheckpointNotFound, match=f"{name} {message}"):
        Checkpoint.open(path).eos_ids(vocab_size=128)


def test_an_index_that_names_no_files_is_refused(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointNotFound, match="names no files"):
        Checkpoint.open(path)


def test_sharded_weights_are_read_as_one(copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    whole = load_model(path, dtype="float32")
    tensors = load_file(path / "model.safetensors")
    weight_map = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = load_model(path, dtype="float32")
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sharded.logits(rows), whole.logits(rows))
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFound, match=r"names model-00002-of-00002\.safetensors, which is not there"):
        load_model(path)


def test_eos_ids_come_from_the_generation_config_and_the_tokenizer(copy_of: Callable[..., Path]) -> None:
    path = copy_of(eos_token_id=9)
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 10]}')
    assert load_model(path).facts.eos_ids == (3, 10, 0)
    (path / "generation_config.json").unlink()
    assert load_model(path).facts.eos_ids == (9, 0)
    (path / "generation_config.json").write_text('{"eos_token_id": [128, 11, -1]}')
    assert load_model(path).facts.eos_ids == (11, 0)
    for said in ('"3"', "[1.5]", "[true]"):
        (path / "generation_config.json").write_text(f'{{"eos_token_id": {said}}}')
        with pytest.raises(UnsupportedModel, match=r"eos_token_id in the generation_config\.json of .* whole numbers"):
            load_model(path)


def test_auto_takes_float32_for_a_float32_checkpoint_and_says_why(llama: Path) -> None:
    facts = load_model(llama).facts
    assert facts.dtype is torch.float32
    assert facts.dtype_reason == "the checkpoint is torch.float32"


def test_auto_takes_bfloat16_where_the_cpu_or_operations_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint(tmp_path, dtype="bfloat16")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert load_model(path).facts.dtype is torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    facts = load_model(path).facts
    assert facts.dtype is torch.bfloat16
    assert f"compiled for {own_kinds()[0]} widen it" in facts.dtype_reason
    cpu = torch.device("cpu")
    number, reason = choose_dtype("auto", cpu, torch.bfloat16, cpu_kernels="torch")
    assert number is torch.float32
    assert "no bfloat16 products" in reason
    cpu_library.cache_clear()
    monkeypatch.setenv(SWITCH, "fast")
    with pytest.raises(InvalidSetting, match="it must be auto, compiled, torch,"):
        load_model(path)
    assert choose_dtype("auto", cpu, torch.bfloat16, cpu_kernels="compiled")[0] is torch.bfloat16
    cpu_library.cache_clear()


def test_float16_is_served_where_it_is_asked_for_and_on_a_gpu_where_it_is_stored(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, dtype="float16")
    facts = load_model(path).facts
    assert (facts.dtype, facts.dtype_reason.partition(",")[0]) == (torch.float32, "the checkpoint is torch.float16")
    facts = load_model(path, dtype="float16").facts
    assert (facts.dtype, facts.dtype_reason, facts.number_format) == (torch.float16, "as asked", "float16")
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    gpu = torch.device("cuda")
    assert choose_dtype("auto", gpu, torch.float16) == (torch.float16, "the checkpoint's own")
    assert choose_dtype("auto", gpu, torch.float64) == (torch.bfloat16, "stands in for torch.float64")
    with pytest.raises(InvalidSetting, match="leave out --dtype float16"):
        choose_dtype("float16", gpu, torch.float16, "fp8")


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_float16_says_what_transformers_says_to_its_roundings(family: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, family, dtype="float16")
    model = load_model(path, dtype="float16")
    ids = list(range(20, 40))
    batch = ForwardBatch.build([Segment(ids, 0, [0, 1])], block_size=16, mask_ids=())
    found = model.logits(model.forward(batch, model.allocate_kv(2, 16))[: len(ids)])
    with torch.inference_mode():
        wanted = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    assert (found - wanted).abs().max() < 0.01 * wanted.abs().max()


def test_an_untied_head_and_biases_are_read(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=False, vocab_size=300)
    model = load_model(path, dtype="float32")
    dense = AutoModelForCausalLM.from_pretrained(path)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = dense.lm_head(hidden)
    torch.testing.assert_close(model.logits(hidden), wanted, atol=1e-5, rtol=0)
    ids = torch.tensor([[1, 299], [0, 7], [4, 4], [9, 8], [77, 2]])
    torch.testing.assert_close(model.logits_of(hidden, ids), wanted.gather(1, ids), atol=1e-5, rtol=0)
    assert torch.equal(model.embed(ids[0]), dense.model.embed_tokens.weight[ids[0]])


@pytest.mark.parametrize("vocab_size", [128, 300])
def test_the_tiny_tokenizer_gives_text_back(vocab_size: int, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, vocab_size=vocab_size)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = tokenizer.encode("def f(x):\n  return x<|im_end|>").ids
    assert tokenizer.decode(ids) == "def f(x):\n  return x"
    assert max(ids) < vocab_size
    assert tokenizer.token_to_id("<|mask_1|>") == FIRST_MASK


def test_a_gpu_multiplies_float32_as_ieee_has_it() -> None:
    """NVIDIA's images ask for TF32 in the environment."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        refuse_tf32()
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


THETA = {"rope_theta": 10000.0}
LONG = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": THETA | {"rope_type": "su"}}, "cannot read the config .*'rope_type'='longrope'"),
        ({"rope_parameters": THETA | {"rope_type": "ntk"} | LONG}, "by 'ntk'"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}, "rope_parameters": None}, "by 'ntk'"),
        ({"rope_parameters": THETA | {"rope_type": "spiral"}}, "by 'spiral' .*none of default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta .* is 0.*; it must be above 0"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": -5.0}},
            "rope_theta .* is -5.0; it must be above 0",
        ),
        ({"num_key_value_heads": 3}, r"4 heads \(num_attention_heads\) for 3 key-value heads .* do not divide"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": None},
            "hidden size .*attention heads .6.* Fetch the config.json",
        ),
        ({"num_attention_heads": [4, 2]}, "num_attention_heads|cannot read the config"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": -16}, "head_dim .* is -16"),
        ({"is_causal": False}, "attends to later tokens, too .* writes no text"),
        ({"use_bidirectional_attention": True}, "attends to later tokens, too"),
        ({"kv_lora_rank": 16}, "multi-head latent attention"),
        ({"layer_types": ["full_attention", "conv"]}, "conv layers, which are not served|cannot read the config"),
        ({"vocab_size": "many"}, "cannot read the config of .*vocab_size.* Fetch the config.json of the original"),
        (
            {"rope_parameters": THETA | {"rope_type": "linear", "factor": 0}},
            r"factor of rotary positions .* \(rope_scaling\) is 0; it must be a number above 0. Fetch the config.json",
        ),
        ({"rope_parameters": THETA | {"rope_type": "linear", "factor": "2"}}, "is '2'; it must be a number above 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings .* is 0; it must be a whole number above 0. Fetch"),
        ({"hidden_act": "swoosh"}, "hidden_act .* is 'swoosh', which transformers .* does not have. Fetch the config"),
        ({"torch_dtype": "bf16", "dtype": None}, "torch_dtype .* is 'bf16', which is no dtype.* or write the dtype"),
    ],
)
def test_an_impossible_config_is_refused(fields: dict[str, Any], message: str, copy_of: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load_model(copy_of(**fields))


@pytest.mark.parametrize("said", ["auto", "torch.float32"])
@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_a_dtype_may_be_spelled_as_people_do(field: str, said: str, copy_of: Callable[..., Path]) -> None:
    path = copy_of()
    config = json.loads((path / "config.json").read_text())
    config.pop("dtype", None)
    (path / "config.json").write_text(json.dumps(config | {field: said}))
    assert load_model(path).facts.dtype is torch.float32


def test_numbers_that_transformers_itself_cannot_compute_are_said_to_be_its(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "mistral")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": 0}))
    with pytest.raises(
        UnsupportedModel, match=r"layer 0 of 2 is not finite .* in transformers itself.* Fetch the config"
    ):
        load_model(path)


@pytest.mark.parametrize(("chosen", "bound"), [(99, "of 4 experts .* 1 to 4. Fetch"), (0, "is 0, of 4 experts")])
def test_experts_that_are_not_there_cannot_be_chosen(chosen: int, bound: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "mixtral")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": chosen}))
    with pytest.raises(UnsupportedModel, match=f"num_experts_per_tok .* {bound}"):
        load_model(path)


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        (
            "layers.1.mlp.experts.2.up_proj.weight",
            r"lack model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight \(1 tensors",
        ),
        ("layers.0.mlp.experts.1.", r"lack model\.layers\.0\.mlp\.experts\.1\.down_proj\.weight \(3 tensors"),
    ],
)
def test_a_weight_that_one_expert_lacks_is_named(dropped: str, message: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen3_moe")
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if dropped not in name}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=message + " missing.* Fetch the whole checkpoint again"):
        load_model(path)


@pytest.mark.timeout(60)
def test_an_expert_with_a_huge_number_does_not_hold_up_the_refusal(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen3_moe")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.{}.down_proj.weight"
    tensors[name.format(10**12)] = tensors.pop(name.format(2))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lack model\.layers\.1\.mlp\.experts\."):
        load_model(path)


def test_an_expert_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen3_moe")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UnsupportedModel, match=r"experts\.2\.down_proj\.weight has the shape \(63, 64\), .* is \(64, 64\)"
    ):
        load_model(path)


@pytest.mark.parametrize(
    ("auto_map", "served"),
    [
        (
            {
                "AutoConfig": "configuration_llama.LlamaConfig",
                "AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM",
            },
            1,
        ),
        ({"AutoModelForCausalLM": "owner/name--modeling_llama.LLaMAForCausalLM"}, 1),
        ({"AutoConfig": "configuration_llama.LlamaConfig"}, 1),
        ({"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}, 0),
    ],
)
def test_code_of_a_native_model_is_ignored(auto_map: dict[str, str], served: int, copy_of: Callable[..., Path]) -> None:
    path = copy_of(auto_map=auto_map)
    for name in ("configuration_llama.py", "modeling_llama.py", "modeling_other.py"):
        (path / name).write_text("raise SystemExit('this code ran')")
    if served:
        load_model(path)
    else:
        with pytest.raises(UnsupportedModel, match=r"OtherForCausalLM.*which is never run.* are LlamaForCausalLM"):
            load_model(path)


def test_attention_that_is_not_causal_is_noticed_where_no_field_says_so(tmp_path: Path) -> None:
    """bert-generation: a decoder only with is_decoder."""
    path = tiny_checkpoint(tmp_path, "llama")
    config = path / "config.json"
    config.write_text(
        '{"model_type": "bert-generation", "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64}'
    )
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)
    with pytest.raises(ModelError, match="attends to later tokens, too"):
        load_model(path)


def test_the_text_part_of_a_model_that_sees_images_is_served_as_the_whole_one_says_it(tmp_path: Path) -> None:
    """gemma3, with names as transformers 4 and 5 have them."""
    assert sweep("gemma3", tmp_path).difference < EQUAL
    file = tmp_path / "model.safetensors"
    tensors = {
        name.replace("model.language_model.", "language_model.model.").replace(
            "model.", "", name.startswith("model.v")
        ): t
        for name, t in load_file(file).items()
    }
    before = load_model(tmp_path, dtype="float32")
    save_file(tensors, file, metadata={"format": "pt"})
    after = load_model(tmp_path, dtype="float32")
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(after.logits(rows), before.logits(rows))
    assert torch.equal(after.embed(torch.arange(9)), before.embed(torch.arange(9)))


def test_the_text_parts_of_other_models_that_see_or_hear_are_served_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a class of its own in transformers (llava, llama), without (qwen2_vl), and with layers that only see images
    (mllama)."""
    for family in ("llava", "qwen2_vl", "mllama", "qwen2_5_omni"):
        found = sweep(family, tmp_path / family)
        assert found.cpu == "served", found
        assert found.exact, found
        assert found.difference < EQUAL, found
    with caplog.at_level("INFO", logger="space_model"):
        model = load_model(tmp_path / "mllama", dtype="float32")
    assert model.facts.num_layers == 2  # and one layer of images
    assert sum("tensors are left out" in line for line in caplog.messages) == 2  # a reason each, once


def test_a_tensor_of_a_text_part_without_a_place_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen2_vl", num_masks=0)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.layers.0.self_attn.q_proj.scale_inv", "score.weight"):
        save_file(tensors | {name: torch.ones(1)}, file, metadata={"format": "pt"})
        with pytest.raises(UnsupportedModel, match=f"has {name} "):
            load_model(path)


def test_other_models_that_see_images_are_refused_by_name(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["instructblip"]().to_dict()
    with pytest.raises(UnsupportedModel, match=r"of type 'instructblip' write about an image.*Use a checkpoint"):
        read_config(Checkpoint("x", tmp_path, config, (), tmp_path))


def test_the_true_reason_is_given_for_a_text_part_that_is_refused(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["inkling_mm_model"]().to_dict()
    with pytest.raises(UnsupportedModel, match=r"of type 'inkling_text' have hybrid, hybrid_sliding layers"):
        read_config(Checkpoint("x", tmp_path, config, (), tmp_path))


def test_a_file_of_the_config_may_say_infinity_as_transformers_writes_it(copy_of: Callable[..., Path]) -> None:
    load_model(copy_of(unheard_of={"__float__": "Infinity"}))
