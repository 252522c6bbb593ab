"""NVML, the NVIDIA driver's library: the GPUs of this machine, their load and the energy they drew."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


_NOT_FOUND = 6
"""NVML's status for a query without entries."""

_MOST_SAMPLES = 512


class NvmlError(RuntimeError):
    """NVML returned an error; the message is its own."""

    def __init__(self, message: str, status: int = 0) -> None:
        """`status`: NVML's return code; 0 if it was not called."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, usable by this process or not."""

    index: int
    name: str
    uuid: str  # GPU-…
    memory: int  # bytes
    handle: ctypes.c_void_p


class Nvml:
    """The initialized library. Every method raises NvmlError if the driver refuses."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._ask("nvmlInit_v2")

    @classmethod
    def open(cls, load: Callable[[str], Any] = ctypes.CDLL) -> Nvml | None:
        """Load the library; None without a driver that answers."""
        try:
            return cls(load(LIBRARY))
        except (OSError, NvmlError):
            return None

    @property
    def driver(self) -> str:
        """The driver's version, such as 580.65.06."""
        return self._text("nvmlSystemGetDriverVersion")

    @property
    def cuda(self) -> tuple[int, int]:
        """The newest CUDA version that the driver supports."""
        number = ctypes.c_int()
        self._ask("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    @property
    def gpus(self) -> list[Gpu]:
        count = ctypes.c_uint()
        self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._gpu(index) for index in range(count.value)]

    def joules(self, gpu: Gpu) -> float:
        """Return joules drawn since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", gpu.handle, ctypes.byref(millijoules))
        return millijoules.value / 1000

    def share_computing(self, gpu: Gpu) -> float:
        """Return the share of the last moments (up to a second) in which the GPU computed for any process."""
        rates = _Utilization()
        self._ask("nvmlDeviceGetUtilizationRates", gpu.handle, ctypes.byref(rates))
        return int(rates.gpu) / 100

    def computing_pids(self, gpu: Gpu) -> set[int]:
        """Return the processes that computed in the last seconds, by the driver's PIDs."""
        count, never = ctypes.c_uint(_MOST_SAMPLES), ctypes.c_ulonglong(0)
        samples = (_ProcessUtilization * _MOST_SAMPLES)()
        try:
            self._ask("nvmlDeviceGetProcessUtilization", gpu.handle, samples, ctypes.byref(count), never)
        except NvmlError as error:
            if error.status == _NOT_FOUND:
                return set()
            raise
        return {sample.pid for sample in samples[: count.value] if sample.multiprocessors}

    def _gpu(self, index: int) -> Gpu:
        handle, memory = ctypes.c_void_p(), _Memory()
        self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        self._ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        name, uuid = self._text("nvmlDeviceGetName", handle), self._text("nvmlDeviceGetUUID", handle)
        return Gpu(index, name, uuid, memory.total, handle)

    def _text(self, function: str, *arguments: object) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._ask(function, *arguments, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode(errors="replace")

    def _ask(self, function: str, *arguments: object) -> None:
        try:
            status = getattr(self._library, function)(*arguments)
        except AttributeError:
            raise NvmlError(f"this driver has no {function}") from None
        if status:
            raise NvmlError(f"{function} gave status {status}", status)


class _Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, per cent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _ProcessUtilization(ctypes.Structure):
    """nvmlProcessUtilizationSample_t: microseconds since 1970, per cent."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("when", ctypes.c_ulonglong),
        ("multiprocessors", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
    )
