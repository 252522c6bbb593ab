"""What NVIDIA's driver says of itself and its GPUs, asked of the library (libnvidia-ml) that every driver brings."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"


class NvmlError(RuntimeError):
    """The library refused; the message is its own."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, whether or not this process may compute on it."""

    index: int
    name: str
    uuid: str  # GPU-…
    memory: int  # bytes
    handle: ctypes.c_void_p


class Nvml:
    """The library, initialised. Raises NvmlError from every call that the driver refuses."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._ask("nvmlInit_v2")

    @classmethod
    def open(cls, load: Callable[[str], Any] = ctypes.CDLL) -> Nvml | None:
        """None where there is no driver, or one that does not answer."""
        try:
            return cls(load(LIBRARY))
        except (OSError, NvmlError):
            return None

    @property
    def driver(self) -> str:
        """Its version, such as 580.65.06."""
        return self._text("nvmlSystemGetDriverVersion")

    @property
    def cuda(self) -> tuple[int, int]:
        """The newest CUDA that the driver runs."""
        number = ctypes.c_int()
        self._ask("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    @property
    def gpus(self) -> list[Gpu]:
        count = ctypes.c_uint()
        self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._gpu(index) for index in range(count.value)]

    def joules(self, gpu: Gpu) -> float:
        """Drawn since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", gpu.handle, ctypes.byref(millijoules))
        return millijoules.value / 1000

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
            raise NvmlError(f"{function} gave status {status}")


class _Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))
