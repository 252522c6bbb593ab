"""The compiled CPU operations: built once with the machine's C++ compiler, then cached.

    library = cpu_library()      None: no compiler, or a processor that cpu/isa.h does not support

The interface is plain C with raw addresses. Nothing is built against torch, so one library works with every version.
The ctypes structures mirror those in cpu/*.h, with the same fields in the same order.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from space_kernels.build.cache_folder import cache_folder
from space_kernels.build.compiler import Compiler, find_compiler


class LinearStruct(Structure):
    """`Linear` of cpu/linear.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("panels", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("groups", c_int),
        ("order", c_void_p),
    )


class GroupWeightsStruct(Structure):
    """`GroupWeights` of cpu/linear.h."""

    _fields_ = (
        ("numbers", c_void_p),
        ("scale", c_void_p),
        ("min", c_void_p),
        ("scale_steps", c_void_p),
        ("min_steps", c_void_p),
        ("zero", c_void_p),
    )


class LinearPartStruct(Structure):
    """`LinearPart` of cpu/linear.h."""

    _fields_ = (("weight", c_void_p), ("first", c_int64), ("groups", c_int64))


class MatmulStruct(Structure):
    """`Matmul` of cpu/linear.h."""

    _fields_ = (
        ("x", c_void_p),
        ("rows", c_int64),
        ("x_stride", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("wide", c_bool),
        ("then", c_int),
        ("other", c_void_p),
        ("gated", c_void_p),
        ("num_gated", c_int64),
        ("low", c_void_p),
        ("low_stride", c_int64),
    )


class DeltaStruct(Structure):
    """`Delta` of cpu/linear.h."""

    _fields_ = (("a", LinearStruct), ("b", c_void_p))


class GatedRowsStruct(Structure):
    """`GatedRows` of cpu/linear.h."""

    _fields_ = (
        ("first", c_int64),
        ("last", c_int64),
        ("delta", POINTER(DeltaStruct)),
        ("column", c_int64),
        ("width", c_int64),
    )


class TableStruct(Structure):
    """`Table` of cpu/table.h."""

    _fields_ = (("rows", c_void_p), ("stride", c_int64), ("width", c_int64), ("type", c_int))


class DraftHeadStruct(Structure):
    """`DraftHead` of cpu/draft.h."""

    _fields_ = (
        ("w1", LinearStruct),
        ("w2", LinearStruct),
        ("embedding", TableStruct),
        ("output", TableStruct),
        ("hidden", c_int64),
        ("scale", c_float),
        ("low_rank", c_bool),
    )


class DraftsStruct(Structure):
    """`Drafts` of cpu/draft.h."""

    _fields_ = (
        ("sequences", c_int64),
        ("masks", c_int64),
        ("candidates", c_int64),
        ("rows", c_void_p),
        ("ids", c_void_p),
        ("offsets", c_void_p),
        ("divisor", c_void_p),
        ("noise", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("bonus", c_void_p),
        ("chosen", c_void_p),
    )


class RecurrentHeadStruct(Structure):
    """`RecurrentHead` of cpu/draft.h."""

    _fields_ = (
        ("w1", LinearStruct),
        ("w2", LinearStruct),
        ("embedding", TableStruct),
        ("output", LinearStruct),
        ("ids", c_void_p),
        ("hidden", c_int64),
        ("num_ids", c_int64),
        ("scale", c_float),
    )


class RecurrentDraftsStruct(Structure):
    """`RecurrentDrafts` of cpu/draft.h."""

    _fields_ = (
        ("sequences", c_int64),
        ("drafts", c_int64),
        ("states", c_void_p),
        ("previous", c_void_p),
        ("logits", c_void_p),
        ("stride", c_int64),
        ("chosen", c_void_p),
    )


class RowsStruct(Structure):
    """`Rows` of cpu/attention.h."""

    _fields_ = (
        ("num_rows", c_int64),
        ("owner", c_void_p),
        ("offsets", c_void_p),
        ("reach", c_void_p),
        ("peers", c_void_p),
        ("starts", c_void_p),
        ("pages", c_void_p),
        ("most_pages", c_int64),
        ("num_chain_rows", c_int64),
        ("num_tiles", c_int64),
        ("tile_rows", c_void_p),
        ("tile_bounds", c_void_p),
    )


class HeadRowsStruct(Structure):
    """`HeadRows` of cpu/linear.h."""

    _fields_ = (
        ("x", c_void_p),
        ("x_head", c_int64),
        ("x_row", c_int64),
        ("y", c_void_p),
        ("y_head", c_int64),
        ("y_row", c_int64),
        ("heads", c_int64),
        ("rows", c_int64),
    )


class HeadsStruct(Structure):
    """`Heads` of cpu/attention.h."""

    _fields_ = (("query", c_int64), ("kv", c_int64), ("dim", c_int64), ("value_dim", c_int64))


class AttentionStruct(Structure):
    """`Attention` of cpu/attention.h."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("query_stride", c_int64),
        ("kv_stride", c_int64),
        ("value_stride", c_int64),
        ("key_pages", c_void_p),
        ("value_pages", c_void_p),
        ("block_size", c_int64),
        ("out", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int64),
        ("slopes", c_void_p),
        ("slope_factor", c_float),
        ("bias", c_int64),
        ("sinks", c_void_p),
        ("chunk", c_int64),
    )


class LayerStruct(Structure):
    """`Layer` of cpu/network.h."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("query_key_value", LinearStruct),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("output", LinearStruct),
        ("mlp_norm", c_void_p),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("key_pages", c_void_p),
        ("value_pages", c_void_p),
        ("window", c_int64),
    )


class NetworkStruct(Structure):
    """`Network` of cpu/network.h."""

    _fields_ = (
        ("num_layers", c_int64),
        ("num_ids", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("heads", HeadsStruct),
        ("eps", c_float),
        ("scale", c_float),
        ("block_size", c_int64),
        ("layers", POINTER(LayerStruct)),
        ("embedding", TableStruct),
        ("norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class LayerDeltasStruct(Structure):
    """`LayerDeltas` of cpu/network.h."""

    _fields_ = (
        ("query_key_value", DeltaStruct),
        ("output", DeltaStruct),
        ("gate_up", DeltaStruct),
        ("down", DeltaStruct),
    )


class GatedRunStruct(Structure):
    """`GatedRun` of cpu/network.h."""

    _fields_ = (
        ("first", c_int64),
        ("last", c_int64),
        ("layers", POINTER(LayerDeltasStruct)),
        ("column", c_int64),
        ("width", c_int64),
        ("masks", c_void_p),
        ("embeddings", c_void_p),
        ("num_masks", c_int64),
    )


class BuffersStruct(Structure):
    """`Buffers` of cpu/network.h."""

    _fields_ = (
        ("ids", c_void_p),
        ("x", c_void_p),
        ("normed", c_void_p),
        ("fused", c_void_p),
        ("attended", c_void_p),
        ("inner", c_void_p),
        ("low", c_void_p),
        ("low_stride", c_int64),
        ("gated", POINTER(GatedRunStruct)),
        ("num_gated", c_int64),
        ("tapped", c_void_p),
        ("num_tapped", c_int64),
        ("taps", c_void_p),
    )


class ExpertsStruct(Structure):
    """`Experts` of cpu/experts.h."""

    _fields_ = (
        ("gate_up", POINTER(LinearStruct)),
        ("down", POINTER(LinearStruct)),
        ("count", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
    )


class ExpertRowsStruct(Structure):
    """`ExpertRows` of cpu/experts.h."""

    _fields_ = (
        ("x", c_void_p),
        ("rows", c_int64),
        ("per_row", c_int64),
        ("experts", c_void_p),
        ("weights", c_void_p),
        ("places", c_void_p),
        ("bounds", c_void_p),
        ("gathered", c_void_p),
        ("inner", c_void_p),
        ("made", c_void_p),
        ("y", c_void_p),
    )


class DistillationStruct(Structure):
    """`Distillation` of cpu/train.h."""

    _fields_ = (
        ("teacher", c_void_p),
        ("student", c_void_p),
        ("rows", c_int64),
        ("vocabulary", c_int64),
        ("scale", c_float),
        ("entropy", c_float),
        ("rejection", c_float),
        ("surprisal", c_float),
        ("needs_gradient", c_bool),
        ("cross_entropy", c_void_p),
        ("acceptance", c_void_p),
    )


class RecurrenceStruct(Structure):
    """`Recurrence` of cpu/recurrence.h."""

    _fields_ = (
        ("vectors", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("gates", c_void_p),
        ("state", c_void_p),
        ("out", c_void_p),
        ("heads", c_int64),
        ("groups", c_int64),
        ("deep", c_int64),
        ("wide", c_int64),
        ("num_replayed", c_int64),
        ("runs", c_void_p),
        ("num_runs", c_int64),
        ("mask_groups", c_void_p),
        ("rule", c_int),
        ("rates", c_void_p),
    )


class LogitsStruct(Structure):
    """`Logits` of cpu/choice.h."""

    _fields_ = (
        ("values", c_void_p),
        ("rows", c_int64),
        ("stride", c_int64),
        ("vocabulary", c_int64),
        ("banned", c_void_p),
        ("num_banned", c_int64),
    )


class SamplingStruct(Structure):
    """`Sampling` of cpu/choice.h."""

    _fields_ = (
        ("sampled", c_void_p),
        ("divisors", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("log_min_p", c_void_p),
        ("keys", c_void_p),
        ("positions", c_void_p),
    )


class NextDraftsStruct(Structure):
    """`NextDrafts` of cpu/network.h."""

    _fields_ = (
        ("head", POINTER(DraftHeadStruct)),
        ("sequences", c_int64),
        ("candidates", c_int64),
        ("greedy_candidates", c_int64),
        ("most", c_int64),
        ("bounds", c_void_p),
        ("masks", c_void_p),
        ("num_masks", c_void_p),
        ("joined", c_bool),
        ("sampling", POINTER(SamplingStruct)),
        ("sharpness", c_float),
        ("drafts", c_void_p),
        ("num_drafts", c_void_p),
    )


_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent.with_name("cpu")

_AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c"

KINDS = {
    "x86_64": {
        "amx_bf16": f"-mamx-tile -mamx-bf16 -mamx-int8 -mavx512vnni {_AVX512}",
        "avx512_bf16": f"-mavx512bf16 -mavx512vbmi -mavx512vnni {_AVX512}",
        "avx512_vnni": f"-mavx512vnni {_AVX512}",
        "avx512": _AVX512,
        "avx2": "-mavx2 -mfma -mf16c",
    },
    "aarch64": {"neon_bf16": "-march=armv8.2-a+bf16"},
}
"""By machine: the processor kinds of cpu/isa.h, best first, and their compiler flags."""

SLOW_PAIRS = {"GenuineIntel"}
"""Vendors whose bfloat16 pair instruction is half as fast as float32 multiplication: one per two cycles instead of two
per cycle (measured on Emerald Rapids). Kinds differ in the last bits of their results, so the choice follows the vendor
and not a benchmark, whose outcome could vary from start to start.
"""

_NEEDS_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"}

_NEEDS = {
    "amx_bf16": {"amx_tile", "amx_bf16", "amx_int8", "avx512_vnni", *_NEEDS_AVX512},
    "avx512_bf16": {"avx512_bf16", "avx512vbmi", "avx512_vnni", *_NEEDS_AVX512},
    "avx512_vnni": {"avx512_vnni", *_NEEDS_AVX512},
    "avx512": _NEEDS_AVX512,
    "avx2": {"avx2", "fma", "f16c"},
    "neon_bf16": {"asimd", "bf16"},
}
"""The CPU flags each kind requires, as Linux names them."""

_SOURCE_FILES = (
    "team.cpp",
    "linear.cpp",
    "linear_groups.cpp",
    "linear_lanes.cpp",
    "linear_tiles.cpp",
    "table.cpp",
    "attention.cpp",
    "network.cpp",
    "experts.cpp",
    "recurrence.cpp",
    "draft.cpp",
    "choice.cpp",
    "train.cpp",
    "api.cpp",
    "probe.cpp",
)
SWITCH = "SPACESERVE_CPU_KERNELS"
CHOICES = ("auto", "compiled", "torch", *(kind for kinds in KINDS.values() for kind in kinds))
"""Values of the variable: compiled if possible; compiled or an error; torch's operations; compiled for that kind."""


class CpuLibrary:
    """The functions of cpu/api.cpp for one processor kind."""

    def __init__(self, path: Path, kind: str) -> None:
        self.kind, self.path = kind, path
        if kind == "amx_bf16" and not _may_use_tiles():
            raise OSError("Linux does not let this process use the tiles of AMX")
        library = ctypes.CDLL(str(path))

        def function(name: str, *arguments: Any, result: Any = None) -> Any:
            found = getattr(library, f"space_{name}_{kind}")
            found.argtypes, found.restype = arguments, result
            return found

        rows, heads, attention = POINTER(RowsStruct), POINTER(HeadsStruct), POINTER(AttentionStruct)
        self.pack = function("pack", c_void_p, c_int64, c_int64, c_void_p)
        self.quantize = function("quantize", c_void_p, c_int64, c_int64, c_int, POINTER(GroupWeightsStruct), c_int)
        self.pack_groups = function("pack_groups", POINTER(GroupWeightsStruct), c_int64, c_int64, c_int, c_void_p)
        self.panel_bytes = function("panel_bytes", c_int64, c_int, result=c_int64)
        self.padded = function("padded", c_int64, result=c_int64)
        self.linear = function("linear", POINTER(LinearStruct), POINTER(MatmulStruct), c_int)
        self.linear_each = function("linear_each", POINTER(LinearStruct), POINTER(HeadRowsStruct), c_int)
        self.look_up = function("look_up", POINTER(TableStruct), c_void_p, c_int64, c_void_p)
        self.norm = function("norm", c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p, c_int)
        self.store = function("store", rows, heads, attention, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int)
        self.attend = function("attend", rows, heads, attention, c_int)
        self.experts = function("experts", POINTER(ExpertsStruct), POINTER(ExpertRowsStruct), c_int, result=c_bool)
        self.recur = function("recur", POINTER(RecurrenceStruct), c_int)
        self.draft = function("draft", POINTER(DraftHeadStruct), POINTER(DraftsStruct), c_int)
        recurrent = POINTER(RecurrentHeadStruct), POINTER(RecurrentDraftsStruct)
        self.draft_recurrent = function("draft_recurrent", *recurrent, c_int)
        self.argmax = function("argmax", POINTER(LogitsStruct), c_void_p, c_void_p, c_int)
        self.sample = function("sample", POINTER(LogitsStruct), POINTER(SamplingStruct), c_void_p, c_void_p, c_int)
        self.best_of = function("best_of", POINTER(LogitsStruct), c_int64, c_void_p, c_void_p, c_int)
        self.read = function("read", c_void_p, c_int64, c_int, result=c_float)
        self.dots = function("dots", c_int64, c_int, result=c_float)
        self.integer_dots = function("integer_dots", c_int64, c_int, result=c_float)
        self.mark = function("mark", c_void_p, c_int64, c_int)
        number, place = c_int64, c_void_p
        self.distill = function("distill", POINTER(DistillationStruct), c_int)
        self.attention_backward = function("attention_backward", place, place, place, number, number, c_float, c_int)
        self.norm_backward = function("norm_backward", place, place, place, number, number, c_float, place, c_int)
        self.swiglu = function("swiglu", place, place, number, place, c_int)
        self.swiglu_backward = function("swiglu_backward", place, place, place, number, place, place, c_int)
        step = POINTER(NetworkStruct), rows, POINTER(BuffersStruct)
        self.forward = function("forward", *step, c_int, result=c_bool)
        head = POINTER(LinearStruct), POINTER(LogitsStruct), POINTER(SamplingStruct), POINTER(NextDraftsStruct)
        self.forward_sampled = function("forward_sampled", *step, *head, place, place, c_int, result=c_int64)


@cache
def cpu_library() -> CpuLibrary | None:
    """Return the library, building it on first use; None if it cannot be built or is switched off.

    Raises ValueError if SPACESERVE_CPU_KERNELS requires it and it cannot be built.
    """
    asked = os.environ.get(SWITCH, "auto")
    if asked not in CHOICES:
        raise ValueError(f"{SWITCH} is {asked!r}; it must be {', '.join(CHOICES[:-1])} or {CHOICES[-1]}.")
    if asked == "torch":
        return None
    try:
        kinds = own_kinds()
        if not kinds:
            raise OSError(f"there are none for this processor ({sys.platform}, {platform.machine()})")
        if asked not in ("auto", "compiled"):
            if asked not in kinds:
                raise OSError(f"this processor is no {asked}, but {' and '.join(kinds)}")
            return library_for(asked)
        return best_library(kinds)
    except OSError as error:
        if asked != "auto":
            raise ValueError(f"{SWITCH} is {asked}, but the compiled operations cannot be had: {error}.") from error
        _log.warning("the compiled operations cannot be had, and torch's own, slower, stand in for them: %s", error)
        return None


def own_kinds() -> list[str]:
    """Return the kinds that this processor supports, best first."""
    found = kinds_of(platform.machine(), set(cpu_fact("flags", "Features").split()), cpu_fact("vendor_id"))
    return [kind for kind in found if kind != "amx_bf16" or _may_use_tiles()]


@cache
def _may_use_tiles() -> bool:
    """Ask Linux for AMX's tile registers, which a process may use only then; all its threads may."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    if ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, request_permission, tile_data) == 0:
        return True
    reason = os.strerror(ctypes.get_errno())
    _log.warning("Linux does not let this process use AMX (%s): bits are those of a processor without it", reason)
    return False


def kinds_of(machine: str, cpu_flags: Set[str], maker: str = "") -> list[str]:
    """Return the kinds that a processor of this vendor with these flags supports, best first."""
    found = [kind for kind in KINDS.get(machine, {}) if cpu_flags >= _NEEDS[kind]]
    if maker in SLOW_PAIRS and "avx512_bf16" in found:
        found.remove("avx512_bf16")
        found.insert(found.index("avx512") + 1, "avx512_bf16")
    return found


def best_library(kinds: Sequence[str]) -> CpuLibrary:
    """Return the library of the first of these kinds that the compiler knows. Raises OSError."""
    for kind, following in itertools.pairwise(kinds):
        try:
            return library_for(kind)
        except OSError as error:
            _log.warning("the operations for %s cannot be had (%s); %s's are tried", kind, error, following)
    return library_for(kinds[-1])


def library_for(kind: str) -> CpuLibrary:
    """Load the library of a kind that this processor supports, building it if needed. Raises OSError."""
    return CpuLibrary(library_file(kind), kind)


def library_file(kind: str) -> Path:
    """Return the path of a kind's library, building it if needed. Raises OSError."""
    name = library_name(kind, platform.machine())
    places = [_SOURCES.with_name("built") / name, cache_folder() / name]
    for place in places:
        if place.is_file():
            return place
    for place in reversed(places):  # the cache first; beside the sources if the cache is read-only
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with _locked(place.parent), tempfile.TemporaryDirectory(dir=place.parent) as folder:
                if place.is_file():  # another process has built it meanwhile
                    return place
                compiler = find_compiler()
                _log.info("compiling the operations of this processor with %s", compiler)
                if others := len(list(place.parent.glob(f"cpu-kernels-{kind}-{'[0-9a-f]' * 16}.so"))):
                    _log.info("%d compiled of other sources in %s are not used", others, place.parent)
                build(compiler, kind, platform.machine(), Path(folder)).replace(place)
        except PermissionError:
            continue
        return place
    raise OSError(f"neither {places[1].parent} nor {places[0].parent} can be written to")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process builds a library in this folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def library_name(kind: str, machine: str) -> str:
    """Return the file name of a kind's library, which changes with its sources and flags."""
    key = hashlib.sha256(repr(KINDS[machine][kind]).encode())
    for source in sorted(_SOURCES.iterdir()):
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"cpu-kernels-{kind}-{key.hexdigest()[:16]}.so"


def build(compiler: Compiler, kind: str, machine: str, folder: Path) -> Path:
    """Compile a kind's library in `folder` and return its path. Raises OSError with the compiler's message."""
    return compiler.build([_SOURCES / file for file in _SOURCE_FILES], KINDS[machine][kind].split(), folder)


def cpu_fact(*names: str) -> str:
    """Return the first matching field of /proc/cpuinfo; "" on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def main() -> int:
    """Build every kind for this machine's architecture beside the sources, for a container image. Returns the exit
    code."""
    built = _SOURCES.with_name("built")
    try:
        for kind in KINDS.get(platform.machine(), {}):
            file = library_file(kind)
            built.mkdir(exist_ok=True)
            if file.parent != built:
                shutil.copy2(file, built)
            sys.stdout.write(f"{built / file.name}\n")
    except OSError as error:
        sys.stderr.write(f"the compiled operations cannot be had: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
