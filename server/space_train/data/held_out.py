"""Windows of ids and tokenizer statistics of the held-out packages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from space_train.data.corpus import read_texts
from space_train.data.tokenizer import END_OF_TEXT_ID, SPECIAL_TOKENS


def held_out_windows(tokenizer: Tokenizer, path: Path, count: int = 96, length: int = 256) -> Tensor:
    """Return fixed windows [count, length], evenly spread over the held-out files."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(read_texts(path)), add_special_tokens=False):
        ids.extend([*encoding.ids, END_OF_TEXT_ID])
    if len(ids) < length:
        raise ValueError(f"The held-out files have {len(ids)} ids; at least {length} are needed. Hold out more.")
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return torch.tensor([ids[start : start + length] for start in starts.tolist()])


def bytes_of_ids(tokenizer: Tokenizer) -> Tensor:
    """Return the bytes of each id, [V]; 0 for special tokens. (In byte-level BPE a character is a byte.)"""
    lengths = [len(tokenizer.id_to_token(index) or "") for index in range(tokenizer.get_vocab_size())]
    lengths[: len(SPECIAL_TOKENS)] = [0] * len(SPECIAL_TOKENS)
    return torch.tensor(lengths)


def characters_per_token(tokenizer: Tokenizer, path: Path) -> float:
    """Return the mean characters per token on the held-out files."""
    texts = list(read_texts(path))
    num_ids = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
    return sum(map(len, texts)) / num_ids
