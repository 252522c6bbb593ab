"""Reasoning in text: how model families mark it, where it ends, and the grammars of what stands behind it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from space_router.text.harmony import CHANNEL, END, MARKERS, MESSAGE, START, harmony
from space_router.text.tokenizer import SpecialTokens
from space_router.text.tool_calls import CallCollector, Cursor, Form, Reading, Tools, content_until, terminal
from space_router.text.tool_parsers import kimi_k3

SPACE = " \t\r\n"


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model family writes its reasoning, at the start of an answer."""

    name: str
    starts: tuple[str, ...]  # what it begins with; the prompt may end with it instead
    ends: tuple[str, ...]  # what it ends with
    wrap: tuple[str, str] | None = None  # what may stand around the answer behind it
    tokens: tuple[str, ...] = ()  # special tokens that the markers above are made of
    channels: bool = False  # harmony: reasoning, answers and calls are messages on channels, which one form reads

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which the parser needs to see."""
        return MARKERS if self.channels else (*self.starts, *self.ends, *self.tokens)


@dataclass(frozen=True)
class AnswerReasoning:
    """The reasoning of one answer. `inside`: the prompt ends in it, so that the answer begins with it."""

    format: ReasoningFormat
    inside: bool


_THINK = ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",), wrap=("<response>", "</response>"))
_GRANITE = ReasoningFormat(
    "granite",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
_MISTRAL = ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",))
_SEED = ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",))
_GEMMA = ReasoningFormat("gemma4", ("<|channel>thought",), ("<channel|>",))
_COHERE = ReasoningFormat("cohere_command3", ("<|START_THINKING|>",), ("<|END_THINKING|>",))
_MINIMAX_3 = ReasoningFormat("minimax_m3", ("<mm:think>",), ("</mm:think>",))
_HY_3 = ReasoningFormat("hy_v3", ("<think:opensource>", "<think>"), ("</think:opensource>", "</think>"))
_KIMI_3 = ReasoningFormat(
    "kimi_k3",
    (kimi_k3.opening("think"),),
    (kimi_k3.closing("think"),),
    wrap=(kimi_k3.opening("response"), kimi_k3.closing("response")),
    tokens=kimi_k3.MARKERS,
)
_HARMONY = ReasoningFormat(
    "openai_gptoss",
    ("<|channel|>analysis<|message|>",),
    ("<|channel|>final<|message|>", "<|channel|>commentary", "<|start|>assistant to="),
    channels=True,
)

_SAME_AS_THINK = ("deepseek_v3", "glm45", "hunyuan_a13b", "kimi_k2", "minimax_m2", "nemotron_v3", "qwen3", "step3")

FORMATS: Mapping[str, ReasoningFormat] = {
    **{one.name: one for one in (_THINK, _GRANITE, _MISTRAL, _SEED, _GEMMA, _HARMONY, _COHERE, _MINIMAX_3, _HY_3)},
    _KIMI_3.name: _KIMI_3,
    **dict.fromkeys(_SAME_AS_THINK, _THINK),
}
"""Formats by their `--reasoning-parser` name, which is vLLM's."""


def recognised(template: str) -> ReasoningFormat | None:
    """Return the format that a chat template shows, or None if it shows none."""
    for known, sign in (
        (_HARMONY, "<|channel|>analysis"),
        (_GEMMA, "<|channel>thought"),
        (_SEED, "</seed:think>"),
        (_MISTRAL, "[/THINK]"),
        (_GRANITE, "Here is my thought process:"),
        (_COHERE, "<|END_THINKING|>"),
        (_MINIMAX_3, "</mm:think>"),
        (_HY_3, "</think{}>"),
        (_KIMI_3, "open_tag('think'"),
        (_THINK, "</think>"),
    ):
        if sign in template:
            return known
    return None


