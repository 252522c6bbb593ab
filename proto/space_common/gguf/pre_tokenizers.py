r"""The pre-tokenizers that `tokenizer.ggml.pre` names: how text is split into words before byte-level BPE.

Each name stands for regular expressions that are applied one after another, each to every word that the one before
made: matches and the text between them become separate words. They are llama.cpp's (src/llama-vocab.cpp), written for
the `tokenizers` library, whose engine is that of the original tokenizers. llama.cpp's engine knows neither `(?i:…)` nor
possessive quantifiers nor upper and lower case beyond ASCII. Where it simplifies an original that its source quotes,
this module has the original (`_LLAMA3`, `_QWEN2`, `_TEKKEN`, `_GPT4O`, `_BAILING`, …), as models were trained.
"""

from __future__ import annotations

from dataclasses import dataclass

from space_common.gguf.find import GgufError


@dataclass(frozen=True)
class PreTokenizer:
    """Regular expressions in the order of use, and other settings that the name implies."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """If True, a word that is a token is not split, whatever the merges are."""
    add_bos: bool = False
    """Whether prompts begin with BOS if the file does not say so."""


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
            "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4", "mpt", "olmo", "jais",
            "trillion", "granite-docling",
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
            "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2",
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
}  # fmt: skip


def named(name: str) -> PreTokenizer:
    """Return the pre-tokenizer with this name. Raises GgufError if it is unknown."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise GgufError(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer that is not known here, so that texts would be cut into "
            f"the wrong tokens; known are {', '.join(PRE_TOKENIZERS)}. Serve the original checkpoint, which has a "
            "tokenizer.json."
        ) from None
