"""Formats of quantised checkpoints: the tensors that store a weight, and how to dequantise it.

AWQ                 W[o, i] = (q[i, o] - z[g, o]) · s[g, o]          g = i // group size
GPTQ                W[o, i] = (q[i, o] - z[g, o]) · s[g, o]          g = g_idx[i]; version 1 keeps z - 1
compressed-tensors  W[o, i] = (q[o, i] - z[o, g]) · s[o, g]          one g, one per row, per group, or per block
fp8                 W[o, i] = q[o, i] · s[o // 128, i // 128]    one s per block, per row, or one
bitsandbytes 4-bit  W = code[q] · absmax[n // block size]            n: the flat index; absmax may be quantised, too
bitsandbytes 8-bit  W[o, i] = q[o, i] · s[o] / 127
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from space_kernels.linear.packed_int4 import AWQ_ORDER, PER_WORD, Layout, PackedInt4, form_for
from torch import Tensor

from space_model.model_error import UnsupportedModel


def unpack(words: Tensor, bits: int, dim: int, count: int | None = None) -> Tensor:
    """Unpack int32 words to int32 values 0 .. 2^bits-1 along `dim` (0 or 1), 32/bits per word, lowest bits first.
    `count`: number of values along `dim` if the last word is not full."""
    words = words.T if dim == 0 else words
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (words[:, :, None] >> shifts) & ((1 << bits) - 1)  # [rows, words, values of a word]
    values = values.flatten(1)[:, :count]
    return values.T if dim == 0 else values


def unpack_awq(words: Tensor) -> Tensor:
    """Unpack int32 [rows, words] to [rows, 8·words] values 0 .. 15, in AWQ's order."""
    values = unpack(words, 4, dim=1).view(len(words), -1, 8)
    back = torch.tensor(AWQ_ORDER).argsort()
    return values[:, :, back].flatten(1)


def halves(packed: Tensor) -> Tensor:
    """Unpack uint8 [n] to [2n] values 0 .. 15, the high half of a byte first."""
    flat = packed.flatten()
    return torch.stack([flat >> 4, flat & 15], dim=1).flatten()


Read = Callable[[str], Tensor]  # returns a module's tensor by its suffix, such as `qweight`

CURE = (
    "Use the checkpoint it was made from, or one in AWQ, GPTQ, compressed-tensors, fp8, ModelOpt FP8 or bitsandbytes "
    "format."
)


INT4_FORMATS = frozenset(layout.value for layout in Layout)
"""Names of the formats of which `--weights packed` holds four-bit linears as they are stored."""


class QuantizedFormat:
    """How a checkpoint stores quantised weights."""

    name: str  # for messages
    library: str  # Python package whose kernels multiply by packed weights; "": none
    parts: frozenset[str]  # tensor suffixes of a module besides `weight` and `bias`
    markers: frozenset[str]  # of these suffixes, those that only a module with a quantised weight has
    needless: frozenset[str] = frozenset()  # those that do not affect the weight: scales of activations, keys, values

    def dense(self, read: Read, parts: frozenset[str]) -> Tensor:
        """Return the dequantised weight [out, in] float32 of a module with these tensors."""
        raise NotImplementedError

    @property
    def has_int4_groups(self) -> bool:
        """Return whether linears have four bits, in groups that a CPU multiplies as they are."""
        return False

    def packed(self, name: str, read: Read, parts: frozenset[str]) -> PackedInt4 | None:
        """Return the weight of a module with these tensors as the file has it; None: only dequantised. `name`: for
        messages."""
        return None


@dataclass(frozen=True)
class Awq(QuantizedFormat):
    """Activation-aware weight quantisation (arXiv 2306.00978), 4 bits, as its `gemm` version packs them."""

    group_size: int  # inputs that share a scale; -1: all
    name: str = "AWQ"
    library: str = "gptqmodel"
    parts: frozenset[str] = frozenset({"qweight", "qzeros", "scales"})
    markers: frozenset[str] = frozenset({"qweight"})

    def dense(self, read: Read, parts: frozenset[str]) -> Tensor:
        q, scales = unpack_awq(read("qweight")), read("scales").float()  # [in, out], [groups, out]
        group = q.shape[0] if self.group_size < 0 else self.group_size
        zeros = unpack_awq(read("qzeros")) if "qzeros" in parts else torch.zeros_like(scales)
        of_input = torch.arange(q.shape[0]) // group
        return ((q - zeros[of_input]) * scales[of_input]).T

    @property
    def has_int4_groups(self) -> bool:
        return self.group_size < 0 or form_for(self.group_size) is not None

    def packed(self, name: str, read: Read, parts: frozenset[str]) -> PackedInt4 | None:
        words = read("qweight")
        return PackedInt4.of(
            name,
            Layout.AWQ,
            words,
            read("scales").T,
            read("qzeros") if "qzeros" in parts else None,
            in_features=len(words),
            group_size=None if self.group_size < 0 else self.group_size,
        )


