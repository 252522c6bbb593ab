"""The special tokens that a checkpoint names, found as transformers finds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def token_text(entry: Any) -> str | None:
    """Return a token's text; the entry is a string, or an object with `content`."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, Any]:
    """Return `bos_token`, `eos_token`, … as string or object; names absent from the files are omitted.

    `config`: tokenizer_config.json; `special_map`: special_tokens_map.json, which wins if the config has no
    `added_tokens_decoder`, because then it has the older form; otherwise it only adds missing names.
    """
    own = {name: entry for name, entry in config.items() if _is_token(name, entry)}
    mapped = {name: entry for name, entry in special_map.items() if _is_token(name, entry)}
    both = mapped | own if config.get("added_tokens_decoder") is not None else own | mapped
    return {name: entry for name, entry in both.items() if token_text(entry) is not None}


def further_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens without a name."""
    found: list[Any] = []
    for source in (config, special_map):
        for key in ("extra_special_tokens", "additional_special_tokens"):
            listed = source.get(key) or []
            found += listed.values() if isinstance(listed, Mapping) else listed
    return [entry for entry in found if token_text(entry) is not None]


def _is_token(name: str, entry: Any) -> bool:
    """Return whether the entry is a token: `add_bos_token` is a switch, and null means none."""
    return name.endswith("_token") and not isinstance(entry, bool | int | float | list)
