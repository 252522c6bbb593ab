"""LlamaIndex with its model for servers that speak OpenAI's language."""

import importlib.metadata
from typing import Literal

import openai
from checks import KEY, MODEL, PROMPT, QUESTION, URL, check, leave, raises, version
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

version(importlib.metadata.version("llama-index-llms-openai-like"))


class Trip(BaseModel):
    """A trip to a city."""

    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)


def model(is_chat_model: bool = True, key: str = KEY, max_tokens: int = 24) -> OpenAILike:
    return OpenAILike(
        model=MODEL, api_base=URL + "/v1", api_key=key, is_chat_model=is_chat_model, temperature=0,
        is_function_calling_model=True, max_tokens=max_tokens, max_retries=0, context_window=1024,
    )  # fmt: skip


ASKED = [ChatMessage(role="user", content=QUESTION[0]["content"])]

with check("chat and stream_chat give the same text"):
    whole = model().chat(ASKED).message.content
    assert whole
    assert "".join(part.delta or "" for part in model().stream_chat(ASKED)) == whole

with check("complete and stream_complete give the same text"):
    text = model(is_chat_model=False).complete(PROMPT).text
    assert text
    assert "".join(part.delta or "" for part in model(is_chat_model=False).stream_complete(PROMPT)) == text

with check("a structured prediction, and a tool that must be called"):
    shaped = model(max_tokens=96).as_structured_llm(Trip).chat(ASKED)
    assert isinstance(shaped.raw, Trip)

    def forecast(city: Literal["Oslo", "Paris"]) -> str:
        """The weather in a city."""
        return "rain"

    tool = FunctionTool.from_defaults(forecast)
    answer = model(max_tokens=96).chat_with_tools([tool], chat_history=ASKED, tool_required=True)
    calls = model().get_tool_calls_from_response(answer)
    assert calls[0].tool_name == "forecast"
    assert calls[0].tool_kwargs["city"] in ("Oslo", "Paris")

with check("AuthenticationError"):
    raises(openai.AuthenticationError, lambda: model(key="wrong").chat(ASKED))

leave()
