"""Turn an engine stream into text: detokenise, cut at stop strings, and keep the tokens of each piece."""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from space_router.engine.request.request import Delta, Finish, TokenLogprobs
from space_router.text.reasoning import AnswerReasoning, ThinkingEnd
from space_router.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextRules:
    """How ids are detokenised, and where the text ends."""

    stops: tuple[str, ...] = ()
    keep_stop: bool = False  # include_stop_str_in_output
    min_tokens: int = 0  # stop strings are searched for only after this many tokens
    skip_special_tokens: bool = True
    shown_ids: frozenset[int] = frozenset()  # special tokens that are not skipped
    thinking: AnswerReasoning | None = None  # the reasoning that the text may begin with: no stop string acts in it


class TokenSpan(NamedTuple):
    """The span of one token in the text of its stream: [start, end) in characters.

    A token that is part of a character spans that character; the text comes with the token that completes it.
    start == end: the token has no characters (a skipped special token).
    """

    id: int
    start: int
    end: int


class Detokenizer:
    """Detokenises one stream. Each character is returned once, whole, with the token that completes it."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), rules: TextRules = TextRules()
    ) -> None:  # frozen
        self._bytes_of = tokenizer.bytes_of
        self._skipped = tokenizer.special_ids - rules.shown_ids if rules.skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False  # bytes of an incomplete character are buffered
        self._length = 0  # characters returned so far
        # Strip SentencePiece's space before the first word only if the text begins here.
        self._strip = tokenizer.bytes_of.strips_first_space and all(id_ in tokenizer.special_ids for id_ in prompt_ids)

    def push(self, id_: int) -> tuple[str, TokenSpan]:
        """Return the characters that this token completes, and its span."""
        start = self._length
        whole = "" if id_ in self._skipped else self._bytes_of.text(id_)
        if whole == "" or (whole is not None and not self._pending and not self._strip):
            self._length = end = start + len(whole)
            return whole, TokenSpan(id_, start, end)
        content = self._bytes_of[id_]
        if self._pending:
            head = self._decoder.decode(content[:1])
            # The first byte does not continue the buffered ones: they become a replacement character.
            if len(head) > 1 or (head and self._decoder.getstate()[0]):
                start += 1
            text = head + self._decoder.decode(content[1:])
        else:
            text = self._decoder.decode(content)
        self._pending = bool(self._decoder.getstate()[0])
        if self._strip:
            self._strip = False
            text = text.removeprefix(" ")
        self._length += len(text)
        end = self._length + self._pending
        return text, TokenSpan(id_, start, max(start, end))

    def finish(self) -> str:
        """End the stream; return a replacement character for an incomplete one, else ""."""
        text = self._decoder.decode(b"", final=True)
        self._pending = False
        self._length += len(text)
        return text


class StopMatch(NamedTuple):
    """The first stop string that is completed; the longest if several end at the same character."""

    stop: str
    start: int  # absolute, in characters of the searched text
    end: int


class _Pattern:
    """Knuth-Morris-Pratt matcher for one stop string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of `stop` that the text so far ends with
        self._fallback = [0] * (len(stop) + 1)  # longest proper border of stop[:i]
        border = 0
        for i in range(1, len(stop)):
            while border and stop[i] != stop[border]:
                border = self._fallback[border]
            border += stop[i] == stop[border]
            self._fallback[i + 1] = border

    def advance(self, piece: str) -> int | None:
        """Read a piece of text; return the end of the first match, in characters of the piece, or None."""
        stop, matched = self.stop, self.matched
        position = 0
        while position < len(piece):
            if not matched:
                position = piece.find(stop[0], position)
                if position < 0:
                    break
            character = piece[position]
            while matched and character != stop[matched]:
                matched = self._fallback[matched]
            matched += character == stop[matched]
            position += 1
            if matched == len(stop):
                return position
        self.matched = matched
        return None


