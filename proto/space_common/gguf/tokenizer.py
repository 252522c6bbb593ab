r"""The pre-tokenizers that `tokenizer.ggml.pre` names: how text is split into words before byte-level BPE.

Each name stands for regular expressions that are applied one after another, each to every word that the one before
made: matches and the text between them become separate words. They are llama.cpp's (src/llama-vocab.cpp), written for
the `tokenizers` library, whose engine is that of the original tokenizers. llama.cpp's engine knows neither `(?i:…)` nor
possessive quantifiers nor upper and lower case beyond ASCII. Where it simplifies an original that its source quotes,
this module has the original (`_LLAMA3`, `_QWEN2`, `_TEKKEN`, `_GPT4O`, `_BAILING`, …), as models were trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from space_common.gguf.find import GgufError


@dataclass(frozen=True)
class PreTokenizer:
    """Regular expressions in the order of use, and other settings that the name implies."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # if True, a word that is a token is not split, whatever the merges are
    add_bos: bool = False  # whether prompts begin with BOS if the file does not say so


_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_LLAMA3 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_JAIS2 = _LLAMA3.removesuffix(_SPACES) + (
    r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|"
    r"\s{1,2}(?!\S)|\s{1}"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    rf"\s*[\r\n]+|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|" + _SPACES
_SEED_CODER = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}"
)
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}"
)
_DEEPSEEK_LETTERS = (
    r"\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_DEEPSEEK_HAN = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    rf"\s*[\r\n]+|{_SPACES}",
)
_DIGIT = r"\p{N}"
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_FALCON_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"

_GPT2_WORDS = PreTokenizer((_GPT2,))
_GPT2_DIGITS = PreTokenizer((_DIGIT, _GPT2))
_LLAMA3_WORDS = PreTokenizer((_LLAMA3,))
_LLAMA3_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_WORDS = PreTokenizer((_QWEN2,))
_GPT4O_WORDS = PreTokenizer((_GPT4O,))
_DEEPSEEK3_WORDS = PreTokenizer(_DEEPSEEK3)
_BLOOM_WORDS = PreTokenizer((_BLOOM,))
_BAILING_WORDS = PreTokenizer((_BAILING,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((_FALCON_PUNCTUATION.replace("`", ""), _GPT2, r"\p{N}+", _THREE_DIGITS)),
    **dict.fromkeys(
        (
            "gpt-2",
            "phi-2",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ),
        _GPT2_WORDS,
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _GPT2_DIGITS
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3_BPE
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LLAMA3_WORDS),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True)),
    "jais-2": PreTokenizer((_JAIS2,)),
    **dict.fromkeys(
        (
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ),
        _QWEN2_WORDS,
    ),
    "qwen35": PreTokenizer((_QWEN35,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")), ignore_merges=True),
    "ufakzeka": PreTokenizer((_QWEN2.removeprefix(_CONTRACTION + "|"),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING_WORDS),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O_WORDS),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _DEEPSEEK_HAN, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, _DIGIT)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3_WORDS),
    "falcon": PreTokenizer((_FALCON_PUNCTUATION, _GPT2, _THREE_DIGITS)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _BLOOM_WORDS),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
}


