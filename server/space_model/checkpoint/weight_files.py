"""Reads a checkpoint's weights: tensors of its files, streamed from the mapped files to a device, in pieces.

    file, mapped | a piece of a tensor | its place on the device, in the model's dtype

The pages of a copied piece are released at once, so the host holds a few pieces whatever the model's size. On a CPU
with the file's dtype nothing is copied: the weight is a view of the file until it is packed. Weights of fused linears
are loaded into one tensor from the start (`JoinedRows`), so that joining them copies nothing.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from space_kernels.linear.gguf_blocks import Blocks
from torch import Tensor, nn

from space_model.checkpoint.checkpoint import INDEX, Checkpoint, read_index
from space_model.checkpoint.stored_weight import StoredExperts, StoredWeight
from space_model.model_error import CheckpointNotFound, UnsupportedModel

SMALL = 1 << 15  # tensors of fewer bytes are not worth releasing
FEW = 1 << 17  # nor are all of a call, if they have fewer bytes than this together
RELEASED_AT_ONCE = 4 << 20  # bytes that ReadTensors collects before it releases their pages
SUFFIXES = (".safetensors", ".gguf")


@dataclass(frozen=True)
class FileMapping:
    """An address range that maps a file."""

    start: int
    end: int
    resident: int  # bytes in memory
    changed: int  # bytes that were written to and differ from the file


def mappings(files: Collection[Path] | None = None) -> Iterator[FileMapping]:
    """Yield the mappings of these files, or of all weight files (Linux only)."""
    wanted = None if files is None else {str(file.resolve()) for file in files}
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    span: tuple[int, int] | None = None
    resident = 0
    for line in lines:
        name, _, rest = line.partition(": ")
        if name == "Rss":
            resident = int(rest.split()[0]) * 1024
        elif name == "Anonymous" and span is not None:
            yield FileMapping(*span, resident, int(rest.split()[0]) * 1024)
            span = None
        elif "-" in line.split(" ", 1)[0] and not name.endswith(":"):
            first, _, last = line.split(" ", 1)[0].partition("-")
            path = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
            found = path.lower().endswith(SUFFIXES) if wanted is None else path in wanted
            span = (int(first, 16), int(last, 16)) if found else None


def give_back(files: Collection[Path] | None = None) -> int:
    """Release the resident pages of these files, or of all weight files, and return their bytes; a later access reads
    them from disk again. Most weights are packed and not read again, but the embedding is, and keeps the whole file
    mapped. Mappings that were written to are kept, because the file does not have the changes."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return 0
    given = 0
    for here in list(mappings(files)):
        length = ctypes.c_size_t(here.end - here.start)
        if not here.changed and madvise(ctypes.c_void_p(here.start), length, mmap.MADV_DONTNEED) == 0:
            given += here.resident
    return given


def let_go(*tensors: Tensor) -> None:
    """Release the pages under these tensors where they are views of a mapped weight file: they were copied or packed. A
    later access reads them from disk again. Other tensors are left alone, and so are a few bytes: each call looks at
    what is mapped, which takes a millisecond or more."""
    spans = [] if sys.platform != "linux" else [span for one in tensors if (span := _span(one)) is not None]
    if sum(end - start for start, end in spans) < FEW:
        return
    weights = list(_maps_of_weights())
    for start, end in spans:
        if any(first <= start and end <= last for first, last in weights):
            page = mmap.PAGESIZE
            first, last = start + -start % page, end - end % page
            try:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
            except (AttributeError, OSError):
                return


