"""`python -m space_server.startup.doctor` with a worker's flags: checks its start, and prints findings as JSON."""

from __future__ import annotations

from space_model.unsharded import do_without_sharding

if __name__ == "__main__":
    do_without_sharding()  # before anything imports transformers' models

import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from space_common import default_model
from space_common.finding import Finding
from space_common.hub import Hub, HubError, Missing, is_hub_id, size_text, split_hub_file
from space_common.nvml import Nvml, NvmlError
from space_common.worker.settings import WorkerSettings
from space_kernels.attention_backends import AttentionNeed, UnusableAttention, available_backends, backend_named
from space_kernels.build import cpu_library
from space_kernels.build.cache_folder import cache_folder
from space_model.adapters import Adapter
from space_model.checkpoint import family
from space_model.checkpoint.checkpoint import Checkpoint, adapter_section, read_object, with_quantization
from space_model.checkpoint.space_section import SpaceSection
from space_model.draft_networks import mtp
from space_model.draft_networks.draft_model import check_tokenizer
from space_model.draft_networks.eagle_files import FLAG, EagleFiles, ModelSizes
from space_model.draft_networks.place import check_place
from space_model.free_memory import FreeMemory
from space_model.heads import BaseSpec
from space_model.loading.load import check_tensors
from space_model.lora import describe_lora, why_no_loras
from space_model.model_error import CheckpointNotFound, InvalidLora, InvalidSetting, ModelError
from space_model.model_facts import number_format
from space_model.precision import choose_device
from space_model.released_adapters import AdapterFormat
from transformers import PreTrainedConfig

from space_server.config import ModelSource, parse
from space_server.machine.memory import NotEnoughMemory
from space_server.machine.sensors import Meter, find_sensors
from space_server.machine.threads import num_cores
from space_server.startup.model_need import AskedModel, ModelNeed, num_blocks_of, num_sequences_of, num_weights, shown

DRIVERS: Mapping[int, str] = {11: "450", 12: "525", 13: "580"}
"""The oldest driver of each major CUDA version; within one, a newer library runs on an older driver."""

SHARED_MEMORY = 1024**3
"""Bytes of /dev/shm recommended for ranks on GPUs: NVIDIA's advice for NCCL; Docker's default is 64 MiB."""

_OTHERWISE = "Or serve on the CPU: --device cpu."


@dataclass(frozen=True)
class TorchBuild:
    """What torch was built for, and whether it sees a GPU."""

    version: str
    cuda: str | None  # such as 13.0; None: a build without
    sees_gpu: bool

    @classmethod
    def here(cls) -> TorchBuild:
        return cls(torch.__version__, torch.version.cuda, torch.cuda.is_available())


