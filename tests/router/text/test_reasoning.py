"""Reasoning and the answer behind it are separated, whatever the pieces a text comes in."""

from collections import Counter
from typing import Any, NamedTuple

import pytest
from doubles.thinking import read_pieces
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from space_common.grammar import compile_grammar, lark
from space_router.config import REASONING_PARSERS, ServeConfig, settings
from space_router.text.harmony import MARKERS
from space_router.text.reasoning import (
    FORMATS,
    AnswerReasoning,
    ThinkingEnd,
    ThinkingRules,
    at_end,
    form_with,
    recognised,
)
from space_router.text.tokenizer import SpecialTokens
from space_router.text.tool_calls import ToolCallReader, calls_only
from space_router.text.tool_parsers import formats

TOOLS = frozenset({"f", "get_weather"})


class Read(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]] = []  # noqa: RUF012 (of a tuple)


def read(name: str, pieces: list[str], *, inside: bool = False, tools: str | None = "hermes") -> Read:
    answer = None if tools is None else formats.FORMATS[tools].form
    reader = ToolCallReader(form_with(AnswerReasoning(FORMATS[name], inside), answer), TOOLS)
    return Read(*read_pieces(reader, pieces))


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HARMONY_CALL = (
    "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city":"San Francisco"}<|call|>'
)
TEXTS: list[tuple[str, bool, str, Read]] = [
    ("qwen3", False, "<think>\nOne.\nTwo.\n</think>\n\nThree.", Read("One.\nTwo.", "Three.")),
    ("qwen3", True, "One.\n</think>\n\nThree.", Read("One.", "Three.")),
    ("qwen3", True, "<think>\nOne.\n</think>\n\nThree.", Read("One.", "Three.")),
    ("qwen3", False, "Three.", Read("", "Three.")),
    ("qwen3", False, "  Three. <think>x</think>", Read("", "  Three. <think>x</think>")),
    ("qwen3", False, "<think>\n\n</think>\n\nThree.", Read("", "Three.")),
    ("qwen3", True, "One, cut o", Read("One, cut o", "")),
    ("qwen3", True, "One </thin", Read("One </thin", "")),
    ("qwen3", False, "<thin", Read("", "<thin")),
    ("qwen3", True, f"I call f.</think>\n\n{CALL}", Read("I call f.", "", [("f", '{"a": 1}')])),
    ("qwen3", True, f"Not {CALL} yet</think>Yes\n{CALL}", Read(f"Not {CALL} yet", "Yes", [("f", '{"a": 1}')])),
    ("deepseek_r1", True, "a </thi> b</think>c", Read("a </thi> b", "c")),
    ("glm45", False, "\n<think>One</think>\nTwo", Read("One", "Two")),
    ("deepseek_r1", False, "<think>a</think>\n<response>b</response>", Read("a", "b")),
    ("granite", False, "Here is my thought process:\nOne.\n\nHere is my response:\n Two", Read("One.", "Two")),
    ("granite", False, "Here's my thought process: One. Here's my response: Two", Read("One.", "Two")),
    ("granite", False, "Here is my answer.", Read("", "Here is my answer.")),
    ("mistral", False, "[THINK]One[/THINK]Two", Read("One", "Two")),
    ("seed_oss", True, "One\n</seed:think>\nTwo", Read("One", "Two")),
    ("gemma4", False, "<|channel>thought\nOne\n<channel|>Two", Read("One", "Two")),
    (
        "openai_gptoss",
        False,
        "<|channel|>analysis<|message|>User asks.<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4.",
        Read("User asks.", "2 + 2 = 4."),
    ),
    ("openai_gptoss", False, HARMONY_CALL, Read("Need to use function get_weather.", "",
                                                [("get_weather", '{"city":"San Francisco"}')])),
    (
        "openai_gptoss",
        False,
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
        Read("A", "I look.", [("f", '{"a": 1}')]),
    ),
    ("openai_gptoss", False, "<|channel|>final<|message|>Hi", Read("", "Hi")),
    ("openai_gptoss", False, "<|channel|>analysis<|message|>cut <|en", Read("cut", "")),
    ("openai_gptoss", False, "<|channel|>analysis<|message|>A<|end|><|start|>assist", Read("A", "")),
    ("minimax_m3", False, "</mm:think>Two", Read("", "Two")),
    ("minimax_m3", False, " </mm:thi", Read("", " </mm:thi")),
]  # fmt: skip

