"""A CUDA device for tests on a machine without one: its memory is the host's, its rules are CUDA's.

    with SimulatedCuda() as device:
        model = load_model(path, device="cuda", exact=True)

Operations compute at once, on the host, by torch's CPU kernels and Triton's interpreter (TRITON_INTERPRET=1). What a
GPU would refuse raises as there; what it would silently get wrong gives garbage here too, or raises:

- A tensor of the host beside one of the device raises; so does one in a Triton kernel.
- A wait of the host (`.item()`, a mask as an index, a copy that is not asynchronous, …) is counted, warned of or raised
  by `torch.cuda.set_sync_debug_mode`, and raises in a capture.
- A copy to pinned memory arrives when the host has waited for it. Until then there is garbage. Pinned memory that is
  written while a copy from it is under way raises at the next wait.
- Fresh memory holds garbage.
- In a capture nothing is computed: operations are recorded with the addresses that they use. A replay reads and writes
  these addresses. Memory that a graph was captured with, and that is freed since, raises. What a graph allocated and
  freed holds garbage between replays, and all that it allocated once an earlier graph of its pool is replayed.
- Memory is bounded: an allocation beyond `memory` bytes raises torch.OutOfMemoryError.

Not simulated: races between streams (operations run in the order of their calls, whatever their streams), time, and
what a compiler does. Values are those of the CPU's operations.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import SimpleNamespace, TracebackType
from typing import Any, ClassVar
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")

_WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_GARBAGE = 77  # as an integer


class DeviceTensor(Tensor):
    """A tensor of the simulated device; `memory` is its content, on the host."""

    memory: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory: Tensor) -> DeviceTensor:
        with torch.inference_mode(False):
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                memory.size(),
                strides=memory.stride(),
                storage_offset=memory.storage_offset(),
                dtype=memory.dtype,
                layout=memory.layout,
                device=CPU,  # as C++ sees it, which has no CUDA here
                requires_grad=False,
            )
        made.memory = memory
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({self.memory!r})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return SimulatedCuda.current()._dispatch(func, args, kwargs or {})


@dataclass(eq=False)
class Stream:
    """An ordered queue of work, of which copies to and from pinned memory wait until the host waits."""

    cuda_stream: int = field(default_factory=partial(next, count(1)))
    num_queued: int = 0
    pending: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    seen: dict[Stream, int] = field(default_factory=dict)  # other streams' work that precedes what comes

    def queue(self, arrive: Callable[[], None]) -> None:
        self.num_queued += 1
        self.pending.append((self.num_queued, arrive))

    def marks(self) -> dict[Stream, int]:
        return self.seen | {self: self.num_queued}

    def arrive(self, last: int) -> None:
        """Let all that was queued up to number `last` arrive."""
        while self.pending and self.pending[0][0] <= last:
            self.pending.pop(0)[1]()

    def synchronize(self) -> None:
        SimulatedCuda.current()._wait("cudaStreamSynchronize", self)

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.marks()

    def wait_event(self, event: Event) -> None:
        self.seen |= event.marks

    def record_event(self, event: Event | None = None) -> Event:
        found = event or Event()
        found.record(self)
        return found


class Event:
    """A place in a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.marks: dict[Stream, int] = {}
        self._has_time, self._time = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        device = SimulatedCuda.current()
        self.marks, self._time = (stream or device.stream).marks(), device.clock()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or SimulatedCuda.current().stream).wait_event(self)

    def synchronize(self) -> None:
        device = SimulatedCuda.current()
        device._refuse_in_capture("cudaEventSynchronize")
        device.num_waits["cudaEventSynchronize"] += 1
        for stream, last in self.marks.items():
            stream.arrive(last)

    def query(self) -> bool:
        """Whether it is reached. The host has to ask by `synchronize`: nothing arrives by itself."""
        return all(not stream.pending or stream.pending[0][0] > last for stream, last in self.marks.items())

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds, of the host's clock."""
        if not (self._has_time and end._has_time):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return max(1000.0 * (end._time - self._time), 1e-3)