def check_gpu(
    asked: str, build: TorchBuild, *, open_nvml: Callable[[], Nvml | None] = Nvml.open, devices: Path = Path("/dev")
) -> Finding:
    """Check the GPU that `--device` asks for; with `auto`, one that is present."""
    if asked not in ("auto", "cuda") and not asked.startswith("cuda:"):
        return Finding("gpu", "ok", f"None is asked for: --device {asked}.")
    must = asked != "auto"
    nvml = open_nvml()
    if nvml is None:
        if not any(devices.glob("nvidia[0-9]*")):
            if not must:
                return Finding("gpu", "ok", "There is none, or no driver: the model runs on the CPU.")
            return Finding(
                "gpu",
                "fail",
                "No NVIDIA GPU is seen.",
                "In a container: docker run --gpus all, with NVIDIA's container toolkit on the machine. Else install "
                f"the driver, {_oldest(build)} or newer. {_OTHERWISE}",
            )
        return Finding(
            "gpu",
            "fail",
            "There is a GPU, but its driver does not answer (libnvidia-ml).",
            "`nvidia-smi` says more; after an update of the driver restart the machine. In a container set "
            f"NVIDIA_DRIVER_CAPABILITIES=compute,utility. {_OTHERWISE}",
        )
    try:
        driver, cuda = nvml.driver, nvml.cuda
        gpus = ", ".join(f"{gpu.name} ({gpu.memory / 1024**3:.0f} GiB)" for gpu in nvml.gpus)
    except NvmlError as error:
        return Finding("gpu", "fail", f"The driver refuses to speak of its GPUs: {error}.", f"Restart it. {_OTHERWISE}")
    there = f"{gpus}, driver {driver}"
    if build.cuda is None:
        return Finding(
            "gpu",
            "fail" if must else "note",
            f"{there}; but torch {build.version} is a build without CUDA" + ("." if must else ", so the CPU is used."),
            "Install the build with it: docker/install.sh --device cuda.",
        )
    if cuda[0] < int(build.cuda.split(".")[0]):
        return Finding(
            "gpu",
            "fail",
            f"{there}, which runs CUDA up to {cuda[0]}.{cuda[1]}; torch {build.version} is built for {build.cuda}.",
            f"Install driver {_oldest(build)} or newer on the machine (a container uses the machine's), or a build of "
            f"torch for CUDA {cuda[0]}. {_OTHERWISE}",
        )
    if not build.sees_gpu:
        return Finding(
            "gpu",
            "fail",
            f"{there}; but torch sees no GPU.",
            "Is CUDA_VISIBLE_DEVICES empty, or another number than there are? May this user open /dev/nvidia*? "
            f"`python -c 'import torch; torch.zeros(1).cuda()'` says more. {_OTHERWISE}",
        )
    return Finding("gpu", "ok", f"{there}, CUDA {cuda[0]}.{cuda[1]}.")


def check_shared_memory(num_ranks: int, on_gpu: bool, folder: Path = Path("/dev/shm")) -> Finding | None:
    """Check that ranks on GPUs have enough shared memory; None without such ranks."""
    if num_ranks < 2 or not on_gpu:
        return None
    size = shutil.disk_usage(folder).total if folder.is_dir() else 0
    if size >= SHARED_MEMORY:
        return Finding("memory", "ok", f"{folder} has {size / 1024**2:.0f} MiB for {num_ranks} ranks.")
    return Finding(
        "memory",
        "note",
        f"{folder} has {size / 1024**2:.0f} MiB; NCCL passes data through it between {num_ranks} ranks, and may end "
        "with `No space left on device`.",
        "docker run --shm-size 1g (or --ipc host); in Kubernetes an emptyDir with medium: Memory at /dev/shm.",
    )


def check_cpu_kernels(config: WorkerSettings, device: torch.device, dtype: torch.dtype) -> None:
    """Raise InvalidSetting if `--cpu-kernels` asks for kernels that this model would not use."""
    asked = f"--cpu-kernels {config.cpu_kernels}"
    if config.cpu_kernels in ("auto", "torch"):
        return
    if device.type != "cpu":
        raise InvalidSetting(f"{asked} is for CPUs; the model is on {device}. Leave it out, or add --device cpu.")
    if dtype != torch.bfloat16:
        number = str(dtype).removeprefix("torch.")
        raise InvalidSetting(
            f"{asked}: our own operations take bfloat16, and this model would be held in {number}. Add "
            f"--dtype bfloat16, or use --cpu-kernels auto, which takes torch's for {number}."
        )
    if config.attention != "auto":
        raise InvalidSetting(f"{asked} and --attention {config.attention} exclude each other: leave one out.")


def check_compiler(
    on_gpu: bool, which: Callable[[str], str | None] = shutil.which, headers: Path | None = None
) -> Finding:
    """Check that Triton can compile the small C programs that launch its kernels."""
    if not on_gpu:
        return Finding("kernels", "ok", "Triton is not used on a CPU.")
    given = os.environ.get("CC")
    compiler = next((path for name in (given, "gcc", "cc", "clang") if name and (path := which(name))), None)
    include = headers or Path(sysconfig.get_paths()["include"])
    missing = [] if compiler else ["a C compiler"]
    if not (include / "Python.h").is_file():
        missing.append(f"Python.h in {include}")
    if missing:
        return Finding(
            "kernels",
            "fail",
            "Triton's kernels are launched by small C programs; missing here: " + ", ".join(missing) + ".",
            "Debian, Ubuntu: apt-get install gcc libc6-dev python3-dev; or use the GPU image, which has them.",
        )
    return Finding("kernels", "ok", f"Triton compiles its launchers with {compiler}.")


