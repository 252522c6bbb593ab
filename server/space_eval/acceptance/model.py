"""A checkpoint under evaluation: its weights, its tokenizer, and prompts in its ids."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence

import torch
from space_common.version import version
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.model_error import CheckpointNotFound, InvalidSetting
from space_model.space_model import SpaceModel
from tokenizers import Tokenizer

from space_eval.prompts import Prompt
from space_eval.report.facts import commit, machine


def load_tokenizer(model: str) -> Tokenizer:
    """Load the checkpoint's tokenizer. Raises CheckpointNotFound without a fast tokenizer."""
    file = Checkpoint.open(model).folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointNotFound(
            f"{file} does not exist. Save the tokenizer in its fast form, or run spaceserve convert."
        )
    return Tokenizer.from_file(str(file))


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[Prompt], *, window: int, max_tokens: int) -> list[list[int]]:
    """Return the ids of each prompt, truncated on the left to leave `max_tokens` in `window`."""
    if max_tokens >= window:
        raise InvalidSetting(f"--max-tokens is {max_tokens}; it must be below the window of {window}.")
    return [tokenizer.encode(prompt.text).ids[max_tokens - window :] for prompt in prompts]


def describe_prompts(name: str, prompts: Sequence[Sequence[int]]) -> str:
    """Format as `humaneval.jsonl (12, 180 tokens each)`."""
    return f"{name} ({len(prompts)}, {statistics.fmean(map(len, prompts)):.0f} tokens each)"


def environment_facts(model: SpaceModel) -> dict[str, object]:
    """Return the environment of the figures: arithmetic, device, machine, commit, date."""
    return {
        "dtype": str(model.facts.dtype).removeprefix("torch."),
        "device": str(model.facts.device),
        "machine": f"{machine()}; {model.facts.num_threads} threads of torch {torch.__version__}",
        "version": version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
