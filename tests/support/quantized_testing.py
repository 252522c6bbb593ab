"""Tiny quantised checkpoints for tests, packed as the formats' documentation defines. Shipped, but not served."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from space_model.loading.load import load_model
from space_model.model_error import InvalidSetting
from torch import Tensor

GROUP = 32  # inputs that share a scale in formats with groups

Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by suffix of the linear's path, and the weight that they encode, [out, in] float32."""

Pack = Callable[[Tensor, torch.Generator | None], Packed]
"""Quantises a weight; with a generator zero points are off by one at random, so that they show."""


def write_quantized(
    source: Path, target: Path, plain: Path, kind: str, *, head: bool = False, nearest: bool = False
) -> None:
    """Write `source` (a dense checkpoint) with its layers' linears quantised to `target`, and dequantised to `plain`.

    `kind`: one of KINDS; `head`: the output head is quantised, too; `nearest`: zero points are the best.
    """
    pack, section = KINDS[kind]
    generator = None if nearest else torch.Generator().manual_seed(0)
    tensors = load_file(source / "model.safetensors")
    packed, dense = {}, {}
    for name, tensor in tensors.items():
        linears = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", *(("lm_head.weight",) if head else ()))
        if not name.endswith(linears):
            packed[name] = dense[name] = tensor
            continue
        parts, dense[name] = pack(tensor.float(), generator)
        packed |= {name.removesuffix("weight") + part: t.contiguous() for part, t in parts.items()}
    _write(source, target, packed, {"quantization_config": dict(section)})
    _write(source, plain, dense, {})


MXFP4_EXPERTS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
"""The quantization_config of gpt-oss, which `write_mxfp4_experts` writes."""