@dataclass(frozen=True)
class Place:
    """A tensor that a graph reads or writes, by its address."""

    storage: StorageWeakRef
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, memory: Tensor) -> Place:
        storage = StorageWeakRef(memory.untyped_storage())
        return cls(storage, memory.dtype, tuple(memory.shape), memory.stride(), memory.storage_offset())

    def tensor(self, what: str) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError(f"a graph uses memory that was freed since its capture: {what} of {self.size}")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class CUDAGraph:
    """Recorded operations."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.nodes: list[tuple[str, Callable[[], None]]] = []
        self.allocated: list[torch.UntypedStorage] = []
        self.pool: object = None
        self.number = 0

    def reset(self) -> None:
        self.nodes, self.allocated = [], []

    def holds(self, storage: torch.UntypedStorage) -> bool:
        return any(one.data_ptr() == storage.data_ptr() for one in self.allocated)

    def replay(self) -> None:
        device = SimulatedCuda.current()
        device._refuse_in_capture("cudaGraphLaunch")
        device.num_launches["graph"] += 1
        with _plain():
            for other in device.graphs_of(self.pool):
                if other.number > self.number:
                    other.spoil()
            self.spoil(only_freed=True)
            for _, run in self.nodes:
                run()

    def spoil(self, *, only_freed: bool = False) -> None:
        """Overwrite the memory that the graph allocated; `only_freed`: what of it no tensor holds."""
        for storage in self.allocated:
            if not only_freed or torch._C._storage_Use_Count(storage._cdata) == 1:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # floats: NaN


@contextmanager
def _plain() -> Iterator[None]:
    """The host's torch, without the device."""
    with torch.inference_mode(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _memory(value: Any) -> Any:
    return value.memory if isinstance(value, DeviceTensor) else value


def _tensors(*values: Any) -> list[Tensor]:
    return [one for one in tree_flatten(values)[0] if isinstance(one, Tensor)]


def _spoil(memory: Tensor) -> None:
    if memory.is_floating_point() or memory.is_complex():
        memory.fill_(float("nan"))
    elif memory.dtype == torch.bool:
        memory.fill_(True)
    else:
        memory.fill_(_GARBAGE)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Dispatch(TorchDispatchMode):
    """Sends operations on the device's tensors, and those that make some, to the device."""

    def __init__(self, device: SimulatedCuda, *, is_part: bool = False) -> None:
        """`is_part`: inside an operation of torch's C++ that consists of others. It makes its temporary tensors where
        it believes its arguments to be."""
        super().__init__()
        self._of, self._is_part = device, is_part

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if self._is_part and given.get("device") is not None:
            given = {**given, "device": CUDA}
        if (
            _is_cuda(given.get("device"))
            or given.get("pin_memory")
            or func in (aten.is_pinned.default, aten._pin_memory.default)
            or any(isinstance(one, DeviceTensor) for one in _tensors(args, given))
        ):
            return self._of._dispatch(func, args, given)
        return func(*args, **given)


class _Functions(TorchFunctionMode):
    """Handles calls that torch's C++ would answer by itself, from the device that it believes a tensor to be on."""

    def __init__(self, device: SimulatedCuda) -> None:
        super().__init__()
        self._of = device

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_cuda(given.get("device")):
            del given["device"]
            return self._of._moved(func(*args, **given), CUDA)
        if func is Tensor.tolist and isinstance(args[0], DeviceTensor):
            self._of._wait("tolist")
            return args[0].memory.tolist()
        if func is Tensor.pin_memory:
            return self._of.pinned(args[0])
        if func is Tensor.cuda:
            return self._of._moved(args[0], CUDA, non_blocking=bool(given.get("non_blocking")))
        if func is Tensor.cpu:
            return self._of._moved(args[0], CPU)
        if func is Tensor.to:
            return self._to(*args, **given)
        if given.get("device") is None and any(isinstance(one, DeviceTensor) for one in _tensors(args, given)):
            with _Dispatch(self._of, is_part=True):
                return func(*args, **given)
        return func(*args, **given)

    def _to(
        self,
        tensor: Tensor,
        *places: Any,
        dtype: torch.dtype | None = None,
        device: Any = None,
        non_blocking: bool = False,
        copy: bool = False,
        **settings: Any,
    ) -> Tensor:
        flags = []
        for one in places:
            if isinstance(one, torch.dtype):
                dtype = one
            elif isinstance(one, Tensor):
                device, dtype = one.device, one.dtype
            elif isinstance(one, bool):
                flags.append(one)
            elif one is not None:
                device = one
        non_blocking, copy = [*flags, non_blocking, copy][:2] if len(flags) < 2 else flags[:2]
        target = tensor.device if device is None else torch.device(device)
        if tensor.device.type == target.type != "cuda":
            return Tensor.to(tensor, target, dtype or tensor.dtype, non_blocking=non_blocking, copy=copy, **settings)
        if tensor.device.type == target.type and dtype in (None, tensor.dtype) and not copy:
            return tensor
        return self._of._moved(tensor, target, dtype=dtype, non_blocking=non_blocking)


class SimulatedCuda:
    """The device. Entered once at a time; torch.cuda is its own inside."""

    _entered: ClassVar[SimulatedCuda | None] = None

    def __init__(
        self,
        *,
        memory: int = 1 << 30,
        capability: tuple[int, int] = (8, 0),
        num_multiprocessors: int = 4,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`memory`: bytes, all of them free at the start; `clock`: seconds, of events."""
        self.memory, self.capability, self.clock = memory, capability, clock
        self.num_multiprocessors = num_multiprocessors
        self.num_waits: Counter[str] = Counter()  # of the host for the device
        self.num_launches: Counter[str] = Counter()  # kernels by name, and graphs
        self.stream = Stream(0)
        self._streams = [self.stream]
        self._capturing: CUDAGraph | None = None
        self._has_failed = False  # the capture
        self._ends: object | None = None  # the pool that the allocator believes to be captured to
        self._graphs: WeakSet[CUDAGraph] = WeakSet()  # a graph that is dropped gives its memory back
        self._numbers = count(1)  # of pools and graphs
        self._debug = "default"
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._live: list[tuple[StorageWeakRef, int]] = []
        self._num_live = 0  # bytes at most
        self._modes = _Dispatch(self), _Functions(self)
        self._exit = ExitStack()

    @classmethod
    def current(cls) -> SimulatedCuda:
        assert cls._entered is not None, "no simulated device is entered"
        return cls._entered

    def __enter__(self) -> SimulatedCuda:
        assert SimulatedCuda._entered is None, "there is one device"
        import torch.utils._device as factories

        factories._device_constructors()  # reads torch's own functions, once
        for owner, name, value in self._replaced():
            self._exit.enter_context(patch.object(owner, name, value))
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            self._exit.enter_context(patch.dict(torch._C.__dict__, {name: getattr(self, name)}))
        for mode in self._modes:
            self._exit.enter_context(mode)
        SimulatedCuda._entered = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, of: TracebackType | None) -> None:
        self._exit.close()
        SimulatedCuda._entered = None

    # -------------------------------------------------------------------------------------------- torch.cuda

    def _replaced(self) -> list[tuple[Any, str, Any]]:
        from triton.runtime import interpreter
        from triton.runtime.interpreter import InterpretedFunction

        device, properties = (
            self,
            SimpleNamespace(
                multi_processor_count=self.num_multiprocessors,
                name="simulated",
                uuid="simulated",
                total_memory=self.memory,
                major=self.capability[0],
                minor=self.capability[1],
            ),
        )
        launch, patch_language, interpreted = InterpretedFunction.run, interpreter._patch_lang, set[tuple[bool, ...]]()

        def patched_once(fn: Any) -> Any:
            """Once for all kernels: the interpreter does it at every call of a function, for a third of its time."""
            seen = {id(one) for one in fn.__globals__.values()}
            languages = tuple(id(one) in seen for one in (interpreter.tl, interpreter.tl.core))
            if languages not in interpreted:
                interpreted.add(languages)
                self._exit.callback(patch_language(fn).restore)
            return SimpleNamespace(restore=lambda: None)

        def launched(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **settings: Any) -> None:
            device._launch(partial(launch, kernel), kernel, args, grid, settings)

        submit = ThreadPoolExecutor.submit

        def submitted(pool: Any, work: Callable[..., Any], *args: Any, **settings: Any) -> Any:
            def run(*args: Any, **settings: Any) -> Any:
                with _Dispatch(device), _Functions(device):  # modes are a thread's own
                    return work(*args, **settings)

            return submit(pool, run, *args, **settings)

        @contextmanager
        def entered(stream: Stream | None) -> Iterator[None]:
            before = device.stream
            device.stream = stream or before
            try:
                yield
            finally:
                device.stream = before

        cuda = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda of=None: self.capability,
            "get_device_properties": lambda of=None: properties,
            "get_device_name": lambda of=None: properties.name,
            "mem_get_info": lambda of=None: (self.memory - self.num_bytes, self.memory),
            "synchronize": lambda of=None: self._wait("cudaDeviceSynchronize", *self._streams),
            "empty_cache": self._empty_cache,
            "memory_snapshot": list,
            "Stream": self._new_stream,
            "Event": Event,
            "CUDAGraph": CUDAGraph,
            "graph": self._capture,
            "graph_pool_handle": self._new_pool,
            "current_stream": lambda of=None: self.stream,
            "default_stream": lambda of=None: self._streams[0],
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "stream": entered,
            "is_current_stream_capturing": lambda: self._capturing is not None,
            "set_sync_debug_mode": lambda mode: setattr(self, "_debug", mode),
        }
        return [
            *((torch.cuda, name, value) for name, value in cuda.items()),
            (InterpretedFunction, "run", launched),
            (interpreter, "_patch_lang", patched_once),
            (ThreadPoolExecutor, "submit", submitted),
        ]

    def _new_stream(self, *settings: Any, **others: Any) -> Stream:
        self._streams.append(Stream())
        return self._streams[-1]

    def _new_pool(self) -> tuple[int, int]:
        return 0, next(self._numbers)

    def _empty_cache(self) -> None:
        if self._ends is not None:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def graphs_of(self, pool: object) -> list[CUDAGraph]:
        return [graph for graph in self._graphs if graph.nodes and pool is not None and graph.pool == pool]

    @contextmanager
    def _capture(
        self, graph: CUDAGraph, pool: object = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """As torch ends it: a capture in which something failed leaves its own stream, and the allocator capturing."""
        self._refuse_in_capture("cudaStreamBeginCapture")
        self._wait("cudaDeviceSynchronize", *self._streams)
        before, self.stream = self.stream, stream or self._new_stream()
        graph.pool, graph.number = pool or self._new_pool(), next(self._numbers)
        self._capturing, self._has_failed, self._ends = graph, False, graph.pool
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._capturing = None
            if self._has_failed:
                graph.reset()
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            self.stream, self._ends = before, None
            self._graphs.add(graph)

    def _cuda_endAllocateToPool(self, device: int, pool: object) -> None:
        if self._ends is None:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self._ends = None

    def _cuda_releasePool(self, device: int, pool: object) -> None:
        pass

    # -------------------------------------------------------------------------------------------- waits

    def _refuse_in_capture(self, what: str) -> None:
        if self._capturing is not None:
            self._has_failed = True
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")

    def _wait(self, what: str, *streams: Stream) -> None:
        """The host waits for these streams, or the current one."""
        self._refuse_in_capture(what)
        self.num_waits[what] += 1
        if self._debug in ("warn", 1):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if self._debug in ("error", 2):
            raise RuntimeError(f"called a synchronizing CUDA operation ({what})")
        for stream in streams or (self.stream,):
            for other, last in stream.marks().items():
                other.arrive(last)

    # -------------------------------------------------------------------------------------------- memory

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        self._live = [(storage, size) for storage, size in self._live if not storage.expired()]
        self._num_live = sum(size for _, size in self._live)
        return self._num_live

    def _allocated(self, memory: Tensor) -> DeviceTensor:
        """Return fresh memory as a tensor of the device."""
        storage = memory.untyped_storage()
        size = storage.nbytes()
        if self._num_live + size > self.memory and self.num_bytes + size > self.memory:
            if self._capturing is not None:
                self._has_failed = True
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self._live.append((StorageWeakRef(storage), size))
        self._num_live += size
        if self._capturing is not None:
            self._capturing.allocated.append(storage)
        return DeviceTensor(memory)

    def pinned(self, host: Tensor) -> Tensor:
        """Return a copy of a host tensor in pinned memory."""
        with _plain(), torch.inference_mode(False):
            made = host.clone()
        self._pinned[made.untyped_storage().data_ptr()] = made.untyped_storage()
        return made

    def is_pinned(self, host: Tensor) -> bool:
        return not isinstance(host, DeviceTensor) and host.untyped_storage().data_ptr() in self._pinned

    def _moved(
        self, tensor: Tensor, target: torch.device, *, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> Tensor:
        """Return a copy on the target, or this tensor if it is there and has this dtype."""
        wanted = dtype or tensor.dtype
        if tensor.device.type == target.type and wanted == tensor.dtype:
            return tensor
        if tensor.device.type == target.type:
            with self._modes[0]:
                moved: Tensor = aten._to_copy.default(tensor, dtype=wanted)
            return moved
        with _plain(), torch.inference_mode(target.type == "cuda"):
            fresh = torch.empty_like(_memory(tensor), dtype=wanted)
        if target.type == "cuda":
            made = self._allocated(fresh)
            self._to_device(made, tensor, non_blocking=non_blocking)
            return made
        self._to_host(fresh, tensor, non_blocking=False)
        return fresh

    def _to_device(self, target: Tensor, host: Tensor, *, non_blocking: bool) -> None:
        pinned = self.is_pinned(host)
        if self._capturing is not None or not non_blocking:
            self._wait("copy from the host" if pinned else "copy from pageable memory")
        with _plain():
            target.memory.copy_(host)
            if pinned and non_blocking:
                sent = host.clone()
                self.stream.queue(partial(_check_unchanged, host, sent))

    def _to_host(self, host: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        if self._capturing is not None or not (non_blocking and self.is_pinned(host)):
            self._wait("copy to the host")
            with _plain():
                host.copy_(source.memory)
            return
        with _plain():
            found = source.memory.clone()
            _spoil(host)
        self.stream.queue(partial(_arrive, host, found))

    # -------------------------------------------------------------------------------------------- operations

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten._pin_memory.default:
            return self.pinned(args[0])
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with _Dispatch(self, is_part=True):
                return func.decompose(*args, **kwargs)
        given = _tensors(args, kwargs)
        on_device = any(isinstance(one, DeviceTensor) for one in given)
        if func is aten.copy_.default and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
            return self._copy(args[0], args[1], bool(kwargs.get("non_blocking") or args[2:3] == (True,)))
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            return self._moved(
                args[0],
                torch.device(kwargs["device"]),
                dtype=kwargs.get("dtype"),
                non_blocking=bool(kwargs.get("non_blocking")),
            )
        if not on_device and not _is_cuda(kwargs.get("device")):  # pinned memory
            made = func(*args, **{**kwargs, "pin_memory": False})
            return self.pinned(made)
        self._check_devices(func, args, given)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": CPU}
        self.num_launches[func.name().removeprefix("aten::")] += 1
        return self._compute(func, args, kwargs, given)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        if isinstance(source, DeviceTensor):
            self._to_host(target, source, non_blocking=non_blocking)
        elif not source.dim():  # as torch does: a value
            return self._dispatch(aten.fill_.Tensor, (target, source), {})
        else:
            self._to_device(target, source, non_blocking=non_blocking)
        return target

    def _check_devices(self, func: Any, args: tuple[Any, ...], given: Sequence[Tensor]) -> None:
        if func in _WAITS:
            self._wait(func.name())
        hosts = [one for one in given if not isinstance(one, DeviceTensor) and one.dim()]
        if func in _INDEXED and isinstance(args[0], DeviceTensor):
            indices = [one for one in args[1] if one is not None]
            if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
                self._wait("a mask as an index")
            for one in indices:
                if not isinstance(one, DeviceTensor):
                    self._wait("an index on the host")
            hosts = [one for one in hosts if not any(one is index for index in indices)]
        if hosts:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"({func.name()}, {[(type(one).__name__, tuple(one.shape), one.dtype) for one in given]})"
            )

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
        returns, schema = func._schema.returns, func._schema
        written = [
            value
            for argument, value in [
                *zip(schema.arguments, args, strict=False),
                *((one, kwargs[one.name]) for one in schema.arguments if one.name in kwargs),
            ]
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        is_view = not written and any(one.alias_info is not None for one in returns)
        inner, settings = tree_map(_memory, args), tree_map(_memory, kwargs)
        with _plain():
            if is_view:
                return tree_map(
                    lambda one: DeviceTensor(one) if isinstance(one, Tensor) else one, func(*inner, **settings)
                )
            if self._capturing is None:
                found = func(*inner, **settings)
            elif written:
                self._record(func, args, kwargs, [])
                return written[0] if len(returns) == 1 else tuple(written)
            else:
                found = self._shaped(func, inner, settings)
        if written:
            return written[0] if len(returns) == 1 else tuple(written) if returns else None
        with _plain():
            if func in _EMPTY or self._capturing is not None:
                for one in _tensors(found):
                    _spoil(one)
            wrapped = tree_map(lambda one: self._allocated(one) if isinstance(one, Tensor) else one, found)
            if self._capturing is not None and func not in _EMPTY:
                self._record(func, args, kwargs, _tensors(found))
        return wrapped

    def _shaped(self, func: Any, inner: Any, settings: Any) -> Any:
        """Return memory for the results, which are not computed."""
        if not _tensors(inner, settings):
            return func(*inner, **settings)

        def shape(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")

        def fresh(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)

        without = {name: value for name, value in settings.items() if name != "device"}
        return tree_map(fresh, func(*tree_map(shape, inner), **tree_map(shape, without)))

    def _record(self, func: Any, given: Any, named: Any, results: Sequence[Tensor]) -> None:
        name, places = func.name(), [Place.of(one) for one in results]
        args, kwargs = tree_map(_place, given), tree_map(_place, named)

        def run() -> None:
            found = func(*tree_map(partial(_found, name), args), **tree_map(partial(_found, name), kwargs))
            for place, one in zip(places, _tensors(found) if places else [], strict=True):
                place.tensor(name).copy_(one)

        self._node(name, run)

    def _node(self, name: str, run: Callable[[], None]) -> None:
        assert self._capturing is not None
        self._capturing.nodes.append((name, run))

    def _launch(
        self, launch: Callable[..., None], kernel: Any, args: Sequence[Any], grid: Any, settings: dict[str, Any]
    ) -> None:
        """Run a Triton kernel, or record it."""
        name = kernel.fn.__name__
        if any(not isinstance(one, DeviceTensor) for one in _tensors(args, settings)):
            raise ValueError(f"Pointer argument cannot be accessed from Triton (cpu tensor?): {name}")
        named = dict(zip(kernel.arg_names, args, strict=False)) | settings
        sizes = tuple(grid(named) if callable(grid) else grid)
        if 0 in sizes or any(size > 65535 for size in sizes[1:]):
            raise ValueError(f"Triton Error [CUDA]: invalid argument: {name} on a grid of {sizes}")
        self.num_launches[name] += 1
        inner, options = [_memory(one) for one in args], {key: _memory(one) for key, one in settings.items()}
        with _plain():
            if self._capturing is None:
                launch(*inner, grid=sizes, warmup=False, **options)
                return
            places, kept = [_place(one) for one in args], {key: _place(one) for key, one in settings.items()}

        def run() -> None:
            found = [_found(name, one) for one in places]
            launch(*found, grid=sizes, warmup=False, **{key: _found(name, one) for key, one in kept.items()})

        self._node(name, run)


def _place(value: Any) -> Any:
    """Return what a graph keeps of an argument: the address of the device's memory, or the value."""
    if isinstance(value, DeviceTensor):
        return Place.of(value.memory)
    return value.clone() if isinstance(value, Tensor) else value


def _found(what: str, value: Any) -> Any:
    return value.tensor(what) if isinstance(value, Place) else value


def _arrive(host: Tensor, found: Tensor) -> None:
    with _plain():
        host.copy_(found)


def _check_unchanged(host: Tensor, sent: Tensor) -> None:
    with _plain():
        same = torch.equal(host.contiguous().view(-1).view(torch.uint8), sent.contiguous().view(-1).view(torch.uint8))
    if not same:
        raise RuntimeError("pinned memory was written while a copy from it was under way")
