"""The checkpoint of a run: masks, adapters and draft head that it starts from, and the folder that it leaves."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from space_common.files import is_contained, is_local_name
from space_model.adapters import GATED_LORA_FILE, GatedLora
from space_model.checkpoint.checkpoint import (
    PEFT_CONFIG,
    PEFT_MASKS,
    PEFT_WEIGHTS,
    TEXT_CONFIGS,
    Checkpoint,
)
from space_model.checkpoint.family import decoder_layers
from space_model.checkpoint.quantized_formats import BlockFp8, read_format
from space_model.checkpoint.space_section import DraftHeadSection, SpaceSection
from space_model.heads import BaseSpec
from space_model.loading.whole_model import has_kernels
from space_model.model_error import UnsupportedModel
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from space_train.networks.adapters import DraftHead
from space_train.networks.recurrent_head import RecurrentHeadModule
from space_train.networks.trainee import Trainee
from space_train.train_plan import Anchors, HeadForm, InvalidPlan, Method, TrainPlan

HEAD_FILE = "draft_head.safetensors"
RECURRENT_FILE, RECURRENT = "recurrent_head.safetensors", "recurrent_head"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
"""Files copied from the base besides its weights: tokenizer, chat template, generation config."""


def write_checkpoint(
    trainee: Trainee,
    weights: Mapping[str, Tensor],
    source: Checkpoint,
    folder: Path,
    *,
    dtype: torch.dtype | None,
    acceptance: Sequence[float] = (),
    recurrent_acceptance: Sequence[float] = (),
    chat_template: str | None = None,
) -> None:
    """Write `trainee` to the empty `folder`. `weights`: its unsharded state; `source`: the checkpoint it started from;
    `dtype` to write (None: as read); `acceptance`: held-out acceptance of draft 1, 2, …, the server's initial estimate;
    `recurrent_acceptance`: likewise of the recurrent head; `chat_template`: replaces the source's.

    The files of a frozen base are hard-linked, or copied if the file system has no links. Raises OSError if the disk
    is full.
    """
    model, plan = trainee.decoder.model, trainee.plan
    config = dict(source.config)
    if plan.trains_base:
        _write_base(model, weights, folder, dtype)
        _set_vocab_size(config, len(model.get_output_embeddings().weight))
        if dtype is not None:
            config.pop("dtype", None)
            config["torch_dtype"] = str(dtype).removeprefix("torch.")
    else:
        for file in (*source.weights, *source.folder.glob("model.safetensors.index.json")):
            try:
                (folder / file.name).hardlink_to(file.resolve())
            except OSError:
                shutil.copyfile(file, folder / file.name)
    before = config.pop("space", None) or {}
    if plan.has_masks:
        config["space"] = space_section(trainee)
        if acceptance:
            config["space"]["acceptance"] = [round(chance, 3) for chance in acceptance]
        if trainee.adapters is not None:  # an adapter needs exactly the base weights it was trained on
            config["space"]["base_sha256"] = source.weights_sha256()
    elif plan.has_recurrent_head:
        config["space"] = _copy_masks(before, source, folder)
    if plan.has_recurrent_head:
        config["space"][RECURRENT] = _recurrent_section(trainee, recurrent_acceptance)
    number = torch.float32 if dtype is None else dtype
    if trainee.adapters is not None:
        trainee.adapters.export(number).save(folder / GATED_LORA_FILE)
    if trainee.head is not None:
        _write_head(weights, folder / HEAD_FILE, number)
    if trainee.recurrent is not None:
        _write_recurrent_head(weights, folder / RECURRENT_FILE, number)
    for file in folder.glob("*.safetensors"):
        if file.stat().st_nlink == 1:
            file.chmod(0o644)  # safetensors makes files readable by the owner only
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for file in {file for pattern in COPIED for file in source.folder.glob(pattern)}:
        if file.name != "config.json" and not file.name.endswith(".safetensors.index.json"):
            shutil.copyfile(file, folder / file.name)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")  # overrides the one in the config


def _set_vocab_size(config: dict[str, Any], size: int) -> None:
    """Set the vocabulary's size in config.json; of a model that also sees or hears, that of its text part."""
    name = next((name for name in TEXT_CONFIGS if isinstance(config.get(name), dict)), None)
    if name is None:
        config["vocab_size"] = size
        if "vocab_size_per_layer_input" in config:  # Gemma's second embedding grows, too
            config["vocab_size_per_layer_input"] = size
        return
    config[name] = dict(config[name])
    _set_vocab_size(config[name], size)


