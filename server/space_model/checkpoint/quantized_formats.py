"""Formats of quantised checkpoints: the tensors that store a weight, and how to dequantise it.

AWQ                 W[o, i] = (q[i, o] - z[g, o]) · s[g, o]          g = i // group size
GPTQ                W[o, i] = (q[i, o] - z[g, o]) · s[g, o]          g = g_idx[i]; version 1 keeps z - 1
compressed-tensors  W[o, i] = (q[o, i] - z[o, g]) · s[o, g]          one g, one per row, per group, or per block
fp8                 W[o, i] = q[o, i] · s[o // 128, i // 128]    one s per block, per row, or one
nvfp4, mxfp4        W[o, i] = e2m1[q[o, i]] · s[o, i // 16 or 32]    nvfp4: s of eight bits times one for all; mxfp4: 2ⁿ
experts in mxfp4    W[e, i, o] = e2m1[q[e, o, i]] · 2^n[e, o, i // 32]   as gpt-oss is published
HQQ                 W = ((q - z) · s) in the weight's shape      groups are rows or columns of another shape
bitsandbytes 4-bit  W = code[q] · absmax[n // block size]            n: the flat index; absmax may be quantised, too
bitsandbytes 8-bit  W[o, i] = q[o, i] · s[o] / 127
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from space_kernels.linear.packed_int4 import AWQ_ORDER, PER_WORD, Layout, PackedInt4, form_for
from space_kernels.linear.packed_int8 import ByteLayout, PackedInt8
from space_kernels.linear.packed_mxfp4 import PackedMxfp4
from torch import Tensor

from space_model.checkpoint.stored_weight import StoredPart, StoredWeight
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


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Floats of four bits but for their sign, which is the highest bit: 1 bit of mantissa, 2 of exponent."""


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Unpack uint8 [rows, n] to float32 [rows, 2n], the low half of a byte first."""
    if packed.dtype is not torch.uint8 or packed.dim() != 2:
        raise ValueError(f"its numbers are {packed.dtype} {tuple(packed.shape)}; floats of four bits are uint8 in rows")
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    return torch.stack([values[(packed & 15).long()], values[(packed >> 4).long()]], dim=2).flatten(1)


def power_of_two(exponents: Tensor) -> Tensor:
    """Return float32 2^(n - 127) of uint8 exponents (e8m0)."""
    return torch.exp2(exponents.float() - 127)


def group_of_inputs(num_inputs: int, num_groups: int, group_size: int) -> Tensor:
    """Return [in]: the group of each input, where they come in order; `group_size` -1: all are one. Raises ValueError
    if there are other scales than for so many groups."""
    size = num_inputs if group_size < 0 else max(1, group_size)
    if num_groups != -(-num_inputs // size):
        raise ValueError(f"it has {num_groups} scales for {num_inputs} inputs in groups of {size} (group_size)")
    return torch.arange(num_inputs) // size


Read = Callable[[str], Tensor]  # returns a module's tensor by its suffix, such as `qweight`

CURE = (
    "Use the checkpoint it was made from, or one in AWQ, GPTQ, AutoRound, compressed-tensors, fp8, ModelOpt FP8 or "
    "NVFP4, MXFP4 (gpt-oss), HQQ or bitsandbytes format."
)


_AUTO_ROUND = "AutoRound"
MXFP4_EXPERTS = "MXFP4 (gpt-oss)"

PACKED_FORMATS = frozenset(layout.value for layout in Layout) | {_AUTO_ROUND, MXFP4_EXPERTS}
"""Names of the formats of which `--weights packed` holds linears of four or eight bits as they are stored."""


class QuantizedFormat:
    """How a checkpoint stores quantised weights."""

    name: str  # for messages
    library: str  # Python package whose kernels multiply by packed weights; "": none
    parts: frozenset[str]  # tensor suffixes of a module besides `weight` and `bias`
    markers: frozenset[str]  # of these suffixes, those that only a module with a quantised weight has
    needless: frozenset[str] = frozenset()  # those that do not affect the weight: scales of activations, keys, values
    before_part: str = "."  # what separates a module's path and the suffix of a tensor
    weight: str = ".weight"  # what follows the path in the name of the dequantised weight

    def dense(self, read: Read, parts: frozenset[str]) -> Tensor:
        """Return the dequantised weight [out, in] float32 of a module with these tensors."""
        raise NotImplementedError

    def shape(self, shape_of: Callable[[str], tuple[int, ...]]) -> tuple[int, ...] | None:
        """Return a weight's shape by those of its parts, if `write` dequantises it a piece at a time; None: at once."""
        return None

    def write(self, read: Read, place: Tensor) -> None:
        """Write a weight into `place`, which has its `shape`, on any device in any dtype."""
        raise NotImplementedError

    @property
    def kept_name(self) -> str:
        """Return a name that no type of GGUF blocks has, too."""
        return self.name

    @property
    def stays_packed(self) -> bool:
        """Return whether linears have four or eight bits, in groups that a CPU multiplies as they are."""
        return False

    def packed(self, name: str, read: Read, parts: frozenset[str]) -> StoredPart | None:
        """Return the weight of a module with these tensors as the file has it; None: only dequantised. `name`: for
        messages."""
        return None

    def packed_experts(self, name: str, read: Read) -> dict[str, list[StoredWeight]]:
        """Return the weights of each expert as the file has them, where it stacks them, by what follows the stacked
        weight's name: ".gate" and ".up", or "" for one linear an expert; empty: it does not. `name`: for messages."""
        return {}


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
        zeros = unpack_awq(read("qzeros")) if "qzeros" in parts else torch.zeros_like(scales)
        of_input = group_of_inputs(len(q), len(scales), self.group_size)
        return ((q - zeros[of_input]) * scales[of_input]).T

    @property
    def stays_packed(self) -> bool:
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
    is_symmetric: bool = True  # all zero points are the middle
    is_reordered: bool = False  # inputs of a group are not beside each other: a g_idx is needed
    name: str = "GPTQ"
    library: str = "gptqmodel"
    parts: frozenset[str] = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    markers: frozenset[str] = frozenset({"qweight"})

    def dense(self, read: Read, parts: frozenset[str]) -> Tensor:
        q, scales = unpack(read("qweight"), self.bits, dim=0), read("scales").float()  # [in, out], [groups, out]
        zeros = unpack(read("qzeros"), self.bits, dim=1, count=q.shape[1])
        if self.zeros_are_shifted:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        if "g_idx" in parts:
            of_input = read("g_idx").long()
        elif self.is_reordered and len(scales) > 1:
            raise ValueError("it has no g_idx, which says in which group an input is where desc_act is true")
        else:
            of_input = group_of_inputs(len(q), len(scales), self.group_size)
        return ((q - zeros[of_input]) * scales[of_input]).T

    @property
    def stays_packed(self) -> bool:
        has_groups = self.group_size < 0 or form_for(self.group_size) is not None
        return has_groups and (self.bits == 4 or (self.bits == 8 and self.is_symmetric))

    def packed(self, name: str, read: Read, parts: frozenset[str]) -> StoredPart | None:
        words = read("qweight")
        if not self.stays_packed or (self.is_reordered and self.group_size >= 0 and "g_idx" not in parts):
            return None
        if self.bits == 8:
            return self._packed_int8(name, words, read, parts)
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

    def _packed_int8(self, name: str, words: Tensor, read: Read, parts: frozenset[str]) -> PackedInt8 | None:
        """Return the weight; None if a zero point is not the middle."""
        scale = read("scales").T
        zeros = unpack(read("qzeros"), 8, dim=1, count=len(scale))
        if bool((zeros != 128 - int(self.zeros_are_shifted)).any()):
            return None
        return PackedInt8.of(
            name,
            ByteLayout.WORDS_OF_INPUTS,
            words,
            scale,
            in_features=4 * len(words),
            group_size=None if self.group_size < 0 else self.group_size,
            g_idx=read("g_idx") if "g_idx" in parts else None,
        )


