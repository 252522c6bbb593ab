"""A transformers causal language model as training sees it: rows whose position and visibility are free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from space_model import family
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel


class Decoder(nn.Module):
    """The model's body, output head and embedding.

    Letters: `B` texts, `R` rows, `K` keys, `E` hidden size, `V` vocabulary.
    """

    def __init__(self, model: PreTrainedModel, *, compile: bool = False) -> None:
        super().__init__()
        self.model = model
        config = model.config
        self._scale, self._softcap = family.head_scale(config), family.head_softcap(config)
        self._windows = _windows(config)
        self._first_layer: nn.Module = model.base_model.layers[0]
        body: Callable[..., Any] = model.base_model
        self._body = torch.compile(body, dynamic=False) if compile else body

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
        """Hidden rows [B, R, E], after the final norm, of `ids` [B, R] at `positions` [B, R].

        `visible` [B, R, K] bool; `key_positions` [B, K], where keys are not the rows themselves. With a `cache` its
        keys come first, and the rows' own are added to it. `inputs` [B, R, E] enter the first layer in place of the
        embeddings of `ids`.
        """
        keys = positions if key_positions is None else key_positions
        arguments = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": self._masks(visible, positions, keys),
            "past_key_values": cache,
            "use_cache": cache is not None,
        }
        if inputs is None:
            hidden: Tensor = self._body(**arguments).last_hidden_state
            return hidden
        entering = inputs

        def enter(_: nn.Module, rows: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if rows:
                return (entering.to(rows[0].dtype), *rows[1:]), keywords
            return rows, keywords | {"hidden_states": entering.to(keywords["hidden_states"].dtype)}

        handle = self._first_layer.register_forward_pre_hook(enter, with_kwargs=True)
        try:
            hidden = self._body(**arguments).last_hidden_state
        finally:
            handle.remove()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., V] float32, with the family's scale and soft cap."""
        logits = self.model.get_output_embeddings()(hidden).float() * self._scale
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., E], unscaled"""
        return F.embedding(ids, self.embedding)

    def _masks(self, visible: Tensor, positions: Tensor, keys: Tensor) -> Any:
        """What transformers takes: one mask, or one for each kind of layer."""
        whole = visible[:, None]
        if not self._windows:
            return whole
        near = {
            kind: whole if window is None else whole & (positions[:, None, :, None] - keys[:, None, None, :] < window)
            for kind, window in self._windows.items()
        }
        return near if len(near) > 1 or "full_attention" in near else next(iter(near.values()))


def _windows(config: Any) -> dict[str, int | None]:
    """Window of each kind of layer; empty where every layer sees everything."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window:
        return {kind: window if kind == "sliding_attention" else None for kind in (*kinds, "full_attention")}
    if window and not kinds and getattr(config, "use_sliding_window", True):
        return {"sliding_attention": int(window)}
    return {}
