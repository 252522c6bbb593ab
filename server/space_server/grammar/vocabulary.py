"""The bytes of each token id, as a grammar sees them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from space_common.files import read_text
from space_common.grammar import tokenizer_of
from space_common.special_tokens import further_tokens, named_tokens, token_text
from space_kernels.sampling.sampling_rows import IdBits
from space_model.checkpoint.checkpoint import read_object
from space_model.model_error import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class NoVocabulary(Exception):
    """The bytes of the checkpoint's ids are unknown; the message says why."""


def bits_of(ids: Iterable[int], num_ids: int) -> IdBits:
    """Return a bit set of ids. [ceil(V / 32)], V = num_ids"""
    found = np.zeros(-(-num_ids // 32) * 32, dtype=np.bool_)
    found[[*ids]] = True
    return np.packbits(found, bitorder="little").view(np.int32)


def ids_of(bits: IdBits) -> list[int]:
    """Return the ids in a bit set, ascending."""
    return [int(id_) for id_ in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))]


class TokenVocabulary:
    """The bytes of each id; none for ids without text: special ids, masks, padding rows of the output head.

    It equals the router's detokenization, so clients get what the grammar allows. A grammar can name a special id by
    number.
    """

    def __init__(self, texts: Sequence[bytes], special: Mapping[int, bytes] | None = None) -> None:
        """`texts`: of each row of the output head; `special`: names of special ids that a grammar may use."""
        special = special or {}
        self.texts = texts
        self.possible = bits_of((id_ for id_, text in enumerate(texts) if text or id_ in special), len(texts))
        by_text = {text: id_ for id_, text in enumerate(texts) if len(text) == 1}
        marks = [by_text[mark] for mark in (b'"', b"}", b"]", b":", b",", b"{", b"[", b"1") if mark in by_text]
        self.letters = [*marks, *sorted(set(by_text.values()).difference(marks))]  # ids of one byte, brackets first
        table = [special.get(id_, text) for id_, text in enumerate(texts)]
        self.tokens = [*table, b"<end>"], frozenset(special)
        """Those of the tokenizer: with an end of its own behind the ids, and which of them are special."""
        self.tokenizer = tokenizer_of(*self.tokens)

    @property
    def size(self) -> int:
        """Rows of the output head."""
        return len(self.texts)

    @classmethod
    def read(cls, folder: Path, num_ids: int, never: Collection[int] = ()) -> TokenVocabulary:
        """Read a folder's tokenizer files; ids in `never` are in no grammar. Raises NoVocabulary, ImportError."""
        content = _content(folder)
        kinds = _decoder_kinds(content)
        named = _special_texts(folder)
        try:
            tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise NoVocabulary(f"tokenizer.json cannot be read: {str(error)[:200]}") from error
        added = tokenizer.get_added_tokens_decoder()
        letters = byte_letters() if "ByteLevel" in kinds else None
        texts, special = [b""] * num_ids, {}
        for token, id_ in tokenizer.get_vocab(with_added_tokens=True).items():
            if id_ >= num_ids or id_ in never:
                continue
            if (id_ in added and added[id_].special) or token in named:
                special[id_] = token.encode()
            else:
                texts[id_] = added[id_].content.encode() if id_ in added else _text(token, letters)
        return cls(texts, special)


def _content(folder: Path) -> str:
    try:
        return read_text(folder / "tokenizer.json")
    except FileNotFoundError:
        raise NoVocabulary("the checkpoint has no tokenizer.json") from None
    except (OSError, ValueError) as error:
        raise NoVocabulary(f"tokenizer.json cannot be read: {str(error)[:200]}") from error


def _special_texts(folder: Path) -> set[str | None]:
    """Return special tokens from the files beside tokenizer.json, which need not list them."""
    names = ("tokenizer_config.json", "special_tokens_map.json")
    try:
        config, special_map = (read_object(file) if (file := folder / name).is_file() else {} for name in names)
    except ModelError as error:
        raise NoVocabulary(str(error)) from error
    return set(map(token_text, [*named_tokens(config, special_map).values(), *further_tokens(config, special_map)]))


def _decoder_kinds(content: str) -> set[str]:
    """Return the decoders of tokenizer.json. Raises NoVocabulary for one whose tokens are not bytes."""
    try:
        decoder = json.loads(content).get("decoder")
    except (ValueError, AttributeError) as error:
        raise NoVocabulary(f"tokenizer.json cannot be read: {str(error)[:200]}") from error
    kinds = _kinds(decoder)
    if not kinds & {"ByteLevel", "Metaspace", "Replace", "ByteFallback"}:
        raise NoVocabulary(
            f"tokenizer.json has the decoder {sorted(kinds) or 'null'}, neither byte-level nor SentencePiece's"
        )
    return kinds


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*(_kinds(part) for part in decoder["decoders"]))
    return {decoder["type"]}


def byte_letters() -> dict[str, int]:
    """Return the printable letter that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in letters.values()]
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


def _text(token: str, letters: dict[str, int] | None) -> bytes:
    if letters is not None:
        try:
            return bytes(letters[letter] for letter in token)
        except KeyError:
            return token.encode()
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()
