"""Trains the tokenizer: byte-level BPE with a pre-tokenizer for code and the ids a SPACE checkpoint needs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

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
