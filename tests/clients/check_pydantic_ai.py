"""PydanticAI with its model for OpenAI's language: text, streams, outputs by tool and by schema, tools."""

import importlib.metadata
import tempfile
from pathlib import Path
from typing import Literal

from agents import scripted, tool_call
from checks import KEY, MODEL, QUESTION, URL, check, leave, raises, version
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

version(importlib.metadata.version("pydantic-ai-slim"))
TEXT = QUESTION[0]["content"]


class Trip(BaseModel):
    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)


def model(key: str = KEY, url: str = URL) -> OpenAIChatModel:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url + "/v1", api_key=key))


SHORT = {"temperature": 0, "max_tokens": 24}
LONG = {"temperature": 0, "max_tokens": 96}

with check("run_sync and run_stream_sync give the same text, with usage"):
    agent = Agent(model(), model_settings=SHORT)
    whole = agent.run_sync(TEXT)
    assert whole.output
    streamed = agent.run_stream_sync(TEXT)
    assert "".join(streamed.stream_text(delta=True, debounce_by=None)) == whole.output

with check("output types: by a forced tool and by a JSON schema"):
    for output in (ToolOutput(Trip, name="trip"), NativeOutput(Trip, name="trip")):
        found = Agent(model(), output_type=output, model_settings=LONG).run_sync(TEXT).output
        assert isinstance(found, Trip)

with check("an agent calls a tool, takes its result, and ends with its output type; streamed alike"):
    looked: list[str] = []
    calls = [tool_call("weather", city="Oslo"), tool_call("trip", city="Oslo", days=3)]
    with tempfile.TemporaryDirectory() as place, scripted(Path(place), calls) as (there, _):
        agent = Agent(model(url=there), output_type=ToolOutput(Trip, name="trip"))

        @agent.tool_plain
        def weather(city: Literal["Oslo", "Paris"]) -> str:
            """The weather in a city."""
            looked.append(city)
            return "rain"

        assert agent.run_sync("Where to?").output == Trip(city="Oslo", days=3)
        assert agent.run_stream_sync("Where to?").get_output() == Trip(city="Oslo", days=3)
    assert looked == ["Oslo", "Oslo"]

with check("ModelHTTPError for a wrong key, with the status"):
    error = raises(ModelHTTPError, lambda: Agent(model("wrong"), model_settings=SHORT).run_sync(TEXT))
    assert error.status_code == 401

leave()
