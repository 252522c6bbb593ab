"""Keep the control tokens that a chat template writes apart from message text that spells them.

The template renders the messages twice: as they are, and with one character of each spelled control token exchanged.
Where both texts are the same but for these characters, the control tokens of the second are those of the template.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from space_router.errors import InvalidRequest
from space_router.text.text_pool import leave_event_loop
from space_router.text.tokenizer import Tokenizer

MAX_RENDERINGS = 64
"""Most times that one conversation is rendered, to find the places that its template reacts to."""

_MOST_AT_ONCE = 2  # renderings for which the event loop is held

MAX_SPELLED = 262_144
"""Most characters of a conversation that spells control tokens: it is tokenised as a whole."""

T = TypeVar("T")
Render = Callable[[Any], str]


@dataclass(frozen=True)
class RenderedPrompt:
    """A rendered conversation. `control`: the places [start, end) of the template's own control tokens, in characters;
    None: every control token in the text is one.
    """

    text: str
    control: tuple[tuple[int, int], ...] | None = None


def render_as_data(render: Render, data: T, tokenizer: Tokenizer, control_ids: frozenset[int]) -> RenderedPrompt:
    """Render `data` (messages and tools, as plain JSON values) with the control tokens that its strings spell as text.

    Raises InvalidRequest as `render` does, and if the template inspects too many of these places.
    """
    spelled = _Spelled(tokenizer, control_ids)
    spelled.count(data)
    text = render(data)
    if not spelled.num_places:
        return RenderedPrompt(text)
    if len(text) > MAX_SPELLED:
        raise InvalidRequest(
            f"The conversation spells control tokens and has {len(text)} characters; with such texts at most "
            f"{MAX_SPELLED} are taken. Leave them out.",
            param="messages",
        )
    marks = _marks(text, spelled)
    marked = text
    chosen: frozenset[int] = frozenset()
    groups = [tuple(spelled.by_token())]
    num_renderings = 1
    while groups:
        group = groups.pop()
        num_renderings += 1
        if num_renderings > _MOST_AT_ONCE:
            leave_event_loop()
        if num_renderings > MAX_RENDERINGS:
            raise InvalidRequest(
                "The messages spell control tokens at too many places that the chat template inspects. Leave them out.",
                param="messages",
            )
        tried = chosen | frozenset(group)
        changed = _rendered(render, spelled.changed(data, tried, marks))
        if changed is not None and _differs_in_marks_only(text, changed, marks):
            chosen, marked = tried, changed
        elif len(group) > 1:
            half = len(group) // 2
            groups += [group[half:], group[:half]]
    return RenderedPrompt(text, tuple(_places(marked, tokenizer, control_ids)))


def encode(
    tokenizer: Tokenizer, prompt: RenderedPrompt, control_ids: frozenset[int], *, add_special_tokens: bool = False
) -> list[tuple[int, int, int]]:
    """Return (id, start, end) of each token, in characters of the text. Raises UnicodeEncodeError."""
    if prompt.control is None:
        return tokenizer.encode_spans(prompt.text, add_special_tokens=add_special_tokens)
    return tokenizer.encode_with_control(
        prompt.text, prompt.control, control_ids, add_special_tokens=add_special_tokens
    )


def _rendered(render: Render, data: Any) -> str | None:
    """Return the text, or None if the template refuses the changed data."""
    try:
        return render(data)
    except InvalidRequest:
        return None


def _places(text: str, tokenizer: Tokenizer, control_ids: frozenset[int]) -> list[tuple[int, int]]:
    spans = tokenizer.encode_spans(text, add_special_tokens=False)
    return [(start, end) for id_, start, end in spans if id_ in control_ids and start < end]


def _marks(text: str, spelled: "_Spelled") -> Mapping[str, str]:
    """Return what letters, digits and other characters are exchanged for: characters of their kind that neither the
    text nor a control token has, as far as there are any.
    """
    used = set(text).union(*spelled.texts)

    def free(candidates: str, fallback: str) -> str:
        return next((one for one in candidates if one not in used), fallback)

    other = free("".join(map(chr, range(0xE000, 0xF8FF))), "\uf8ff")
    return {"upper": free("ÞÐŁØĦŊ", other), "lower": free("þðłøħŋ", other), "other": other}


def _exchanged(character: str, marks: Mapping[str, str]) -> str:
    kind = "upper" if character.isupper() else "lower" if character.islower() else "other"
    return marks[kind]


def _differs_in_marks_only(text: str, changed: str, marks: Mapping[str, str]) -> bool:
    return len(text) == len(changed) and all(
        one == other or other == _exchanged(one, marks) for one, other in zip(text, changed, strict=True)
    )


class _Spelled:
    """The places in strings of a JSON value at which a control token is spelled, numbered in order of appearance."""

    def __init__(self, tokenizer: Tokenizer, control_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._control_ids = control_ids
        self.texts = tuple(sorted({tokenizer.token_text(id_) for id_ in control_ids & tokenizer.added_ids} - {""}))
        self._pattern = _any_of(self.texts)
        self.num_places = 0
        self._tokens: list[str] = []  # what is spelled at each place

    def count(self, data: Any) -> None:
        """Number the places in `data`."""
        _mapped(data, self._counted)

    def by_token(self) -> list[int]:
        """Return the numbers of the places, those of one token together."""
        return sorted(range(self.num_places), key=lambda place: (self._tokens[place], place))

    def changed(self, data: Any, places: frozenset[int], marks: Mapping[str, str]) -> Any:
        """Return the data with one character exchanged at each of these places."""
        number = 0

        def change(text: str) -> str:
            nonlocal number
            found = self._found(text)
            if not found:
                return text
            letters = list(text)
            for start, end in found:
                if number in places:
                    at = next((i for i in range(end - 1, start - 1, -1) if letters[i].isalpha()), (start + end) // 2)
                    letters[at] = _exchanged(letters[at], marks)
                number += 1
            return "".join(letters)

        return _mapped(data, change)

    def _counted(self, text: str) -> str:
        found = self._found(text)
        self.num_places += len(found)
        self._tokens += [text[start:end] for start, end in found]
        return text

    def _found(self, text: str) -> list[tuple[int, int]]:
        if self._pattern is None:
            return []
        if not self._pattern.search(text) and not self._pattern.search(self._tokenizer.normalized(text)):
            return []
        try:
            found = _places(text, self._tokenizer, self._control_ids)
        except UnicodeEncodeError:  # reported where the prompt is encoded
            return []
        # Matches that overlap a match become tokens once that one is text.
        spelled = {match.span() for match in self._pattern.finditer(text)}
        return sorted({*found, *spelled})


@lru_cache(maxsize=4)
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with `change` applied to its strings. Texts of neighbouring parts of a message are one string,
    because templates join them.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(one, change) for key, one in value.items()}
    if not isinstance(value, Sequence):
        return value
    texts = [one.get("text") if isinstance(one, Mapping) else None for one in value]
    if len(value) > 1 and all(isinstance(text, str) for text in texts):
        whole = change("".join(map(str, texts)))
        made, at = [], 0
        for part, text in zip(value, texts, strict=True):
            end = at + len(str(text))
            made.append({**part, "text": whole[at:end]})
            at = end
        return made
    return [_mapped(one, change) for one in value]
