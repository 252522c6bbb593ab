"""Chooses mask ids and initialises their embeddings, for a model that is fully trained."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from space_train.train_plan import InvalidPlan

MOST_NEW_IDS = 64
"""Most ids a vocabulary may grow by: a mask id far outside is taken for a typing error."""


def mask_ids(
    model: PreTrainedModel, num_masks: int, *, shared: bool, given: list[int] | None, tokenizer_size: int
) -> list[int]:
    """Return one id per mask (a shared one repeated): those given, else unused rows of the vocabulary, else new rows.

    `tokenizer_size`: the tokenizer does not use ids from there on. The embedding grows in place if needed.
    """
    wanted = 1 if shared else num_masks
    size = len(model.get_input_embeddings().weight)
    if given:
        if len(given) not in {1, num_masks}:
            raise InvalidPlan(f"{num_masks} masks need 1 or {num_masks} mask ids; got {len(given)}.")
        room = max(size, tokenizer_size) + MOST_NEW_IDS
        outside = [number for number in given if not 0 <= number < room]
        if outside:
            raise InvalidPlan(
                f"Mask id {outside[0]} is outside the vocabulary of {size}, which grows by at most {MOST_NEW_IDS}. "
                "Leave --mask-ids out."
            )
        if max(given) >= size:
            model.resize_token_embeddings(max(given) + 1, mean_resizing=False)
        return (given * num_masks)[:num_masks]
    first = tokenizer_size
    if first + wanted > size:
        model.resize_token_embeddings(first + wanted, mean_resizing=False)
    chosen = list(range(first, first + wanted))
    return (chosen * num_masks)[:num_masks]


def start_masks(model: PreTrainedModel, ids: list[int], generator: torch.Generator) -> None:
    """Initialise the masks' embeddings: the mean of all, plus noise of half their standard deviation."""
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        mean, spread = embedding_spread(model)
        for number in dict.fromkeys(ids):
            noise = torch.randn(weight.shape[1], generator=generator).to(weight.device)
            weight[number] = (mean + 0.5 * spread * noise).to(weight.dtype)


def embedding_spread(model: PreTrainedModel) -> tuple[torch.Tensor, float]:
    """Return the mean row [E] of the embedding and the standard deviation of its values."""
    weight = model.get_input_embeddings().weight.detach().float()
    return weight.mean(0), float(weight.std())


class _Entered(Exception):
    """Raised at the first layer to skip the rest of the pass."""


def input_scale(model: PreTrainedModel) -> float:
    """Return the factor by which the model scales embeddings before the first layer."""
    weight = model.get_input_embeddings().weight.detach()
    longest = weight.float().norm(dim=1).argmax()
    entered: list[torch.Tensor] = []

    def stop(_: nn.Module, rows: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        entered.append(rows[0] if rows else keywords["hidden_states"])
        raise _Entered

    hook = model.base_model.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad(), contextlib.suppress(_Entered):
            model.base_model(input_ids=longest.view(1, 1), use_cache=False)
    finally:
        hook.remove()
    return float(entered[0].float().norm() / weight[longest].float().norm())