class ReadTensors:
    """Collects tensors that were read, and releases their pages a few MiB at once. Threads may share one."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, tensor: Tensor) -> None:
        """Take a tensor that was read. It is kept until its pages are released."""
        with self._lock:
            self._tensors.append(tensor)
            self._num_bytes += tensor.nbytes
            read = self._take() if self._num_bytes >= RELEASED_AT_ONCE else []
        let_go(*read)

    def finish(self) -> None:
        """Release the pages of the last ones."""
        with self._lock:
            read = self._take()
        let_go(*read)

    def _take(self) -> list[Tensor]:
        read, self._tensors, self._num_bytes = self._tensors, [], 0
        return read


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """Return the addresses of a tensor on a CPU; None if it is small."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return None
    size = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.data_ptr()
    end = start + size * tensor.itemsize
    return None if end - start < SMALL else (start, end)


def _maps_of_weights() -> Iterator[tuple[int, int]]:
    """Yield the addresses of mapped safetensors and GGUF files."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if line.lower().endswith(SUFFIXES):
            first, _, last = line.split(" ", 1)[0].partition("-")
            yield int(first, 16), int(last, 16)


_LFS = b"version https://git-lfs"  # how a file begins that stands for one in Git's large file storage


class OpenFiles:
    """Files that several threads read; they are closed after the last read ends. When a load fails, transformers does
    not wait for its other threads: one may be reading a tensor."""

    def __init__(self, name: str, handles: Mapping[str, Any]) -> None:
        self.handles = handles  # tensor name -> the open file that has it
        self._name = name
        self._changed = threading.Condition()
        self._num_readers = 0
        self._closed = False

    @contextmanager
    def reading(self, tensor: str) -> Iterator[Any]:
        """Yield the tensor's file, and keep it open for the duration of the block."""
        if tensor not in self.handles:
            raise UnsupportedModel(f"The weights of {self._name} lack {tensor}. Fetch the whole checkpoint again.")
        with self._changed:
            if self._closed:
                raise CheckpointNotFound(f"The weights of {self._name} are closed; {tensor} comes too late.")
            self._num_readers += 1
        try:
            yield self.handles[tensor]
        finally:
            with self._changed:
                self._num_readers -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """Refuse new reads, and wait for those in progress."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._num_readers)


class WeightFiles:
    """The tensors of the files, read on demand. with WeightFiles.open(checkpoint) as files:
    files.rows("lm_head.weight", slice(0, 64))"""

    def __init__(self, name: str, opened: OpenFiles, size: int) -> None:
        self.name = name
        self.opened = opened
        self.size = size  # bytes of all files
        self.num_bytes = 0  # read so far
        self._lock = threading.Lock()

    @classmethod
    @contextmanager
    def open(cls, checkpoint: Checkpoint) -> Iterator[WeightFiles]:
        """Open a checkpoint's files for the duration of the block."""
        with ExitStack() as stack:
            handles: dict[str, Any] = {}
            files: dict[str, Path] = {}
            for file in checkpoint.weights:
                try:
                    handle = stack.enter_context(safe_open(file, framework="pt"))
                    names = list(handle.keys())
                except (OSError, SafetensorError) as error:
                    size = file.stat().st_size if file.is_file() else 0
                    if size and file.read_bytes()[: len(_LFS)] == _LFS:
                        raise CheckpointNotFound(
                            f"{file} is a Git LFS pointer and not the file itself; fetch it with `git lfs pull`."
                        ) from error
                    cut = f"({size} bytes) is no safetensors file, or it is cut short: {error}"
                    raise CheckpointNotFound(f"{file} {cut if size else 'is empty'}. Fetch it again.") from error
                for name in names:
                    if name in files:
                        raise CheckpointNotFound(
                            f"{name} of {checkpoint.name} is in {files[name].name} and in {file.name}; one of them is "
                            "of another checkpoint. Fetch it again into an empty folder."
                        )
                    files[name] = file
                handles.update(dict.fromkeys(names, handle))
            _check_index(checkpoint, files)
            opened = OpenFiles(checkpoint.name, handles)
            stack.callback(opened.finish)
            yield cls(checkpoint.name, opened, sum(file.stat().st_size for file in checkpoint.weights))

    def __contains__(self, name: object) -> bool:
        return name in self.opened.handles

    @property
    def names(self) -> list[str]:
        return sorted(self.opened.handles)

    @property
    def knows_shapes(self) -> bool:
        """Whether the shape of a tensor is known without reading it."""
        return True

    def unused(self) -> list[str]:
        """After all tensors were read, return those that neither the model nor its dequantised weights used."""
        return []

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header."""
        with self.opened.reading(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def whole(self, name: str) -> Tensor:
        with self.opened.reading(name) as file:
            return self._count(file.get_tensor(name))

    def rows(self, name: str, part: slice) -> Tensor:
        """Return some rows of a tensor; only they are read."""
        with self.opened.reading(name) as file:
            return self._count(file.get_slice(name)[part])

    def columns(self, name: str, part: slice) -> Tensor:
        """Return some columns of a matrix; only they are read."""
        with self.opened.reading(name) as file:
            return self._count(file.get_slice(name)[:, part])

    @property
    def num_packed(self) -> int:
        """Return the number of quantised tensors."""
        return 0

    def is_packed(self, name: str) -> bool:
        """Return whether `read_into` must dequantise the tensor."""
        return False

    def stored(self, *, fuses: bool) -> dict[str, StoredWeight]:
        """Return the weights of linears that may stay as the files have them, by name. `fuses`: the network fuses
        linears; they stay if all parts do."""
        return {}

    def stored_mixtures(self) -> dict[str, StoredExperts]:
        """Return the stacked experts that can be held in the file's format, by the path of their module."""
        return {}

    def stored_embedding(self) -> tuple[str, Blocks] | None:
        """Return the embedding's name and its blocks, which rows can be looked up in; None: it has none."""
        return None

    def is_quantised(self, name: str) -> bool:
        """Return whether the files have the tensor in fewer bits."""
        return False

    def read_into(self, name: str, place: Tensor) -> None:
        """Write a quantised tensor's values into `place`, which has its shape, on any device in any dtype."""
        raise NotImplementedError

    def _count(self, tensor: Tensor) -> Tensor:
        with self._lock:
            self.num_bytes += tensor.nbytes
        return tensor


