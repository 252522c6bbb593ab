"""A prompt with a suffix: the model is to write what stands between them."""

from dataclasses import dataclass

from space_router.api.plan import Prompt
from space_router.text.fim import FillInTheMiddle
from space_router.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Infill:
    """A suffix, ready to be joined to prompts."""

    tokens: FillInTheMiddle
    suffix_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """How many a prompt gets besides its own."""
        return self.tokens.num_tokens + len(self.suffix_ids)

    def joined(self, prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
        """The prompt as the model reads it; `echo` still repeats the prompt alone. A BOS stays in front."""
        ids = list(prompt.ids)
        num_bos = int(bool(ids) and ids[0] == tokenizer.bos_id)
        return Prompt((*ids[:num_bos], *self.tokens.ids(ids[num_bos:], self.suffix_ids)), prompt.text, prompt.param)
