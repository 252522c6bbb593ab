"""Checkpoints without tokenizer.json: the same tokenizer, written from the file that they have.

A SentencePiece model (tokenizer.model of Llama, InternLM, Baichuan, ChatGLM) and a tiktoken table (qwen.tiktoken of the
first Qwen, tokenizer.model of GLM-4) are expressed in tokenizer.json. Router and worker read the result from the same
folder of the cache; it is written atomically, once per content of the files and version of this code.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from space_common.files import read_text
from space_common.gguf.find import GgufError
from space_common.gguf.tokenizer import TokenType, tokenizer_files
from space_common.kept_files import keep_files
from space_common.tokenizer.byte_level import byte_letters
from space_common.tokenizer.special_tokens import further_tokens, named_tokens, token_text

TOKENIZER = "tokenizer.json"
_SENTENCEPIECE = "tokenizer.model"
_SPACE = "▁"
_CONVERT = "`spaceserve convert` can turn other tokenizers into tokenizer.json"


class TokenizerFileError(ValueError):
    """The checkpoint's tokenizer cannot be expressed in tokenizer.json; the message says why and what to do."""


def published_tokenizer(folder: Path) -> Path | None:
    """Return tokenizer.json or, without it, the file that the tokenizer is made from; None if the folder has none."""
    for name in (TOKENIZER, _SENTENCEPIECE):
        if (folder / name).is_file():
            return folder / name
    return next(iter(sorted(folder.glob("*.tiktoken"))), None)


def tokenizer_json(folder: Path) -> Path | None:
    """Return the folder's tokenizer.json, made in the cache if the folder has an older form; None if it has none.

    Raises TokenizerFileError.
    """
    source = published_tokenizer(folder)
    if source is None or source.name == TOKENIZER:
        return source
    texts = {name: _text(folder / name) for name in _SMALL_FILES}
    digest = hashlib.sha256(source.read_bytes() + json.dumps(texts).encode()).hexdigest()
    try:
        kept = keep_files("tokenizers", digest[:24], _version(), lambda: {TOKENIZER: _made(source, texts)})
    except (GgufError, OSError) as error:
        raise TokenizerFileError(f"{source}: {error}") from error
    return kept / TOKENIZER


_SMALL_FILES = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def _text(file: Path) -> str:
    return read_text(file) if file.is_file() else "{}"


@cache
def _version() -> str:
    """Return eight hexadecimal digits that change with the code that makes the file."""
    folder = Path(__file__).parents[1]
    sources = (Path(__file__), Path(__file__).with_name("special_tokens.py"), folder / "gguf" / "tokenizer.py")
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]


@dataclass(frozen=True)
class _Files:
    """The small files beside the tokenizer."""

    model_type: str
    config: Mapping[str, Any]  # tokenizer_config.json
    special_map: Mapping[str, Any]  # special_tokens_map.json
    added: Mapping[str, Any]  # added_tokens.json: text -> id

    def tokens(self, vocabulary: Sequence[tuple[str, TokenType]]) -> list[tuple[str, TokenType]]:
        """Return all tokens in the order of their ids: the vocabulary, in which the files may name ids anew, and what
        follows it."""
        named = [*named_tokens(self.config, self.special_map).values(), *further_tokens(self.config, self.special_map)]
        special = {token_text(entry) for entry in named}
        listed = {int(id_): entry for id_, entry in (self.config.get("added_tokens_decoder") or {}).items()}
        listed |= {int(id_): text for text, id_ in self.added.items() if int(id_) not in listed}
        if not listed:
            listed = dict(enumerate(_OF_THE_CODE.get(self.model_type, ()), len(vocabulary)))
        tokens = dict(enumerate(vocabulary))
        for id_, entry in sorted(listed.items()):
            text = token_text(entry)
            if text is None or id_ > len(tokens):  # a gap: no id of the model
                continue
            if tokens.get(id_, ("", TokenType.NORMAL))[0] == text:
                is_control = tokens[id_][1] in (TokenType.CONTROL, TokenType.UNKNOWN)
            else:
                is_control = not self.names_tokens or text in special
            if is_control or (isinstance(entry, Mapping) and entry.get("special")):
                tokens[id_] = (text, TokenType.CONTROL)
            else:
                tokens[id_] = (text, TokenType.USER_DEFINED)
        return list(tokens.values())

    @property
    def names_tokens(self) -> bool:
        """Whether the files name tokens by their ids."""
        return bool(self.added or self.config.get("added_tokens_decoder"))


_OF_THE_CODE: Mapping[str, Sequence[str]] = {
    "chatglm": (
        *("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))),
}
"""model_type -> tokens that follow the vocabulary and that only the published code names, if no file lists others."""

_PROMPT_PREFIX: Mapping[str, Sequence[Sequence[str]]] = {"chatglm": (("[gMASK]",), ("<sop>", "sop"))}
"""model_type -> tokens before each prompt, by the texts that they may have."""

_WORDS: Mapping[str, str] = {"qwen": "qwen2", "chatglm": "glm4"}
"""model_type -> the pre-tokenizer of its tiktoken table."""


def _made(source: Path, texts: Mapping[str, str]) -> str:
    """Return the text of tokenizer.json. Raises TokenizerFileError, GgufError."""
    config, tokenizer_config, special_map, added = (_object(source.parent / name, texts[name]) for name in _SMALL_FILES)
    files = _Files(str(config.get("model_type")), tokenizer_config, special_map, added)
    content = source.read_bytes()
    table = _tiktoken_table(content)
    if table is not None:
        parts = _of_tiktoken(source, table, files)
    elif source.suffix == ".tiktoken":
        raise TokenizerFileError(
            f"{source} is no tiktoken table: lines of a token in base64 and its rank. Fetch it again."
        )
    else:
        parts = _of_sentencepiece(source, content, files)
    prefix = _PROMPT_PREFIX.get(files.model_type, ())
    ids = {token["content"]: token["id"] for token in parts["added_tokens"]}
    before = [next((text for text in texts if text in ids), None) for texts in prefix]
    if before and None not in before:
        parts["post_processor"] = _with_prefix({text: ids[text] for text in before if text is not None})
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":"))


