"""Estimates a model's memory from its config and the headers of its weights, before reading any."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from space_common.worker.client import WorkerClient
from space_common.worker.settings import WorkerSettings
from space_kernels.linear.group_weights import INT4, INT4_HEAD, SHARED
from space_kernels.linear.rounded_inputs import GROUP
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint, has_experts
from space_model.checkpoint.quantized_formats import QuantizedFormat, read_format
from space_model.checkpoint.recurrent_layers import layer_states
from space_model.checkpoint.space_section import SpaceSection
from space_model.draft_networks import mtp
from space_model.draft_networks.eagle_files import EagleFiles
from space_model.free_memory import FreeMemory, is_out_of_memory
from space_model.geometry.draft_layout import DraftLayout
from space_model.loading.meta_tensors import MetaModel
from space_model.loading.whole_model import check_plain, open_weights, stays_packed
from space_model.model_error import CheckpointNotFound, InvalidSetting
from space_model.networks.latent_heads import EXPANSION
from space_model.networks.llama_parts import FAMILIES
from space_model.precision import choose_device, choose_dtype, choose_weights
from space_proto import worker_pb2 as pb
from transformers import AutoModelForCausalLM, PreTrainedConfig

from space_server.device_runner.device_runner import DeviceRunner
from space_server.machine.memory import (
    NotEnoughMemory,
    check_num_blocks,
    choose_max_sequences,
    choose_num_blocks,
    choose_num_sequences,
    give_back_unused,
)
from space_server.model_runner import StepModel
from space_server.speculation.controller import FixedLayout
from space_server.worker import SOURCE_DRAFTS, Worker

PROMPT_ROWS = 512
"""Prompt rows of the largest step."""

SAMPLING_BYTES = 16
"""Bytes per logit while sampling: the logit, its probability in float64, its order."""

_NUMBERS = {"F64", "F32", "F16", "BF16"}
_OTHERS = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class AskedModel:
    """The model to serve, as its config and the worker's flags describe it."""

    config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype
    dtype_reason: str
    weights: str  # one of precision.WEIGHTS
    section: SpaceSection
    form: QuantizedFormat | None  # None: its weights are not quantised

    @classmethod
    def of(cls, config: WorkerSettings, checkpoint: Checkpoint) -> AskedModel:
        """Read the config. Raises ModelError."""
        model, device = family.read_config(checkpoint), choose_device(config.device)
        asked, kernels, kept = config.dtype, config.cpu_kernels, checkpoint.kept_as
        weights = choose_weights(
            config.weights, asked, device, kept=kept, num_ranks=config.tensor_parallel, cpu_kernels=kernels
        )
        dtype, reason = choose_dtype(asked, device, getattr(model, "dtype", None), weights, kernels, kept=kept)
        section = SpaceSection.parse(
            checkpoint.config,
            mask_ids=config.space_mask_ids,
            num_masks=config.space_num_masks,
            vocab_size=int(model.vocab_size),
        )
        return cls(model, device, dtype, reason, weights, section, read_format(checkpoint.config, checkpoint.name))


@dataclass(frozen=True)
class Small:
    """Bytes of weights and head where linears are in fewer bits."""

    held: str  # one of precision.WEIGHTS
    weights: int
    head: int