def write_mxfp4_experts(source: Path, target: Path, plain: Path) -> None:
    """Write `source` (a dense gpt-oss) with its experts' weights as published to `target`, and dequantised to
    `plain`."""
    packed, dense = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = dense[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        parts, meant = _mxfp4(tensor.transpose(1, 2).reshape(-1, inputs).float(), None)
        packed[f"{name}_blocks"] = parts["weight_packed"].view(experts, outputs, inputs // 32, 16)
        packed[f"{name}_scales"] = parts["weight_scale"].view(experts, outputs, inputs // 32)
        dense[name] = meant.view(experts, outputs, inputs).transpose(1, 2).contiguous().to(tensor.dtype)
    _write(source, target, packed, {"quantization_config": MXFP4_EXPERTS})
    _write(source, plain, dense, {})


def _write(source: Path, folder: Path, tensors: Mapping[str, Tensor], more: Mapping[str, Any]) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    contents = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contents, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | more
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _words(values: Tensor, bits: int) -> Tensor:
    """Pack [rows, n] small integers to [rows, n·bits/32] int32, lowest bits first."""
    per_word = 32 // bits
    whole = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word)).numpy().astype(np.uint64)
    words = np.zeros((whole.shape[0], whole.shape[1] // per_word), dtype=np.uint64)
    for i in range(per_word):
        words |= whole[:, i::per_word] << np.uint64(bits * i)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def _grid(
    weight: Tensor, bits: int, generator: torch.Generator | None, *, signed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise the weight by row and group: q [out, in], scales and zeros [out, groups]."""
    out, columns = weight.shape
    parts = weight.view(out, columns // GROUP, GROUP)
    levels = (1 << bits) - 1
    span = 2 * parts.abs().amax(2) if signed else parts.amax(2) - parts.amin(2)
    scale = (span / levels).to(torch.float16)
    zero = torch.full_like(scale, 1 << (bits - 1)) if signed else (-parts.amin(2) / scale.float()).round()
    if not signed:
        off = 0 if generator is None else torch.randint(-1, 2, zero.shape, generator=generator)
        zero = (zero + off).clamp(0, levels)
    q = ((parts / scale.float()[:, :, None]).round() + zero.float()[:, :, None]).clamp(0, levels)
    return q.view(out, columns).to(torch.int64), scale, zero.to(torch.int64)


def _meant(q: Tensor, scale: Tensor, zero: Tensor, group: Tensor) -> Tensor:
    """Dequantise: (q - z)·s with each column's group."""
    return (q - zero[:, group]).float() * scale.float()[:, group]


def _awq(weight: Tensor, generator: torch.Generator | None) -> Packed:
    q, scale, zero = _grid(weight, 4, generator, signed=False)
    order = [8 * word + n for word in range(weight.shape[0] // 8) for n in (0, 2, 4, 6, 1, 3, 5, 7)]
    parts = {"qweight": _words(q.T[:, order], 4), "qzeros": _words(zero.T[:, order], 4), "scales": scale.T}
    return parts, _meant(q, scale, zero, torch.arange(weight.shape[1]) // GROUP)


def _gptq(bits: int, shift: int, inputs: str = "of the linear", *, signed: bool = False) -> Pack:
    """`signed`: all zero points are the middle; `inputs`: the order of their groups: as they come, of all linears with
    as many, or of the linear."""

    def pack(weight: Tensor, generator: torch.Generator | None) -> Packed:
        columns = weight.shape[1]
        order = torch.arange(columns)
        if inputs != "as they come":
            of_all = torch.Generator().manual_seed(columns)
            order = torch.randperm(columns, generator=generator if inputs == "of the linear" else of_all)
        place = order.argsort()
        q, scale, zero = _grid(weight[:, order], bits, generator, signed=signed)
        q, group = q[:, place], place // GROUP
        parts = {
            "qweight": _words(q, bits).T,
            "qzeros": _words((zero.T - shift) % (1 << bits), bits),
            "scales": scale.T,
            "g_idx": group.to(torch.int32),
        }
        return parts, _meant(q, scale, zero, group)

    return pack


def _packed_integers(bits: int, *, signed: bool) -> Pack:
    def pack(weight: Tensor, generator: torch.Generator | None) -> Packed:
        q, scale, zero = _grid(weight, bits, generator, signed=signed)
        parts = {"weight_packed": _words(q, bits), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
        if not signed:
            parts["weight_zero_point"] = _words(zero.T, bits).T
        return parts, _meant(q, scale, zero, torch.arange(weight.shape[1]) // GROUP)

    return pack


def _integers(weight: Tensor, generator: torch.Generator | None) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    q = (weight / scale).round().to(torch.int8)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


def _floats(weight: Tensor, generator: torch.Generator | None) -> Packed:
    scale = weight.abs().amax() / 448
    q = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale.view(1), "input_scale": torch.ones(1)}, q.float() * scale


def _float_blocks(scale_name: str) -> Pack:
    def pack(weight: Tensor, generator: torch.Generator | None) -> Packed:
        scale = torch.rand(-(-weight.shape[0] // GROUP), -(-weight.shape[1] // GROUP), generator=generator) / 100 + 0.01
        whole = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        q = (weight / whole).to(torch.float8_e4m3fn)
        return {"weight": q, scale_name: scale}, q.float() * whole

    return pack


def _half_bytes(*, nested: bool) -> Pack:
    def pack(weight: Tensor, generator: torch.Generator | None) -> Packed:
        code = torch.linspace(-1, 1, 16) ** 3
        blocks = weight.reshape(-1, 64)
        absmax, more = blocks.abs().amax(1), {}
        said: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape), "dtype": "float32"}
        if nested:
            inner, offset = torch.linspace(-1, 1, 256), float(absmax.mean())
            outer = (absmax - offset).abs().amax().view(1)
            stored = ((absmax - offset)[:, None] / outer - inner).abs().argmin(1)
            absmax = inner[stored] * outer + offset
            more = {"weight.nested_absmax": outer, "weight.nested_quant_map": inner}
            said |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        q = (blocks[:, :, None] / absmax[:, None, None] - code).abs().argmin(2)
        flat = q.flatten().to(torch.uint8)
        parts = {
            "weight": (flat[0::2] * 16 + flat[1::2])[:, None],
            "weight.absmax": stored.to(torch.uint8) if nested else absmax,
            "weight.quant_map": code,
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
        }
        return parts | more, (code[q] * absmax[:, None]).view(weight.shape)

    return pack


def _rows(weight: Tensor, generator: torch.Generator | None) -> Packed:
    largest = weight.abs().amax(1)
    q = (weight * 127 / largest[:, None]).round().to(torch.int8)
    parts = {"weight": q, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, q.float() * (largest[:, None] / 127)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of a float of four bits, by its bits."""


def _nearest_e2m1(parts: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """parts [out, groups, group], scale [out, groups] -> packed uint8 [out, in / 2], and what it means, [out, in]."""
    q = (parts[..., None] / scale[:, :, None, None] - E2M1).abs().argmin(3)
    flat = q.flatten(1).to(torch.uint8)
    return flat[:, 0::2] | flat[:, 1::2] << 4, (E2M1[q] * scale[:, :, None]).flatten(1)


def _nvfp4(*, multiplies: bool) -> Pack:
    """`multiplies`: the scale of all is multiplied by (ModelOpt), not divided by (compressed-tensors)."""

    def pack(weight: Tensor, generator: torch.Generator | None) -> Packed:
        parts = weight.view(len(weight), -1, 16)
        most = parts.abs().amax(2)
        of_all = weight.abs().amax() / (6 * 448)
        scale = (most / 6 / of_all).to(torch.float8_e4m3fn)
        if multiplies:
            packed, meant = _nearest_e2m1(parts, scale.float() * of_all)
            return {"weight": packed, "weight_scale": scale, "weight_scale_2": of_all, "input_scale": of_all / 2}, meant
        packed, meant = _nearest_e2m1(parts, scale.float() / (1 / of_all))
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": (1 / of_all).view(1)}, meant

    return pack


def _mxfp4(weight: Tensor, generator: torch.Generator | None) -> Packed:
    parts = weight.view(len(weight), -1, 32)
    exponents = torch.log2(parts.abs().amax(2) / 6).ceil()
    packed, meant = _nearest_e2m1(parts, 2**exponents)
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, meant


def _mxfp8(weight: Tensor, generator: torch.Generator | None) -> Packed:
    parts = weight.view(len(weight), -1, 32)
    exponents = torch.log2(parts.abs().amax(2) / 448).ceil()
    q = (parts / 2 ** exponents[:, :, None]).to(torch.float8_e4m3fn)
    meant = (q.float() * 2 ** exponents[:, :, None]).flatten(1)
    return {"weight": q.flatten(1), "weight_scale": (exponents + 127).to(torch.uint8)}, meant


def _float_rows(weight: Tensor, generator: torch.Generator | None) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 448
    q = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale": scale, "input_scale_ub": torch.tensor([1200.0])}, q.float() * scale


def _half_quadratic(bits: int, axis: int) -> Pack:
    """Groups of GROUP numbers in the weight's order are columns (`axis` 0) or rows (1) of another shape."""

    def pack(weight: Tensor, generator: torch.Generator | None) -> Packed:
        groups = weight.reshape(-1, GROUP) if axis else weight.reshape(GROUP, -1)
        low, high = groups.amin(axis, keepdim=True), groups.amax(axis, keepdim=True)
        scale, levels = (high - low) / (2**bits - 1), 2**bits - 1
        zero = (-low / scale).round()
        q = ((groups / scale).round() + zero).clamp(0, levels).to(torch.int32)
        per_word = 10 if bits == 3 else 8 // bits
        rows = torch.nn.functional.pad(q, (0, 0, 0, -len(q) % per_word)).view(per_word, -1, q.shape[1])
        words = torch.zeros_like(rows[0])
        for row in rows:
            words = words << bits | row
        texts = {"packing": "3bit_32" if bits == 3 else f"{bits}bit_u8", "compute_dtype": "torch.float16"}
        parts = {
            "W_q": words if bits == 3 else words.to(torch.uint8),
            "scale": scale,
            "zero": zero,
            "shape": torch.tensor(weight.shape),
            **{name: torch.tensor(list(text.encode()), dtype=torch.uint8) for name, text in texts.items()},
            **{name: torch.tensor(0, dtype=torch.uint8) for name in ("view_as_float", "quant_zero", "offload_meta")},
            **{name: torch.tensor(n, dtype=torch.int32) for name, n in (("nbits", bits), ("group_size", GROUP))},
        }
        return parts, ((q - zero) * scale).view(weight.shape)

    return pack


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


KINDS: Mapping[str, tuple[Pack, Mapping[str, Any]]] = {
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq 4 bits": (
        _gptq(4, 1),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
    ),
    "gptq 8 bits, version 2": (
        _gptq(8, 0),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq_v2"}
        | {"sym": False},
    ),
    "int4 in groups": (
        _packed_integers(4, signed=True),
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True),
    ),
    "int4 with zero points": (
        _packed_integers(4, signed=False),
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False),
    ),
    "int8 in groups": (
        _packed_integers(8, signed=True),
        _compressed("pack-quantized", num_bits=8, type="int", strategy="group", group_size=GROUP, symmetric=True),
    ),
    "int8 per row": (_integers, _compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "fp8 per tensor": (_floats, _compressed("float-quantized", num_bits=8, type="float", strategy="tensor")),
    "fp8 blocks": (
        _float_blocks("weight_scale"),
        _compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[GROUP, GROUP]),
    ),
    "fp8 blocks as DeepSeek has them": (
        _float_blocks("weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "activation_scheme": "dynamic"},
    ),
    "fp8 per tensor as vLLM has it": (_floats, {"quant_method": "fp8", "activation_scheme": "static"}),
    "ModelOpt fp8": (_floats, {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": None}),
    "bitsandbytes nf4": (
        _half_bytes(nested=False),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    ),
    "bitsandbytes nf4, nested": (
        _half_bytes(nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    ),
    "bitsandbytes int8": (_rows, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "gptq 4 bits, inputs as they come": (
        _gptq(4, 1, "as they come"),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    ),
    "gptq 4 bits, one order for all linears": (
        _gptq(4, 0, "of all"),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq_v2"},
    ),
    "nvfp4": (
        _nvfp4(multiplies=False),
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "mxfp4": (_mxfp4, _compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)),
    "mxfp8": (_mxfp8, _compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32)),
    "ModelOpt nvfp4": (_nvfp4(multiplies=True), {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    "fbgemm fp8": (_float_rows, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "AutoRound, packed as GPTQ": (
        _gptq(4, 1, "as they come"),
        {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "packing_format": "auto_round:auto_gptq"},
    ),
    "AutoRound, packed as AWQ": (
        _awq,
        {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "packing_format": "auto_round:auto_awq"},
    ),
    "HQQ 4 bits": (_half_quadratic(4, 1), {"quant_method": "hqq"}),
    "HQQ 3 bits, groups in columns": (_half_quadratic(3, 0), {"quant_method": "hqq"}),
    "HQQ 2 bits": (_half_quadratic(2, 1), {"quant_method": "hqq"}),
    "gptq 8 bits, symmetric": (
        _gptq(8, 1, "of all", signed=True),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True, "sym": True},
    ),
}
"""The packing function of each kind, and its quantization_config."""


def check_needs_a_cpu_worker_alone(checkpoint: Path, weights: str) -> None:
    """Raise AssertionError unless `weights` of a quantised checkpoint are refused, with the cure, on another device, in
    float32 and shared among processes."""
    ranks: Any = SimpleNamespace(rank=0, size=2)
    for options, message in (
        ({"device": "meta"}, f"for CPUs, and the device is meta; leave out --weights {weights}"),
        ({"dtype": "float32"}, "leave out --dtype float32"),
        ({"ranks": ranks}, f"leave out --weights {weights}, or --tensor-parallel 2"),
    ):
        with pytest.raises(InvalidSetting, match=message):
            load_model(checkpoint, weights=weights, **options)


if __name__ == "__main__":  # SOURCE TARGET PLAIN KIND: folders, and one of KINDS; rounded to the nearest
    source, target, plain = map(Path, sys.argv[1:4])
    write_quantized(source, target, plain, sys.argv[4], nearest=True)
    sys.stdout.write(f"{target} and, dequantised, {plain}\n")
