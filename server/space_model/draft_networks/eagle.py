"""EAGLE heads as draft networks: one decoder layer that reads hidden states of the model and the ids behind them.

Row p reads the id of position p+1 and the state s of position p, and predicts the id of position p+2. EAGLE-3 (arXiv
2503.01840) reads the inputs of three of the model's layers:

    s = fc · [h2 ; h(L/2) ; h(L-3)]        x = [input_norm(e(id p+1)) ; hidden_norm(s)]
    y = s + attention(x)                   z = y + mlp(post_norm(y))        logits = head · norm(z)

With `norm_before_residual`, y begins with hidden_norm(s). Queries, keys and values have 2·hidden inputs. EAGLE-1 and
EAGLE-2 (arXiv 2401.15077) read the last state, after the model's norm, and have no other norm than post_norm:

    x = fc · [e(id p+1) ; s]               y = x + attention(x)             logits = the model's head · z

Further drafts read z in place of s, as in vLLM's llama_eagle3.py and llama_eagle.py (2025) and in SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from space_kernels.attention.attention import AttentionSpec
from space_kernels.dispatch import Ops, ops_for
from space_kernels.layers.layers import HeadCounts, HeadNorm, angles
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from space_model.draft_network import TappedStates
from space_model.draft_networks.eagle_files import FLAG, EagleFiles, ModelSizes
from space_model.draft_networks.place import check_place
from space_model.geometry.forward_batch import ForwardBatch, Segment
from space_model.heads import OutputHead
from space_model.model_error import InvalidSetting, UnsupportedModel
from space_model.model_facts import HeadFacts
from space_model.networks.fixed_rope import fix_angles
from space_model.networks.llama_parts import Norm
from space_model.networks.network import DraftKV, PagedKV, Taps
from space_model.space_model import SpaceModel

NUM_DRAFTS = 5
"""Most drafts of a step, as many as the paper's heads were measured with: a step verifies up to 6 rows a sequence."""


class EagleLayer(nn.Module):
    """The decoder layer: attention over pages, and a gated MLP."""

    def __init__(self, files: EagleFiles, take: Callable[[Tensor], Tensor], ops: Ops, window: int) -> None:
        """`take`: converts a tensor of the files; `window`: the positions that it is used for."""
        super().__init__()
        config = files.layer
        self.heads, self.dim = HeadCounts(config.num_attention_heads, config.num_key_value_heads), files.head_dim
        self._ops = ops

        def joined(names: Sequence[str]) -> nn.Module:
            found = [(files.read(f"{name}.weight"), files.read(f"{name}.bias")) for name in names]
            weight = torch.cat([weight for weight, _ in found if weight is not None])
            biases = [bias for _, bias in found if bias is not None]
            return ops.linear(take(weight), take(torch.cat(biases)) if biases else None)

        self._query_key_value = joined([f"self_attn.{name}_proj" for name in "qkv"])
        self._output = joined(["self_attn.o_proj"])
        self._gate_up, self._down = joined(["mlp.gate_proj", "mlp.up_proj"]), joined(["mlp.down_proj"])
        weight = files.read("post_attention_layernorm.weight")
        assert weight is not None
        self._norm = Norm(take(weight), config.rms_norm_eps)
        query, key = files.read("self_attn.q_norm.weight"), files.read("self_attn.k_norm.weight")
        if query is not None and key is not None:
            self._head_norm: HeadNorm | None = HeadNorm(take(query), take(key), config.rms_norm_eps)
        else:
            self._head_norm = None
        rotary = LlamaRotaryEmbedding(config)
        fix_angles(rotary, window, files.name, switches=False)
        self._frequencies, self._scaling = rotary.inv_freq.float(), float(rotary.attention_scaling)
        self._attention = AttentionSpec(self.dim**-0.5, None)

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """[R, hidden]: the layer's output, from the input x of attention and the sum that it is added to. Stores the
        chain rows' keys and values in `kv`."""
        ops, pages = self._ops, kv.layer(0)
        turns = angles(batch.positions, self._frequencies, self._scaling)
        fused = self._query_key_value(x)
        none = batch.ids[:0]  # attention stores them
        qkv = ops.rotary_store(fused, turns, pages, none, self.heads, self._head_norm)
        attended = ops.space_attention(qkv, pages, batch.rows, self._attention)
        y, residual = ops.add_rms_norm(self._output(attended.flatten(1)), residual, self._norm.weight, self._norm.eps)
        out: Tensor = self._down(ops.swiglu(self._gate_up(y)))
        return out + residual