MARKS = {
    "deepseek_r1": ("<think>\n", "\n</think>\n\n"),
    "granite": ("Here is my thought process:\n", "\n\nHere is my response:\n"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>\n", "\n</seed:think>\n"),
    "gemma4": ("<|channel>thought\n", "\n<channel|>"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "hy_v3": ("<think:opensource>", "</think:opensource>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
}
"""What stands before and behind reasoning in each family's published template, line breaks included."""


def texts_between(start: str, end: str) -> list[tuple[bool, str, Read]]:
    """How a model thinks between these marks: whether the prompt ends with the first, the text, and what it says."""
    opens, ends = start.strip(), end.strip()
    python = 'def f(x):\n    return {"a": [x]}  # <b> </i> [/b]'
    return [
        (False, f"{start}The sum is 4.{end}4", Read("The sum is 4.", "4")),
        (True, f"The sum is 4.{end}4", Read("The sum is 4.", "4")),
        (True, f"{start}The sum is 4.{end}4", Read("The sum is 4.", "4")),
        (False, f"{start}First.\n\n- a\n- b\n\nLast.{end}Done.\n\nBye.",
         Read("First.\n\n- a\n- b\n\nLast.", "Done.\n\nBye.")),
        (False, f"{start}{end}No thought.", Read("", "No thought.")),
        (False, f"{opens}{ends}No thought.", Read("", "No thought.")),
        (False, f"{opens}Tight.{ends}So.", Read("Tight.", "So.")),
        (False, f"\n {start} \n Spaced. \n {end} \n So.", Read("Spaced.", "So.")),
        (False, f"{start}Only a thought.{end}", Read("Only a thought.", "")),
        (False, f"{start}A thought that is cu", Read("A thought that is cu", "")),
        (True, f"A thought {ends[:-1]}", Read(f"A thought {ends[:-1]}", "")),
        (False, opens[:-1], Read("", opens[:-1])),
        (False, "No thought at all.", Read("", "No thought at all.")),
        (False, f"First {opens} then {ends} there.", Read("", f"First {opens} then {ends} there.")),
        (False, f"{start}{python}{end}{python}", Read(python, python)),
        (False, f"{start}天气 🌧 Zürich{end}北京 ☀", Read("天气 🌧 Zürich", "北京 ☀")),
        (True, f"{ends[:3]} {ends[:-1]} {end}{ends[:-1]}!", Read(f"{ends[:3]} {ends[:-1]}", f"{ends[:-1]}!")),
        (False, f"{start}One.{end}Two {ends} {opens} three.", Read("One.", f"Two {ends} {opens} three.")),
        (False, f'{start}As JSON.{end}{{"a": [1, 2]}}', Read("As JSON.", '{"a": [1, 2]}')),
        (True, f"I call f.{end}{CALL}", Read("I call f.", "", [("f", '{"a": 1}')])),
        (False, f"{start}Not {CALL} yet.{end}Now.\n{CALL}\n{CALL}",
         Read(f"Not {CALL} yet.", "Now.", [("f", '{"a": 1}'), ("f", '{"a": 1}')])),
    ]  # fmt: skip


ANALYSIS, ASSISTANT = "<|channel|>analysis<|message|>", "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO_F = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
HARMONY_TEXTS = [
    (f"{ANALYSIS}One.\n\nTwo.<|end|>{ASSISTANT}{FINAL}Three.\n\nFour.<|return|>",
     Read("One.\n\nTwo.", "Three.\n\nFour.")),
    (f"{ANALYSIS}<|end|>{ASSISTANT}{FINAL}No thought.", Read("", "No thought.")),
    (f"{FINAL}A <b> {{}} [1] </think> |> < | channel.", Read("", "A <b> {} [1] </think> |> < | channel.")),
    (f"{ANALYSIS}天气 🌧<|end|>{ASSISTANT}{FINAL}北京 ☀<|return|>", Read("天气 🌧", "北京 ☀")),
    (f"{ANALYSIS}A<|end|>{ASSISTANT}{ANALYSIS}B<|end|>{ASSISTANT}{FINAL}C", Read("A\nB", "C")),
    (f"{ANALYSIS}I call f.<|end|>{ASSISTANT}{TO_F}<|call|>", Read("I call f.", "", [("f", '{"a": 1}')])),
    (f"{TO_F}<|call|>", Read("", "", [("f", '{"a": 1}')])),
    (f"{ANALYSIS}Say to=functions.f in words.<|end|>{ASSISTANT}{FINAL}No.",
     Read("Say to=functions.f in words.", "No.")),
    (f"{ANALYSIS}A<|end|>{ASSISTANT}<|channel|>commentary<|message|>Plan: call f.<|end|>{ASSISTANT}{TO_F}<|call|>",
     Read("A", "Plan: call f.", [("f", '{"a": 1}')])),
    (f"{ANALYSIS}A thought that is cu", Read("A thought that is cu", "")),
    (f"{ANALYSIS}A<|end|>{ASSISTANT}{FINAL}An answer that is <|ret", Read("A", "An answer that is ")),
    (f"{ANALYSIS}A<|end|>{ASSISTANT}<|channel|>fin", Read("A", "")),
    (f'{ANALYSIS}As JSON.<|end|>{ASSISTANT}<|channel|>final <|constrain|>json<|message|>{{"a": 1}}<|return|>',
     Read("As JSON.", '{"a": 1}')),
    (f'{ANALYSIS}A<|end|>{ASSISTANT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}<|call|>',
     Read("A", "", [("f", '{"a": 1}')])),
]  # fmt: skip

TEXTS += [(name, *row) for name, marks in MARKS.items() for row in texts_between(*marks)]
TEXTS += [("openai_gptoss", False, *row) for row in HARMONY_TEXTS]


def test_every_format_has_twenty_texts() -> None:
    numbers = Counter(FORMATS[name].name for name, *_ in TEXTS)
    assert numbers.keys() == {known.name for known in FORMATS.values()}
    assert {name: number for name, number in numbers.items() if number < 20} == {}


@pytest.mark.parametrize(("name", "inside", "text", "wanted"), TEXTS)
def test_a_text_is_reasoning_content_and_calls_whole_and_in_any_pieces(
    name: str, inside: bool, text: str, wanted: Read
) -> None:
    assert read(name, [text], inside=inside) == wanted
    assert read(name, list(text), inside=inside) == wanted
    for place in range(len(text) + 1):
        assert read(name, [text[:place], text[place:]], inside=inside) == wanted
    if not wanted.calls and "<tool_call>" not in text:
        assert read(name, [text], inside=inside, tools=None) == wanted


@pytest.mark.parametrize(("name", "inside", "text"), [row[:3] for row in TEXTS])
def test_the_end_of_reasoning_is_found_in_any_pieces(name: str, inside: bool, text: str) -> None:
    thinking = AnswerReasoning(FORMATS[name], inside)

    def found(*pieces: str) -> int | None:
        end = ThinkingEnd(thinking)
        for piece in pieces:
            end.push(piece)
        return end.position

    whole = found(text)
    reasoning = read(name, [text], inside=inside).reasoning
    assert (whole == 0) == (not inside and not text.lstrip().startswith(thinking.format.starts)) or whole is None
    if whole:
        assert text[:whole].endswith(thinking.format.ends)
        messages = reasoning.split("\n") if thinking.format.channels else [reasoning]
        assert all(one in text[:whole] for one in messages)
    for place in range(len(text) + 1):
        assert found(text[:place], text[place:]) == whole
    assert found(*text) == whole


@pytest.mark.parametrize("name", FORMATS)
def test_of_a_forced_call_that_is_cut_in_its_reasoning_nothing_is_a_call(name: str) -> None:
    known = FORMATS[name]
    for inside in (False, True) if not known.channels else (False,):
        for text, is_call in (("Let me s", False), (f"Let me.{'<|end|>' if known.channels else known.ends[0]}", True)):
            form = form_with(AnswerReasoning(known, inside), formats.FORMATS["hermes"].form)
            whole = text if inside else known.starts[0] + text
            for pieces in ([whole], list(whole)):
                _, content, calls = read_pieces(ToolCallReader(form, ["f"], forced=True), pieces)
                assert (content, bool(calls)) == ("", is_call), (whole, pieces)


def test_an_answer_begins_in_reasoning_where_its_prompt_ends_in_it() -> None:
    known = FORMATS["qwen3"]
    assert at_end(known, "<|im_start|>assistant\n<think>\n") == AnswerReasoning(known, inside=True)
    assert at_end(known, "<|im_start|>assistant\n") == AnswerReasoning(known, inside=False)
    assert at_end(known, "<|im_start|>assistant\n<think>\n\n</think>\n\n") is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{%- set reasoning_content = message.content.split('</think>')[0] -%}", "deepseek_r1"),
        ("{{ '<seed:think>' + x + '</seed:think>' }}", "seed_oss"),
        ("{{ '[THINK]' + block.thinking + '[/THINK]' }}", "mistral"),
        ("{{- '<|start|>assistant<|channel|>analysis<|message|>' }}", "openai_gptoss"),
        ("{{ '<|channel>thought\\n' }}", "gemma4"),
        ("Write your thoughts after 'Here is my thought process:'", "granite"),
        ("{{ message.content }}", None),
        ("<|START_THINKING|>{{ message.tool_plan }}<|END_THINKING|>", "cohere_command3"),
        ("{%- set think_end_token = '</mm:think>' -%}", "minimax_m3"),
        ("{%- set think_end_token = '</think{}>'.format(HYTK) %}", "hy_v3"),
    ],
)
def test_the_format_is_recognised_by_the_template(template: str, name: str | None) -> None:
    known = recognised(template)
    assert (None if known is None else known.name) == name


def test_every_format_can_be_asked_for_by_its_name() -> None:
    assert sorted(FORMATS) == list(REASONING_PARSERS)
    _, flag = settings()["reasoning_parser"]
    assert [flag.parse(name) for name in ("auto", "off", *FORMATS)] == ["auto", "off", *FORMATS]
    assert ServeConfig().reasoning_parser == "auto"


END_ID, START_ID, EOS_ID = 256, 257, 258


class Words:
    """Bytes, the two markers as tokens of text, and harmony's as special ones."""

    bos_token_id = None
    eos_token_id = EOS_ID
    special_token_ids = tuple(range(EOS_ID, EOS_ID + 1 + len(MARKERS)))
    tokens = (
        *(bytes([byte]) for byte in range(256)), b"</think>", b"<think>", b"<end>", *(text.encode() for text in MARKERS)
    )  # fmt: skip

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Words()))
IDS = {"</think>": END_ID, "<think>": START_ID} | {text: EOS_ID + 1 + place for place, text in enumerate(MARKERS)}
NUM_IDS = len(Words.tokens)
ANSWERS = [
    ("json_schema", '{"type": "object", "required": ["x"]}', '{"x": 1}', '{"y": 1}'),
    ("json_object", "", '{"y": 1}', "[1]"),
    ("regex", "a+/b", "aa/b", "ab"),
    ("choice", '["yes", "no \\"thing\\""]', 'no "thing"', "perhaps"),
    ("lark", 'start: "a" B\nB: /b+/', "abb", "b"),
]


