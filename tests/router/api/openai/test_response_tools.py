"""Custom tools, namespaces, hosted tools and a coding agent's request at `/v1/responses`."""

import json
from pathlib import Path
from typing import Any

import pytest
from doubles.router.whole_router import Seen
from doubles.tokenizers import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from space_router.api.openai.answers import ResponseEvent
from space_router.api.openai.response_tools import CustomInput, custom_arguments

ROOM = {"window": 4096, "num_blocks": 2048}
END = "<|endoftext|>"
PATCH = 'one "two"\n\tZürich \\ 😀'
PATCH_CALL = "<tool_call>\n" + json.dumps({"name": "patch", "arguments": {"input": PATCH}}) + "\n</tool_call>" + END
CUSTOM = {"type": "custom", "name": "patch", "description": "Change a file.", "format": {"type": "text"}}
AGENT = json.loads(Path(__file__).with_name("coding_agent_request.json").read_text(encoding="utf-8"))["body"]
"""A request of Codex 0.171.0 after two calls of tools; its texts are replaced by their lengths."""


async def events(router: Any, **body: Any) -> list[dict[str, Any]]:
    answer = await router.post("/v1/responses", **{"input": "Hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    found = [json.loads(block.split("\ndata: ")[1]) for block in answer.text.removesuffix("\n\n").split("\n\n")]
    for place, event in enumerate(found):
        ResponseEvent.model_validate(event)
        assert event["sequence_number"] == place
    return found


def prompt_of(seen: Seen) -> str:
    return tiny_tokenizer().decode(list(seen.take()[-1].prompt_ids), skip_special_tokens=False)


async def test_a_custom_tool_gets_its_text(start: Any, seen: Seen) -> None:
    async with start(PATCH_CALL, **ROOM) as router:
        found = await events(router, tools=[CUSTOM])
        kinds = [event["type"] for event in found]
        assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert kinds[-3:] == [
            "response.custom_tool_call_input.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert set(kinds[3:-3]) == {"response.custom_tool_call_input.delta"}
        assert len(kinds) > 8
        assert "".join(event["delta"] for event in found[3:-3]) == found[-3]["input"] == PATCH
        item = found[-1]["response"]["output"][0]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", PATCH)
        assert found[-1]["response"]["tools"] == [CUSTOM]
        assert '"properties": {"input": {"type": "string"}}' in prompt_of(seen)
        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
        turns = [{"role": "user", "content": "Hi"}, item, output]
        assert (await router.post("/v1/responses", input=turns, tools=[CUSTOM])).status_code == 200
        prompt = prompt_of(seen)
        assert '{"name": "patch", "arguments": ' + json.dumps({"input": PATCH}, ensure_ascii=False) in prompt
        assert "<tool_response>\ndone\n</tool_response>" in prompt


async def test_grammars_of_custom_tools_are_enforced_or_named(start: Any, seen: Seen) -> None:
    regex = {**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}}
    lark = {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}}
    async with start(PATCH_CALL, **ROOM) as router:
        choice = {"type": "custom", "name": "patch"}
        made = await router.post("/v1/responses", input="Hi", tools=[regex], tool_choice=choice)
        assert made.status_code == 200, made.text
        grammar = seen.take()[-1].sampling.grammar
        assert grammar is not None
        assert "^(?:[a-z]+)$" in grammar.source
        made = await router.post("/v1/responses", input="Hi", tools=[lark])
        assert "not enforced" in made.headers["warning"]
        assert 'start: \\"x\\"' in prompt_of(seen)


async def test_tools_of_a_namespace_keep_their_names(start: Any, seen: Seen) -> None:
    inner = {"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}}
    space = {"type": "namespace", "name": "agents", "description": "Of agents.", "tools": [inner]}
    call = '<tool_call>\n{"name": "agents__close", "arguments": {}}\n</tool_call>' + END
    async with start(call, **ROOM) as router:
        found = (await events(router, tools=[space, {**inner, "strict": False}]))[-1]["response"]
        item = found["output"][0]
        assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "close")
        assert prompt_of(seen).count('"name": "agents__close"') == 1
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
        turns = [{"role": "user", "content": "Hi"}, item, output]
        named = {"type": "function", "name": "close"}
        made = await router.post("/v1/responses", input=turns, tools=[space], tool_choice=named)
        assert made.status_code == 200, made.text
        assert '<tool_call>\n{"name": "agents__close", "arguments": {}}' in prompt_of(seen)


async def test_hosted_tools_and_their_items_are_left_out_with_a_warning(start: Any, seen: Seen) -> None:
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "local_shell"}]
    turns = [{"role": "user", "content": "Hi"}, {"type": "web_search_call", "id": "ws_1", "status": "completed"}]
    async with start("Hello. " + END, **ROOM) as router:
        made = await router.post("/v1/responses", input=turns, tools=hosted)
        assert made.status_code == 200, made.text
        assert made.json()["tools"] == []
        for name in ("web_search", "local_shell", "web_search_call"):
            assert name in made.headers["warning"]
        await router.refuses(
            "/v1/responses", "tool_choice", "local_shell", input="Hi", tools=hosted, tool_choice={"type": "local_shell"}
        )


async def test_a_coding_agents_request_is_answered(start: Any) -> None:
    async with start("Done. " + END, window=32768, num_blocks=4096) as router:
        found = await events(router, **AGENT)
        assert found[-1]["type"] == "response.completed"
        assert found[-1]["response"]["output"][0]["content"][0]["text"] == "Done. "


async def test_truncation_leaves_the_oldest_turns_out(start: Any, seen: Seen) -> None:
    talk = []
    for number in range(8):
        talk += [{"role": "user", "content": f"Question {number} {'x' * 40}"}]
        talk += [{"role": "assistant", "content": f"Answer {number} {'y' * 40}"}]
    talk += [{"role": "user", "content": "The last one"}]
    async with start("Hello. " + END, window=512, num_blocks=256) as router:
        await router.refuses("/v1/responses", "input", "512", input=talk, instructions="Be brief.")
        made = await router.post("/v1/responses", input=talk, instructions="Be brief.", truncation="auto")
        assert made.status_code == 200, made.text
        assert made.json()["truncation"] == "auto"
        assert "left out the first" in made.headers["warning"]
        prompt = prompt_of(seen)
        assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQuestion")
        assert "Question 0" not in prompt
        assert "Question 7" in prompt
        assert len(tiny_tokenizer().encode(prompt)) > 300  # as much as fits
        whole = await router.post("/v1/responses", input="Hi", truncation="auto")
        assert "warning" not in whole.headers
        await router.refuses("/v1/responses", "input", "512", input="x" * 600, truncation="auto")


@given(st.text(), st.data())
def test_the_text_of_a_custom_tool_is_the_same_in_any_pieces(text: str, data: st.DataObject) -> None:
    ascii_only = data.draw(st.booleans())
    written = json.dumps({"input": text}, ensure_ascii=ascii_only)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=6)))
    reader = CustomInput()
    pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    assert "".join(reader.push(piece) for piece in pieces) + reader.finish() == text


@pytest.mark.parametrize("written", ["{}", '{"other": 1}', '"text"', "[1]", '{ "input" : 3 }'])
def test_other_arguments_are_given_as_they_are(written: str) -> None:
    reader = CustomInput()
    assert "".join(reader.push(character) for character in written) + reader.finish() == written


def test_arguments_of_an_earlier_call_are_those_that_were_written() -> None:
    assert json.loads(custom_arguments(PATCH)) == {"input": PATCH}