class StopStrings:
    """Searches streamed text for stop strings.

    The first `num_certain` characters can no longer become part of a match; later ones can.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._length = 0
        self.num_certain = 0

    def push(self, piece: str) -> StopMatch | None:
        """Read the next piece of text; return the match that ends the stream, or None."""
        found: StopMatch | None = None
        for pattern in self._patterns:
            end = pattern.advance(piece)
            if end is not None:
                match = StopMatch(pattern.stop, self._length + end - len(pattern.stop), self._length + end)
                if found is None or (match.end, match.start) < (found.end, found.start):
                    found = match
        self._length += len(piece)
        held = max((pattern.matched for pattern in self._patterns), default=0)
        self.num_certain = self._length - held if found is None else found.start
        return found


class FinishReason(Enum):
    """Why a text ended, as reported to clients."""

    EOS = "eos"  # an EOS id
    STOP = "stop"  # a stop string or stop id
    LENGTH = "length"  # max_tokens or the window


class TextToken(NamedTuple):
    """A token that is definitely part of the text."""

    span: TokenSpan
    logprobs: TokenLogprobs | None
    step: int = 0  # the stream's step that produced it; 0 is the prefill
    draft: bool = False  # an accepted draft, not the step's own token
    num_predicted: int = 0  # number of `prediction` ids matched with it
    ends_text: bool = False  # the EOS or stop id at the end, which is not shown


class TextDelta(NamedTuple):
    """The text that one step made certain, and the tokens that begin in it."""

    text: str
    tokens: tuple[TextToken, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None  # set in the last delta
    stop_reason: str | int | None = None  # the stop string or stop id that ended it


@dataclass
class TextStatistics:
    """Counts for one text. Tokens after the cut are excluded."""

    num_tokens: int = 0
    num_steps: int = 0  # decode steps
    num_decoded: int = 0  # tokens of decode steps
    num_drafted: int = 0
    num_accepted: int = 0
    num_predicted: int = 0  # number of `prediction` ids matched
    num_reasoning: int = 0  # tokens of the reasoning, with its markers


@dataclass
class TextStream:
    """Converts engine Deltas to TextDeltas. A stop string ends the text; the caller must close the engine's stream."""

    tokenizer: Tokenizer
    prompt_ids: Sequence[int]
    rules: TextRules
    statistics: TextStatistics = field(default_factory=TextStatistics)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, self.prompt_ids, self.rules)
        self._search = StopStrings(self.rules.stops)
        self._thinking = None if self.rules.thinking is None else ThinkingEnd(self.rules.thinking)
        self._undecided: list[TextToken] = []  # given out before it was known whether they are reasoning
        self._searched_from = 0  # characters before the search began
        self._text = ""  # text not yet given out; starts at character self._given
        self._given = 0
        self._tokens: deque[TextToken] = deque()  # tokens not yet given out
        self._num_seen = 0
        self._num_stepped = 0  # deltas with tokens
        self._uncounted: deque[Delta] = deque()  # deltas with tokens not yet given out
        self._num_uncounted = 0  # tokens of these deltas already given out

    def push(self, delta: Delta) -> TextDelta | None:
        """Return what one delta makes certain, or None. A result with `finish` is the last one."""
        match = self._take(delta)
        if match is not None:
            made = self._cut(match, delta.prompt_logprobs)
        elif delta.finish is not None:
            made = self._end(delta)
        else:
            # Later text cannot remove what is given now.
            certain = self._searched_from + self._search.num_certain if self.rules.stops else self._length
            made = self._give(certain, delta.prompt_logprobs)
        self._count(delta, made)
        return made if made.text or made.tokens or made.prompt_logprobs or made.finish else None

    def _take(self, delta: Delta) -> StopMatch | None:
        """Detokenise and search the tokens of a delta, up to the match if there is one."""
        shown = len(delta.tokens)
        if delta.finish in (Finish.EOS, Finish.STOP_ID) and not self.rules.keep_stop:
            shown -= 1  # the EOS or stop id has no text
        for i, id_ in enumerate(delta.tokens):
            if i < shown:
                piece, span = self._detokenizer.push(id_)
            else:
                piece, span = "", TokenSpan(id_, self._length, self._length)
            logprobs = delta.logprobs[i] if delta.logprobs else None
            num_predicted = delta.predicted[i] if delta.predicted else 0
            token = TextToken(span, logprobs, self._num_stepped, i < delta.accepted, num_predicted, i >= shown)
            self._tokens.append(token)
            if match := self._grow(piece):
                return match
        self._num_stepped += bool(delta.tokens)
        if delta.finish is not None:
            return self._grow(self._detokenizer.finish())
        return None

    def _grow(self, piece: str) -> StopMatch | None:
        self._text += piece
        self._num_seen += 1
        if self._thinking is not None and self._thinking.position is None:
            before = self._length - len(piece)
            num_open = self._thinking.num_open
            self._thinking.push(piece)
            end = self._thinking.position
            if end is None:
                self._searched_from = self._length - self._thinking.num_open
                return None
            end = max(end, before - num_open)
            piece = self._text[end - self._given :]
            self._searched_from = end
        if not self.rules.stops:
            return None
        if self._num_seen <= self.rules.min_tokens:
            self._searched_from = self._length
            return None
        return self._search.push(piece)

    def _count_reasoning(self, thinking: ThinkingEnd, tokens: Sequence[TextToken]) -> None:
        if thinking.position is None and thinking.num_open:
            self._undecided += tokens
            return
        found = [*self._undecided, *tokens]
        self._undecided.clear()
        self.statistics.num_reasoning += sum(map(self.is_reasoning, found))

    def is_reasoning(self, token: TextToken) -> bool:
        """Whether a token that was given out is part of the reasoning or its markers."""
        if self._thinking is None:
            return False
        end = self._thinking.position
        return not self._thinking.num_open if end is None else token.span.start < end

    @property
    def _length(self) -> int:
        return self._given + len(self._text)

    def _cut(self, match: StopMatch, prompt_logprobs: tuple[TokenLogprobs, ...]) -> TextDelta:
        place = self._searched_from + (match.end if self.rules.keep_stop else match.start)
        made = self._give(place, prompt_logprobs)
        self._tokens.clear()
        return TextDelta(made.text, made.tokens, made.prompt_logprobs, FinishReason.STOP, match.stop)

    def _end(self, delta: Delta) -> TextDelta:
        made = self._give(self._length, delta.prompt_logprobs)
        tokens = made.tokens + tuple(self._tokens)
        match delta.finish:
            case Finish.EOS:
                reason, stop = FinishReason.EOS, None
            case Finish.STOP_ID:
                reason, stop = FinishReason.STOP, delta.tokens[-1]
            case _:
                reason, stop = FinishReason.LENGTH, None
        return TextDelta(made.text, tokens, made.prompt_logprobs, reason, stop)

    def _give(self, end: int, prompt_logprobs: tuple[TokenLogprobs, ...]) -> TextDelta:
        """Return the text before `end` and the tokens that begin in it, and remove both from the buffer."""
        text = self._text[: end - self._given]
        self._text = self._text[len(text) :]
        self._given += len(text)
        waiting = self._tokens
        if waiting and waiting[-1].span.start < end:
            tokens = tuple(waiting)
            waiting.clear()
            return TextDelta(text, tokens, prompt_logprobs)
        given = []
        while waiting and (waiting[0].span.start == waiting[0].span.end or waiting[0].span.start < end):
            given.append(waiting.popleft())
        return TextDelta(text, tuple(given), prompt_logprobs)

    def _count(self, delta: Delta, made: TextDelta) -> None:
        count = self.statistics
        count.num_drafted += delta.drafted
        count.num_steps += delta.decoded
        count.num_tokens += len(made.tokens)
        for token in made.tokens:
            count.num_predicted += token.num_predicted
        if self._thinking is not None:
            self._count_reasoning(self._thinking, made.tokens)
        waiting = self._uncounted
        waiting.append(delta)
        self._num_uncounted += len(made.tokens)
        while waiting and (len(waiting[0].tokens) <= self._num_uncounted or made.finish is not None):
            step = waiting.popleft()
            kept = min(self._num_uncounted, len(step.tokens))
            self._num_uncounted -= kept
            if step.decoded:
                count.num_decoded += kept
                count.num_accepted += min(step.accepted, kept)
