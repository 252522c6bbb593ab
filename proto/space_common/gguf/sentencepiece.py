"""SentencePiece's BPE (`tokenizer.ggml.model` llama) as the model, normalizer and decoder of a tokenizer.json.

SentencePiece merges the two neighbours whose joint text is the token with the highest score; of equals, the leftmost.
The `tokenizers` library merges by a ranked list of pairs instead: here every pair of tokens whose joint text is a
token, by the score of that token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from space_common.gguf.errors import GgufError
from space_common.gguf.vocabulary import GgufVocabulary, Pair

_SPACE = "▁"


def sections(vocabulary: GgufVocabulary, merges: Sequence[Pair], *, prefixed: bool) -> dict[str, Any]:
    """Return normalizer, pre_tokenizer, decoder and model of tokenizer.json.

    `prefixed`: insert a space before the first word, and before text that follows a special token.
    """
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if prefixed else replace,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if vocabulary.unknown is None else vocabulary.tokens[vocabulary.unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.entries(),
            "merges": merges,
        },
    }


def read_merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[Pair]:
    """Return the pairs whose joint text is a token, highest score first, then lowest id. Raises GgufError.

    Of one token's pairs the one with the longest left part comes first. Where two of them overlap in a text ("ab", "a",
    "ba" for the token "aba"), the left one has the longer left part, and SentencePiece takes the left one.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(ids):
        raise GgufError(
            f"tokenizer.ggml.scores has {0 if scores is None else len(scores)} entries for {len(ids)} tokens; "
            "SentencePiece merges by score. Convert the original checkpoint again with a current "
            "convert_hf_to_gguf.py, or serve it as it is."
        )
    return [
        (left, right)
        for token in sorted(ids, key=lambda token: (-scores[ids[token]], ids[token]))
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in ids and (right := token[cut:]) in ids
    ]
