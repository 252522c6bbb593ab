"""Byte-level BPE (`tokenizer.ggml.model` gpt2) as the model and pre-tokenizer of a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from space_common.gguf.errors import GgufError
from space_common.gguf.pre_tokenizers import PreTokenizer
from space_common.gguf.vocabulary import GgufVocabulary, Pair

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def sections(vocabulary: GgufVocabulary, merges: Sequence[Pair], pre_tokenizer: PreTokenizer) -> dict[str, Any]:
    """Return normalizer, pre_tokenizer, decoder and model of tokenizer.json."""
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre_tokenizer.patterns
    ]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, _BYTES]},
        "decoder": {**_BYTES, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizer.ignore_merges,
            "vocab": vocabulary.entries(),
            "merges": merges,
        },
    }


def read_merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[Pair]:
    """Return pairs of tokens in the order of their ranks. Raises GgufError."""
    try:
        lines = metadata["tokenizer.ggml.merges"]
    except KeyError:
        raise GgufError(
            "The file has no tokenizer.ggml.merges, without which byte-level BPE has no order. Serve the original "
            "checkpoint, or convert it again with a current convert_hf_to_gguf.py."
        ) from None
    pairs: dict[Pair, None] = {}  # of two equal lines the first counts
    for line in lines:
        cut = line.find(" ", 1)
        pair = (line[:cut], line[cut + 1 :])
        if cut < 0 or not ids.keys() >= {*pair, "".join(pair)}:
            raise GgufError(
                f"tokenizer.ggml.merges has {line!r}, whose parts or whole are no tokens of the file. Serve the "
                "original checkpoint, or convert it again with a current convert_hf_to_gguf.py."
            )
        pairs[pair] = None
    return list(pairs)
