"""A checkpoint's own layer for multi-token prediction (MTP) as a draft network: DeepSeek-V3 and GLM-4.5.

It is a decoder layer behind the model's last one. Row p reads the model's hidden state of position p (after the final
norm) and the id of position p+1, and predicts the id of position p+2 (DeepSeek-V3, arXiv 2412.19437, section 2.2):

    x = eh_proj · [enorm(e(id p+1)) ; hnorm(h p)]        y = layer(x)        logits = head · norm(y)

As vLLM does (deepseek_mtp.py and glm4_moe_mtp.py of 2025), the embedding at position 0 is zero, and further drafts read
y in place of h. Of several such layers the first is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
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
from space_model.networks.transformers_network import TransformersNetwork
from space_model.space_model import SpaceModel

NAME = "mtp"  # of --draft-model, for the checkpoint's own layers

NUM_DRAFTS = 4
"""Most drafts of a step: one layer was trained to make one, and repeats itself for the others."""

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")


class MtpLayer:
    """An MTP layer as a DraftNetwork."""

    lag = 1

    def __init__(self, model: SpaceModel, name: str, enorm: Norm, hnorm: Norm, projection: Tensor) -> None:
        """`model`: of this layer alone; `projection` [hidden, 2·hidden]."""
        assert isinstance(model.network, TransformersNetwork)
        self._model, self._network = model, model.network
        self._norm = Norm.of(model.network.base.norm)
        self._enorm, self._hnorm = enorm, hnorm
        self._project: Callable[[Tensor], Tensor] = torch_linear("plain")(projection, None)
        facts = model.facts
        self.facts, self.name = HeadFacts(NUM_DRAFTS, kind="mtp"), name
        self.window, self.vocab_size, self.width = facts.window, facts.vocab_size, facts.hidden_size
        self.kv_bytes_per_token = facts.kv_bytes_per_token + self.width * facts.dtype.itemsize

    def allocate_kv(self, num_blocks: int, block_size: int) -> DraftKV:
        """Allocate num_blocks · block_size slots, each with a hidden state of the model."""
        facts = self._model.facts
        states = torch.zeros(num_blocks, block_size, self.width, dtype=facts.dtype, device=facts.device)
        return replace(DraftKV.of(self._model.allocate_kv(num_blocks, block_size)), states=states)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKV, states: Tensor | None) -> Tensor:
        """[R, hidden]: the layer's output, from the ids of the next positions and the states [R, hidden]. Stores the
        rows' keys and values in `kv`."""
        assert states is not None
        embedded = self._model.embed(batch.ids) * (batch.positions != 0)[:, None].to(states.dtype)
        x = self._project(pad_rows(torch.cat([self._enorm(embedded), self._hnorm(states)], dim=1)))
        return self._network.layer(0, x[: len(states)], batch, kv)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, V] float32."""
        return self._model.logits(self._norm(hidden))

    def widened(self, logits: Tensor, vocab_size: int) -> Tensor:
        """[N, V]: they are of the model's own vocabulary."""
        return logits

    def best(self, logits: Tensor) -> Tensor:
        """[N, V] -> [N] int64: the most probable ids."""
        return logits.argmax(dim=1)


def load_mtp(checkpoint: Checkpoint, facts: ModelFacts, *, dtype: str) -> MtpLayer:
    """Load the MTP layer of a checkpoint whose model was loaded with these `facts`. `dtype`: as of load_model. Raises
    ModelError."""
    check_place(facts.device, facts.num_ranks)
    layer = mtp_checkpoint(checkpoint)
    number = _first_layer(checkpoint.config)
    wanted = [f"model.layers.{number}.{name}.weight" for name in ("enorm", "hnorm", "eh_proj")]
    with open_weights(checkpoint) as files:
        enorm, hnorm, projection = (files.whole(name).to(facts.dtype) for name in wanted)
    size = facts.hidden_size
    if projection.shape != (size, 2 * size) or not enorm.shape == hnorm.shape == (size,):
        raise InvalidSetting(
            f"{wanted[2]} of {checkpoint.name} has the shape {tuple(projection.shape)}; an MTP layer of this model has "
            f"({size}, {2 * size})."
        )
    model = load_model(layer, dtype=dtype, weights="auto", device=str(facts.device), max_model_len=facts.window)
    eps = float(checkpoint.config.get("rms_norm_eps", 1e-5))
    return MtpLayer(model, checkpoint.name, Norm(enorm, eps), Norm(hnorm, eps), projection)


def mtp_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """Return the first MTP layer as a checkpoint of a model of one layer. Raises InvalidSetting if there is none."""
    config = checkpoint.config
    kind, name = config.get("model_type"), checkpoint.name
    if kind not in FAMILIES:
        raise InvalidSetting(
            f"--draft-model {NAME} drafts by the MTP layers of {', '.join(FAMILIES)} checkpoints, and {name} is "
            f"{kind}. Leave it out, or name a smaller model with the same tokenizer."
        )
    number = _first_layer(config)
    prefix = re.escape(f"model.layers.{number}.")
    with open_weights(checkpoint) as files:
        names = set(files.names)
    if f"model.layers.{number}.eh_proj.weight" not in names:
        raise InvalidSetting(
            f"--draft-model {NAME}: {name} has no tensor model.layers.{number}.eh_proj.weight, so its MTP layer was "
            "left out of it. Fetch the whole checkpoint, or leave the flag out."
        )
    has_head = f"model.layers.{number}.shared_head.head.weight" in names
    rules = [
        (prefix + r"shared_head\.norm\.(.+)", r"model.norm.\1"),
        (prefix + r"shared_head\.head\.(.+)", r"lm_head.\1"),
        (prefix + r"(?:enorm|hnorm|eh_proj|embed_tokens)\..+", None),
        (prefix + r"(.+)", r"model.layers.0.\1"),
        (r"model\.layers\..+", None),
        (r"model\.norm\..+", None),
        *([(r"lm_head\..+", None)] if has_head else []),
    ]
    made = tuple(TensorRule(pattern, () if to is None else (Part(to),)) for pattern, to in rules)
    fields: dict[str, Any] = {key: value for key, value in config.items() if key != "space"}
    fields |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    if "mlp_layer_types" in config:
        fields["mlp_layer_types"] = ["sparse"]
    return replace(checkpoint, config=fields, translation=Translation(fields, made))


def _first_layer(config: dict[str, Any]) -> int:
    return int(config["num_hidden_layers"])
