"""An echoed prompt with the log-probabilities of its tokens, whole or as they are computed."""

from collections.abc import Sequence
from dataclasses import replace

from space_router.api.openai.logprobs import CompletionLogprobs
from space_router.api.plan import Prompt
from space_router.engine.request.request import TokenLogprobs
from space_router.text.detokenizer import Detokenizer
from space_router.text.tokenizer import Tokenizer


class Echo:
    """Where one choice stands in repeating its prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, num_top: int) -> None:
        """`num_top`: alternatives to show of each token."""
        self._prompt = prompt
        self._num_top = num_top
        self._offsets = _offsets(tokenizer, prompt)
        self._num_written = 0  # ids

    def add(self, known: Sequence[TokenLogprobs], lists: CompletionLogprobs) -> str:
        """Write the next tokens, whose log-probabilities are `known`, into the lists; the text up to the one after."""
        start = self._num_written
        first: list[TokenLogprobs | None] = [] if start else [None]  # the first id of a prompt has none
        values = first + [replace(one, top=one.top[: self._num_top]) for one in known]
        self._num_written = end = start + len(values)
        lists.add_prompt(self._prompt.ids[start:end], self._offsets[start:end], values)
        ends_at = self._offsets[end] if end < len(self._offsets) else len(self._prompt.text)
        return self._prompt.text[self._offsets[start] if start else 0 : ends_at] if values else ""


def _offsets(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Where each id begins, in characters of the text as it is echoed."""
    detokenizer = Detokenizer(tokenizer)
    num_written = 0  # characters of special tokens that the client itself has written out
    offsets = []
    for id_ in prompt.ids:
        offset = num_written + detokenizer.push(id_)[1].start
        offsets.append(offset)
        if id_ in tokenizer.special_ids:
            name = tokenizer.token_text(id_)
            num_written += len(name) if prompt.text.startswith(name, offset) else 0
    return offsets
