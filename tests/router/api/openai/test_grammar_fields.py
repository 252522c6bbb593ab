"""`response_format`, `structured_outputs` and TGI's `grammar`: what they mean, and how a wrong one is refused."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest
from doubles.router.whole_router import Seen, Start
from space_common.grammar import MOST_MEMORY, GrammarProcess, _bytes_and, compile_grammar
from space_proto import worker_pb2
from space_router.api.bad_words import without_bad_words
from space_router.api.grammar_fields import GrammarCheck, TgiGrammar, json_schema_grammar, lark_grammar, tgi_grammar
from space_router.api.json_schema import enforceable
from space_router.api.openai import completions
from space_router.api.openai.fields import COMPLETION_NEUTRAL, CompletionBody
from space_router.api.schema_parts import parts_to_try
from space_router.engine.request import worker_messages
from space_router.engine.request.request import Grammar, GrammarKind, SamplingOptions
from space_router.errors import InvalidRequest
from space_router.http_server.body import validate
from space_router.http_server.warnings import collect_warnings

USER = [{"role": "user", "content": "Say"}]
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}, "required": ["z"]}
AS_TEXT = '{"type":"object","properties":{"z":{"type":"integer"},"a":{"type":"string"}},"required":["z"]}'
GBNF = 'root ::= "yes" | "no" [a-z]+'

MEANT = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None}, None),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json_object": False, "disable_any_whitespace": False}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object", "")),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object", "")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        Grammar("json_schema", AS_TEXT),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "description": "d"}}},
        Grammar("json_object", ""),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", AS_TEXT)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA, indent=2)}}, Grammar("json_schema", AS_TEXT)),
    ({"structured_outputs": {"regex": "[ab]+"}}, Grammar("regex", "[ab]+")),
    ({"structured_outputs": {"choice": ["é", '"']}}, Grammar("choice", '["é","\\""]')),
    ({"structured_outputs": {"grammar": 'start: "<a>" | /</'}}, Grammar("lark", 'start: "<a>" | /</')),
    ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
]


@pytest.mark.parametrize(("fields", "grammar"), MEANT)
def test_each_way_of_saying_it_is_one_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    body = validate(CompletionBody, {"prompt": "x", **fields}, COMPLETION_NEUTRAL)
    assert body.wanted_grammar() == grammar


async def test_gbnf_is_taken_as_the_same_in_lark() -> None:
    body = validate(CompletionBody, {"prompt": "x", "structured_outputs": {"grammar": GBNF}}, COMPLETION_NEUTRAL)
    await GrammarCheck().convert(body)
    grammar = body.wanted_grammar()
    assert grammar is not None
    assert grammar.kind == "lark"
    assert grammar.source.lstrip("% {}lguidance\n").startswith('start: "yes"')


def test_a_grammar_goes_to_the_worker_with_the_sampling_params() -> None:
    kinds: list[GrammarKind] = ["json_schema", "json_object", "regex", "choice", "lark"]
    for kind in kinds:
        reported = worker_messages.sampling(SamplingOptions(seed=1, grammar=Grammar(kind, "source")))
        assert worker_pb2.GrammarKind.Name(reported.grammar.kind) == f"GRAMMAR_KIND_{kind.upper()}"
        assert reported.grammar.source == "source"
    assert not worker_messages.sampling(SamplingOptions(seed=1)).HasField("grammar")


async def test_every_choice_of_a_plan_has_the_grammar(router: Any) -> None:
    body = validate(CompletionBody, {"prompt": ["x", "y"], "n": 2}, COMPLETION_NEUTRAL)
    plan = completions.plan(router.service.builder(), body, Grammar("regex", "a"))
    assert [choice.request.sampling.grammar for choice in plan.choices] == [Grammar("regex", "a")] * 4


WRONG = [
    ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ({"response_format": "json"}, "response_format", "got 'json'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "`response_format.json_schema` is required"),
    ({"response_format": {"type": "text", "json_schema": {"name": "n"}}}, "response_format", "got type text"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "tex"}}}},
     "response_format", "Invalid type: tex"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}, "strict": True}}},
     "response_format", "asks for `not`, which cannot be enforced"),
    ({"response_format": {"type": "json_schema", "json_schema":
        {"name": "n", "schema": {"$ref": "http://a/b"}, "strict": True}}},
     "response_format", "http://a/b"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs",
     "give one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "got `regex` and `choice`"),
    ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-ahead"),
    ({"structured_outputs": {"regex": "(" * 200 + ")" * 200}}, "structured_outputs", "64 deep"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least 1"),
    ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs", "string"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "no JSON"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs", "an object"),
    ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs", 'unknown name: "a"'),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs", "no GBNF"),
    ({"structured_outputs": {"grammar": 'start: "a" <[5]>'}}, "structured_outputs", "special token '<[5]>'"),
    ({"structured_outputs": {"grammar": 'start: /"/ <|im_end|> /"/'}}, "structured_outputs", "special token"),
    ({"structured_outputs": {"grammar": '// ::=\nstart: <[1]> "a"'}}, "structured_outputs", "special token '<[1]>'"),
    ({"structured_outputs": {"grammar": '# "\nstart: <[4]> "a"'}}, "structured_outputs", "special token '<[4]>'"),
    ({"structured_outputs": {"disable_any_whitespace": True, "regex": "a"}}, "structured_outputs", "False"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "not a field"),
    ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs", "262144"),
    ({"guided_json": {}}, "guided_json", '`structured_outputs`: {"json": ...}'),
    ({"guided_regex": "a"}, "guided_regex", '`structured_outputs`: {"regex": ...}'),
    ({"guided_choice": ["a"]}, "guided_choice", '`structured_outputs`: {"choice": ...}'),
    ({"guided_grammar": "a"}, "guided_grammar", '`structured_outputs`: {"grammar": ...}'),
]  # fmt: skip


async def test_what_cannot_be_followed_is_refused_before_a_stream_begins(router: Any) -> None:
    for fields, param, words in WRONG:
        for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": USER})):
            await router.refuses(path, param, words, stream=True, **prompt, **fields)


@pytest.mark.parametrize("unit", ['\\"', "\\/", '"/', "/", "#", '"/a\\\n', "<"])
@pytest.mark.parametrize("start", ['"', "/", ""])
def test_what_never_ends_is_read_once(start: str, unit: str) -> None:
    """A text that is not closed was read again from each quote in it: 64 KiB kept every stream waiting for 50 s."""

    def seconds() -> float:
        begun = time.thread_time()  # which others on this machine do not add to
        with contextlib.suppress(InvalidRequest):
            lark_grammar(start + unit * (200_000 // len(unit)), "grammar")
        return time.thread_time() - begun

    assert any(seconds() < 1.0 for _ in range(3)), "the machine itself may stop now and then"


async def test_a_right_one_is_answered(router: Any) -> None:
    for fields, _ in MEANT:
        answer = await router.post("/v1/completions", prompt="x", max_tokens=2, **fields)
        assert answer.status_code == 200, (fields, answer.text)


async def test_where_the_worker_takes_no_grammars_they_are_refused_by_name(start: Start) -> None:
    async with start(takes_grammars=False) as router:
        wanted = {"response_format": {"type": "json_object"}}
        await router.refuses("/v1/completions", "response_format", "tokenizer.json", prompt="x", **wanted)
        assert (await router.post("/v1/completions", prompt="x", response_format={"type": "text"})).status_code == 200


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"type": "json", "value": SCHEMA}, Grammar("json_schema", AS_TEXT)),
        ({"type": "json", "value": AS_TEXT}, Grammar("json_schema", AS_TEXT)),
        ({"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}, Grammar("json_schema", AS_TEXT)),
        ({"type": "json_schema", "value": SCHEMA}, Grammar("json_schema", AS_TEXT)),
        ({"type": "regex", "value": "a+"}, Grammar("regex", "a+")),
    ],
)
def test_tgi_says_it_in_its_own_way(given: dict[str, Any], grammar: Grammar) -> None:
    assert tgi_grammar(TgiGrammar.model_validate(given)) == grammar


@pytest.mark.parametrize(
    "given", [{"type": "json", "value": 5}, {"type": "regex", "value": {}}, {"type": "json", "value": "["}]
)
def test_what_tgi_cannot_mean_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"`grammar(\.value)?`"):
        tgi_grammar(TgiGrammar.model_validate(given))


# -------------------------------------------------------------------------------------------- the check

DEEP = Grammar("lark", "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(9000)) + '\nr9000: "a"')
"""Overflows the stack of whoever compiles it."""

LONG = Grammar("json_schema", '{"type":"integer","multipleOf":999983}')  # Compiles for seconds


async def test_a_grammar_that_kills_its_checker_is_refused_and_the_next_one_checked() -> None:
    check = GrammarCheck()
    assert "Make it smaller" in str(await check.why_not(DEEP))
    assert await check.why_not(Grammar("regex", "[ab]")) is None
    assert "Make it smaller" in str(await check.why_not(DEEP))  # known by now


def checkers() -> set[int]:
    """This process's own processes that check grammars."""
    children = " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split()
    return {int(child) for child in children if b"space_common.grammar" in Path(f"/proc/{child}/cmdline").read_bytes()}