def at_end(format_: ReasoningFormat, prompt: str) -> AnswerReasoning | None:
    """Return how an answer to this prompt thinks; None: the prompt ends with reasoning that is closed."""
    words = prompt.rstrip()
    if words.endswith(format_.ends) and not format_.channels:
        return None
    if format_.tokens and format_.wrap is not None and words.endswith(format_.wrap[0]):
        return None
    return AnswerReasoning(format_, inside=words.endswith(format_.starts))


class ThinkingEnd:
    """Finds where the reasoning of a streamed text ends.

    `position`: the first character behind it, its end marker included; 0 if there is none; None: not known yet.
    `num_open`: characters at the end of the text that are reasoning only if a start marker follows.
    """

    def __init__(self, thinking: AnswerReasoning) -> None:
        self._format = thinking.format
        self._inside = thinking.inside
        self._length = 0
        self._tail = ""  # before the start: all of the text; inside: what an end marker may begin with
        self.position: int | None = None

    @property
    def num_open(self) -> int:
        return 0 if self._inside or self.position is not None else self._length

    def push(self, piece: str) -> None:
        """Read the next piece of text."""
        if self.position is not None:
            return
        self._length += len(piece)
        self._tail += piece
        if not self._inside:
            words = self._tail.lstrip()
            if any(words.startswith(start) for start in self._format.starts):
                self._inside = True
            elif not any(start.startswith(words) for start in self._format.starts):
                self.position = 0
                return
        if self._inside:
            found = [(at, len(end)) for end in self._format.ends if (at := self._tail.find(end)) >= 0]
            if found:
                at, length = min(found)
                self.position = self._length - len(self._tail) + at + length
            self._tail = self._tail[-max(map(len, self._format.ends)) + 1 :]