@dataclass(frozen=True)
class ModelNeed:
    """Bytes by purpose. Implements `PageNeed` of memory.py."""

    weights: int  # in memory, one copy: originals are freed as they are packed
    head: int  # packed copy of the output head, on a CPU
    drafting: int  # draft heads and adapters
    step: int  # activations of one sequence's largest step
    kv_bytes_per_token: int
    window: int
    dtype: torch.dtype
    device: torch.device
    small: tuple[Small, ...] = ()  # with linears in fewer bits, the largest first
    held: str = "plain"  # one of precision.WEIGHTS
    fp8_kv: bool = False
    states: int = 0  # recurrent states of one sequence; 0: there are none
    encoder: int = 0  # the encoder beside the model

    @property
    def fixed(self) -> int:
        """All but keys and values."""
        return self.weights + self.head + self.drafting + self.encoder + self.step

    @property
    def keys_and_values(self) -> int:
        """KV cache of one context window."""
        return self.window * self.kv_bytes_per_token

    @property
    def least(self) -> int:
        """The least that serves one sequence of a whole context window."""
        return self.fixed + self.states + self.keys_and_values

    @classmethod
    def asked(
        cls,
        config: WorkerSettings,
        checkpoint: Checkpoint,
        draft: Checkpoint | None = None,
        head: EagleFiles | None = None,
        *,
        unread: int = 0,
    ) -> ModelNeed:
        """The need of the configured model, and of the model or the head that drafts for it. Raises ModelError."""
        if head is not None:
            return cls.asked(config, checkpoint, unread=unread).with_head(head)
        if draft is not None:
            own = replace(config, model=draft.name, weights="auto", space_mask_ids=None, space_num_masks=None)
            need, of_draft = (
                cls.asked(config, checkpoint, unread=unread),
                cls.asked(replace(own, max_model_len=None), draft),
            )
            if config.draft_model == mtp.NAME:  # it keeps the model's hidden states
                states = int(family.read_config(draft).hidden_size) * of_draft.dtype.itemsize
                of_draft = replace(of_draft, kv_bytes_per_token=of_draft.kv_bytes_per_token + states)
            return need.beside(of_draft)
        asked = AskedModel.of(config, checkpoint)
        device = asked.device
        if asked.weights == "fp8":
            check_plain(asked.form)
            if device.type == "cpu":
                raise InvalidSetting(
                    "fp8 weights are for GPUs, and the device is cpu, where they save nothing; take --weights int8."
                )
        if config.kv_dtype == "fp8" and device.type == "cpu":
            raise InvalidSetting(
                "fp8 keys and values are for GPUs, and the device is cpu, where attention would be several times "
                "slower; leave out --kv-dtype fp8: --kv-memory makes room."
            )
        need = cls.of(
            checkpoint,
            asked.config,
            asked.dtype,
            device,
            window=_window(asked.config, config.max_model_len),
            num_masks=asked.section.num_masks or 0,
            drafting=list(_drafting(checkpoint.home, asked.section)),
            form=asked.form,
            fp8_kv=config.kv_dtype == "fp8",
            num_ranks=config.tensor_parallel,
            unread=unread,
            most_drafts=config.max_draft_length,
        )
        need = replace(need, encoder=_encoder_bytes(config.embedding_model))
        return need if asked.weights == "plain" else need.with_weights(asked.weights) or need

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        window: int,
        num_masks: int = 0,
        drafting: Sequence[Path] = (),
        form: QuantizedFormat | None = None,
        fp8_kv: bool = False,
        num_ranks: int = 1,
        unread: int = 0,
        most_drafts: int | None = None,
    ) -> ModelNeed:
        """`drafting`: files beside the weights; `form`: of a quantized checkpoint; `num_ranks` share the model, and the
        result is for one of them; `unread`: bytes of weights whose headers are not downloaded yet;
        `most_drafts`: of a step, None: as many as usual."""
        num_heads, kv_heads, head_dim = family.sizes(config)
        hidden, vocab = int(config.hidden_size), int(config.vocab_size)
        inner = getattr(config, "intermediate_size", None) or 4 * hidden
        inner = max(inner) if isinstance(inner, list) else int(inner)
        if form is not None and not stays_packed(form, device):
            weights = num_weights(config) * dtype.itemsize
        elif form is None:
            weights = _held(stored(checkpoint), config, dtype)
        else:
            weights = sum(file.stat().st_size for file in checkpoint.weights)
        on_cpu = device.type == "cpu"
        experts = has_experts(checkpoint.config)
        if on_cpu and num_ranks == 1 and not experts:
            weights -= _left_in_file(checkpoint) * dtype.itemsize
        own = getattr(config, "dtype", None)
        weights += int(unread * (dtype.itemsize / own.itemsize if form is None and isinstance(own, torch.dtype) else 1))
        small: tuple[Small, ...] = ()
        if unread and checkpoint.unread_kind is not None:
            small = (Small("gguf", weights, 0),)  # the head is one of them
        if form is None and not unread and num_ranks == 1 and (on_cpu or not experts):
            kinds = {"BF16"} if on_cpu else _NUMBERS
            linears = _in_linears(stored(checkpoint), kinds)
            halves, packed = 2 * weights // dtype.itemsize, vocab * hidden
            if on_cpu:
                head = INT4_HEAD.bytes_of_groups * packed // (SHARED * GROUP)
                less = linears * (2 * SHARED * GROUP - INT4.bytes_of_groups) // (SHARED * GROUP)
                small = Small("int8", halves - linears, packed), Small("int4", halves - less, head)
                if checkpoint.kept_as is not None:
                    small = *small, _in_blocks(checkpoint, config, packed)
            else:
                small = (Small("fp8", halves - linears, 0),)
        elif form is not None and on_cpu and not unread and num_ranks == 1 and checkpoint.kept_as is not None:
            small = (_as_packed(checkpoint, config, 2 * vocab * hidden),)
        rows, logits = min(PROMPT_ROWS, window) + (num_masks + 1) ** 2, 2 * num_masks + 1
        row = 4 * hidden + (2 * num_heads + 2 * kv_heads) * head_dim + 2 * inner
        return cls(
            weights=weights // num_ranks,
            head=vocab * hidden * dtype.itemsize // num_ranks if on_cpu else 0,
            drafting=sum(_drafting_bytes(file, hidden, dtype) for file in drafting if not unread or file.is_file()),
            step=rows * row * dtype.itemsize // num_ranks + logits * vocab * SAMPLING_BYTES,
            kv_bytes_per_token=family.kv_numbers(config) * (1 if fp8_kv else dtype.itemsize) // num_ranks,
            window=window,
            dtype=dtype,
            device=device,
            small=small,
            fp8_kv=fp8_kv,
            states=sum(
                state.num_bytes(max(num_masks, SOURCE_DRAFTS if most_drafts is None else most_drafts))
                for state in layer_states(config)
                if state is not None
            ),
        )

    def beside(self, draft: ModelNeed) -> ModelNeed:
        """The same with a draft model, whose steps take turns with the model's own."""
        drafting = self.drafting + draft.weights + draft.head
        kv_bytes = self.kv_bytes_per_token + draft.kv_bytes_per_token
        return replace(self, drafting=drafting, step=max(self.step, draft.step), kv_bytes_per_token=kv_bytes)

    def with_head(self, head: EagleFiles) -> ModelNeed:
        """The same with an EAGLE head, which keeps keys, values and a state of each token."""
        numbers = 2 * head.layer.num_key_value_heads * head.head_dim + head.hidden_size
        kv_bytes = self.kv_bytes_per_token + numbers * self.dtype.itemsize
        drafting = self.drafting + head.num_parameters * self.dtype.itemsize
        return replace(self, drafting=drafting, kv_bytes_per_token=kv_bytes)

    def with_weights(self, held: str) -> ModelNeed | None:
        """The same with linears in fewer bits; None if unknown here, or already so."""
        for one in self.small:
            if one.held == held:
                half = self.held_in(torch.bfloat16)
                return replace(half, weights=one.weights, head=one.head, small=(), held=held)
        return None

    def with_fp8_kv(self) -> ModelNeed | None:
        """The same with an 8-bit KV cache; None if already so, or unsupported by the device."""
        if self.fp8_kv or self.device.type == "cpu":
            return None
        return replace(self, fp8_kv=True, kv_bytes_per_token=self.kv_bytes_per_token // self.dtype.itemsize)

    def parts(self, *, windows: bool = True) -> str:
        """Describe the parts; `windows`: including keys and values."""
        of_linears = "" if self.held == "plain" else f", linears in {self.held},"
        named = [
            (self.weights, f"weights in {str(self.dtype).removeprefix('torch.')}{of_linears}"),
            (self.head, "the output head's packed copy"),
            (self.drafting, "what drafts"),
            (self.encoder, "the encoder"),
            (self.states, "recurrent states of a sequence"),
            (self.keys_and_values if windows else 0, f"keys and values of one window of {self.window}"),
            (self.step, "a step"),
        ]
        return ", ".join(f"{what} {shown(size)}" for size, what in named if size)

    def held_in(self, dtype: torch.dtype) -> ModelNeed:
        """The same in another dtype."""
        by = dtype.itemsize / self.dtype.itemsize
        sizes = ("weights", "head", "drafting", "step", *(() if self.fp8_kv else ("kv_bytes_per_token",)))
        return replace(self, dtype=dtype, **{name: int(getattr(self, name) * by) for name in sizes})  # type: ignore[arg-type]

    def longest(self, available: int) -> int:
        """Return the longest context window that fits; 0 if even a short one does not."""
        length = (available - self.fixed - self.states) // max(1, self.kv_bytes_per_token)
        return max(0, min(self.window, length // 16 * 16))


def check_fits(need: ModelNeed, free: FreeMemory, name: str) -> None:
    """Raise NotEnoughMemory if the model cannot serve one window; the message says what is needed, free, and would
    fit."""
    if need.least > free.num_bytes:
        raise NotEnoughMemory(
            f"{name} needs {shown(need.least)} on {need.device} ({need.parts()}); {free.bound} leaves "
            f"{shown(free.num_bytes)}. {cure(need, free.num_bytes)}"
        )


def num_sequences_of(config: WorkerSettings, need: ModelNeed, free: FreeMemory) -> int:
    """Return how many sequences run at once in what the model leaves. Raises NotEnoughMemory."""
    left = free.num_bytes - need.fixed
    asked = choose_max_sequences(
        need,
        asked=config.max_sequences,
        amount=config.kv_memory,
        available=left,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
    )
    return choose_num_sequences(need, asked=asked, state_bytes=need.states, available=left)


def num_blocks_of(config: WorkerSettings, need: ModelNeed, free: FreeMemory) -> int:
    """Return the number of KV-cache blocks that fit beside the model. Raises NotEnoughMemory with the cure."""
    check_fits(need, free, config.model)
    left, size = free.num_bytes - need.fixed, config.block_size
    left -= need.states * num_sequences_of(config, need, free)
    if config.num_blocks is not None:
        return check_num_blocks(need, num_blocks=config.num_blocks, block_size=size, available=left)
    return choose_num_blocks(need, block_size=size, amount=config.kv_memory, available=left)


def cure(need: ModelNeed, available: int) -> str:
    """Return which dtype or length fits."""
    found = []
    if length := need.longest(available):
        found.append(f"--max-model-len {length}")
    if need.dtype is torch.float32:
        half = need.held_in(torch.bfloat16)
        if half.least <= available:
            found.append(f"--dtype bfloat16 ({shown(half.least)})")
        elif not length and (length := half.longest(available)):
            found.append(f"--dtype bfloat16 --max-model-len {length}")
    smaller = [small for one in need.small if (small := need.with_weights(one.held)) is not None]
    if fitting := next((small for small in smaller if small.least <= available), None):
        found.append(f"--weights {fitting.held} ({shown(fitting.least)})")
    elif smaller and not found and (length := smaller[-1].longest(available)):
        found.append(f"--weights {smaller[-1].held} --max-model-len {length}")
    if (short := need.with_fp8_kv()) is not None and short.least <= available:
        found.append(f"--kv-dtype fp8 ({shown(short.least)})")
    if found:
        return f"It fits with {' or '.join(found)}."
    least = need.held_in(torch.bfloat16)
    bytes_ = least.fixed + least.states + 16 * least.kv_bytes_per_token
    return (
        f"No dtype and no length fits: even in bfloat16 with a short window it needs {shown(bytes_)}. End what else "
        "uses the memory, raise the limit, take a smaller or quantised checkpoint, or share it among GPUs with "
        "--tensor-parallel."
    )


def stored(checkpoint: Checkpoint) -> Iterator[tuple[str, str, int]]:
    """Name, dtype and number of elements of each tensor of the model's weights."""
    if checkpoint.gguf is None:
        renamed = checkpoint.translation
        for file in checkpoint.weights:
            yield from (one for one in tensors(file) if renamed is None or renamed.parts_of(one[0]))
        return
    from space_model.checkpoint.gguf_weights import entries  # only here: other formats need no gguf package

    yield from entries(checkpoint.gguf, checkpoint.config)


def _in_blocks(checkpoint: Checkpoint, config: PreTrainedConfig, in_head: int) -> Small:
    """Return the bytes of a GGUF with `--weights gguf`. `in_head`: number of weights of the output head."""
    from space_model.checkpoint.gguf_weights import EMBEDDING, held_bytes  # only here, as above

    assert checkpoint.gguf is not None
    sizes = held_bytes(checkpoint.gguf, checkpoint.config, fuses=config.model_type in FAMILIES)
    head = sizes.pop("lm_head.weight", None) or sizes.pop(EMBEDDING, 2 * in_head)
    dense = sum(2 * count for name, _, count in stored(checkpoint) if name not in sizes and name != "lm_head.weight")
    dense -= 2 * _left_in_file(checkpoint)
    return Small("gguf", dense + sum(sizes.values()), head)


def _left_in_file(checkpoint: Checkpoint) -> int:
    """Return the numbers of an embedding whose rows are looked up in the blocks of a GGUF."""
    if checkpoint.gguf is None:
        return 0
    from space_model.checkpoint.gguf_weights import left_numbers  # only here, as above

    return left_numbers(checkpoint.gguf, checkpoint.config)


def _as_packed(checkpoint: Checkpoint, config: PreTrainedConfig, head: int) -> Small:
    """Return the bytes of a quantised checkpoint with `--weights packed`. `head`: bytes of the output head."""
    weights = 2 * num_weights(config)
    with open_weights(checkpoint) as files:
        for name, stored in files.stored(fuses=config.model_type in FAMILIES).items():
            for part in stored:
                if name == "lm_head.weight":  # its rows are held as numbers, too
                    head = part.num_bytes
                else:
                    weights += part.num_bytes - 2 * part.out_features * part.in_features
        for experts in files.stored_mixtures().values():
            for stored in (*experts.gate, *experts.up, *experts.down):
                weights += sum(part.num_bytes - 2 * part.out_features * part.in_features for part in stored)
    return Small("packed", weights, head)


def tensors(file: Path) -> Iterator[tuple[str, str, int]]:
    """Yield name, safetensors dtype and number of elements of each tensor, read from the header alone."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: Mapping[str, Any] = json.loads(stream.read(min(length, file.stat().st_size)))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, str(entry["dtype"]), math.prod(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointNotFound(f"{file} cannot be read: no safetensors file, or cut short ({error}).") from error


def num_weights(config: PreTrainedConfig) -> int:
    """Return the unquantized model's parameter count, each shared matrix once; allocates nothing."""
    with MetaModel(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def shown(num_bytes: int) -> str:
    """Format bytes, such as 1.4 GiB or 350 MiB."""
    return f"{num_bytes / 1024**3:.1f} GiB" if num_bytes >= 1024**3 else f"{num_bytes / 1024**2:.0f} MiB"


def _window(model: PreTrainedConfig, asked: int | None) -> int:
    """Positions of the longest sequence; impossible values are refused when the model is loaded."""
    trained, longest = family.positions(model) or 0, family.longest(model) or 0
    return min(asked or trained, longest or asked or trained) or 1


def _drafting(home: Path, section: SpaceSection) -> Iterator[Path]:
    """Files of the checkpoint's own draft heads and adapter."""
    for head in (section.draft_head, section.recurrent_head):
        if head is not None:
            yield home / head.file
    if section.adapter is not None:
        place = home / section.adapter
        yield from [place] if place.is_file() else place.glob("adapter_model*.safetensors")


def _drafting_bytes(file: Path, hidden: int, dtype: torch.dtype) -> int:
    """Return what a file of a draft head or adapter takes in memory. A recurrent head copies the output head's rows of
    its draft vocabulary."""
    num_rows = sum(count for name, _, count in tensors(file) if name == "recurrent_head.ids")
    return _held(tensors(file), None, dtype) + num_rows * hidden * dtype.itemsize


def _in_linears(stored: Iterator[tuple[str, str, int]], kinds: Collection[str]) -> int:
    """Count weights that can be held in 8 bits: of linears without the output head. On a CPU only bfloat16 ones: others
    stay in memory until packed."""
    names = ("embed", "lm_head", "norm", "bias", EXPANSION)
    return sum(count for name, kind, count in stored if kind in kinds and not any(part in name for part in names))


def _encoder_bytes(place: str | None) -> int:
    """Return the bytes of an encoder's weights in memory, all in float32; 0 if there is none, or it is not here yet.

    Raises ModelError.
    """
    if place is None or not Path(place).exists():
        return 0
    return _held(stored(Checkpoint.open(place)), None, torch.float32)


def _held(stored: Iterator[tuple[str, str, int]], config: PreTrainedConfig | None, dtype: torch.dtype) -> int:
    """Return the bytes of a file's tensors in memory: numbers in `dtype`, others unchanged."""
    tied = config is not None and bool(getattr(config, "tie_word_embeddings", False))
    total = 0
    for name, kind, count in stored:
        if tied and name == "lm_head.weight":
            continue  # some write the shared matrix twice
        total += count * (dtype.itemsize if kind in _NUMBERS else _OTHERS.get(kind, 1))
    return total


def take_largest_step(model: StepModel, *, max_sequences: int, max_prefill_rows: int, block_size: int) -> int:
    """Decode every sequence with whole mask groups and sampling beside a prompt of `max_prefill_rows`; return the rows.
    Raises NotEnoughMemory if that does not fit beside the weights."""
    facts = model.facts
    k = facts.most_masks
    layout = DraftLayout.full(k, k) if k else DraftLayout.plain()
    prompt = max(1, min(max_prefill_rows, facts.window - 2 * k - 4))
    # A sequence: one id of prompt, the drafts of two steps, and what those may emit.
    own, large = -(-(2 * k + 4) // block_size), -(-(prompt + k + 3) // block_size)
    num_blocks = (max_sequences - 1) * own + large
    rng = random.Random(0)
    allowed = [id_ for id_ in range(min(facts.vocab_size, 4096)) if id_ not in set(facts.mask_ids)]
    try:
        worker = Worker(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_sequences=max_sequences,
            controller=FixedLayout(lambda room: layout),
        )
        client = WorkerClient(worker, max_prefill_rows=1 << 20, max_draft_length=k)

        def admit(num_ids: int, num_pages: int) -> None:
            client.admit(
                rng.choices(allowed, k=num_ids),
                max_tokens=2 * k + 3,
                num_pages=num_pages,
                sampling=pb.Sampling(seed=len(client.sequences) + 1, temperature=1.0, top_p=0.95),
                max_draft_length=k,
            )

        for _ in range(max_sequences - 1):
            admit(1, own)
        errors = _errors(client.step())
        admit(prompt, large)
        report = client.step()
        errors += _errors(report)
        if worker.num_forwards != 1 + (max_sequences > 1):
            errors.append("Its sequences had to be stepped one by one.")
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        errors, report = [str(error).partition("\n")[0]], None
    if errors:
        give_back_unused()
        raise NotEnoughMemory(
            f"The largest step, {max_sequences} sequences with {k} drafts each and {prompt} rows of prompts, cannot be "
            f"taken beside the weights on {facts.device}: {errors[0]} Lower --max-sequences or --speculation."
        )
    stats = pb.StepStats() if report is None else report.stats
    return stats.chain_rows + stats.mask_rows + stats.prefill_rows


def fit_largest_step(
    model: StepModel, most: Callable[[], int], *, may_lower: bool, max_prefill_rows: int, block_size: int
) -> tuple[int, int]:
    """Take the largest step of as many sequences as fit; return how many, and the rows.

    `most`: how many shall run at once in what is free now; `may_lower`: fewer run where their largest step does not
    fit, or leaves pages for fewer. Raises NotEnoughMemory.
    """
    num_sequences = most()
    while True:
        try:
            rows = take_largest_step(
                model, max_sequences=num_sequences, max_prefill_rows=max_prefill_rows, block_size=block_size
            )
        except NotEnoughMemory:
            if not may_lower or num_sequences == 1:
                raise
            num_sequences //= 2
            continue
        if not may_lower or most() >= num_sequences:
            return num_sequences, rows
        give_back_unused()
        num_sequences //= 2


def bytes_of_graphs(model: StepModel, *, max_sequences: int, block_size: int, available: Callable[[], int]) -> int:
    """Return the bytes that device steps need beside weights and pages: their state, and the largest CUDA graph's
    memory, which the others share. They must stay free when pages are allocated.

    `available`: returns the bytes that are free now.
    """
    before = available()
    kv = model.allocate_kv(1, block_size)
    runner = DeviceRunner(model, kv, max_sequences=max_sequences)
    try:
        runner.take_largest()
        taken = max(0, before - available())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        taken = 0  # such steps run without a graph, or on the host
    del runner, kv
    give_back_unused()
    return taken


def _errors(report: pb.StepReport | None) -> list[str]:
    """Return failures, except non-finite logits, which arbitrary ids may cause."""
    sequences = report.sequences if report is not None else ()
    return [sequence.error for sequence in sequences if sequence.error.startswith(("The step failed", "There is not"))]
