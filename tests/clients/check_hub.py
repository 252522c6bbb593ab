"""`huggingface_hub.InferenceClient`: TGI's routes for texts, OpenAI's for conversations."""

import contextlib
import re
import warnings
from typing import Any

import huggingface_hub
from checks import (
    ANSWER,
    FORMAT,
    KEY,
    MODEL,
    NARROW_URL,
    PROMPT,
    QUESTION,
    TOOL,
    URL,
    check,
    is_answer,
    leave,
    raises,
    until,
    version,
)
from huggingface_hub import ChatCompletionInputFunctionName, ChatCompletionInputToolChoiceClass, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, OverloadedError, ValidationError

version(huggingface_hub.__version__)
warnings.simplefilter("error")  # it warns where it takes the server for something else
client = InferenceClient(URL, token=KEY)

with check("text_generation: a stream joins to the whole answer"):
    whole = client.text_generation(PROMPT, max_new_tokens=32, return_full_text=False)
    pieces = list(client.text_generation(PROMPT, max_new_tokens=32, stream=True))
    assert whole
    assert "".join(pieces) == whole
    assert client.text_generation(PROMPT, max_new_tokens=32) == PROMPT + whole  # as TGI's `/` does
    assert client.text_generation(PROMPT, max_new_tokens=32, return_full_text=True) == PROMPT + whole

with check("details: tokens with log-probabilities, the prompt's, the most probable, the reason"):
    asked: dict[str, Any] = {"max_new_tokens": 12, "details": True, "return_full_text": False}
    answer = client.text_generation(PROMPT, **asked, decoder_input_details=True, top_n_tokens=3)
    details = answer.details
    assert "".join(token.text for token in details.tokens) == answer.generated_text
    assert "".join(token.text for token in details.prefill) == PROMPT
    assert [entry.logprob is None for entry in details.prefill] == [True] + [False] * (len(details.prefill) - 1)
    for token, top in zip(
        details.tokens, details.top_tokens, strict=True
    ):  # the client leaves lists in lists as they are
        assert (token.id, token.logprob, len(top)) == (top[0]["id"], top[0]["logprob"], 3)
    assert (details.finish_reason, details.generated_tokens) == ("length", 12)
    events = list(client.text_generation(PROMPT, **asked, stream=True))
    assert [event.token.id for event in events] == [token.id for token in details.tokens]
    assert events[-1].generated_text == answer.generated_text
    assert events[-1].details.input_length == len(details.prefill)

with check("sampling: a seed repeats, best_of and stop"):
    sampled = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.9, "top_p": 1.0, "return_full_text": False}
    first = client.text_generation(PROMPT, **sampled, details=True)
    again = client.text_generation(PROMPT, **sampled, seed=first.details.seed)
    assert again == first.generated_text
    best = client.text_generation(PROMPT, **sampled, best_of=3, seed=5, details=True)
    assert len(best.details.best_of_sequences) == 2
    stopped = client.text_generation(
        "import os\nimport", max_new_tokens=40, stop=["\n"], details=True, return_full_text=False
    )
    assert "\n" not in stopped.generated_text
    assert stopped.details.finish_reason == "stop_sequence"

with check("chat_completion: a stream joins to the whole answer; log-probabilities; any model name it makes up"):
    asked = {"max_tokens": 24, "temperature": 0.0}
    answered = client.chat_completion(QUESTION, **asked)
    assert answered.choices[0].message.content
    parts = list(client.chat_completion(QUESTION, **asked, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == answered.choices[0].message.content
    assert answered.model == MODEL
    scored = client.chat_completion(QUESTION, **asked, logprobs=True, top_logprobs=2)
    assert len(scored.choices[0].logprobs.content) == scored.usage.completion_tokens
    named = InferenceClient(base_url=URL + "/v1", api_key=KEY).chat.completions.create(
        model=MODEL, messages=QUESTION, **asked
    )
    assert named.choices[0].message.content == answered.choices[0].message.content

with check("grammars of texts, schemas and tools of conversations"):
    spelled = client.text_generation(
        PROMPT, max_new_tokens=16, grammar={"type": "regex", "value": "[0-9]{3}"}, return_full_text=False
    )
    assert re.fullmatch("[0-9]{3}", spelled)
    assert is_answer(
        client.text_generation(
            PROMPT, max_new_tokens=64, grammar={"type": "json", "value": ANSWER}, return_full_text=False
        )
    )
    shaped = client.chat_completion(QUESTION, max_tokens=64, temperature=0.0, response_format=FORMAT)
    assert is_answer(shaped.choices[0].message.content)
    named = ChatCompletionInputToolChoiceClass(ChatCompletionInputFunctionName("forecast"))
    called = client.chat_completion(QUESTION, max_tokens=96, temperature=0.0, tools=[TOOL], tool_choice=named)
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == "forecast"
    assert is_answer(call.function.arguments)

with check("ValidationError, also for a stream"):
    for wrong in ({"temperature": -1.0}, {"max_new_tokens": 0}, {"max_new_tokens": 100_000}):
        bad = raises(ValidationError, lambda: client.text_generation(PROMPT, **wrong))  # noqa: B023
        assert "Input validation error" in str(bad)
        raises(ValidationError, lambda: list(client.text_generation(PROMPT, stream=True, **wrong)))  # noqa: B023

with check("OverloadedError, and HfHubHTTPError for a wrong key"):
    narrow = InferenceClient(NARROW_URL, token=KEY)
    busy = narrow.text_generation(PROMPT, max_new_tokens=900, stream=True, stop=["\0"])
    next(busy)
    raises(OverloadedError, lambda: narrow.text_generation(PROMPT))
    busy.close()
    denied = raises(HfHubHTTPError, lambda: InferenceClient(URL, token="wrong").chat_completion(QUESTION))
    assert denied.response.status_code == 401

with check("cancellation: a closed stream ends, and its place is free again"):

    def free() -> bool:
        try:
            return bool(narrow.text_generation(PROMPT, max_new_tokens=1))
        except OverloadedError:
            return False

    until(free, "the place of the stream that was closed above")
    left = []

    def taken() -> bool:
        """A place is free a moment after the answer that had it, and nobody waits here."""
        with contextlib.suppress(OverloadedError):
            left.append(narrow.text_generation(PROMPT, max_new_tokens=900, stream=True))
        return bool(left)

    until(taken, "a stream that begins")
    next(left[0])
    assert not free()
    left[0].close()
    until(free, "the place of a stream that was closed")

leave()
