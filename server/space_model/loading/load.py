"""Loads a SpaceModel from a folder or a GGUF file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from space_common.worker.choices import KV_DTYPES
from space_kernels.dispatch import Ops, ops_for
from space_kernels.linear.cpu_linear import STORED
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from space_model.adapters import OWN, Adapter, Drafting
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint, has_experts
from space_model.checkpoint.quantized_formats import read_format
from space_model.checkpoint.recurrent_layers import layer_states
from space_model.checkpoint.space_section import SpaceSection
from space_model.checkpoint.unused_tensors import check_found
from space_model.checkpoint.weight_files import refuse_odd_values
from space_model.heads import BaseSpec, OutputHead, head_rows, load_draft_head, with_compiled
from space_model.loading.sharded_model import assemble_part, read_part
from space_model.loading.whole_model import (
    check_plain,
    quantize_to_fp8,
    read_packed,
    settle,
    stays_packed,
    stream_model,
)
from space_model.lora import LoadedLoras, LoraBase, why_no_loras
from space_model.malloc import give_back_freed
from space_model.model_error import (
    CheckpointNotFound,
    InvalidLora,
    InvalidSetting,
    InvalidSpaceSection,
    UnsupportedModel,
    malformed_is_unsupported,
)
from space_model.model_facts import HeadFacts, ModelFacts, Ranks
from space_model.networks.altup import fix_cutoffs
from space_model.networks.fixed_rope import fix_angles
from space_model.networks.llama_network import compact_network
from space_model.networks.own_attention.attach import attach as attach_own_attention
from space_model.networks.recurrent.attach import attach as attach_recurrent
from space_model.networks.tensor_parallel import Share
from space_model.networks.transformers_network import ATTENTION_NAME, TransformersNetwork, attach, make_row_invariant
from space_model.precision import choose_device, choose_dtype, choose_weights, refuse_tf32
from space_model.recurrent_head import load_recurrent_head
from space_model.space_model import SpaceModel
from space_model.stored_weights import numbers_or_rows_of, release, rows_of, stored_of, table_of
from space_model.uncompiled import without_compiler
from space_model.verification.layer_reference import reference
from space_model.verification.probe import check_attention, check_parts

_log = logging.getLogger(__name__)


@malformed_is_unsupported()
def load_model(
    path: str | Path | Checkpoint,
    *,
    dtype: str = "auto",
    weights: str = "plain",
    kv_dtype: str = "auto",
    device: str = "cpu",
    mask_ids: Sequence[int] | None = None,
    num_masks: int | None = None,
    attention: str = "auto",
    exact: bool = False,
    choose_ops: Callable[[ModelFacts], Ops] | None = None,
    max_model_len: int | None = None,
    num_threads: int | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    loras: Mapping[str, str | Path] | None = None,
    ranks: Ranks | None = None,
) -> SpaceModel:
    """Load the checkpoint at `path` (a folder, a GGUF file, a hub id, `demo`, or an open Checkpoint).

    `dtype` auto, float32, bfloat16 or float16; `weights` plain, auto (see choose_weights), int4, int8 or, of a
    quantised checkpoint, packed (of a GGUF also gguf) on a CPU, fp8 on a GPU (on a CPU fp8 computes the same, but saves
    no memory); `kv_dtype` auto, or fp8: 8-bit KV cache; `device` auto, cpu, cuda, …; `mask_ids` (one shared, or one per
    position) and `num_masks` override the checkpoint's own; `max_model_len` shortens the window; `num_threads` of a CPU
    matmul (None: torch's setting), for the whole process and fixed from then on, because activations depend on it;
    `adapters`: name -> folder of a gated adapter for requests that name it, besides the checkpoint's own; `loras`: name
    -> folder of an ordinary LoRA, more can be loaded later (SpaceModel.loras); `attention`:
    auto, torch or triton; `exact`: results are row-invariant (bitwise) on a GPU too, for families with a compact
    network; `choose_ops`: selects the operations instead of these two; `ranks`: the processes that share the model, of
    which this one loads its part; None: this process loads all.
    Raises a ModelError that names the cause.
    """
    if num_threads is not None:
        if num_threads < 1:
            raise InvalidSetting(f"num_threads must be at least 1; got {num_threads}.")
        torch.set_num_threads(num_threads)
    checkpoint = Checkpoint.open(path)
    config = family.read_config(checkpoint)
    place = choose_device(device)
    if place.type == "cuda":
        refuse_tf32()
    num_ranks = 1 if ranks is None else ranks.size
    if loras and (why_none := why_no_loras(place, num_ranks)):
        raise InvalidSetting(why_none)
    weights = choose_weights(weights, dtype, place, kept=checkpoint.kept_as, num_ranks=num_ranks)
    number, reason = choose_dtype(dtype, place, getattr(config, "dtype", None), weights, kept=checkpoint.kept_as)
    if kv_dtype not in KV_DTYPES:
        raise InvalidSetting(f"kv_dtype must be auto or fp8; got {kv_dtype!r}.")
    fp8_kv = kv_dtype == "fp8"
    if weights != "plain" and ranks is not None:
        raise InvalidSetting(
            f"{weights} weights are not shared among processes: leave out --weights {weights}, or --tensor-parallel "
            f"{num_ranks}."
        )
    size = int(config.vocab_size)
    section = SpaceSection.parse(checkpoint.config, mask_ids=mask_ids, num_masks=num_masks, vocab_size=size)
    section.check_base(checkpoint.name, checkpoint.weights_sha256)
    spec = BaseSpec(int(config.hidden_size), number, place)
    loaded: list[Adapter] = []
    draft_head = None
    recurrent_head = None
    if section.adapter is not None:
        loaded.append(Adapter.read(OWN, checkpoint.home, section, spec))
        draft_head = loaded[0].draft_head
    else:
        if section.draft_head is not None:
            draft_head = load_draft_head(checkpoint.home, section.draft_head, spec)
        if section.recurrent_head is not None:
            recurrent_head = load_recurrent_head(checkpoint.home, section.recurrent_head, spec)
    loaded += [_named(name, folder, checkpoint, size, spec) for name, folder in (adapters or {}).items()]
    drafting = Drafting(draft_head, recurrent_head, tuple(loaded))

    begun = time.perf_counter()
    if ranks is None:
        model = _read_weights(checkpoint, config, number, place, weights)
    else:
        model = read_part(checkpoint, config, Share(ranks.rank, ranks.size), number, place)
    _log.info("weights read in %.2f s, and on %s", time.perf_counter() - begun, place)
    window = _window(config, max_model_len)
    angles = fix_angles(model, window, checkpoint.name, switches=ranks is None)
    vocab_size = len(model.get_output_embeddings().weight)
    eos_ids = checkpoint.eos_ids(vocab_size)
    both = sorted(set(eos_ids).intersection(section.mask_ids))
    if both:
        raise InvalidSpaceSection(f"Id {both[0]} ends a text and cannot be a mask too: masks are never generated.")
    num_heads, kv_heads, head_dim = family.sizes(model.config)
    facts = ModelFacts(
        name=checkpoint.name,
        vocab_size=vocab_size,
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=window,
        dtype=number,
        dtype_reason=reason,
        device=place,
        eos_ids=eos_ids,
        mask_ids=section.mask_ids,
        num_masks=len(section.mask_ids) if section.adapter is None else loaded[0].gated.num_masks,
        model_hash=checkpoint.model_hash(),
        tokenizer_hash=checkpoint.tokenizer_hash(),
        has_draft_head=draft_head is not None,
        kv_bytes_per_token=family.kv_numbers(model.config) * (number.itemsize, 1)[fp8_kv],
        attention="",  # the operations set this below
        num_threads=torch.get_num_threads(),
        acceptance=section.acceptance,
        adapters=tuple(adapter.facts for adapter in loaded),
        weights=weights,
        fp8_kv=fp8_kv,
        head=HeadFacts.of(recurrent_head if section.adapter is None else loaded[0].recurrent_head),
        latent_dim=family.latent_dim(config),
        is_chunked=family.is_chunked(config),
        kv_layers=family.kv_layers(model.config),
        states=layer_states(model.config),
        num_ranks=num_ranks,
        rope_switch=angles.switch,
        angles_of_window=angles.of_window,
    )
    try:
        make = choose_ops or (lambda _: ops_for(place, attention=attention, exact=exact, dtype=number, fp8_kv=fp8_kv))
        ops = make(facts)
    except ValueError as error:
        raise InvalidSetting(str(error)) from error
    if family.has_linear_biases(config) and ops.attention not in ("compiled", "torch"):
        raise InvalidSetting(
            f"{checkpoint.name} has attention with linear biases (ALiBi), which attention {ops.attention!r} does not "
            "have: give --attention torch."
        )
    if facts.has_odd_values and ops.attention not in ("compiled", "torch"):
        what = "values of another size than keys" if facts.latent_dim is None else "latent attention (MLA)"
        raise InvalidSetting(
            f"{checkpoint.name} has {what}, which attention {ops.attention!r} does not have: give --attention torch."
        )
    facts = replace(facts, attention=ops.attention, is_exact=ops.is_exact)
    give_back_freed()  # by reading the tokenizer
    if ranks is not None:
        return assemble_part(model, checkpoint, facts, drafting, ranks, ops)
    space_model = _assemble(model, config, facts, drafting, ops)
    for name, folder in (loras or {}).items():
        assert space_model.loras is not None
        try:
            space_model.loras.load(Path(folder), name=name)
        except InvalidLora as error:
            raise InvalidLora(f"LoRA {name}: {error}") from error
    return space_model


def _named(name: str, folder: str | Path, checkpoint: Checkpoint, vocab_size: int, base: BaseSpec) -> Adapter:
    """Load an additional adapter; errors name it."""
    if not name:
        raise InvalidSetting("An adapter needs a name that requests can ask for.")
    try:
        return Adapter.open(name, folder, checkpoint, vocab_size, base)
    except (CheckpointNotFound, InvalidSpaceSection) as error:
        raise type(error)(f"Adapter {name}: {error}") from error


def _assemble(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    facts: ModelFacts,
    drafting: Drafting,
    ops: Ops,
) -> SpaceModel:
    """Take the transformers model apart: its base, made row-invariant on a CPU, and its head."""
    check_attention(model, facts)
    wanted = reference(model, facts)
    drafting = drafting.each(lambda one: one.embedded(model, wanted.rows.ids, wanted.entry.usual))
    base, output = model.base_model, model.get_output_embeddings()
    scale, softcap = family.head_scale(config), family.head_softcap(config)
    keeps_rows = facts.keeps_head_rows or not facts.quantizes_head
    form: dict[str, Any] = {"weights": facts.weights, "keeps_rows": keeps_rows, "linear": ops.linear}
    form |= {"stored": stored_of(output), "table": rows_of(output) if keeps_rows else None}
    head = OutputHead(numbers_or_rows_of(output), output.bias, scale=scale, softcap=softcap, **form)
    if facts.device.type == "cpu":
        release(output)
    recurrent = drafting.recurrent_heads(
        head,
        linear=ops.linear,
        form="int8" if facts.quantizes_head else "plain",
        embedding=table_of(base.get_input_embeddings()) if ops.attention == "compiled" else None,
    )
    if facts.most_masks:
        spec = BaseSpec(facts.hidden_size, facts.dtype, facts.device)
        num_bytes = facts.vocab_size * facts.hidden_size * facts.dtype.itemsize
        facts = replace(facts, head_rows=head_rows(head.logits, spec, num_bytes))
    gated = [adapter.gated for adapter in drafting.adapters]
    layers = f"{model.base_model_prefix}.{family.decoder_layers(base)[0]}"
    for adapter in drafting.adapters:
        adapter.check(model, layers)
    lora_base = LoraBase.of(model, layers, facts.dtype)
    network = compact_network(base, facts, ops, gated, model.base_model_prefix)
    if network is None:
        fix_cutoffs(base)
        if facts.device.type == "cpu":
            make_row_invariant(base, facts.num_threads, weights=facts.weights)
        elif ops.is_exact:
            raise InvalidSetting(
                f"Models of type {config.model_type!r} as this one is held are not exact on a GPU, for their norms and "
                "products are the library's; leave out --exact."
            )
        gate = attach(base, gated, model.base_model_prefix) if gated else None
        network = TransformersNetwork(base, gate, ops.space_attention, model.base_model_prefix)
    if ops.attention == "compiled":
        compile_head = partial(with_compiled, embedding=table_of(base.get_input_embeddings()), output=head)
        drafting = drafting.each(lambda one: replace(one, draft_head=compile_head(one.draft_head)))
        drafting = replace(drafting, draft_head=compile_head(drafting.draft_head))
    loras = LoadedLoras(network, lora_base, why_none=why_no_loras(facts.device, facts.num_ranks))
    space_model = SpaceModel(facts, network, head, drafting, recurrent, loras)
    give_back_freed()
    check_parts(network, head.logits, facts, wanted)
    return space_model


def _read_weights(
    checkpoint: Checkpoint, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, weights: str
) -> PreTrainedModel:
    """Load the transformers model in `dtype` to `device`; every weight must be in the checkpoint. `weights` fp8: the
    device never holds the weights in `dtype`."""
    form = read_format(checkpoint.config, checkpoint.name)
    if weights == "fp8":
        check_plain(form)
    with reading(checkpoint):
        packed = None
        # transformers' quantizers know the modules of the whole model, not those of its text part.
        if form is not None and stays_packed(form, device) and family.key_mapping(checkpoint, config) is None:
            packed = read_packed(checkpoint, config, form, dtype, device)
        in_turn = weights == "fp8" and device.type != "cpu"  # fp8 conversion then moves the weights one after another
        kept = weights in STORED
        how = {"as_kept": in_turn, "leaves_packed": _leaves(checkpoint, device, weights), "keeps_packed": kept}
        model, found = packed or stream_model(checkpoint, config, dtype, device, **how)
    check_found(checkpoint, model, found)
    family.refuse_more_head(model)
    refuse_odd_values(checkpoint.name, model, packed=packed is not None)
    attach_own_attention(model)
    attach_recurrent(model)
    model.set_attn_implementation(ATTENTION_NAME)
    model.requires_grad_(False)
    if weights == "fp8":
        quantize_to_fp8(model.base_model, device, lambda weight: weight.to(device=device, dtype=dtype))
    if packed is None:
        settle(model, dtype, device)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _leaves(checkpoint: Checkpoint, device: torch.device, weights: str) -> bool:
    """Return whether weights are left in the file: to stay as it has them, or in the blocks of a GGUF until they are
    packed. fp8 ones are not, nor are experts until they are packed."""
    until_packed = weights in ("plain", "int8", "int4") and not has_experts(checkpoint.config)
    return weights in STORED or (until_packed and checkpoint.gguf is not None and device.type == "cpu")


@malformed_is_unsupported()
def check_tensors(path: str | Path | Checkpoint) -> None:
    """Check that the checkpoint at `path` has all tensors that the model needs, and no others. Of unquantised weights
    only the headers are read; quantised weights are read one at a time. Raises a ModelError that names the tensor."""
    checkpoint = Checkpoint.open(path)
    config = family.read_config(checkpoint)
    with reading(checkpoint):
        model, found = stream_model(checkpoint, config, torch.float32, torch.device("meta"))
    check_found(checkpoint, model, found)


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Convert transformers' errors while reading weights to ModelErrors that name the checkpoint, and silence its
    progress bars and warnings: missing or unexpected weights are reported as our errors."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with without_compiler():
            yield
    except (OSError, SafetensorError) as error:
        raise CheckpointNotFound(f"The weights of {checkpoint.name} cannot be read: {error}") from error
    except (RuntimeError, ValueError, ImportError) as error:
        raise UnsupportedModel(f"The weights of {checkpoint.name} do not fit its config: {error}") from error
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _window(config: PreTrainedConfig, max_model_len: int | None) -> int:
    trained, longest = family.positions(config), family.longest(config)
    if max_model_len is None:
        if trained is None:
            raise InvalidSetting("config.json does not say how many positions the model has; give max_model_len.")
        return int(trained)
    if max_model_len < 1 or (longest is not None and max_model_len > longest):
        raise InvalidSetting(f"max_model_len must lie in 1..{longest}, the model's positions; got {max_model_len}.")
    return max_model_len
