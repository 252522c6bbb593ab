"""A checkpoint's own layer for multi-token prediction (MTP) as a draft network: DeepSeek-V3, GLM-4.5, Qwen3-Next, MiMo.

It is a decoder layer behind the model's last one. Row p reads the model's hidden state of position p (after the final
norm) and the id of position p+1, and predicts the id of position p+2 (DeepSeek-V3, arXiv 2412.19437, section 2.2):

    x = eh_proj · [enorm(e(id p+1)) ; hnorm(h p)]        y = layer(x)        logits = head · norm(y)

Further drafts read y in place of h, and the embedding at position 0 is zero, as in vLLM (deepseek_mtp.py and
glm4_moe_mtp.py of 2025). In Qwen3-Next and Qwen3.5 (qwen3_next_mtp.py, qwen3_5_mtp.py) they read norm(y), no embedding
is zero, and the factors of norms are 1 + weight. In MiMo (mimo_mtp.py) they read norm(y), and eh_proj takes h first. In
MiMo-V2-Flash (mimo_v2_mtp.py) they read norm(y), no embedding is zero; the layer attends through a window and has no
experts. Of several such layers the first is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from space_kernels.linear.cpu_linear import torch_linear
from space_kernels.linear.packed_linear import pad_rows
from torch import Tensor

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.translation import Part, TensorRule, Translation
from space_model.draft_networks.place import check_place
from space_model.geometry.forward_batch import ForwardBatch
from space_model.loading.load import load_model
from space_model.loading.whole_model import open_weights
from space_model.model_error import InvalidSetting
from space_model.model_facts import HeadFacts, ModelFacts
from space_model.networks.llama_parts import Norm
from space_model.networks.network import DraftKV, PagedKV
from space_model.space_model import SpaceModel

NAME = "mtp"  # of --draft-model, for the checkpoint's own layers

NUM_DRAFTS = 4
"""Most drafts of a step: one layer was trained to make one, and repeats itself for the others."""


@dataclass(frozen=True)
class MtpForm:
    """How a family's checkpoints hold the layer, and what sets its arithmetic apart."""

    root: str  # where its tensors are
    layer: str  # where those of its decoder layer are
    enorm: str
    hnorm: str
    projection: str  # [hidden, 2·hidden]: of the embedding, then of the state
    norm: str
    head: str | None  # its own output head; None: the model's
    config: Mapping[str, Any]  # of a model of this layer alone
    skips_first: bool  # the embedding at position 0 is zero
    adds_one: bool  # the factors of norms are 1 + weight
    passes_normed: bool  # further drafts read the output after its norm
    state_first: bool = False  # the projection is of the state, then of the embedding
    renamed: Sequence[tuple[str, str]] = ()  # modules of the decoder layer, as here and as in the model's own layers


def _behind_last(config: Mapping[str, Any]) -> MtpForm:
    root = f"model.layers.{int(config['num_hidden_layers'])}."
    own: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    own |= {"mlp_layer_types": ["sparse"]} if "mlp_layer_types" in config else {}
    return MtpForm(
        root=root,
        layer=root,
        enorm=f"{root}enorm",
        hnorm=f"{root}hnorm",
        projection=f"{root}eh_proj",
        norm=f"{root}shared_head.norm",
        head=f"{root}shared_head.head",
        config=own,
        skips_first=True,
        adds_one=False,
        passes_normed=False,
    )


def _beside(config: Mapping[str, Any]) -> MtpForm:
    own: dict[str, Any] = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }
    return MtpForm(
        root="mtp.",
        layer="mtp.layers.0.",
        enorm="mtp.pre_fc_norm_embedding",
        hnorm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
        head=None,
        config=own,
        skips_first=False,
        adds_one=True,
        passes_normed=True,
    )


