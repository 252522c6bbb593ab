"""The checkpoint's tokenizer, as the router uses it."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from space_common.files import NotUtf8, read_text
from space_common.tokenizer.byte_level import byte_letters
from space_common.tokenizer.special_tokens import further_tokens, named_tokens, token_text
from space_common.tokenizer.tokenizer_files import TokenizerFileError, published_tokenizer, tokenizer_json

from space_router.errors import ConfigError
from space_router.text import text_pieces
from space_router.text.checkpoint import read_json
from space_router.text.text_pieces import TextCuts
from space_router.text.text_pool import checkpoint

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


LARGEST_ID = (1 << 24) - 1
"""Far above any vocabulary: the tokenizers library writes files id by id, in a minute for the largest that it reads."""


class TokenBytes:
    """Maps ids to bytes, for byte-level BPE and SentencePiece tokenizers.

    `strips_first_space`: SentencePiece adds a space before the first word that is not part of the text.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added, own = tokenizer.get_added_tokens_decoder(), tokenizer.get_vocab(with_added_tokens=False)
        if (largest := max([*own.values(), *added], default=0)) > LARGEST_ID:
            raise ConfigError(
                f"tokenizer.json has the id {largest}; ids are {LARGEST_ID} at most, and follow one another. Fetch it "
                "again."
            )
        content = json.loads(tokenizer.to_str())
        kinds = _kinds(content.get("decoder"))
        self._tokenizer = tokenizer
        self._alphabet = byte_letters() if "ByteLevel" in kinds else None
        self.strips_first_space = bool(kinds & {"Metaspace", "Strip"})
        if self._alphabet is None and not kinds & {"Metaspace", "Replace", "ByteFallback"}:
            raise ConfigError(
                f"tokenizer.json has the decoder {sorted(kinds) or 'null'}; supported are byte-level ones (ByteLevel) "
                "and SentencePiece's (Metaspace, or Replace with ByteFallback)."
            )
        self._cache: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self._added = {id_: token.content for id_, token in added.items()}
        self.cuts = TextCuts(content, own, self._alphabet, added.values())

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
            known = None
            with suppress(UnicodeDecodeError):
                known = self[id_].decode("utf-8")
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


_LLAMA_CLASSES = frozenset({"LlamaTokenizer", "CodeLlamaTokenizer"})

UNCHANGED_MODEL_TYPES = frozenset(
    {
        "EvollaModel",
        "arctic",
        "aria",
        "beam",
        "bigbird_pegasus",
        "camembertv2-base",
        "canary",
        "chatlm",
        "cohere_asr",
        "ernie4_5",
        "ernie4_5_moe",
        "flex_olmo",
        "fuyu",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v",
        "glm4v_moe",
        "glm_image",
        "glmasr",
        "got_ocr2",
        "gpt_bigcode",
        "gradium_phonon_tts",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "h2ovl_chat",
        "hyperclovax",
        "hyperclovax_vision_v2",
        "hyperclovax_vlm",
        "internlm2",
        "internlm3",
        "iquestcoder",
        "jamba",
        "kimi_k25",
        "kimi_linear",
        "kosmos-2",
        "llava",
        "llava_next",
        "mimo_v2_flash",
        "minicpm3",
        "minicpm_ocr",
        "minicpmv",
        "minicpmv4_6",
        "minicpmv4_7",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mistral3",
        "mistral_large4",
        "mixtral",
        "modernbert",
        "modernbert-decoder",
        "molmo",
        "molmo2",
        "nemo_speechlm",
        "nemotron",
        "nvfp4",
        "nystromformer",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "opencua",
        "openvla",
        "paddleocr_vl",
        "pegasus_x",
        "persimmon",
        "phi3",
        "phi3_v",
        "phimoe",
        "pix2struct",
        "pixtral",
        "pocket_tts",
        "qwen2",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen4_exp",
        "siglip2",
        "smolvlm",
        "stablelm",
        "step3_vl",
        "umt5",
        "vipllava",
        "voxtral",
        "voxtral_realtime",
        "xlm-roberta-xl",
    }
)
"""Model types for which transformers (5.23) uses tokenizer.json unchanged, whatever class the files name."""

_LLAMA_DEFAULTS: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""The class's special tokens, used if the files name none."""


def is_llama_class(content: Mapping[str, Any], config: Mapping[str, Any], model_config: Mapping[str, Any]) -> bool:
    """Return whether transformers builds the tokenizer with Llama's class.

    The arguments are tokenizer.json, tokenizer_config.json and config.json.
    """
    named = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    if not isinstance(named, str) or named.removesuffix("Fast") not in _LLAMA_CLASSES:
        return False
    if model_config.get("model_type") in UNCHANGED_MODEL_TYPES or content.get("model", {}).get("type", "BPE") != "BPE":
        return False
    return "ByteLevel" not in _kinds(content.get("pre_tokenizer")) | _kinds(content.get("decoder"))


