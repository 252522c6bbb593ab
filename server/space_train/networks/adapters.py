"""What is trained beside a frozen base: gated adapters on its linears, the masks' inputs, and the draft head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from space_model.adapters import GatedLora
from space_model.checkpoint.family import decoder_layers
from space_model.networks.latent_heads import is_absorbed
from torch import Tensor, nn
from transformers import PreTrainedModel

from space_train.networks.frozen_layers import is_frozen_linear, matmul_dtype
from space_train.train_plan import HeadForm


class AdaptedLinear(nn.Module):
    """W·x, plus scale·B·A·x while the gate is on."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, gate: Gate) -> None:
        super().__init__()
        self.linear, self.scale, self.gate = linear, scale, gate
        self.a = nn.Parameter(torch.zeros(rank, linear.in_features, device=linear.weight.device))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank, device=linear.weight.device))

    @property
    def weight(self) -> Tensor:
        """The linear's weight [out, in]; the router of Hunyuan's experts reads its dtype."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.gate.is_on and is_frozen_linear(self.linear):
            return self._frozen(x)
        y: Tensor = self.linear(x)
        if not self.gate.is_on:
            return y
        # A frozen base may be in half precision; the adapters are in float32.
        return y + self.scale * F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))

    def _frozen(self, x: Tensor) -> Tensor:
        dtype, bias = matmul_dtype(x), self.linear.bias
        base = x.to(dtype), self.linear.weight.to(dtype), None if bias is None else bias.to(dtype)
        y: Tensor = _FrozenAdapted.apply(*base, self.a, self.b, self.scale)  # type: ignore[no-untyped-call]
        return y


class _FrozenAdapted(torch.autograd.Function):
    """W·x + scale·B·A·x with a frozen W. The low-rank matmul adds to the output in place, and x is saved once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            a, b = a.to(x.dtype), (scale * b).to(x.dtype)
            rows = x.flatten(0, -2)
            low = rows @ a.T
            y = F.linear(rows, weight, bias).addmm_(low, b.T)
        ctx.save_for_backward(rows, low, weight, a, b)
        ctx.scale = scale
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        rows, low, weight, a, b = ctx.saved_tensors
        grad_y = grad_output.reshape(-1, grad_output.shape[-1])
        grad_low = grad_y @ b
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_y @ weight).addmm_(grad_low, a).view(*grad_output.shape[:-1], -1)
        grad_a = (grad_low.T @ rows).float()
        grad_b = (grad_y.T @ low).float().mul_(ctx.scale)
        return grad_x, None, None, grad_a, grad_b, None


class Gate:
    """Switch that is on while the rows of the current pass are masks."""

    def __init__(self) -> None:
        self.is_on = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Switch the adapters on inside the block."""
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


class Adapters(nn.Module):
    """The adapters of one model, and the input embeddings of its masks."""

    def __init__(self, model: PreTrainedModel, *, rank: int, alpha: float, num_masks: int) -> None:
        """Put an adapter on every linear of the decoder layers of `model`, in place, but those that latent attention
        (MLA) applies to queries instead of keys, and routers that are linears with more to do (Phi-MoE)."""
        super().__init__()
        self.gate, self.rank, self.alpha = Gate(), rank, alpha
        hidden, device = int(model.config.hidden_size), model.get_input_embeddings().weight.device
        self.mask_embeddings = nn.Parameter(torch.zeros(num_masks, hidden, device=device))
        layers = f"{model.base_model_prefix}.{decoder_layers(model.base_model)[0]}."
        linears = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and not hasattr(module, "top_k")
            if name.startswith(layers) and not is_absorbed(model, name)
        }
        self._adapted: dict[str, AdaptedLinear] = {}
        for name, linear in linears.items():
            parent, _, leaf = name.rpartition(".")
            adapted = AdaptedLinear(linear, rank, alpha / rank, self.gate)
            setattr(model.get_submodule(parent), leaf, adapted)
            self._adapted[name] = adapted
        self.pairs = nn.ParameterList([part for adapted in self._adapted.values() for part in (adapted.a, adapted.b)])

    def initialise(self, generator: torch.Generator, mean: Tensor, spread: float) -> None:
        """Initialise A randomly, B to zero, and mask inputs near `mean` [E]."""
        with torch.no_grad():
            for adapted in self._adapted.values():
                noise = torch.randn(adapted.a.shape, generator=generator)
                adapted.a.copy_(noise * adapted.a.shape[1] ** -0.5)
            noise = torch.randn(self.mask_embeddings.shape, generator=generator)
            self.mask_embeddings.copy_(mean + spread * noise.to(mean.device))

    def export(self, dtype: torch.dtype) -> GatedLora:
        """Return the adapter in the form used for serving."""
        pairs = {
            name: (adapted.a.detach().to(dtype), adapted.b.detach().to(dtype))
            for name, adapted in self._adapted.items()
        }
        masks = self.mask_embeddings.detach().to(dtype)
        return GatedLora(mask_embeddings=masks, pairs=pairs, scale=self.alpha / self.rank)

    def take(self, adapter: GatedLora) -> None:
        """Load the weights of a trained adapter, rescaled to this alpha."""
        with torch.no_grad():
            self.mask_embeddings.copy_(adapter.mask_embeddings)
            for name, (a, b) in adapter.pairs.items():
                self._adapted[name].a.copy_(a)
                self._adapted[name].b.copy_(b * (adapter.scale * self.rank / self.alpha))


class DraftHead(nn.Module):
    """The hidden row of a mask, corrected by the token before its target. mlp: h' = h + W2·silu(W1·[h ; s·e(previous)])
    low-rank: h' = h + W2·W1·(s·e(previous))"""

    def __init__(
        self, hidden_size: int, width: int = 384, embedding_scale: float = 8.0, form: HeadForm = HeadForm.MLP
    ) -> None:
        super().__init__()
        inputs = 2 * hidden_size if form is HeadForm.MLP else hidden_size
        self.w1 = nn.Parameter(torch.zeros(width, inputs))
        self.w2 = nn.Parameter(torch.zeros(hidden_size, width))
        self.embedding_scale, self.form = embedding_scale, form

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise W1 randomly and W2 to zero, so that the head starts as the identity."""
        with torch.no_grad():
            self.w1.copy_(torch.randn(self.w1.shape, generator=generator) * self.w1.shape[1] ** -0.5)
            self.w2.zero_()

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Correct `hidden` [..., E] (after the final norm) by the embedding `previous` [..., E]; returns [..., E]."""
        scaled = self.embedding_scale * previous.to(hidden.dtype)
        w1, w2 = self.w1.to(hidden.dtype), self.w2.to(hidden.dtype)
        if self.form is HeadForm.LOW_RANK:
            return hidden + F.linear(F.linear(scaled, w1), w2)
        return hidden + F.linear(F.silu(F.linear(torch.cat((hidden, scaled), dim=-1), w1)), w2)
