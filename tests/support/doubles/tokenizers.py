"""A tokenizer small enough to see through, for tests: every byte is a token, and a few words are."""

import json
from pathlib import Path

import tokenizers
from space_common.tokenizer.byte_level import byte_letters
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask_1|>")
EOS_ID, MASK_ID = 0, 3
FIRST_BYTE_ID = len(SPECIAL)  # byte b is the id FIRST_BYTE_ID + b
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("S", "T"), ("O", "P"))
VOCAB_SIZE = FIRST_BYTE_ID + 256 + len(MERGES)

_CONFIG = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[0]}


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE of VOCAB_SIZE ids: specials, 256 bytes in order, then the merges."""
    alphabet = sorted(byte_letters().items(), key=lambda entry: entry[1])
    vocab = {token: place for place, token in enumerate(SPECIAL)}
    vocab |= {character: FIRST_BYTE_ID + byte for character, byte in alphabet}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return inner


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), _CONFIG)


def sentencepiece_tokenizer() -> Tokenizer:
    """A byte-fallback vocabulary with `▁` for a space, as Llama 2 has: <s>, </s>, 256 bytes, a few words."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "s", "!"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return Tokenizer(inner, {"bos_token": "<s>", "eos_token": "</s>"})


def write_checkpoint(folder: Path) -> Path:
    """The small files of a checkpoint, without weights: enough for a router in front of a scripted worker."""
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "scripted"}), encoding="utf-8")
    return folder
