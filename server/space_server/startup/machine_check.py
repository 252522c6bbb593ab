"""Checks what keeps a worker from starting or slows it on this machine, with cures; for start-up and `doctor`."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from space_common.finding import Finding
from space_common.worker_settings import WorkerSettings
from space_model.model_error import InvalidSetting

from space_server.machine.nvml import Nvml, NvmlError

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
    asked: str,
    build: TorchBuild,
    *,
    open_nvml: Callable[[], Nvml | None] = Nvml.open,
    devices: Path = Path("/dev"),
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
