"""Loads one tensor-parallel rank's part of a model, slice by slice, behind the same interfaces as a whole model."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from space_kernels.dispatch import Ops
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from space_model.adapters import Drafting
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.checkpoint.text_part import text_name, text_names
from space_model.checkpoint.unused_tensors import refuse_unused
from space_model.checkpoint.weight_files import JoinedRows, WeightFiles, WeightStream, refuse_odd_values, send
from space_model.heads import OutputHead, ShardedHead
from space_model.loading.meta_tensors import MetaModel
from space_model.loading.whole_model import log_dense, open_weights, without_quantization
from space_model.model_error import UnsupportedModel
from space_model.model_facts import ModelFacts, Ranks
from space_model.networks.llama_network import compact_network
from space_model.networks.tensor_parallel import BY_COLUMNS, BY_ROWS, LaterRanks, Share, SummedLinear
from space_model.networks.transformers_network import ATTENTION_NAME, TransformersNetwork, attach, make_row_invariant
from space_model.space_model import SpaceModel
from space_model.verification.layer_reference import reference
from space_model.verification.probe import check_attention, check_parts

_log = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def read_part(
    checkpoint: Checkpoint, config: PreTrainedConfig, share: Share, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Load the rank's weights into a transformers model of the part's size; the head stays on the meta device."""
    part = share.of_config(without_quantization(config))
    with MetaModel(), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(part)
    base = model.base_model
    base.rotary_emb = type(base.rotary_emb)(config=part).to(device)  # its angles are computed, not loaded
    parameters = dict(base.named_parameters())
    joined = JoinedRows({path: len(parameter) for path, parameter in parameters.items()}.get)
    with open_weights(checkpoint) as files:
        stream = WeightStream(files, device, joined=joined)
        names = _names(checkpoint, config, files)
        read = {names.get(HEAD, HEAD)}  # which is read separately
        for path, parameter in parameters.items():
            name = _name(names, f"{model.base_model_prefix}.{path}")
            read.add(name)
            weight = _part(files, name, share)
            if weight.shape != parameter.shape:
                raise UnsupportedModel(
                    f"{path} of {checkpoint.name} has a part of {tuple(weight.shape)} for rank {share.rank}; its "
                    f"config says {tuple(parameter.shape)}."
                )
            parent, _, last = path.rpartition(".")
            fitted = nn.Parameter(stream.put(path, weight, dtype), requires_grad=False)
            setattr(base.get_submodule(parent), last, fitted)
        refuse_unused(checkpoint, model, set(files.names) - read | set(files.unused()))
        refuse_odd_values(checkpoint.name, base)
        _log.info("rank %d of %d read %d bytes of weights", share.rank, share.size, files.num_bytes)
        log_dense(checkpoint, files, base.parameters(), dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    model.requires_grad_(False)
    return model.eval()


def _names(checkpoint: Checkpoint, config: PreTrainedConfig, files: WeightFiles) -> dict[str, str]:
    """Return the files' names by those of the served model."""
    renames = text_names(checkpoint.config, config)
    return {text_name(name, renames): name for name in files.names}


def _name(names: Mapping[str, str], path: str) -> str:
    """Return the files' name of the weight that is at `path` in the whole model."""
    return names.get(path) or path.partition(".")[2]  # some checkpoints hold the base model only


def _part(files: WeightFiles, name: str, share: Share) -> Tensor:
    """Return the rank's part of the weight `name`."""
    linear, kind = name.split(".")[-2:]
    if linear in BY_ROWS:
        return files.rows(name, share.of(files.shape(name)[0]))
    if linear in BY_COLUMNS and kind == "weight":
        return files.columns(name, share.of(files.shape(name)[1]))
    whole = files.whole(name)
    if linear in BY_COLUMNS and share.rank:
        return torch.zeros_like(whole)  # only one rank adds the bias of a summed matmul
    return whole


def assemble_part(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    facts: ModelFacts,
    drafting: Drafting,
    ranks: Ranks,
    ops: Ops,
) -> SpaceModel:
    """Assemble the rank's part that `read_part` loaded. `facts`: of the part."""
    share, others = Share(ranks.rank, ranks.size), LaterRanks(ranks)
    base, prefix = model.base_model, model.base_model_prefix
    check_attention(model, facts)
    wanted = reference(model, facts)
    head, own = _head(model, checkpoint, facts, others, ops)
    drafting = drafting.each(lambda one: share.of_adapter(one.embedded(model, wanted.rows.ids, wanted.entry.usual)))
    recurrent = {} if head.whole is None else drafting.recurrent_heads(head.whole, linear=ops.linear)
    gated = [adapter.gated for adapter in drafting.adapters]
    layers, _ = family.decoder_layers(base)
    for adapter in drafting.adapters:
        adapter.check(model, f"{prefix}.{layers}")
    network = compact_network(base, facts, ops, gated, prefix, others)
    if network is None:
        if facts.device.type == "cpu":
            make_row_invariant(base, facts.num_threads)
        gate = attach(base, gated, prefix) if gated else None
        for layer in base.layers:
            for block, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
                setattr(block, name, SummedLinear(block.get_submodule(name), others))
        network = TransformersNetwork(base, gate, ops.space_attention)
    check_parts(network, head.logits, facts, wanted.with_head(own, facts.dtype))
    others.come()
    return SpaceModel(facts, network, head, drafting, recurrent)


def _head(
    model: PreTrainedModel, checkpoint: Checkpoint, facts: ModelFacts, ranks: Ranks, ops: Ops
) -> tuple[ShardedHead, Tensor]:
    """Return the rank's ids of the head and their weights. Rank 0 also keeps the whole head if a draft head needs
    gathered rows."""
    embedding: Tensor = model.base_model.get_input_embeddings().weight
    share, rescores, is_tied = Share(ranks.rank, ranks.size), facts.keeps_head_rows, model.config.tie_word_embeddings
    ids = share.of_vocabulary(facts.vocab_size)
    whole: Tensor | None = None
    with open_weights(checkpoint) as files:
        name = _names(checkpoint, model.config, files).get(HEAD)
        if name is None and not is_tied:
            raise UnsupportedModel(f"The weights of {checkpoint.name} lack {HEAD}. Fetch the whole checkpoint again.")
        if name is None or (is_tied and _is_embedding(files.whole(name), embedding)):
            whole, part = embedding, embedding[ids]
        elif rescores and share.rank == 0:
            whole = WeightStream(files, facts.device).whole(name, facts.dtype)
            part = whole[ids]
        else:
            part = files.rows(name, ids)
        width = share.vocabulary_width(facts.vocab_size)
        own = torch.zeros(width, part.shape[1], dtype=facts.dtype, device=facts.device)
        send(part, own[: len(part)])
        if not bool(own.isfinite().all()):
            raise UnsupportedModel(
                f"{HEAD} of {checkpoint.name} has numbers that are not finite. Fetch the file again."
            )
    rows = None
    if whole is not None and rescores and share.rank == 0:
        rows = OutputHead(whole, None, packed=False)
    return ShardedHead(OutputHead(own, None, linear=ops.linear), rows, facts.vocab_size, ranks), own[: len(part)]


def _is_embedding(head: Tensor, embedding: Tensor) -> bool:
    """Return whether the head in the files equals the tied embedding; if not it is used, as in transformers. This makes
    every rank read the head once; most checkpoints with tied embeddings have none."""
    return head.shape == embedding.shape and torch.equal(head.to(embedding), embedding)
