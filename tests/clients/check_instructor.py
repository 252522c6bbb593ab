"""instructor: pydantic models out of OpenAI's client and Anthropic's way of asking, by tools and by schemas."""

import importlib.metadata
from typing import Literal

import instructor
import openai
from checks import KEY, MODEL, QUESTION, URL, check, leave, version
from pydantic import BaseModel, ConfigDict, Field

version(importlib.metadata.version("instructor"))


class Trip(BaseModel):
    """A trip to a city."""

    model_config = ConfigDict(extra="forbid")  # else mode JSON_SCHEMA lets the model add what it likes
    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)


PLAIN = openai.OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
ASKED = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 96}

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    with check(f"a model by mode {mode.name}"):
        client = instructor.from_openai(PLAIN, mode=mode)
        found, completion = client.create_with_completion(response_model=Trip, max_retries=1, **ASKED)
        assert isinstance(found, Trip)
        assert completion.usage.completion_tokens

with check("a partial model, streamed, ends as the whole one"):
    client = instructor.from_openai(PLAIN, mode=instructor.Mode.TOOLS)
    parts = list(client.create_partial(response_model=Trip, max_retries=1, **ASKED))
    assert parts[-1].city in ("Oslo", "Paris")
    assert 1 <= parts[-1].days <= 9

leave()
