"""What an event of a stream says about steps, with `stream_options.include_steps`."""

from typing import Any

from space_router.api.generation import ChoiceState
from space_router.text.text_stream import TextDelta


class EventSteps:
    """The `spaceserve` object of each event of one answer.

    {"tokens": [{"text": " cat", "step": 3, "draft": true}, ...], "verified": 5}

    The texts join to the event's own. A character comes with the last of its tokens; text that is left of a token of an
    event before goes with the next one, or stands in an event without tokens. `step` 0 is the prefill; `draft` says
    that the token had been drafted and came true; `verified` counts the drafts tried since the choice's event before.
    """

    def __init__(self) -> None:
        self._given: dict[int, int] = {}  # characters of each choice before this event
        self._drafted: dict[int, int] = {}  # drafts of each choice before this event

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