def _object(file: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerFileError(f"{file} cannot be read: {error}. Fetch it again.") from error
    if not isinstance(found, dict):
        raise TokenizerFileError(f"{file} holds no JSON object. Fetch it again.")
    return found


def _with_prefix(ids: Mapping[str, int]) -> dict[str, Any]:
    """Return a post-processor that puts these tokens before each prompt."""
    before = [{"SpecialToken": {"id": text, "type_id": 0}} for text in ids]
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*before, first],
        "pair": [*before, first, second],
        "special_tokens": {text: {"id": text, "ids": [id_], "tokens": [text]} for text, id_ in ids.items()},
    }


def _tiktoken_table(content: bytes) -> dict[bytes, int] | None:
    """Return token -> rank of a tiktoken table, in the order of the ranks; None if the content is something else."""
    ranks: dict[bytes, int] = {}
    for line in content.splitlines():
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            return None
    return dict(sorted(ranks.items(), key=lambda entry: entry[1])) or None


def _of_tiktoken(source: Path, ranks: Mapping[bytes, int], files: _Files) -> dict[str, Any]:
    """Return tokenizer.json of a tiktoken table: byte-level BPE, merges in the order of the merged token's rank."""
    words = _WORDS.get(files.model_type)
    if words is None:
        raise TokenizerFileError(
            f"{source} is a tiktoken table of a model of type {files.model_type!r}, which does not say how a text is "
            f"cut into words; it is known of {', '.join(_WORDS)}. Give a checkpoint with a tokenizer.json."
        )
    if list(ranks.values()) != list(range(len(ranks))):
        raise TokenizerFileError(f"{source} has ranks that do not count 0, 1, 2 …. Fetch it again.")
    letters = {byte: letter for letter, byte in byte_letters().items()}
    vocabulary = ["".join(letters[byte] for byte in token) for token in ranks]
    tokens = files.tokens([(text, TokenType.NORMAL) for text in vocabulary])
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": words,
        "tokenizer.ggml.tokens": [text for text, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in _merges_by_rank(vocabulary)],
        "tokenizer.ggml.add_bos_token": False,
    }
    parts: dict[str, Any] = json.loads(tokenizer_files(metadata)[TOKENIZER])
    parts["model"]["ignore_merges"] = True  # a word in the table is one token
    return parts


def _merges_by_rank(vocabulary: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs that make a token, in the order of its rank; of one token the longest left part first, so that
    of two places that overlap the left one is merged, as by rank alone."""
    known = set(vocabulary)
    for token in vocabulary:
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in known and token[cut:] in known:
                yield token[:cut], token[cut:]


def _of_sentencepiece(source: Path, content: bytes, files: _Files) -> dict[str, Any]:
    """Return tokenizer.json of a SentencePiece model of the BPE kind. Raises TokenizerFileError, GgufError.

    Text behind a special token begins with a space, as in the published code. So does text behind a symbol that the
    model names as its own, where SentencePiece adds none.
    """
    from sentencepiece import sentencepiece_model_pb2  # imported late: few checkpoints need it

    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(content)
    except Exception as error:  # DecodeError, which protobuf's versions export from different modules
        raise TokenizerFileError(f"{source} is neither a SentencePiece model nor a tiktoken table.") from error
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type != trainer.BPE:
        raise TokenizerFileError(
            f"{source} is a SentencePiece model of the kind {trainer.ModelType.Name(trainer.model_type)}; only BPE is "
            f"read here. {_CONVERT}."
        )
    pieces = model.pieces
    spaced = [piece.piece for piece in pieces if piece.type == piece.USER_DEFINED and _SPACE in piece.piece]
    if spaced:
        raise TokenizerFileError(
            f"{source} has {spaced[0]!r} as a symbol of its own, with a space in it, which tokenizer.json cannot "
            f"express. {_CONVERT}."
        )
    tokens = files.tokens([(piece.piece, TokenType(piece.type)) for piece in pieces])
    is_given = files.config.get("add_bos_token")
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _ in tokens],
        "tokenizer.ggml.scores": [*(piece.score for piece in pieces), *([0.0] * (len(tokens) - len(pieces)))],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        "tokenizer.ggml.add_space_prefix": normalizer.add_dummy_prefix,
        "tokenizer.ggml.add_bos_token": trainer.bos_id >= 0 if is_given is None else bool(is_given),
        "tokenizer.ggml.add_eos_token": bool(files.config.get("add_eos_token")),
        **{
            f"tokenizer.ggml.{name}_token_id": id_
            for name, id_ in (("bos", trainer.bos_id), ("eos", trainer.eos_id), ("unknown", trainer.unk_id))
        },
    }
    parts: dict[str, Any] = json.loads(tokenizer_files(metadata)[TOKENIZER])
    before: list[dict[str, Any]] = []
    if normalizer.precompiled_charsmap:
        table = base64.b64encode(normalizer.precompiled_charsmap).decode()
        before.append({"type": "Precompiled", "precompiled_charsmap": table})
    if normalizer.remove_extra_whitespaces:
        before.append({"type": "Strip", "strip_left": True, "strip_right": True})
        before.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if before:
        rest = parts["normalizer"]
        rest = rest["normalizers"] if rest["type"] == "Sequence" else [rest]
        parts["normalizer"] = {"type": "Sequence", "normalizers": [*before, *rest]}
    return parts
