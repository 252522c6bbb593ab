"""Where draft networks run."""

from __future__ import annotations

import torch

from space_model.model_error import InvalidSetting


def check_place(device: torch.device, num_ranks: int, flag: str = "--draft-model") -> None:
    """Raise InvalidSetting where a draft network, of this flag, cannot run."""
    if device.type != "cpu":
        raise InvalidSetting(
            f"{flag} runs on a CPU only, and the model is on {device}: its steps are not captured as CUDA graphs yet, "
            "and without graphs they would cost more than they save. Leave it out, or add --device cpu."
        )
    if num_ranks > 1:
        raise InvalidSetting(f"{flag} is not shared among processes: leave it out, or --tensor-parallel {num_ranks}.")
