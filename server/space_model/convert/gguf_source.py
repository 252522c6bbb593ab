"""A GGUF file's weights for `spaceserve convert`: dequantised, by Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.convert.source import ConvertError, SourceWeights, TensorEntry
from space_model.quantization.quantized_model import open_weights


@dataclass(frozen=True)
class GgufSource(SourceWeights):
    """Every tensor of the model; written in the dtype that its config names."""

    checkpoint: Checkpoint

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> GgufSource:
        """Find names and shapes; the values stay on disk."""
        dtype = getattr(torch, checkpoint.config["dtype"])
        (file,) = checkpoint.weights
        with open_weights(checkpoint) as weights:
            entries = {name: TensorEntry(file, weights.shape(name), dtype) for name in weights.names}
        return cls(entries, checkpoint)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) one after the other, in float32; they are rounded once, when written."""
        with open_weights(self.checkpoint) as weights:
            for name in self.entries:
                yield name, weights.whole(name).float()

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        if name not in self.entries:
            raise ConvertError(f"{self.checkpoint.name} has no tensor {name}.")
        with open_weights(self.checkpoint) as weights:
            return weights.whole(name).float()
