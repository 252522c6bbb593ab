"""The checkpoint's tokenizer, as the router uses it."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from space_router.errors import ConfigError
from space_router.text.checkpoint import read_json
from space_router.text.token_bytes import TokenBytes

_NO_WORD = "☺"  # merges with nothing that could follow it


class Tokenizer:
    """Text to ids and ids to text; `content_hash` is the sha256 of tokenizer.json, to compare with the worker's."""

    def __init__(self, inner: tokenizers.Tokenizer, config: dict[str, Any], content_hash: str = "") -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.content_hash = content_hash
        self.bytes_of = TokenBytes(inner)
        self.special_ids = frozenset(id_ for id_, token in inner.get_added_tokens_decoder().items() if token.special)
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = _token_text(config.get("eos_token"))
        self.pad_token = _token_text(config.get("pad_token"))
        self.unk_token = _token_text(config.get("unk_token"))
        # Older Llama checkpoints say only in tokenizer_config.json that a prompt begins with BOS.
        self._bos_id = None
        self.bos_id: int | None = None if self.bos_token is None else inner.token_to_id(self.bos_token)
        if config.get("add_bos_token") and self.bos_id is not None and inner.encode("a").ids[:1] != [self.bos_id]:
            self._bos_id = self.bos_id

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """From tokenizer.json and tokenizer_config.json of a folder. Raises ConfigError."""
        file = folder / "tokenizer.json"
        try:
            content = file.read_bytes()
            inner = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise ConfigError(f"{file} cannot be read: {str(error)[:200]}.") from error
        return cls(inner, read_json(folder, "tokenizer_config.json"), hashlib.sha256(content).hexdigest())

    # The batch calls alone let other threads run meanwhile; a long prompt takes seconds.

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; special tokens (BOS) are added as the checkpoint's post-processor does.

        Raises UnicodeEncodeError for half of a surrogate pair.
        """
        with _no_halves(text):
            ids: list[int] = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self._bos_id is not None:
            ids.insert(0, self._bos_id)
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that stands inside another: without the space that SentencePiece puts before a first word."""
        if self.bytes_of.strips_first_space:
            before, ids = (self.encode(part, add_special_tokens=False) for part in (_NO_WORD, _NO_WORD + text))
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self.encode(text, add_special_tokens=False)

    def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """(id, start, end) of each token, in characters of the text. Raises UnicodeEncodeError."""
        with _no_halves(text):
            encoding = self._inner.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        spans = [(id_, start, end) for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)]
        return [(self._bos_id, 0, 0), *spans] if add_special_tokens and self._bos_id is not None else spans

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids, alone."""
        kept = (id_ for id_ in ids if not (skip_special_tokens and id_ in self.special_ids))
        text = b"".join(self.bytes_of[id_] for id_ in kept).decode("utf-8", "replace")
        return text[1:] if self.bytes_of.strips_first_space and text.startswith(" ") else text

    def token_text(self, id_: int) -> str:
        """One token for a list of log-probabilities: its text, or `bytes:\\xe2\\x82` where it is half a character."""
        content = self.bytes_of[id_]
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def token_to_id(self, token: str) -> int | None:
        id_: int | None = self._inner.token_to_id(token)
        return id_


@contextmanager
def _no_halves(text: str) -> Iterator[None]:
    """What the tokenizer says of half of a surrogate pair, as Python says it."""
    try:
        yield
    except TypeError:
        text.encode()
        raise


def _token_text(entry: Any) -> str | None:
    """A special token of tokenizer_config.json: a text, or an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
