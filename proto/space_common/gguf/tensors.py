"""Maps each Hugging Face tensor name to the tensors of a GGUF file that it is built from.

    blk.0.attn_q.weight         rows of each head interleaved: pairs that turn together   llama, smollm3, granite
    model.layers.0.self_attn.q_proj.weight                        first half, second half

llama.cpp's converter reorders the rows of query and key in Llama and the families that it converts as one, and adds 1
to the weights of Gemma's norms; here both are undone. Phi-3 has one matrix for query, key and value, the others have
three; a file may have either form. The experts of a layer are below each other, one tensor for each of gate, up and
down; config.json's families have three for each expert, gpt-oss two for all: outputs of gate and up alternate there,
and inputs come before outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from space_common.gguf.find import GgufError
from space_common.gguf.reader import GgufFile, GgufTensor

SERVED_KINDS = frozenset(
    {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"}
)
"""Supported tensor types."""

ROPE_FREQUENCIES = "rope_freqs.weight"
ROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose values go into config.json; the model has none by these names."""

_IGNORED = ("attn_rot_embd.weight",)  # tensors of a layer that are ignored: rotary angles are computed

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_EXPERTS_OF_MIXTRAL = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_STACKED_EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_OLMO_2_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TURNED = ("llama", "smollm3", "granite")
_GPT_OSS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.router",
}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class TensorRows:
    """Some rows of a tensor of the file; of a 1-D tensor, some elements."""

    tensor: GgufTensor
    start: int
    stop: int


@dataclass(frozen=True)
class TensorSource:
    """How a tensor of the model is built from tensors of the file."""

    parts: tuple[TensorRows, ...]  # concatenated along the rows
    turned_heads: int = 0  # heads whose rows are interleaved; 0: none
    shift: float = 0.0  # the converter added this to every element

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the model's tensor."""
        return (sum(part.stop - part.start for part in self.parts), *self.parts[0].tensor.shape[1:])

    @property
    def is_plain(self) -> bool:
        """Return whether it equals one tensor of the file, except for the element type."""
        whole = len(self.parts) == 1 and self.parts[0].stop - self.parts[0].start == self.parts[0].tensor.shape[0]
        return whole and not self.turned_heads and not self.shift


@dataclass(frozen=True)
class StackedSource(TensorSource):
    """How the weights or biases of a layer's experts in gpt-oss are built: [experts, inputs, outputs] or
    [experts, outputs]; of two parts, gate and up, the outputs alternate. Experts are below each other in each part."""

    num_experts: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_experts, *self.parts[0].tensor.shape[1:], len(self.parts) * self.num_outputs)

    @property
    def num_outputs(self) -> int:
        """Return the outputs of one expert in each part."""
        return self.parts[0].tensor.shape[0] // self.num_experts

    @property
    def is_plain(self) -> bool:
        return False

    def of_expert(self, expert: int) -> tuple[TensorRows, ...]:
        """Return the rows of each part that are an expert's."""
        first = expert * self.num_outputs
        return tuple(TensorRows(part.tensor, first, first + self.num_outputs) for part in self.parts)