@dataclass(frozen=True)
class Gptq(QuantizedFormat):
    """GPTQ (arXiv 2210.17323), 2, 4 or 8 bits."""

    bits: int
    group_size: int  # inputs that share a scale, where there is no g_idx; -1: all
    zeros_are_shifted: bool  # version 1 of the format keeps z - 1
    name: str = "GPTQ"
    library: str = "gptqmodel"
    parts: frozenset[str] = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    markers: frozenset[str] = frozenset({"qweight"})

    def dense(self, read: Read, parts: frozenset[str]) -> Tensor:
        q, scales = unpack(read("qweight"), self.bits, dim=0), read("scales").float()  # [in, out], [groups, out]
        zeros = unpack(read("qzeros"), self.bits, dim=1, count=q.shape[1])
        if self.zeros_are_shifted:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        group = q.shape[0] if self.group_size < 0 else self.group_size
        of_input = read("g_idx").long() if "g_idx" in parts else torch.arange(q.shape[0]) // group
        return ((q - zeros[of_input]) * scales[of_input]).T

    @property
    def has_int4_groups(self) -> bool:
        return self.bits == 4 and (self.group_size < 0 or form_for(self.group_size) is not None)

    def packed(self, name: str, read: Read, parts: frozenset[str]) -> PackedInt4 | None:
        words = read("qweight")
        if not self.has_int4_groups:
            return None
        return PackedInt4.of(
            name,
            Layout.GPTQ,
            words,
            read("scales").T,
            read("qzeros"),
            in_features=PER_WORD * len(words),
            group_size=None if self.group_size < 0 else self.group_size,
            least=int(self.zeros_are_shifted),
            g_idx=read("g_idx") if "g_idx" in parts else None,
        )


