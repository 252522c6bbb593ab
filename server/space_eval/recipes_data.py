"""Training text, held-out rows and prompts of a comparison, encoded once and read by every run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from space_train.example import Example
from space_train.examples import pad_id, read_examples
from space_train.session import tokenizer_size
from transformers import AutoTokenizer

from space_eval.prompts import PromptError, load_prompts

PROMPT_LENGTH = 96
"""Ids of a prompt cut out of held-out text."""


@dataclass(frozen=True)
class Ingredients:
    """As ids."""

    examples: list[Example]
    held_out: list[Example]
    prompts: dict[str, list[list[int]]]  # by the name of their set
    pad: int
    tokenizer_size: int

    @classmethod
    def read(
        cls,
        base: Path,
        vocab_size: int,
        *,
        data: Sequence[str],
        held_out: str,
        prompts: Path,
        limit: int | None,
        num_prompts: int,
        length: int,
        longest_prompt: int,
    ) -> Ingredients:
        """From their sources, by the tokenizer of `base`. Raises DataError or PromptError."""
        tokenizer = AutoTokenizer.from_pretrained(str(base), trust_remote_code=False)
        train = read_examples(data, tokenizer, limit=limit, max_length=length, vocab_size=vocab_size)
        apart = read_examples(held_out, tokenizer, vocab_size=vocab_size)
        asked = [tokenizer.encode(p.text)[-longest_prompt:] for p in load_prompts(prompts, num_prompts)]
        cut = prompts_within([example.ids for example in apart.examples], num_prompts)
        if not cut:
            raise PromptError(
                f"No text of {held_out} has {PROMPT_LENGTH} tokens to cut a prompt from: give longer ones."
            )
        return cls(
            train.examples,
            [piece for example in apart.examples for piece in example.pieces(length)],
            {prompts.stem: asked, "held out": cut},
            pad_id(tokenizer, vocab_size),
            tokenizer_size(tokenizer),
        )

    def save(self, file: Path) -> None:
        """In one file, replaced whole."""
        partial = file.with_suffix(".partial.npz")
        names = list(self.prompts)
        arrays: dict[str, Any] = _columns("train", self.examples) | _columns("held_out", self.held_out)
        for number, name in enumerate(names):
            given = [Example(ids, [False] * len(ids)) for ids in self.prompts[name]]
            arrays |= _columns(f"prompts_{number}", given)
        numbers = np.array([self.pad, self.tokenizer_size])
        np.savez(partial, names=np.array(names), numbers=numbers, **arrays)
        partial.replace(file)

    @classmethod
    def load(cls, file: Path) -> Ingredients:
        """What `save` wrote."""
        with np.load(file) as arrays:
            pad, size = (int(number) for number in arrays["numbers"])
            names = [str(name) for name in arrays["names"]]
            prompts = {
                name: [example.ids for example in _examples(arrays, f"prompts_{number}")]
                for number, name in enumerate(names)
            }
            return cls(_examples(arrays, "train"), _examples(arrays, "held_out"), prompts, pad, size)

    @property
    def fingerprint(self) -> str:
        """Of everything that a run reads."""
        digest = hashlib.sha256()
        for ids in [e.ids for e in [*self.examples, *self.held_out]] + [p for s in self.prompts.values() for p in s]:
            digest.update(np.asarray([len(ids), *ids], dtype=np.int64).tobytes())
        return digest.hexdigest()[:12]


def prompts_within(texts: Sequence[Sequence[int]], count: int, length: int = PROMPT_LENGTH) -> list[list[int]]:
    """At most `count` prompts, spread over the texts: of each the ids from a place that its number decides."""
    usable = [ids for ids in texts if len(ids) >= length]
    if not usable:
        return []
    chosen = np.unique(np.linspace(0, len(usable) - 1, min(count, len(usable))).astype(int))
    found = []
    for number in chosen:
        ids = usable[number]
        start = int(np.random.default_rng([int(number)]).integers(len(ids) - length + 1))
        found.append(list(ids[start : start + length]))
    return found


def base_fingerprint(folder: Path) -> str:
    """Of config and weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        digest.update(file.read_bytes()[:: max(1, file.stat().st_size // 65536)])
    return digest.hexdigest()[:12]


def _columns(name: str, examples: Sequence[Example]) -> dict[str, Any]:
    return {
        f"{name}_ids": np.concatenate([np.asarray(e.ids, dtype=np.int32) for e in examples]),
        f"{name}_learned": np.concatenate([np.asarray(e.learned, dtype=np.bool_) for e in examples]),
        f"{name}_sizes": np.array([len(e.ids) for e in examples]),
    }


def _examples(arrays: np.lib.npyio.NpzFile, name: str) -> list[Example]:
    ids, learned = arrays[f"{name}_ids"], arrays[f"{name}_learned"]
    ends = np.cumsum(arrays[f"{name}_sizes"]).tolist()
    starts = [0, *ends[:-1]]
    return [Example(ids[a:b].tolist(), learned[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]
