"""smolagents' model for OpenAI's language: messages, streams, forced tool calls, schemas."""

import importlib.metadata
import tempfile
from pathlib import Path

import smolagents
from agents import scripted, tool_call
from checks import FORMAT, KEY, MODEL, QUESTION, URL, check, is_answer, leave, version
from smolagents import ChatMessage, MessageRole, OpenAIServerModel, tool

version(importlib.metadata.version("smolagents"))


@tool
def forecast(city: str, days: int) -> str:
    """The weather in a city.

    Args:
        city: its name
        days: how many from now
    """
    return f"rain in {city} for {days} days"


def model(url: str = URL, **more: object) -> OpenAIServerModel:
    settings = {"temperature": 0, "max_tokens": 32, **more}
    return OpenAIServerModel(model_id=MODEL, api_base=url + "/v1", api_key=KEY, **settings)


ASKED = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION[0]["content"]}])]

with check("generate and generate_stream give the same text, with usage"):
    whole = model().generate(ASKED)
    assert whole.content
    assert "".join(delta.content or "" for delta in model().generate_stream(ASKED)) == whole.content
    assert whole.token_usage.output_tokens

with check("a response format by schema"):
    assert is_answer(model(max_tokens=96).generate(ASKED, response_format=FORMAT).content)

with check("a tool is called, as ToolCallingAgent asks"):
    called = model(max_tokens=200).generate(ASKED, tools_to_call_from=[forecast])
    (call, *_) = called.tool_calls
    assert call.function.name == "forecast"

with check("stop sequences, as CodeAgent asks"):
    stopped = model(max_tokens=64).generate(ASKED, stop_sequences=["<end_code>", whole.content[4:7]])
    assert whole.content[4:7] not in stopped.content

with check("ToolCallingAgent calls a tool, takes its result, and answers; CodeAgent runs code"):
    calls = [tool_call("forecast", city="Oslo", days=2), tool_call("final_answer", answer="It rains.")]
    with tempfile.TemporaryDirectory() as place, scripted(Path(place), calls, "rain in Oslo for 2 days") as (there, _):
        calling = smolagents.ToolCallingAgent(tools=[forecast], model=model(url=there, max_tokens=400))
        assert calling.run("Does it rain?") == "It rains."
    code = ["I ask.\n<code>\nprint(forecast('Oslo', 2))\n</code>", "<code>\nfinal_answer('It rains.')\n</code>"]
    with tempfile.TemporaryDirectory() as place, scripted(Path(place), code, "rain in Oslo for 2 days") as (there, _):
        coding = smolagents.CodeAgent(tools=[forecast], model=model(url=there, max_tokens=400))
        assert coding.run("Does it rain?") == "It rains."

leave()
