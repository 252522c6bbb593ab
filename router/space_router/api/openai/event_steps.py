"""Step details in stream events, with `stream_options.include_steps`."""

from typing import Any

from space_router.api.generation import ChoiceState
from space_router.text.text_stream import TextDelta


class EventSteps:
    """Builds the `spaceserve` object of each event of one response.

    {"tokens": [{"text": " cat", "step": 3, "draft": true}, ...], "verified": 5}

    The texts join to the event's text. A character belongs to the last of its tokens; remaining text of a token in an
    earlier event goes with the next token, or is in an event without tokens. `step` 0 is the prefill; `draft` marks an
    accepted draft; `verified` is the number of drafts verified since the choice's previous event.
    """

    def __init__(self) -> None:
        self._given: dict[int, int] = {}  # characters sent for each choice
        self._drafted: dict[int, int] = {}  # drafts counted for each choice

    def of(self, progress: ChoiceState, delta: TextDelta) -> dict[str, Any]:
        index, drafted = progress.choice.index, progress.statistics.num_drafted
        offset = self._given.get(index, 0)
        verified = drafted - self._drafted.get(index, 0)
        self._given[index], self._drafted[index] = offset + len(delta.text), drafted
        tokens: list[dict[str, Any]] = []
        begin = 0
        for place, token in enumerate(delta.tokens, start=1):
            last = place == len(delta.tokens)
            end = len(delta.text) if last else max(begin, delta.tokens[place].span.start - offset)
            tokens.append({"text": delta.text[begin:end], "step": token.step, "draft": token.draft})
            begin = min(end, len(delta.text))
        return {"tokens": tokens, "verified": verified}