def _oldest(build: TorchBuild) -> str:
    major = int(build.cuda.split(".")[0]) if build.cuda else max(DRIVERS)
    return DRIVERS.get(major, DRIVERS[max(DRIVERS)])


OLDEST_CAPABILITY = (8, 0)


def main(arguments: Sequence[str]) -> int:
    config = parse(arguments)
    json.dump([asdict(finding) for finding in examine(config)], sys.stdout)
    return 0


def examine(config: WorkerSettings) -> Iterator[Finding]:
    """Yield the findings part by part; checks whose preconditions failed are left out."""
    yield from _environment()
    build = TorchBuild.here()
    gpu = check_gpu(config.device, build)
    yield gpu
    try:
        device = choose_device(config.device)
    except ModelError as error:
        if gpu.state != "fail":
            yield Finding("gpu", "fail", str(error))
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        yield from _capability(config, device)
    yield check_compiler(on_gpu)
    shared = check_shared_memory(config.tensor_parallel, on_gpu)
    if shared is not None:
        yield shared
    yield from _model(config, device)
    yield _cache()
    yield _energy(config)


def _environment() -> Iterator[Finding]:
    yield Finding("environment", "ok", f"Python {platform.python_version()}, {platform.platform()}")
    yield Finding(
        "environment",
        "ok",
        f"torch {torch.__version__}, transformers {transformers.__version__}; {num_cores()} cores to use, "
        f"{shown(FreeMemory.on(torch.device('cpu')).num_bytes)} of memory free",
    )


def _capability(config: WorkerSettings, device: torch.device) -> Iterator[Finding]:
    capability = torch.cuda.get_device_capability(device)
    shown = f"compute capability {capability[0]}.{capability[1]}"
    if capability < OLDEST_CAPABILITY:
        yield Finding(
            "gpu", "fail", f"{shown}: the kernels need 8.0 (A100, RTX 30) or newer.", "Serve on the CPU: --device cpu."
        )
    found = torch.cuda.device_count()
    if config.tensor_parallel > found:
        yield Finding(
            "gpu",
            "fail",
            f"--tensor-parallel {config.tensor_parallel} needs as many GPUs; torch sees {found}.",
            f"Lower it to {found}, or give the container more GPUs.",
        )