def ids(*pieces: str) -> list[int]:
    """Markers as their ids where they are a piece, other pieces as bytes."""
    return [id_ for piece in pieces for id_ in ([IDS[piece]] if piece in IDS else piece.encode())]


def allows(grammar: str, *pieces: str) -> bool:
    matcher: LLMatcher = compile_grammar(TOKENIZER, "lark", grammar)
    return matcher.try_consume_tokens(ids(*pieces)) == len(ids(*pieces)) and matcher.is_accepting()


def rules(name: str, *, inside: bool, budget: int | None = None, known: Any = IDS) -> ThinkingRules:
    return ThinkingRules.of(AnswerReasoning(FORMATS[name], inside), known.get, budget, NUM_IDS)


@pytest.mark.parametrize(("kind", "source", "right", "wrong"), ANSWERS)
@pytest.mark.parametrize("known", [IDS, {}])
def test_a_grammar_begins_behind_the_reasoning(kind: str, source: str, right: str, wrong: str, known: Any) -> None:
    answer = lark(kind, source)
    end = "</think>" if known else "</thi", "" if known else "nk>"
    inside = rules("qwen3", inside=True, known=known).before(answer)
    assert allows(inside, 'I {"think', *end, right)
    assert allows(inside, "\n", *end, "\n\n", right)
    assert not allows(inside, "I think", *end, wrong)
    assert not allows(inside, right)
    free = rules("qwen3", inside=False).before(answer)
    assert allows(free, right)
    assert allows(free, "<think>", "hm", "</think>", "\n", right)
    assert not allows(free, "<think>", "hm", "</think>", wrong)
    assert not allows(free, wrong)


