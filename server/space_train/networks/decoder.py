"""Wraps a transformers causal language model so that positions and visibility of rows are free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from space_model.checkpoint import family
from space_model.model_error import UnsupportedModel
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import DynamicCache, PreTrainedModel


class Decoder(nn.Module):
    """The model's body, output head and embedding.

    Letters: `B` texts, `R` rows, `K` keys, `E` hidden size, `V` vocabulary.
    """

    def __init__(self, model: PreTrainedModel, *, compile: bool = False) -> None:
        super().__init__()
        check_is_trainable(model)
        self.model = model
        config = model.config
        attention = attention_for(model)
        if attention != config._attn_implementation:
            model.set_attn_implementation(attention)
        self.attention = attention
        self._scale, self._softcap = family.head_scale(config), family.head_softcap(config)
        self._windows = _windows(config)
        self._entering: Tensor | None = None  # first-layer inputs that replace the embeddings of the current pass
        model.base_model.layers[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        body: Any = torch.compile(model.base_model, dynamic=False) if compile else model.base_model
        self._body: Callable[..., Any] = body.__call__  # not a submodule: the state would contain each weight twice

    @property
    def hidden_size(self) -> int:
        """E"""
        return int(self.model.config.hidden_size)

    @property
    def embedding(self) -> Tensor:
        """[V, E], unscaled"""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    def rows(
        self,
        ids: Tensor,
        positions: Tensor,
        visible: Tensor,
        *,
        key_positions: Tensor | None = None,
        cache: DynamicCache | None = None,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Return hidden rows [B, R, E], after the final norm, of `ids` [B, R] at `positions` [B, R].

        `visible` [B, R, K] bool; `key_positions` [B, K], if keys are not the rows themselves. Keys of `cache` come
        first, and the rows' own are appended to it. `inputs` [B, R, E] replace the embeddings of `ids`.
        """
        keys = positions if key_positions is None else key_positions
        arguments = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": self._masks(visible, positions, keys),
            "past_key_values": cache,
            "use_cache": cache is not None,
        }
        self._entering = inputs
        try:
            hidden: Tensor = self._body(**arguments).last_hidden_state
        finally:
            self._entering = None
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., V] float32, with the family's scale and soft cap."""
        logits = self.model.get_output_embeddings()(hidden).float() * self._scale
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., E], unscaled"""
        return F.embedding(ids, self.embedding)

    def _enter(self, _: nn.Module, rows: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hook before the first layer: replace the (scaled) embeddings by `inputs`."""
        if self._entering is None:
            return rows, keywords
        if rows:
            return (self._entering.to(rows[0].dtype), *rows[1:]), keywords
        return rows, keywords | {"hidden_states": self._entering.to(keywords["hidden_states"].dtype)}

    def _masks(self, visible: Tensor, positions: Tensor, keys: Tensor) -> Any:
        """Return the attention masks for transformers: one, or one per layer type."""
        if not self._windows:
            return self._mask(visible)
        near = {
            kind: self._mask(visible if window is None else visible & (positions[..., None] - keys[:, None] < window))
            for kind, window in self._windows.items()
        }
        return near if len(near) > 1 or "full_attention" in near else next(iter(near.values()))

    def _mask(self, visible: Tensor) -> Tensor | BlockMask:
        """Convert `visible` [B, R, K] bool to the form of the model's attention function."""
        if self.attention == "flex_attention":
            return block_mask(visible)
        if self.attention == "eager":  # adds it to the scores
            scores = torch.zeros(visible.shape, dtype=self.embedding.dtype, device=visible.device)
            return scores.masked_fill(~visible, torch.finfo(scores.dtype).min)[:, None]
        return visible[:, None]


def check_is_trainable(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if the body is not built like Llama's. Works on a meta model, without weights."""
    if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList):
        raise UnsupportedModel(
            f"Models of type {model.config.model_type!r} cannot be trained: training puts rows at free positions, in "
            f"decoders of the Llama kind, and {type(model.base_model).__name__} has no list of `layers` right in its "
            "body. Take a model that has, such as Llama, Mistral, Qwen, Gemma or Phi."
        )


def attention_for(model: PreTrainedModel) -> str:
    """Return the attention function of transformers to use: it must accept our masks and fit the model family.

    Flash attention takes no masks; sdpa leaves out a soft cap of the scores; flex_attention, fastest on a GPU, has no
    dropout.
    """
    config, own = model.config, str(model.config._attn_implementation)
    has_dropout = bool(getattr(config, "attention_dropout", None))
    has_softcap = getattr(config, "attn_logit_softcapping", None) is not None
    if model._supports_flex_attn and not has_dropout and (own == "flex_attention" or torch.cuda.is_available()):
        return "flex_attention"
    return "sdpa" if model._supports_sdpa and not has_softcap and own != "eager" else "eager"


def block_mask(visible: Tensor) -> BlockMask:
    """Convert `visible` [B, R, K] bool for flex_attention, which skips blocks of 128 without visible keys."""

    def sees(text: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen: Tensor = visible[text, row, key]
        return seen

    texts, rows, keys = visible.shape
    return create_block_mask(sees, texts, None, rows, keys, device=str(visible.device))


def _windows(config: Any) -> dict[str, int | None]:
    """Return the attention window of each layer type; empty if all layers have full attention."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window:
        return {kind: window if kind == "sliding_attention" else None for kind in (*kinds, "full_attention")}
    if window and not kinds and getattr(config, "use_sliding_window", True):
        return {"sliding_attention": int(window)}
    return {}
