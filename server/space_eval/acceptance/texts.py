"""Prompts in a checkpoint's ids, statistics of generated ids, and the environment of an evaluation."""

from __future__ import annotations

import platform
import statistics
import string
from collections.abc import Callable, Sequence

import torch
from space_model.checkpoint.checkpoint import Checkpoint
from space_model.model_error import CheckpointNotFound, InvalidSetting
from space_model.space_model import SpaceModel
from tokenizers import Tokenizer

from space_eval.report.facts import environment, machine

LOOP_SHARE = 0.5
PUNCTUATION_AND_SPACE = frozenset(string.punctuation + string.whitespace)


def load_tokenizer(model: str) -> Tokenizer:
    """Load the checkpoint's tokenizer. Raises CheckpointNotFound without a fast tokenizer."""
    file = Checkpoint.open(model).folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointNotFound(
            f"{file} does not exist. Save the tokenizer in its fast form, or run spaceserve convert."
        )
    return Tokenizer.from_file(str(file))


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str], *, window: int, max_tokens: int) -> list[list[int]]:
    """Return the ids of each prompt, truncated on the left to leave `max_tokens` in `window`."""
    if max_tokens >= window:
        raise InvalidSetting(f"--max-tokens is {max_tokens}; it must be below the window of {window}.")
    return [tokenizer.encode(prompt).ids[max_tokens - window :] for prompt in prompts]


def describe_prompts(name: str, prompts: Sequence[Sequence[int]]) -> str:
    """Format as `humaneval.jsonl (12, 180 tokens each)`."""
    return f"{name} ({len(prompts)}, {statistics.fmean(map(len, prompts)):.0f} tokens each)"


def torch_facts() -> str:
    """Return processor, threads and torch's version, in words."""
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def environment_facts(model: SpaceModel) -> dict[str, object]:
    """Return the environment of the figures: arithmetic, device, machine, commit, date."""
    return {
        "dtype": str(model.facts.dtype).removeprefix("torch."),
        "device": str(model.facts.device),
        **environment(),
        "machine": f"{machine()}; {model.facts.num_threads} threads of torch {torch.__version__}",
    }


def repeated_share(ids: Sequence[int], n: int = 4) -> float:
    """Return the share of n-grams of `ids` that occurred before in `ids`; 0 for texts shorter than n."""
    num_grams = len(ids) - n + 1
    if num_grams < 1:
        return 0.0
    distinct = {tuple(ids[i : i + n]) for i in range(num_grams)}
    return 1.0 - len(distinct) / num_grams


def is_looping(ids: Sequence[int]) -> bool:
    """Return whether an output loops: at least half of its 4-grams occurred before in it."""
    return repeated_share(ids) >= LOOP_SHARE


def is_filler(text: str) -> bool:
    """Return whether the text is only whitespace or punctuation, which any drafter predicts."""
    return all(character in PUNCTUATION_AND_SPACE for character in text)


def is_blank(text: str) -> bool:
    """Return whether the text is only whitespace."""
    return not text.strip()


def text_behind(decode: Callable[[Sequence[int]], str], prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Decode `answer` as it follows `prompt`: some tokenizers drop a space at the start of a text."""
    before, whole = decode(prompt), decode([*prompt, *answer])
    return whole[len(before) :] if whole.startswith(before) else decode(answer)
