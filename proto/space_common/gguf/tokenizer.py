"""Builds the files of a Hugging Face tokenizer from the metadata of a GGUF file.

Equal metadata give the same bytes, because router and worker compare the hash of tokenizer.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from space_common.gguf import byte_level, pre_tokenizers, sentencepiece
from space_common.gguf.errors import GgufError
from space_common.gguf.vocabulary import GgufVocabulary, Pair, TokenType, read_ids

_TEMPLATE = "tokenizer.chat_template"
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # ids if the file names none


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return tokenizer.json, tokenizer_config.json, generation_config.json and any chat templates.

    `metadata`: plain values by the file's keys. Returns text by file name; a named template's file is in
    a folder, `additional_chat_templates/NAME.jinja`. Raises GgufError for a tokenizer that cannot be expressed.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        pre_tokenizer = pre_tokenizers.named(str(metadata.get("tokenizer.ggml.pre") or "default"))
        ids = read_ids(metadata)
        merges = byte_level.read_merges(metadata, ids)
        vocabulary = GgufVocabulary.read(metadata, ids, _results(merges), defaults={})
        sections = byte_level.sections(vocabulary, merges, pre_tokenizer)
        adds_bos = pre_tokenizer.add_bos
    elif model == "llama":
        ids = read_ids(metadata)
        merges = sentencepiece.read_merges(metadata, ids)
        vocabulary = GgufVocabulary.read(metadata, ids, _results(merges), defaults=_SENTENCEPIECE_IDS)
        prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        sections = sentencepiece.sections(vocabulary, merges, prefixed=prefixed)
        adds_bos = True
    else:
        raise GgufError(
            f"tokenizer.ggml.model is {model!r}; only gpt2 (byte-level BPE) and llama (SentencePiece) can be read. "
            "Serve the original checkpoint, which has a tokenizer.json."
        )
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    adds_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, vocabulary),
        "normalizer": sections["normalizer"],
        "pre_tokenizer": sections["pre_tokenizer"],
        "post_processor": _post_processor(
            vocabulary, vocabulary.bos if adds_bos else None, vocabulary.eos if adds_eos else None
        ),
        "decoder": sections["decoder"],
        "model": sections["model"],
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")),
        "tokenizer_config.json": _json(_config(metadata, vocabulary, adds_bos, adds_eos)),
        "generation_config.json": _json(_generation_config(vocabulary)),
        **_chat_templates(metadata),
    }


def _results(merges: Sequence[Pair]) -> frozenset[str]:
    return frozenset(left + right for left, right in merges)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def _added_tokens(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> list[dict[str, Any]]:
    """Return the tokens that are matched before the text is split into words; control tokens are special.

    A user-defined token is text that the model reads as one token. Phi-3's also swallow the white space after them.
    """
    found = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    name = str(metadata.get("general.name", "")).lower()
    swallows = "phi-3" in name or "phi3" in name
    return [
        {
            "id": id_,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": swallows and token not in {"<unk>", "<s>", "<|endoftext|>"},
            "normalized": False,
            "special": type_ is not TokenType.USER_DEFINED,
        }
        for id_, (token, type_) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if type_ in found
    ]


def _post_processor(vocabulary: GgufVocabulary, first: int | None, last: int | None) -> dict[str, Any] | None:
    """Return a post-processor that adds BOS before and EOS after a prompt; None if it would add neither."""
    if first is None and last is None:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        def special(id_: int | None) -> list[dict[str, Any]]:
            return [] if id_ is None else [{"SpecialToken": {"id": vocabulary.tokens[id_], "type_id": type_id}}]

        return [*special(first), {"Sequence": {"id": sequence, "type_id": type_id}}, *special(last)]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            vocabulary.tokens[id_]: {"id": vocabulary.tokens[id_], "ids": [id_], "tokens": [vocabulary.tokens[id_]]}
            for id_ in (first, last)
            if id_ is not None
        },
    }


def _config(metadata: Mapping[str, Any], vocabulary: GgufVocabulary, adds_bos: bool, adds_eos: bool) -> dict[str, Any]:
    """Return tokenizer_config.json with the special tokens by role."""
    roles = {
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        "unk_token": vocabulary.unknown,
        "pad_token": vocabulary.padding,
    }
    architecture = metadata.get("general.architecture")
    length = metadata.get(f"{architecture}.context_length")
    return {
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        **{role: vocabulary.tokens[id_] for role, id_ in roles.items() if id_ is not None},
        "clean_up_tokenization_spaces": False,
        **({} if length is None else {"model_max_length": int(length)}),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _generation_config(vocabulary: GgufVocabulary) -> dict[str, Any]:
    ids = {"bos_token_id": vocabulary.bos, "pad_token_id": vocabulary.padding}
    return {
        **{key: id_ for key, id_ in ids.items() if id_ is not None},
        **({"eos_token_id": list(vocabulary.ends)} if vocabulary.ends else {}),
    }


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the default and the named templates as files."""
    files = {}
    for key in sorted(key for key in metadata if key == _TEMPLATE or key.startswith(_TEMPLATE + ".")):
        name = key.removeprefix(_TEMPLATE).removeprefix(".")
        if name and not re.fullmatch(r"\w+", name, re.ASCII):
            raise GgufError(f"{key} is no name for a chat template: letters, digits and _ only. Rename it in the file.")
        files[f"additional_chat_templates/{name}.jinja" if name else "chat_template.jinja"] = str(metadata[key])
    return files
