"""ctypes mirrors of the structures in cpu/*.h, with the same fields in the same order."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int64, c_void_p


class LinearStruct(Structure):
    """`Linear` of cpu/linear.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("panels", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
    )


class ProductStruct(Structure):
    """`Product` of cpu/linear.h."""

    _fields_ = (
        ("x", c_void_p),
        ("rows", c_int64),
        ("x_stride", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("wide", c_bool),
        ("then", c_int),
        ("other", c_void_p),
    )


class DraftHeadStruct(Structure):
    """`DraftHead` of cpu/draft.h."""

    _fields_ = (
        ("w1", LinearStruct),
        ("w2", LinearStruct),
        ("embedding", c_void_p),
        ("output", c_void_p),
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
        ("bonus", c_void_p),
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


class HeadsStruct(Structure):
    """`Heads` of cpu/attention.h."""

    _fields_ = (("query", c_int64), ("kv", c_int64), ("dim", c_int64))


class AttentionStruct(Structure):
    """`Attention` of cpu/attention.h."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("query_stride", c_int64),
        ("kv_stride", c_int64),
        ("key_pages", c_void_p),
        ("value_pages", c_void_p),
        ("block_size", c_int64),
        ("out", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int64),
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
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
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
