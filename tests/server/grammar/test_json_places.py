"""Arguments of calls and answers behind reasoning do not repeat a key; text that only looks like JSON is free."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from space_common.grammar import compile_grammar
from space_common.json_places import JsonPlaces
from space_router.text.json_places import places_behind_thinking, places_of_calls, places_of_calls_or
from space_router.text.reasoning import FORMATS as REASONING
from space_router.text.reasoning import AnswerReasoning, ThinkingRules
from space_router.text.tokenizer import SpecialTokens
from space_router.text.tool_calls import calls_only, calls_or
from space_router.text.tool_parsers.formats import FORMATS, ToolFormat
from space_server.grammar import GrammarState, TokenVocabulary, ids_of

EOS, FIRST = 0, 128
MARKERS = sorted(
    {marker for one in FORMATS.values() for marker in one.markers}
    | {marker for one in REASONING.values() for marker in one.markers if " " not in marker}
)
SPECIAL = {marker: number for number, marker in enumerate(MARKERS, 1)}
assert len(SPECIAL) < FIRST
TEXTS = [b""] * FIRST + [bytes([byte]) for byte in range(256)]
VOCABULARY = TokenVocabulary(TEXTS, {EOS: b"<eos>"} | {id_: text.encode() for text, id_ in SPECIAL.items()})
LAYOUTS = [name for name, one in FORMATS.items() if one.layout is not None and one.layout.notation is None]
TOOLS = {
    "f": {"type": "object", "properties": {"note": {"type": "string"}, "count": {"type": "object"}}},
    "g": {"type": "object"},
}


def ids(text: str, *, special: bool) -> list[int]:
    found = []
    while text:
        marker = max((m for m in SPECIAL if special and text.startswith(m)), key=len, default="")
        found += [SPECIAL[marker]] if marker else [FIRST + byte for byte in text[0].encode()]
        text = text[len(marker) or 1 :]
    return found


def quote_may_follow(grammar: str, places: JsonPlaces, text: str, *, special: bool) -> bool:
    compiled = compile_grammar(VOCABULARY.tokenizer, "lark", grammar)
    state = GrammarState(
        VOCABULARY, compiled.deep_copy, eos_ids=[EOS], output=ids(text, special=special), json_places=places
    )
    possible = state.possible().ids
    assert possible is not None
    return FIRST + ord('"') in ids_of(possible)


SPECIAL_TOKENS, NO_SPECIAL = SpecialTokens(SPECIAL), SpecialTokens({})


def calls_of(known: ToolFormat) -> tuple[Sequence[str], Sequence[str]]:
    """Return beginnings of texts behind which a quote would repeat a key, and others behind which it would not."""
    layout = known.layout
    assert layout is not None
    start = layout.trigger + layout.opening
    if layout.parameter is None:
        head = f"{start}{layout.before_name}f{layout.before_arguments}"
        whole = f'{head}{{"count": {{"a": 1}}}}{layout.behind_arguments}{layout.between}'
        other = f"{whole}{layout.before_name}g{layout.before_arguments}"
        repeated = [f'{head}{{"count": {{"a": 1, "a', f'{other}{{"a": 1, "b": 2, "a', f'{other}{{"count": {{}}, "count']
        return repeated, [f'{head}{{"count": {{"a": 1, "b', f'{other}{{"a": 1, "b": {{"a', f'{other}{{"count']
    part = layout.parameter
    note, count = (part.head(key, TOOLS["f"]["properties"][key]) for key in ("note", "count"))
    head = f"{start}{layout.before_name}f{layout.before_arguments}"
    text = f'{head}{note}Say {count}{{"a": 1, "a'
    counted = f'{head}{note}"a": "a{part.behind_value}{count}'
    any_head = f"{start}{layout.before_name}g{layout.before_arguments}{part.before_key}k{part.behind_key}"
    return (
        [f'{counted}{{"a": 1, "a', f'{head}{count}{{"a": {{"b": 1, "b'],
        [text, f'{counted}{{"a": 1, "b', f'{any_head}{count}{{"a": 1, "a'],
    )


@pytest.mark.parametrize("special", [False, True], ids=["letters", "special"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_arguments_repeat_no_key(name: str, special: bool) -> None:
    known = FORMATS[name]
    id_of = SPECIAL_TOKENS if special else NO_SPECIAL
    layout = known.layout
    assert layout is not None
    forced = calls_only(layout, TOOLS, id_of, many=True), places_of_calls(layout, TOOLS, id_of)
    repeated, free = calls_of(known)
    for text in repeated:
        assert not quote_may_follow(*forced, text, special=special), text
    for text in free if layout.parameter is None or not special else free[1:2]:  # no special id is in a text
        assert quote_may_follow(*forced, text, special=special), text


@pytest.mark.parametrize("name", [name for name in LAYOUTS if not FORMATS[name].layout.alone])  # type: ignore[union-attr]
def test_text_before_calls_is_free(name: str) -> None:
    layout = FORMATS[name].layout
    assert layout is not None
    grammar = calls_or(None, layout, TOOLS, NO_SPECIAL, many=True)
    places = places_of_calls_or(layout, TOOLS, NO_SPECIAL, has_answer=False)
    repeated, free = calls_of(FORMATS[name])
    text = f'Say {layout.before_name}g{layout.before_arguments}{{"a": 1, "a' if layout.trigger else 'Say {"a": 1, "a'
    assert quote_may_follow(grammar, places, text, special=False)
    before = "So: " if layout.trigger else ""
    assert not quote_may_follow(grammar, places, before + repeated[0], special=False)
    assert quote_may_follow(grammar, places, before + free[0], special=False)


@pytest.mark.parametrize(
    "name", [*(name for name in LAYOUTS if FORMATS[name].layout.trigger), "lfm2", "gemma4", "kimi_k3"]
)  # type: ignore[union-attr]
def test_an_answer_instead_of_calls_repeats_no_key(name: str) -> None:
    layout = FORMATS[name].layout
    assert layout is not None
    grammar = calls_or({"type": "object"}, layout, TOOLS, SPECIAL_TOKENS, many=True)
    places = places_of_calls_or(layout, TOOLS, SPECIAL_TOKENS, has_answer=True)
    assert not quote_may_follow(grammar, places, '{"a": 1, "a', special=True)
    assert quote_may_follow(grammar, places, '{"a": 1, "b', special=True)
    if layout.notation is not None:
        return  # its calls have no JSON
    repeated, free = calls_of(FORMATS[name])
    assert not quote_may_follow(grammar, places, repeated[0], special=True)
    assert quote_may_follow(grammar, places, free[1], special=True)


THOUGHTS = {
    "deepseek_r1": "<think>",
    "granite": "Here is my thought process:",
    "openai_gptoss": "<|channel|>analysis<|message|>",
    "kimi_k3": "<|open|>think<|sep|>",
}
ENDS = {
    "deepseek_r1": "</think>\n",
    "granite": "Here's my response:",
    "openai_gptoss": "<|end|><|start|>assistant<|channel|>final<|message|>",
    "kimi_k3": "<|close|>think<|sep|>\n<|open|>response<|sep|>",
}
OPENS = {"kimi_k3": "<|open|>response<|sep|>"}


@pytest.mark.parametrize("budget", [None, 200])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", THOUGHTS)
def test_an_answer_behind_reasoning_repeats_no_key(name: str, inside: bool, budget: int | None) -> None:
    rules = ThinkingRules.of(AnswerReasoning(REASONING[name], inside), SPECIAL.get, None, len(TEXTS))
    if budget is not None and rules.can_count:
        rules = ThinkingRules.of(AnswerReasoning(REASONING[name], inside), SPECIAL.get, budget, len(TEXTS))
    schema = json.dumps({"type": "object"})
    grammar = rules.before(f"start: %json {schema}")
    places = places_behind_thinking(rules, JsonPlaces())
    thought = 'So {"a": 1, "a'
    start = "" if inside and name != "openai_gptoss" else THOUGHTS[name]
    assert quote_may_follow(grammar, places, start + thought, special=True)
    behind = start + thought + ENDS[name]
    assert quote_may_follow(grammar, places, behind + '{"a": 1, "b', special=True)
    assert not quote_may_follow(grammar, places, behind + '{"a": 1, "a', special=True)
    if not inside and name != "openai_gptoss":
        assert not quote_may_follow(grammar, places, OPENS.get(name, "") + '{"a": 1, "a', special=True)


def test_json_in_typed_tags_repeats_no_key() -> None:
    layout = FORMATS["kimi_k3"].layout
    assert layout is not None
    rules = ThinkingRules.of(AnswerReasoning(REASONING["kimi_k3"], True), SPECIAL.get, None, len(TEXTS))
    forced = calls_only(layout, TOOLS, SPECIAL_TOKENS, many=True)
    places = places_of_calls(layout, TOOLS, SPECIAL_TOKENS)
    call = (
        f"{layout.behind_answer}{layout.trigger}{layout.before_name}f{layout.before_arguments}1{layout.behind_number}"
    )
    note = '<|open|>argument key="note" type="string"<|sep|>{"a": 1, "a": 2<|close|>argument<|sep|>'
    count = '<|open|>argument key="count" type="object"<|sep|>{"a": {"b": 1}, "'
    thought = 'So {"a": 1, "a": 2}<|close|>think<|sep|><|open|>response<|sep|>'
    for before, grammar, known in (
        ("", forced, places),
        (thought, rules.before(forced), places_behind_thinking(rules, places)),
    ):
        for text, is_free in ((count + "a", False), (count + "b", True), (note + count + "a", False)):
            assert quote_may_follow(grammar, known, before + call + text, special=True) == is_free, text


def test_calls_behind_reasoning_repeat_no_key() -> None:
    layout = FORMATS["hermes"].layout
    assert layout is not None
    rules = ThinkingRules.of(AnswerReasoning(REASONING["qwen3"], True), SPECIAL.get, None, len(TEXTS))
    grammar = rules.before(calls_only(layout, TOOLS, SPECIAL_TOKENS, many=True))
    places = places_behind_thinking(rules, places_of_calls(layout, TOOLS, SPECIAL_TOKENS))
    repeated, free = calls_of(FORMATS["hermes"])
    thought = 'So {"a": 1, "a": 2}</think>'
    for text in repeated:
        assert not quote_may_follow(grammar, places, thought + text, special=True)
    for text in free:
        assert quote_may_follow(grammar, places, thought + text, special=True)


def test_places_survive_the_wire_and_other_texts_are_refused() -> None:
    layout = FORMATS["glm45"].layout
    assert layout is not None
    places = places_of_calls_or(layout, TOOLS, SPECIAL_TOKENS, has_answer=False)
    assert JsonPlaces.from_json(places.to_json()) == places
    for text in ("{", "[1]", "[[[[[], 1]], true, -1, -1]]", '[["a", true, 0, 0]]'):
        with pytest.raises(ValueError, match=r"."):
            JsonPlaces.from_json(text)