def form_with(thinking: AnswerReasoning, answer: Form | None) -> Form:
    """Return the parser of an answer that may begin with reasoning; `answer` parses what follows, None: no calls."""
    known = thinking.format

    def form(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
        if known.channels:
            yield from harmony(cursor, output, tools)
            return
        inside = output.is_thinking = thinking.inside
        cursor.keep()
        yield from cursor.skip()
        has_start = yield from _takes_any(cursor, known.starts)
        inside = inside or has_start
        if not inside and not (
            yield from _takes_any(cursor, known.ends)
        ):  # of none that has begun, as some models write
            cursor.back()
        cursor.let_go()
        if inside:
            yield from cursor.skip()
            output.is_thinking = True
            output.is_thinking = not (yield from content_until(cursor, output, known.ends, give=output.thought))
            yield from _takes_any(cursor, known.ends)
            yield from cursor.skip()
        if inside and known.wrap is not None and (yield from cursor.takes(known.wrap[0])):
            yield from content_until(cursor, output, (known.wrap[1],))
            yield from cursor.takes(known.wrap[1])
            yield from cursor.skip()
        yield from (plain if answer is None else answer)(cursor, output, tools)

    return form


def plain(cursor: Cursor, output: CallCollector, tools: Tools) -> Reading[None]:
    """A text without calls."""
    while (yield from cursor.peek()):
        output.content(cursor.text[cursor.at :])
        cursor.at = len(cursor.text)


def _takes_any(cursor: Cursor, words: tuple[str, ...]) -> Reading[bool]:
    for word in words:
        if (yield from cursor.takes(word)):
            return True
    return False


@dataclass(frozen=True)
class ThinkingRules:
    """What a grammar allows before an answer."""

    thinking: AnswerReasoning
    ids: Mapping[str, int]  # of the markers that are tokens
    budget: int | None = None  # tokens between the markers, after which the end is forced
    vocab_size: int = 0  # with a budget

    @classmethod
    def of(
        cls, thinking: AnswerReasoning, token_to_id: Callable[[str], int | None], budget: int | None, vocab_size: int
    ) -> ThinkingRules:
        found = {text: token_to_id(text) for text in thinking.format.markers}
        return cls(thinking, {text: id_ for text, id_ in found.items() if id_ is not None}, budget, vocab_size)

    @property
    def can_count(self) -> bool:
        """Whether the reasoning can be ended after a number of tokens: its markers are tokens."""
        known = self.thinking.format
        if known.channels:
            return all(text in self.ids for text in (CHANNEL, MESSAGE, START, END))
        return self._token_of(known.starts[0]) is not None and self._token_of(known.ends[0]) is not None

    @property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self.ids)

    def _token_of(self, marker: str) -> int | None:
        """Return the special token that a marker begins with, or None."""
        return next(self._special.parts(marker), ("", None))[1]

    def before(self, answer: str | None) -> str:
        """Return the grammar of reasoning and then an answer. `answer`: the grammar of one; None: any."""
        rules = ["GAP: /[ \\t\\r\\n]{0,8}/"]
        if answer is not None:
            rules.append("answer: %lark {\n" + answer + "\n}")
        rules += self._channels(answer) if self.thinking.format.channels else self._tags(answer)
        return "\n".join(rules)

    def _thought(self) -> list[str]:
        """Return the rule `thought`: text without an end of reasoning, or `budget` tokens at most that are none."""
        known = self.thinking.format
        if self.budget is None:
            ends = "|".join(map(_escaped, known.ends))
            return ["thought: THOUGHT", f"THOUGHT: /(?s:.*)/ & ~/(?s:.*)({ends})(?s:.*)/"]
        if self.budget == 0:
            return ['thought: ""']
        end_id = self.ids[END] if known.channels else self._token_of(known.ends[0])
        assert end_id is not None  # it can count
        return [f"thought: token{{0,{self.budget}}}", f"token: {self._without(end_id)}"]

    def _tags(self, answer: str | None) -> list[str]:
        known = self.thinking.format
        gap = "" if answer is None else " GAP"
        if self._token_of(known.ends[0]) is not None:
            rules = [*self._thought(), f"end: {terminal(known.ends[0], self._special)}{gap}"]
            thought = "thought end"
        else:
            rules = [f"thought[lazy]: /(?s:.*)({'|'.join(map(_escaped, known.ends))})/"]
            thought = "thought" + gap
        behind = "<[*]>*" if answer is None else "answer"
        if answer is not None and known.tokens and known.wrap is not None:
            opening, closing = (terminal(text, self._special) for text in known.wrap)
            behind = " ".join((opening, behind) if closing in answer else (opening, behind, closing))  # of calls
        if self.thinking.inside:
            return [*rules, f"start: {thought} {behind}"]
        start_id = self._token_of(known.starts[0])
        if answer is None and start_id is not None:
            start = terminal(known.starts[0], self._special)
            return [*rules, f"start: other* ({start} {thought} {behind})?", f"other: {self._without(start_id)}"]
        start = f"/({'|'.join(map(_escaped, known.starts))})/"
        if start_id is not None:
            start = terminal(known.starts[0], self._special)
        return [*rules, f"start: GAP {start} {thought} {behind} | {behind}"]

    def _channels(self, answer: str | None) -> list[str]:
        channel, message, start, end = (
            f"<[{self.ids[text]}]>" if text in self.ids else f'"{text}"' for text in (CHANNEL, MESSAGE, START, END)
        )
        analysis = f'analysis: {channel} "analysis" {message} thought {end} {start} "assistant"'
        rules = [*self._thought(), analysis]
        if answer is None:
            return [*rules, f'start: analysis? {channel} ("final" | "commentary") <[*]>*']
        if CHANNEL in answer or (CHANNEL in self.ids and f"<[{self.ids[CHANNEL]}]>" in answer):  # of calls
            return [*rules, "start: analysis? answer"]
        return [*rules, f'start: analysis? {channel} "final" {message} answer']

    def _without(self, id_: int) -> str:
        """Return what matches any token but one."""
        ranges = [(0, id_ - 1), (id_ + 1, self.vocab_size - 1)]
        return f"<[{','.join(f'{first}-{last}' for first, last in ranges if first <= last)}]>"


def _escaped(text: str) -> str:
    """Return a text as a regular expression between slashes."""
    return re.sub(r"([][(){}.*+?^$|/\\])", r"\\\1", text)