def _check_index(checkpoint: Checkpoint, files: Mapping[str, Path]) -> None:
    """Check that the index matches the files: a tensor that is in none of them was lost."""
    index = checkpoint.folder / INDEX
    if not index.is_file() or (checkpoint.folder / "model.safetensors") in checkpoint.weights:
        return
    wrong = {
        name: file
        for name, file in read_index(index).items()
        if name not in files or files[name] != checkpoint.folder / file
    }
    if wrong:
        name = min(wrong)
        there = f"it is in {files[name].name}" if name in files else "no file has it"
        raise CheckpointNotFound(
            f"{index} says that {name} is in {wrong[name]}, and {there} ({len(wrong)} tensors). The files are of "
            "several checkpoints, or one is cut short: fetch them again into an empty folder."
        )


_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class JoinedRows:
    """Shared tensors for the Llama family's fused weights, allocated when the first part is loaded."""

    def __init__(self, num_rows: Callable[[str], int | None]) -> None:
        """`num_rows` returns the rows of the named weight that this process reads; None: there is no such weight."""
        self._num_rows = num_rows
        self._rooms: dict[tuple[str, str], Tensor] = {}  # module, its first linear -> the shared tensor
        self._lock = threading.Lock()

    def place(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return the slice of the shared tensor to write this weight to; None if it shares none."""
        module, _, rest = name.rpartition(".")[0].rpartition(".")
        group = next((group for group in _GROUPS if rest in group), None)
        if group is None or len(shape) != 2 or not name.endswith(".weight"):
            return None
        heights = [self._num_rows(f"{module}.{linear}.weight" if module else f"{linear}.weight") for linear in group]
        known = [height for height in heights if height is not None]
        if len(known) < len(group) or known[group.index(rest)] != shape[0]:
            return None
        with self._lock:
            room = self._rooms.get((module, group[0]))
            if room is None:
                room = torch.empty(sum(known), shape[1], dtype=dtype, device=device)
                self._rooms[module, group[0]] = room
        if room.shape[1] != shape[1] or room.dtype is not dtype:
            return None  # mismatched weights are reported when they are loaded into the model
        number = group.index(rest)
        return room[sum(known[:number]) : sum(known[: number + 1])]


def one_below_the_other(weights: Sequence[Tensor]) -> Tensor:
    """Return [sum of rows, columns]: the shared tensor if the weights are its slices in this order, else a copy."""
    first = weights[0]
    at = first.storage_offset()
    for weight in weights:
        shares = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (shares and weight.is_contiguous() and weight.storage_offset() == at):
            return torch.cat(list(weights))
        at += weight.numel()
    rows = sum(len(weight) for weight in weights)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def refuse_odd_values(name: str, model: nn.Module, *, packed: bool = False) -> None:
    """Check that every weight of the model `name` is finite. `packed`: weights may also be packed integers. Reads each
    weight once, on its device, and synchronises with a GPU once. Raises UnsupportedModel naming the weight."""
    weights = {path: weight.detach() for path, weight in model.named_parameters() if not weight.is_meta}
    sums: dict[str, Tensor] = {}
    read = ReadTensors()
    for path, weight in weights.items():
        if weight.numel() > 1 and not any(weight.stride()):
            continue  # a placeholder, whose scales are looked at when it is packed
        if weight.dtype.itemsize > 1 and weight.is_floating_point():
            # One non-finite value makes the sum non-finite. In the weight's own dtype: seven times as fast in bfloat16.
            sums[path] = weight.sum().float()
            read.add(weight)
        elif not packed and not weight.is_floating_point():
            raise UnsupportedModel(
                f"{path} of {name} is kept as {_shown(weight)}, and config.json says nothing of quantised weights "
                "(quantization_config). Fetch the whole checkpoint again, or use the one it was made from."
            )
    read.finish()
    if not sums or bool(torch.stack(list(sums.values())).isfinite().all()):
        return
    for path, total in sums.items():
        if bool(total.isfinite()):
            continue
        odd = int((~weights[path].isfinite()).sum())
        if odd:  # else the values are finite, and only their sum overflows
            raise UnsupportedModel(
                f"{path} of {name} has {odd} of {weights[path].numel()} numbers that are not finite (NaN or infinite) "
                f"in {_shown(weights[path])}. Fetch the file again; where the checkpoint was made so, use another. "
                "Numbers too large for float16 are finite with --dtype bfloat16 or float32."
            )


def _shown(weight: Tensor) -> str:
    return str(weight.dtype).removeprefix("torch.")


PIECE = 32 << 20  # bytes of a tensor that are copied at once; transformers loads a few tensors concurrently
SECONDS_BETWEEN_LINES = 5.0  # a longer load logs its progress at this interval

_log = logging.getLogger(__name__)


class WeightStream:
    """Copies a checkpoint's tensors to the model's device and dtype. model = SomeForCausalLM.from_pretrained(None,
    state_dict=stream.unread(), config=config, dtype=dtype)"""

    def __init__(
        self,
        files: WeightFiles,
        device: torch.device,
        *,
        copies: bool | None = None,
        joined: JoinedRows | None = None,
        as_kept: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`copies` False: a tensor with the file's dtype stays a view of the file; None: False on a CPU. `joined`:
        tensors that several weights share. `as_kept`: nothing is copied; all tensors are views of the files, in the
        files' dtypes."""
        self.files = files
        self._device = torch.device("cpu") if as_kept else device
        self._copies = device.type != "cpu" if copies is None else copies
        self._joined = joined
        self._read = ReadTensors()  # the last of them are released with the stream
        self._as_kept = as_kept
        self.left_to_experts: set[str] = set()  # weights of single experts for which a stacked placeholder stands
        self.placeholders: dict[str, Tensor] = {}  # of weights that are not read: zeros of their shape, in no memory
        self._clock = clock
        self._begun = self._said = clock()
        self._lock = threading.Lock()

    def unread(self) -> dict[str, Any]:
        """Return a state dict for transformers, whose tensors are read when they are moved to a device."""
        names = [name for name in self.files.names if name not in self.left_to_experts]
        stacked = [name for name in self.placeholders if name not in self.files]
        return {name: _Unread(self, name) for name in [*names, *stacked]}

    def whole(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """Return a tensor on the device; a quantised one is dequantised in place, without a copy in another dtype."""
        if name in self.placeholders:
            return self.placeholders[name]
        if dtype is None or not self.files.is_packed(name):
            return self.put(name, self.files.whole(name), dtype)
        self._say_how_far()
        place = self._place(name, torch.Size(self.files.shape(name)), dtype)
        self.files.read_into(name, place)
        return place

    def put(self, name: str, found: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Move the tensor `name`, which was read, to the device; floating-point values become `dtype`."""
        self._say_how_far()
        if self._as_kept or dtype is None or not found.is_floating_point():
            dtype = found.dtype
        if self._as_kept or (not self._copies and found.dtype == dtype):
            return found
        place = self._place(name, found.shape, dtype)
        send(found, place, self._read)
        return place

    def leave(self, name: str, stored: StoredWeight, dtype: torch.dtype) -> None:
        """Do not read this tensor, which stays as the files have it: a placeholder stands for it."""
        shape = sum(part.out_features for part in stored), stored[0].in_features
        self.placeholders[name] = torch.zeros(1, dtype=dtype).expand(shape)

    def leave_experts(self, path: str, experts: StoredExperts, names: Collection[str], dtype: torch.dtype) -> None:
        """Do not read these weights of a mixture's experts: placeholders stand for the stacked ones below `path`."""
        self.left_to_experts.update(names)
        for name, shape in (("gate_up_proj", experts.gate_up_shape), ("down_proj", experts.down_shape)):
            self.placeholders[f"{path}.{name}"] = torch.zeros(1, dtype=dtype).expand(shape)

    def _place(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        place = None if self._joined is None else self._joined.place(name, shape, dtype, self._device)
        return torch.empty(shape, dtype=dtype, device=self._device) if place is None else place

    def _say_how_far(self) -> None:
        with self._lock:
            now = self._clock()
            if now - self._said < SECONDS_BETWEEN_LINES:
                return
            self._said = now
        read, size = self.files.num_bytes / 1e9, self.files.size / 1e9
        _log.info("weights: %.1f of %.1f GB read in %.0f s", read, size, now - self._begun)


class _Unread:
    """A lazy tensor, used as transformers uses those of a file: indexed as a whole, then moved to a device. Always
    moves to the stream's device: without accelerate, transformers only knows the CPU."""

    def __init__(self, stream: WeightStream, name: str) -> None:
        self._stream, self._name = stream, name

    def __getitem__(self, part: object) -> Self:
        if part is not Ellipsis:
            raise TypeError(f"{self._name} is read whole; asked for {part!r}.")
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor on the stream's device."""
        return self._stream.whole(self._name, dtype)


def send(found: Tensor, place: Tensor, read: ReadTensors | None = None) -> None:
    """Copy piece by piece, releasing the pages of each piece after it is copied. `read`: releases those of tensors of
    one piece."""
    if found.dim() == 0 or found.nbytes <= PIECE:
        place.copy_(found)
        (let_go if read is None else read.add)(found)
        return
    rows = max(1, PIECE * len(found) // found.nbytes)
    for piece, there in zip(torch.split(found, rows), torch.split(place, rows), strict=True):
        there.copy_(piece)
        let_go(piece)