class EagleHead:
    """An EAGLE head as a DraftNetwork."""

    lag = 1

    def __init__(self, files: EagleFiles, model: SpaceModel) -> None:
        """`model`: it drafts for. Raises InvalidSetting for a head of another model."""
        facts, self.name = model.facts, files.name
        files.check(ModelSizes(facts.name, facts.hidden_size, facts.vocab_size))
        ops = ops_for(facts.device, dtype=facts.dtype)

        def take(tensor: Tensor) -> Tensor:
            return tensor.to(facts.device, facts.dtype)

        def norm(name: str) -> Norm | None:
            weight = files.read(f"{name}.weight")
            return None if weight is None else Norm(take(weight), files.layer.rms_norm_eps)

        fuse, bias, embedding = files.read("fc.weight"), files.read("fc.bias"), files.read("embed_tokens.weight")
        assert fuse is not None
        self._fuse = ops.linear(take(fuse), None if bias is None else take(bias))
        self._layer = EagleLayer(files, take, ops, facts.window)
        self._own_embedding = None if embedding is None else take(embedding)
        self._model = model
        self._norms = [norm(name) for name in ("input_layernorm", "hidden_norm", "norm")]
        self._normed_residual = files.norm_before_residual
        self._ids = files.draft_ids(facts.vocab_size)
        head = files.read("lm_head.weight") if files.generation == 3 else None
        self._head = None if head is None else OutputHead(take(head), None, keeps_rows=False)
        self._dtype, self._device = facts.dtype, facts.device
        self.facts = HeadFacts(NUM_DRAFTS, kind="eagle")
        self.window, self.vocab_size, self.width = facts.window, facts.vocab_size, files.hidden_size
        cached = 2 * self._layer.heads.kv * self._layer.dim + self.width
        self.kv_bytes_per_token = cached * facts.dtype.itemsize
        layers = files.tapped(facts.num_layers)
        self.tapped = TappedStates(layers, self._fused) if layers else None

    def _fused(self, states: Tensor) -> Tensor:
        """[N, 3, the model's hidden] -> [N, hidden]"""
        out: Tensor = self._fuse(states.flatten(1))
        return out

    def allocate_kv(self, num_blocks: int, block_size: int) -> DraftKV:
        """Allocate num_blocks · block_size slots, each with a state."""
        shape = num_blocks, self._layer.heads.kv, block_size, self._layer.dim
        keys, values = (torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(2))
        states = torch.zeros(num_blocks, block_size, self.width, dtype=self._dtype, device=self._device)
        return DraftKV.of(PagedKV([keys], [values], num_blocks, block_size), states)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: PagedKV, states: Tensor | None) -> Tensor:
        """[R, hidden]: the layer's output, from the ids of the next positions and the states [R, hidden]. Stores the
        rows' keys and values in `kv`."""
        assert states is not None
        own = self._own_embedding
        embedded = self._model.embed(batch.ids) if own is None else nn.functional.embedding(batch.ids, own)
        input_norm, hidden_norm, _ = self._norms
        if input_norm is None or hidden_norm is None:
            x: Tensor = self._fuse(torch.cat([embedded, states], dim=1))
            return self._layer(x, x, batch, kv)  # type: ignore[no-any-return]
        normed = hidden_norm(states)
        x = torch.cat([input_norm(embedded), normed], dim=1)
        return self._layer(x, normed if self._normed_residual else states, batch, kv)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, D] float32, of its draft vocabulary."""
        norm = self._norms[2]
        normed = hidden if norm is None else norm(hidden)
        return self._model.logits(normed) if self._head is None else self._head.logits(normed)

    def widened(self, logits: Tensor, vocab_size: int) -> Tensor:
        """[N, D] -> [N, vocab_size]: -inf outside the draft vocabulary."""
        if self._ids is None:
            return logits
        return logits.new_full((len(logits), vocab_size), float("-inf")).index_copy_(1, self._ids, logits)

    def best(self, logits: Tensor) -> Tensor:
        """[N, D] -> [N] int64: the most probable ids."""
        best = logits.argmax(dim=1)
        return best if self._ids is None else self._ids[best]


def load_eagle(files: EagleFiles, model: SpaceModel) -> EagleHead:
    """Load the head that drafts for `model`. Raises ModelError."""
    check_place(model.facts.device, model.facts.num_ranks, FLAG)
    head = EagleHead(files, model)
    if head.tapped is not None:
        _check_taps(head.tapped.layers, model, files.name)
    return head


def _check_taps(layers: tuple[int, ...], model: SpaceModel, name: str) -> None:
    """Compute one row, to see that the model's layers have the inputs that are wanted. Raises InvalidSetting."""
    batch = ForwardBatch.build([Segment([0], 0, [0])], block_size=1, mask_ids=(), device=model.facts.device)
    try:
        with torch.inference_mode():
            model.network.forward(batch, model.allocate_kv(1, 1), Taps.of(layers, batch, model.facts))
    except UnsupportedModel as error:
        raise InvalidSetting(f"{FLAG} {name}: {error}") from error