def test_the_memory_of_what_checks_a_grammar_is_bounded() -> None:
    with closing(GrammarProcess()) as process:
        assert process.ask("regex", "a", 60.0) == []
        limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
        assert next(line.split()[3] for line in limits if line.startswith("Max address space")) == str(MOST_MEMORY)
    assert MOST_MEMORY == 2 * 1024**3


async def test_a_grammar_that_takes_long_is_refused_in_time_and_holds_up_nobody() -> None:
    before = checkers()
    early = [Grammar("choice", f'["{letter}"]') for letter in "bc"]
    for seconds in (1, 4):  # on a busy machine a short check may take as long as the shorter limit
        check = GrammarCheck(most_seconds=seconds)
        started = await asyncio.gather(*map(check.why_not, early))  # both processes
        begun = time.monotonic()
        long = asyncio.ensure_future(check.why_not(LONG))
        await asyncio.sleep(0)
        short = await check.why_not(Grammar("choice", '["a"]'))
        is_first = not long.done()
        assert f"within {seconds} s" in str(await long)
        assert checkers() - before <= {process.pid for process in check._idle}, "those that took long are ended"
        before = checkers()
        assert time.monotonic() - begun < 20  # and not as long as it would take, several times over
        if is_first and [*started, short] == [None] * 3:
            return
    pytest.fail(f"A short check waited for a long one: {is_first=}, {started=}, {short=}.")