def rebuilt_as_llama(content: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json as Llama's class builds it, without added tokens."""
    is_code = str(config.get("tokenizer_class", "")).startswith("CodeLlama")
    has_prefix = config.get("add_prefix_space") is not False
    scheme = "never" if not has_prefix else "always" if config.get("legacy") is True and not is_code else "first"
    parts: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix or is_code:
        parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = dict(content["model"]) | {
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
    }
    if not is_code:
        model["unk_token"] = None
    return dict(content) | {
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": parts},
        "model": model,
    }


def _kinds(part: Any) -> set[str]:
    """Return the types of a pre-tokenizer or decoder, or of the parts of a sequence of them."""
    if not isinstance(part, Mapping):
        return set()
    inner = [*(part.get("pretokenizers") or ()), *(part.get("decoders") or ())]
    return ({str(part.get("type"))} - {"Sequence"}).union(*map(_kinds, inner))


_NO_WORD = "☺"  # never merges with the text after it


class SpecialTokens:
    """Special tokens by their texts, and where they stand in other texts."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids`: by text."""
        self.ids = ids
        self._starts = {text[0] for text in ids}
        self._lengths = sorted({len(text) for text in ids}, reverse=True)

    def parts(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Cut a text where special tokens stand in it, at each place the longest, as a tokenizer does. Yields pieces
        with the token's id; None: a text between them."""
        begin = place = 0
        while place < len(text):
            lengths = self._lengths if text[place] in self._starts else ()
            length = next((length for length in lengths if text[place : place + length] in self.ids), 0)
            if length:
                if begin < place:
                    yield text[begin:place], None
                yield text[place : place + length], self.ids[text[place : place + length]]
                begin = place + length
            place += length or 1
        if begin < len(text):
            yield text[begin:], None


class Tokenizer:
    """Encodes and decodes text. `content_hash`: sha256 of tokenizer.json, or of the older
    file in its place; compared with the worker's."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        content_hash: str = "",
        *,
        special_map: Mapping[str, Any] = MappingProxyType({}),
        defaults: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`config`: tokenizer_config.json; `special_map`: special_tokens_map.json; `defaults`: special tokens that
        neither file names.
        """
        inner.no_truncation()
        inner.no_padding()
        # Defaults count that are in the vocabulary and that the config does not mention, not even as null.
        fitting = {name for name, text in defaults.items() if inner.token_to_id(text) is not None} - config.keys()
        named = {**{name: defaults[name] for name in sorted(fitting)}, **named_tokens(config, special_map)}
        _add_tokens(inner, config, [*named.values(), *further_tokens(config, special_map)])
        self._inner = inner
        self.content_hash = content_hash
        self.bytes_of = TokenBytes(inner)
        self.num_ids = inner.get_vocab_size()
        """Number of token ids, added tokens included; the embedding may have fewer rows."""
        special = {token.content: id_ for id_, token in inner.get_added_tokens_decoder().items() if token.special}
        self.special_tokens = SpecialTokens(special)
        self.special_ids = frozenset(special.values())
        self.added_texts = frozenset(token.content for token in inner.get_added_tokens_decoder().values())
        """Texts of added tokens, special or not; the tokenizer never splits them."""
        self.added_ids = frozenset(inner.get_added_tokens_decoder())
        self.named_tokens: Mapping[str, str] = {name: token_text(entry) or "" for name, entry in named.items()}
        """Special tokens by the names that chat templates use: `bos_token`, `eos_token`, …"""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = map(self.named_tokens.get, names)
        # Older Llama checkpoints ask for a BOS before the prompt only in tokenizer_config.json.
        self._bos_id = None
        self.bos_id: int | None = None if self.bos_token is None else inner.token_to_id(self.bos_token)
        if config.get("add_bos_token") and self.bos_id is not None and inner.encode("a").ids[:1] != [self.bos_id]:
            self._bos_id = self.bos_id

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Load the tokenizer from the files in a folder. Raises ConfigError."""
        source = published_tokenizer(folder) or folder / "tokenizer.json"
        config, special_map = (read_json(folder, name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
        defaults: Mapping[str, str] = {}
        try:
            content = source.read_bytes()
            file = tokenizer_json(folder) or source
            text = read_text(file)
            inner = tokenizers.Tokenizer.from_str(text)
            if (parsed := _of_llama_class(text, config, folder)) is not None:
                added = parsed["added_tokens"]
                inner = tokenizers.Tokenizer.from_str(json.dumps(rebuilt_as_llama(parsed, config)))
                defaults = _LLAMA_DEFAULTS
                if config.get("added_tokens_decoder") is None:
                    config = {**config, "added_tokens_decoder": {str(token["id"]): token for token in added}}
                    special_map = {}
            inner.encode("a", add_special_tokens=False)  # fails for every text without a token for unknown characters
        except ConfigError:
            raise
        except (NotUtf8, TokenizerFileError) as error:
            raise ConfigError(str(error)) from error
        except Exception as error:  # the library raises plain Exception for a malformed file
            raise ConfigError(f"{source} cannot be read: {str(error)[:200]}.") from error
        digest = hashlib.sha256(content).hexdigest()
        return cls(inner, config, digest, special_map=special_map, defaults=defaults)

    # Only the batch calls release the GIL; a long prompt takes seconds.

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; special tokens (BOS) are added as the checkpoint's post-processor does.

        Raises UnicodeEncodeError for half of a surrogate pair.
        """
        ids: list[int] = []
        for piece in self.encode_pieces(text, add_special_tokens=add_special_tokens):
            ids += piece
        return ids

    def encode_pieces(self, text: str, *, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """Yield the ids of a text in parts, which need much less memory than the whole at once.

        Another job of the text pool may run between two parts. Raises UnicodeEncodeError, StretchTooLong.
        """
        if add_special_tokens and self._bos_id is not None:
            yield [self._bos_id]
        if len(text) <= text_pieces.PIECE:
            with _no_halves(text):
                yield self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            checkpoint(len(text))
            return
        before, after = self._around if add_special_tokens else ((), ())
        yield list(before)
        for start, end in self.bytes_of.cuts.pieces(text):
            part, num_before = self._inside(text[start:end], is_first=start == 0)
            with _no_halves(part):
                ids: list[int] = self._inner.encode_batch_fast([part], add_special_tokens=False)[0].ids
            yield ids[num_before:]
            checkpoint(end - start)
        yield list(after)

    @cached_property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the post-processor adds before and behind a text."""
        bare, whole = (self._inner.encode("a", add_special_tokens=special).ids for special in (False, True))
        at = next((place for place in range(len(whole)) if whole[place : place + len(bare)] == bare and place >= 0), 0)
        return tuple(whole[:at]), tuple(whole[at + len(bare) :])

    def _inside(self, piece: str, *, is_first: bool) -> tuple[str, int]:
        """Return what to tokenise for a piece of a text, and how many of its first ids are not the piece's."""
        if is_first or not self.bytes_of.strips_first_space:
            return piece, 0
        return _NO_WORD + piece, self._num_no_word

    @cached_property
    def _num_no_word(self) -> int:
        return len(self._inner.encode(_NO_WORD, add_special_tokens=False).ids)

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of text within another text: without the space that SentencePiece adds before a first word."""
        if self.bytes_of.strips_first_space:
            before, ids = (self.encode(part, add_special_tokens=False) for part in (_NO_WORD, _NO_WORD + text))
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self.encode(text, add_special_tokens=False)

    def encode_spans(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """Return (id, start, end) of each token, in characters of the text. Raises UnicodeEncodeError."""
        return [
            span for piece in self.encode_span_pieces(text, add_special_tokens=add_special_tokens) for span in piece
        ]

    def encode_span_pieces(self, text: str, *, add_special_tokens: bool = True) -> Iterator[list[tuple[int, int, int]]]:
        """Yield the (id, start, end) of a text in parts, as `encode_pieces` does its ids."""
        if add_special_tokens and self._bos_id is not None:
            yield [(self._bos_id, 0, 0)]
        if len(text) <= text_pieces.PIECE:
            yield self._spans(text, add_special_tokens=add_special_tokens)
            checkpoint(len(text))
            return
        before, after = self._around if add_special_tokens else ((), ())
        yield [(id_, 0, 0) for id_ in before]
        for start, end in self.bytes_of.cuts.pieces(text):
            part, num_before = self._inside(text[start:end], is_first=start == 0)
            offset = start - (len(_NO_WORD) if num_before else 0)
            spans = self._spans(part, add_special_tokens=False)[num_before:]
            yield [(id_, first + offset, last + offset) for id_, first, last in spans]
            checkpoint(end - start)
        yield [(id_, 0, 0) for id_ in after]

    def _spans(self, text: str, *, add_special_tokens: bool) -> list[tuple[int, int, int]]:
        with _no_halves(text):
            encoding = self._inner.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return [(id_, start, end) for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)]

    def normalized(self, text: str) -> str:
        """Return the text as tokens are searched for in it that the files mark as `normalized`."""
        normalizer = self._inner.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def encode_with_control(
        self, text: str, control: Sequence[tuple[int, int]], control_ids: frozenset[int], *, add_special_tokens: bool
    ) -> list[tuple[int, int, int]]:
        """Return (id, start, end) of each token, of `control_ids` only at the places `control`; elsewhere their texts
        are ordinary text. Raises UnicodeEncodeError.
        """
        # The tokenizer gets a stand-in of the same length for each control token, and does not know their texts.
        known = self._inner.get_added_tokens_decoder()
        names = dict.fromkeys(text[start:end] for start, end in control)
        free = (one for plane in (range(0xE000, 0xF900), range(0xF0000, 0x10FFFE)) for one in map(chr, plane))
        used = set(text)
        stand_ins = {name: next(one for one in free if one not in used) * len(name) for name in names}
        added = [token for id_, token in known.items() if id_ not in control_ids]
        ids = {token.content: id_ for id_, token in known.items() if id_ not in control_ids}
        at, pieces = 0, []
        for start, end in control:
            name = text[start:end]
            pieces += [text[at:start], stand_ins[name]]
            at = end
        pieces.append(text[at:])
        for name, stand_in in stand_ins.items():
            ids[stand_in] = next(i for i in self._inner.encode(name, add_special_tokens=False).ids if i in control_ids)
            added.append(tokenizers.AddedToken(stand_in, special=True, normalized=False))
        twin = tokenizers.Tokenizer(self._inner.model)  # shares the vocabulary
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := getattr(self._inner, part)) is not None:
                setattr(twin, part, value)
        twin.add_tokens(added)
        with _no_halves(text):
            encoding = twin.encode_batch(["".join(pieces)], add_special_tokens=add_special_tokens)[0]
        spans: list[tuple[int, int, int]] = []
        parts = zip(encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True)
        for id_, token, (start, end), is_added in parts:
            own = ids.get(token)
            if own is not None or is_added or id_ not in control_ids or token == self.unk_token:
                spans.append((id_ if own is None else own, start, end))
            else:  # the vocabulary itself has a control token's text
                halves = (token[:1], token[1:])
                spans += [(one.id, start, end) for half in halves for one in twin.model.tokenize(half)]
        return [(self._bos_id, 0, 0), *spans] if add_special_tokens and self._bos_id is not None else spans

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, decoded without context."""
        pieces = []
        for start in range(0, len(ids), text_pieces.PIECE):
            kept = (
                id_
                for id_ in ids[start : start + text_pieces.PIECE]
                if not (skip_special_tokens and id_ in self.special_ids)
            )
            pieces.append(b"".join(self.bytes_of[id_] for id_ in kept))
            checkpoint(text_pieces.PIECE)
        text = b"".join(pieces).decode("utf-8", "replace")
        return text[1:] if self.bytes_of.strips_first_space and text.startswith(" ") else text

    def token_text(self, id_: int) -> str:
        """Return a token's text for a logprobs list, or `bytes:\\xe2\\x82` if the token is not valid UTF-8."""
        text = self.bytes_of.text(id_)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of[id_]) if text is None else text

    def vocabulary_texts(self, ids: Iterable[int]) -> list[str]:
        """Return the tokens as the vocabulary writes them, such as `Ġa` for ` a`; "" for an id that it lacks."""
        return [self._inner.id_to_token(id_) or "" for id_ in ids]

    def token_to_id(self, token: str) -> int | None:
        id_: int | None = self._inner.token_to_id(token)
        return id_


@contextmanager
def _no_halves(text: str) -> Iterator[None]:
    """Raise UnicodeEncodeError for a lone surrogate, where the tokenizer raises TypeError."""
    try:
        yield
    except TypeError:
        text.encode()
        raise


def _of_llama_class(text: str, config: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    """Return the parsed tokenizer.json if transformers builds the tokenizer with Llama's class, else None."""
    model_config = read_json(folder, "config.json")
    if not is_llama_class({}, config, model_config):
        return None  # avoids parsing a large file
    parsed: dict[str, Any] = json.loads(text)
    return parsed if is_llama_class(parsed, config, model_config) else None


def _add_tokens(inner: tokenizers.Tokenizer, config: Mapping[str, Any], special: Sequence[Any]) -> None:
    """Add the tokens that only the other files name, as transformers does; a new token gets the next id.

    Without this `<s>` would be split into `<`, `s`, `>`.
    """
    listed = (config.get("added_tokens_decoder") or {}).items()
    made = [_added(entry) for _, entry in sorted(listed, key=lambda item: int(item[0]))]
    known = {token.content for token in (*inner.get_added_tokens_decoder().values(), *made)}
    for entry in special:
        if (text := token_text(entry)) is not None and text not in known:
            made.append(_added(entry, special=True))
            known.add(text)
    inner.add_tokens(made)


def _added(entry: Any, *, special: bool = False) -> tokenizers.AddedToken:
    """Return the AddedToken for an entry of the files: a string or an object."""
    if isinstance(entry, str):
        return tokenizers.AddedToken(entry, special=special)
    flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
    return tokenizers.AddedToken(entry["content"], special=special or bool(entry.get("special")), **flags)
