"""Outputs in a grammar are the same with speculation and without, whoever drafts, beside whom, and after a restart."""

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from doubles.grammars import outputs
from doubles.worker import ScriptedDrafts
from space_common.json_places import JSON, JsonPlaces, PlaceState
from space_common.worker.client import WorkerClient
from space_model.space_model import SpaceModel
from space_proto import worker_pb2 as pb
from space_router.text.json_places import places_behind_thinking, places_of_calls
from space_router.text.reasoning import FORMATS as REASONING
from space_router.text.reasoning import AnswerReasoning, ThinkingRules
from space_router.text.tokenizer import SpecialTokens
from space_router.text.tool_calls import calls_only
from space_router.text.tool_parsers.formats import FORMATS
from space_server.grammar import Grammars, TokenVocabulary
from space_server.worker import Worker

EOS, MAX_TOKENS = 0, 96
PROMPTS = [[70, 71, 72, 73], [40] * 17 + [90], [100, 101]]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "member": {"enum": ["yes", "no"]},
    },
    "required": ["name", "age", "member"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": pb.Grammar(kind=pb.GRAMMAR_KIND_JSON_SCHEMA, source=json.dumps(SCHEMA)),
    "regex": pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, source=r"([a-e]{3}-){6,30}(end|stop)\.?"),
    "rules": pb.Grammar(
        kind=pb.GRAMMAR_KIND_LARK, source='start: term (("+"|"-") term){9,}\nterm: /[0-9]{1,3}/ | "(" start ")"'
    ),
    # Reasoning of at most nine tokens, ended by one token of text, then an answer of any tokens.
    "budget": pb.Grammar(
        kind=pb.GRAMMAR_KIND_LARK,
        source='start: token{0,9} <[70]> answer\ntoken: <[8-69,71-255]>\nanswer: "(" /[0-9]{1,3}/ ")" answer?',
    ),
    "keys": pb.Grammar(
        kind=pb.GRAMMAR_KIND_JSON_SCHEMA,
        source=json.dumps(
            {
                "type": "object",
                "patternProperties": {"^[ab]{1,2}$": {"type": "integer", "minimum": 0, "maximum": 9}},
                "additionalProperties": False,
                "minProperties": 6,
                "maxProperties": 6,
            }
        ),
    ),
    # A call with arguments of any keys, behind other text.
    "arguments": pb.Grammar(
        kind=pb.GRAMMAR_KIND_LARK,
        source='start: /[ab]{1,4}/ "=" arguments\narguments: %json '
        '{"type": "object", "patternProperties": {"^[ab]{1,2}$": {"enum": [1, {}]}}, "additionalProperties": false, '
        '"minProperties": 6, "x-guidance": {"whitespace_flexible": false}}',
        json_places=JsonPlaces((PlaceState(((tuple(b"="), JSON),)),)).to_json(),
    ),
}
TOOLS: dict[str, dict[str, Any]] = {
    "book": {
        "type": "object",
        "properties": {
            "to": {"type": "string"},
            "class": {"enum": ["economy", 3, None]},
            "bags": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2},
            "paid": {"type": "boolean"},
        },
        "required": ["to", "class", "bags", "paid"],
    },
    "now": {"type": "object", "properties": {}},
}
NOTATIONS = ("pythonic", "olmo3", "lfm2", "gemma4", "minimax_m3")
FORMS = [name for name, known in FORMATS.items() if known.layout is not None and name not in NOTATIONS]
THINKING = {"deepseek_r1": "hermes", "kimi_k3": "kimi_k3", "openai_gptoss": "openai", "mistral": "mistral"}
"""Calls behind reasoning of at most nine tokens."""


def calls_of(name: str, thinking: str = "") -> pb.Grammar:
    """Required calls in a format; its markers are ids of the vocabulary's end. `thinking`: of the reasoning before."""
    known = FORMATS[name]
    assert known.layout is not None
    reasoning = REASONING[thinking] if thinking else None
    markers = dict.fromkeys((*known.markers, *(reasoning.markers if reasoning else ())))
    ids = {marker: 319 - place for place, marker in enumerate(markers)}
    source = calls_only(known.layout, TOOLS, SpecialTokens(ids), many=True)
    places = places_of_calls(known.layout, TOOLS, SpecialTokens(ids))
    if reasoning is not None:
        rules = ThinkingRules.of(AnswerReasoning(reasoning, not reasoning.channels), ids.get, 9, 320)
        source, places = rules.before(source), places_behind_thinking(rules, places)
    return pb.Grammar(kind=pb.GRAMMAR_KIND_LARK, source=source, json_places=places.to_json())