def pre_tokenizer_named(name: str) -> PreTokenizer:
    """Return the pre-tokenizer with this name. Raises GgufError if it is unknown."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise GgufError(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer that is not known here, so that texts would be cut into "
            f"the wrong tokens; known are {', '.join(PRE_TOKENIZERS)}. Serve the original checkpoint, which has a "
            "tokenizer.json."
        ) from None


_CONVERT = "convert the original checkpoint again with a current convert_hf_to_gguf.py, or serve it as it is"


Pair = tuple[str, str]  # two tokens that a merge joins


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
_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    }
)
_FILL_IN_TEXTS = {
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_KNOWN_TEXTS = _END_TEXTS.union(*_FILL_IN_TEXTS.values())
# gpt-oss writes these between the parts of an answer. They stay text, so that the parts can be separated.
_ALWAYS_TEXT = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})


@dataclass(frozen=True)
class GgufVocabulary:
    """Tokens by id, their types, and the special ids that the file names or llama.cpp recognises by text."""

    ids: Mapping[str, int]  # token -> id, in the order of the ids
    merged: Set[str]  # tokens that merges produce
    types: Sequence[TokenType]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    ends: Sequence[int]  # EOS ids: the file's EOS first, then the others, ascending

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


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _byte_level_sections(
    vocabulary: GgufVocabulary, merges: Sequence[Pair], pre_tokenizer: PreTokenizer
) -> dict[str, Any]:
    """Return normalizer, pre_tokenizer, decoder and model of tokenizer.json."""
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre_tokenizer.patterns
    ]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, _BYTES]},
        "decoder": {**_BYTES, "use_regex": True},
        "model": _bpe(vocabulary, merges, unknown=None, falls_back=False, ignore_merges=pre_tokenizer.ignore_merges),
    }


def _byte_level_merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[Pair]:
    """Return pairs of tokens in the order of their ranks. Raises GgufError."""
    try:
        lines = metadata["tokenizer.ggml.merges"]
    except KeyError:
        raise GgufError(
            "The file has no tokenizer.ggml.merges, without which byte-level BPE has no order. Serve the original "
            "checkpoint, or convert it again with a current convert_hf_to_gguf.py."
        ) from None
    pairs: dict[Pair, None] = {}  # of two equal lines the first counts
    for line in lines:
        cut = line.find(" ", 1)
        pair = (line[:cut], line[cut + 1 :])
        if cut < 0 or not ids.keys() >= {*pair, "".join(pair)}:
            raise GgufError(
                f"tokenizer.ggml.merges has {line!r}, whose parts or whole are no tokens of the file. Serve the "
                "original checkpoint, or convert it again with a current convert_hf_to_gguf.py."
            )
        pairs[pair] = None
    return list(pairs)


_SPACE = "▁"


def _sentencepiece_sections(vocabulary: GgufVocabulary, merges: Sequence[Pair], *, prefixed: bool) -> dict[str, Any]:
    """Return normalizer, pre_tokenizer, decoder and model of tokenizer.json.

    `prefixed`: insert a space before the first word, and before text that follows a special token.
    """
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if prefixed else replace,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, merges, unknown=vocabulary.unknown, falls_back=True, ignore_merges=False),
    }


def _sentencepiece_merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[Pair]:
    """Return the pairs whose joint text is a token, highest score first, then lowest id. Raises GgufError.

    SentencePiece merges the two neighbours whose joint text is the token with the highest score; of equals, the
    leftmost. The `tokenizers` library merges by a ranked list of pairs instead. Of one token's pairs the one with the
    longest left part comes first. Where two of them overlap in a text ("ab", "a", "ba" for the token "aba"), the left
    one has the longer left part, and SentencePiece takes the left one.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(ids):
        raise GgufError(
            f"tokenizer.ggml.scores has {0 if scores is None else len(scores)} entries for {len(ids)} tokens; "
            "SentencePiece merges by score. Convert the original checkpoint again with a current "
            "convert_hf_to_gguf.py, or serve it as it is."
        )
    return [
        (left, right)
        for token in sorted(ids, key=lambda token: (-scores[ids[token]], ids[token]))
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in ids and (right := token[cut:]) in ids
    ]


_TEMPLATE = "tokenizer.chat_template"
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # ids if the file names none


def _bpe(
    vocabulary: GgufVocabulary, merges: Sequence[Pair], *, unknown: int | None, falls_back: bool, ignore_merges: bool
) -> dict[str, Any]:
    """Return the model of tokenizer.json. `falls_back`: unknown text becomes the tokens of its bytes."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": falls_back,
        "byte_fallback": falls_back,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.entries(),
        "merges": merges,
    }


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return tokenizer.json, tokenizer_config.json, generation_config.json and any chat templates.

    `metadata`: plain values by the file's keys. Returns text by file name; a named template's file is in
    a folder, `additional_chat_templates/NAME.jinja`. Raises GgufError for a tokenizer that cannot be expressed.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        pre_tokenizer = pre_tokenizer_named(str(metadata.get("tokenizer.ggml.pre") or "default"))
        ids = read_ids(metadata)
        merges = _byte_level_merges(metadata, ids)
        vocabulary = GgufVocabulary.read(metadata, ids, _results(merges), defaults={})
        sections = _byte_level_sections(vocabulary, merges, pre_tokenizer)
        adds_bos = pre_tokenizer.add_bos
    elif model == "llama":
        ids = read_ids(metadata)
        merges = _sentencepiece_merges(metadata, ids)
        vocabulary = GgufVocabulary.read(metadata, ids, _results(merges), defaults=_SENTENCEPIECE_IDS)
        prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        sections = _sentencepiece_sections(vocabulary, merges, prefixed=prefixed)
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