def _model(config: WorkerSettings, device: torch.device) -> Iterator[Finding]:
    hub = Hub(config.revision, config.token_file, config.download_folder, config.offline)
    missing: Missing | None = None
    adapters: list[Finding] = []
    try:
        own = default_model.packaged(config.model)
        if config.model == default_model.NAME and own is not None:
            missing = default_model.missing(hub)
            if missing.num_files:
                yield _download(config.model, missing)
                checkpoint = replace(_without_weights(config.model, own), unread_kind=default_model.SMOLLM2.kind)
            else:
                checkpoint = ModelSource(config).checkpoint()
        elif is_hub_id(config.model) and not Path(config.model).exists():
            missing = hub.missing(config.model)
            if missing.num_files:
                yield _download(config.model, missing)
                if split_hub_file(config.model)[1] is not None:
                    return  # what a GGUF file holds is known when it is here
                checkpoint = _without_weights(config.model, hub.fetch(config.model, weights=False))
            else:
                checkpoint = Checkpoint.open(config.model, hub.fetch)
        else:
            checkpoint = Checkpoint.open(config.model, hub.fetch)
        asked = AskedModel.of(config, checkpoint)
        if not (missing and missing.num_files):
            adapters = _check_adapters(config, checkpoint, asked)
            if asked.form is None and checkpoint.gguf is None:  # of others every weight would be read
                check_tensors(checkpoint)
    except (ModelError, HubError) as error:
        yield Finding("model", "fail", str(error))
        return
    model = asked.config
    held = number_format(asked.dtype, asked.weights, fp8_kv=config.kv_dtype == "fp8")
    kept = "" if asked.form is None else f", quantised ({asked.form.name})"
    if checkpoint.unread_kind is not None:
        kept = f", kept as {checkpoint.unread_kind} (GGUF)"
    if checkpoint.gguf is not None:
        kept = f", kept as {', '.join(checkpoint.gguf.kinds)} (GGUF)"
    drafts = _kind(asked.section) if asked.section.adapter else f"{len(asked.section.mask_ids)} masks"
    yield Finding(
        "model",
        "ok",
        f"{config.model}: {model.model_type}, {int(model.num_hidden_layers)} layers, held in {held} "
        f"({asked.dtype_reason}){kept}; {drafts}",
    )
    yield from adapters
    yield from _check_loras(config, device, int(model.hidden_size))
    yield _attention(config, device, asked.dtype, model)
    trained = family.positions(model) or 0
    window = config.max_model_len or trained
    if window < 1:
        cure = "Give --max-model-len."
        yield Finding("memory", "fail", "config.json does not say how many positions the model has.", cure)
        return
    longest = family.longest(model) or 0
    if longest and window > longest:
        yield Finding("memory", "fail", f"--max-model-len {window}: the model has {longest} positions.", "Lower it.")
        return
    try:
        unread = missing.num_bytes if missing else 0
        if unread and checkpoint.unread_kind is not None and asked.weights != "gguf":
            unread = num_weights(model) * torch.bfloat16.itemsize
        found = _draft_model(config, hub, checkpoint, device) if not unread else None
        if found is not None:
            yield found[0]
        if found is not None and found[0].state == "fail":
            return
        draft = None if found is None else found[1]
        head = _draft_head(config, hub, checkpoint, device) if not unread else None
        if head is not None:
            yield head[0]
        if head is not None and head[0].state == "fail":
            return
        need = ModelNeed.asked(config, checkpoint, draft, None if head is None else head[1], unread=unread)
    except (ModelError, HubError) as error:
        yield Finding("model", "fail", str(error))
        return
    yield _memory(config, need)


def _draft_model(
    config: WorkerSettings, hub: Hub, target: Checkpoint, device: torch.device
) -> tuple[Finding, Checkpoint | None] | None:
    """Check the model of --draft-model, and return it too if it is here; None: there is none."""
    name = config.draft_model
    if name is None:
        return None
    hub = replace(hub, revision=None)
    if name == mtp.NAME:
        try:
            check_place(device, config.tensor_parallel)
            layer = mtp.mtp_checkpoint(target)
        except ModelError as error:
            return Finding("model", "fail", str(error)), None
        return Finding("model", "ok", f"--draft-model {name}: the MTP layer of {target.name} drafts"), layer
    if is_hub_id(name) and not Path(name).exists() and (missing := hub.missing(name)).num_files:
        return _download(name, missing), None
    try:
        check_place(device, config.tensor_parallel)
        checkpoint = Checkpoint.open(name, hub.fetch)
        check_tokenizer(checkpoint, target)
        model = family.read_config(checkpoint)
    except ModelError as error:
        return Finding("model", "fail", str(error)), None
    layers = int(model.num_hidden_layers)
    fact = f"--draft-model {name}: {model.model_type}, {layers} layers, drafts with {target.name}'s tokenizer"
    return Finding("model", "ok", fact), checkpoint