GRAMMARS |= {name: calls_of(name) for name in NOTATIONS}
CHOICES = ["".join(one) for one in product("abc", repeat=6)]
GRAMMARS["choice"] = pb.Grammar(kind=pb.GRAMMAR_KIND_CHOICE, source=json.dumps(CHOICES))
GRAMMARS["object"] = pb.Grammar(kind=pb.GRAMMAR_KIND_JSON_OBJECT)
BOUND = {name: calls_of(name) for name in FORMS}
BOUND |= {f"{thinking} {name}": calls_of(name, thinking) for thinking, name in THINKING.items()}
GRAMMARS |= BOUND
SAMPLINGS = {
    "greedy": {},
    "seeded": {"seed": 11, "temperature": 1.0},
    "edited": {
        "seed": 5,
        "temperature": 0.9,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "bad_words": [pb.IdRun(ids=[85])],
        "logit_bias": {74: 2.0, EOS: -3.0},
        "min_tokens": 8,
    },
}


class Plain(dict[tuple[str, str], list[list[int]]]):
    """Every text without speculation, by grammar and sampling parameters, made at first use."""

    def __init__(self, byte_model: SpaceModel, grammars: Grammars) -> None:
        self._given = byte_model, grammars

    def __missing__(self, cell: tuple[str, str]) -> list[list[int]]:
        name, sampling_params = cell
        self[cell] = [run.tokens for run in outputs(PROMPTS, *self._given, GRAMMARS[name], SAMPLINGS[sampling_params])]
        return self[cell]


@pytest.fixture(scope="module")
def plain(byte_model: SpaceModel, grammars: Grammars) -> Plain:
    return Plain(byte_model, grammars)


@pytest.fixture(scope="module")
def texts(byte_path: Path) -> list[bytes]:
    return list(TokenVocabulary.read(byte_path, 320).texts)


WRONG: dict[str, Callable[[int], bool]] = {
    "oracle": lambda position: False,
    "half right": lambda position: position % 8 in (0, 1, 4),
}


def drafts_like(kind: str, texts: list[list[int]]) -> ScriptedDrafts | None:
    if kind == "masks":
        return None
    whole = {number: prompt + tokens for number, (prompt, tokens) in enumerate(zip(PROMPTS, texts, strict=True), 1)}
    return ScriptedDrafts(whole, wrong=WRONG[kind], other=lambda id_: 9 + (id_ - 8) % 310)


WAYS = [(1, "masks"), (3, "half right"), (3, "masks"), (5, "oracle"), (5, "masks")]
AT_EVERY_CHANGE = {
    ("schema", "greedy", 1, "masks"),
    ("schema", "edited", 3, "half right"),
    ("schema", "seeded", 5, "masks"),
    ("regex", "seeded", 3, "masks"),
    ("regex", "edited", 5, "oracle"),
    ("rules", "greedy", 5, "masks"),
    ("rules", "edited", 3, "masks"),
    ("budget", "greedy", 3, "masks"),
    ("budget", "seeded", 5, "oracle"),
    ("budget", "edited", 3, "half right"),
    ("keys", "greedy", 3, "half right"),
    ("keys", "seeded", 5, "masks"),
    ("arguments", "edited", 3, "masks"),
    ("arguments", "greedy", 5, "oracle"),
    ("pythonic", "greedy", 3, "half right"),
    ("gemma4", "greedy", 5, "masks"),
    ("minimax_m3", "seeded", 3, "half right"),
    ("kimi_k3", "seeded", 5, "masks"),
    ("deepseek_r1 hermes", "seeded", 5, "masks"),
}
FEW = {("seeded", 5, "masks"), ("edited", 5, "masks")}
CELLS = [
    pytest.param(*cell, marks=() if cell in AT_EVERY_CHANGE else pytest.mark.slow)
    for name in GRAMMARS
    for sampling_params in SAMPLINGS
    for k, kind in WAYS
    if (cell := (name, sampling_params, k, kind)) and (name not in BOUND or cell[1:] in FEW)
    if sampling_params != "edited" or "DSML" not in GRAMMARS[name].source  # it bans the letter M, which DSML needs
]


@pytest.mark.parametrize(("name", "sampling_params", "k", "kind"), CELLS)
def test_any_k_and_any_drafts_give_the_plain_text(
    byte_model: SpaceModel, grammars: Grammars, plain: Plain, name: str, sampling_params: str, k: int, kind: str
) -> None:
    source = drafts_like(kind, plain[name, sampling_params])
    runs = outputs(PROMPTS, byte_model, grammars, GRAMMARS[name], SAMPLINGS[sampling_params], k=k, draft_source=source)
    assert [run.tokens for run in runs] == plain[name, sampling_params]
    assert all(run.error == "" for run in runs)
    accepted = [a for run in runs for a in run.accepted]
    drafted = [report.num_drafted for run in runs for report in run.reports if report.num_drafted]
    assert sum(accepted) > 0
    assert kind == "oracle" or sum(drafted) > sum(accepted)