def _of_mimo(config: Mapping[str, Any]) -> MtpForm:
    root = "model.mtp_layers.0."
    return MtpForm(
        root=root,
        layer=root,
        enorm=f"{root}token_layernorm",
        hnorm=f"{root}hidden_layernorm",
        projection=f"{root}input_proj",
        norm=f"{root}final_layernorm",
        head=None,
        config={"num_hidden_layers": 1, "num_nextn_predict_layers": 0},
        skips_first=True,
        adds_one=False,
        passes_normed=True,
        state_first=True,
    )


def _of_mimo_v2(config: Mapping[str, Any]) -> MtpForm:
    root = "model.mtp.layers.0."
    return MtpForm(
        root=root,
        layer=root,
        enorm=f"{root}enorm",
        hnorm=f"{root}hnorm",
        projection=f"{root}eh_proj",
        norm=f"{root}final_layernorm",
        head=None,
        config={"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        skips_first=False,
        adds_one=False,
        passes_normed=True,
        renamed=(("pre_mlp_layernorm", "post_attention_layernorm"),),
    )


FORMS: Mapping[str, Callable[[Mapping[str, Any]], MtpForm]] = {
    "deepseek_v3": _behind_last,
    "glm4_moe": _behind_last,
    "glm4_moe_lite": _behind_last,
    "qwen3_next": _beside,
    "qwen3_5": _beside,
    "qwen3_5_moe": _beside,
    "qwen3_5_text": _beside,
    "qwen3_5_moe_text": _beside,
    "mimo": _of_mimo,
    "mimo_v2_flash": _of_mimo_v2,
}


class MtpLayer:
    """An MTP layer as a DraftNetwork."""

    lag, tapped = 1, None

    def __init__(self, model: SpaceModel, name: str, form: MtpForm, norms: Sequence[Norm], projection: Tensor) -> None:
        """`model`: of this layer alone; `norms`: enorm, hnorm and norm; `projection` [hidden, 2·hidden]."""
        self._model, self._network, self._form = model, model.network, form
        self._enorm, self._hnorm, self._norm = norms
        self._project: Callable[[Tensor], Tensor] = torch_linear("plain")(projection, None)
        facts = model.facts
        self.facts, self.name = HeadFacts(NUM_DRAFTS, kind="mtp"), name
        self.window, self.vocab_size, self.width = facts.window, facts.vocab_size, facts.hidden_size
        self.kv_bytes_per_token = facts.kv_bytes_per_token + self.width * facts.dtype.itemsize

    def allocate_kv(self, num_blocks: int, block_size: int) -> DraftKV:
        """Allocate num_blocks · block_size slots, each with a hidden state of the model."""
        facts = self._model.facts
        states = torch.zeros(num_blocks, block_size, self.width, dtype=facts.dtype, device=facts.device)
        return DraftKV.of(self._model.allocate_kv(num_blocks, block_size), states)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKV, states: Tensor | None) -> Tensor:
        """[R, hidden]: the layer's output, from the ids of the next positions and the states [R, hidden]. Stores the
        rows' keys and values in `kv`."""
        assert states is not None
        embedded = self._model.embed(batch.ids)
        if self._form.skips_first:
            embedded = embedded * (batch.positions != 0)[:, None].to(states.dtype)
        x = self._project(pad_rows(torch.cat([self._enorm(embedded), self._hnorm(states)], dim=1)))
        y = self._network.layer(0, x[: len(states)], batch, kv)
        return self._norm(y) if self._form.passes_normed else y

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32."""
        return self._model.logits(hidden if self._form.passes_normed else self._norm(hidden))

    def widened(self, logits: Tensor, vocab_size: int) -> Tensor:
        """[N, V]: they are of the model's own vocabulary."""
        return logits

    def best(self, logits: Tensor) -> Tensor:
        """[N, V] -> [N] int64: the most probable ids."""
        return logits.argmax(dim=1)


