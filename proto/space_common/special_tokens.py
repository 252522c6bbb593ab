"""Which special tokens a checkpoint names, as transformers finds them in its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def token_text(entry: Any) -> str | None:
    """The text of a token that is written as a text, or as an object with `content`."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, Any]:
    """`bos_token`, `eos_token`, … with what the files say, text or object; a name that they leave out is not there.

    `config`: tokenizer_config.json; `special_map`: special_tokens_map.json, which wins where the config has no
    `added_tokens_decoder`, for then it is of the older form, and else only fills in what the config does not name.
    """
    own = {name: entry for name, entry in config.items() if _is_token(name, entry)}
    mapped = {name: entry for name, entry in special_map.items() if _is_token(name, entry)}
    both = mapped | own if config.get("added_tokens_decoder") is not None else own | mapped
    return {name: entry for name, entry in both.items() if token_text(entry) is not None}


def further_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> list[Any]:
    """Special tokens without a name of their own."""
    found: list[Any] = []
    for source in (config, special_map):
        for key in ("extra_special_tokens", "additional_special_tokens"):
            listed = source.get(key) or []
            found += listed.values() if isinstance(listed, Mapping) else listed
    return [entry for entry in found if token_text(entry) is not None]


def _is_token(name: str, entry: Any) -> bool:
    """`add_bos_token` is a switch; a null says that there is no such token."""
    return name.endswith("_token") and not isinstance(entry, bool | int | float | list)