def space_section(trainee: Trainee) -> dict[str, Any]:
    """Return the `space` section of config.json."""
    plan, head = trainee.plan, None
    if trainee.head is not None:
        form, scale = trainee.head.form.value, trainee.head.embedding_scale
        head = {"file": HEAD_FILE, "form": form, "hidden": trainee.head.w1.shape[0], "embedding_scale": scale}
    ids = [] if trainee.adapters is not None else trainee.mask_ids
    shared = len(set(ids)) == 1 and len(ids) > 1
    ids, adapter = ids[:1] if shared else ids, None if trainee.adapters is None else GATED_LORA_FILE
    return {"num_masks": plan.num_masks, "mask_token_ids": ids, "adapter": adapter, "draft_head": head}


def _recurrent_section(trainee: Trainee, acceptance: Sequence[float]) -> dict[str, Any]:
    head = trainee.recurrent
    assert head is not None
    section = {"file": RECURRENT_FILE, "hidden": len(head.w1), "embedding_scale": head.embedding_scale}
    section |= {"num_drafts": trainee.plan.num_recurrent_drafts}
    return section | ({"acceptance": [round(chance, 3) for chance in acceptance]} if acceptance else {})


def _copy_masks(section: Mapping[str, Any], source: Checkpoint, folder: Path) -> dict[str, Any]:
    """Copy the adapter and the draft head that `section` names from `source`, and return the section."""
    for name in (section.get("adapter"), (section.get("draft_head") or {}).get("file")):
        if name is None:
            continue
        place = source.home / name
        if not is_local_name(name) or not is_contained(place, source.home):
            raise InvalidPlan(f"{place} is outside of {source.home}: copy it there first.")
        files = [place / part for part in (PEFT_CONFIG, PEFT_WEIGHTS, PEFT_MASKS)] if place.is_dir() else [place]
        for file in files:
            there = folder / file.relative_to(source.home)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, there)
    kept = {name: value for name, value in section.items() if name not in {"base", RECURRENT}}
    return kept or {"num_masks": 0, "mask_token_ids": [], "adapter": None, "draft_head": None}


def _write_base(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype | None) -> None:
    prefix = "decoder.model."
    state: dict[str, Tensor] = {}
    written: dict[tuple[int, torch.Size], Tensor] = {}  # keep tied weights one tensor, so that the file has them once
    for name, tensor in weights.items():
        if name.startswith(prefix):
            key = tensor.data_ptr(), tensor.shape
            if key not in written:
                wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
                written[key] = tensor.detach().to(wanted)
            state[name.removeprefix(prefix)] = written[key]
    # transformers rejects some generation configs on save that it accepts on load; the source's file is copied instead.
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder, state_dict=state)
    (folder / "generation_config.json").unlink(missing_ok=True)


def _write_head(weights: Mapping[str, Tensor], file: Path, dtype: torch.dtype) -> None:
    tensors = {
        f"draft_head.{name}.weight": weights[f"head.{name}"].detach().cpu().to(dtype).contiguous()
        for name in ("w1", "w2")
    }
    save_file(tensors, file, metadata={"format": "pt"})


def _write_recurrent_head(weights: Mapping[str, Tensor], file: Path, dtype: torch.dtype) -> None:
    tensors = {
        f"{RECURRENT}.{name}.weight": weights[f"recurrent.{name}"].detach().cpu().to(dtype).contiguous()
        for name in ("w1", "w2")
    }
    if (ids := weights.get("recurrent.ids")) is not None:
        tensors[f"{RECURRENT}.ids"] = ids.cpu()
    save_file(tensors, file, metadata={"format": "pt"})


def read_head(head: DraftHead, file: Path) -> None:
    """Load the weights in `file` into `head`, which has the same size."""
    tensors = load_file(file)
    with torch.no_grad():
        head.w1.copy_(tensors["draft_head.w1.weight"])
        head.w2.copy_(tensors["draft_head.w2.weight"])


MOST_NEW_IDS = 64  # most ids a vocabulary may grow by: a mask id far outside is taken for a typing error