def load_mtp(checkpoint: Checkpoint, facts: ModelFacts, *, dtype: str) -> MtpLayer:
    """Load a checkpoint's MTP layer. `facts`: of its loaded model; `dtype`: as of load_model. Raises ModelError."""
    check_place(facts.device, facts.num_ranks)
    layer, form = mtp_checkpoint(checkpoint), _form_of(checkpoint)
    with open_weights(checkpoint) as files:
        named = (form.enorm, form.hnorm, form.norm, form.projection)
        *weights, projection = (files.whole(f"{name}.weight").to(facts.dtype) for name in named)
    size = facts.hidden_size
    if projection.shape != (size, 2 * size) or any(weight.shape != (size,) for weight in weights):
        raise InvalidSetting(
            f"{form.projection}.weight of {checkpoint.name} has the shape {tuple(projection.shape)}; an MTP layer of "
            f"this model has ({size}, {2 * size})."
        )
    if form.state_first:
        projection = torch.cat([projection[:, size:], projection[:, :size]], dim=1)
    model = load_model(layer, dtype=dtype, weights="auto", device=str(facts.device), max_model_len=facts.window)
    eps = float(layer.config.get("rms_norm_eps", 1e-6))
    norms = [Norm(weight + 1 if form.adds_one else weight, eps) for weight in weights]
    return MtpLayer(model, checkpoint.name, form, norms, projection)


def mtp_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """Return the first MTP layer as a checkpoint of a model of one layer. Raises InvalidSetting if there is none."""
    form = _form_of(checkpoint)
    with open_weights(checkpoint) as files:
        names = set(files.names)
    if f"{form.projection}.weight" not in names:
        raise InvalidSetting(
            f"--draft-model {NAME}: {checkpoint.name} has no tensor {form.projection}.weight, so its MTP layer was "
            "left out of it. Fetch the whole checkpoint, or leave the flag out."
        )
    has_head = form.head is not None and f"{form.head}.weight" in names
    rules = [
        (re.escape(form.norm) + r"\.(.+)", r"model.norm.\1"),
        *([(re.escape(form.head or "") + r"\.(.+)", r"lm_head.\1"), (r"lm_head\..+", None)] if has_head else []),
        *((re.escape(name) + r"\..+", None) for name in (form.enorm, form.hnorm, form.projection)),
        (re.escape(form.root) + r"(?:embed_tokens|shared_head)\..+", None),
        *((re.escape(form.layer + here) + r"\.(.+)", rf"model.layers.0.{there}.\1") for here, there in form.renamed),
        (re.escape(form.layer) + r"(.+)", r"model.layers.0.\1"),
        (r"(?:model\.layers|model\.norm|model\.mtp_layers|model\.mtp|mtp)\..+", None),
        (r"model\.language_model\.embed_tokens\.(.+)", r"model.embed_tokens.\1"),
        (r"model\.(?:language_model|visual)\..+", None),
    ]
    made = tuple(TensorRule(pattern, () if to is None else (Part(to),)) for pattern, to in rules)
    whole, text = checkpoint.config, checkpoint.config.get("text_config")
    if text is not None:  # the text part of a model that also sees
        whole = text | {key: whole[key] for key in ("tie_word_embeddings", "quantization_config") if key in whole}
    fields = {key: value for key, value in whole.items() if key != "space"} | dict(form.config)
    return replace(checkpoint, config=fields, translation=Translation(fields, made))


def _form_of(checkpoint: Checkpoint) -> MtpForm:
    kind = checkpoint.config.get("model_type")
    if kind == "qwen2" and checkpoint.config.get("num_nextn_predict_layers"):
        kind = "mimo"  # which is served as Qwen2
    make = FORMS.get(str(kind))
    if make is None or checkpoint.gguf is not None:
        what = "a GGUF file" if checkpoint.gguf is not None else kind
        raise InvalidSetting(
            f"--draft-model {NAME} drafts by the MTP layers of {', '.join(FORMS)} checkpoints, and {checkpoint.name} "
            f"is {what}. Leave it out, or name a smaller model with the same tokenizer."
        )
    return make(checkpoint.config)
