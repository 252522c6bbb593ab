"""Trains the tokenizer of the embedded model, byte-level BPE with the ids a SPACE checkpoint needs, and measures it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from space_train.data.corpus import read_texts

END_OF_TEXT, START_OF_TURN, END_OF_TURN, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
NUM_MASK_TOKENS = 8
SPECIAL_TOKENS = [END_OF_TEXT, START_OF_TURN, END_OF_TURN, PAD]
SPECIAL_TOKENS += [f"<|mask_{number}|>" for number in range(1, NUM_MASK_TOKENS + 1)]
END_OF_TEXT_ID, PAD_ID, FIRST_MASK_ID = 0, 3, 4

# Pieces that BPE never merges across, in this order: an indentation; a word with the one character before it (so
# ` name`, `.append` and `_size` are tokens); up to three digits; punctuation with the line ends after it (`):\n`);
# line ends; other white space. An indentation is never joined to the line end before it, because prompts end there.
PIECES = r"[ \t]{2,}(?=\S)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+\n*|\n+|\s+"

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` ids, the special tokens first (end of text is 0)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, window: int) -> None:
    """Write `tokenizer.json`, and the config and chat template that transformers' AutoTokenizer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "model_max_length": window,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (END_OF_TEXT, PAD)],
    }
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


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
