"""The id of the tokenizer's own EOS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from space_common.special_tokens import named_tokens, token_text


def tokenizer_eos(read_json: Callable[[str], Mapping[str, Any]]) -> int | None:
    """Return the EOS id; None if the tokenizer names none, or one that is not in the vocabulary.

    `read_json` returns a file of the checkpoint, empty if absent.
    """
    config = read_json("tokenizer_config.json")
    text = token_text(named_tokens(config, read_json("special_tokens_map.json")).get("eos_token"))
    if text is None:
        return None
    for id_, token in (config.get("added_tokens_decoder") or {}).items():
        if token_text(token) == text:
            return int(id_)
    content = read_json("tokenizer.json")
    for token in content.get("added_tokens") or ():
        if token.get("content") == text:
            return int(token["id"])
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        found = vocabulary.get(text)
        return None if found is None else int(found)
    return next((id_ for id_, (piece, *_) in enumerate(vocabulary) if piece == text), None)  # Unigram: [piece, score]
