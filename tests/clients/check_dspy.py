"""DSPy: its language model over OpenAI's language, and a signature answered by schema."""

import importlib.metadata
import os
import tempfile
from pathlib import Path
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch its price list otherwise

import dspy
from agents import scripted
from checks import FORMAT, KEY, MODEL, PROMPT, QUESTION, URL, check, is_answer, leave, version

version(importlib.metadata.version("dspy"))


def model(kind: str = "chat", max_tokens: int = 24, url: str = URL) -> dspy.LM:
    name = f"openai/{MODEL}" if kind == "chat" else f"text-completion-openai/{MODEL}"
    return dspy.LM(
        name, api_base=url + "/v1", api_key=KEY, model_type=kind, temperature=0, max_tokens=max_tokens, cache=False,
        num_retries=0,
    )  # fmt: skip


with check("a language model: chats and texts"):
    (text,) = model()(messages=QUESTION)
    assert text
    assert model()(messages=QUESTION) == [text]
    (plain,) = model("text")(prompt=PROMPT)
    assert plain

with check("a response format by schema"):
    (text,) = model(max_tokens=96)(messages=QUESTION, response_format=FORMAT)
    assert is_answer(text)


class Plan(dspy.Signature):
    """Plan a trip."""

    wish: str = dspy.InputField()
    city: Literal["Oslo", "Paris"] = dspy.OutputField()


for adapter, reply in (
    (dspy.ChatAdapter(), "[[ ## city ## ]]\nOslo\n\n[[ ## completed ## ]]"),
    (dspy.JSONAdapter(), '{"city": "Oslo"}'),
):
    with (
        check(f"Predict with a {type(adapter).__name__}"),
        tempfile.TemporaryDirectory() as place,
        scripted(Path(place), [reply]) as (there, _),
        dspy.context(lm=model(max_tokens=96, url=there), adapter=adapter),
    ):
        assert dspy.Predict(Plan)(wish="north").city == "Oslo"

leave()
