"""An echoed prompt with its tokens' log-probabilities, whole or streamed."""

from collections.abc import Sequence
from dataclasses import replace

from space_router.api.openai.logprobs import CompletionLogprobs
from space_router.api.plan import Prompt
from space_router.engine.request.request import TokenLogprobs
from space_router.text.detokenizer import Detokenizer
from space_router.text.tokenizer import Tokenizer


class Echo:
    """Echoes the prompt of one choice incrementally."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, num_top: int) -> None:
        """`num_top`: alternatives to return for each token."""
        self._prompt = prompt
        self._num_top = num_top
        self._offsets = _offsets(tokenizer, prompt)
        self._num_written = 0  # ids echoed so far

    def add(self, known: Sequence[TokenLogprobs], lists: CompletionLogprobs) -> str:
        """Add the next tokens, with the log-probabilities `known`, to the lists; return their text."""
        start = self._num_written
        first: list[TokenLogprobs | None] = [] if start else [None]  # the first id has no log-probability
        values = first + [replace(one, top=one.top[: self._num_top]) for one in known]
        self._num_written = end = start + len(values)
        lists.add_prompt(self._prompt.ids[start:end], self._offsets[start:end], values)
        ends_at = self._offsets[end] if end < len(self._offsets) else len(self._prompt.text)
        return self._prompt.text[self._offsets[start] if start else 0 : ends_at] if values else ""


def _offsets(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Return the start of each id, in characters of the echoed text."""
    detokenizer = Detokenizer(tokenizer)
    num_written = 0  # characters of special tokens that are spelled out in the prompt text
    offsets = []
    for id_ in prompt.ids:
        offset = num_written + detokenizer.push(id_)[1].start
        offsets.append(offset)
        if id_ in tokenizer.special_ids:
            name = tokenizer.token_text(id_)
            num_written += len(name) if prompt.text.startswith(name, offset) else 0
    return offsets