async def test_a_checker_that_died_while_it_was_idle_is_no_verdict_on_the_next_grammar() -> None:
    check = GrammarCheck()
    assert await check.why_not(Grammar("regex", "[ab]")) is None
    os.kill(check._idle[0].pid, signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert await check.why_not(Grammar("regex", "[cd]")) is None


async def test_a_grammar_is_checked_where_a_thousand_connections_are_open(request: pytest.FixtureRequest) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300), hard))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    with contextlib.ExitStack() as opened:
        highest = 0
        while highest < 1100:
            highest = os.open(os.devnull, os.O_RDONLY)
            opened.callback(os.close, highest)
        process = GrammarProcess()
        opened.callback(process.close)
        assert process.ask("regex", "[ab]", 30.0) == []
        assert await GrammarCheck().why_not(Grammar("regex", "[ab]")) is None


async def test_a_process_that_was_asked_and_has_not_answered_is_ended_whatever_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[GrammarProcess] = []

    def fails(process: GrammarProcess, kind: str, source: str, seconds: float) -> None:
        asked.append(process)
        raise MemoryError

    check = GrammarCheck()
    assert await check.why_not(Grammar("regex", "[ab]")) is None
    monkeypatch.setattr(GrammarProcess, "ask", fails)
    for _ in range(2):  # one that was idle, and one that was started for it
        with pytest.raises(MemoryError):
            await check.why_not(Grammar("regex", "[cd]"))
    assert len(set(asked)) == 2
    assert not any(process.close.alive for process in asked)


async def test_what_is_known_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck()
    good, bad = Grammar("regex", "a"), Grammar("regex", "a(")
    verifications = [await check.why_not(good), await check.why_not(bad)]
    monkeypatch.setattr(check, "_ask", None)
    assert [await check.why_not(good), await check.why_not(bad)] == verifications
    assert verifications[0] is None
    assert "unclosed group" in str(verifications[1])


async def test_gbnf_that_takes_long_to_read_is_refused_and_holds_no_other(router: Any) -> None:
    check = router.service.grammars = GrammarCheck(most_seconds=0.3)
    pauses: list[float] = []
    while len(pauses) < 3 and min(pauses, default=1.0) >= 1.0:  # the machine itself may stop now and then
        text = 'root ::= "a"' + "\n" * (200_000 + len(pauses))  # several minutes in the converter
        asked = asyncio.create_task(
            router.post("/v1/completions", prompt="x", max_tokens=1, structured_outputs={"grammar": text})
        )
        longest, last = 0.0, time.monotonic()
        while not asked.done():
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        answer = await asked
        assert answer.status_code == 400
        assert "GBNF that cannot be read within 0.3 s" in answer.json()["error"]["message"]
        assert check._idle == []
        pauses.append(longest)
    assert min(pauses) < 1.0, pauses


