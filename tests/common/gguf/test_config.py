"""config.json says what llama.cpp would compute; what it cannot say is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from space_common.gguf.config import config_of
from space_common.gguf.find import GgufError
from space_common.gguf.reader import GgufFile
from space_common.gguf.view import view_files

Write = Callable[..., Path]


def refusal(file: Path) -> str:
    with pytest.raises(GgufError) as error:
        view_files(GgufFile.open(file))
    assert str(file) in str(error.value)
    return str(error.value)


def test_what_the_file_says_is_what_config_json_says(write: Write) -> None:
    values = {"llama.attention.head_count_kv": 4, "llama.rope.freq_base": 1e5, "llama.vocab_size": 128}
    config = config_of(GgufFile.open(write(values=values)))
    assert config["rms_norm_eps"] == 1e-6  # and not the 32 bits' 9.999999974752427e-07
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e5}
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (4, 16, 128)
    assert (config["eos_token_id"], config["bos_token_id"], config["tie_word_embeddings"]) == (0, None, True)
    head = {"output.weight": np.ones((128, 64), np.float32)}
    assert config_of(GgufFile.open(write(tensors=head)))["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("architecture", "layers", "values", "wanted"),
    [
        ("gemma2", 4, {}, {"sliding_window": 4096, "layer_types": "sfsf", "query_pre_attn_scalar": 16}),
        ("gemma2", 46, {"attention.key_length": 16}, {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0}),
        ("gemma3", 7, {"attention.sliding_window": 512}, {"sliding_window": 512, "layer_types": "sssssfs"}),
        ("gemma3", 3, {}, {"layer_types": "fff", "final_logit_softcapping": None}),
        (
            "gemma3",
            3,
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False, True]},
            {"layer_types": "sfs"},
        ),
        ("gemma3", 3, {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2}, {"layer_types": "sfs"}),
    ],
)
def test_what_llama_cpp_has_built_in_of_gemma_is_written_out(
    architecture: str, layers: int, values: dict[str, Any], wanted: dict[str, Any], write: Write
) -> None:
    named = {f"{architecture}.{key}": value for key, value in values.items()}
    config = config_of(GgufFile.open(write(architecture=architecture, values=named, layers=layers)))
    config["layer_types"] = "".join(kind[0] for kind in config["layer_types"])
    assert {key: config[key] for key in wanted} == wanted


def test_the_largest_gemmas_scale_attention_by_their_hidden_size(write: Write) -> None:
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        values = {f"{architecture}.attention.head_count": 2, f"{architecture}.attention.key_length": 16}
        tensors = {
            f"blk.{layer}.attn_{name}.weight": np.ones(shape, np.float32)
            for layer in range(layers)
            for name, shape in (("q", (32, 64)), ("k", (32, 64)), ("v", (32, 64)), ("output", (64, 32)))
        }
        file = write(architecture=architecture, values=values, tensors=tensors, layers=layers)
        assert config_of(GgufFile.open(file))["query_pre_attn_scalar"] == 32


def test_gemma_3_turns_its_two_kinds_of_layers_by_two_bases(write: Write) -> None:
    values = {
        "gemma3.rope.freq_base": 1e6,
        "gemma3.attention.sliding_window": 8,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    assert config_of(GgufFile.open(write(architecture="gemma3", values=values)))["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }


def test_yarn_scales_attention_as_llama_cpp_does(write: Write) -> None:
    values = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32768,
    }
    rope = config_of(GgufFile.open(write(architecture="qwen2", values=values)))["rope_parameters"]
    assert rope["attention_factor"] == pytest.approx(0.1 * np.log(4) + 1)
    assert (rope["factor"], rope["original_max_position_embeddings"], rope["beta_fast"]) == (4.0, 32768, 32.0)


def test_divisors_of_rotary_frequencies_are_llama_3s_scaling_or_refused(write: Write) -> None:
    theta, rotary = 500000.0, 16
    wavelengths = 2 * np.pi * theta ** (np.arange(0, rotary, 2) / rotary)
    for factor, original in ((8.0, 8192), (32.0, 8192), (4.0, 1024)):
        smooth = np.clip((original / wavelengths - 1) / 3, 0, 1)
        divisors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
        values = {"llama.rope.freq_base": theta}
        file = write(values=values, tensors={"rope_freqs.weight": divisors})
        assert config_of(GgufFile.open(file))["rope_parameters"] == {
            "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": original,
        }  # fmt: skip
    divisors[3] = 2.5
    assert "otherwise than Llama 3 does" in refusal(write(values=values, tensors={"rope_freqs.weight": divisors}))
    assert "has 3 numbers where 8" in refusal(write(values=values, tensors={"rope_freqs.weight": divisors[:3]}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"llama.residual_scale": 0.5}, "llama.residual_scale = 0.5; models with residual_scale other than 1.0"),
        ({"llama.attention.causal": False}, "attention.causal other than True"),
        ({"llama.some_new_thing": 3}, "llama.some_new_thing = 3, which is not understood"),
        ({"llama.attention.sliding_window": 16}, "see 16 positions back, without saying which layers"),
        ({"llama.attention.head_count_kv": [4, 2]}, r"another for each layer \(\[4, 2\]\)"),
        ({"llama.attention.value_length": 8}, "value_length = 8 where heads have 16"),
        ({"llama.rope.dimension_count": 8}, "turns 8 of 16 numbers of a head"),
        ({"llama.block_count": None}, "llama.block_count in .* must be a whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "must be a number; got nan"),
        ({"llama.rope.scaling.type": "longrope"}, "by 'longrope', which of GGUF files those of phi3 do here"),
        ({"llama.rope.scaling.type": "ntk", "llama.rope.scaling.factor": 2.0}, "by 'ntk', which is not served"),
        ({"tokenizer.ggml.model": "rwkv"}, "rwkv"),
    ],
)
def test_what_a_model_cannot_be_here_is_refused_by_name_with_a_cure(
    values: dict[str, Any], message: str, write: Write
) -> None:
    with pytest.raises(GgufError, match=f"{message}.*") as error:
        view_files(GgufFile.open(write(values=values)))
    assert any(cure in str(error.value) for cure in ("Take the", "Use a", "Serve the original"))


def test_another_architecture_is_refused_with_those_that_are_served(write: Write) -> None:
    said = refusal(write(architecture="mamba"))
    served = "llama, qwen2, qwen3, gemma2, gemma3, phi3, qwen2moe, qwen3moe, olmoe, gpt-oss, "
    served += "smollm3, granite, olmo2, gemma"
    assert f"architecture 'mamba'; GGUF files of {served} are served" in said


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gpt-oss", "gemma"])
def test_a_scale_of_attention_is_refused_where_config_json_has_no_field_for_it(architecture: str, write: Write) -> None:
    said = refusal(write(architecture=architecture, values={f"{architecture}.attention.scale": 0.5}))
    assert f"scales its attention by 0.5, which models of {architecture} do not do here" in said


def test_another_type_of_numbers_is_refused_with_those_that_are_read(write: Write) -> None:
    said = refusal(write(kind="IQ4_NL"))
    assert "type IQ4_NL (token_embd.weight is one), which are not read; BF16, F16" in said
    assert "Take another quantisation of the model, such as Q4_K_M" in said


def test_every_tensor_is_used_or_named(write: Write) -> None:
    row = np.ones(64, np.float32)
    assert "lacks blk.1.ffn_up.weight" in refusal(write(tensors={"blk.1.ffn_up.weight": None}))
    assert "has blk.2.attn_norm.weight (1 such tensors)" in refusal(write(tensors={"blk.2.attn_norm.weight": row}))
    assert "has blk.0.attn_q.scale" in refusal(write(tensors={"blk.0.attn_q.scale": row[:1]}))
    assert "lacks blk.0.attn_k.bias" in refusal(write(tensors={"blk.0.attn_q.bias": row}))
    assert "has 32 rows, which 4 heads of 16" in refusal(
        write(tensors={"blk.0.attn_q.weight": np.ones((32, 64), np.float32)})
    )
    assert "has no token_embd.weight" in refusal(write(tensors={"token_embd.weight": None}))
    ignored = write(tensors={"blk.0.attn_rot_embd.weight": row})  # angles, which are computed
    assert "config.json" in view_files(GgufFile.open(ignored))
