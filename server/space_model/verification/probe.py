"""The check at load: every part of a model computes what transformers computes, but for rounding.

Each part gets the same rows three times: transformers' module in a wide dtype (float32; float64 if float32 is served),
transformers' module in the serving dtype, and ours. With e the root mean square of a part's deviation from the wide
result, relative to each row's size:

    e(ours)² ≤ (FACTOR·e(transformers))² + u² + K·u₃₂²/6

Both round the same intermediate results to the serving dtype, of unit roundoff u, at independent places; the squares of
independent rounding errors add up. An implementation that rounds once more for each operation (a sum or a product that
the other fuses) at most doubles the square: a factor of √2. Another √2 is for the estimate: the mean square over N
independent rows has a standard error of √(2/N), about 0.29 for N = 24 even if all errors of a row are correlated. u² is
one more rounding of the result, if transformers rounds nothing. The last term is another order of summation: K terms
that are added one by one in float32 are off by u₃₂²·K/6 of the square of their sum, because partial sums grow as √k and
each is rounded by u₃₂/√3 at most.

A few rows in which rounding happens to matter much decide a mean square, and hide a fault in all others. So the same
holds for the geometric mean over the rows, with a smaller factor and without the √2 for the estimate: logarithms of
rows differ little.

    Σ log e(ours)² ≤ Σ log((TYPICAL_FACTOR·e(transformers))² + u² + K·u₃₂²/6)

Its factor is measured: over 208 random models of 18 families in each of seven formats, the geometric means of ours are
0.79 to 1.03 times transformers' in the middle of each kind of part, and 1.13 times at most (in float32 1.34 times, by
another order of summation). One rounding more for each operation is √2 on top of 1.13: 1.6. None of the models comes
nearer to this bound than 0.68 times it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from space_kernels.fp8 import as_kept, to_keep, widened
from torch import Tensor
from transformers import PreTrainedModel

from space_model.checkpoint import family
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.model_error import UnsupportedModel
from space_model.model_facts import LayerKV, ModelFacts
from space_model.networks.network import Network, PagedKV, StateRoom
from space_model.networks.transformers_network import TransformersNetwork
from space_model.verification.layer_reference import Made, Reference, first_of_kinds, with_sources

FACTOR = 2.0  # allowed ratio of a part's deviation to transformers', apart from the two terms above
TYPICAL_FACTOR = 1.6  # the same for geometric means over the rows

_BLOCK = 16
_ONE = StateRoom(1, 0)
_HEAD_ROWS = 8  # whose logits of the whole vocabulary are in memory at a time


@dataclass(frozen=True)
class Difference:
    """One part's deviation from the wide result, relative to the rows' size: root mean square over the rows, or
    geometric mean, whichever is nearer to its bound."""

    part: str
    ours: float
    usual: float  # transformers'
    bound: float

    @property
    def is_rounding(self) -> bool:
        """Return whether rounding explains the difference; False for NaN."""
        return self.ours <= self.bound


@torch.inference_mode()
def check_attention(model: PreTrainedModel, facts: ModelFacts) -> None:
    """Raises UnsupportedModel unless every kind of layer uses transformers' AttentionInterface, over the KV cache."""
    batch = ForwardBatch.build([Segment(range(4), 0, [0])], block_size=_BLOCK, mask_ids=(), device=facts.device)
    network, kv = TransformersNetwork(model.base_model), PagedKV.allocate(facts, 1, _BLOCK, room=_ONE, in_turn=True)
    _, layers = family.decoder_layers(model.base_model)
    hidden = network.enter(batch)
    for number in with_sources(first_of_kinds(list(layers)), facts):
        network.layer(number, hidden, batch, kv)


@torch.inference_mode()
def check_parts(network: Network, logits: Callable[[Tensor], Tensor], facts: ModelFacts, wanted: Reference) -> None:
    """Raises UnsupportedModel naming the first part that exceeds its bound. `logits`: the head, [N, hidden] -> logits;
    `wanted`: transformers' results for the same rows and weights."""
    found = list(differences(network, logits, facts, wanted))
    amiss = [one for one in found if not one.is_rounding]
    if amiss:
        first, form = amiss[0], str(facts.dtype).removeprefix("torch.")
        if not math.isfinite(first.usual):
            raise UnsupportedModel(
                f"{facts.name} cannot be served: {first.part} is not finite (NaN or infinite) in transformers itself, "
                f"computed in {form}. Fetch the config.json of the original checkpoint; if it is, use another "
                "--dtype."
            )
        raise UnsupportedModel(
            f"{facts.name} would be served wrong: {first.part} computes something else here than in transformers. It "
            f"is off by {first.ours:.3g} of its size, transformers' own in {form} by {first.usual:.3g}, and rounding "
            f"explains {first.bound:.3g} ({len(amiss)} of {len(found)} parts differ). Its family does something that "
            f"this server does not do; please report it with the checkpoint's config.json."
        )