def test_schemas_in_a_grammar_of_rules_are_read_like_others() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"pattern": "^.$", "format": "<a>"}}
    with collect_warnings() as warnings:
        grammar = lark_grammar(f'start: "a" x // %json 1\nx: %json {json.dumps(schema)} | "%json"', "grammar")
    assert "`uniqueItems`, `format: '<a>'`" in warnings[0]
    begin, _, rest = grammar.source.partition("\nx: %json ")
    assert begin == 'start: "a" x // %json 1'
    written, end = json.JSONDecoder().raw_decode(rest)
    assert rest[end:] == ' | "%json"'
    assert written.pop("x-guidance")["coerce_one_of"] is True
    assert written == {"type": "array", "items": {"pattern": r"^[^\n\r\u2028\u2029]$"}}
    compile_grammar(_bytes_and(frozenset()), "lark", grammar.source)
    for text in ("start: %json 5", "start: %json {", 'start: %json {"x-guidance": {}}', "start: %json"):
        with pytest.raises(InvalidRequest, match="needs a JSON schema behind `%json`"):
            lark_grammar(text, "grammar")
    with pytest.raises(InvalidRequest, match="special token"):
        lark_grammar("start: %json {} <eos>", "grammar")


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}}


ODD: dict[str, Any] = {"$ref": "#/$defs/big"}


def test_parts_with_many_ways_on_are_tried_by_themselves() -> None:
    definitions = {"big": optional(600), "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]}}
    halves = {"anyOf": [optional(300), {"allOf": [optional(300)]}]}
    required = optional(900) | {"required": [f"p{number}" for number in range(900)]}
    inside = {"a": ODD, "b": {"items": halves}, "c": required, "d": {"$ref": "#/$defs/loop"}, "e": optional(400)}
    schema = {"type": "object", "properties": inside, "$defs": definitions}
    tried = [json.loads(part) for part in parts_to_try("json_schema", json.dumps(schema))]
    assert [part.pop("$defs") for part in tried] == [definitions] * 3
    assert sorted(map(json.dumps, tried)) == sorted(map(json.dumps, [ODD, halves, optional(600)]))
    rules = f'start: "a" x\nx: %json {json.dumps(optional(600) | {"x-guidance": {}})}'
    assert parts_to_try("lark", rules) == [json.dumps(optional(600), separators=(",", ":"))]
    assert parts_to_try("regex", json.dumps(schema)) == []


async def test_what_would_fail_within_a_text_is_refused_before_it() -> None:
    inside = {"type": "array", "items": {"properties": optional(1540)["properties"]}}  # of any type
    pattern = {"type": "object", "properties": {"n": {"type": "null"}, "a": {"pattern": "^((.{0,50}a){0,50}b){0,50}$"}}}
    check = GrammarCheck(most_seconds=30.0)  # on a busy machine
    for schema, reason in (
        (inside, "about 1536 optional properties"),
        (pattern | {"required": ["n", "a"]}, "cannot be followed: a regular expression"),
    ):
        why = await check.why_not(json_schema_grammar(schema, "response_format"))
        assert why is not None
        assert reason in why
    assert await check.why_not(json_schema_grammar(optional(1333), "response_format")) is None


async def test_a_long_schema_does_not_hold_the_event_loop(router: Any) -> None:
    inner = {f"q{number}": {"anyOf": [{"pattern": "^[a-z]{1,4}$"}, {"maxLength": 3}]} for number in range(10)}
    schema = {"properties": {f"p{number}": {"properties": inner, "required": ["q1"]} for number in range(500)}}
    content = json.dumps({"prompt": "x", "structured_outputs": {"json": schema}}).encode()
    begun = time.monotonic()
    enforceable(schema, "structured_outputs", strict=False)
    walk = time.monotonic() - begun
    pauses: list[float] = []
    while len(pauses) < 5 and min(pauses, default=walk) >= walk / 2:  # the machine itself may stop now and then
        asked = asyncio.create_task(
            router.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        )
        longest, last = 0.0, time.monotonic()
        while not asked.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert "at most 262144" in (await asked).json()["error"]["message"]
        pauses.append(longest)
    assert min(pauses) < walk / 2, (pauses, walk)


@pytest.mark.parametrize(
    ("texts", "words", "left"),
    [
        (["yes", "no"], ["yes"], ["no"]),
        (["yes, sir", "yesterday", "no"], [" yes"], ["yesterday", "no"]),
        (["a!", "b?"], ["!"], ["b?"]),
        (["é", "éa", "(x)"], ["é", "x)"], ["éa"]),
        (["yes", "no"], ["maybe", " "], ["yes", "no"]),
    ],
)
async def test_a_choice_has_no_text_with_a_bad_word(
    texts: list[str], words: list[str], left: list[str], start: Start, seen: Seen
) -> None:
    async with start() as router:
        await router.complete(prompt="x", max_tokens=3, structured_outputs={"choice": texts}, bad_words=words)
        assert seen.take()[-1].sampling.grammar == Grammar("choice", orjson.dumps(left).decode())


async def test_bad_words_of_every_text_of_a_choice_are_refused(start: Start) -> None:
    async with start() as router:
        answer = await router.post(
            "/v1/completions", prompt="x", structured_outputs={"choice": ["yes", "oh, yes"]}, bad_words=["yes"]
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "bad_words", "contradictory_constraints")


def an_object(value: Any, *, required: bool = True) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": value}, "required": ["a"] if required else []}


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ({"json": an_object({"enum": ["yes", "oh, yes", "no"]})}, {"json": an_object({"enum": ["no"]})}),
        ({"json": an_object({"const": "yes"}, required=False)}, {"json": an_object(False, required=False)}),
        ({"json": {"anyOf": [{"const": "yes"}, {"const": "yesterday"}]}},
         {"json": {"anyOf": [{"const": "yesterday"}]}}),
        ({"json": an_object({"type": "string", "pattern": "^(oh )?(yes|no)$"})},
         {"json": an_object({"type": "string", "enum": ["no", "oh no"]})}),
        ({"json": {"type": "object", "properties": {"yes": {}, "no": {}}}},
         {"json": {"type": "object", "properties": {"yes": False, "no": {}}}}),
        ({"regex": "yes|no"}, {"choice": ["no"]}),
        ({"json": {"type": "string", "pattern": "^y+es$"}}, {"json": {"type": "string", "pattern": "^y+es$"}}),
        ({"regex": "y+es"}, {"regex": "y+es"}),
    ],
)  # fmt: skip
def test_what_a_schema_lists_has_no_bad_word(asked: Any, left: Any) -> None:
    body = CompletionBody(prompt="x", structured_outputs=asked, bad_words=["yes"])
    plain = CompletionBody(prompt="x", structured_outputs=left)
    if "json" in left:
        made = body.wanted_grammar()
        assert made is not None
        assert (made.kind, orjson.loads(made.source)) == ("json_schema", left["json"])
    else:
        assert body.wanted_grammar() == plain.wanted_grammar()