def _draft_head(
    config: WorkerSettings, hub: Hub, target: Checkpoint, device: torch.device
) -> tuple[Finding, EagleFiles | None] | None:
    """Check the EAGLE head of --draft-head, and return it too if it is here; None: there is none."""
    name = config.draft_head
    if name is None:
        return None
    hub = replace(hub, revision=None)
    if is_hub_id(name) and not Path(name).exists() and (missing := hub.missing(name)).num_files:
        return _download(name, missing), None
    try:
        check_place(device, config.tensor_parallel, FLAG)
        head = ModelSource(config).draft_head()
        assert head is not None
        model = family.read_config(target)
        sizes = ModelSizes(target.name, int(model.hidden_size), int(model.vocab_size))
        head.check(sizes)
        head.tapped(int(model.num_hidden_layers))
    except ModelError as error:
        return Finding("model", "fail", str(error)), None
    kind, ids = f"EAGLE-{head.generation} head", head.draft_ids(sizes.vocab_size)
    vocabulary = "all ids" if ids is None else f"{len(ids)} of the ids"
    return Finding("model", "ok", f"--draft-head {name}: an {kind}, drafts {vocabulary} for {target.name}"), head


def _check_adapters(config: WorkerSettings, checkpoint: Checkpoint, asked: AskedModel) -> list[Finding]:
    """Return a finding for each adapter of --adapter. Raise ModelError for one that was made for other weights or
    cannot be read, as loading does. Those of the hub are checked when they are here."""
    asked.section.check_base(checkpoint.name, checkpoint.weights_sha256)
    spec, found = BaseSpec(int(asked.config.hidden_size), asked.dtype), []
    for name, place in ModelSource(config).local_adapters().items():
        folder, config_json = adapter_section(place)
        section = SpaceSection.parse(
            config_json, mask_ids=None, num_masks=None, vocab_size=int(asked.config.vocab_size)
        )
        section.check_base(checkpoint.name, checkpoint.weights_sha256)
        gated = Adapter.read(name, folder, section, spec).gated
        sizes = f"rank {gated.rank} on {len(gated.pairs)} linears, {gated.num_masks} masks"
        found.append(Finding("model", "ok", f"--adapter {name}: {_kind(section)}; {sizes}"))
    return found


def _check_loras(config: WorkerSettings, device: torch.device, hidden_size: int) -> Iterator[Finding]:
    """Check the folders of --lora; whether they fit every linear of the model is known once it is loaded."""
    for name, folder in config.lora:
        try:
            if why_none := why_no_loras(device, config.tensor_parallel):
                raise InvalidLora(why_none)
            yield Finding("model", "ok", f"--lora {name}: a LoRA, {describe_lora(Path(folder), hidden_size)}")
        except InvalidLora as error:
            yield Finding("model", "fail", f"--lora {name}: {error}")


def _kind(section: SpaceSection) -> str:
    """Return what an adapter is, in words."""
    if section.mask_inputs is None:
        return "an adapter that drafts"
    if section.mask_inputs.format is AdapterFormat.UNO:
        return "an adapter that drafts, in Uno's format (masks read noise ids)"
    return "an adapter that drafts, in I-DLM's format (masks read one id)"


def _without_weights(name: str, folder: Path) -> Checkpoint:
    """Open a checkpoint whose weights are not downloaded yet."""
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointNotFound(f"{name} has no config.json.")
    return Checkpoint(name, folder, with_quantization(folder, read_object(file)), (), folder)


def _download(model: str, missing: Missing) -> Finding:
    what = f"{missing.num_files} files, " if missing.num_files > 1 else ""
    fact = (
        f"{model} is not here yet: {what}{size_text(missing.num_bytes)}, are fetched at the first start; "
        f"{missing.folder} has {size_text(missing.free)} free."
    )
    if missing.num_bytes > missing.free:
        return Finding("model", "fail", fact, "Make room, or choose another folder with --download-folder.")
    return Finding("model", "note", fact)