def check_given_ids(given: Sequence[int], num_masks: int, size: int, tokenizer_size: int) -> None:
    """Raise InvalidPlan if `given` cannot be the masks' ids in a vocabulary of `size`."""
    if len(given) not in {1, num_masks}:
        raise InvalidPlan(f"{num_masks} masks need 1 or {num_masks} mask ids; got {len(given)}.")
    room = max(size, tokenizer_size) + MOST_NEW_IDS
    outside = [number for number in given if not 0 <= number < room]
    if outside:
        raise InvalidPlan(
            f"Mask id {outside[0]} is outside the vocabulary of {size}, which grows by at most {MOST_NEW_IDS}. "
            "Leave --mask-ids out."
        )


def mask_ids(
    model: PreTrainedModel, num_masks: int, *, shared: bool, given: list[int] | None, tokenizer_size: int
) -> list[int]:
    """Return one id per mask (a shared one repeated): those given, else unused rows of the vocabulary, else new rows.
    `tokenizer_size`: the tokenizer does not use ids from there on. The embedding grows in place if needed."""
    wanted = 1 if shared else num_masks
    size = len(model.get_input_embeddings().weight)
    if given:
        check_given_ids(given, num_masks, size, tokenizer_size)
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

    hook = decoder_layers(model.base_model)[1][0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad(), contextlib.suppress(_Entered):
            model.base_model(input_ids=longest.view(1, 1), use_cache=False)
    finally:
        hook.remove()
    return float(entered[0].float().norm() / weight[longest].float().norm())


def check_can_start_from(checkpoint: Checkpoint, plan: TrainPlan) -> None:
    """Raise UnsupportedModel if a quantised base's weights would be trained, or its library is not installed."""
    form = read_format(checkpoint.config, checkpoint.name)
    if form is None or (isinstance(form, BlockFp8) and form.library):  # transformers dequantises these
        return
    what = f"{checkpoint.name} is quantised ({checkpoint.config['quantization_config']['quant_method']})"
    cure = "Train the model that it was quantised from."
    if plan.trains_base:
        raise UnsupportedModel(f"{what}, so that its weights cannot move, as method {plan.method} has them do. {cure}")
    if not has_kernels(form):
        lacks = (
            f"{form.library}, which computes with such weights, is not here" if form.library else "nothing trains so"
        )
        raise UnsupportedModel(f"{what}, and {lacks}. {cure}")


def with_own_sizes(
    checkpoint: Checkpoint, plan: TrainPlan, given: Collection[str], *, hidden_size: int, vocab_size: int
) -> tuple[TrainPlan, str | None]:
    """Return the plan with the sizes of the masks, adapter and draft heads that the checkpoint brings, and the flags
    that stand for them, or None: so that a run goes on from them. `given`: options that the command names, which stay.
    """
    section = SpaceSection.parse(checkpoint.config, mask_ids=None, num_masks=None, vocab_size=vocab_size)
    is_gated = section.adapter is not None
    goes_on = plan.method is Method.HEAD or plan.method is (Method.GATED_LORA if is_gated else Method.FULL)
    if section.mask_inputs is not None or not goes_on:
        return plan, None
    own: dict[str, Any] = {}
    if section.adapter is not None:
        spec = BaseSpec(hidden_size, torch.float32)
        adapter = GatedLora.load(checkpoint.home / section.adapter, spec, section.num_masks)
        own["num_masks"] = adapter.num_masks
        if plan.method is Method.GATED_LORA and adapter.pairs:
            own["lora_rank"] = adapter.rank
    elif section.mask_ids:
        own["num_masks"] = len(section.mask_ids)
    if "num_masks" in given and plan.num_masks != own.get("num_masks"):
        return plan, None
    head, recurrent = section.draft_head, section.recurrent_head
    if head is not None:
        own |= _unless_other(
            {"head": HeadForm(head.form), "head_hidden": head.hidden, "head_scale": head.embedding_scale}, plan, given
        )
    if recurrent is not None and plan.method is not Method.FULL and plan.anchors is Anchors.MANY:
        ids = load_file(checkpoint.home / recurrent.file).get(f"{RECURRENT}.ids")
        sizes = {"recurrent_head": recurrent.hidden, "recurrent_drafts": recurrent.num_drafts}
        sizes |= {"draft_vocab": vocab_size if ids is None else len(ids)}
        own |= _unless_other(sizes, plan, given)
    own = {name: value for name, value in own.items() if name not in given}
    flags = " ".join(
        f"--{name.replace('_', '-')} {value:{'g' if type(value) is float else ''}}" for name, value in own.items()
    )
    return replace(plan, **own), flags or None


def _unless_other(sizes: dict[str, Any], plan: TrainPlan, given: Collection[str]) -> dict[str, Any]:
    """Return the sizes of a draft head, or none where the command names another one."""
    return {} if any(getattr(plan, name) != sizes[name] for name in sizes if name in given) else sizes


@dataclass(frozen=True)
class OwnMasks:
    """The masks and draft head that a checkpoint brings."""

    section: SpaceSection
    adapter: GatedLora | None  # where the method can start from it
    num_masks: int

    @classmethod
    def read(cls, checkpoint: Checkpoint, plan: TrainPlan, *, hidden_size: int, vocab_size: int) -> OwnMasks:
        """Raises InvalidPlan if `plan` cannot start from them."""
        section = SpaceSection.parse(checkpoint.config, mask_ids=None, num_masks=None, vocab_size=vocab_size)
        adapter: GatedLora | None = None
        if section.mask_inputs is not None:
            raise InvalidPlan(
                f"{checkpoint.name} has an adapter of {section.mask_inputs.format}, which is served and not trained "
                "further. Train from its base."
            )
        if section.adapter is not None and plan.method in {Method.HEAD, Method.GATED_LORA}:
            spec = BaseSpec(hidden_size, torch.float32)
            adapter = GatedLora.load(checkpoint.home / section.adapter, spec, section.num_masks)
        num_masks = len(section.mask_ids) if adapter is None else adapter.num_masks
        if not plan.has_masks:
            return cls(section, None, num_masks)
        if plan.method is Method.HEAD and not num_masks:
            raise InvalidPlan(
                f"{checkpoint.name} has no masks, so no draft head can stand on them. Use --method gated-lora or full."
            )
        if plan.method is Method.HEAD and num_masks != plan.num_masks:
            raise InvalidPlan(f"{checkpoint.name} has {num_masks} masks: give --num-masks {num_masks}.")
        goes_on = plan.method is Method.GATED_LORA and adapter is not None and num_masks == plan.num_masks
        if goes_on and adapter is not None and adapter.pairs and adapter.rank != plan.lora_rank:
            raise InvalidPlan(
                f"{checkpoint.name} has an adapter of rank {adapter.rank}, this run one of rank {plan.lora_rank}: give "
                f"--lora-rank {adapter.rank} to go on from it, or train from its base."
            )
        return cls(section, adapter, num_masks)


def starting_point(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    plan: TrainPlan,
    tokenizer_size: int,
    given: list[int] | None,
    draft_ids: Tensor | None = None,
) -> Trainee:
    """Return the initial trainee, with the checkpoint's own parts if they match the plan's kind and sizes. The first
    process prints to stderr which parts of the checkpoint are reused and which are dropped. `draft_ids`: the draft
    vocabulary of a recurrent head that starts anew."""
    size, generator = len(model.get_input_embeddings().weight), torch.Generator().manual_seed(plan.seed)
    found = OwnMasks.read(checkpoint, plan, hidden_size=int(model.config.hidden_size), vocab_size=size)
    section, adapter, num_own = found.section, found.adapter, found.num_masks
    own: list[int] | None = None
    ids: list[int] = []
    if plan.method is Method.HEAD:
        if adapter is not None:
            plan = replace(plan, lora_rank=adapter.rank, lora_alpha=adapter.scale * adapter.rank)
        ids = list(section.mask_ids)
    elif plan.method is Method.FULL:
        own = list(section.mask_ids) if num_own == plan.num_masks else None
        ids = mask_ids(
            model, plan.num_masks, shared=plan.shared_mask_id, given=given or own, tokenizer_size=tokenizer_size
        )
        if ids != own:
            start_masks(model, ids, generator)
    elif num_own != plan.num_masks:
        adapter = None
    own_recurrent = OwnRecurrentHead.read(checkpoint, plan, size) if plan.has_recurrent_head else None
    trainee = Trainee(model, plan, ids, draft_ids if own_recurrent is None else own_recurrent.ids)
    if trainee.adapters is not None:
        mean, spread = embedding_spread(model)
        scale = input_scale(model)  # mask inputs bypass this scale
        trainee.adapters.initialise(generator, scale * mean, 0.5 * scale * spread)
        if adapter is not None:
            trainee.adapters.take(adapter)
    has_masks = plan.method is Method.HEAD or adapter is not None or (bool(ids) and ids == own)
    has_head = False
    if trainee.head is not None:
        trainee.head.initialise(generator)
        has_head = has_masks and _go_on(trainee.head, section.draft_head, checkpoint)
    if trainee.recurrent is not None:
        trainee.recurrent.initialise(generator)
        if own_recurrent is not None:
            own_recurrent.copy_to(trainee.recurrent)
    if PartialState().is_main_process:
        notes = [*_recurrent_notes(checkpoint, plan, size, goes_on=own_recurrent is not None)]
        if plan.has_masks or not plan.has_recurrent_head:
            notes += _notes(checkpoint.name, section, plan, num_own, has_masks=has_masks, has_head=has_head)
        for line in notes:
            print(f"start: {line}", file=sys.stderr, flush=True)
    return trainee


def _go_on(head: DraftHead, section: DraftHeadSection | None, checkpoint: Checkpoint) -> bool:
    """Load the checkpoint's draft head if it has the same form and size. Return whether it did."""
    if section is None:
        return False
    own = (section.hidden, section.embedding_scale, section.form)
    is_same = own == (len(head.w1), head.embedding_scale, head.form.value)
    if is_same:
        read_head(head, checkpoint.home / section.file)
    return is_same


@dataclass(frozen=True)
class OwnRecurrentHead:
    """The recurrent head that a checkpoint brings."""

    w1: Tensor
    w2: Tensor
    ids: Tensor | None  # [D]; None: the whole vocabulary

    @classmethod
    def read(cls, checkpoint: Checkpoint, plan: TrainPlan, vocab_size: int) -> OwnRecurrentHead | None:
        """Return the head if it has the sizes of `plan`, else None."""
        section = (checkpoint.config.get("space") or {}).get(RECURRENT)
        if not isinstance(section, dict):
            return None
        if (section["hidden"], section["embedding_scale"]) != (plan.recurrent_head, plan.head_scale):
            return None
        head = cls.load(checkpoint.home / section["file"])
        return head if head.draft_vocab(vocab_size) == min(plan.draft_vocab, vocab_size) else None

    @classmethod
    def load(cls, file: Path) -> OwnRecurrentHead:
        """Return the head in `file`, whatever its sizes."""
        tensors = load_file(file)
        return cls(
            tensors[f"{RECURRENT}.w1.weight"], tensors[f"{RECURRENT}.w2.weight"], tensors.get(f"{RECURRENT}.ids")
        )

    def draft_vocab(self, vocab_size: int) -> int:
        """Return how many ids it drafts, of a vocabulary of `vocab_size`."""
        return vocab_size if self.ids is None else len(self.ids)

    def copy_to(self, head: RecurrentHeadModule) -> None:
        with torch.no_grad():
            head.w1.copy_(self.w1)
            head.w2.copy_(self.w2)


def _recurrent_notes(checkpoint: Checkpoint, plan: TrainPlan, vocab_size: int, *, goes_on: bool) -> Iterator[str]:
    """Yield a note if the checkpoint has a recurrent head."""
    section = (checkpoint.config.get("space") or {}).get(RECURRENT)
    if section is None:
        return
    if goes_on:
        yield f"from the recurrent head of {checkpoint.name}."
        return
    ids = load_file(checkpoint.home / section["file"]).get(f"{RECURRENT}.ids")
    size = vocab_size if ids is None else len(ids)
    flags = f"--recurrent-head {section['hidden']} --head-scale {section['embedding_scale']:g} --draft-vocab {size}"
    yield f"without the recurrent head of {checkpoint.name}. Give {flags} to go on from it."


def _notes(
    name: str, section: SpaceSection, plan: TrainPlan, num_own: int, *, has_masks: bool, has_head: bool
) -> Iterator[str]:
    """Yield notes on which parts of the checkpoint are reused or dropped, and the flags that change this."""
    if section.adapter is None and not section.mask_ids:
        return
    head = section.draft_head
    kind, method = ("masks", Method.FULL) if section.adapter is None else ("adapter", Method.GATED_LORA)
    if has_masks:
        yield f"from the {kind}{' and the draft head' if has_head else ''} of {name}."
        if head is not None and plan.has_head and not has_head:
            flags = f"--head {head.form} --head-hidden {head.hidden} --head-scale {head.embedding_scale:g}"
            yield f"without the draft head of {name}. Give {flags} to go on from it."
        return
    if plan.method is not method:
        cure = f"Give --method {method} to go on from there."
    elif num_own != plan.num_masks:
        cure = f"It has {num_own} masks, this run {plan.num_masks}: give --num-masks {num_own} to go on from there."
    else:
        cure = "Leave --mask-ids out to go on from there."
    yield f"without the {kind}{' and the draft head' if head else ''} of {name}. {cure}"