TOO_LARGE: list[tuple[dict[str, Any], list[str]]] = [
    ({"json": {"enum": ["y" * 20] * 40_000}}, [f"bad{number}" for number in range(500)]),
    ({"json": {"anyOf": [{"type": "string", "pattern": "^" + "(a|b)?" * 20 + "$"}] * 6_000}}, ["b"]),
    ({"json": {"anyOf": [{"type": "string", "pattern": "^" + "a" * 120 + "$"}] * 800}}, ["b"]),
    ({"regex": "(" * 3_000 + "a" + ")" * 3_000}, ["b"]),
    ({"regex": "a" * 100_000}, ["b"]),
    ({"choice": ["a" * 20] * 9_000}, ["a" * 19 + str(number) for number in range(500)]),
]


def test_bad_words_and_grammars_too_large_to_be_compared_are_left_as_they_are() -> None:
    for asked, words in TOO_LARGE:
        plain = CompletionBody(prompt="x", structured_outputs=asked).wanted_grammar()
        begun = time.thread_time()
        found = without_bad_words(plain, words)
        assert time.thread_time() - begun < 1  # 70 s for the first without a bound
        assert found == plain


EMPTY = [
    {"json": {"const": "yes"}},
    {"json": an_object({"enum": ["yes", "oh, yes"]})},
    {"json": an_object({"type": "string", "pattern": "^(yes|yes sir)$"})},
    {"json": {"type": "object", "required": ["yes"]}},
    {"json": {"anyOf": [{"const": "yes"}, an_object({"$ref": "#/$defs/x"})], "$defs": {"x": {"const": ["yes"]}}}},
    {"json": {"type": "array", "items": {"const": "yes"}, "minItems": 1}},
    {"json": {"allOf": [{"type": "string"}, {"enum": ["yes"]}]}},
    {"regex": "(oh )?yes"},
]


@pytest.mark.parametrize(
    ("path", "prompt"), [("completions", {"prompt": "x"}), ("chat/completions", {"messages": USER})]
)
async def test_bad_words_of_every_value_of_a_schema_are_refused(path: str, prompt: Any, router: Any) -> None:
    for asked in EMPTY:
        answer = await router.post(f"/v1/{path}", **prompt, structured_outputs=asked, bad_words=["yes"])
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "bad_words", "contradictory_constraints")