@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_a_budget_ends_reasoning_at_its_last_token(budget: int) -> None:
    inside = rules("qwen3", inside=True, budget=budget).before(None)
    free = rules("qwen3", inside=False, budget=budget).before(None)
    for used in range(7):
        fits = used <= budget
        thought = ("x" * used, "</think>", "the <|call|> rest", "<|call|>", "!")
        assert allows(inside, *thought) == fits
        assert allows(free, "<think>", *thought) == fits
        assert allows(free, "\n", "<think>", *thought) == fits
    assert allows(free, "no reasoning at all", "<|call|>")
    matcher = compile_grammar(TOKENIZER, "lark", inside)
    assert matcher.try_consume_tokens(ids("x" * budget)) == budget
    mask = matcher.compute_bitmask()
    allowed = [id_ for id_ in range(NUM_IDS) if mask[id_ // 8] >> (id_ % 8) & 1]
    assert allowed == [END_ID]


def test_the_channels_of_harmony_have_the_same_rules() -> None:
    head = ("<|channel|>", "analysis", "<|message|>")
    tail = ("<|end|>", "<|start|>", "assistant", "<|channel|>")
    answer = rules("openai_gptoss", inside=False).before(lark("json_object", ""))
    assert allows(answer, *head, "hm", *tail, "final", "<|message|>", '{"a": 1}')
    assert allows(answer, "<|channel|>", "final", "<|message|>", '{"a": 1}')
    assert not allows(answer, *head, "hm", *tail, "final", "<|message|>", "text")
    short = rules("openai_gptoss", inside=False, budget=2).before(None)
    assert allows(short, *head, "ab", *tail, "final", "<|message|>", "hello")
    assert not allows(short, *head, "abc", *tail, "final", "<|message|>", "hello")


def test_the_tags_of_kimi_k3_have_the_same_rules() -> None:
    opens, closes, ends = MARKERS[:3]  # stand for its three special tokens
    known = dict(zip(("<|open|>", "<|close|>", "<|sep|>"), map(IDS.get, MARKERS), strict=False))
    end = ("hm", closes, "think", ends)
    response = (opens, "response", ends, '{"a": 1}', closes, "response", ends)
    answer = rules("kimi_k3", inside=True, known=known).before(lark("json_object", ""))
    assert allows(answer, *end, *response)
    assert not allows(answer, *response)
    assert not allows(answer, *end, *(piece.replace("1", "x") for piece in response))
    layout = formats.FORMATS["kimi_k3"].layout
    assert layout is not None
    calls = calls_only(layout, {"f": {"type": "object"}}, SpecialTokens({**known}), many=False)
    call = (closes, "response", ends, opens, "tools", ends, opens, 'call tool="f" index="1"', ends)
    call = (*call, closes, "call", ends, closes, "tools", ends)
    forced = rules("kimi_k3", inside=True, known=known).before(calls)
    assert allows(forced, *end, *response[:3], *call)
    assert not allows(forced, *end, *response[:3], *call, *response[4:])
    assert not allows(forced, *end, *response)
    short = rules("kimi_k3", inside=True, known=known, budget=2).before(None)
    assert allows(short, *end, *response)
    assert not allows(short, "h", *end, *response)
    assert not rules("kimi_k3", inside=True, known={}).can_count
    prompt = '<|open|>message role="assistant"<|sep|><|open|>'
    assert at_end(FORMATS["kimi_k3"], prompt + "response<|sep|>") is None
    found = at_end(FORMATS["kimi_k3"], prompt + "think<|sep|>")
    assert found is not None
    assert found.inside
