"""Fill-in-the-middle prompts, for tokenizers that have tokens for them.

Sources: Bavarian et al., arXiv 2207.14255 (both orders); Code Llama, arXiv 2308.12950 §3.2 (a suffix begins without the
space that SentencePiece puts before a first word, and `<EOT>` ends the middle); the model cards for the names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from space_router.text.tokenizer import Tokenizer


class _Names(NamedTuple):
    """Names of one model family's fill-in-the-middle tokens."""

    prefix: str
    suffix: str
    middle: str | None  # None: the middle follows the prefix directly
    suffix_first: bool = False
    ends: tuple[str, ...] = ()  # tokens besides EOS that end the middle


_FAMILIES = (
    # Qwen, CodeGemma, Granite 3.3 and later
    _Names(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, StableCode, Granite, Yi-Coder
    _Names(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<|endoftext|>", "<fim_pad>", "<repo_name>", "<file_sep>")
    ),
    _Names("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>",)),  # SantaCoder
    _Names("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    _Names("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # Code Llama
    _Names("<PRE>", "<SUF>", "<MID>", ends=("<EOT>",)),
    _Names("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>",)),  # DeepSeek
    _Names("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ends=("<|endoftext|>",)),  # GLM-4
    _Names("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)


@dataclass(frozen=True)
class FillInTheMiddle:
    """The fill-in-the-middle tokens of one tokenizer, and their order.

    prefix first:  <prefix> the prefix <suffix> the suffix <middle>
    suffix first:  <suffix> the suffix <prefix> the prefix <middle>
    """

    prefix_id: int
    suffix_id: int
    middle_id: int | None
    suffix_first: bool
    end_ids: tuple[int, ...]  # end the middle, as EOS does

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "FillInTheMiddle | None":
        """Find the tokens of this tokenizer; None if it has none."""
        id_of = tokenizer.token_to_id
        for names in _FAMILIES:
            prefix, suffix = id_of(names.prefix), id_of(names.suffix)
            middle = None if names.middle is None else id_of(names.middle)
            if prefix is not None and suffix is not None and (middle is not None or names.middle is None):
                ends = tuple(id_ for name in names.ends if (id_ := id_of(name)) is not None)
                return cls(prefix, suffix, middle, names.suffix_first, ends)
        return None

    @property
    def num_tokens(self) -> int:
        """Number of special tokens that are added to a prompt."""
        return 2 if self.middle_id is None else 3

    def ids(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Return the prompt ids; the model continues them with the middle."""
        first, second = [self.prefix_id, *prefix], [self.suffix_id, *suffix]
        if self.suffix_first:
            first, second = second, first
        return first + second + ([] if self.middle_id is None else [self.middle_id])
