"""The tokens of a GGUF file with their types, and the special token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from space_common.gguf.errors import GgufError

_CONVERT = "convert the original checkpoint again with a current convert_hf_to_gguf.py, or serve it as it is"


Pair = tuple[str, str]
"""Two tokens that a merge joins."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`, numbered as in the file."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts that llama.cpp treats as special tokens if the file names no ids: control tokens, whatever their types.
_END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip
_FILL_IN_TEXTS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
_KNOWN_TEXTS = _END_TEXTS.union(*_FILL_IN_TEXTS.values())
# gpt-oss writes these between the parts of an answer. They stay text, so that the parts can be separated.
_ALWAYS_TEXT = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})


@dataclass(frozen=True)
class GgufVocabulary:
    """Tokens by id, their types, and the special ids that the file names or llama.cpp recognises by text."""

    ids: Mapping[str, int]
    """Token -> id, in the order of the ids."""
    merged: Set[str]
    """Tokens that merges produce."""
    types: Sequence[TokenType]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    ends: Sequence[int]
    """EOS ids: the file's EOS first, then the others, ascending."""

    @cached_property
    def tokens(self) -> Sequence[str]:
        """Return the tokens in the order of their ids."""
        return list(self.ids)

    def entries(self) -> dict[str, int]:
        """Return a BPE model's vocabulary without tokens that no text produces, such as padding of the output head.

        An id without an entry decodes to no bytes.
        """
        without_text = (TokenType.UNUSED, TokenType.UNDEFINED)
        return {
            token: id_
            for (token, id_), type_ in zip(self.ids.items(), self.types, strict=True)
            if type_ not in without_text or len(token) == 1 or token in self.merged
        }

    @classmethod
    def read(
        cls, metadata: Mapping[str, Any], ids: Mapping[str, int], merged: Set[str], *, defaults: Mapping[str, int]
    ) -> GgufVocabulary:
        """Read the metadata of a file. `defaults`: special ids by name if the file has none. Raises GgufError."""
        types = _types(metadata, len(ids))

        def named(name: str) -> int | None:
            """Return the special id under this key; None if the id has no token."""
            id_ = metadata.get(f"tokenizer.ggml.{name}_token_id", defaults.get(name))
            return int(id_) if id_ is not None and 0 <= int(id_) < len(ids) else None

        # Tokens that ordinary text produces are not special. "</s>" also closes struck-out text in HTML; Gemma has it
        # as user-defined text.
        known = {
            text: id_
            for text, id_ in ids.items()
            if text in _KNOWN_TEXTS
            and (types[id_] is not TokenType.NORMAL or text not in merged)
            and (text != "</s>" or types[id_] is TokenType.CONTROL)
        }
        ends = {known[text] for text in _END_TEXTS & known.keys()}
        ends |= {id_ for name in ("eos", "eot", "eom") if (id_ := named(name)) is not None}
        for name in ("fim_pad", "fim_rep", "fim_sep"):  # a filled-in file ends with one of these
            candidates = (named(name), *(known.get(text) for text in _FILL_IN_TEXTS[name]))
            ends |= set([id_ for id_ in candidates if id_ is not None][:1])
        for id_ in known.values():
            types[id_] = TokenType.CONTROL
        for text in _ALWAYS_TEXT & ids.keys():
            types[ids[text]] = TokenType.USER_DEFINED
        found = {text for text in ("<|end|>", "<|call|>", "<|calls|>", "<|return|>", "<|flush|>") if text in known}
        calls = found & {"<|call|>", "<|calls|>"}
        if "<|end|>" in found and calls and found & {"<|return|>", "<|flush|>"}:  # ends only a part of the answer
            ends.remove(ids["<|end|>"])
            types[ids["<|end|>"]] = TokenType.USER_DEFINED
        return cls(
            ids,
            merged,
            types,
            named("bos"),
            named("eos"),
            named("unknown"),
            named("padding"),
            sorted(ends, key=lambda id_: (id_ != named("eos"), id_)),
        )


def read_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return token -> id, in the order of the ids. Raises GgufError."""
    try:
        texts = metadata["tokenizer.ggml.tokens"]
    except KeyError:
        raise GgufError(f"The file has no tokenizer.ggml.tokens: {_CONVERT}.") from None
    tokens = [text or f"[EMPTY_{id_}]" for id_, text in enumerate(texts)]
    ids = {token: id_ for id_, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        double = next(token for id_, token in enumerate(tokens) if ids[token] != id_)
        raise GgufError(f"tokenizer.ggml.tokens has {double!r} more than once, so ids are ambiguous: {_CONVERT}.")
    return ids


def _types(metadata: Mapping[str, Any], num_tokens: int) -> list[TokenType]:
    numbers = metadata.get("tokenizer.ggml.token_type")
    if numbers is None:
        return [TokenType.NORMAL] * num_tokens
    if len(numbers) < num_tokens:
        raise GgufError(f"tokenizer.ggml.token_type has {len(numbers)} entries for {num_tokens} tokens: {_CONVERT}.")
    known = {int(one): one for one in TokenType}
    return [known.get(int(number), TokenType.UNDEFINED) for number in numbers[:num_tokens]]