def differences(
    network: Network, logits: Callable[[Tensor], Tensor], facts: ModelFacts, wanted: Reference
) -> Iterator[Difference]:
    """Yield each part's difference, in the order of computation."""
    count, start = len(wanted.rows.ids), wanted.rows.start
    pages = list(range(-(-(start + count) // _BLOCK)))[::-1]
    batch = ForwardBatch.build(
        [Segment(wanted.rows.ids, start, pages)], block_size=_BLOCK, mask_ids=(), device=facts.device
    )
    kv = PagedKV.allocate(facts, len(pages), _BLOCK, room=_ONE, in_turn=True)
    comparison = _Comparison(facts, wanted)

    def padded(rows: Tensor) -> Tensor:
        return torch.cat([rows, rows.new_zeros(len(batch.ids) - count, rows.shape[1])])

    yield comparison.compare("the embedding", network.enter(batch)[:count], wanted.entry)
    for layer in wanted.layers:
        made: dict[str, Made] = {}
        context: list[Tensor] = []
        if layer.keys is not None and layer.values is not None:
            made = {"keys": layer.keys, "values": layer.values}
            context = [*wanted.contexts.of(layer.keys.exact, layer.values.exact)]
            if facts.latent_dim is not None:  # transformers caches the latent as keys, and the rotated part as values
                made = {"keys": layer.keys.beside(layer.values)}
                context = [torch.cat(context, dim=-1)]
        here = facts.kv_of(layer.number)
        for what, one in made.items():
            size = here.value_dim if what == "values" else here.head_dim
            refuse_other_heads(f"Layer {layer.number}", one.exact.shape, here._replace(head_dim=size))
        kept = dict(zip(made, kv.layer(layer.number), strict=False))
        _fill([*kept.values()], context, pages)
        if layer.before is not None:
            assert kv.states is not None
            layer.before.fill(kv.states.layers[layer.number], 0, 0)
            kv.states.put(0, start - 1)
        out = network.layer(layer.number, padded(layer.given), batch, kv)[:count]
        name = f"layer {layer.number} of {facts.num_layers}"
        for what, stored in kept.items():
            yield comparison.compare(f"{name} ({what})", _read(stored, pages, start, count), made[what], kept=True)
        if layer.inputs_left is not None:
            assert kv.states is not None
            memory = kv.states.layers[layer.number]
            yield comparison.compare(f"{name} (inputs of the convolution)", memory.inputs[0, 1], layer.inputs_left)
            if memory.state is not None and layer.states_left is not None:
                yield comparison.compare(f"{name} (recurrent state)", memory.state[0, 1], layer.states_left)
        yield comparison.compare(name, out, layer.out, is_routed=layer.is_routed)
    yield comparison.compare("the final norm", network.norm(padded(wanted.norm_given))[:count], wanted.norm)
    if wanted.logits is not None:
        few = torch.split(wanted.head_given, _HEAD_ROWS)
        found = torch.cat([logits(rows)[:, wanted.head_ids] for rows in few])
        yield comparison.compare("the output head", found, wanted.logits)


def refuse_other_heads(part: str, shape: Sequence[int], layer: LayerKV) -> None:
    """Raises UnsupportedModel unless keys and values [G, R, D] have the heads of config.json."""
    if (shape[0], shape[2]) != (layer.kv_heads, layer.head_dim):
        raise UnsupportedModel(
            f"{part} has {shape[0]} heads of keys or values, of size {shape[2]}, where config.json says "
            f"{layer.kv_heads} of size {layer.head_dim} (num_key_value_heads, head_dim): pages hold keys and values of "
            "one size."
        )


class _Comparison:
    def __init__(self, facts: ModelFacts, wanted: Reference) -> None:
        self._unit, self._unit_kept = (torch.finfo(dtype).eps / 2 for dtype in (facts.dtype, facts.kv_dtype))
        self._sum_squared = wanted.longest_sum * (torch.finfo(torch.float32).eps / 2) ** 2 / 6

    def compare(
        self, part: str, found: Tensor, made: Made, *, kept: bool = False, is_routed: bool = False
    ) -> Difference:
        """`kept`: stored in the KV cache; `is_routed`: rounding may select other experts for a few rows, so a quarter
        is left out of the mean square."""
        ours, usual = _off(found, made.exact), _off(made.usual, made.exact)
        more = (self._unit_kept if kept else self._unit) ** 2 + self._sum_squared
        typical = Difference(part, *map(_geometric, (ours, usual, TYPICAL_FACTOR**2 * usual + more)))
        if is_routed:
            most = -(-len(ours) * 3 // 4)
            ours, usual = ours.sort().values[:most], usual.sort().values[:most]
        sizes = (float(one.mean()) ** 0.5 for one in (ours, usual, FACTOR**2 * usual + more))
        return max(Difference(part, *sizes), typical, key=lambda one: one.ours / one.bound)


def _geometric(squares: Tensor) -> float:
    """[R] -> the root of their geometric mean."""
    return math.exp(float(squares.clamp_min(1e-60).log().mean()) / 2)


def _off(found: Tensor, exact: Tensor) -> Tensor:
    """[…, R, n] -> [R]: the mean square of the difference, relative to that of the exact row."""
    rows, right = (x.double().movedim(-2, 0).flatten(1) for x in (found, exact))
    return (rows - right).pow(2).mean(1) / right.pow(2).mean(1).clamp_min(1e-60)


def _fill(stored: Sequence[Tensor], context: Sequence[Tensor], pages: list[int]) -> None:
    """Store keys and values [G, P, D] of the positions from 0 on."""
    for kept, rows in zip(stored, context, strict=True):
        heads, length, width = rows.shape
        used = -(-length // _BLOCK)
        padded = torch.cat([rows, rows.new_zeros(heads, used * _BLOCK - length, width)], dim=1)
        blocks = padded.view(heads, used, _BLOCK, width).transpose(0, 1)
        as_kept(kept)[pages[:used]] = to_keep(blocks, kept.dtype)


def _read(kept: Tensor, pages: list[int], start: int, count: int) -> Tensor:
    """Return [G, count, D] of the positions from `start` on."""
    positions = torch.arange(start, start + count, device=kept.device)
    blocks = torch.tensor(pages, device=kept.device)[positions // _BLOCK]
    return widened(as_kept(kept)[blocks, :, positions % _BLOCK]).transpose(0, 1)
