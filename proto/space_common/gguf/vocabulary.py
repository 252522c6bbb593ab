"""The tokens of a GGUF file with their types, and the ids of the special ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from space_common.gguf.errors import GgufError

_CONVERT = "convert the original checkpoint again with a current convert_hf_to_gguf.py, or serve it as it is"


class TokenType(IntEnum):
    """What `tokenizer.ggml.token_type` says of a token; the numbers are the file's."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts by which llama.cpp knows special tokens whose ids the file does not name; it takes them for control tokens.
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
# gpt-oss writes these between the parts of an answer: they are text, so that the parts can be told apart.
_ALWAYS_TEXT = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, the type of each, and the special ids that the file names or llama.cpp knows by their texts."""

    tokens: Sequence[str]
    types: Sequence[TokenType]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    ends: Sequence[int]
    """Ids that end a generation: EOS first, then the others, ascending."""

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """The id of each token."""
        return {token: id_ for id_, token in enumerate(self.tokens)}

    def entries(self, merged: Collection[str]) -> dict[str, int]:
        """The vocabulary of a BPE model: every token but those that no text gives, such as padding of the output head.

        `merged`: the tokens that merges give. Without an entry, an id stands for no bytes.
        """
        without_text = (TokenType.UNUSED, TokenType.UNDEFINED)
        return {
            token: id_
            for id_, (token, type_) in enumerate(zip(self.tokens, self.types, strict=True))
            if type_ not in without_text or len(token) == 1 or token in merged
        }

    @classmethod
    def read(cls, metadata: Mapping[str, Any], *, defaults: Mapping[str, int]) -> Vocabulary:
        """From the metadata of a file; `defaults`: special ids by name where the file has none. Raises GgufError."""
        tokens = [text or f"[EMPTY_{id_}]" for id_, text in enumerate(_required(metadata, "tokenizer.ggml.tokens"))]
        ids = {token: id_ for id_, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            double = next(token for id_, token in enumerate(tokens) if ids[token] != id_)
            raise GgufError(f"tokenizer.ggml.tokens has {double!r} more than once, so ids are ambiguous: {_CONVERT}.")
        types = _types(metadata, len(tokens))

        def named(*names: str) -> int | None:
            """The special token that the first of some keys names."""
            for name in names:
                id_ = metadata.get(f"tokenizer.ggml.{name}_token_id", defaults.get(name))
                if id_ is not None and 0 <= int(id_) < len(tokens):
                    return int(id_)
            return None

        eos, eot, eom = named("eos"), named("eot"), named("eom")
        fill_in = {
            name: named(name) or next((ids[text] for text in texts if text in ids), None)
            for name, texts in _FILL_IN_TEXTS.items()
        }
        ends = {ids[text] for text in _END_TEXTS & ids.keys()}
        # "</s>" also closes struck-out text in HTML: Gemma's token of that name ends nothing.
        if (closing := ids.get("</s>")) is not None and types[closing] is not TokenType.CONTROL and closing != eos:
            ends.remove(closing)
        for id_ in ends | {ids[text] for texts in _FILL_IN_TEXTS.values() for text in texts if text in ids}:
            types[id_] = TokenType.CONTROL
        for text in _ALWAYS_TEXT & ids.keys():
            types[ids[text]] = TokenType.USER_DEFINED
        ends |= {id_ for id_ in (eos, eot, eom, *(fill_in[name] for name in ("fim_pad", "fim_rep", "fim_sep")))
                 if id_ is not None}  # fmt: skip
        found = {tokens[id_] for id_ in ends}
        calls = found & {"<|call|>", "<|calls|>"}
        if "<|end|>" in found and calls and found & {"<|return|>", "<|flush|>"}:  # ends a part of the answer only
            ends.remove(ids["<|end|>"])
            types[ids["<|end|>"]] = TokenType.USER_DEFINED
        return cls(
            tokens,
            types,
            named("bos"),
            eos,
            named("unknown"),
            named("padding"),
            sorted(ends, key=lambda id_: (id_ != eos, id_)),
        )


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    try:
        return metadata[key]
    except KeyError:
        raise GgufError(f"The file has no {key}: {_CONVERT}.") from None


def _types(metadata: Mapping[str, Any], num_tokens: int) -> list[TokenType]:
    numbers = metadata.get("tokenizer.ggml.token_type")
    if numbers is None:
        return [TokenType.NORMAL] * num_tokens
    if len(numbers) < num_tokens:
        raise GgufError(f"tokenizer.ggml.token_type has {len(numbers)} entries for {num_tokens} tokens: {_CONVERT}.")
    known = {int(one): one for one in TokenType}
    return [known.get(int(number), TokenType.UNDEFINED) for number in numbers[:num_tokens]]
