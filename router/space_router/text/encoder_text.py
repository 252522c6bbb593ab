"""The text side of an encoder: its tokenizer, and the prompts that sentence-transformers puts before texts."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import tokenizers
from space_common.files import NotUtf8, read_text

from space_router.config import ServeConfig
from space_router.errors import ConfigError, InvalidRequest
from space_router.text import checkpoint
from space_router.text.model_text import hub_of, malformed_is_unusable


class EncoderIds(NamedTuple):
    """The ids of one text, or of two that are scored together."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...]  # which of the two texts each id is of; empty: all of the first


class TextTooLong(Exception):
    """A text, or a pair, has more ids than the encoder takes."""

    def __init__(self, num_ids: int) -> None:
        super().__init__(f"{num_ids} ids")
        self.num_ids = num_ids


@dataclass(frozen=True)
class EncoderText:
    """Tokenizer and prompts of one encoder."""

    name: str  # in the API
    content_hash: str  # sha256 of tokenizer.json, which the worker's must equal
    inner: tokenizers.Tokenizer = field(repr=False)
    prompts: Mapping[str, str]  # by name
    default_prompt: str  # "": none
    lowers: bool  # texts are lowered first

    @classmethod
    def load(cls, config: ServeConfig) -> "EncoderText | None":
        """Load the encoder's text files; None: there is no encoder. Raises ConfigError."""
        if config.embedding_model is None or (name := config.embedding_model_name) is None:
            return None
        with malformed_is_unusable():
            hub = replace(hub_of(config), revision=None)
            return cls._load(name, checkpoint.locate(config.embedding_model, hub, "--embedding-model"))

    @classmethod
    def _load(cls, name: str, folder: Path) -> "EncoderText":
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"--embedding-model: {folder} has no tokenizer.json, which transformers can save.")
        try:
            inner = tokenizers.Tokenizer.from_str(read_text(file))
        except NotUtf8 as error:
            raise ConfigError(str(error)) from error
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise ConfigError(f"{file} cannot be read: {str(error)[:200]}.") from error
        inner.no_truncation()
        inner.no_padding()
        settings = checkpoint.read_json(folder, "config_sentence_transformers.json")
        prompts = {str(key): str(value) for key, value in (settings.get("prompts") or {}).items()}
        default = settings.get("default_prompt_name")
        if default is not None and default not in prompts:
            raise ConfigError(f"{folder}: the default prompt {repr(default)[:80]} is none of {', '.join(prompts)}.")
        lowers = bool(checkpoint.read_json(folder, "sentence_bert_config.json").get("do_lower_case"))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        return cls(name, digest, inner, prompts, "" if default is None else prompts[default], lowers)

    def prompt(self, name: str | None) -> str:
        """Return what is put before a text. Raises InvalidRequest for a name that the encoder does not have."""
        if name is None:
            return self.default_prompt
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InvalidRequest(
                f"`prompt_name` is {repr(name)[:80]}; `{self.name}` has the prompts: {known}.", param="prompt_name"
            )
        return self.prompts[name]

    def prompt_of(self, role: str | None, name: str | None) -> str:
        """Return what is put before a text that is a query or a document; of an encoder without such prompts as of any
        text. Raises InvalidRequest."""
        names = {"query": ("query",), "document": ("document", "passage", "corpus")}.get(role or "", ())
        return self.prompt(next((one for one in names if one in self.prompts), name))

    def encode(
        self, texts: Sequence[str], window: int, *, prompt: str = "", special: bool = True, truncate: int | None = None
    ) -> list[EncoderIds]:
        """Return the ids of texts. `truncate`: ids that are kept of each, from its beginning, special ones included;
        None: TextTooLong is raised for a text of more than `window`. Raises UnicodeEncodeError."""
        whole = [self._cleaned(prompt + text) for text in texts]
        with _no_halves(whole):
            encoded = self.inner.encode_batch(whole, add_special_tokens=special)
        most = window if truncate is None else min(window, truncate)
        found = []
        for encoding, text in zip(encoded, whole, strict=True):
            if len(encoding.ids) > most:
                if truncate is None:
                    raise TextTooLong(len(encoding.ids))
                encoding = self._cut(text, None, most, special=special)
            found.append(_ids(encoding))
        return found

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], window: int, *, truncate: int | None = None
    ) -> list[EncoderIds]:
        """Return the ids of pairs of texts, each as one input. `truncate`: ids that are kept of each pair: the longer
        text is cut first; None: TextTooLong is raised for a pair of more than `window`. Raises UnicodeEncodeError."""
        whole = [(self._cleaned(first), self._cleaned(second)) for first, second in pairs]
        with _no_halves(text for pair in whole for text in pair):
            encoded = self.inner.encode_batch(whole)
        most = window if truncate is None else min(window, truncate)
        found = []
        for encoding, (first, second) in zip(encoded, whole, strict=True):
            if len(encoding.ids) > most:
                if truncate is None:
                    raise TextTooLong(len(encoding.ids))
                encoding = self._cut(first, second, most, special=True)
            found.append(_ids(encoding))
        return found

    def _cleaned(self, text: str) -> str:
        return text.lower() if self.lowers else text

    def _cut(self, first: str, second: str | None, most: int, *, special: bool) -> tokenizers.Encoding:
        """Return the encoding of a text or a pair with at most `most` ids."""
        parts = [self.inner.encode(text, add_special_tokens=False) for text in (first, second) if text is not None]
        num_special = self.inner.num_special_tokens_to_add(is_pair=second is not None) if special else 0
        for part, length in zip(parts, _lengths([len(part.ids) for part in parts], most - num_special), strict=True):
            part.truncate(length)
        return self.inner.post_process(parts[0], parts[1] if len(parts) > 1 else None, add_special_tokens=special)


def _lengths(lengths: Sequence[int], most: int) -> list[int]:
    """Return how much is kept of one or two texts, where together they have at most `most`: of the longer one less."""
    most = max(0, most)
    if len(lengths) == 1:
        return [min(lengths[0], most)]
    shorter = min(*lengths, most // 2)
    longer = min(max(lengths), most - shorter)
    return [shorter, longer] if lengths[0] <= lengths[1] else [longer, shorter]


def _ids(encoding: tokenizers.Encoding) -> EncoderIds:
    types = tuple(encoding.type_ids)
    return EncoderIds(tuple(encoding.ids), types if any(types) else ())


@contextmanager
def _no_halves(texts: Iterable[str]) -> Iterator[None]:
    """Raise UnicodeEncodeError for a lone surrogate, where the tokenizer raises TypeError."""
    try:
        yield
    except TypeError:
        for text in texts:
            text.encode()
        raise
