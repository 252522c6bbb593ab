"""Random grammars for tests, and recognisers of their own to judge what came out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from space_common.worker.client import ClientSequence, WorkerClient
from space_proto import worker_pb2 as pb
from space_server.grammar import Grammars
from space_server.model_runner import StepModel
from space_server.speculation.controller import FixedLayout
from space_server.worker import Worker

_NAMES = ("a", "name", "age", "items", "é", "two words", "x-y", "value")
_WORDS = ("yes", "no", "maybe", "naïve", "", "a b", '"quoted"', "back\\slash", "1")


def outputs(
    prompts: Sequence[Sequence[int]],
    model: StepModel,
    grammars: Grammars,
    grammar: pb.Grammar,
    sampling: Mapping[str, Any],
    *,
    k: int = 0,
    max_tokens: int = 96,
    num_pages: int | None = None,
    eos_ids: Sequence[int] = (0,),
    **settings: Any,
) -> list[ClientSequence]:
    """What a worker makes of prompts in one batch, with up to `k` drafts per step; `settings` are the worker's."""
    settings = {"controller": FixedLayout.full(k)} | settings
    worker = Worker(model, num_blocks=256, block_size=4, grammars=grammars, **settings)
    router = WorkerClient(worker)
    numbers = [
        router.admit(
            prompt, max_tokens=max_tokens, sampling=pb.Sampling(grammar=grammar, **sampling),
            max_draft_length=99 if k else 0, num_pages=num_pages, eos_ids=eos_ids,
        )
        for prompt in prompts
    ]  # fmt: skip
    router.run()
    return [router.sequences[number] for number in numbers]


@dataclass(frozen=True)
class Case:
    """A grammar, and who says whether a text is one of its."""

    grammar: pb.Grammar
    accepts: Callable[[str], bool]


def regex_case(chance: Random) -> Case:
    """A random regular expression, judged by Python's own."""
    source = _regex(chance, 3)
    pattern = re.compile(source, re.ASCII)
    return Case(pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, source=source), lambda text: pattern.fullmatch(text) is not None)


def _regex(chance: Random, depth: int) -> str:
    atoms = ["a", "b", "xyz", "[a-f]", r"\d", r"\w", r"[^\s\w]", r"\.", "é", "-", "/", '"']
    if depth == 0:
        return chance.choice(atoms)
    parts = [_regex(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    match chance.randrange(5):
        case 0:
            return f"({'|'.join(parts)})"
        case 1:
            return f"(?:{''.join(parts)}){{{chance.randint(0, 2)},{chance.randint(2, 4)}}}"
        case 2:
            return f"(?:{parts[0]})?{''.join(parts[1:])}"
        case _:
            return "".join(parts)


def choice_case(chance: Random) -> Case:
    texts = [chance.choice(_WORDS) + chance.choice(_WORDS) for _ in range(chance.randint(1, 5))]
    return Case(pb.Grammar(kind=pb.GRAMMAR_KIND_CHOICE, source=json.dumps(texts)), lambda text: text in texts)


def rules_case(chance: Random) -> Case:
    """A random context-free grammar, judged by a recogniser that tries every split of the text."""
    names = [f"r{number}" for number in range(chance.randint(2, 5))]
    rules: dict[str, list[list[str]]] = {}
    for number, name in enumerate(names):
        ways = [_way(chance, names[number + 1 :]) for _ in range(chance.randint(1, 3))]
        if chance.random() < 0.5:  # brackets around itself
            ways.append(['"("', name, '")"'])
        rules[name] = ways
    lines = [f"{name}: " + " | ".join(" ".join(way) for way in ways) for name, ways in rules.items()]
    source = "\n".join(["start: r0", *lines])
    return Case(pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, source=source), lambda text: _is_of(rules, text))


def _way(chance: Random, below: Sequence[str]) -> list[str]:
    symbols = [*below, *(json.dumps(word) for word in ("a", "bc", "+", "1"))]
    return [chance.choice(symbols) for _ in range(chance.randint(1, 4))]


def _is_of(rules: Mapping[str, Sequence[Sequence[str]]], text: str) -> bool:
    @cache
    def ends(symbol: str, start: int) -> frozenset[int]:
        """Where what the symbol makes of the text from `start` on can end."""
        if symbol not in rules:
            literal = json.loads(symbol)
            return frozenset({start + len(literal)} if text.startswith(literal, start) else ())
        found: set[int] = set()
        for way in rules[symbol]:
            places = {start}
            for part in way:
                places = {end for place in places for end in ends(part, place)}
            found |= places
        return frozenset(found)

    return len(text) in ends("r0", 0)


def schema_case(chance: Random) -> tuple[pb.Grammar, dict[str, Any]]:
    """A random JSON schema, for a validator to judge."""
    schema = _schema(chance, 3)
    if chance.random() < 0.25:
        schema = {
            "type": "object",
            "properties": {"node": {"$ref": "#/$defs/node"}},
            "required": ["node"],
            "additionalProperties": False,
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"v": schema, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                    "required": ["v", "next"],
                    "additionalProperties": False,
                }
            },
        }
    return pb.Grammar(kind=pb.GRAMMAR_KIND_JSON_SCHEMA, source=json.dumps(schema)), schema


def _schema(chance: Random, depth: int) -> dict[str, Any]:
    leaves = (_text, _integer, _number, _constant)
    inner = (_object, _object, _array, _either)
    make = chance.choice(leaves if depth == 0 else (*leaves, *inner))
    return make(chance, depth - 1)


def _text(chance: Random, depth: int) -> dict[str, Any]:
    match chance.randrange(5):
        case 0:
            return {"type": "string", "enum": chance.sample(_WORDS, chance.randint(1, 4))}
        case 1:
            return {"type": "string", "pattern": chance.choice(["^[a-z]{1,4}$", "^(yes|no)$", r"^\d{2}-\d{2}$"])}
        case 2:
            return {"type": "string", "format": chance.choice(["date", "time", "ipv4", "uuid"])}
        case _:
            least = chance.randint(0, 2)
            return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 5)}


def _integer(chance: Random, depth: int) -> dict[str, Any]:
    low = chance.randint(-200, 200)
    bounds = {"minimum": low, "maximum": low + chance.randint(0, 500)}
    if chance.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + chance.randint(20, 500), "multipleOf": 5}
    return {"type": "integer", **bounds}


def _number(chance: Random, depth: int) -> dict[str, Any]:
    low = chance.randint(-50, 50) / 4
    return {"type": "number", "minimum": low, "maximum": low + chance.randint(1, 80) / 8}


def _constant(chance: Random, depth: int) -> dict[str, Any]:
    constants = (
        {"const": None}, {"const": {"k": [1, "two"]}}, {"type": "boolean"}, {"type": "null"}, {"enum": [1, "a"]},
    )  # fmt: skip
    return dict(chance.choice(constants))


def _object(chance: Random, depth: int) -> dict[str, Any]:
    names = chance.sample(_NAMES, chance.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(chance, max(0, depth)) for name in names},
        "required": chance.sample(names, chance.randint(0, len(names))),
        "additionalProperties": False,
    }
    if chance.random() < 0.2:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
        schema |= {"required": names, "maxProperties": len(names) + 1}  # the library wants all of them required
    return schema


def _array(chance: Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + chance.randint(0, 2)}
    if chance.random() < 0.3:
        schema["prefixItems"] = [_schema(chance, max(0, depth)) for _ in range(chance.randint(1, 2))]
    return {**schema, "items": _schema(chance, max(0, depth))}


def _either(chance: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(chance, max(0, depth)) for _ in range(chance.randint(2, 3))]}
