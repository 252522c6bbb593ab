"""A tokenizer small enough to see through, for tests: every byte is a token, and a few words are."""

import json
from pathlib import Path

import tokenizers
from space_common.tokenizer.byte_level import byte_letters
from space_router.text.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

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


ENCODER_WORDS = ("a", "the", "cat", "dog", "sat", "on", "mat", "query", "text", ":", ".", ",", "!", "?")
_ENCODER_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def _surrounded(first: str, last: str, ids: dict[str, int], *, between: str) -> processors.TemplateProcessing:
    """Special tokens around a text, and around each of two."""
    around = (first, *between.split(), last)
    return processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {between} $B:1 {last}:1",
        special_tokens=[(token, ids[token]) for token in dict.fromkeys(around)],
    )


def wordpiece() -> tokenizers.Tokenizer:
    """BERT's: lower-cased words, and letters for all others; [CLS] and [SEP] around."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + [str(digit) for digit in range(10)]
    pieces = [*_ENCODER_SPECIAL, *dict.fromkeys([*ENCODER_WORDS, *letters, *(f"##{letter}" for letter in letters)])]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.post_processor = _surrounded("[CLS]", "[SEP]", vocab, between="[SEP]")
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _ENCODER_SPECIAL])
    return inner


def unigram() -> tokenizers.Tokenizer:
    """XLM-RoBERTa's: <s> and </s> around, two </s> between texts."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    letters = [chr(code) for code in range(33, 127)]
    pieces = [*((token, 0.0) for token in special), ("▁", -2.0)]
    pieces += [(f"▁{word}", -1.5) for word in ENCODER_WORDS] + [(letter, -4.0) for letter in letters]
    inner = tokenizers.Tokenizer(models.Unigram([*dict(pieces).items()], unk_id=3, byte_fallback=False))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    ids = {token: place for place, token in enumerate(special)}
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", ids["</s>"])]
    )
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return inner


def byte_level_encoder(first: str | None, last: str) -> tokenizers.Tokenizer:
    """Byte-level BPE with a special token behind each text, and before it where there is one."""
    inner = byte_level()
    special = [token for token in (first, last, "[PAD]") if token is not None and token not in SPECIAL]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named = [(token, inner.token_to_id(token)) for token in dict.fromkeys(filter(None, (first, last)))]
    before = f"{first} " if first else ""
    inner.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{before}$A {last}", pair=f"{before}$A {last} $B {last}", special_tokens=named
            ),
        ]
    )
    return inner
