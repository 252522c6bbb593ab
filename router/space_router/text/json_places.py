"""Where JSON texts stand in the grammars of calls and of answers behind reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from space_common.json_places import JSON, SPECIAL, JsonPlaces, PlacesBuilder, PlaceState, Units

from space_router.text.harmony import CHANNEL, END, MESSAGE, START
from space_router.text.reasoning import ThinkingRules
from space_router.text.tokenizer import SpecialTokens
from space_router.text.tool_calls import Schemas, ToolCallLayout, is_json


def places_of_calls(layout: ToolCallLayout, tools: Schemas, special: SpecialTokens) -> JsonPlaces:
    """Return the places in texts of nothing but calls."""
    builder = PlacesBuilder()
    _add_calls(builder, layout, tools, special)
    return builder.places()


def places_of_calls_or(
    layout: ToolCallLayout, tools: Schemas, special: SpecialTokens, *, has_answer: bool
) -> JsonPlaces:
    """Return the places in texts of calls behind other text. `has_answer`: calls, or a JSON text instead of them."""
    builder = PlacesBuilder()
    start = builder.new()
    calls = _add_calls(builder, layout, tools, special)
    trigger = _units(layout.trigger, special)
    if has_answer:
        builder.set(start, PlaceState(((trigger, calls),), searches=False, otherwise=JSON))
    elif trigger:
        builder.set(start, PlaceState(((trigger, calls),)))
    elif layout.notation is None:
        first = replace(layout, before_name=layout.opening + layout.before_name)
        heads = tuple((_head(first, name, special), JSON) for name in tools)
        builder.set(start, PlaceState(heads, searches=False, then=calls))
    return builder.places()


def _head(layout: ToolCallLayout, name: str, special: SpecialTokens) -> Units:
    return _units(layout.before_name + name + layout.before_arguments, special)


def _add_calls(builder: PlacesBuilder, layout: ToolCallLayout, tools: Schemas, special: SpecialTokens) -> int:
    """Add the states of calls; return the first, which looks for the head of a call."""
    calls = builder.new()
    if layout.notation is not None:
        # Where values are no JSON, the parsers drop a key that an object repeats.
        heads = tuple((_units(head, special), JSON) for head in layout.notation.json_heads if _has_token(head, special))
        builder.set(calls, PlaceState(heads, then=calls))
        return calls
    if layout.parameter is None:
        heads = tuple((_head(layout, name, special), JSON) for name in tools)
        builder.set(calls, PlaceState(heads, then=calls))
        return calls
    end = _units(layout.behind_arguments, special)
    heads_of_calls = []
    for name, schema in tools.items():
        call = builder.new()
        heads_of_calls.append((_head(layout, name, special), call))
        text = builder.append(PlaceState(((_units(layout.parameter.behind_value, special), call),)))
        targets = []
        for key, value in _parameters(schema).items():
            targets.append((_units(layout.parameter.head(key, value), special), JSON if is_json(value) else text))
        if not targets:
            targets.append((_units(layout.parameter.before_key, special), text))
        builder.set(call, PlaceState((*targets, (end, calls)), then=call))
    builder.set(calls, PlaceState(tuple(heads_of_calls)))
    return calls


def _parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties, required = schema.get("properties"), schema.get("required")
    known = dict(properties) if isinstance(properties, Mapping) else {}
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return {**dict.fromkeys(names), **known} if known else {}


def places_behind_thinking(rules: ThinkingRules, answer: JsonPlaces) -> JsonPlaces:
    """Return the places in texts of reasoning and then an answer with these."""
    known = rules.thinking.format
    builder = PlacesBuilder()
    start = builder.new()
    inner = builder.insert(answer)
    special = SpecialTokens(rules.ids)
    if known.tokens and known.wrap is not None:  # what opens the answer stands before it
        inner = builder.append(PlaceState(((_units(known.wrap[0], special), inner),)))

    def search(texts: tuple[str, ...], target: int) -> int:
        return builder.append(PlaceState(tuple((_units(text, special), target) for text in texts)))

    if known.channels:
        if answer.states:  # of calls, which have channels of their own
            thought = search((f"{END}{START}assistant",), inner)
            builder.set(start, _begins((f"{CHANNEL}analysis{MESSAGE}",), thought, inner, special))
        else:
            final = search((f"{CHANNEL}final{MESSAGE}",), inner)
            builder.set(start, _begins((f"{CHANNEL}analysis{MESSAGE}",), search((END,), final), final, special))
        return builder.places()
    ends = known.ends[:1] if known.ends[0] in rules.ids else known.ends
    thought = search(ends, inner)
    if rules.thinking.inside:
        builder.set(start, PlaceState(tuple((_units(end, special), inner) for end in ends)))
    else:
        starts = known.starts[:1] if known.starts[0] in rules.ids else known.starts
        builder.set(start, _begins(starts, thought, inner, special))
    return builder.places()


def _begins(starts: tuple[str, ...], target: int, otherwise: int, special: SpecialTokens) -> PlaceState:
    targets = tuple((_units(text, special), target) for text in starts)
    return PlaceState(targets, searches=False, otherwise=otherwise)


def _has_token(text: str, special: SpecialTokens) -> bool:
    """Return whether a special token stands in a text, so that no letters can spell it."""
    return any(id_ is not None for _, id_ in special.parts(text))


def _units(text: str, special: SpecialTokens) -> Units:
    """Return a text as units: special tokens by their id, as the grammar has them."""
    units: list[int] = []
    for part, id_ in special.parts(text):
        if id_ is None:
            units += part.encode()
        else:
            units.append(SPECIAL + id_)
    return tuple(units)