@dataclass(frozen=True)
class CompressedTensors(QuantizedFormat):
    """compressed-tensors: packed integers, plain int8, float8, or packed floats of four bits. Activations are not
    quantised."""

    block: tuple[int, int] | None  # rows and columns that share a scale, if scales are per block
    has_int4: bool = False  # some weights have four bits, packed, and a scale for each row or group, or are MXFP4
    has_int8: bool = False  # some have eight bits, and a scale for each row or group
    is_reordered: bool = False  # inputs of a group are not beside each other: a weight_g_idx is needed
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
        scale = read("weight_scale")
        scale = power_of_two(scale) if scale.dtype is torch.uint8 else scale.float()
        zero = read("weight_zero_point") if "weight_zero_point" in parts else None
        if "weight_packed" in parts and "weight_shape" not in parts:
            q = unpack_e2m1(read("weight_packed"))
            if "weight_global_scale" in parts:
                scale = scale / read("weight_global_scale").float()
        elif "weight_packed" in parts:
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
        elif group is None and self.is_reordered and scale.numel() > len(q):
            raise ValueError("it has no weight_g_idx, which says in which group an input is where actorder is group")
        scale = self._spread(scale, q.shape, group)
        dense = q.float()
        return (dense - self._spread(zero.float(), q.shape, group)) * scale if zero is not None else dense * scale

    @property
    def stays_packed(self) -> bool:
        return self.has_int4 or self.has_int8

    def packed(self, name: str, read: Read, parts: frozenset[str]) -> StoredPart | None:
        if not self.stays_packed or "weight_scale" not in parts:
            return None
        if self.is_reordered and "weight_g_idx" not in parts:
            return None
        if "weight_packed" not in parts:
            return self._whole_numbers(name, read, parts)
        if "weight_shape" not in parts:
            exponents = read("weight_scale")
            return PackedMxfp4(name, read("weight_packed"), exponents) if exponents.dtype is torch.uint8 else None
        rows, columns = (int(n) for n in read("weight_shape").tolist())
        words, scale = read("weight_packed"), read("weight_scale")
        scale = scale[:, None] if scale.dim() == 1 else scale
        zeros = read("weight_zero_point") if "weight_zero_point" in parts else None
        group = read("weight_g_idx") if "weight_g_idx" in parts else None
        if len(scale) != rows:
            return None  # one scale for all
        if words.shape[1] != -(-columns // PER_WORD):
            return None if zeros is not None else self._int8(name, ByteLayout.WORDS, words, scale, columns, group)
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

    def _whole_numbers(self, name: str, read: Read, parts: frozenset[str]) -> PackedInt8 | None:
        """Return a weight of plain int8 without zero points; None: it is another."""
        numbers, scale = read("weight"), read("weight_scale")
        if not self.has_int8 or numbers.dtype is not torch.int8 or numbers.dim() != 2 or not scale.is_floating_point():
            return None
        if "weight_zero_point" in parts and bool(read("weight_zero_point").any()):
            return None
        scale = scale.expand(len(numbers), 1) if scale.numel() == 1 else scale.view(len(scale), -1)
        group = read("weight_g_idx") if "weight_g_idx" in parts else None
        return self._int8(name, ByteLayout.BYTES, numbers, scale, numbers.shape[1], group)

    def _int8(
        self, name: str, layout: ByteLayout, numbers: Tensor, scale: Tensor, columns: int, group: Tensor | None
    ) -> PackedInt8 | None:
        return PackedInt8.of(
            name,
            layout,
            numbers,
            scale,
            in_features=columns,
            group_size=-(-columns // scale.shape[1]),
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
        | {"input_scale_ub"}
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
class ModelOptFp4(QuantizedFormat):
    """NVIDIA ModelOpt's NVFP4: floats of four bits, an e4m3 scale for each 16 inputs, and one for all."""

    name: str = "ModelOpt NVFP4"
    library: str = ""
    parts: frozenset[str] = frozenset({"weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale"})
    markers: frozenset[str] = frozenset({"weight_scale_2"})
    needless: frozenset[str] = frozenset({"input_scale", "k_scale", "v_scale"})

    def dense(self, read: Read, parts: frozenset[str]) -> Tensor:
        q, scale = unpack_e2m1(read("weight")), read("weight_scale").float()
        if scale.shape != (len(q), q.shape[1] // 16):
            raise ValueError(f"it has {tuple(scale.shape)} scales for {tuple(q.shape)} numbers in groups of 16")
        return q * (scale * read("weight_scale_2").float()).repeat_interleave(16, 1)


@dataclass(frozen=True)
class Mxfp4Experts(QuantizedFormat):
    """Experts as gpt-oss is published: floats of four bits, two in a byte, and an exponent for each 32 inputs.

    `blocks` [experts, outputs, inputs / 32, 16] and `scales` [experts, outputs, inputs / 32] are uint8; the weight is
    [experts, inputs, outputs]. Routers, attention, embeddings and biases are not quantised.
    """

    name: str = "MXFP4"
    library: str = ""
    parts: frozenset[str] = frozenset({"blocks", "scales"})
    markers: frozenset[str] = frozenset({"blocks"})
    before_part: str = "_"
    weight: str = ""

    @property
    def kept_name(self) -> str:
        return MXFP4_EXPERTS

    def dense(self, read: Read, parts: frozenset[str]) -> Tensor:
        experts, outputs, groups, _ = read("blocks").shape
        found = torch.empty(experts, 32 * groups, outputs)
        self.write(read, found)
        return found

    @property
    def stays_packed(self) -> bool:
        return True

    def packed_experts(self, name: str, read: Read) -> dict[str, list[StoredWeight]]:
        blocks, scales = read("blocks"), read("scales")
        if blocks.dim() != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
            raise ValueError(
                f"it has {tuple(scales.shape)} scales for blocks of {tuple(blocks.shape)}, which are no experts of 32 "
                "numbers a scale"
            )

        def each(step: slice) -> list[StoredWeight]:
            return [
                [PackedMxfp4(name, packed[step].flatten(1), exponents[step])]
                for packed, exponents in zip(blocks, scales, strict=True)
            ]

        if not name.endswith("gate_up_proj"):
            return {"": each(slice(None))}
        return {".gate": each(slice(0, None, 2)), ".up": each(slice(1, None, 2))}

    def shape(self, shape_of: Callable[[str], tuple[int, ...]]) -> tuple[int, ...]:
        found = shape_of("blocks")
        if len(found) != 4 or found[3] != 16 or shape_of("scales") != found[:3]:
            raise ValueError(
                f"it has {shape_of('scales')} scales for blocks of {found}, which are no experts of 32 numbers a scale"
            )
        return found[0], 32 * found[2], found[1]

    def write(self, read: Read, place: Tensor) -> None:
        blocks, scales = read("blocks"), read("scales")
        for expert, (packed, exponents) in enumerate(zip(blocks, scales, strict=True)):
            exponent = exponents.view(-1, 1).to(torch.int32) - 127
            numbers = torch.ldexp(unpack_e2m1(packed.flatten(0, 1)), exponent)  # [out · groups, 32]
            place[expert].copy_(numbers.view(len(packed), -1).T)


_HQQ_PACKINGS = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
"""Bits of a number. The rows that a word has are as many apart as there are words, the first in the highest bits."""


@dataclass(frozen=True)
class Hqq(QuantizedFormat):
    """Half-quadratic quantisation, as the `hqq` library saves it for safetensors: settings are tensors, too."""

    name: str = "HQQ"
    library: str = ""
    parts: frozenset[str] = frozenset(
        {"W_q", "scale", "zero", "shape", "packing", "group_size", "axis", "nbits", "view_as_float"}
        | {"channel_wise", "compute_dtype", "encoded_state_dict", "offload_meta", "optimize", "quant_scale"}
        | {"quant_zero", "round_zero", "stores_quant_config", "unpack_view_dtype"}
    )
    markers: frozenset[str] = frozenset({"W_q"})
    needless: frozenset[str] = parts - {"W_q", "scale", "zero", "shape", "packing"}

    def dense(self, read: Read, parts: frozenset[str]) -> Tensor:
        packing = bytes(read("packing").tolist()).decode()
        shape = [int(n) for n in read("shape").tolist()]
        zero, scale = read("zero").float(), read("scale").float()
        if packing not in _HQQ_PACKINGS:
            raise ValueError(f"its packing is {packing!r}; {', '.join(_HQQ_PACKINGS)} are read")
        bits = _HQQ_PACKINGS[packing]
        words = read("W_q").view(torch.int32 if bits == 3 else torch.uint8)  # may be viewed as floats
        per_word = 10 if bits == 3 else 8 // bits
        rows = torch.cat([(words >> (bits * n)) & ((1 << bits) - 1) for n in reversed(range(per_word))])
        columns = rows.shape[1] if rows.dim() == 2 else 1
        rows = rows[: math.prod(shape) // columns]  # three bits: the last words may not be full
        return ((rows.float() - zero) * scale).view(shape)


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
        settings: dict[str, Any] = json.loads(bytes(read(state).tolist()))
        absmax = read("weight.absmax")
        if "weight.nested_absmax" in parts:
            outer = read("weight.nested_absmax").float().repeat_interleave(int(settings["nested_blocksize"]))
            code = read("weight.nested_quant_map").float()
            absmax = code[absmax.long()] * outer[: len(absmax)] + float(settings["nested_offset"])
        values = read("weight.quant_map").float()[halves(read("weight")).long()]
        count = math.prod(map(int, settings["shape"]))
        of_element = absmax.float().repeat_interleave(int(settings["blocksize"]))[:count]
        return (values[:count] * of_element).view(*settings["shape"])


def is_of_mlx(settings: Mapping[str, Any]) -> bool:
    """Return whether a section of config.json says how mlx-lm quantised the weights: it names no method."""
    return "quant_method" not in settings and {"group_size", "bits"} <= settings.keys()


def read_format(config: Mapping[str, Any], name: str) -> QuantizedFormat | None:
    """Return the format in config.json of the checkpoint `name`; None: unquantised. Raises UnsupportedModel."""
    settings = config.get("quantization_config")
    if settings is None:
        return None
    method = str(settings.get("quant_method", "")) if isinstance(settings, Mapping) else ""
    if isinstance(settings, Mapping) and is_of_mlx(settings):
        raise UnsupportedModel(f"{name} is quantised for Apple's MLX (mlx-lm), which is not read. {CURE}")
    try:
        match method:
            case "awq":
                return _awq(settings, name)
            case "gptq":
                return _gptq(settings, name)
            case "compressed-tensors":
                return _compressed_tensors(settings, name)
            case "fp8":
                high, wide = settings.get("weight_block_size") or (1, 1)
                return BlockFp8((int(high), int(wide)))
            case "fbgemm_fp8":
                return BlockFp8((1, 1), name="fbgemm fp8", library="")
            case "auto-round" | "intel/auto-round":
                return _auto_round(settings, name)
            case "hqq":
                return Hqq()
            case "mxfp4":
                return Mxfp4Experts()
            case "modelopt":
                return _modelopt(settings, name)
            case "bitsandbytes":
                return Bitsandbytes()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModel(
            f"The quantization_config of {name} cannot be read as {method}: {error!r}. Fetch the config.json of the "
            "original checkpoint."
        ) from error
    raise UnsupportedModel(f"{name} is quantised as {method or settings}, which is not read. {CURE}")


def _awq(settings: Mapping[str, Any], name: str) -> Awq:
    version, bits = str(settings.get("version", "gemm")).lower(), int(settings.get("bits", settings.get("w_bit", 4)))
    if version != "gemm" or bits != 4:
        raise UnsupportedModel(f"{name} is quantised as AWQ {version} with {bits} bits; gemm with 4 is read. {CURE}")
    return Awq(int(settings.get("group_size", settings.get("q_group_size", 128))))


def _auto_round(settings: Mapping[str, Any], name: str) -> Awq | Gptq:
    """Parse AutoRound's settings: it packs as GPTQ or AWQ do. Layers of other bits are refused, unquantised ones are
    read."""
    packing, bits = str(settings.get("packing_format", "")), int(settings["bits"])
    each_bits = {int(each.get("bits", bits)) for each in (settings.get("extra_config") or {}).values()}
    if others := sorted(each_bits - {bits, 16, 32}):
        raise UnsupportedModel(
            f"{name} is quantised by AutoRound with {', '.join(map(str, [bits, *others]))} bits; one number of bits "
            f"for all is read. {CURE}"
        )
    match packing:
        case "auto_round:auto_awq":
            return replace(_awq(settings, name), name=_AUTO_ROUND, library="auto_round")
        case "auto_round:auto_gptq":
            return replace(_gptq(settings, name), name=_AUTO_ROUND, library="auto_round")
    raise UnsupportedModel(
        f"{name} is quantised by AutoRound and packed as {packing!r}; auto_round:auto_gptq and auto_round:auto_awq are "
        f"read. {CURE}"
    )


def _modelopt(settings: Mapping[str, Any], name: str) -> BlockFp8 | ModelOptFp4:
    """Parse NVIDIA ModelOpt's settings: in hf_quant_config.json, or since 0.29 also in config.json."""
    nested = settings.get("quantization")
    algorithm = str((nested if isinstance(nested, Mapping) else settings).get("quant_algo") or "")
    if algorithm == "NVFP4":
        return ModelOptFp4()
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise UnsupportedModel(
            f"{name} is quantised by ModelOpt as {algorithm or dict(settings)}; FP8 and NVFP4 are read. {CURE}"
        )
    return BlockFp8((1, 1), name="ModelOpt FP8", library="")


def _gptq(settings: Mapping[str, Any], name: str) -> Gptq:
    bits, kind = int(settings["bits"]), str(settings.get("checkpoint_format") or "gptq")
    if bits not in (2, 4, 8) or kind not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(
            f"{name} is quantised as GPTQ {kind} with {bits} bits; gptq and gptq_v2 with 2, 4 or 8 are read. {CURE}"
        )
    each_bits = {int(each.get("bits", bits)) for each in (settings.get("dynamic") or {}).values()}
    if others := sorted(each_bits - {bits}):
        raise UnsupportedModel(
            f"{name} is quantised as GPTQ with {', '.join(map(str, [bits, *others]))} bits (dynamic); one number of "
            f"bits for all is read. {CURE}"
        )
    size, is_symmetric = int(settings.get("group_size", -1)), bool(settings.get("sym", True))
    return Gptq(
        bits,
        size,
        zeros_are_shifted=kind == "gptq",
        is_symmetric=is_symmetric,
        is_reordered=settings.get("desc_act") is True,
    )


_READ_FORMATS = frozenset(
    {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense"}
    | {"nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"}
)


def _compressed_tensors(settings: Mapping[str, Any], name: str) -> CompressedTensors:
    groups = list((settings.get("config_groups") or {}).values())
    kinds = {str(settings.get("format", "dense"))} | {str(group["format"]) for group in groups if group.get("format")}
    kinds.discard("mixed-precision")
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if others := sorted(kinds - _READ_FORMATS):
        raise UnsupportedModel(
            f"{name} is quantised as compressed-tensors {others[0]}, which is not read; "
            f"{', '.join(sorted(_READ_FORMATS))} are. {CURE}"
        )
    if sparsity != "dense":
        raise UnsupportedModel(f"{name} keeps its weights sparse ({sparsity}), which is not read. {CURE}")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise UnsupportedModel(
            f"{name} turns its weights and activations (transform_config, as QuIP and SpinQuant do), which is not "
            f"done here. {CURE}"
        )
    weights = [group["weights"] for group in groups if group.get("weights")]
    blocks = {tuple(int(n) for n in spec["block_structure"]) for spec in weights if spec.get("strategy") == "block"}
    if len(blocks) > 1 or (blocks and any(spec.get("strategy") != "block" for spec in weights)):
        raise UnsupportedModel(f"{name} mixes blocks with other ways to share scales, which is not read. {CURE}")
    rows, columns = blocks.pop() if blocks else (0, 0)
    in_groups = [
        spec
        for spec in weights
        if spec.get("type", "int") == "int"
        and (spec.get("strategy") == "channel" or form_for(int(spec.get("group_size") or 0)) is not None)
    ]
    has_int4 = any(spec.get("num_bits") == 4 for spec in in_groups) or "mxfp4-pack-quantized" in kinds
    has_int8 = any(spec.get("num_bits") == 8 and spec.get("symmetric", True) for spec in in_groups)
    return CompressedTensors(
        (rows, columns) if rows else None,
        has_int4 and not rows,
        has_int8 and not rows,
        is_reordered=any(str(spec.get("actorder")).lower() in ("group", "dynamic", "true") for spec in weights),
    )
