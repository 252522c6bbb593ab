"""The weights of a GGUF file as `spaceserve convert` reads them: in plain numbers, by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from space_model.checkpoint.checkpoint import Checkpoint
from space_model.convert.source import ConvertError, SourceWeights, TensorEntry
from space_model.quantization.quantized_weights import open_weights


@dataclass(frozen=True)
class GgufSource(SourceWeights):
    """Every tensor of the model, in the dtype that its config names."""

    checkpoint: Checkpoint

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> GgufSource:
        """Find names and shapes; the numbers stay on disk."""
        dtype = getattr(torch, checkpoint.config["dtype"])
        (file,) = checkpoint.weights
        with open_weights(checkpoint) as weights:
            entries = {name: TensorEntry(file, weights.shape(name), dtype) for name in weights.names}
        return cls(entries, checkpoint)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) one after the other, in float32: rounded once, where they are written."""
        with open_weights(self.checkpoint) as weights:
            for name in self.entries:
                yield name, weights.whole(name).float()

    def read(self, name: str) -> Tensor:
        """One tensor."""
        if name not in self.entries:
            raise ConvertError(f"{self.checkpoint.name} has no tensor {name}.")
        with open_weights(self.checkpoint) as weights:
            return weights.whole(name).float()
