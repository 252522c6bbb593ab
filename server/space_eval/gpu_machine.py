"""What figures of a GPU must be read with: device, driver, versions, commit."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from space_eval.bench.facts import commit, machine

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-4", "flashinfer-python", "grpcio")


def device_name(*, dry: bool) -> str:
    """Of the GPU that is measured; `cpu` in a dry run."""
    return "cpu" if dry or not torch.cuda.is_available() else torch.cuda.get_device_name()


def gpu_facts(*, dry: bool, said_commit: str | None = None) -> dict[str, str]:
    """By name. `said_commit`: of a copy that is no checkout."""
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit() or said_commit or "unknown: this copy is no checkout; say it with --commit",
        "machine": machine(),
        "python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
        "device": device_name(dry=dry),
    }
    if not dry and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        facts |= {
            "driver": driver(),
            "CUDA of torch": str(torch.version.cuda),
            "compute capability": f"{found.major}.{found.minor}",
            "device memory": f"{found.total_memory / 1024**3:.1f} GiB",
            "multiprocessors": str(found.multi_processor_count),
        }
    return facts


def installed(package: str) -> str:
    """Its version, or `absent`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def driver() -> str:
    """NVIDIA's, as nvidia-smi says."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown: nvidia-smi does not answer"
    return said.splitlines()[0].strip() if said.strip() else "unknown"