def sources_of(file: GgufFile, config: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Map each Hugging Face tensor name to its source. Raises GgufError for tensors that are missing or unused."""
    return _Sources(file, config).all()


class _Sources:
    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self._file, self._config = file, config
        self._used: set[str] = set()
        self._found: dict[str, TensorSource] = {}
        self._architecture = str(file.metadata["general.architecture"])
        self._num_experts = config.get("num_experts") or config.get("num_local_experts") or 0
        self._is_gemma = self._architecture.startswith("gemma")

    def all(self) -> dict[str, TensorSource]:
        """Return the sources of all layers, of the embedding, the final norm and the head."""
        for name, target in _OUTER.items():
            self._take(f"{name}.weight", f"{target}.weight")
        if not self._config["tie_word_embeddings"]:
            self._take("output.weight", "lm_head.weight")
        for layer in range(self._config["num_hidden_layers"]):
            self._layer(f"blk.{layer}", f"model.layers.{layer}")
        aside = {"llama": {ROPE_FREQUENCIES}, "phi3": {*ROPE_FACTORS}}.get(self._architecture, set())
        left = [
            name
            for name in self._file.tensors
            if name not in self._used and name not in aside and not name.endswith(_IGNORED)
        ]
        if left:
            raise GgufError(
                f"{self._file.path} has {left[0]} ({len(left)} such tensors), which no {self._architecture} model has "
                "here: without it the text would be another. Take the checkpoint that the file was made from, as "
                "safetensors."
            )
        return self._found

    def _layer(self, here: str, there: str) -> None:
        config = self._config
        if self._architecture == "gpt-oss":
            self._gpt_oss_layer(here, there)
            return
        has_four_norms = self._architecture in ("gemma2", "gemma3")
        norms = _OLMO_2_NORMS if self._architecture == "olmo2" else _GEMMA_NORMS if has_four_norms else _NORMS
        modules = {"attn_output": "self_attn.o_proj"} | norms
        biased = {"attn_output"} if config.get("attention_bias") else set()
        if self._architecture == "phi3":
            modules |= {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
            self._joined(here, f"{there}.self_attn.qkv_proj")
        else:
            modules |= self._experts(here, there) if self._num_experts else _GATED_MLP
            if config.get("mlp_bias"):
                biased |= set(_GATED_MLP)
            has_bias = bool(config.get("attention_bias")) or self._architecture in ("qwen2", "qwen2moe")
            for kind in ("weight", "bias") if has_bias else ("weight",):
                self._split(here, there, kind)
        if self._architecture in ("qwen3", "qwen3moe", "gemma3", "olmoe", "olmo2"):
            modules |= _HEAD_NORMS
        for name, target in modules.items():
            self._take(f"{here}.{name}.weight", f"{there}.{target}.weight")
            if name in biased:
                self._take(f"{here}.{name}.bias", f"{there}.{target}.bias")

    def _gpt_oss_layer(self, here: str, there: str) -> None:
        for kind in ("weight", "bias"):
            self._split(here, there, kind)
            for linear, names in _STACKED_EXPERTS.items():
                parts = tuple(self._below(f"{here}.{name}.{kind}", 3 if kind == "weight" else 2) for name in names)
                suffix = "" if kind == "weight" else "_bias"
                self._found[f"{there}.mlp.experts.{linear}{suffix}"] = StackedSource(
                    tuple(TensorRows(one, 0, one.shape[0]) for one in parts), num_experts=self._num_experts
                )
        self._take(f"{here}.attn_sinks.weight", f"{there}.self_attn.sinks")
        for name, target in _GPT_OSS.items():
            for kind in ("weight",) if name.endswith("norm") else ("weight", "bias"):
                self._take(f"{here}.{name}.{kind}", f"{there}.{target}.{kind}")

    def _below(self, name: str, dimensions: int) -> GgufTensor:
        """Return the weights [experts · outputs, inputs] or biases [experts · outputs] of a layer's experts."""
        stacked = self._tensor(name, dimensions=dimensions)
        if stacked.shape[0] != self._num_experts:
            raise GgufError(
                f"{name} in {self._file.path} has {stacked.shape[0]} experts, and the metadata says "
                f"{self._num_experts}. Download it again, or take another conversion of the model."
            )
        return replace(stacked, shape=(stacked.shape[0] * stacked.shape[1], *stacked.shape[2:]))

    def _experts(self, here: str, there: str) -> dict[str, str]:
        """Add the linears of each expert. Return the other modules of the mixture."""
        is_mixtral = self._config["model_type"] == "mixtral"
        block = f"{there}.block_sparse_moe" if is_mixtral else f"{there}.mlp"
        for name, linear in (_EXPERTS_OF_MIXTRAL if is_mixtral else _EXPERTS).items():
            below = self._below(f"{here}.{name}.weight", 3)
            height = below.shape[0] // self._num_experts
            for expert in range(self._num_experts):
                rows = TensorRows(below, expert * height, (expert + 1) * height)
                self._found[f"{block}.experts.{expert}.{linear}.weight"] = TensorSource((rows,))
        gate = {"ffn_gate_inp": f"{block.removeprefix(there + '.')}.gate"}
        return gate | (_SHARED_EXPERT if self._architecture == "qwen2moe" else {})

    def _split(self, here: str, there: str, kind: str) -> None:
        """Add query, key and value as three tensors."""
        heads, kv_heads, size = (
            int(self._config[name]) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        joined, start = f"{here}.attn_qkv.{kind}", 0
        for (name, target), count in zip(_ATTENTION.items(), (heads, kv_heads, kv_heads), strict=True):
            turned = count if self._architecture in _TURNED and name != "attn_v" else 0
            if joined in self._file.tensors:
                rows = TensorRows(self._tensor(joined), start, start + count * size)
                start = rows.stop
            else:
                tensor = self._tensor(f"{here}.{name}.{kind}")
                rows = TensorRows(tensor, 0, tensor.shape[0])
            if rows.stop > rows.tensor.shape[0] or rows.stop - rows.start != count * size:
                raise GgufError(
                    f"{rows.tensor.name} in {self._file.path} has {rows.tensor.shape[0]} rows, which {count} heads of "
                    f"{size} do not make. Take the checkpoint that the file was made from, as safetensors."
                )
            self._found[f"{there}.{target}.{kind}"] = TensorSource((rows,), turned_heads=turned)

    def _joined(self, here: str, target: str) -> None:
        """Add query, key and value as one tensor."""
        names = [f"{here}.attn_qkv.weight"]
        if names[0] not in self._file.tensors and f"{here}.attn_q.weight" in self._file.tensors:
            names = [f"{here}.{name}.weight" for name in _ATTENTION]
        tensors = [self._tensor(name) for name in names]
        self._found[f"{target}.weight"] = TensorSource(tuple(TensorRows(one, 0, one.shape[0]) for one in tensors))

    def _take(self, name: str, target: str) -> None:
        tensor = self._tensor(name)
        if name.endswith("ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))
        shift = 1.0 if self._is_gemma and name.endswith("norm.weight") else 0.0
        self._found[target] = TensorSource((TensorRows(tensor, 0, tensor.shape[0]),), shift=shift)

    def _tensor(self, name: str, *, dimensions: int | None = None) -> GgufTensor:
        """Return a tensor of the file. `dimensions`: how many it has; None: one or two."""
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise GgufError(
                f"{self._file.path} lacks {name}, which every {self._architecture} model of its metadata has. "
                "Download it again, or take another conversion of the model."
            )
        self._used.add(name)
        if len(tensor.shape) not in ((1, 2) if dimensions is None else (dimensions,)):
            meant = {2: "a vector for each expert", 3: "a matrix for each expert"}.get(
                dimensions or 0, "a matrix or a vector"
            )
            raise GgufError(f"{name} in {self._file.path} has shape {list(tensor.shape)}; {meant} is meant.")
        return tensor
