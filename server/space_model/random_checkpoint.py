"""Random checkpoints: weights without training, for measuring speed, and the parts that tests' checkpoints share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from space_common.tokenizer.byte_level import byte_letters
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

END, UNKNOWN, START_OF_TURN, END_OF_TURN = 0, 1, 2, 3
FIRST_MASK = 4  # ids of the special tokens; mask j has id FIRST_MASK + j - 1 (or FIRST_MASK, if the id is shared)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ASCII = [10, *range(32, 127)]
"""Bytes of printable ASCII and the newline."""


def write_random_llama(
    path: Path, *, vocab_size: int, num_masks: int, draft_head_width: int | None, seed: int = 0, **config: Any
) -> Path:
    """Write a random bfloat16 Llama to the folder `path` (created if absent) and return it.

    It has a byte-level tokenizer in which every id decodes to text, per-position mask ids from FIRST_MASK on and, with
    a `draft_head_width`, a draft head. `config`: further fields of transformers' LlamaConfig.
    """
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    fields = {"vocab_size": vocab_size, "tie_word_embeddings": True, **config}
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:  # unit gain per layer, and logits spread enough that text is not one long loop
            gain = 2.0 if "embed" in name else 1.0
            weight.data = torch.randn(weight.shape, generator=generator) * (gain * weight.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(path)
    if num_masks:
        ids = list(range(FIRST_MASK, FIRST_MASK + num_masks))
        section: dict[str, Any] = {"num_masks": num_masks, "mask_token_ids": ids, "adapter": None, "draft_head": None}
        if draft_head_width:
            hidden = model.config.hidden_size
            section["draft_head"] = write_draft_head(path, hidden, "bfloat16", generator, draft_head_width)
        written = json.loads((path / "config.json").read_text(encoding="utf-8"))
        (path / "config.json").write_text(json.dumps(written | {"space": section}, indent=1), encoding="utf-8")
    write_byte_tokenizer(path, vocab_size, num_masks, words=True)
    return path


def write_draft_head(
    path: Path, hidden: int, dtype: str, generator: torch.Generator, width: int = 32
) -> dict[str, Any]:
    """Write a random draft head to the folder `path`, and return its part of the `space` section. `width`: of its inner
    layer; `dtype`: by its name in torch."""
    weights = {
        "draft_head.w1.weight": torch.randn(width, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5,
        "draft_head.w2.weight": torch.randn(hidden, width, generator=generator) * width**-0.5,
    }
    weights = {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
    save_file(weights, path / "draft_head.safetensors", metadata={"format": "pt"})
    return {"file": "draft_head.safetensors", "hidden": width, "embedding_scale": 2.0}


def write_byte_tokenizer(path: Path, vocab_size: int, num_masks: int, *, words: bool = False) -> None:
    """Write a byte-level tokenizer without merges: one token per byte; with `words`, then words that no text encodes
    to."""
    masks = [f"<|mask_{j + 1}|>" for j in range(num_masks)]
    specials = ["<|endoftext|>", "<|unk|>", "<|im_start|>", "<|im_end|>", *masks]
    letter_of = {byte: letter for letter, byte in byte_letters().items()}
    room = vocab_size - len(specials)
    letters = [letter_of[byte] for byte in (range(256) if room >= 256 else ASCII)]
    more = [_word(number, letter_of[ord(" ")]) for number in range(room - len(letters))] if words else []
    vocabulary = {token: id for id, token in enumerate([*specials, *letters, *more])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("eos_token", "bos_token", "pad_token"), "<|endoftext|>"),
        "unk_token": "<|unk|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _word(number: int, space: str) -> str:
    """Return a space and syllables, a different word for each number."""
    consonants, vowels = "bcdfghjklmnpqrstvwxz", "aeiou"
    syllables = ""
    while number or not syllables:
        number, syllable = divmod(number, len(consonants) * len(vowels))
        syllables += consonants[syllable // len(vowels)] + vowels[syllable % len(vowels)]
    return space + syllables