def _attention(config: WorkerSettings, device: torch.device, dtype: torch.dtype, model: PreTrainedConfig) -> Finding:
    num_heads, kv_heads, head_dim = family.sizes(model)
    need = AttentionNeed.on(
        device,
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        block_size=config.block_size,
        exact=config.exact,
        fp8_kv=config.kv_dtype == "fp8",
        odd_values=family.has_odd_values(model),
        is_chunked=family.is_chunked(model),
    )
    try:
        check_cpu_kernels(config, device, dtype)
    except InvalidSetting as error:
        return Finding("kernels", "fail", str(error))
    if config.attention != "auto":
        try:
            return Finding("kernels", "ok", f"attention: {backend_named(config.attention, need).name}, as asked.")
        except UnusableAttention as error:
            return Finding("kernels", "fail", str(error))
    if device.type == "cpu":
        return _cpu_kernels(dtype, config.cpu_kernels)
    can, cannot = available_backends(need)
    others = "; ".join(f"{name} {why}" for name, why in cannot.items() if name != "torch")
    fact = f"attention: the fastest at start of {', '.join(backend.name for backend in can)}."
    return Finding("kernels", "ok", fact, f"Not used: {others}." if others else "")


def _cpu_kernels(dtype: torch.dtype, asked: str) -> Finding:
    """Say which CPU kernels a model of this dtype uses here."""
    if dtype != torch.bfloat16 or asked == "torch":
        why = "as asked" if asked == "torch" else f"as for every {str(dtype).removeprefix('torch.')} model"
        return Finding("kernels", "ok", f"torch's own operations, {why}.")
    kinds = cpu_library.own_kinds()
    if asked not in ("auto", "compiled") and asked not in kinds:
        return Finding(
            "kernels", "fail", f"this processor is no {asked}.", f"--cpu-kernels {', '.join(['auto', *kinds])}."
        )
    cure = "Debian, Ubuntu: apt-get install g++."
    if not kinds:
        fact, cure = "torch's own operations: there are none of ours for this processor.", ""
    else:
        try:
            library = cpu_library.best_library([asked] if asked in kinds else kinds)
            return Finding("kernels", "ok", f"our own operations for {library.kind}, in {library.path}.")
        except OSError as error:
            fact = f"torch's own operations, which are slower: {error}."
    return Finding("kernels", "note" if asked == "auto" else "fail", fact, cure)


def _memory(config: WorkerSettings, need: ModelNeed) -> Finding:
    """Check the memory, as the worker does before loading."""
    free = FreeMemory.on(need.device)
    try:
        blocks = num_blocks_of(config, need, free)
    except NotEnoughMemory as error:
        return Finding("memory", "fail", str(error))
    used = blocks * config.block_size * need.kv_bytes_per_token
    num_sequences = num_sequences_of(config, need, free)
    states = f" Recurrent states of {num_sequences} sequences take {shown(num_sequences * need.states)}."
    return Finding(
        "memory",
        "ok",
        f"{shown(free.num_bytes)} are free on {need.device} ({free.bound}); the model takes {shown(need.fixed)}, "
        f"{need.parts(windows=False)}. {blocks} pages of {config.block_size} tokens take {shown(used)}: "
        f"{blocks * config.block_size / need.window:.1f} whole windows of {need.window}"
        + ("." if need.device.type == "cpu" else ", less what the largest step needs.")
        + f" At most {num_sequences} sequences run at once."
        + states * bool(need.states),
    )


def _cache() -> Finding:
    """Check the folder that keeps step costs."""
    folder = cache_folder()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if os.access(there, os.W_OK):
        return Finding("environment", "ok", f"Measured costs are kept in {folder}.")
    cure = "Set XDG_CACHE_HOME to a folder that may be written."
    return Finding("environment", "note", f"{there} may not be written: costs are measured at every start.", cure)


def _energy(config: WorkerSettings) -> Finding:
    devices = Meter(find_sensors([], powercap=config.powercap)).devices
    if devices:
        return Finding("energy", "ok", f"Counted of {', '.join(devices)}.")
    return Finding(
        "energy",
        "ok",
        f"No counter of a processor may be read in {config.powercap}; a GPU's is asked at start.",
        "docker/README.md, Energy." if config.powercap.is_dir() and any(config.powercap.glob("intel-rapl:*")) else "",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
