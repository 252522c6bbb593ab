"""The bytes of each token, independent of its neighbours, so that text can be streamed exactly."""

import json
import re
from typing import Any

import tokenizers

from space_router.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable character -> byte. Printable bytes map to themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """Maps ids to bytes, for byte-level BPE and SentencePiece tokenizers.

    `strips_first_space`: SentencePiece adds a space before the first word that is not part of the text.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        kinds = _decoder_kinds(json.loads(tokenizer.to_str()).get("decoder"))
        self._tokenizer = tokenizer
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self.strips_first_space = bool(kinds & {"Metaspace", "Strip"})
        if self._alphabet is None and not kinds & {"Metaspace", "Replace", "ByteFallback"}:
            raise ConfigError(
                f"tokenizer.json has the decoder {sorted(kinds) or 'null'}; supported are byte-level ones (ByteLevel) "
                "and SentencePiece's (Metaspace, or Replace with ByteFallback)."
            )
        self._cache: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self._added = {id_: token.content for id_, token in tokenizer.get_added_tokens_decoder().items()}

    def __getitem__(self, id_: int) -> bytes:
        """Return the bytes of a token; empty for ids without a token (padding rows of the output head)."""
        known = self._cache.get(id_)
        if known is None:
            known = self._cache[id_] = self._compute(id_)
        return known

    def text(self, id_: int) -> str | None:
        """Return the token's text, or None if its bytes are not whole characters."""
        try:
            return self._texts[id_]
        except KeyError:
            try:
                known = self[id_].decode("utf-8")
            except UnicodeDecodeError:
                known = None
            self._texts[id_] = known
            return known

    def _compute(self, id_: int) -> bytes:
        token = self._tokenizer.id_to_token(id_)
        if token is None:
            return b""
        if id_ in self._added:
            return self._added[id_].encode()
        if self._alphabet is not None:
            try:
                return bytes(self._alphabet[character] for character in token)
            except KeyError:
                return str(token).encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return str(token).replace("▁", " ").encode()


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*(_decoder_kinds(part) for part in decoder["decoders"]))
    return {decoder["type"]}
