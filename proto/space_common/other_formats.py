"""What a folder holds that is no checkpoint in transformers' format, and what to take instead."""

from __future__ import annotations

from pathlib import Path

_ORIGINAL = (
    "the format of the model's makers, which is not read: fetch config.json, the tokenizer and model*.safetensors of "
    "the same repository, or of the one in transformers' format (Llama's are named -hf, or have them beside)"
)
_MADE_FROM = "which is not read: use the checkpoint that it was made from, as safetensors"

_FORMATS = (
    ("params.json", _ORIGINAL),
    ("consolidated*.safetensors", _ORIGINAL),
    ("consolidated*.pth", _ORIGINAL),
    ("*.nemo", f"NeMo's format, {_MADE_FROM}"),
    ("*.onnx", f"ONNX, {_MADE_FROM}"),
    ("onnx/*.onnx", f"ONNX, {_MADE_FROM}"),
    ("openvino*.xml", f"OpenVINO's format, {_MADE_FROM}"),
    ("*.npz", f"an old format of MLX, {_MADE_FROM}"),
    ("*.h5", f"TensorFlow's format, {_MADE_FROM}"),
    ("*.msgpack", f"Flax's format, {_MADE_FROM}"),
)
"""Files that show a format, the telling ones first; and what it is."""


def other_format(folder: Path) -> str | None:
    """Return a sentence: which other format the folder's weights have, by what file, and the cure. None: none is
    known."""
    for pattern, what in _FORMATS:
        if found := sorted(folder.glob(pattern)):
            return f"It has {found[0].relative_to(folder).as_posix()}, of {what}."
    return None