@pytest.mark.parametrize("sampling_params", SAMPLINGS)
def test_a_budget_of_tokens_is_used_up_and_not_exceeded(plain: Plain, sampling_params: str) -> None:
    ends = [tokens.index(70) for tokens in plain["budget", sampling_params]]
    assert max(ends) == 9, "the end was forced"


@pytest.mark.parametrize("sampling_params", SAMPLINGS)
@pytest.mark.parametrize("name", ["keys", "arguments"])
def test_no_object_repeats_a_key(plain: Plain, texts: list[bytes], name: str, sampling_params: str) -> None:
    for tokens in plain[name, sampling_params]:
        keys = re.findall(rb'"([ab]+)"', b"".join(texts[id_] for id_ in tokens))
        assert len(keys) == len(set(keys))
        assert len(keys) == 6 or tokens[-1] != EOS
    assert any(len(tokens) > 30 for tokens in plain[name, sampling_params])


@pytest.mark.parametrize("at", [5, 22, 40])
def test_who_is_admitted_again_knows_the_keys_of_before(
    byte_model: SpaceModel, grammars: Grammars, plain: Plain, at: int
) -> None:
    tokens = plain["keys", "seeded"][0]
    router = WorkerClient(Worker(byte_model, num_blocks=64, block_size=4, grammars=grammars))
    sequence = router.generate(
        PROMPTS[0] + tokens[:at],
        num_prompt=len(PROMPTS[0]),
        max_tokens=MAX_TOKENS,
        sampling=pb.Sampling(grammar=GRAMMARS["keys"], **SAMPLINGS["seeded"]),  # type: ignore[arg-type]
        eos_ids=[EOS],
    )
    assert (sequence.tokens, sequence.error) == (tokens, "")


def test_drafts_that_the_grammar_forbids_are_not_laid_out(
    byte_model: SpaceModel, grammars: Grammars, plain: Plain
) -> None:
    wrong = ScriptedDrafts({n: [9] * 200 for n in (1, 2, 3)})  # the id of no text of it
    runs = outputs(PROMPTS, byte_model, grammars, GRAMMARS["rules"], {}, k=5, draft_source=wrong)
    assert [run.tokens for run in runs] == plain["rules", "greedy"]
    assert [report.num_drafted for run in runs for report in run.reports if report.num_drafted] == []


@pytest.mark.parametrize("sampling_params", ["greedy", "seeded"])
@pytest.mark.parametrize("at", [1, 7, 40])
def test_who_is_admitted_again_goes_on_in_the_same_text(
    byte_model: SpaceModel, grammars: Grammars, plain: Plain, sampling_params: str, at: int
) -> None:
    tokens = plain["schema", sampling_params][0]
    router = WorkerClient(Worker(byte_model, num_blocks=64, block_size=4, grammars=grammars))
    sequence = router.generate(
        PROMPTS[0] + tokens[:at],
        num_prompt=len(PROMPTS[0]),
        max_tokens=MAX_TOKENS,
        sampling=pb.Sampling(grammar=GRAMMARS["schema"], **SAMPLINGS[sampling_params]),  # type: ignore[arg-type]
        eos_ids=[EOS],
    )
    assert sequence.tokens == tokens
    assert sequence.error == ""


def test_a_sequence_that_pauses_at_every_page_gives_the_plain_text(
    byte_model: SpaceModel, grammars: Grammars, plain: Plain
) -> None:
    runs = outputs(PROMPTS, byte_model, grammars, GRAMMARS["schema"], SAMPLINGS["seeded"], k=3, num_pages=1)
    assert [run.tokens for run in runs] == plain["schema", "seeded"]
    assert all(any(report.paused for report in run.reports) for run in runs)


@pytest.mark.parametrize("steps", ["host", "device"])
def test_beside_others_without_a_grammar_each_text_is_its_own(
    byte_model: SpaceModel, grammars: Grammars, plain: Plain, steps: str
) -> None:
    def others(router: WorkerClient) -> list[int]:
        return [
            router.admit(prompt, max_tokens=24, sampling=pb.Sampling(seed=2, temperature=0.8)) for prompt in PROMPTS
        ]

    alone = WorkerClient(Worker(byte_model, num_blocks=128, block_size=4))
    free = others(alone)
    alone.run()
    settings: dict[str, Any] = {"device_steps": True, "eager": True} if steps == "device" else {}
    router = WorkerClient(Worker(byte_model, num_blocks=256, block_size=4, grammars=grammars, **settings))
    bound = [
        router.admit(prompt, max_tokens=MAX_TOKENS, sampling=pb.Sampling(grammar=GRAMMARS["schema"]), eos_ids=[EOS])
        for prompt in PROMPTS
    ]
    beside = others(router)
    router.run()
    assert [router.sequences[n].tokens for n in bound] == plain["schema", "greedy"]
    assert [router.sequences[n].tokens for n in beside] == [alone.sequences[n].tokens for n in free]