@dataclass(frozen=True)
class CompressedTensors(QuantizedFormat):
    """compressed-tensors: packed integers, plain int8, or float8. Activations are not quantised."""

    block: tuple[int, int] | None  # rows and columns that share a scale, if scales are per block
    has_int4: bool = False  # some weights have four bits, packed, and a scale for each row or group
    name: str = "compressed-tensors"
    library: str = "compressed_tensors"
    parts: frozenset[str] = frozenset(
        f"{of}_{what}"
        for of in ("weight", "input", "output", "k", "v", "q")
        for what in ("packed", "scale", "zero_point", "shape", "g_idx", "global_scale")
    )
    markers: frozenset[str] = frozenset({"weight_scale"})
    needless: frozenset[str] = frozenset(part for part in parts if not part.startswith("weight_"))

    def dense(self, read: Read, parts: frozenset[str]) -> Tensor:
        scale = read("weight_scale").float()
        zero = read("weight_zero_point") if "weight_zero_point" in parts else None
        if "weight_packed" in parts:
            rows, columns = (int(n) for n in read("weight_shape").tolist())
            words = read("weight_packed")
            bits = next((b for b in (4, 8) if words.shape[1] == -(-columns * b // 32)), None)
            if bits is None or words.shape[0] != rows:
                raise UnsupportedModel(
                    f"A packed weight of {rows} by {columns} has words of shape {tuple(words.shape)}; 4 and 8 bits per "
                    f"number are read. {CURE}"
                )
            q = unpack(words, bits, dim=1, count=columns) - (1 << (bits - 1))
            if zero is not None and zero.dtype is torch.int32:  # packed, too
                zero = unpack(zero, bits, dim=0, count=rows) - (1 << (bits - 1))
        else:
            q = read("weight")
        group = read("weight_g_idx").long() if "weight_g_idx" in parts else None
        if group is not None and bool((group < 0).any()):
            group = None  # columns are in order
        scale = self._spread(scale, q.shape, group)
        dense = q.float()
        return (dense - self._spread(zero.float(), q.shape, group)) * scale if zero is not None else dense * scale

    @property
    def has_int4_groups(self) -> bool:
        return self.has_int4

    def packed(self, name: str, read: Read, parts: frozenset[str]) -> PackedInt4 | None:
        if not self.has_int4 or not parts.issuperset({"weight_packed", "weight_shape", "weight_scale"}):
            return None
        rows, columns = (int(n) for n in read("weight_shape").tolist())
        words, scale = read("weight_packed"), read("weight_scale")
        scale = scale[:, None] if scale.dim() == 1 else scale
        zeros = read("weight_zero_point") if "weight_zero_point" in parts else None
        group = read("weight_g_idx") if "weight_g_idx" in parts else None
        if words.shape[1] != -(-columns // PER_WORD) or len(scale) != rows:
            return None  # eight bits, or one scale for all
        if zeros is not None and zeros.dtype is not torch.int32:
            return None
        return PackedInt4.of(
            name,
            Layout.ROWS,
            words,
            scale,
            None if zeros is None else zeros.T,
            in_features=columns,
            group_size=-(-columns // scale.shape[1]),
            least=8 if zeros is None else 0,
            g_idx=None if group is None or bool((group < 0).any()) else group,
        )

    def _spread(self, of_part: Tensor, shape: torch.Size, group: Tensor | None) -> Tensor:
        """Broadcast scales or zeros to the weight's shape."""
        rows, columns = shape
        if of_part.numel() == 1:
            return of_part.view(1, 1)
        if of_part.dim() == 1:
            of_part = of_part[:, None]
        if self.block is not None:
            high, wide = self.block
            return of_part.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        if of_part.shape[1] == 1:
            return of_part
        if group is not None:
            return of_part[:, group]
        return of_part.repeat_interleave(-(-columns // of_part.shape[1]), 1)[:, :columns]


_FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


@dataclass(frozen=True)
class BlockFp8(QuantizedFormat):
    """float8 weights with one scale per block (DeepSeek), per row, or per tensor (ModelOpt)."""

    block: tuple[int, int]
    name: str = "fp8"
    library: str = "kernels"  # "": none
    parts: frozenset[str] = frozenset(
        {"weight_scale_inv", "weight_scale", "activation_scale", "input_scale", "output_scale", "k_scale", "v_scale"}
    )
    markers: frozenset[str] = frozenset({"weight_scale_inv", "weight_scale"})
    needless: frozenset[str] = parts - markers

    def dense(self, read: Read, parts: frozenset[str]) -> Tensor:
        q, scale = read("weight"), read("weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale").float()
        if q.dtype not in _FP8_DTYPES:
            raise ValueError(f"its numbers are {q.dtype}, which is no float of eight bits")
        if scale.numel() == 1:
            return q.float() * scale.view(1, 1)
        if scale.numel() == len(q):
            return q.float() * scale.view(-1, 1)
        high, wide = self.block
        spread = scale.repeat_interleave(high, 0)[: q.shape[0]].repeat_interleave(wide, 1)[:, : q.shape[1]]
        if spread.shape != q.shape:
            raise ValueError(
                f"it has {tuple(scale.shape)} scales for {tuple(q.shape)} numbers in blocks of {self.block}"
            )
        return q.float() * spread


@dataclass(frozen=True)
class Bitsandbytes(QuantizedFormat):
    """bitsandbytes: nf4 and fp4 with absolute maxima per block, or int8 with a scale per row."""

    name: str = "bitsandbytes"
    library: str = "bitsandbytes"
    parts: frozenset[str] = frozenset(
        {"weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"}
        | {"SCB", "weight_format", "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"}
    )
    markers: frozenset[str] = frozenset(part for part in parts if part == "SCB" or "quant_state" in part)
    needless: frozenset[str] = frozenset({"weight_format"})

    def dense(self, read: Read, parts: frozenset[str]) -> Tensor:
        if "SCB" in parts:
            return read("weight").float() * (read("SCB").float()[:, None] / 127)
        (state,) = [part for part in parts if part.startswith("weight.quant_state.")]
        said: dict[str, Any] = json.loads(bytes(read(state).tolist()))
        absmax = read("weight.absmax")
        if "weight.nested_absmax" in parts:
            outer = read("weight.nested_absmax").float().repeat_interleave(int(said["nested_blocksize"]))
            code = read("weight.nested_quant_map").float()
            absmax = code[absmax.long()] * outer[: len(absmax)] + float(said["nested_offset"])
        values = read("weight.quant_map").float()[halves(read("weight")).long()]
        count = math.prod(map(int, said["shape"]))
        of_element = absmax.float().repeat_interleave(int(said["blocksize"]))[:count]
        return (values[:count] * of_element).view(*said["shape"])


def read_format(config: Mapping[str, Any], name: str) -> QuantizedFormat | None:
    """Return the format in config.json of the checkpoint `name`; None: unquantised. Raises UnsupportedModel."""
    said = config.get("quantization_config")
    if said is None:
        return None
    method = str(said.get("quant_method", "")) if isinstance(said, Mapping) else ""
    try:
        match method:
            case "awq":
                return _awq(said, name)
            case "gptq":
                return _gptq(said, name)
            case "compressed-tensors":
                return _compressed_tensors(said, name)
            case "fp8":
                high, wide = said.get("weight_block_size") or (1, 1)
                return BlockFp8((int(high), int(wide)))
            case "modelopt":
                return _modelopt(said, name)
            case "bitsandbytes":
                return Bitsandbytes()
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"The quantization_config of {name} cannot be read as {method}: {error!r}.") from error
    raise UnsupportedModel(f"{name} is quantised as {method or said}, which is not read. {CURE}")


def _awq(said: Mapping[str, Any], name: str) -> Awq:
    version, bits = str(said.get("version", "gemm")).lower(), int(said.get("bits", said.get("w_bit", 4)))
    if version != "gemm" or bits != 4:
        raise UnsupportedModel(f"{name} is quantised as AWQ {version} with {bits} bits; gemm with 4 is read. {CURE}")
    return Awq(int(said.get("group_size", said.get("q_group_size", 128))))


def _modelopt(said: Mapping[str, Any], name: str) -> BlockFp8:
    """Parse NVIDIA ModelOpt's settings: in hf_quant_config.json, or since 0.29 also in config.json."""
    nested = said.get("quantization")
    algorithm = str((nested if isinstance(nested, Mapping) else said).get("quant_algo") or "")
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise UnsupportedModel(f"{name} is quantised by ModelOpt as {algorithm or dict(said)}; FP8 is read. {CURE}")
    return BlockFp8((1, 1), name="ModelOpt FP8", library="")


def _gptq(said: Mapping[str, Any], name: str) -> Gptq:
    bits, kind = int(said["bits"]), str(said.get("checkpoint_format") or "gptq")
    if bits not in (2, 4, 8) or kind not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(
            f"{name} is quantised as GPTQ {kind} with {bits} bits; gptq and gptq_v2 with 2, 4 or 8 are read. {CURE}"
        )
    return Gptq(bits, int(said.get("group_size", -1)), zeros_are_shifted=kind == "gptq")


_READ_FORMATS = frozenset({"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense"})


def _compressed_tensors(said: Mapping[str, Any], name: str) -> CompressedTensors:
    groups = list((said.get("config_groups") or {}).values())
    kinds = {str(said.get("format", "dense"))} | {str(group["format"]) for group in groups if group.get("format")}
    kinds.discard("mixed-precision")
    sparsity = (said.get("sparsity_config") or {}).get("format", "dense")
    if others := sorted(kinds - _READ_FORMATS):
        raise UnsupportedModel(
            f"{name} is quantised as compressed-tensors {others[0]}, which is not read; "
            f"{', '.join(sorted(_READ_FORMATS))} are. {CURE}"
        )
    if sparsity != "dense":
        raise UnsupportedModel(f"{name} keeps its weights sparse ({sparsity}), which is not read. {CURE}")
    weights = [group["weights"] for group in groups if group.get("weights")]
    blocks = {tuple(int(n) for n in spec["block_structure"]) for spec in weights if spec.get("strategy") == "block"}
    if len(blocks) > 1 or (blocks and any(spec.get("strategy") != "block" for spec in weights)):
        raise UnsupportedModel(f"{name} mixes blocks with other ways to share scales, which is not read. {CURE}")
    rows, columns = blocks.pop() if blocks else (0, 0)
    has_int4 = any(
        spec.get("num_bits") == 4
        and spec.get("type", "int") == "int"
        and (spec.get("strategy") == "channel" or form_for(int(spec.get("group_size") or 0)) is not None)
        for spec in weights
    )
    return CompressedTensors((rows, columns) if rows else None, has_int4 and not rows)
