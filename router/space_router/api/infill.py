"""Infill: a prompt with a suffix, between which the model generates."""

from dataclasses import dataclass

from space_router.api.plan import Prompt
from space_router.text.fim import FillInTheMiddle
from space_router.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Infill:
    """A tokenised suffix, to be joined to prompts."""

    tokens: FillInTheMiddle
    suffix_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens added to a prompt."""
        return self.tokens.num_tokens + len(self.suffix_ids)

    def joined(self, prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
        """Return the prompt joined with the suffix. A BOS stays first; `echo` still returns only the prompt."""
        ids = list(prompt.ids)
        num_bos = int(bool(ids) and ids[0] == tokenizer.bos_id)
        return Prompt((*ids[:num_bos], *self.tokens.ids(ids[num_bos:], self.suffix_ids)), prompt.text, prompt.param)
